# `make demo` and `make test` do everything from a fresh clone: virtual environment, install, run.
# A second call reuses the environment; it is rebuilt only when the dependency files change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test test-all lint bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
	  f"pyro_dak needs Python 3.11 or newer, got {v.major}.{v.minor}; call make with PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: setup
	$(BIN)/python -m experiments.prior
	$(BIN)/python -m experiments.mnist --dataset digits --model dak_mc --out results/demo

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-all: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -m ''

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy pyro_dak

bench: setup
	$(BIN)/python -m benchmarks.activation
	$(BIN)/python -m benchmarks.prediction
	$(BIN)/python -m benchmarks.images

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
