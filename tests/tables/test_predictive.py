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
    fit_members,
    fit_student,
    mixture_factor,
)


@pytest.mark.parametrize("df", [2.1, 2.5, 5.0, math.inf])
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


@pytest.mark.parametrize("df", [2.1, 3.0, math.inf])
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
    scale, df, factor, members = calibrate(y, 0 * y, var, size=1)
    factor = scale * factor / (1 - 2 / df)
    lower, upper = StudentPrediction(0 * y, 0 * y, factor * var, df).interval(0.95)
    assert np.mean((lower <= y) & (y <= upper)) >= 0.95
    assert members is None


def test_calibration_of_several_members_narrows_their_mixture():
    y, mean = np.random.default_rng(0).standard_normal((2, 5, 200, 1))
    scale, df, factor, members = calibrate(y, mean, np.ones_like(y), size=5, is_refit=False)
    assert (scale, df) == (pytest.approx(fit_student(y - mean)[0]), fit_student(y - mean)[1])
    assert members == [1.0] * 5
    narrowed = mixture_factor(y, mean, np.full_like(y, scale), 100, df, 5)
    covering = covering_scale((y - mean) / math.sqrt(scale), df)
    assert factor == pytest.approx(narrowed * max(1, covering))
    assert factor < 1


def test_intervals_cover_where_no_t_distribution_fits():
    """One row of eight has errors that are ten times as large: too many for any tails.

    Members agree, so that nothing is narrowed. Intervals cover less than two standard errors of a
    share above 95 % of the same rows, and of new ones what calibration on 1,000 rows can promise.
    """
    rng = np.random.default_rng(0)

    def errors(number):
        return np.where(rng.uniform(size=number) < 1 / 8, 10.0, 1.0) * rng.standard_normal(number)

    y = np.tile(errors(1000)[None, :, None], (5, 1, 1))
    scale, df, factor, _ = calibrate(y, 0 * y, np.ones_like(y), size=5, overlap=1000)
    s2, fitted_df = fit_student(y)
    fresh = errors(100_000)

    def covered(squared_scale):
        return np.mean(np.abs(fresh) <= math.sqrt(squared_scale) * stats.t(df).ppf(0.975))

    assert (scale, df) == (s2, fitted_df)
    assert factor > 1
    assert abs(covered(scale * factor) - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 1000)
    assert covered(scale) < covered(scale * factor)


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
    var[1] /= 20  # a member that is clearly too sure of itself
    expected = calibrate(*used, size, overlap=100, is_refit=False)
    found = calibrate(y, mean, var, size, np.tile(weights, (4, 1)), 200, is_refit=False)
    np.testing.assert_allclose(found[:3], expected[:3], rtol=1e-6)
    np.testing.assert_allclose(found[3], expected[3], rtol=1e-6)
    assert expected[3][1] > 4 or size == 1


def test_few_residuals_have_no_normal_tails():
    """With a scale that is known from n residuals, the next one has a t with n degrees."""
    rng, covered = np.random.default_rng(0), []
    for _ in range(2000):
        scale2, df = fit_student(rng.standard_normal(10))
        assert df <= 10
        limit = math.sqrt(scale2) * stats.t(df).ppf(0.975)
        covered.append(stats.norm.cdf(limit) - stats.norm.cdf(-limit))
    assert np.mean(covered) > 0.93


@pytest.mark.parametrize("df", [2.1, 2.5, 5.0, math.inf])
def test_crps_is_the_integral_over_all_thresholds(df):
    """Of (F(t) - [y <= t])^2, by the trapezoidal rule."""
    mean, var, y = np.array([1.0, -2.0]), np.array([1.0, 9.0]), np.array([0.3, 4.0])
    prediction = StudentPrediction(mean, 0.5 * var, 0.5 * var, df)
    grid = np.sinh(np.linspace(-12, 12, 20_001))
    t = mean[:, None] + np.sqrt(var)[:, None] * grid
    scale = (prediction.scale / np.sqrt(var))[:, None]
    F = stats.t.cdf(grid / scale, df) if math.isfinite(df) else stats.norm.cdf(grid / scale)
    squares = (F - (t >= y[:, None])) ** 2
    expected = np.sum((squares[:, 1:] + squares[:, :-1]) / 2 * np.diff(t), -1)
    np.testing.assert_allclose(prediction.crps(y), expected, rtol=1e-3)


