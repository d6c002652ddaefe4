"""The comparison of the estimators with networks, end to end on a few rows."""

import numpy as np
import pytest
import torch
from torch import nn

from experiments import estimators, table_peers
from experiments.runs import read_runs
from experiments.table_networks import (
    InputColumns,
    NetworkRegressor,
    StackedMLP,
    train_with_early_stopping,
)
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
        assert {"calibration", "df"} <= set(run["fitted"])
    assert (tmp_path / "table.md").exists()


def make_run(name, split, dataset="wine", missing=None, **metrics):
    job = estimators.make_job(dataset, name, split, missing=missing)
    return {"experiment": "estimators", "config": job.config, "metrics": {name: metrics}}


def test_table_holds_means_over_splits():
    runs = [make_run("dak5", split, rmse=rmse) for split, rmse in enumerate((1.0, 3.0))]
    assert "| wine | 2 | rmse | 2.000 ± 1.000 |" in estimators.table(runs)


def test_means_over_fewer_splits_say_so():
    parts = (("dak5", 0, 1.0), ("dak5", 1, 9.0), ("nn", 0, 2.0))
    rows = estimators.table([make_run(name, split, rmse=rmse) for name, split, rmse in parts])
    assert "| wine | 2 | rmse | 5.000 ± 4.000 | 2.000 (1) |" in rows


def test_splits_that_some_model_lacks_are_left_out_of_common_ones():
    parts = (("dak5", 0, 1.0), ("dak5", 1, 9.0), ("nn", 0, 2.0))
    runs = [make_run(name, split, rmse=rmse) for name, split, rmse in parts]
    scores = estimators.scores_of(runs)
    assert estimators.average(scores, "wine", "dak5", "rmse")[0] == 1.0


def test_differences_are_paired_over_the_splits_of_both():
    ours, theirs = (0.0, 10.0, 20.0, 50.0), (1.0, 13.0, 22.0)
    runs = [make_run("dak5", split, nlpd=value) for split, value in enumerate(ours)]
    runs += [make_run("es5", split, nlpd=value) for split, value in enumerate(theirs)]
    found = estimators.difference(estimators.by_split(runs), "wine", "es5", "nlpd")
    assert found == pytest.approx((2.0, 1 / 3**0.5, 3))


@pytest.mark.parametrize(("mean", "points"), [(1.1, 1.0), (0.9, 0.5), (-0.9, 0.5), (-1.1, 0.0)])
def test_differences_within_a_standard_error_count_half(mean, points):
    assert estimators.Difference(mean, 1.0, 5).points == points


def test_summary_counts_points_and_names_the_sets_that_are_lost_or_ties():
    metrics = {"dak5": (1.0, 0.0), "es5": (0.96, 1.0), "nn": (2.0, -1.0)}
    runs = [
        make_run(name, split, dataset, rmse=rmse, nlpd=nlpd, crps=1.0, coverage_95=coverage)
        for name, (rmse, nlpd) in metrics.items()
        for dataset, coverage in (("yacht", 0.95), ("wine", 0.9))
        for split in range(2)
    ]
    lines = estimators.summary(estimators.by_split(runs))
    assert lines == [
        "- Against `es5`: 2 of 2 in NLPD; 1 of 2 in CRPS (tie yacht, wine).",
        "- Against `nn`: 0 of 2 in NLPD (lost yacht, wine); 1 of 2 in CRPS (tie yacht, wine).",
        "- The RMSE of `dak5` is at most 1.03 times that of the best of nn, es5, ple5 on 0 of 2 "
        "sets (yacht: 1.04, wine: 1.04).",
        "- 95 % intervals of `dak5` cover 0.92 to 0.97 on 1 of 2 sets (wine: 0.900).",
    ]


def test_missing_cells_cost_what_the_same_split_loses():
    runs = []
    for split, whole in enumerate((1.0, 2.0)):
        for name, cost in (("dak5", 0.5), ("catboost", 0.75)):
            runs.append(make_run(name, split, nlpd=whole))
            runs.append(make_run(name, split, missing=0.2, nlpd=whole + cost))
    (row,) = estimators.missing_rows(estimators.by_split(runs))
    assert row[:4] == ["wine", "2", "+0.500 ± 0.000", "+0.750 ± 0.000"]
    assert row[5] == "+0.250 ± 0.000"


def test_rows_with_missing_cells_are_runs_of_their_own(tmp_path):
    arguments = ("--quick", "--model", "dak5", "--out", tmp_path)
    invoke(estimators.main, *arguments)
    invoke(estimators.main, *arguments, "--missing", "0.2")
    whole, gaps = (run["metrics"]["dak5"]["nlpd"] for run in read_runs(tmp_path))
    assert whole != gaps


