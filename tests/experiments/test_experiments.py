"""Experiments end to end on a few rows, their data files, and that no test row leaks."""

import gzip
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import typer
from torch.testing import assert_close
from typer.testing import CliRunner

import guides
from experiments import cost, datasets, hmc, toy, uci, uci_report
from experiments.datasets import DataError, find_file, load_regression
from models.shared.recipe import Recipe

# GPyTorch: torch.jit at import, jitter and float32 on tiny data.
gpytorch = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


def invoke(main, *arguments):
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@gpytorch
def test_toy_runs_end_to_end(tmp_path):
    output = invoke(toy.main, "--quick", "--out", tmp_path)
    assert "DAK + residual" in output
    content = json.loads((tmp_path / "scores.json").read_text())
    assert set(content["scores"]) == set(toy.PANELS)
    for name in ("panels.png", "learning_rates.png", "table.md"):
        assert (tmp_path / name).stat().st_size > 0


def test_toy_function_is_a_draw_of_its_gp():
    draws = torch.stack([toy.draw_toy(seed).f_test.flatten() for seed in range(400)])
    x = torch.linspace(-12, 12, 100)
    cov = draws.mT @ draws / len(draws)
    expected = (-(x - x.unsqueeze(-1)).square()).exp()
    # The standard error of an entry of a covariance of unit-variance normals is at most sqrt(2/n).
    assert (cov - expected).abs().max() < 5.5 * (2 / 400) ** 0.5


@gpytorch
def test_toy_scores_of_a_perfect_prediction():
    draw = toy.draw_toy(0)
    model = toy.PANELS["exact GP"](Recipe(epochs=1))
    model.fit(draw.x, draw.y)
    prediction = model.predict(draw.x_test)
    scores = toy.score(prediction, draw)
    inside = draw.x_test.abs() <= 7
    half = 1.959964 * prediction.epistemic.sqrt()
    covered = (draw.f_test - prediction.mean).abs() <= half
    assert scores["coverage_inside"] == pytest.approx(covered[inside].float().mean().item())


@pytest.mark.filterwarnings("ignore:.*r-hat.*:UserWarning")
@pytest.mark.parametrize("problem", hmc.PROBLEMS)
def test_hmc_runs_end_to_end(problem, tmp_path):
    output = invoke(hmc.main, "--quick", "--problem", problem, "--out", tmp_path)
    content = json.loads((tmp_path / f"{problem}.json").read_text())
    expected = {*guides.names(), "NUTS"} | ({"exact"} if problem != "digits" else set())
    assert {row["posterior"] for row in content["rows"]} == expected
    assert (content["log_evidence"] is None) == (problem == "digits")
    assert (tmp_path / f"{problem}-weights.png").stat().st_size > 0
    assert f"## {problem}" in (tmp_path / "table.md").read_text()
    assert "| NUTS |" in output


def test_uci_runs_end_to_end_and_resumes(tmp_path):
    output = invoke(uci.main, "--quick", "--out", tmp_path)
    assert "4 to make" in output
    run = json.loads((tmp_path / "best/diabetes/dak_cf-64-fold0of2.json").read_text())
    assert run["metrics"]["rmse"] > 0
    assert {"config", "metrics", "commit"} == set(run)
    assert run["config"]["recipe"]["epochs"] == 2
    assert "4 of 4 runs are there already; 0 to make" in invoke(
        uci.main, "--quick", "--out", tmp_path
    )
    table = (tmp_path / "table.md").read_text()
    assert "| best | diabetes | 64 | dak_cf | 2 |" in table
    for name in ("table.csv", "scores-best.png", "time-best.png", "calibration-best.png"):
        assert (tmp_path / name).stat().st_size > 0


@pytest.mark.parametrize("preset", list(uci.PRESETS))
def test_targets_of_the_test_rows_change_nothing_in_training(preset, monkeypatch):
    fitted = []

    class Recorder:
        num_parameters, epoch_seconds = 0, [0.0]

        def __init__(self, *args, **options):
            pass

        def fit(self, x, y):
            fitted.append((x.clone(), y.clone()))

        def predict(self, x):
            from pyro_dak import GaussianLikelihood
            from pyro_dak.additive.gaussian import FunctionMoments
            from pyro_dak.prediction.predict import Prediction

            one = torch.ones(len(x), 1)
            return Prediction(one, one, one, FunctionMoments(one, one), GaussianLikelihood())

    monkeypatch.setattr(uci.models, "build", Recorder)
    x, y = load_regression("diabetes")
    test_rows = uci.folds(len(x), 5)[1]
    shuffled = y.clone()
    shuffled[test_rows] = shuffled[test_rows].flip(0) * 100
    for target in (y, shuffled):
        monkeypatch.setattr(uci, "load_regression", lambda *_, target=target: (x, target))
        uci.run(uci.Job("diabetes", "nn", 64, preset, 1, 5, 0, "cpu", None, None, 1))
    assert torch.equal(fitted[0][0], fitted[1][0])
    assert torch.equal(fitted[0][1], fitted[1][1])


def test_folds_cover_every_row_once():
    parts = uci.folds(103, 5)
    assert torch.cat(parts).sort().values.equal(torch.arange(103))
    assert {len(part) for part in parts} == {20, 21}


