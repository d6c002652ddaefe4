"""How a classifier chooses temperature, variance and the epoch to stop at: by labels held out."""

import math

import numpy as np
import pytest
import torch

from pyro_dak import DAKClassifier
from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.tables.ensemble import Ensemble
from pyro_dak.tables.estimators import _log_probs
from pyro_dak.tables.rows import Rows


class Members(Ensemble):
    """An ensemble of nothing but these moments of f at the held-out rows, `(E, n, K)` each."""

    def __init__(self, mean, var):
        self.mean, self.var = torch.as_tensor(mean), torch.as_tensor(var)

    def moments(self, x):
        return FunctionMoments(self.mean, self.var)


def held_out(labels, weights=None):
    labels = torch.as_tensor(labels)
    weights = torch.ones(labels.shape) if weights is None else torch.as_tensor(weights)
    return Rows(torch.zeros(*labels.shape, 1), labels, weights.double())


def calibrated(members, rows, size=1, overlap=0):
    model = DAKClassifier(ensemble_size=size)
    model._calibrate(rows, members, overlap, False)
    return model


def labels_of(f, rng):
    """One label for each row, drawn from softmax(f)."""
    probs = torch.as_tensor(f).softmax(-1).numpy()
    return (probs.cumsum(-1) < rng.uniform(size=(*f.shape[:-1], 1))).sum(-1).clip(max=2)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_temperature_is_that_of_the_labels(temperature):
    """The maximum of the likelihood has the inverse of the Fisher information as its variance."""
    rng, n = np.random.default_rng(0), 4000
    f = rng.normal(size=(1, n, 3))
    model = calibrated(Members(temperature * f, np.full_like(f, 1e-8)), held_out(labels_of(f, rng)))
    probs = torch.as_tensor(f).softmax(-1).numpy()
    # d log p_y / d log T = -(f_y - E f), whose variance is that of f under the probabilities.
    variance = (probs * f**2).sum(-1) - (probs * f).sum(-1) ** 2
    error = 1 / math.sqrt(variance.sum())
    spacing = math.log(100) / 40
    assert abs(math.log(model.calibration_ / temperature)) < 4 * error + spacing / 2


@pytest.mark.parametrize("factor", [0.1, 1.0])
def test_variance_of_f_is_that_of_the_labels(factor):
    """Labels come from f that scatter by `factor` times the variance that the guide says.

    Half of the rows have hardly any variance, and show the temperature.
    """
    rng, n = np.random.default_rng(0), 20_000
    mean = 2 * rng.normal(size=(1, n, 3))
    var = np.where(np.arange(n)[:, None] % 2 == 0, 1e-6, 30.0) * np.ones_like(mean)
    f = mean + np.sqrt(factor * var) * rng.normal(size=mean.shape)
    model = calibrated(Members(mean, var), held_out(labels_of(f, rng)))
    assert model.variance_factor_ == factor
    assert model.calibration_ == pytest.approx(1, rel=0.3)


def test_certain_rows_whose_draws_scatter_lose_the_scatter():
    """No temperature is as good as less variance, which the labels of held-out rows show."""
    rng, n = np.random.default_rng(0), 300
    labels = rng.integers(0, 3, (1, n))
    mean = 8.0 * np.eye(3)[labels]
    wrong = rng.uniform(size=(1, n)) < 0.02
    labels[wrong] = (labels[wrong] + 1) % 3
    members, rows = Members(mean, np.full_like(mean, 30.0)), held_out(labels)
    model = calibrated(members, rows)
    assert model.variance_factor_ < 1

    def nll(temperature, factor):
        log_probs = _log_probs(members.moments(rows.x), temperature, factor)[0]
        return -log_probs.gather(-1, rows.y.unsqueeze(-1)).mean()

    best = min(nll(temperature, 1.0) for temperature in np.logspace(-1, 1, 41))
    assert nll(model.calibration_, model.variance_factor_) < best


