"""What is installed and shipped: the core without its extras, and a complete source archive."""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from packaging.version import Version

from tests import scenarios
from tests.scripts import lowest

ROOT = Path(__file__).parents[1]

CORE_ONLY = """
import sys
from importlib.machinery import PathFinder

EXTRAS = {"arviz", "fastapi", "gpytorch", "matplotlib", "onnx", "onnxruntime", "pandas", "pyarrow",
          "rich", "scipy", "sklearn", "torchmetrics", "torchvision", "typer", "xarray"}
find = PathFinder.find_spec

class CoreOnly(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in EXTRAS else find(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = CoreOnly
from pyro_dak import *
assert not EXTRAS & set(sys.modules), EXTRAS & set(sys.modules)
import pyro_dak
try:
    pyro_dak.DAKRegressor
except ImportError as error:
    assert "pip install pyro_dak[sklearn]" in str(error)
else:
    raise AssertionError("there is no scikit-learn")
"""


def test_all_names_can_be_imported_with_the_core_dependencies_only():
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
