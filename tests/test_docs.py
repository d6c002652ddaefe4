"""The documentation builds without a warning, and is complete and self-contained."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pyro_dak

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    run = subprocess.run(command, check=False, **options)
    assert run.returncode == 0, run.stderr
    assert "WARNING" not in run.stderr
    return directory


def test_every_public_name_is_in_the_reference(site):
    text = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    documented = {name.split(".")[-1] for name in re.findall(r'id="(pyro_dak\.[\w.]+)"', text)}
    assert set(pyro_dak.__all__) - documented == set()


def test_tables_and_figures_of_the_results_are_on_the_site(site):
    assert (site / "results" / "uci" / "table.html").is_file()
    assert (site / "results" / "toy" / "figures" / "panels.png").is_file()
    assert "../results/" not in (site / "results.html").read_text()


def test_formulas_are_drawn_by_the_browser(site):
    page = (site / "mathematics.html").read_text()
    source = (ROOT / "docs" / "mathematics.md").read_text()
    assert page.count("<math ") == len(re.findall(r"\\\[|\\\(", source))
    assert "arithmatex" not in page
    assert re.search(r"<merror|\\[a-z]+\{", page) is None


def test_pages_fetch_nothing_from_elsewhere(site):
    fetched = [
        (page.name, address)
        for page in site.rglob("*.html")
        for address in re.findall(r'<(?:script|img)[^>]*src="(http[^"]*)', page.read_text())
        + re.findall(r'<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*(http[^"]*)', page.read_text())
    ]
    assert fetched == []