def test_scores_are_in_the_units_of_the_data():
    from pyro_dak import GaussianLikelihood
    from pyro_dak.additive.gaussian import FunctionMoments
    from pyro_dak.prediction.predict import Prediction

    mean, y = torch.zeros(50, 1), torch.randn(50, 1)
    functions = FunctionMoments(mean, torch.full_like(mean, 0.4))
    prediction = Prediction(
        mean, functions.var, torch.full_like(mean, 0.6), functions, GaussianLikelihood()
    )
    scores = uci.score(prediction, y, 3.0)
    normal = torch.distributions.Normal(0.0, 3.0)
    assert scores["rmse"] == pytest.approx(3 * y.square().mean().sqrt().item(), rel=1e-5)
    assert scores["nlpd"] == pytest.approx(-normal.log_prob(3 * y).mean().item(), rel=1e-5)
    noise = torch.distributions.Normal(0.0, (9 * 0.4 + 0.6932) ** 0.5)
    assert scores["nlpd_paper"] == pytest.approx(-noise.log_prob(3 * y).mean().item(), rel=1e-5)


def test_twins_are_exact_copies_in_the_training_rows():
    x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
    x_test, y_test = torch.tensor([[1.0], [1.0], [2.0]]), torch.tensor([[3.0], [4.0], [4.0]])
    assert uci.has_twin(x, y, x_test, y_test).tolist() == [True, False, True]


def test_the_table_says_what_a_dak_misses():
    def row(rmse, nlpd, coverage):
        return {"rmse": rmse, "nlpd": nlpd, "coverage_95": coverage}

    def key(model):
        return ("best", "wine", model, 64)

    paper = uci_report.PAPER["wine", "dak_cf", 64]["rmse"]
    summaries = {key("nn"): row(paper, 1.0, 0.5), key("dak_cf"): row(paper - 0.1, 0.9, 0.95)}
    assert uci_report.misses(key("dak_cf"), summaries) == []
    assert uci_report.misses(key("nn"), summaries) == []
    summaries[key("dak_cf")] = row(paper + 0.1, 1.1, 0.99)
    assert uci_report.misses(key("dak_cf"), summaries) == [
        "RMSE above the paper's",
        "coverage not in 0.90-0.98",
        "RMSE of nn is lower",
        "NLPD of nn is lower",
    ]


def test_the_papers_table_is_there():
    assert uci_report.PAPER["kin40k", "dak_cf", 64]["rmse"] == 0.069
    assert len(uci_report.PAPER) == 6 * 6 * 3


@pytest.mark.parametrize("name", list(datasets.REGRESSION))
def test_data_files_are_as_described(name):
    try:
        x, y = load_regression(name)
    except DataError:
        pytest.skip("no data root and no network")
    file = datasets.REGRESSION[name]
    assert x.shape == (file.rows, file.columns - 1)
    assert y.shape == (file.rows, 1)
    assert torch.isfinite(x).all()


CONTENT = gzip.compress(b"1,2\n3,4\n", mtime=0)
SHA = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A real HTTP server; `server.mode` says how it answers, `server.requests` counts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PYRO_DAK_DATA", raising=False)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.requests += 1
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            if self.server.mode == "interrupted":
                self.wfile.write(CONTENT[: len(CONTENT) // 2])
                self.wfile.flush()
                self.connection.close()
            else:
                body = CONTENT if self.server.mode == "good" else CONTENT[::-1]
                self.wfile.write(body)

        def log_message(self, *args):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.mode, http.requests = "good", 0
    http.url = f"http://127.0.0.1:{http.server_port}/data.csv.gz"
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield http
    http.shutdown()
    http.server_close()
    thread.join()


def test_a_download_is_made_once(server):
    path = find_file("uci/tiny.csv.gz", SHA, server.url)
    assert path.read_bytes() == CONTENT
    assert find_file("uci/tiny.csv.gz", SHA, server.url) == path
    assert server.requests == 1


@pytest.mark.parametrize("mode", ["altered", "interrupted"])
def test_a_bad_download_is_refused_and_leaves_nothing(server, tmp_path, mode):
    server.mode = mode
    with pytest.raises(DataError, match=r"tiny\.csv\.gz.*could not be downloaded"):
        find_file("uci/tiny.csv.gz", SHA, server.url)
    left = [p for p in (tmp_path / "cache").rglob("*") if p.is_file() and p.stat().st_size]
    assert left == []
    server.mode = "good"
    assert find_file("uci/tiny.csv.gz", SHA, server.url).read_bytes() == CONTENT


def test_a_damaged_file_in_the_data_root_is_named(tmp_path):
    (tmp_path / "uci").mkdir()
    (tmp_path / "uci/tiny.csv.gz").write_bytes(CONTENT[:-1])
    with pytest.raises(DataError, match=r"uci/tiny\.csv\.gz: is damaged"):
        find_file("uci/tiny.csv.gz", SHA, "http://127.0.0.1:9/none", tmp_path)


def test_standardising_uses_the_training_rows():
    x, y = load_regression("diabetes")
    test_rows = uci.folds(len(x), 5)[0]
    rows, scale = uci.prepare(x, y, test_rows, standardize=True)
    assert_close(rows["x"].mean(0), torch.zeros(10), atol=1e-5, rtol=0)
    assert_close(rows["y"].std().item(), 1.0, atol=1e-5, rtol=0)
    kept = torch.ones(len(x), dtype=torch.bool)
    kept[test_rows] = False
    assert scale == pytest.approx(y[kept].std().item())


@gpytorch
def test_epochs_are_timed_for_every_candidate_and_set(tmp_path, capsys):
    cost.main(["diabetes"], rows=32, repetitions=1, data_root=None, out=tmp_path / "cost.json")
    seconds = json.loads((tmp_path / "cost.json").read_text())["seconds"]["diabetes"]
    assert list(seconds) == list(cost.CANDIDATES)
    assert all(value > 0 for value in seconds.values())
    row = capsys.readouterr().out.splitlines()[-1].split("|")
    assert row[1].strip() == "diabetes"
    assert float(row[3]) == 1  # DAK-CF to itself
