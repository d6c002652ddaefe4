"""How estimators are trained and calibrated, and what they do with rows that are out of scale."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes

from pyro_dak import DAKClassifier, DAKRegressor
from pyro_dak.tables.base import scales, standardized

SMALL = {"hidden_layer_sizes": (16, 8), "num_units": 4, "level": 3, "progress": False}


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


def noisy(num_rows, seed):
    """A function of which half of the variance is noise, so that networks soon learn the noise."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(num_rows, 6))
    return X, X[:, 0] + np.sin(2 * X[:, 1]) + rng.normal(size=num_rows)


def coverage(model, X, y, level=0.95):
    lower, upper = model.predict_dist(X).interval(level)
    return np.mean((lower <= y) & (y <= upper))


def four_errors(share, *numbers):
    """Four standard errors of a share that is counted in samples of these sizes."""
    return 4 * math.sqrt(share * (1 - share) * sum(1 / n for n in numbers))


@pytest.mark.parametrize(("size", "seeds"), [(1, (1, 2, 3)), (5, (1,))])
def test_predictions_are_as_wide_as_their_errors(size, seeds):
    """The networks that are calibrated and those that predict are trained equally long.

    Networks of five folds that stop at different epochs have errors, in units of their own widths,
    that differ by a factor of ten. The errors of a single network vary, so these are averaged.
    """
    fresh = noisy(4000, seed=10**6)
    logs, shares = [], []
    for seed in seeds:
        model = DAKRegressor(size, random_state=seed, progress=False).fit(*noisy(600, seed=seed))
        prediction = model.predict_dist(fresh[0])
        logs.append(math.log(np.mean((fresh[1] - prediction.mean) ** 2 / prediction.variance)))
        shares.append([coverage(model, *fresh, level) for level in (0.5, 0.95)])
    # A mean of 300 squares of normal errors has a standard error of sqrt(2 / 300).
    assert abs(np.mean(logs)) < 4 * math.sqrt(2 / 300)
    for level, share in zip((0.5, 0.95), np.mean(shares, 0), strict=True):
        assert abs(share - level) < four_errors(level, 300, 4000)


@pytest.mark.parametrize(("split", "size"), [(0, 1), (2, 1), (4, 1), (1, 5)])
def test_intervals_of_the_diabetes_table_are_no_wider_than_without_any_input(split, size):
    X, y = load_diabetes(return_X_y=True)
    order = np.random.default_rng((2026, split)).permutation(len(X))  # the splits of `make demo`
    test, rows = np.split(order, [round(0.1 * len(order))])
    model = DAKRegressor(size, random_state=split, progress=False).fit(X[rows], y[rows])
    prediction = model.predict_dist(X[test])
    lower, upper = prediction.interval(0.95)
    assert np.mean(upper - lower) < 2 * 1.96 * y[rows].std()
    assert np.mean((lower <= y[test]) & (y[test] <= upper)) > 0.95 - four_errors(0.95, len(test))
    without_input = math.log(y[rows].std() * math.sqrt(2 * math.pi * math.e))
    assert -prediction.log_prob(y[test]).mean() < without_input


def test_warm_start_calibrates_on_rows_that_no_fit_was_trained_on():
    X, y = noisy(600, seed=0)
    model = DAKRegressor(warm_start=True, random_state=0, epochs=60, progress=False).fit(X, y)
    fresh = noisy(4000, seed=10**6)
    least = 0.95 - four_errors(0.95, 60, 4000)
    assert coverage(model, *fresh) > least
    order = np.random.default_rng(0).permutation(600)
    model.fit(X[order], y[order])
    assert coverage(model, *fresh) > least


def test_warm_start_of_several_members_is_as_wide_as_the_errors_of_their_mean():
    X, y = noisy(600, seed=0)
    model = DAKRegressor(3, warm_start=True, random_state=0, epochs=40, progress=False)
    model.fit(X, y).fit(X, y)
    assert model.mixture_factor_ < 1
    X, y = noisy(4000, seed=10**6)
    for level in (0.5, 0.95):
        assert abs(coverage(model, X, y, level) - level) < four_errors(level, 60, 4000)


@pytest.mark.parametrize("refit", [True, False])
def test_warm_start_is_refused_where_all_rows_have_been_trained_on(refit):
    X, y = noisy(100, seed=0)
    model = DAKRegressor(**SMALL, epochs=2, random_state=0, refit=refit).fit(X, y)
    model.set_params(warm_start=True)
    before = model.predict(X)
    with pytest.raises(ValueError, match="finds no rows to calibrate on"):
        model.fit(X, y)
    np.testing.assert_array_equal(model.predict(X), before)
    model.set_params(early_stopping=False).fit(X, y)
    assert model.calibration_ == 1
    partial = DAKRegressor(**SMALL, warm_start=True, epochs=2).fit(X, y)
    partial.partial_fit(X, y, update_network=True)
    with pytest.raises(ValueError, match="by `partial_fit`"):
        partial.fit(X, y)


