"""Run the tests with the lowest versions that pyproject.toml names, in an environment of their own.

python tests/scripts/lowest.py [--environment DIR] [--extra dev] [pytest arguments]

The environment is made where it does not exist yet, and kept only if its directory was named. What
the named packages depend on themselves comes in its newest version that fits.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
# Old packages meet newer ones that they depend on, which tell them what they will miss one day.
WARNINGS = [
    part
    for kind in ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning")
    for part in ("-W", f"ignore::{kind}")
]


def requirements(extra: str) -> Iterator[Requirement]:
    """All requirements of the package with an extra, those of the extras it names included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    yield from map(Requirement, project["dependencies"])
    todo, done = {extra}, set()
    while todo:
        done.add(name := todo.pop())
        for requirement in map(Requirement, extras[name]):
            if requirement.name == project["name"]:
                todo |= requirement.extras - done
            else:
                yield requirement


def pins(extra: str) -> list[str]:
    """The lowest version that satisfies every bound, `name==version`, sorted by name."""
    lowest: dict[str, Version] = {}
    for requirement in requirements(extra):
        (bound,) = (s.version for s in requirement.specifier if s.operator == ">=")
        lowest[requirement.name] = max(lowest.get(requirement.name, Version("0")), Version(bound))
    return [f"{name}=={version}" for name, version in sorted(lowest.items())]


def build(environment: Path, extra: str) -> Path:
    """Make the environment, and return its Python."""
    python = environment / "bin" / "python"
    if not (environment / ".installed").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
        constraints = environment / "lowest.txt"
        constraints.write_text("\n".join(pins(extra)))
        install = [python, "-m", "pip", "install", "--quiet", "-c", constraints]
        subprocess.run([*install, "-e", f"{ROOT}[{extra}]"], check=True)
        (environment / ".installed").touch()
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--environment", type=Path)
    parser.add_argument("--extra", default="dev")
    args, pytest_arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        python = build(args.environment or Path(temporary) / "environment", args.extra)
        command = [python, "-m", "pytest", "-q", *WARNINGS, *pytest_arguments]
        print(*pins(args.extra), sep="\n", flush=True)
        # This checkout is tested, whatever other one is installed.
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
