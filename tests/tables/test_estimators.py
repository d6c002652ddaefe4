"""What the estimators promise beyond scikit-learn's checks."""

import json
import math
import pickle
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pyro_dak import CheckpointError, DAKClassifier, DAKRegressor, predict
from pyro_dak.tables.predictive import (
    ClassMixture,
    StudentPrediction,
    covering_scale,
    fit_student,
    mixture_factor,
)
from pyro_dak.tables.rows import (
    Rows,
    chunks,
    default_batch_size,
    default_epochs,
    held_out_rows,
    without,
)

SMALL = {"hidden_layer_sizes": (16, 8), "num_units": 4, "level": 3, "progress": False}


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


def regression(num_rows=200, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (num_rows, 3))
    noise = np.where(X[:, 1] > 0, 0.5, 0.05)
    return X, 100 + 10 * (np.sin(2 * X[:, 0]) + noise * rng.standard_normal(num_rows))


def regressor(**options):
    defaults = {"epochs": 60, "batch_size": 64, "refit": False, "random_state": 0}
    return DAKRegressor(**(SMALL | defaults | options))


@pytest.fixture(scope="module")
def fitted():
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    X, y = regression(1000)
    model = regressor(epochs=100, batch_size=256, hidden_layer_sizes=(32, 32)).fit(X, y)
    torch.set_default_dtype(dtype)
    return model


def test_a_smooth_function_with_uneven_noise_is_learned(fitted):
    X, y = regression(1000, seed=1)
    prediction = fitted.predict_dist(X)
    assert fitted.score(X, y) > 0.7
    lower, upper = prediction.interval(0.9)
    coverage = np.mean((y >= lower) & (y <= upper))
    assert abs(coverage - 0.9) < 0.08
    is_noisy = X[:, 1] > 0.3
    assert prediction.std[is_noisy].mean() > 2 * prediction.std[X[:, 1] < -0.3].mean()


def test_prediction_is_the_mean_of_members_in_the_units_of_the_data():
    X, y = regression(50)
    model = regressor(ensemble_size=2, epochs=2, early_stopping=False).fit(X, y)
    x = torch.from_numpy((X - model.x_mean_) / model.x_scale_)
    ensemble = model.ensemble_.to(dtype=torch.float64)
    singles = [predict(m, g, x) for m, g in ensemble.members()]
    means = np.stack([single.mean.numpy()[:, 0] for single in singles])
    variances = np.stack([single.variance.numpy()[:, 0] for single in singles])
    mean, std = model.predict(X, return_std=True)
    np.testing.assert_allclose(mean, model.y_mean_ + model.y_scale_ * means.mean(0))
    expected = model.y_scale_**2 * (variances.mean(0) + means.var(0))
    np.testing.assert_allclose(std**2, expected)


def test_same_seed_same_model_and_another_another():
    X, y = regression(60)
    one, same, other = (
        regressor(epochs=2, random_state=seed).fit(X, y).predict(X) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, same)
    assert not np.allclose(one, other)


def test_frames_keep_their_names_and_other_columns_are_refused():
    X, y = regression(60)
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    model = regressor(epochs=2).fit(frame, pd.Series(y))
    assert model.feature_names_in_.tolist() == ["a", "b", "c"]
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(frame[["a", "c", "b"]])


def test_several_outputs_have_noise_of_their_own():
    X, _ = regression(300)
    rng = np.random.default_rng(3)
    Y = np.stack([50 * X[:, 0] + 10 * rng.standard_normal(300), 1e-3 * X[:, 2]], -1)
    model = regressor(epochs=40).fit(X, Y)
    mean, std = model.predict(X, return_std=True)
    assert mean.shape == std.shape == (300, 2)
    assert model.predict_interval(X, 0.5).shape == (300, 2, 2)
    relative = np.sqrt(((Y - mean) ** 2).mean(0)) / Y.std(0)
    assert (relative < 0.4).all()
    assert std[:, 0].mean() > 5
    assert std[:, 1].mean() < 1e-3


def test_weights_say_which_rows_count():
    X, _ = regression(200)
    y = np.where(np.arange(200) % 2 == 0, 1.0, -1.0)
    weights = np.where(y > 0, 1.0, 1e-3)
    model = regressor(epochs=20).fit(X, y, weights)
    assert model.predict(X).mean() > 0.8


