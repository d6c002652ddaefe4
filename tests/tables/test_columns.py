"""Data frames as they are: missing values, categories, text, booleans, dates."""

import warnings

import numpy as np
import pandas as pd
import pytest
import sklearn
import torch
from packaging.version import Version
from sklearn.compose import make_column_transformer
from sklearn.metrics import get_scorer
from sklearn.model_selection import GridSearchCV, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from pyro_dak import DAKClassifier, DAKRegressor

OPTIONS = {
    "ensemble_size": 2,
    "hidden_layer_sizes": (16, 8),
    "num_units": 4,
    "level": 3,
    "epochs": 40,
    "random_state": 0,
    "progress": False,
}


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


def table(num_rows=200, seed=0):
    """Every column matters, and each has missing values but the boolean one."""
    rng = np.random.default_rng(seed)
    a, colour = rng.normal(size=num_rows), rng.choice(["red", "green", "blue"], num_rows)
    is_new, size = rng.uniform(size=num_rows) < 0.5, rng.integers(0, 3, num_rows)
    when = pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 1000, num_rows), unit="D")
    y = a + 2 * (colour == "red") + is_new + size + when.year - 2020
    frame = pd.DataFrame({"a": a, "colour": colour, "is_new": is_new, "when": when})
    frame["size"] = pd.Categorical(np.array(["s", "m", "l"])[size])
    for name in ("a", "colour", "when", "size"):
        frame.loc[rng.uniform(size=num_rows) < 0.1, name] = None
    return frame, y + 0.1 * rng.normal(size=num_rows)


@pytest.mark.parametrize("kind", [DAKRegressor, DAKClassifier])
def test_frames_are_learned_saved_and_loaded(kind, tmp_path):
    X, y = table()
    y = y if kind is DAKRegressor else y > 3
    model = kind(**OPTIONS).fit(X, y)
    assert model.score(X, y) > 0.7
    assert (model.n_features_in_, len(model.x_mean_)) == (5, 3 + 4 + 4 + 4 + 2 * 8)
    loaded = kind.load(model.save(tmp_path / "model"))
    assert loaded.columns_ == model.columns_
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))


def test_unseen_categories_are_none_of_the_known_ones():
    X, y = table()
    model = DAKRegressor(**OPTIONS).fit(X, y)
    with pytest.warns(UserWarning, match="column `colour` has values .*: `mauve`"):
        found = model.predict(X.assign(colour="mauve"))
    assert np.isfinite(found).all()
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(X.rename(columns={"a": "b"}))
    with pytest.raises(ValueError, match="column `a` must hold numbers; got 'x' in row 1"):
        model.predict(X.assign(a="x"))


def test_frames_of_polars_give_what_those_of_pandas_give():
    polars = pytest.importorskip("polars")
    X, y = table()
    model = DAKRegressor(**(OPTIONS | {"epochs": 3}))
    other = polars.from_pandas(X)
    np.testing.assert_allclose(model.fit(X, y).predict(other), model.fit(other, y).predict(X))


def test_missing_numbers_of_arrays_are_those_of_frames():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(100, 3))
    y = X[:, 0] + 3 * np.isnan(np.where(rng.uniform(size=100) < 0.3, np.nan, X[:, 1]))
    X[y > 2, 1] = np.nan
    model = DAKRegressor(**(OPTIONS | {"epochs": 5}))
    found = model.fit(X, y).predict(X)
    assert model.columns_.with_missing == ["x1"]
    expected = model.fit(pd.DataFrame(X), y).predict(pd.DataFrame(X))
    np.testing.assert_allclose(found, expected)
    X[:, 2] = np.where(rng.uniform(size=100) < 0.1, np.nan, X[:, 2])  # not missing in training
    X = X[~np.isnan(X[:, 1])]
    filled = model.columns_.filling(X)
    np.testing.assert_allclose(model.predict(pd.DataFrame(X)), model.predict(pd.DataFrame(filled)))
    with pytest.raises(ValueError, match="infinity"):
        model.fit(np.where(np.isnan(X), np.inf, X), X[:, 0])


