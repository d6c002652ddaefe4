"""Fitted estimators on disk: the same predictions, and clear errors."""

import json
import pickle

import numpy as np
import pytest
import torch

from pyro_dak import CheckpointError, DAKClassifier, DAKRegressor
from tests import hostile
from tests.training.runs import edit_config


def regression(num_rows, seed=0):
    X = np.random.default_rng(seed).standard_normal((num_rows, 3))
    return X, 100 + 10 * np.sin(2 * X[:, 0])


@pytest.fixture(scope="module")
def fitted():
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    options = {"hidden_layer_sizes": (8,), "num_units": 4, "level": 3, "progress": False}
    model = DAKRegressor(2, epochs=5, random_state=0, **options).fit(*regression(100))
    torch.set_default_dtype(dtype)
    return model


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


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


@pytest.mark.parametrize("kind", [DAKRegressor, DAKClassifier])
def test_input_units_are_saved_and_trained_on(kind, tmp_path):
    X, y = regression(60)
    y = y if kind is DAKRegressor else y > 100
    options = {"hidden_layer_sizes": (8,), "num_units": 4, "level": 3, "progress": False}
    model = kind(2, epochs=3, random_state=0, input_units=True, **options).fit(X, y)
    loaded = kind.load(model.save(tmp_path / "model"))
    assert loaded.ensemble_.model.num_input_units == 3
    predict = "predict_proba" if kind is DAKClassifier else "predict"
    np.testing.assert_array_equal(getattr(loaded, predict)(X), getattr(model, predict)(X))
    loaded.partial_fit(X, y)


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


def test_files_without_the_factor_of_mixtures_are_read_with_one(tmp_path):
    """The first versions did not have it."""
    estimator = DAKRegressor(epochs=1, progress=False).fit(*regression(30))
    del estimator.mixture_factor_
    path = estimator.save(tmp_path / "model")
    assert DAKRegressor.load(path).mixture_factor_ == 1


def test_labels_keep_their_type_and_others_are_refused(tmp_path):
    X, y = regression(40)
    options = {"hidden_layer_sizes": (8,), "num_units": 2, "epochs": 1, "progress": False}
    for kind in (np.int32, np.float64, np.bool_, str, object):
        labels = (y > 100).astype(str if kind is object else kind).astype(kind)
        path = DAKClassifier(**options).fit(X, labels).save(tmp_path / np.dtype(kind).name)
        found, expected = DAKClassifier.load(path).classes_, np.unique(labels)
        assert found.dtype == expected.dtype
        assert found.tolist() == expected.tolist()
    dates = np.where(y > 100, np.datetime64("2020-01-01"), np.datetime64("2021-01-01"))
    model = DAKClassifier(**options).fit(X, (y > 100).astype(int))
    model.classes_ = np.unique(dates)
    with pytest.raises(ValueError, match="cannot be stored; use strings or numbers"):
        model.save(tmp_path / "dates")


def test_hostile_regressors_are_refused_or_predict(fitted, tmp_path):
    path, X = fitted.save(tmp_path / "model"), regression(5)[0]

    def read(directory):
        assert DAKRegressor.load(directory).set_params(device="cpu").predict(X).shape == (5,)

    assert hostile.failures(path, tmp_path, read, seed=0, count=80) == []


def test_hostile_classifiers_are_refused_or_predict(tmp_path):
    X, y = regression(40)
    options = {"hidden_layer_sizes": (8,), "num_units": 2, "epochs": 1, "progress": False}
    path = DAKClassifier(2, **options).fit(X, y > 100).save(tmp_path / "model")

    def read(directory):
        labels = DAKClassifier.load(directory).set_params(device="cpu").predict(X)
        assert labels.shape == (40,)

    assert hostile.failures(path, tmp_path, read, seed=0, count=80) == []


@pytest.mark.parametrize(("edit", "match"), [
    (lambda content: content["architecture"]["model"].update(num_units=10**8), "size mismatch"),
    (lambda content: content["architecture"]["model"].update(num_outputs=10**8), "the guide has"),
    (lambda content: content["values"].update(n_features_in_=4), "`n_features_in_` is 4, exp"),
    (lambda content: content["values"].update(calibration_=-1.0), "`calibration_` must be pos"),
    (lambda content: content["values"].pop("tail_df_"), "has no 'tail_df_'"),
    (lambda content: content["values"].update(kept_apart_=[7, 0]), "`kept_apart_` must lie"),
    (lambda content: content["values"].update(kept_apart_="a"), "not enough values"),
    (lambda content: content.update(best_epoch=10**6), "`best_epoch` must be between"),
    (lambda content: content.update(history=[{"loss": "x"}]), "the history is not a list of rows"),
    (lambda content: content.update(feature_names={"dtype": "O", "values": ["a"]}), "has shape"),
    (lambda content: content.update(classes={"dtype": "<U400000000", "values": ["a"] * 9}), "more"),
    (lambda content: content.update(classes={"dtype": "M8[s]", "values": [1]}), "cannot be read"),
])  # fmt: skip
def test_a_config_that_does_not_fit_the_weights_is_refused(fitted, tmp_path, edit, match):
    path = fitted.save(tmp_path / "model")
    edit_config(path, lambda config: edit(config["estimator"]))
    with pytest.raises(CheckpointError, match=rf"(?s)config\.json: .*{match}"):
        DAKRegressor.load(path)


def test_files_of_estimators_stay_within_the_budget(fitted, tmp_path):
    path = fitted.save(tmp_path / "model")
    with pytest.raises(CheckpointError, match="Pass a larger `max_bytes`"):
        DAKRegressor.load(path, max_bytes=1000)