def test_warm_start_goes_on_and_partial_fit_learns():
    X, y = regression(200)
    model = regressor(epochs=15, warm_start=True, early_stopping=False).fit(X, y)
    before = model.history_.rows[-1]["loss"]
    assert model.fit(X, y).history_.rows[0]["loss"] < before + 0.3
    streamed = regressor()
    losses = []
    for _ in range(40):
        streamed.partial_fit(X, y)
        losses.append(streamed.history_.rows[0]["loss"])
    assert losses[-1] < losses[0] - 0.3
    assert streamed.num_rows_seen_ == 40 * 200


def test_pipeline_search_and_cross_validation():
    X, y = regression(90)
    pipeline = make_pipeline(StandardScaler(), regressor(epochs=2))
    search = GridSearchCV(pipeline, {"dakregressor__num_units": [2, 4]}, cv=2).fit(X, y)
    assert search.best_params_["dakregressor__num_units"] in (2, 4)
    assert cross_val_score(clone(regressor(epochs=2)), X, y, cv=2).shape == (2,)


def test_saved_and_loaded_predict_the_same(fitted, tmp_path):
    X, _ = regression(50, seed=2)
    path = fitted.save(tmp_path / "model")
    loaded = DAKRegressor.load(path)
    assert loaded.get_params() == fitted.get_params()
    one, other = fitted.predict_dist(X), loaded.predict_dist(X)
    for name in ("mean", "epistemic", "aleatoric"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert other.df == one.df
    again = pickle.loads(pickle.dumps(fitted)).predict(X)
    np.testing.assert_array_equal(again, one.mean)
    loaded.partial_fit(*regression(50))


def test_saving_replaces_only_models_and_only_when_told(fitted, tmp_path):
    path = fitted.save(tmp_path / "model")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        fitted.save(path)
    fitted.save(path, overwrite=True)
    (path / "letter.txt").write_text("dear")
    with pytest.raises(FileExistsError, match="left as it is"):
        fitted.save(path, overwrite=True)


def test_files_of_another_kind_are_refused(fitted, tmp_path):
    path = fitted.save(tmp_path / "model")
    with pytest.raises(CheckpointError, match="holds a DAKRegressor, expected DAKClassifier"):
        DAKClassifier.load(path)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="checksum"):
        DAKRegressor.load(path)
    (path / "config.json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(CheckpointError, match="not written by pyro_dak"):
        DAKRegressor.load(path)


@pytest.mark.parametrize("size", [1, 3])
def test_classes_with_names_are_learned_saved_and_loaded(size, tmp_path):
    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    options = SMALL | {"epochs": 60, "batch_size": 64, "random_state": 0}
    model = DAKClassifier(ensemble_size=size, **options).fit(X, names)
    assert model.score(X, names) > 0.9
    prediction = model.predict_dist(X)
    np.testing.assert_allclose(prediction.probs.sum(-1), 1)
    assert (prediction.mutual_information > -1e-9).all()
    loaded = DAKClassifier.load(model.save(tmp_path / "model"))
    assert loaded.predict(X[:5]).tolist() == model.predict(X[:5]).tolist()
    np.testing.assert_array_equal(loaded.predict_proba(X), model.predict_proba(X))


def test_class_probabilities_of_a_row_do_not_depend_on_its_neighbours():
    X, y = load_iris(return_X_y=True)
    model = DAKClassifier(**SMALL, epochs=2, random_state=0).fit(X, y)
    alone = np.concatenate([model.predict_proba(row[None]) for row in X[:5]])
    np.testing.assert_allclose(alone, model.predict_proba(X)[:5], rtol=1e-10)


def test_labels_outside_the_classes_of_the_first_call_are_refused():
    X, y = load_iris(return_X_y=True)
    model = DAKClassifier(**SMALL)
    with pytest.raises(ValueError, match="`classes` must be passed"):
        model.partial_fit(X, y)
    model.partial_fit(X, y, classes=[0, 1, 2])
    with pytest.raises(ValueError, match=r"not among the classes: \[7\]"):
        model.partial_fit(X, y * 0 + 7)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"ensemble_size": 0}, "`ensemble_size` must be at least 1"),
        ({"epochs": 0}, "`epochs` must be at least 1"),
        ({"validation_fraction": 1.0}, "`validation_fraction` must lie between"),
        ({"weight_decay": -1.0}, "`weight_decay` must not be negative"),
        ({"hidden_layer_sizes": ()}, "`hidden_layer_sizes` must hold at least one"),
    ],
)
def test_wrong_parameters_are_named_at_fit(options, match):
    X, y = regression(50)
    with pytest.raises(ValueError, match=match):
        regressor(**options).fit(X, y)