@pytest.mark.parametrize("chosen", [[1], ["x1"], [False, True]])
def test_categories_of_arrays_are_chosen_by_number_name_or_mask(chosen, tmp_path):
    rng = np.random.default_rng(0)
    X = np.stack([rng.normal(size=100), rng.integers(0, 3, 100)], -1)
    model = DAKRegressor(**(OPTIONS | {"epochs": 3}), categorical_features=chosen)
    model.fit(X, X[:, 0] + (X[:, 1] == 1))
    assert model.columns_.categories == {"x1": ["0", "1", "2"]}
    loaded = DAKRegressor.load(model.save(tmp_path / "model"))
    assert loaded.categorical_features == chosen
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))
    with pytest.warns(UserWarning, match="`7`"):
        model.predict(np.array([[0.0, 7.0]]))


@pytest.mark.parametrize("chosen", [[7], ["z"], [True], "all", 1.5])
def test_categories_that_are_no_columns_are_refused(chosen):
    X, y = table(60)
    with pytest.raises(ValueError, match="`categorical_features` must be 'from_dtype', None"):
        DAKRegressor(**OPTIONS, categorical_features=chosen).fit(X, y)


def test_without_categories_text_is_refused():
    X, y = table(60)
    with pytest.raises(ValueError, match="column `colour` must hold numbers"):
        DAKRegressor(**OPTIONS, categorical_features=None).fit(X, y)
    with pytest.raises(ValueError, match="column `a` must hold numbers"):
        DAKRegressor(**OPTIONS).fit(X.assign(a=[1, *["x"] * 59]), y)


def test_rows_of_no_weight_are_not_learned_from():
    X, y = table(100)
    extra = X[:1].assign(colour="mauve", a=1e9)
    model = DAKRegressor(**(OPTIONS | {"epochs": 2}))
    expected = model.fit(X, y).predict(X)
    weights = np.append(np.ones(100), 0.0)
    model.fit(pd.concat([X, extra]), np.append(y, 1e9), weights)
    np.testing.assert_array_equal(model.predict(X), expected)


def test_later_calls_keep_the_columns_of_the_first():
    X, y = table(100)
    model = DAKRegressor(**(OPTIONS | {"epochs": 2})).partial_fit(X, y)
    columns = model.columns_
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.partial_fit(X.assign(colour="mauve"), y)
    assert model.columns_ is columns
    assert any("mauve" in str(warning.message) for warning in caught)


def test_weights_are_routed_and_frames_of_transformers_are_taken():
    X, y = table(100)
    encoder = make_column_transformer(
        (OneHotEncoder(sparse_output=False), ["colour"]), ("passthrough", ["a"])
    ).set_output(transform="pandas")
    with sklearn.config_context(enable_metadata_routing=True):
        model = DAKRegressor(**(OPTIONS | {"epochs": 2}))
        model.set_fit_request(sample_weight=True).set_score_request(sample_weight=True)
        pipeline = make_pipeline(encoder, model)
        weights = np.where(np.arange(100) < 50, 1.0, 0.0)
        pipeline.fit(X, y, sample_weight=weights)
        assert pipeline[-1].num_rows_seen_ == 50
        assert pipeline[-1].feature_names_in_[-1].endswith("__a")
        # Before 1.8, scikit-learn does not ask a pipeline which weights its own score wants.
        is_old = Version(sklearn.__version__) < Version("1.8")
        scoring = get_scorer("r2").set_score_request(sample_weight=True) if is_old else None
        options = {"params": {"sample_weight": weights + 1}, "scoring": scoring}
        scores = cross_validate(pipeline, X, y, cv=2, **options)
        assert np.isfinite(scores["test_score"]).all()
        search = GridSearchCV(pipeline, {"dakregressor__level": [2, 3]}, cv=2, scoring=scoring)
        search.fit(X, y, sample_weight=weights + 1)
        assert search.best_params_["dakregressor__level"] in (2, 3)


