"""The comparison of the classifiers, end to end on a few rows."""

import numpy as np
import pytest

from experiments import classifiers, table_peers
from experiments.runs import read_runs
from tests.experiments.command import invoke


def test_comparison_runs_resumes_and_writes_its_table(tmp_path):
    for _ in range(2):
        output = invoke(classifiers.main, "--quick", "--out", tmp_path)
    assert "3 of 3 runs are recorded already; 0 to make" in output
    for run in read_runs(tmp_path):
        assert 0.6 < run["metrics"][run["config"]["model"]]["accuracy"] <= 1
    assert "| breast_cancer | 1 | nll |" in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize("dataset", ["breast_cancer", "wine_cultivars", "digits"])
def test_splits_hold_every_row_once_and_all_classes(dataset):
    x, x_test, labels, labels_test = classifiers.load(dataset, 0)
    assert len(x) == len(labels)
    assert len(x_test) == len(labels_test) == -(-(len(x) + len(x_test)) // 5)
    assert set(labels) == set(labels_test) == set(range(labels.max() + 1))
    other = classifiers.load(dataset, 1)[1]
    assert not np.array_equal(x_test, other)


def test_scores_are_means_over_rows_and_certain_errors_cost_a_finite_number():
    probs = np.array([[0.8, 0.2], [0.4, 0.6], [1.0, 0.0]])
    scores = classifiers.score(probs, np.array([0, 0, 1]))
    assert scores["accuracy"] == pytest.approx(1 / 3)
    assert scores["nll"] == pytest.approx(-np.log([0.8, 0.4, 1e-7]).mean())
    assert scores["ece"] == pytest.approx((0.2 + 0.6 + 1.0) / 3)


@pytest.mark.parametrize("name", classifiers.MODELS)
def test_models_learn_three_classes(name):
    if name in ("lightgbm", "catboost"):
        pytest.importorskip(name)
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1, 2], 60)
    x = rng.normal(size=(180, 4)) + 3 * np.eye(3, 4)[labels]
    model = classifiers.build(name, 0, 30 if name not in table_peers.CLASSIFIERS else 100)
    model.fit(x, labels)
    probs = model.predict_proba(x)
    assert probs.shape == (180, 3)
    np.testing.assert_allclose(probs.sum(1), 1)
    assert classifiers.score(probs, labels)["accuracy"] > 0.85
