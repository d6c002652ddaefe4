"""Novelty of rows of tables: that of the members, compared with rows that they have not seen."""

import math

import numpy as np
import pytest
import safetensors.torch
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits

from pyro_dak import CheckpointError, DAKClassifier, DAKRegressor
from pyro_dak.tables.novelty import _leverages
from tests import reference
from tests.training.runs import write_sums

FAST = {"epochs": 10, "hidden_layer_sizes": (16, 8), "random_state": 0, "progress": False}


def make_rows(num_rows, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(num_rows, 3))
    return X, X[:, 0] - X[:, 1] ** 2 + 0.1 * rng.normal(size=num_rows)


def fitted(kind=DAKRegressor, num_rows=600, **options):
    X, y = make_rows(num_rows)
    return kind(**(FAST | options)).fit(X, y if kind is DAKRegressor else y > -1)


def kolmogorov_distance(shares):
    steps = np.arange(len(shares) + 1) / len(shares)
    sorted_shares = np.sort(shares)
    return max((sorted_shares - steps[:-1]).max(), (steps[1:] - sorted_shares).max())


def test_leverage_is_in_units_of_the_median_training_row():
    estimator = fitted(ensemble_size=2, numeric_embedding=None)
    X, _ = make_rows(60)
    ensemble = estimator.ensemble_.to("cpu", torch.float64)
    x = torch.from_numpy(estimator._standardized(X, math.inf))
    held_out = torch.tensor([[0, 1, 2], [3, 4, 5]])
    with torch.no_grad():
        features = ensemble.features(x)
        pairs = _leverages(ensemble, x, held_out)
    for (leverage, scores), own, apart in zip(pairs, features, held_out, strict=True):
        is_kept = [n not in apart for n in range(60)]
        expected = reference.leverages(own.mT[is_kept], own.mT)
        unit = (expected / (1 - expected))[is_kept].median()
        torch.testing.assert_close(leverage(own.mT), expected / unit, rtol=1e-5, atol=0)
        assert float(scores.median()) == pytest.approx(1)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", [DAKRegressor, DAKClassifier])
def test_strange_rows_have_small_novelty(kind, size):
    estimator = fitted(kind, ensemble_size=size)
    X, _ = make_rows(500, seed=1)
    usual, strange = estimator.predict_dist(X), estimator.predict_dist(X + 30)
    assert (strange.novelty < 0.05).all()
    assert strange.strangeness("leverage").min() > np.quantile(usual.strangeness("leverage"), 0.99)
    assert usual.novelty.shape == usual.strangeness().shape == (500,)


@pytest.mark.parametrize("options", [
    {"num_rows": 1500, "early_stopping": False},
    {"num_rows": 1500, "refit": False, "validation_fraction": 0.4},
    {"num_rows": 1500},
], ids=["training rows", "held-out rows", "defaults"])  # fmt: skip
@pytest.mark.parametrize("size", [1, 5])
def test_novelty_of_usual_rows_is_uniform(options, size):
    estimator = fitted(ensemble_size=size, **options)
    shares = estimator.predict_dist(make_rows(1500, seed=1)[0]).novelty
    n, m = len(estimator.novelty_.tails.leverage), 1500
    assert kolmogorov_distance(shares) < (0.87 + 4 * 0.26) * math.sqrt(1 / n + 1 / m)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 4])
def test_rows_of_a_memorised_table_do_not_make_all_others_strange(size):
    """Among training rows a fifth of the test rows would be below 0.05."""
    X, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(X))
    train, test = order[:1000], order[1000:]
    estimator = DAKClassifier(size, epochs=100, random_state=0, progress=False)
    shares = estimator.fit(X[train], y[train]).predict_dist(X[test]).novelty
    assert 0.005 < np.mean(shares < 0.05) < 0.1


@pytest.mark.parametrize("num_rows", [12, 40, 150])
def test_small_tables_have_novelty(num_rows):
    estimator = fitted(num_rows=num_rows, ensemble_size=2)
    shares = estimator.predict_dist(make_rows(20, seed=1)[0]).novelty
    assert ((shares > 0) & (shares <= 1)).all()


def test_novelty_does_not_depend_on_the_rows_beside():
    estimator = fitted(DAKClassifier, ensemble_size=2)
    X, _ = make_rows(30, seed=1)
    alone = [estimator.predict_dist(X[n : n + 1]).strangeness()[0] for n in range(30)]
    np.testing.assert_allclose(estimator.predict_dist(X).strangeness(), alone, rtol=1e-9)


@pytest.mark.parametrize("input_units", [False, True])
@pytest.mark.parametrize("kind", [DAKRegressor, DAKClassifier])
def test_a_loaded_estimator_has_the_same_novelty(tmp_path, kind, input_units):
    estimator = fitted(kind, ensemble_size=2, input_units=input_units)
    X, _ = make_rows(30, seed=1)
    loaded = kind.load(estimator.save(tmp_path / "model"))
    found = [e.predict_dist(X).strangeness() for e in (estimator, loaded)]
    np.testing.assert_array_equal(*found)


def test_after_partial_fit_of_the_network_novelty_is_not_known():
    estimator = fitted()
    X, y = make_rows(50)
    estimator.partial_fit(X, y, update_network=True)
    with pytest.raises(ValueError, match="does not know how strange its rows are"):
        _ = estimator.predict_dist(X).novelty
    with pytest.raises(ValueError, match="only a prediction of classes has the entropy"):
        clone(estimator).fit(X, y).predict_dist(X).strangeness("entropy")


@pytest.mark.parametrize(("name", "shape", "match"), [
    ("novelty.tails.leverage", (0,), "no rows to compare"),
    ("novelty.tails.leverage", None, "tails.leverage"),
    ("novelty.members.0.root", (3, 3), "size mismatch"),
    ("novelty.members.0.root", None, "Missing key"),
    ("novelty.members.7.root", (3, 3), "Unexpected key"),
])  # fmt: skip
def test_statistics_that_do_not_fit_are_refused(tmp_path, name, shape, match):
    path = fitted().save(tmp_path / "model") / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors.pop(name, None)
    if shape is not None:
        tensors[name] = torch.ones(shape)
    safetensors.torch.save_file(tensors, path)
    write_sums(path.parent)
    with pytest.raises(CheckpointError, match=match):
        DAKRegressor.load(path.parent)


def test_an_estimator_without_statistics_loads(tmp_path):
    estimator = fitted()
    estimator.novelty_ = None
    loaded = DAKRegressor.load(estimator.save(tmp_path / "model"))
    assert loaded.predict_dist(make_rows(5)[0]).novelty_scores is None