def test_a_saved_estimator_goes_on_with_the_rows_that_it_has_kept_apart(tmp_path):
    X, y = noisy(200, seed=0)
    model = DAKRegressor(**SMALL, warm_start=True, epochs=3, random_state=0).fit(X, y)
    loaded = DAKRegressor.load(model.save(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.fit(X, y).predict(X), model.fit(X, y).predict(X))


@pytest.mark.parametrize("kind", [DAKRegressor, DAKClassifier])
def test_rows_of_hardly_any_weight_are_as_good_as_removed(kind):
    """Also from what decides when to stop and how wide predictions are."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (600, 3))
    is_noisy = np.arange(600) % 2 == 0
    y = np.sin(2 * X[:, 0]) + np.where(is_noisy, 20.0, 0.1) * rng.normal(size=600)
    y = y > 0 if kind is DAKClassifier else y
    options = {"random_state": 0, "progress": False, "epochs": 60}
    weighted = kind(**options).fit(X, y, np.where(is_noisy, 1e-6, 1.0))
    removed = kind(**options).fit(X[~is_noisy], y[~is_noisy])
    if kind is DAKRegressor:
        widths = [model.predict(X, return_std=True)[1].mean() for model in (weighted, removed)]
        assert max(widths) < 1.5 * min(widths)
        assert max(widths) < 0.5
    else:
        pairs = [(weighted, removed)]
        for seed in (1, 2):  # when to stop is decided by few rows, so one pair says little
            options["random_state"] = seed
            one = kind(**options).fit(X, y, np.where(is_noisy, 1e-6, 1.0))
            pairs.append((one, kind(**options).fit(X[~is_noisy], y[~is_noisy])))
        X = rng.uniform(-2, 2, (4000, 3))
        y = (np.sin(2 * X[:, 0]) + 0.1 * rng.normal(size=4000) > 0).astype(int)
        probs = [[m.predict_proba(X)[np.arange(4000), y] for m in pair] for pair in pairs]
        losses = -np.log(probs).mean((0, 2))  # with noisy rows that count it is 0.43 nats
        assert max(losses) < 1.3 * min(losses)


def test_a_few_rows_that_are_predicted_rightly_do_not_make_classes_certain():
    def rows(number, seed):
        rng = np.random.default_rng(seed)
        X = rng.normal(size=(number, 4))
        probs = 1 / (1 + np.exp(-3 * (np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2])))
        return X, (rng.uniform(size=number) < probs).astype(int)

    X, y = rows(4000, seed=10**6)
    losses = []
    for seed in range(4):  # by chance a few rows may be misleading
        model = DAKClassifier(random_state=seed, progress=False).fit(*rows(30, seed=seed))
        losses.append(-np.log(model.predict_proba(X)[np.arange(4000), y]).mean())
    assert np.mean(losses) < 1.1 * math.log(2)
    assert max(losses) < 1.5 * math.log(2)


@pytest.mark.parametrize("kind", [DAKRegressor, DAKClassifier])
def test_fits_in_threads_are_those_of_one_after_the_other(kind):
    X, y = noisy(100, seed=0)
    y = y > 0 if kind is DAKClassifier else y

    def fitted(seed):
        options = SMALL | {"epochs": 4, "batch_size": 16, "refit": False}
        model = kind(2, **options, random_state=seed).fit(X, y)
        return model.predict_proba(X) if kind is DAKClassifier else model.predict(X)

    expected = [fitted(seed) for seed in range(2)]
    state = torch.get_rng_state()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(fitted, [0, 1] * 6))
    for number, prediction in enumerate(found):
        np.testing.assert_array_equal(prediction, expected[number % 2])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("call", ["fit", "partial_fit"])
@pytest.mark.parametrize("warm_start", [True, False])
def test_a_call_that_fails_leaves_the_estimator_as_it_was(call, warm_start, error, monkeypatch):
    X, y = noisy(60, seed=0)
    model = DAKRegressor(**SMALL, epochs=2, random_state=0, warm_start=warm_start).fit(X, y)
    before = model.predict(X)

    def broken(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("pyro_dak.training.loop.Run._finish_epoch", broken)
        options = {"update_network": True} if call == "partial_fit" else {}
        with pytest.raises(error):
            getattr(model, call)(1000 * X, 7 * y, **options)
    np.testing.assert_array_equal(model.predict(X), before)


def test_wrong_numbers_of_columns_are_told_as_such():
    X, y = noisy(60, seed=0)
    model = DAKRegressor(**SMALL, epochs=1).fit(X, y)
    with pytest.raises(ValueError, match="X has 5 features, but DAKRegressor is expecting 6"):
        model.predict(X[:, :5])
    with pytest.raises(ValueError, match="NaN"):
        model.fit(X[:, :5], np.full(60, np.nan))
    with pytest.raises(ValueError, match="X has 5 features, but DAKRegressor is expecting 6"):
        model.predict(X[:, :5])
    with pytest.raises(ValueError, match="`y` has 2 columns, but this DAKRegressor was fitted wi"):
        model.partial_fit(X, np.stack([y, y], 1))


@pytest.mark.parametrize("exponent", [-300, -170, 155, 299])
def test_inputs_of_any_scale_are_standardised(exponent):
    X, y = noisy(60, seed=0)
    model = DAKRegressor(**SMALL, epochs=3, random_state=0)
    expected = model.fit(X, y).predict(X)
    scale = 10.0**exponent
    np.testing.assert_allclose(model.fit(scale * X, y).predict(scale * X), expected, rtol=1e-3)


@pytest.mark.parametrize("exponent", [-149, -100, 100, 149])
@pytest.mark.parametrize("offset", [0, 1000])
def test_targets_of_any_scale_whose_square_is_a_number_are_standardised(exponent, offset):
    X, y = noisy(60, seed=0)
    y = y + offset
    model = DAKRegressor(**SMALL, epochs=3, random_state=0)
    mean, std = model.fit(X, y).predict(X, return_std=True)
    scale = 10.0**exponent
    found, width = model.fit(X, scale * y).predict(X, return_std=True)
    np.testing.assert_allclose(found / scale - offset, mean - offset, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(width / scale, std, rtol=1e-3)


@pytest.mark.parametrize("scale", [1e-300, 1e-170, 1e155, 1e300])
def test_targets_whose_square_is_no_number_are_refused_before_training(scale):
    X, y = noisy(60, seed=0)
    with pytest.raises(ValueError, match=r"`y` must have a standard deviation between .* Rescale"):
        DAKRegressor(**SMALL).fit(X, scale * y)


def test_inputs_that_are_too_large_or_too_far_are_refused():
    X, y = noisy(60, seed=0)
    model = DAKRegressor(**SMALL, epochs=1).fit(X, y)
    far = X.copy()
    far[3, 2] = 1e200
    with pytest.raises(ValueError, match=r"`X` has a value that is too far .* 1e\+200 in column 2"):
        model.predict(far)
    far[3, 2] = 1e90
    assert np.isfinite(model.predict_dist(far).variance).all()
    with pytest.raises(ValueError, match="`X` must have a standard deviation between"):
        model.fit(1e306 * X, y)
    far[3, 2] = 1e30
    with pytest.raises(ValueError, match="`X` has a value that is too far from the others"):
        model.fit(far, y, np.where(np.arange(60) == 3, 1e-36, 1.0))


@pytest.mark.parametrize("constant", [0.0, 1e-6, -5.0, 1e12])
def test_a_constant_target_is_predicted_on_its_own_scale(constant):
    X, _ = noisy(60, seed=0)
    model = DAKRegressor(**SMALL, epochs=30, random_state=0).fit(X, np.full(60, constant))
    mean, std = model.predict(X, return_std=True)
    assert (np.abs(mean - constant) < 0.2 * max(abs(constant), float(constant == 0))).all()
    assert (std < 0.5 * max(abs(constant), float(constant == 0))).all()


def test_weights_that_are_no_numbers_of_rows_are_refused():
    X, y = noisy(60, seed=0)
    for weight in (1e-15, 1e15):
        with pytest.raises(ValueError, match="their sum is a number of rows; got"):
            DAKRegressor(**SMALL).fit(X, y, np.full(60, weight))
    DAKRegressor(**SMALL, epochs=1).fit(X, y, np.full(60, 1e-13))


def test_scales_are_weighted_means_and_deviations():
    rng = np.random.default_rng(0)
    values, weights = rng.normal(3, 2, (10_000, 3)), rng.uniform(size=10_000)
    values[:, 1], values[:, 2] = -4, 0
    mean, scale = scales("X", values, weights, 1e-305, 1e305)
    expected = np.average(values, 0, weights)
    np.testing.assert_allclose(mean, expected, atol=1e-15)
    deviation = np.sqrt(np.average((values[:, 0] - expected[0]) ** 2, 0, weights))
    np.testing.assert_allclose(scale, [deviation, 4, 1])
    found = standardized("X", values, mean, scale, 10.0)
    np.testing.assert_allclose(found[:, 1:], 0, atol=1e-12)
    np.testing.assert_allclose(np.average(found[:, 0] ** 2, 0, weights), 1)
