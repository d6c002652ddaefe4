"""Build the wheel, install it where nothing else is, and use it there from another directory.

python -m tests.scripts.wheel [--constraints FILE] [--borrow VENV] [EXTRA ...]

First the core alone: README's quick start, the boards, a class of another package, and mypy on the
script of a user. Then each extra that is named, `all` for all of them, in an environment of its
own. With `--borrow` everything but the wheel comes from an environment that is there already.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tests.test_readme import blocks, commands, write_tables

ROOT = Path(__file__).parents[2]
QUICK_START, TABLE = blocks("README.md", "python")
OTHER_PACKAGE = ROOT / "tests" / "data" / "dak_extras"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

EVERYTHING = """
from pyro_dak import *
import pyro_dak, sys
assert "site-packages" in pyro_dak.__file__, pyro_dak.__file__
assert "lightning_fabric" not in sys.modules
"""
BOARDS = """
import torch
from pyro_dak import fit, registry
from pyro_dak.boards import guides, models
from pyro_dak.boards.models.shared.recipe import Recipe
model = models.build("dak", input_dim=2)
guide = guides.build("laplace_tails", model)
x = torch.randn(20, 2)
fit(model, guide, (x, x[:, 0]), epochs=1, batch_size=10, progress=False)
assert {"dak_cf", "nn"} <= set(registry.names("models")), registry.names("models")
assert registry.find("models", "dak")(input_dim=2).num_units == 16
regressor = models.build("dak_cf", input_dim=2, recipe=Recipe(epochs=1))
regressor.fit(x, x[:, :1])
regressor.predict(x)
"""
SAVE_OTHERS = """
import torch, dak_extras, pyro_dak
model = pyro_dak.DAK(
    dak_extras.WaveNetwork((2, 3)), 3, num_units=2, kernel=dak_extras.RationalQuadraticKernel(0.5)
)
pyro_dak.save(model, dak_extras.LaplaceGuide(model), "others", overwrite=True)
"""
LOAD_OTHERS = """
import sys, torch, pyro_dak
assert "dak_extras" not in sys.modules
model, guide = pyro_dak.load("others")
assert type(guide).__name__ == "LaplaceGuide"
assert pyro_dak.predict(model, guide, torch.ones(1, 2), num_samples=2).mean.shape == (1, 1)
assert "dak_extras.unrelated" not in sys.modules
"""
TYPED = """
import torch
from pyro_dak import DAK, NaturalGuide, fit, predict
from pyro_dak.prediction import Prediction

