"""Conformal intervals of MAPIE around the estimators as they are."""

import numpy as np
import pytest
import torch
from scipy.stats import beta

from pyro_dak import DAKAdditiveRegressor, DAKRegressor

regression = pytest.importorskip("mapie.regression")
scores = pytest.importorskip("mapie.conformity_scores")

LEVEL, NUM_CALIBRATION, NUM_TEST = 0.9, 200, 1000
SMALL = {"hidden_layer_sizes": (16,), "num_units": 4, "level": 3, "epochs": 5, "progress": False}


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


def rows(num_rows, seed):
    """Noise that grows with the first column."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, (num_rows, 2))
    return X, np.sin(3 * X[:, 1]) + (0.1 + 0.9 * (X[:, 0] > 0)) * rng.normal(size=num_rows)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "model",
    [DAKRegressor(**SMALL, random_state=0), DAKAdditiveRegressor(level=3)],
    ids=["networks", "additive"],
)
def test_intervals_by_the_standard_deviation_score_cover_as_promised(model):
    model.fit(*rows(200, 0))
    score = scores.StdConformityScore()
    mapie = regression.SplitConformalRegressor(model, LEVEL, score, prefit=True)
    mapie.conformalize(*rows(NUM_CALIBRATION, 1))
    X, y = rows(NUM_TEST, 2)
    mean, intervals = mapie.predict_interval(X)
    np.testing.assert_allclose(mean, model.predict(X))
    lower, upper = intervals[:, :, 0].T
    # Given the calibration rows, the coverage of new rows has a beta distribution; then a count.
    k = int(np.ceil((NUM_CALIBRATION + 1) * LEVEL))
    low, high = beta.ppf([1e-4, 1 - 1e-4], k, NUM_CALIBRATION + 1 - k)
    error = 4 * np.sqrt(LEVEL * (1 - LEVEL) / NUM_TEST)
    assert low - error < np.mean((lower <= y) & (y <= upper)) < high + error
    # The intervals are as wide as the model says, times one factor.
    _, std = model.predict(X, return_std=True)
    ratio = (upper - lower) / std
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-6)
