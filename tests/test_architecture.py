"""The layers of the package, read from its imports."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pyro_dak"

# Modules in one line may not import each other; all may import any line above theirs.
TORCH_ONLY = [
    ("precision", "validation"),
    (
        "boards",
        "compilation",
        "folding",
        "gathers",
        "grids",
        "kernels",
        "optimization",
        "quadrature",
    ),
    ("factors", "linear_maps"),
    ("local",),
    ("interpolation",),
    ("serving",),
    ("local_constants",),
    ("activation", "calibration", "chains", "coordinates", "importance", "metrics", "scaling"),
    ("gaussian",),
    ("additive",),
]
WITH_PYRO = [
    ("likelihoods",),
    ("priors",),
    ("model",),
    ("guides",),
    ("joint_guides",),
    ("objectives", "posterior"),
    ("config", "data", "prediction"),
    ("checkpoint", "loss", "mixtures"),
    ("ensembles", "history"),
    ("ensemble_training", "loop"),
    ("training",),
    ("draws",),
    ("densities",),
    ("potential", "weight_fits"),
    ("arviz_export", "checks", "comparison", "mcmc", "sbc"),
    ("diagnostics", "plots"),
    ("estimator_files", "estimator_rows", "table_files"),
    ("estimator_base",),
    ("estimators",),
    ("cli_scores", "tables"),
    ("cli",),
    ("__main__",),
]
RANK = {name: rank for rank, names in enumerate(TORCH_ONLY + WITH_PYRO) for name in names}
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")


def imported_names(path):
    """Dotted names of all that a file imports, wherever in the file; relative ones resolved."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def roots(path):
    return {name.split(".")[0] for name in imported_names(path)}


def files_of(folder):
    return sorted((ROOT / folder).rglob("*.py"))


def test_every_module_has_its_place_in_the_table():
    assert set(MODULES) <= set(RANK)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_lower_ones_only(module):
    within = {n for n in imported_names(PACKAGE / f"{module}.py") if n.split(".")[0] == "pyro_dak"}
    imported = {name.split(".")[1] for name in within}
    assert imported <= {name for name in RANK if RANK[name] < RANK[module]}


@pytest.mark.parametrize("module", [name for names in TORCH_ONLY for name in names])
def test_mathematics_knows_no_pyro(module):
    assert "pyro" not in roots(PACKAGE / f"{module}.py")


@pytest.mark.parametrize("folder", ["pyro_dak", "models", "guides", "benchmarks"])
def test_nothing_imports_the_experiments(folder):
    assert [path.name for path in files_of(folder) if "experiments" in roots(path)] == []


@pytest.mark.parametrize("board", ["models", "guides"])
def test_boards_stand_on_the_package_alone(board):
    others = {"models", "guides", "experiments", "benchmarks", "tests"} - {board}
    assert [path.name for path in files_of(board) if roots(path) & others] == []


def test_the_package_imports_no_board():
    others = {"models", "guides", "benchmarks", "tests"}
    assert [path.name for path in files_of("pyro_dak") if roots(path) & others] == []


@pytest.mark.parametrize("module", ["pyro_dak", *(f"pyro_dak.{name}" for name in MODULES)])
def test_public_names_are_sorted_and_exist(module):
    module = importlib.import_module(module)

    def constants_classes_functions(name):
        return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)

    assert module.__all__ == sorted(module.__all__, key=constants_classes_functions)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_importing_the_package_changes_nothing_and_says_nothing():
    code = (
        "import torch, pyro\n"
        "def state():\n"
        "    return (torch.get_default_dtype(), torch.get_num_threads(),\n"
        "            torch.initial_seed(), torch.get_rng_state().sum().item(),\n"
        "            torch.is_grad_enabled(), pyro.settings.get())\n"
        "before = state()\n"
        "import pyro_dak\n"
        "assert state() == before, (before, state())\n"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