def test_scores_of_a_perfect_prediction():
    y = np.arange(5.0)
    prediction = StudentPrediction(y, np.zeros(5), np.ones(5))
    scores = estimators.score(prediction, y)
    assert scores["rmse"] == 0
    assert scores["coverage_95"] == 1
    assert scores["nlpd"] == pytest.approx(0.5 * np.log(2 * np.pi))


def test_networks_of_mean_and_noise_learn_both():
    x = torch.randn(400, 1)
    y = x + (0.1 + 0.9 * (x > 0)) * torch.randn(400, 1)
    network = StackedMLP((1, 32, 2), 2, seed=0, kind="noise")
    train_with_early_stopping(network, Rows(x, y, torch.ones(400)), 0, 60, 2e-2)
    with torch.no_grad():
        _, log_var = network.moments(torch.tensor([[-1.0], [1.0]]))
    assert (log_var[:, 1] - log_var[:, 0] > 1).all()


@pytest.mark.parametrize("kind", ["noise", "mean", "classes"])
def test_losses_of_stacked_networks_are_log_probabilities(kind):
    x, labels = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    network = StackedMLP((3, 4, 2 if kind != "mean" else 1), 2, seed=0, kind=kind)
    outputs = network.outputs(x)
    if kind == "classes":
        logits = outputs.mT.flatten(0, 1)  # (E N, K)
        expected = nn.functional.cross_entropy(logits, labels.repeat(2), reduction="none").view(
            2, 5
        )
        found = network.losses(x, labels)
    else:
        y = torch.randn(5, 1)
        mean, log_var = network.moments(x)
        expected = -torch.distributions.Normal(mean, (0.5 * log_var).exp()).log_prob(y[:, 0])
        found = network.losses(x, y)
        torch.testing.assert_close(mean, outputs[:, 0])
    torch.testing.assert_close(found, expected)


def test_early_stopping_does_not_train_a_member_on_its_held_out_rows():
    x = torch.randn(100, 2)
    rows = Rows(x, x[:, :1], torch.ones(100))
    held_out = train_with_early_stopping(StackedMLP((2, 4, 1), 3, 0, "mean"), rows, 0, 2, 1e-2)
    spoilt = rows.y.clone()
    spoilt[held_out[1]] = 1e3  # only the second member must not notice
    networks = [StackedMLP((2, 4, 1), 3, 0, "mean") for _ in range(2)]
    for network, y in zip(networks, (rows.y, spoilt), strict=True):
        train_with_early_stopping(network, Rows(x, y, rows.weights), 0, 1, 1e-2)
    first, second = (network.tensors["weight0"] for network in networks)
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[0], second[0])


def test_embedded_columns_add_up_to_the_column_between_quantiles():
    x = np.random.default_rng(0).normal(size=(50, 1))
    encoded = InputColumns(x, is_embedded=True)(x).double().numpy()
    edges = np.quantile(x[:, 0], np.linspace(0, 1, 17))
    np.testing.assert_allclose(encoded[:, 1:] @ np.diff(edges) + edges[0], x[:, 0], atol=1e-6)


def test_a_calibrated_ensemble_is_as_wide_as_its_errors():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 3))
    y = x[:, 0] + 0.3 * rng.normal(size=600)
    model = NetworkRegressor(5, "noise", 0, 100, learning_rate=2e-2)
    model.fit(x[:300], y[:300])
    prediction = model.predict_dist(x[300:], is_calibrated=True)
    coverage = estimators.score(prediction, y[300:])["coverage_95"]
    assert abs(coverage - 0.95) < 4 * (0.95 * 0.05 / 300 + 0.95 * 0.05 / 180) ** 0.5


@pytest.mark.parametrize("name", estimators.PEERS)
def test_peers_predict_distributions_and_are_scored(name, tmp_path):
    _needs_package_of(name)
    invoke(estimators.main, "--quick", "--model", name, "--out", tmp_path)
    (run,) = read_runs(tmp_path)
    scores = run["metrics"][name]
    assert np.isfinite(list(scores.values())).all()
    assert scores["interval_score_95"] >= scores["width_95"]
    assert name in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize("name", estimators.PEERS)
def test_peers_learn_a_line_and_its_noise(name):
    _needs_package_of(name)
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (400, 2))
    y = 10 * x[:, 0] + np.where(x[:, 1] > 0, 2.0, 0.2) * rng.normal(size=400)
    model = estimators.build(name, 0, 300 if name in table_peers.PEERS else 100)
    model.fit(x[:300], y[:300])
    prediction = model.predict_dist(x[300:])
    assert np.mean((y[300:] - prediction.mean) ** 2) < 0.3 * y.var()
    has_one_noise = name in ("nn", "gp")
    is_noisy = x[300:, 1] > 0
    ratio = prediction.std[is_noisy].mean() / prediction.std[~is_noisy].mean()
    assert ratio > 1.2 or has_one_noise


def _needs_package_of(name):
    package = {"gp": "gpytorch"}.get(name, name)
    if name in table_peers.PEERS:
        pytest.importorskip(package)