def test_quantiles_are_those_of_the_distribution():
    X, y = table(100)
    model = DAKRegressor(**(OPTIONS | {"epochs": 2})).fit(X, np.stack([y, -y], -1))
    found = model.predict_quantiles(X, [0.1, 0.5])
    assert found.shape == (100, 2, 2)
    np.testing.assert_array_equal(found[..., 0], model.predict_dist(X).quantile(0.1))
    interval = model.predict_interval(X, 0.8)
    np.testing.assert_allclose(model.predict_quantiles(X, (0.1, 0.9)), interval)
    with pytest.raises(ValueError, match="`q` must lie"):
        model.predict_quantiles(X, 1.0)


def test_numbers_are_embedded(tmp_path):
    X, y = table(100)
    options = OPTIONS | {"epochs": 2}
    model = DAKRegressor(**options, numeric_embedding="piecewise").fit(X, y)
    plain = DAKRegressor(**options, numeric_embedding=None).fit(X, y)
    assert len(model.x_mean_) == len(plain.x_mean_) + 2 * 8  # of `a` and `when`
    loaded = DAKRegressor.load(model.save(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))
    numbers = np.random.default_rng(0).normal(size=(50, 2))
    assert len(model.fit(numbers, numbers[:, 0]).x_mean_) == 2 * 9
    assert model.predict(numbers).shape == (50,)
    assert len(DAKRegressor(**options).fit(numbers, numbers[:, 0]).x_mean_) == 2 * 9
    with pytest.raises(ValueError, match="`numeric_embedding` must be one of"):
        DAKRegressor(**options, numeric_embedding="spline").fit(numbers, numbers[:, 0])


def test_numbers_are_not_embedded_unasked_where_they_would_be_many_or_few_are_known():
    rng = np.random.default_rng(0)
    options = OPTIONS | {"epochs": 1, "early_stopping": False}
    for X, settings in [
        (rng.normal(size=(30, 129)), {}),
        (rng.normal(size=(100_001, 1)), {"batch_size": 10_000}),
        (rng.normal(size=(30, 2)), {"input_units": True}),
    ]:
        model = DAKRegressor(**(options | settings)).fit(X, X[:, 0])
        assert len(model.x_mean_) == X.shape[1]
    model = DAKRegressor(**options).partial_fit(X, X[:, 0])
    assert len(model.x_mean_) == 2


def test_arrays_of_a_model_of_frames_have_its_columns():
    X, y = table(60)
    model = DAKRegressor(**(OPTIONS | {"epochs": 2})).fit(X, y)
    with pytest.warns(UserWarning, match="does not have valid feature names"):
        found = model.predict(X.to_numpy(dtype=object))
    np.testing.assert_array_equal(found, model.predict(X))


def test_frames_with_too_few_rows_or_columns_are_refused():
    X, y = table(60)
    model = DAKRegressor(**(OPTIONS | {"epochs": 2})).fit(X, y)
    with pytest.raises(ValueError, match=r"0 sample\(s\) \(shape=\(0, 5\)\) while a minimum of 1"):
        model.predict(X[:0])
    with pytest.raises(ValueError, match=r"1 sample\(s\) .* while a minimum of 2"):
        model.fit(X[:1], y[:1])
    with pytest.raises(ValueError, match=r"0 feature\(s\)"):
        DAKRegressor(**OPTIONS).fit(X[[]], y)


def test_models_of_earlier_versions_take_frames_of_numbers_only():
    X = pd.DataFrame({"a": np.arange(30.0), "b": np.arange(30.0) ** 2})
    options = OPTIONS | {"epochs": 2, "numeric_embedding": None}
    model = DAKRegressor(**options).fit(X, X["a"])
    expected = model.predict(X)
    model.columns_ = None
    np.testing.assert_array_equal(model.predict(X), expected)
    with pytest.raises(ValueError, match="contains NaN"):
        model.predict(X.assign(a=np.nan))
