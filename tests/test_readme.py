"""README and docs: Python is run, commands are run or parsed, links and named files exist."""

import importlib
import inspect
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import typer
from typer.testing import CliRunner

from pyro_dak.tables import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
OTHER_PAGES = ["CONTRIBUTING.md", "SECURITY.md"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def blocks(page, language):
    """Blocks of a language, each with empty lines in front, so that errors name the right line."""
    text = (ROOT / page).read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return ["\n" * (text[: m.start(1)].count("\n")) + m.group(1) for m in found]


def commands(page):
    """Lines of the shell blocks of a page, without comments, continued lines joined."""
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [line for line in (line.split(" #")[0].strip() for line in lines) if line]


# GPyTorch, which BoTorch imports, uses torch.jit.
@pytest.mark.filterwarnings("ignore:`torch.jit.:FutureWarning")
@pytest.mark.parametrize("page", [name for name in NAMES if blocks(name, "python")])
def test_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks(page, "python"):  # later blocks use what earlier ones made
        exec(compile(block, page, "exec"), names)


def test_all_blocks_have_a_language_that_is_tested():
    fences = {(n, f) for n in NAMES for f in re.findall(r"^```(.+)$", (ROOT / n).read_text(), re.M)}
    assert {fence for _, fence in fences} <= {"python", "bash", "text"}


@pytest.mark.parametrize("page", [*NAMES, *OTHER_PAGES])
def test_links_of_a_page_lead_to_files(page):
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", (ROOT / page).read_text())
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_readme_is_short():
    assert (ROOT / "README.md").stat().st_size <= 6000
    quick_start, table = (block.strip().splitlines() for block in blocks("README.md", "python"))
    assert len(quick_start) <= 15
    assert len(table) <= 6


def test_files_that_contributing_sends_to_exist():
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Where does it go?")[1]
    paths = re.findall(r"`([\w./]+(?:\.py|\.md|/))`", section.split("## How to write")[0])
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_citation_names_this_version_and_licence():
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {PROJECT['version']}" in lines
    assert f"license: {PROJECT['license']}" in lines


def check_make(words):
    """The targets exist; what they run is tested elsewhere."""
    run = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def check_install(words):
    """The extras that are asked for exist."""
    extras = re.findall(r"\[(.*?)\]", " ".join(words))
    wanted = {name for part in extras for name in part.split(",")}
    assert wanted <= set(PROJECT["optional-dependencies"])


def check_module(words):
    """The module is there, and its options parse; nothing is run."""
    module, *arguments = words
    main = importlib.import_module(module).main
    if "argv" in inspect.signature(main).parameters or not inspect.signature(main).parameters:
        assert arguments == []
        return
    app = typer.Typer()
    app.command()(main)
    with typer.main.get_command(app).make_context(module, arguments, resilient_parsing=False):
        pass


def check_pyro_dak(words):
    """The command runs, on a small table in the working directory."""
    if words[0] == "fit" and "--help" not in words:
        epochs = [] if "--additive" in words else ["--epochs", "2"]
        words = [*words, *epochs, "--quiet"]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output


CHECKS = {
    "make": check_make,
    "pip install": check_install,
    "python -m": check_module,
    "pyro-dak": check_pyro_dak,
}


def write_tables(directory):
    """The tables that the commands of the README speak of."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((80, 2))
    frame = pd.DataFrame({"size": x[:, 0], "age": x[:, 1], "price": x[:, 0] - x[:, 1] ** 2})
    frame["city"] = np.where(x[:, 0] > 0, "Bonn", "Ulm")
    frame[:50].to_csv(directory / "train.csv", index=False)
    frame[50:].to_csv(directory / "test.csv", index=False)
    frame[50:].drop(columns="price").to_csv(directory / "new.csv", index=False)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # GPyTorch at import
@pytest.mark.parametrize("page", [name for name in NAMES if commands(name)])
def test_commands_of_a_page_are_right(page, tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float32)
    write_tables(tmp_path)
    monkeypatch.chdir(tmp_path)
    for command in commands(page):
        (start,) = [start for start in CHECKS if command.startswith(f"{start} ")]
        CHECKS[start](shlex.split(command.removeprefix(start)))
