# `make demo` and `make test` do everything from a fresh clone: virtual environment, install, run.
# A second call reuses the environment; it is rebuilt only when the dependency files change.
PYTHON ?= python3
# PYRO_DAK_VENV names an environment that has everything already; nothing is installed then.
VENV := $(or $(PYRO_DAK_VENV),.venv)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test test-all test-python test-lowest test-wheel attack docs report lint bench clean

setup: $(if $(PYRO_DAK_VENV),,$(STAMP))

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
	  f"pyro_dak needs Python 3.11 or newer, got {v.major}.{v.minor}; call make with PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: setup
	$(BIN)/python -m experiments.demo

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile $(TESTS)

test-all: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -m ''

# `make test-python PYTHON=python3.12` runs the tests by another Python, in an environment of its own.
test-python:
	$(MAKE) test PYTHON=$(PYTHON) PYRO_DAK_VENV= \
	  VENV=.venv-$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')

# Needs minutes, a Python 3.11 and a few GB: the lowest versions that pyproject.toml names.
test-lowest: setup
	$(BIN)/python tests/scripts/lowest.py $(LOWEST)

# The wheel in empty environments: the core alone, then each extra by itself; EXTRAS="cli" for one.
test-wheel: EXTRAS ?= all
test-wheel: setup
	$(BIN)/python -m tests.scripts.wheel --constraints constraints.txt $(EXTRAS)

# Minutes of attacks on what docs/reliability.md promises; ATTACK="--only kills --kills 50".
attack: setup
	$(BIN)/python -m tests.attack $(ATTACK)

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir site

report: setup
	$(BIN)/python -m experiments.report

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy pyro_dak

bench: setup
	$(BIN)/python -m benchmarks $(BENCH)

clean:
	rm -rf .venv .venv-* site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
