"""The report page: what it gathers from a results directory, and how it works in a browser."""

import base64
import json
import re
import shutil
import subprocess

import matplotlib.image
import numpy
import pytest
import typer
from typer.testing import CliRunner

from experiments import report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TABLE = "Means of <two> folds.\n\n| model | RMSE |\n|---|---|\n| a | 10.5 ± 1 |\n| b | 9.5 ± 2 |\n"


@pytest.fixture
def results(tmp_path):
    """Two folders of results with everything that can be in one, and one damaged file."""
    directory = tmp_path / "results"
    runs = {
        "uci/best/gas/dak-fold0.json": {
            "config": {"dataset": "gas", "recipe": {"epochs": 3}},
            "metrics": {"rmse": 0.25, "rows": 7, "coverage": [0.5, 0.9], "label": "x"},
            "commit": "abc123",
        },
        "estimators/wine/nn-split0.json": {
            "config": {"split": 0},
            "metrics": {"nn": {"rmse": 1.5}, "nn_calibrated": {"rmse": 1.25}},
            "commit": "def456",
            "status": "finished",
        },
        "mnist/checkpoints/step-1/config.json": {"trainer": "not a result"},
    }
    for name, content in runs.items():
        path = directory / name
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(content))
    (directory / "uci" / "broken.json").write_text("{")
    (directory / "uci" / "table.md").write_text(TABLE)
    matplotlib.image.imsave(directory / "uci" / "curve.png", numpy.eye(4))
    return directory


def test_everything_of_a_folder_is_in_its_section(results):
    estimators, uci = report.collect(results)
    assert (estimators.name, uci.name) == ("estimators", "uci")
    assert [path.name for path in uci.tables + uci.figures] == ["table.md", "curve.png"]
    assert uci.damaged == ["uci/broken"]
    (run,) = uci.runs
    assert run.scores == {"": {"rmse": 0.25, "rows": 7}}
    assert (run.name, run.commit) == ("uci/best/gas/dak-fold0", "abc123")
    assert run.config == {"dataset": "gas", "recipe": {"epochs": 3}}
    assert estimators.runs[0].scores == {"nn": {"rmse": 1.5}, "nn_calibrated": {"rmse": 1.25}}


def test_the_page_holds_tables_figures_configurations_and_commits(results):
    page = report.render(report.collect(results), results)
    picture = base64.b64encode((results / "uci" / "curve.png").read_bytes()).decode()
    assert f'src="data:image/png;base64,{picture}"' in page
    assert "<td>10.5 ± 1</td>" in page
    assert "Means of &lt;two&gt; folds." in page
    assert "estimators/wine/nn-split0 nn_calibrated" in page
    assert "<code>abc123</code>" in page
    assert "&quot;epochs&quot;: 3" in page
    assert "Not readable as json: uci/broken" in page
    assert "not a result" not in page


def test_the_page_asks_nothing_of_the_network(results):
    page = report.render(report.collect(results), results)
    assert re.findall(r"""(?:src|href)=["'](?!data:|#)[^"']*""", page) == []
    assert "http" not in page.replace("http-equiv", "")
    assert "<!-- " not in page


def test_the_command_writes_the_page_and_says_where(results):
    app = typer.Typer()
    app.command()(report.main)
    done = CliRunner().invoke(app, ["--results", str(results)])
    assert done.exit_code == 0
    assert "uci: 1 runs, 1 tables, 1 figures, 1 not readable" in done.output
    assert done.output.splitlines()[-1] == str(results / "report.html")
    assert (results / "report.html").read_text().startswith("<!doctype html>")
    assert CliRunner().invoke(app, ["--results", str(results / "none")]).exit_code == 2


def browse(page, *arguments):
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", *arguments, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout


# Runs in the page after its own script: clicks headings and writes down what it sees.
PROBE = """
<script>
const seen = {};
const table = document.querySelector("#uci table.sortable");
const column = () => [...table.tBodies[0].rows].map((row) => row.cells[0].textContent);
const head = table.tHead.rows[0].cells[1];
seen.before = column();
head.querySelector("button").click();
seen.ascending = column();
seen.direction = head.getAttribute("aria-sort");
head.querySelector("button").click();
seen.descending = column();
const picture = document.querySelector("img");
seen.picture = [picture.naturalWidth, picture.naturalHeight];
seen.tables = document.querySelectorAll("table.sortable").length;
const output = document.createElement("pre");
output.id = "probe";
output.textContent = JSON.stringify(seen);
document.body.append(output);
</script>
</body>
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
def test_the_page_works_in_a_browser(results, tmp_path):
    page = tmp_path / "report.html"
    report.write_page(results, page)
    screenshot = tmp_path / "page.png"
    browse(page, "--window-size=900,700", f"--screenshot={screenshot}")
    pixels = matplotlib.image.imread(screenshot)
    assert pixels.shape[:2] == (700, 900)
    assert len(numpy.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 20

    page.write_text(page.read_text().replace("</body>", PROBE))
    dom = browse(page, "--dump-dom")
    seen = json.loads(re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL).group(1))
    assert seen == {
        "before": ["a", "b"],
        "ascending": ["b", "a"],
        "direction": "ascending",
        "descending": ["a", "b"],
        "picture": [4, 4],
        "tables": 3,
    }