def member_residuals(scales, num_rows, df=5.0, seed=0):
    rng = np.random.default_rng(seed)
    return np.sqrt(scales)[:, None, None] * rng.standard_t(df, (len(scales), num_rows, 1))


def test_members_that_are_alike_have_one_scale():
    """With a chance of 1 % they do not."""
    num_alike = 0
    for seed in range(50):
        r = member_residuals(np.ones(5), 60, seed=seed)
        scales, df = fit_members(r)
        is_alike = (scales == scales[0]).all()
        num_alike += is_alike
        if is_alike:
            assert (scales[0], df) == fit_student(r)
    assert num_alike >= 47


def test_a_member_that_is_too_sure_does_not_widen_the_others():
    """One scale for all is too wide for four of five, and takes the fifth for heavy tails."""
    true = np.array([1.0, 1.0, 1.0, 1.0, 24.0])
    errors, pooled_errors = [], []
    for seed in range(20):
        r = member_residuals(true, 60, df=1e6, seed=seed)
        scales, df = fit_members(r)
        s2, pooled_df = fit_student(r)
        errors.append(np.log(scales / true))
        pooled_errors.append(np.log(s2 / true))
        assert df > pooled_df
    # The squared scale of 60 normal residuals has a relative standard error of sqrt(2 / 60).
    assert (np.abs(np.mean(errors, 0)) < 4 * math.sqrt(2 / 60 / 20) + 0.05).all()
    assert np.mean(np.square(errors)) < 0.1 * np.mean(np.square(pooled_errors))


def test_shrunk_scales_are_those_of_a_naive_loop():
    r = member_residuals(np.array([1.0, 2.0, 8.0]), 40)
    scales, df = fit_members(r)
    logs = []
    for own in r:
        s2 = np.mean(own**2)
        for _ in range(1000):
            s2 = np.mean((df + 1) * own**2 / (df + own**2 / s2))
        logs.append(math.log(s2))
    v = 2 * (1 + 3 / df) / 40
    tau2 = np.var(logs, ddof=1) - v  # members with equally many rows
    shrunk = np.mean(logs) + tau2 / (tau2 + v) * (logs - np.mean(logs))
    found = np.log(scales)
    np.testing.assert_allclose(found - found.mean(), shrunk - shrunk.mean(), atol=1e-6)
    assert fit_student(r / np.sqrt(scales)[:, None, None])[0] == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("size", [2, 5])
def test_mixture_factor_counts_that_averages_of_uncertain_variances_are_too_large(size):
    """Members agree on the mean, and are each unsure of the variance by a factor of their own."""
    rng, n = np.random.default_rng(0), 20_000
    variances = np.exp(0.8 * rng.standard_normal((size, n, 1)))
    y = np.repeat(rng.standard_normal((1, n, 1)), size, 0)
    variances *= np.mean(y**2 / variances)  # calibrated, with normal tails
    pair = [np.stack((p[0], np.roll(p[1], n // 2, 0))) for p in (y, variances)]
    factor = mixture_factor(pair[0], 0 * pair[0], pair[1], n // 2, math.inf, size)
    needed = np.mean(y[0] ** 2 / variances.mean(0))
    assert needed < 0.8
    assert factor == pytest.approx(needed, rel=0.1)


def test_a_row_on_which_two_members_disagree_wildly_does_not_narrow_the_mixture():
    rng = np.random.default_rng(0)
    y = np.repeat(rng.standard_normal((1, 200, 1)), 2, 0)
    mean = 0.3 * rng.standard_normal((2, 200, 1))
    expected = mixture_factor(y, mean, np.ones_like(y), 200, 5.0, 5)
    mean[0, 7] = 1e4
    found = mixture_factor(y, mean, np.ones_like(y), 200, 5.0, 5)
    assert found == pytest.approx(expected, rel=0.1)
