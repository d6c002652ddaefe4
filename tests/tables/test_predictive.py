"""Predictive distributions, and how their width and tails are found."""

import math

import numpy as np
import pytest
from scipy import stats

from pyro_dak.tables.predictive import (
    ClassMixture,
    StudentPrediction,
    calibrate,
    covering_scale,
    fit_student,
    mixture_factor,
)


@pytest.mark.parametrize("df", [2.5, 5.0, math.inf])
def test_predictive_distribution_is_student_t(df):
    mean, epistemic, aleatoric = np.array([1.0, -2.0]), np.array([0.5, 1.0]), np.array([0.5, 2.0])
    prediction = StudentPrediction(mean, epistemic, aleatoric, df)
    scale = np.sqrt((epistemic + aleatoric) * (1 - 2 / df))
    expected = stats.t(df, mean, scale) if math.isfinite(df) else stats.norm(mean, scale)
    np.testing.assert_allclose(prediction.log_prob([0.3, 4.0]), expected.logpdf([0.3, 4.0]))
    np.testing.assert_allclose(prediction.quantile(0.2), expected.ppf(0.2))
    np.testing.assert_allclose(prediction.cdf([0.3, 4.0]), expected.cdf([0.3, 4.0]))
    np.testing.assert_allclose(prediction.interval(0.8), expected.interval(0.8))
    np.testing.assert_allclose(prediction.std, expected.std())
    draws = prediction.sample(20_000, random_state=0)
    share = (draws < expected.ppf(0.3)).mean(0)
    assert (np.abs(share - 0.3) < 4 * np.sqrt(0.3 * 0.7 / 20_000)).all()
    with pytest.raises(ValueError, match="`q` must lie"):
        prediction.quantile(1.0)
    with pytest.raises(ValueError, match="`level` must lie"):
        prediction.interval(0.0)
    with pytest.raises(ValueError, match="`y` must have shape"):
        prediction.log_prob([1.0])


@pytest.mark.parametrize("df", [3.0, math.inf])
def test_scale_and_tails_of_residuals_are_found(df):
    rng = np.random.default_rng(0)
    r = 2 * (rng.standard_t(df, 20_000) if math.isfinite(df) else rng.standard_normal(20_000))
    scale2, found = fit_student(r)
    assert scale2 == pytest.approx(4, rel=0.05)
    assert found == df


@pytest.mark.parametrize("df", [4.0, math.inf])
def test_covering_scale_covers_the_share_of_residuals(df):
    r = np.random.default_rng(0).standard_normal(199)
    scale = math.sqrt(covering_scale(r, df))
    limit = scale * (stats.t(df).ppf(0.975) if math.isfinite(df) else stats.norm.ppf(0.975))
    assert np.sum(np.abs(r) <= limit * (1 + 1e-12)) == 190  # 0.95 (199 + 1)
    assert np.sum(np.abs(r) <= limit * (1 - 1e-6)) == 189


def test_entropy_splits_into_noise_and_what_is_not_known():
    probs = np.array([[0.5, 0.5], [1.0, 0.0]])
    mixture = ClassMixture(probs, np.array([0.2, 0.0]))
    np.testing.assert_allclose(mixture.entropy, [math.log(2), 0])
    np.testing.assert_allclose(mixture.mutual_information, [math.log(2) - 0.2, 0])


@pytest.mark.parametrize("size", [2, 5, 20])
@pytest.mark.parametrize("between", [0.2, 0.5])
def test_mixture_has_the_scale_of_the_error_of_its_mean(between, size):
    """Members err by noise that they share, and by noise of their own with variance `between`."""
    rng, n = np.random.default_rng(0), 40_000
    y = np.repeat(math.sqrt(1 - between) * rng.standard_normal((1, n, 1)), size, 0)
    mean = math.sqrt(between) * rng.standard_normal((size, n, 1))
    pair = [part.reshape(2, n, 1) for part in (y[:2], mean[:2])]
    shifted = [np.stack((part[0], np.roll(part[1], n // 2, 0))) for part in pair]
    factor = mixture_factor(*shifted, np.ones((2, n, 1)), n // 2, math.inf, size)
    var = factor * (1 + mean.var(0))
    error = y[0] - mean.mean(0)
    assert np.mean(error**2 / var) == pytest.approx(1, rel=0.1)


def test_calibrated_intervals_of_a_single_member_cover_held_out_rows():
    y = np.random.default_rng(0).standard_normal((1, 199, 1))
    var = np.full_like(y, 1e-4)
    scale, df, factor = calibrate(y, 0 * y, var, size=1)
    lower, upper = StudentPrediction(0 * y, 0 * y, scale * var / (1 - 2 / df), df).interval(0.95)
    assert np.mean((lower <= y) & (y <= upper)) >= 0.95
    assert factor == 1


def test_calibration_of_several_members_narrows_their_mixture():
    y, mean = np.random.default_rng(0).standard_normal((2, 5, 200, 1))
    scale, df, factor = calibrate(y, mean, np.ones_like(y), size=5)
    assert (scale, df) == fit_student(y - mean)
    assert factor == mixture_factor(y, mean, np.full_like(y, scale), 100, df, 5) < 1


def test_mixture_factor_is_one_for_one_member_or_without_overlap():
    y, var = np.random.default_rng(0).standard_normal((2, 8, 1)), np.ones((2, 8, 1))
    assert mixture_factor(y, 0 * y, var, 4, math.inf, size=1) == 1
    assert mixture_factor(y, 0 * y, var, 0, math.inf, size=2) == 1


@pytest.mark.parametrize("size", [1, 4])
def test_rows_with_weights_calibrate_as_so_many_rows_do(size):
    rng = np.random.default_rng(0)
    y, mean = rng.standard_normal((2, 4, 200, 2))
    var = rng.uniform(0.5, 2, (4, 200, 2))
    weights = np.where(np.arange(200) % 2 == 0, 2.0, 1e-12)
    used = [part[:, ::2] for part in (y, mean, var)]
    expected = calibrate(*used, size, overlap=100)
    found = calibrate(y, mean, var, size, np.tile(weights, (4, 1)), overlap=200)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_few_residuals_have_no_normal_tails():
    """With a scale that is known from n residuals, the next one has a t with n degrees."""
    rng, covered = np.random.default_rng(0), []
    for _ in range(2000):
        scale2, df = fit_student(rng.standard_normal(10))
        assert df <= 10
        limit = math.sqrt(scale2) * stats.t(df).ppf(0.975)
        covered.append(stats.norm.cdf(limit) - stats.norm.cdf(-limit))
    assert np.mean(covered) > 0.93
