"""The report page: what it gathers from a results directory, and how it works in a browser."""

import base64
import importlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import matplotlib.image
import numpy
import pytest
import typer
from typer.testing import CliRunner

from experiments import report
from experiments.runs import read_runs, scores_by_model
from tests.experiments.command import invoke

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TABLE = "Means of <two> folds.\n\n| model | RMSE |\n|---|---|\n| a | 10.5 ± 1 |\n| b | 9.5 ± 2 |\n"


@pytest.fixture
def results(tmp_path):
    """Two folders of results with everything that can be in one, and one damaged line."""
    directory = tmp_path / "results"
    config = {"dataset": "gas", "model": "dak", "seed": 0, "fold": 1, "recipe": {"epochs": 3}}
    metrics = {"rmse": 0.25, "rows": 7, "coverage": [0.5, 0.9], "label": "x"}
    runs = {
        "uci": {"config": config, "metrics": metrics, "commit": "abc123"},
        "estimators": {
            "config": {"dataset": "wine", "model": "nn", "seed": 0, "split": 0},
            "metrics": {"nn": {"rmse": 1.5}, "nn_calibrated": {"rmse": 1.25}},
            "commit": "def456",
            "draft": True,
        },
    }
    for name, content in runs.items():
        path = directory / name / "runs.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"experiment": name} | content) + "\n")
    with (directory / "uci" / "runs.jsonl").open("a") as file:
        file.write("{\n")
    (directory / "uci" / "table.md").write_text(TABLE)
    (directory / "uci" / "checkpoints").mkdir()
    (directory / "uci" / "checkpoints" / "config.json").write_text("not a result")
    (directory / "uci" / "figures").mkdir()
    matplotlib.image.imsave(directory / "uci" / "figures" / "curve.png", numpy.eye(4))
    return directory


def test_everything_of_a_folder_is_in_its_section(results):
    estimators, uci = report.collect(results)
    assert (estimators.name, uci.name) == ("estimators", "uci")
    assert [path.name for path in uci.tables + uci.figures] == ["table.md", "curve.png"]
    assert uci.damaged == [2]
    (run,) = uci.runs
    assert scores_by_model(run) == {"dak": {"rmse": 0.25, "rows": 7}}
    parts = {"nn": {"rmse": 1.5}, "nn_calibrated": {"rmse": 1.25}}
    assert scores_by_model(estimators.runs[0]) == parts


def test_the_page_holds_tables_figures_configurations_and_commits(results):
    page = report.render(report.collect(results), results)
    picture = base64.b64encode((results / "uci/figures/curve.png").read_bytes()).decode()
    assert f'src="data:image/png;base64,{picture}"' in page
    assert "<td>10.5 ± 1</td>" in page
    assert "Means of &lt;two&gt; folds." in page
    assert "wine nn_calibrated split 0" in page
    assert "<td>draft</td>" in page
    assert "<code>abc123</code>" in page
    assert "&quot;epochs&quot;: 3" in page
    assert "Lines of runs.jsonl that cannot be read: 2" in page
    assert "not a result" not in page


def test_the_page_asks_nothing_of_the_network(results):
    page = report.render(report.collect(results), results)
    assert re.findall(r"""(?:src|href)=["'](?!data:|#)[^"']*""", page) == []
    assert "http" not in page.replace("http-equiv", "")
    assert "<!-- " not in page


def test_the_command_writes_tables_and_the_page_and_says_where(results):
    shutil.rmtree(results / "uci")  # too small for the table of that experiment
    done = invoke(report.main, "--results", results)
    assert "estimators" in done
    assert done.splitlines()[-1] == f"report  {results / 'report.html'}"
    assert (results / "report.html").read_text().startswith("<!doctype html>")
    assert (results / "estimators" / "table.md").read_text().startswith("| set | splits |")
    app = typer.Typer()
    app.command()(report.main)
    assert CliRunner().invoke(app, ["--results", str(results / "none")]).exit_code == 2


@pytest.mark.filterwarnings("ignore::FutureWarning")  # GPyTorch, at import
def test_the_committed_tables_are_those_of_the_committed_runs(tmp_path):
    for path in sorted(Path("results").glob("*/runs.jsonl")):
        directory = tmp_path / path.parent.name
        directory.mkdir()
        shutil.copy(path, directory)
        experiment = read_runs(directory)[-1]["experiment"]
        table = importlib.import_module(f"experiments.{experiment}").table(read_runs(directory))
        assert table == (path.parent / "table.md").read_text(), path


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