def test_scores_are_the_naive_loss_of_labels_at_the_best_pair():
    rng = np.random.default_rng(0)
    mean, var = rng.normal(size=(2, 2, 7, 3))
    var, labels = var**2, rng.integers(0, 3, (2, 7))
    weights = rng.uniform(0.5, 2, (2, 7))
    rows = held_out(labels, weights)
    found = DAKClassifier()._scores(rows, Members(mean, var)).numpy()
    number = weights.sum() ** 2 / (weights**2).sum()
    losses = {}
    for factor in (0.01, 0.03, 0.1, 0.3, 1.0):
        for log_temperature in np.linspace(-1, 1, 13) * math.log(10):
            T = math.exp(log_temperature)
            scores = np.empty((2, 7))
            for e in range(2):
                for n in range(7):
                    f = mean[e, n] / T / np.sqrt(1 + math.pi / 8 * factor * var[e, n] / T**2)
                    log_probs = f - math.log(np.exp(f).sum())
                    scores[e, n] = -log_probs[labels[e, n]] - log_probs.mean() / number
            scores += 0.5 * log_temperature**2 / number
            losses[float((weights * scores).sum())] = scores
    np.testing.assert_allclose(found, losses[min(losses)], rtol=1e-5)


def test_stopping_does_not_ask_how_sure_the_networks_are():
    """f that is twice as large has the same probabilities at twice the temperature."""
    rng = np.random.default_rng(0)
    f = rng.normal(size=(1, 500, 3))
    rows, var, step = held_out(labels_of(f, rng)), np.full_like(f, 0.1), 10 ** (1 / 6)
    once, twice = (
        DAKClassifier()._scores(rows, Members(scale * f, scale**2 * var)).numpy()
        for scale in (1.0, step)
    )
    # What is left is the prior of log T, 0.5 log(T)^2 / n.
    np.testing.assert_allclose(twice, once, atol=0.5 * (2 * math.log(step)) ** 2 / 500)


@pytest.mark.parametrize("size", [1, 3])
def test_rows_with_weights_count_as_so_many_rows(size):
    rng = np.random.default_rng(0)
    f = rng.normal(size=(3, 120, 3))
    labels = np.tile(labels_of(f[:1], rng), (3, 1))
    weights = np.where(np.arange(120) % 2 == 0, 2.0, 1e-12) * np.ones((3, 1))
    part = Members(2 * f[:, ::2], np.ones((3, 60, 3))), held_out(labels[:, ::2])
    whole = Members(2 * f, np.ones((3, 120, 3))), held_out(labels, weights)
    expected = calibrated(*part, size=size, overlap=30 * (size > 1))
    found = calibrated(*whole, size=size, overlap=60 * (size > 1))
    assert found.calibration_ == pytest.approx(expected.calibration_)
    assert found.variance_factor_ == expected.variance_factor_


def test_average_of_members_that_err_alone_is_sharpened():
    """Two members have not seen these rows; the average of both is too uncertain of them."""
    rng, n = np.random.default_rng(0), 2000
    f = 2 * rng.normal(size=(1, n, 3))
    members = f + 1.5 * rng.normal(size=(5, n, 3))
    labels = np.tile(labels_of(f, rng), (5, 1))
    pair = Members(members, np.full_like(members, 1e-8)), held_out(labels)
    one = calibrated(*pair, size=1).calibration_
    found = calibrated(*pair, size=5, overlap=n)
    assert found.calibration_ < one
    log_probs = members / found.calibration_
    log_probs = log_probs - np.log(np.exp(log_probs).sum(-1, keepdims=True))
    alone = members / one - np.log(np.exp(members / one).sum(-1, keepdims=True))

    def nll(parts):
        return -np.log(np.take_along_axis(np.exp(parts).mean(0), labels[0][:, None], -1)).mean()

    assert nll(log_probs) < nll(alone)


def test_files_without_the_factor_of_the_variance_are_read_with_one(tmp_path):
    """Earlier versions did not have it."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 2)).astype(np.float32)
    options = {"hidden_layer_sizes": (8,), "num_units": 2, "epochs": 1, "progress": False}
    torch.set_default_dtype(torch.float32)
    model = DAKClassifier(2, **options, random_state=0).fit(X, X[:, 0] > 0)
    model.variance_factor_ = 0.3
    loaded = DAKClassifier.load(model.save(tmp_path / "new"))
    np.testing.assert_array_equal(loaded.predict_proba(X), model.predict_proba(X))
    del model.variance_factor_
    assert DAKClassifier.load(model.save(tmp_path / "old")).variance_factor_ == 1
