"""The path of a newcomer: a fresh clone, and the commands of the README as they stand.

Installing takes minutes and gigabytes. With `PYRO_DAK_VENV` set to a virtual environment that has
everything, the commands run in it, on the code of the clone, and nothing is installed.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_readme import ROOT, commands, write_tables

pytestmark = pytest.mark.slow
HOUR = 3600


def shell(command, directory, environment, timeout=HOUR):
    options = {"cwd": directory, "env": environment, "timeout": timeout}
    run = subprocess.run(
        command, shell=True, capture_output=True, text=True, check=False, **options
    )
    assert run.returncode == 0, f"{command}\n{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
    return run.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone of the last commit, with the tables that the README speaks of."""
    directory = tmp_path_factory.mktemp("newcomer") / "pyro_dak"
    shell(f"git clone --quiet {ROOT} {directory}", ROOT, os.environ)
    write_tables(directory)
    return directory


@pytest.fixture(scope="module")
def environment(clone, tmp_path_factory):
    """What a newcomer has: an active virtual environment, here a fresh or the given one."""
    values = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MAKEFLAGS")}
    given = os.environ.get("PYRO_DAK_VENV")
    if given:
        # The entry point of the environment may be that of another copy of the code.
        script = tmp_path_factory.mktemp("bin") / "pyro-dak"
        python = Path(given).absolute() / "bin" / "python"
        script.write_text(f'#!/bin/sh\nexec {python} -m pyro_dak "$@"\n')
        script.chmod(0o755)
        bins = [script.parent, python.parent]
        values |= {"PYRO_DAK_VENV": str(Path(given).absolute()), "PYTHONPATH": str(clone)}
    else:
        venv = tmp_path_factory.mktemp("venv")
        shell(f"{sys.executable} -m venv {venv}", clone, values)
        bins = [venv / "bin"]
    path = os.pathsep.join([*map(str, bins), values["PATH"]])
    return values | {"PATH": path, "TESTS": "tests/test_readme.py"}


def test_the_commands_of_the_readme_work_on_a_fresh_clone(clone, environment):
    """In the order of a newcomer: installing first. `make test` runs one file of tests only."""
    found = commands("README.md")
    found.sort(key=lambda command: not command.startswith("pip install"))
    assert {"make demo", "make test", "make docs"} < set(found)
    outputs = {}
    for command in found:
        if command.startswith("pip install") and "PYRO_DAK_VENV" in environment:
            continue
        outputs[command] = shell(command, clone, environment)
    report = outputs["make demo"].splitlines()[-1].split()[-1]
    assert (clone / report).read_text().startswith("<!doctype html>")
    assert (clone / "site" / "index.html").is_file()
    lines = (clone / "predictions.csv").read_text().splitlines()
    assert lines[0] == "mean,std,lower,upper,novelty"
    assert len(lines) == 31
    assert " passed" in outputs["make test"]
    status = shell("git status --porcelain", clone, environment).splitlines()
    made = {"?? model/", "?? new.csv", "?? predictions.csv", "?? test.csv", "?? train.csv"}
    assert set(status) == made  # nothing else is left outside what git ignores
