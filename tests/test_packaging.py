"""What is installed and shipped: the core without its extras, and a complete source archive."""

import os
import subprocess
import sys
import tarfile
import tomllib
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest
from packaging.version import Version

import guides
import models
import pyro_dak
from pyro_dak import registry
from tests import scenarios
from tests.scripts import lowest, wheel

ROOT = Path(__file__).parents[1]

CORE_ONLY = """
import sys
from importlib.machinery import PathFinder

EXTRAS = {"accelerate", "arviz", "botorch", "fastapi", "gpytorch", "jaxtyping", "lightning",
          "lightning_fabric", "matplotlib", "onnx", "onnxruntime", "pandas", "pyarrow",
          "pytorch_lightning", "rich", "scipy", "sklearn", "torchmetrics", "torchvision",
          "transformers", "typer", "xarray"}
find = PathFinder.find_spec

class CoreOnly(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in EXTRAS else find(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = CoreOnly
from pyro_dak import *
import pyro_dak, tempfile, torch
x = torch.randn(20, 2)
model = DAK(torch.nn.Linear(2, 3), feature_dim=3, num_units=2)
guide = NaturalGuide(model)
fit(model, guide, (x, x[:, 0]), epochs=1, batch_size=10, progress=False)
with tempfile.TemporaryDirectory() as directory:
    again = load(save(model, guide, directory + "/saved"))
assert torch.equal(predict(*again, x).mean, predict(model, guide, x).mean)
assert not EXTRAS & set(sys.modules), EXTRAS & set(sys.modules)
try:
    fit(model, guide, (x, x[:, 0]), epochs=1, precision="bf16-mixed", progress=False)
except ImportError as error:
    assert "pip install 'pyro_dak[distributed]'" in str(error)
else:
    raise AssertionError("there is no Fabric")
try:
    pyro_dak.DAKRegressor
except ImportError as error:
    assert "pip install pyro_dak[sklearn]" in str(error)
else:
    raise AssertionError("there is no scikit-learn")
"""


def test_the_core_dependencies_are_enough_to_import_fit_save_and_predict():
    scenarios.run_alone(CORE_ONLY)


@pytest.mark.slow
def test_the_source_archive_holds_all_that_its_tests_need(tmp_path):
    build = "from setuptools import build_meta; print(build_meta.build_sdist({!r}))"
    command = [sys.executable, "-c", build.format(str(tmp_path))]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    (source,) = (path for path in tmp_path.iterdir() if path.is_dir())
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    names = [name for name in listing.splitlines() if not name.startswith(".")]
    missing = [name for name in names if not (source / name).exists()]
    assert missing == []
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    found = subprocess.run(collect, cwd=source, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-2000:]


@pytest.mark.slow
def test_the_wheel_works_alone(tmp_path):
    """The core and the command line; everything else, and an empty environment: make test-wheel.

    With `PYRO_DAK_VENV` nothing but the wheel is installed.
    """
    given = os.environ.get("PYRO_DAK_VENV")
    wheel.check_all(tmp_path, ["cli"], ROOT / "constraints.txt", Path(given) if given else None)


def test_the_wheel_holds_all_packages():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    places = settings["package-dir"]
    found = {
        ".".join(path.parent.relative_to(ROOT).parts): path.parent
        for folder in ("pyro_dak", "guides", "models")
        for path in (ROOT / folder).rglob("__init__.py")
    }
    for package, folder in places.items():  # under another name in the wheel
        for name in [name for name in found if name.split(".")[0] == folder]:
            found[name.replace(folder, package, 1)] = found.pop(name)
    assert set(settings["packages"]) == set(found)


@pytest.mark.filterwarnings("ignore:`torch.jit.:FutureWarning")  # GPyTorch at import
def test_what_we_offer_by_name_is_what_there_is():
    """The entry points name every file of the boards, and what can be saved."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert set(groups) == {f"pyro_dak.{kind}" for kind in registry.KINDS}
    for board in (guides, models):
        files = [m.name for m in iter_modules(board.__path__) if not m.ispkg]
        offered = groups[f"pyro_dak.{board.__name__}"]
        assert set(offered) == set(files)
        for name, value in offered.items():
            module, attribute = value.removeprefix("pyro_dak.boards.").split(":")
            assert module == f"{board.__name__}.{name}"
            assert hasattr(import_module(module), attribute)
    for kind in ("kernels", "likelihoods"):
        names = [n for n in pyro_dak.__all__ if n.lower().endswith(kind.rstrip("s"))]
        assert groups[f"pyro_dak.{kind}"] == {name: f"pyro_dak:{name}" for name in names}


def test_every_bound_has_a_lowest_version():
    named = {requirement.name for requirement in lowest.requirements("dev")}
    pins = dict(pin.split("==") for pin in lowest.pins("dev"))
    assert named == set(pins)
    assert {"torch", "scikit-learn", "typer", "arviz"} <= named


@pytest.mark.parametrize("extra", ["cli", "experiments"])
def test_the_lowest_typer_works_with_the_newest_click(extra):
    """Typer sets no upper bound on click, and its versions before 0.16.1 fail with click 8.2."""
    (version,) = (pin for pin in lowest.pins(extra) if pin.startswith("typer=="))
    assert Version(version.removeprefix("typer==")) >= Version("0.16.1")
