"""What docs/paper.md names exists: files, names in them, tests, commands and their options."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "paper.md").read_text()
FILES = sorted(set(re.findall(r"`((?:\w+/)+[\w-]+\.\w+)", TEXT)))
NAMES = sorted(set(re.findall(r"`(\w+)` in `((?:\w+/)+\w+\.py)`", TEXT)))
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)))
COMMANDS = sorted(set(re.findall(r"python -m (experiments\.\w+)([^`\n]*)", TEXT)))


def defined_names(path):
    """What a file defines at its top level."""
    names = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("path", FILES)
def test_every_file_exists(path):
    assert (ROOT / path).is_file()


@pytest.mark.parametrize(("name", "path"), NAMES)
def test_every_name_is_defined_in_its_file(name, path):
    assert name in defined_names(path)


@pytest.mark.parametrize(("path", "name"), TESTS)
def test_every_test_exists(path, name):
    assert name in defined_names(path)


@pytest.mark.parametrize(("module", "options"), COMMANDS)
def test_every_command_knows_its_options(module, options):
    main = importlib.import_module(module).main
    known = set(inspect.signature(main).parameters)
    options = {option.replace("-", "_") for option in re.findall(r"--([\w-]+)", options)}
    assert options <= known


def test_the_patterns_find_what_the_page_names():
    assert len(FILES) > 20
    assert len(NAMES) > 20
    assert len(TESTS) > 15
    assert len(COMMANDS) > 10


def test_every_equation_of_the_paper_has_a_row():
    """The paper's LaTeX source numbers its equations from 1 to 51."""
    section = TEXT.split("### Equations")[1].split("### ")[0]
    found = set()
    for row in re.findall(r"^\| (\([^|]*?)[a-zA-Z|]", section, re.MULTILINE):
        for first, last in re.findall(r"\((\d+)\)(?:-\((\d+)\))?", row):
            found |= set(range(int(first), int(last or first) + 1))
    assert found == set(range(1, 52))