model = DAK(torch.nn.Linear(3, 32), feature_dim=32)
guide = NaturalGuide(model)
history = fit(model, guide, (torch.rand(5, 3), torch.rand(5)), epochs=1)
status: str = history.status
p = predict(model, guide, torch.rand(2, 3))
assert isinstance(p, Prediction)
mean: torch.Tensor = p.mean
"""
# What mypy has to find in a script: the line, and a part of the message.
MISTYPED = {
    'DAK(torch.nn.Linear(3, 32), feature_dim="32")': 'Argument "feature_dim" to "DAK"',
    "history.state": 'has no attribute "state"',
    "fit(model)": "Missing positional arguments",
}
FIT = """
import torch
from pyro_dak import DAK, MeanFieldGuide, fit
x = torch.randn(20, 2)
model = DAK(torch.nn.Linear(2, 3), feature_dim=3, num_units=2)
guide = MeanFieldGuide(model)
fit(model, guide, (x, x[:, 0]), epochs=1, batch_size=10, progress=False, {})
"""
# What an extra is for; one that is not here has only to be installed.
USES = {
    "botorch": "from pyro_dak.botorch import DAKModel",
    "diagnostics": FIT.format("") + "import pyro_dak; pyro_dak.to_arviz(model, guide, x, x[:, 0])",
    "distributed": FIT.format('precision="bf16-mixed"'),
    "experiments": 'from pyro_dak.boards.models import build, images; build("svdkl", input_dim=2)',
    "lightning": "import lightning, pyro_dak",
    "sklearn": TABLE,
    "transformers": "import transformers, accelerate, pyro_dak",
}


def run(*command: str | Path, cwd: Path, check: bool = True) -> str:
    """The output of a command in a process that knows nothing of this checkout.

    Without `check` it may fail, and the output has its errors too.
    """
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    # No user's packages, and not the current directory: what is imported is what is installed.
    environment |= {"PYTHONNOUSERSITE": "1", "PYTHONSAFEPATH": "1", "MYPY_CACHE_DIR": str(cwd)}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    if check and done.returncode:
        raise RuntimeError(f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout if check else done.stdout + done.stderr


def build(directory: Path) -> Path:
    """The wheel, made of the source archive, as package registries would make it."""
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(directory)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    (archive,) = directory.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*pip, "--wheel-dir", directory, archive, cwd=directory)
    (wheel,) = directory.glob("*.whl")
    return wheel


def packages_of(environment: Path) -> Path:
    """The directory that the packages of an environment are in."""
    (directory,) = environment.glob("lib/python*/site-packages")
    return directory.absolute()


def install(
    environment: Path,
    wheel: Path,
    extra: str | None = None,
    borrow: Path | None = None,
    constraints: Path | None = None,
) -> Path:
    """A new environment with the wheel, and the Python in it.

    What the environment `borrow` has is seen behind what the new one has itself.
    """
    run(sys.executable, "-m", "venv", environment, cwd=environment.parent)
    if borrow is not None:
        (packages_of(environment) / "borrowed.pth").write_text(f"{packages_of(borrow)}\n")
    python = environment / "bin" / "python"
    wanted = f"pyro_dak[{extra}] @ {wheel.as_uri()}" if extra else wheel.as_uri()
    options = [] if constraints is None else ["-c", constraints.absolute()]
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # Of our own name there may be another version in what is borrowed.
    run(*pip, "--no-deps", "--ignore-installed", wheel.as_uri(), cwd=environment)
    run(*pip, *options, wanted, cwd=environment)
    run(python, "-m", "pip", "check", cwd=environment)
    return python


def check_core(python: Path, place: Path) -> None:
    """What the core promises: all names, README's quick start, boards, and others' classes."""
    for code in (EVERYTHING, QUICK_START, BOARDS):
        run(python, "-c", code, cwd=place)
    target = packages_of(python.parents[1])
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*pip, "--target", target, OTHER_PACKAGE, cwd=place)
    for code in (SAVE_OTHERS, LOAD_OTHERS):
        run(python, "-c", code, cwd=place)


def check_types(python: Path, place: Path) -> None:
    """mypy finds the types of the installed package: right scripts pass, and wrong ones do not."""
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python]
    right, wrong = place / "right.py", place / "wrong.py"
    right.write_text(TYPED)
    run(*command, right, cwd=place)
    wrong.write_text("\n".join([TYPED, *MISTYPED]))
    found = run(*command, wrong, cwd=place, check=False).splitlines()
    errors = [line for line in found if ": error:" in line]
    first = TYPED.count("\n") + 2
    for number, (code, message) in enumerate(MISTYPED.items(), start=first):
        if not any(f":{number}: " in error and message in error for error in errors):
            raise RuntimeError(f"mypy does not say {message!r} of `{code}`: {found}")


def check_extra(extra: str, python: Path, place: Path) -> None:
    """What an extra is for; the command line is that of the README."""
    if extra != "cli":
        run(python, "-c", USES.get(extra, "import pyro_dak"), cwd=place)
        return
    write_tables(place)
    for command in commands("README.md"):
        if command.startswith("pyro-dak "):
            _, *arguments = command.split()
            needs_more = "--onnx" in arguments
            said = run(python.with_name("pyro-dak"), *arguments, cwd=place, check=not needs_more)
            is_done = not needs_more or (place / arguments[-1]).exists()
            if not is_done and "pip install 'pyro_dak[onnx]'" not in said:
                raise RuntimeError(f"`{command}` does not say what it needs: {said}")
    if not (place / "predictions.csv").read_text().startswith("mean,std,lower,upper"):
        raise RuntimeError("`pyro-dak predict` has written something else than predictions.")


def check_all(
    directory: Path,
    extras: Sequence[str],
    constraints: Path | None = None,
    borrow: Path | None = None,
) -> None:
    """Everything, in a directory that is empty."""
    wheel, place = build(directory), directory / "elsewhere"
    place.mkdir()
    core = directory / "core"
    python = install(core, wheel, borrow=borrow, constraints=constraints)
    check_core(python, place)
    check_types(python, place)
    print("core: README's quick start, boards, others' classes, mypy", flush=True)
    for extra in extras:
        environment = directory / extra
        python = install(environment, wheel, extra, borrow or core, constraints)
        check_extra(extra, python, place)
        print(f"{extra}: {'used' if extra in ('cli', *USES) else 'installed'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("extras", nargs="*", metavar="EXTRA", choices=["all", *EXTRAS, []])
    parser.add_argument("--constraints", type=Path)
    parser.add_argument("--borrow", type=Path)
    args = parser.parse_args()
    extras = [name for name in EXTRAS if name != "dev"] if "all" in args.extras else args.extras
    with tempfile.TemporaryDirectory() as directory:
        check_all(Path(directory), extras, args.constraints, args.borrow)


if __name__ == "__main__":
    main()
