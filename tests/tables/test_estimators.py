"""What the estimators promise beyond scikit-learn's checks."""

import inspect
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pyro_dak import DAKClassifier, DAKRegressor, predict
from pyro_dak.tables import base

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
    options = {"ensemble_size": 2, "epochs": 2, "numeric_embedding": None}
    model = regressor(early_stopping=False, **options).fit(X, y)
    x = torch.from_numpy((X - model.x_mean_) / model.x_scale_)
    ensemble = model.ensemble_.to(dtype=torch.float64)
    singles = [predict(m, g, x) for m, g in ensemble.members()]
    means = np.stack([single.mean.numpy()[:, 0] for single in singles])
    variances = np.stack([single.variance.numpy()[:, 0] for single in singles])
    mean, std = model.predict(X, return_std=True)
    np.testing.assert_allclose(mean, model.y_mean_ + model.y_scale_ * means.mean(0))
    expected = model.y_scale_**2 * (variances.mean(0) + means.var(0))
    np.testing.assert_allclose(std**2, expected)


@pytest.mark.parametrize("num_outputs", [1, 2])
@pytest.mark.parametrize("heteroscedastic", [True, False])
def test_means_alone_are_those_of_the_distribution(num_outputs, heteroscedastic):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 2))
    y = X[:, 0] if num_outputs == 1 else 3 + X * [1.0, 40.0]
    options = {"epochs": 2, "ensemble_size": 2, "heteroscedastic": heteroscedastic}
    model = DAKRegressor(random_state=0, **options).fit(X, y)
    for _ in range(2):
        expected = model.predict_dist(X)
        np.testing.assert_allclose(model.predict(X), expected.mean, rtol=1e-12, atol=1e-12)
        mean, std = model.predict(X, return_std=True)
        np.testing.assert_array_equal(mean, expected.mean)
        np.testing.assert_array_equal(std, expected.std)
        model.partial_fit(X[:5], y[:5])


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
        streamed.partial_fit(X, y, update_network=True)
        losses.append(streamed.history_.rows[0]["loss"])
    assert losses[-1] < losses[0] - 0.3
    assert streamed.num_rows_seen_ == 40 * 200


def test_pipeline_search_and_cross_validation():
    X, y = regression(90)
    pipeline = make_pipeline(StandardScaler(), regressor(epochs=2))
    search = GridSearchCV(pipeline, {"dakregressor__num_units": [2, 4]}, cv=2).fit(X, y)
    assert search.best_params_["dakregressor__num_units"] in (2, 4)
    assert cross_val_score(clone(regressor(epochs=2)), X, y, cv=2).shape == (2,)


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
        ({"validation_fraction": 1.0}, "`validation_fraction` must lie strictly between"),
        ({"weight_decay": -1.0}, "`weight_decay` must not be negative"),
        ({"hidden_layer_sizes": ()}, "`hidden_layer_sizes` must hold at least one"),
        ({"hidden_layer_sizes": 8}, "`hidden_layer_sizes` must be a tuple of widths"),
        ({"hidden_layer_sizes": "ab"}, "`hidden_layer_sizes` must be an integer"),
        ({"learning_rate": None}, "`learning_rate` must be a real number"),
        ({"input_units": 3}, "`input_units` must be True or False; got 3"),
        ({"heteroscedastic": "no"}, "`heteroscedastic` must be True or False; got 'no'"),
        ({"refit": "no"}, "`refit` must be True or False; got 'no'"),
        ({"early_stopping": None}, "`early_stopping` must be True or False; got None"),
        ({"device": "moon"}, "`device` must be 'auto', 'cpu', 'cuda' or another"),
    ],
)
def test_wrong_parameters_are_named_at_fit(options, match, no_type_checker):
    X, y = regression(50)
    with pytest.raises((TypeError, ValueError), match=match):
        regressor(**options).fit(X, y)


def test_far_from_the_rows_input_units_have_their_prior_variance():
    X, y = regression(200)
    model = regressor(ensemble_size=1, input_units=True, heteroscedastic=False).fit(X, y)
    ((member, _),) = model.ensemble_.members()
    prior = member.unit_scale[-3:].square().sum().item()  # of the units of the three columns
    factor = model.calibration_ * model.mixture_factor_ * model.y_scale_**2
    factor = factor / (1 - 2 / model.tail_df_)
    assert (model.predict_dist(X + 100).epistemic > 0.999 * factor * prior).all()


def test_input_units_of_many_columns_are_refused():
    X = np.random.default_rng(0).standard_normal((50, 65))
    with pytest.raises(ValueError, match="of few dimensions, at most 64; got 65"):
        regressor(input_units=True).fit(X, X[:, 0])


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


def test_arguments_are_attributes_in_the_order_of_the_signature():
    positional = DAKRegressor(2, (8,), 3, 4, False, 5, 6)
    assert (positional.num_units, positional.heteroscedastic, positional.epochs) == (3, False, 5)
    expected = list(inspect.signature(DAKRegressor).parameters)
    assert expected[:6] == [
        "ensemble_size",
        "hidden_layer_sizes",
        "num_units",
        "level",
        "heteroscedastic",
        "epochs",
    ]
    assert sorted(positional.get_params()) == sorted(expected)
    assert "heteroscedastic" not in DAKClassifier(epochs=3).get_params()
    with pytest.raises(TypeError, match="heteroscedastic"):
        DAKClassifier(heteroscedastic=True)


def test_estimators_are_copied_changed_and_shown_by_their_parameters():
    model = regressor(num_units=7)
    assert clone(model).get_params() == model.get_params()
    assert model.set_params(level=2).level == 2
    assert repr(DAKClassifier(epochs=3)) == "DAKClassifier(epochs=3)"
    assert model != clone(model)


def test_many_rows_are_predicted_as_few_are():
    """More rows than are computed at a time."""
    X, y = regression(9000)
    model = regressor(epochs=1, early_stopping=False, batch_size=4096).fit(X, y)
    np.testing.assert_allclose(model.x_mean_[:3], X.mean(0))
    np.testing.assert_allclose(model.x_scale_[:3], X.std(0))
    parts = [model.predict(part) for part in np.array_split(X, 7)]
    np.testing.assert_allclose(model.predict(X), np.concatenate(parts), rtol=1e-10)


def test_rows_are_encoded_chunk_by_chunk_as_at_once(monkeypatch):
    X, y = regression(300)
    X[::7, 0] = np.nan
    model = regressor(epochs=1, early_stopping=False).fit(X, y)
    expected = model.predict(X)
    monkeypatch.setattr(base, "_CHUNK", 64)
    monkeypatch.setattr(base, "_ENCODED_CHUNKS", 2)
    np.testing.assert_allclose(model.predict(X), expected, rtol=1e-10)


def test_classes_of_a_call_that_failed_are_forgotten():
    X, y = load_iris(return_X_y=True)
    model = DAKClassifier(**SMALL, epochs=1)
    with pytest.raises(ValueError):
        model.partial_fit(X[:, :0], y, classes=[5, 6])
    assert model.fit(X, y).classes_.tolist() == [0, 1, 2]