def test_weights_that_are_all_zero_and_targets_of_three_dimensions_are_refused():
    X, y = regression(50)
    with pytest.raises(ValueError, match="at least one non-zero"):
        regressor().fit(X, y, np.zeros(50))
    with pytest.raises(ValueError):
        regressor().fit(X, np.zeros((50, 1, 1)))


def test_without_scikit_learn_the_error_says_what_to_install():
    code = (
        "import sys\n"
        "sys.modules['sklearn'] = None\n"
        "import pyro_dak\n"
        "try:\n"
        "    pyro_dak.DAKRegressor\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install pyro_dak[sklearn]" in run.stdout, run.stderr


@pytest.mark.parametrize("df", [2.5, 5.0, math.inf])
def test_predictive_distribution_is_student_t(df):
    mean, epistemic, aleatoric = np.array([1.0, -2.0]), np.array([0.5, 1.0]), np.array([0.5, 2.0])
    prediction = StudentPrediction(mean, epistemic, aleatoric, df)
    scale = np.sqrt((epistemic + aleatoric) * (1 - 2 / df))
    expected = stats.t(df, mean, scale) if math.isfinite(df) else stats.norm(mean, scale)
    np.testing.assert_allclose(prediction.log_prob([0.3, 4.0]), expected.logpdf([0.3, 4.0]))
    np.testing.assert_allclose(prediction.quantile(0.2), expected.ppf(0.2))
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


def test_every_member_has_held_out_rows_of_its_own():
    held_out = held_out_rows(100, 5, 0.1, seed=0)
    assert held_out.shape == (5, 10)
    assert len(held_out.flatten().unique()) == 50
    assert held_out_rows(10, 5, 0.4, seed=0).shape == (5, 4)
    assert held_out_rows(10**6, 1, 0.1, seed=0).shape == (1, 5000)


def test_files_without_the_factor_of_mixtures_are_read_with_one(tmp_path):
    """Those of versions that had none."""
    X, y = np.random.default_rng(0).standard_normal((30, 2)), np.arange(30.0)
    estimator = DAKRegressor(epochs=1, progress=False).fit(X, y)
    del estimator.mixture_factor_
    path = estimator.save(tmp_path / "model")
    assert DAKRegressor.load(path).mixture_factor_ == 1


@pytest.mark.parametrize("num_rows", [31, 100])
def test_two_members_have_not_seen_the_rows_where_parts_overlap(num_rows):
    held_out = held_out_rows(num_rows, 4, 0.3, seed=0, overlap=True)
    half = held_out.shape[1] // 2
    for member in range(3):
        assert held_out[member, -half:].tolist() == held_out[member + 1, :half].tolist()
        assert len(held_out[member : member + 2].unique()) == 2 * held_out.shape[1] - half


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


def test_mixture_factor_is_one_for_one_member_or_without_overlap():
    y, var = np.random.default_rng(0).standard_normal((2, 8, 1)), np.ones((2, 8, 1))
    assert mixture_factor(y, 0 * y, var, 4, math.inf, size=1) == 1
    assert mixture_factor(y, 0 * y, var, 0, math.inf, size=2) == 1


def test_chunks_cover_all_rows_and_are_shorter_for_long_rows():
    for numbers in (1, 500, 10**9):
        slices = chunks(20_000, numbers)
        assert [i for part in slices for i in range(20_000)[part]] == list(range(20_000))
    assert len(chunks(20_000, 500)) == 10


def test_held_out_rows_have_no_weight_and_those_of_all_are_dropped():
    x = torch.arange(4.0).unsqueeze(-1)
    rows = Rows(x, x, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    one = without(rows, torch.tensor([[1]]))
    assert one.x.flatten().tolist() == [0, 2, 3]
    two = without(rows, torch.tensor([[1], [0]]))
    assert two.weights.tolist() == [[1, 0, 3, 4], [0, 2, 3, 4]]


def test_defaults_by_the_number_of_rows():
    assert [default_batch_size(n) for n in (50, 5000, 10**6)] == [128, 256, 512]
    assert [default_epochs(n) for n in (50, 10_000, 40_000, 10**6, 10**9)] == [
        200,
        200,
        100,
        20,
        10,
    ]
