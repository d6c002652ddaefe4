"""The documentation builds without a warning, and is complete and self-contained."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

import pyro_dak

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
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


def test_every_link_inside_the_site_leads_to_a_file(site):
    missing = [
        (str(page.relative_to(site)), address)
        for page in site.rglob("*.html")
        if page.name != "404.html"  # it is shown at any depth, so that its links are absolute
        for address in re.findall(r'(?:href|src)="([^"#?]+)', page.read_text())
        if not re.match(r"[a-z]+:", address) and not (page.parent / unquote(address)).exists()
    ]
    assert missing == []


def test_cards_of_the_gallery_lead_to_pages_with_pictures(site):
    index = (site / "gallery" / "index.html").read_text()
    cards = re.findall(r'<a href="(\w+\.html)"><img src="(\w+-1\.png)"', index)
    assert len(cards) == len(list((ROOT / "docs" / "gallery").glob("*.py")))
    for page, picture in cards:
        assert f'src="{picture}"' in (site / "gallery" / page).read_text()
        assert (site / "gallery" / page.replace(".html", ".py")).is_file()


# Runs in a page: what did not load, what is wider than the window, and where things came from.
PROBE = """
<script>
addEventListener("load", () => {
  const images = [...document.images];
  images.forEach((image) => { image.loading = "eager"; });
  const entries = performance.getEntriesByType("resource").map((entry) => entry.name);
  const seen = {
    broken: images.filter((image) => image.naturalWidth === 0).map((image) => image.src),
    images: images.length,
    overflow: document.documentElement.scrollWidth - window.innerWidth,
    foreign: entries.filter((name) => !/^(file|data|blob):/.test(name)),
  };
  const output = document.createElement("pre");
  output.id = "probe";
  output.textContent = JSON.stringify(seen);
  document.body.append(output);
});
</script>
</body>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize(
    "name",
    ["index", "gallery/index", "gallery/toy", "gallery/table", "api/training", "mathematics"],
)
def test_a_browser_shows_a_page_whole(site, tmp_path, name, width):
    page = site / f"{name}.html"
    probed = page.with_name(f"probe-{page.name}")
    probed.write_text(page.read_text().replace("</body>", PROBE))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--disable-background-networking", f"--user-data-dir={tmp_path}"]
    command += [f"--window-size={width},900", "--virtual-time-budget=8000", "--dump-dom"]
    options = {"capture_output": True, "text": True, "timeout": 240, "check": True}
    dom = subprocess.run([*command, probed.as_uri()], **options).stdout
    probed.unlink()
    seen = json.loads(re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL).group(1))
    assert (seen["images"] > 0) == name.startswith(("gallery/", "index"))
    assert {key: seen[key] for key in ("broken", "foreign")} == {"broken": [], "foreign": []}
    assert seen["overflow"] <= 0
