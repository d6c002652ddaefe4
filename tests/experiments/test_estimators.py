"""The comparison of the estimators with networks, end to end on a few rows."""

import numpy as np
import pytest
import torch

from experiments import estimators, table_peers
from experiments.runs import read_runs
from pyro_dak.tables.ensemble import ensemble_plan, train
from pyro_dak.tables.predictive import StudentPrediction
from pyro_dak.tables.rows import Rows
from tests.experiments.command import invoke


def test_comparison_runs_resumes_and_writes_its_table(tmp_path):
    for _ in range(2):
        output = invoke(estimators.main, "--quick", "--out", tmp_path)
    assert "4 of 4 runs are recorded already; 0 to make" in output
    for run in read_runs(tmp_path):
        name = run["config"]["model"]
        assert np.isfinite(run["metrics"][name]["nlpd"])
        assert {"epochs", "calibration", "df"} <= set(run["fitted"])
    assert (tmp_path / "table.md").exists()


def make_run(name, split, **metrics):
    job = estimators.make_job("wine", name, split)
    return {"experiment": "estimators", "config": job.config, "metrics": {name: metrics}}


def test_table_holds_means_over_splits():
    runs = [make_run("dak", split, rmse=rmse) for split, rmse in enumerate((1.0, 3.0))]
    assert "| wine | 2 | rmse | 2.000 ± 1.000 |" in estimators.table(runs)


def test_splits_that_some_model_lacks_are_left_out():
    parts = (("dak", 0, 1.0), ("dak", 1, 9.0), ("nn", 0, 2.0))
    runs = [make_run(name, split, rmse=rmse) for name, split, rmse in parts]
    assert "| wine | 1 | rmse | 1.000 | 2.000 |" in estimators.table(runs)


def test_summary_counts_the_sets_where_a_claim_holds_and_names_the_others():
    columns = ("rmse", "nlpd", "coverage_95", "fit_seconds")
    values = {
        "dak": (1.0, 0.0, 0.95, 2.0),
        "nn": (0.98, 1.0, 0.5, 1.0),
        "nn_calibrated": (0.98, 0.5, 0.95, 1.0),
        "dak5": (0.9, -1.0, 0.95, 3.0),
        "mv5": (0.9, -0.5, 0.5, 1.0),
        "mv5_calibrated": (0.9, -0.7, 0.95, 1.0),
    }
    scores = {
        (dataset, name): [dict(zip(columns, row, strict=True))]
        for dataset in ("yacht", "wine")
        for name, row in values.items()
    }
    scores["wine", "nn"] = [{"rmse": 0.9, "nlpd": -0.1, "coverage_95": 0.9, "fit_seconds": 1.0}]
    lines = estimators.summary(scores)
    assert lines[0] == "- `dak` has a better NLPD than `nn` on 1 of 2 sets (not wine)."
    assert lines[2].endswith("on 1 of 2 sets (not wine).")
    assert lines[3].endswith("on 2 of 2 sets.")
    assert "takes 1.50 times as long" in lines[-1]


def test_scores_of_a_perfect_prediction():
    y = np.arange(5.0)
    prediction = StudentPrediction(y, np.zeros(5), np.ones(5))
    scores = estimators.score(prediction, y)
    assert scores["rmse"] == 0
    assert scores["coverage_95"] == 1
    assert scores["nlpd"] == pytest.approx(0.5 * np.log(2 * np.pi))


def test_mean_variance_networks_learn_mean_and_noise():
    x = torch.randn(400, 1)
    y = x + (0.1 + 0.9 * (x > 0)) * torch.randn(400, 1)
    network = estimators.StackedMLP(1, 2, heteroscedastic=True, seed=0)
    train(network, Rows(x, y, torch.ones(400)), ensemble_plan(40, 100))
    with torch.no_grad():
        _, log_var = network.moments(torch.tensor([[-1.0], [1.0]]))
    assert (log_var[:, 1] - log_var[:, 0] > 1).all()


@pytest.mark.parametrize("name", estimators.PEERS)
def test_peers_predict_distributions_and_are_scored(name, tmp_path):
    if name in table_peers.PEERS:
        pytest.importorskip(name)
    invoke(estimators.main, "--quick", "--model", name, "--out", tmp_path)
    (run,) = read_runs(tmp_path)
    scores = run["metrics"][name]
    assert np.isfinite(list(scores.values())).all()
    assert scores["interval_score_95"] >= scores["width_95"]
    assert name in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize("name", estimators.PEERS)
def test_peers_learn_a_line_and_its_noise(name):
    if name in table_peers.PEERS:
        pytest.importorskip(name)
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (400, 2))
    y = 10 * x[:, 0] + np.where(x[:, 1] > 0, 2.0, 0.2) * rng.normal(size=400)
    model = estimators.build(name, 0, 300)
    model.fit(x[:300], y[:300])
    prediction = model.predict_dist(x[300:])
    assert np.mean((y[300:] - prediction.mean) ** 2) < 0.3 * y.var()
    is_noisy = x[300:, 1] > 0
    assert prediction.std[is_noisy].mean() > 1.2 * prediction.std[~is_noisy].mean()
