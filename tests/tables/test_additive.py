"""The additive estimators: bands, explanations, real columns, files."""

import json

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm

from experiments.additive import simulate
from pyro_dak import CheckpointError, DAKAdditiveClassifier, DAKAdditiveRegressor
from pyro_dak.tables.shapes import _design
from tests.training.runs import edit_config, edit_tensors

RNG = np.random.default_rng(0)


def frame(num_rows=200, seed=0):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=num_rows), rng.uniform(0, 10, num_rows)
    table = pd.DataFrame(
        {
            "a": a,
            "b": b,
            "colour": rng.choice(["red", "green", None], num_rows),
            "size": pd.Categorical(rng.choice(["s", "m"], num_rows)),
            "flag": rng.uniform(size=num_rows) < 0.5,
            "day": pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 99, num_rows), "D"),
        }
    )
    y = 5 + np.sin(2 * a) + 0.3 * b + (table["colour"] == "red") + 0.2 * rng.normal(size=num_rows)
    table.loc[::10, "b"] = np.nan
    return table, y.to_numpy()


@pytest.fixture(scope="module")
def fitted():
    return DAKAdditiveRegressor(level=4, pairs=[("a", "colour")]).fit(*frame())


@pytest.fixture(scope="module")
def classifier():
    table, y = frame()
    labels = np.digitize(y, np.quantile(y, [0.3, 0.7]))
    return DAKAdditiveClassifier(level=3).fit(table, np.array(["lo", "mid", "up"])[labels])


def test_contributions_add_up_to_the_prediction(fitted, classifier):
    table, _ = frame(30, seed=1)
    parts = fitted.explain(table)
    total = parts.intercept + parts.contributions.sum(1)
    np.testing.assert_allclose(total, fitted.predict(table), rtol=1e-12)
    assert parts.names == [*table.columns, ("a", "colour")]
    parts = classifier.explain(table)
    np.testing.assert_allclose(parts.intercept + parts.contributions.sum(1), parts.prediction)
    assert parts.contributions.shape == (30, 6, 3)


def test_terms_have_mean_zero_over_the_training_rows(fitted):
    np.testing.assert_allclose(fitted.explain(frame()[0]).contributions.mean(0), 0, atol=1e-9)


def test_a_single_row_is_explained(fitted):
    table, _ = frame(3, seed=1)
    one = fitted.explain(table.iloc[0])
    np.testing.assert_allclose(one.contributions[0], fitted.explain(table).contributions[0])


def test_shape_functions_are_the_contributions_with_their_bands(fitted):
    table, _ = frame(20, seed=2)
    parts = fitted.explain(table)
    known = table["b"].notna().to_numpy()
    shape = fitted.shape_function("b", table["b"][known])
    np.testing.assert_allclose(shape.mean, parts.contributions[known, 1])
    np.testing.assert_allclose(shape.std, parts.std[known, 1])
    np.testing.assert_allclose(shape.upper - shape.mean, norm.ppf(0.975) * shape.std)
    mean, std = shape.missing
    np.testing.assert_allclose(parts.contributions[~known, 1], mean)
    np.testing.assert_allclose(parts.std[~known, 1], std)
    colour = fitted.shape_function("colour")
    assert list(colour.grid) == ["(missing)", "green", "red", "(other)"]
    assert fitted.shape_function(("colour", "a")).mean.shape[1] == 3


def test_a_category_that_training_has_not_seen_has_the_prior_variance(fitted):
    shape = fitted.shape_function("colour")
    index = fitted.term_names_.index("colour")
    scale = np.exp(fitted.posterior_.own_theta()[index][0]) * fitted.y_scale_
    # The data know differences of the three known effects, not their mean, of variance scale^2 / 3.
    assert shape.std[-1] == pytest.approx(scale * np.sqrt(1 + 1 / 3), rel=0.02)
    assert shape.std[-1] > 3 * shape.std[:-1].max()
    table, _ = frame(2, seed=3)
    table["colour"] = "violet"
    _, wide = fitted.predict(table, return_std=True)
    table["colour"] = "red"
    _, narrow = fitted.predict(table, return_std=True)
    assert (wide > narrow).all()


def test_importances_find_what_matters(fitted):
    importance = dict(zip(fitted.term_names_, fitted.importances_, strict=True))
    error = dict(zip(fitted.term_names_, fitted.importances_std_, strict=True))
    table, _ = frame()
    assert abs(importance["a"] - np.std(np.sin(2 * table["a"]))) < 4 * error["a"]
    assert max(importance["size"], importance["flag"], importance["day"]) < 0.1
    assert min(importance["a"], importance["b"], importance["colour"]) > 0.3


def test_intervals_and_quantiles_cover_new_rows(fitted):
    table, y = frame(400, seed=4)
    known = table["b"].notna().to_numpy()
    lower, upper = fitted.predict_interval(table, 0.9).T
    covered = np.mean((lower <= y) & (y <= upper))
    assert abs(covered - 0.9) < 4 * np.sqrt(0.09 / 400)
    quantiles = fitted.predict_quantiles(table, [0.05, 0.5, 0.95])
    np.testing.assert_allclose(quantiles[:, [0, 2]].T, [lower, upper])
    assert np.sqrt(np.mean((fitted.predict(table) - y)[known] ** 2)) < 0.3


def test_rows_far_away_are_less_certain(fitted):
    table, _ = frame(5, seed=5)
    near = fitted.predict_dist(table).epistemic
    table["a"] = 100.0
    assert (fitted.predict_dist(table).epistemic > 10 * near).all()


def test_errors_of_left_out_rows_are_those_of_fits_without_them():
    """The closed form of the leave-one-out error, with hyper-parameters held."""
    X, y = RNG.normal(size=(40, 2)), RNG.normal(size=40)
    model = DAKAdditiveRegressor(level=2).fit(X, y)
    z = (y - model.y_mean_) / model.y_scale_
    phi = _design(model.posterior_.terms, list(X.T)).toarray()
    roots = model.posterior_.root[0]
    s2 = (model.noise_scale_ / model.y_scale_) ** 2
    S = roots.T @ roots
    h = np.einsum("nk,kl,nl->n", phi, S, phi) / s2
    error = (z - phi @ model.posterior_.mean[0]) / (1 - h)
    # Condition on all rows but the first, by taking it out of the precision.
    T = S + S @ np.outer(phi[0], phi[0]) @ S / (s2 - phi[0] @ S @ phi[0])
    b = phi.T @ z / s2 - phi[0] * z[0] / s2
    assert error[0] == pytest.approx(z[0] - phi[0] @ T @ b, rel=1e-6)


def test_bands_cover_the_functions_of_simulated_tables():
    """Three seeds of what `python -m experiments.additive` does with twenty."""
    runs = [simulate(seed, max_rows=300) for seed in range(3)]
    kinds = [name for name in runs[0] if name.startswith("N=")]
    coverage = np.mean([run[name]["coverage_95"] for run in runs for name in kinds])
    assert 0.92 < coverage < 0.99


def test_missing_numbers_unseen_in_training_are_predicted_with_more_variance():
    X = RNG.normal(size=(100, 2))
    model = DAKAdditiveRegressor(level=3).fit(X, X[:, 0] + 0.1 * RNG.normal(size=100))
    mean, std = model.predict(np.array([[np.nan, 0.0], [0.0, 0.0]]), return_std=True)
    assert np.isfinite(mean).all()
    assert std[0] > 2 * std[1]


def test_numbers_of_pairs_and_automatic_pairs_find_the_interaction():
    X = RNG.normal(size=(300, 4))
    y = X[:, 0] * X[:, 2] + X[:, 1] + 0.1 * RNG.normal(size=300)
    for pairs in (1, "auto"):
        model = DAKAdditiveRegressor(pairs=pairs, level=3).fit(X, y)
        assert model.term_names_[4] == ("x0", "x2")
    alone = DAKAdditiveRegressor(level=3).fit(X, y)
    assert model.noise_scale_ < 0.5 * alone.noise_scale_


def test_two_classes_have_log_odds_of_the_second():
    X = RNG.normal(size=(400, 2))
    y = np.where(2 * X[:, 0] + RNG.logistic(size=400) > 0, "yes", "no")
    model = DAKAdditiveClassifier(level=3).fit(X, y)
    shape = model.shape_function(0, np.array([-1.0, 1.0]))
    assert shape.mean[0] + 1 < 0 < shape.mean[1] - 1
    assert shape.mean.shape == (2,)
    probs = model.predict_proba(X)
    np.testing.assert_allclose(probs.sum(1), 1)
    assert model.score(X, y) > 0.75
    dist = model.predict_dist(X)
    assert (dist.mutual_information > -1e-9).all()


def test_weights_count_rows():
    X = RNG.normal(size=(60, 2))
    y = np.sin(X[:, 0]) + 0.1 * RNG.normal(size=60)
    weights = RNG.choice([0, 1, 3], 60)
    one = DAKAdditiveRegressor(level=3).fit(X, y, sample_weight=weights)
    X_more, y_more = (np.repeat(part, weights, axis=0) for part in (X, y))
    two = DAKAdditiveRegressor(level=3).fit(X_more, y_more)
    np.testing.assert_allclose(one.predict(X), two.predict(X), atol=1e-7)
    np.testing.assert_allclose(one.importances_, two.importances_, atol=1e-7)


def test_polars_and_other_frames_are_taken():
    polars = pytest.importorskip("polars")
    table, y = frame(60)
    table = table[["a", "b", "flag"]]
    one = DAKAdditiveRegressor(level=2).fit(table, y)
    two = DAKAdditiveRegressor(level=2).fit(polars.from_pandas(table), y)
    np.testing.assert_allclose(one.predict(table), two.predict(polars.from_pandas(table)))


@pytest.mark.parametrize("name", ["fitted", "classifier"])
def test_saved_and_loaded_are_the_same(name, request, tmp_path):
    model = request.getfixturevalue(name)
    table, _ = frame(20, seed=6)
    loaded = type(model).load(model.save(tmp_path / "model"))
    for one, other in zip(model.explain(table)[1:], loaded.explain(table)[1:], strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(model.importances_, loaded.importances_)
    assert loaded.term_names_ == model.term_names_
    method = "predict_proba" if name == "classifier" else "predict"
    np.testing.assert_array_equal(getattr(model, method)(table), getattr(loaded, method)(table))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda c: c["estimator"].update(name="DAKRegressor"), "expected DAKAdditiveRegressor"),
        (lambda c: c["estimator"]["terms"].pop(), "shape"),
        (lambda c: c["estimator"]["terms"][0].update(columns=[9]), "columns"),
        (lambda c: c["estimator"]["terms"][0].update(scale=0.0), "scale"),
        (lambda c: c["estimator"]["terms"][2].update(categories=["a"]), "means|categories"),
        (lambda c: c["estimator"]["values"].update(noise_scale_=-1.0), "noise_scale_"),
        (lambda c: c["estimator"].update(terms=[]), "first 6 terms"),
    ],
)
def test_changed_files_are_refused(fitted, tmp_path, change, match):
    path = fitted.save(tmp_path / "model")
    edit_config(path, change)
    with pytest.raises(CheckpointError, match=match):
        DAKAdditiveRegressor.load(path)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("posterior.theta", lambda t: t + 1e3, "hyper-parameters"),
        ("posterior.mean", lambda t: t[:, 1:].clone(), "`mean` has shape"),
        ("posterior.root", lambda t: t[0].clone(), "`root` has shape"),
        ("term.0.knots", lambda t: t.flip(0), "knots must increase"),
        ("term.0.ranks", lambda t: t[1:].clone(), "one rank each"),
        ("importances_", lambda t: t[1:].clone(), "`importances_` has shape"),
    ],
)
def test_changed_tensors_are_refused(fitted, tmp_path, name, change, match):
    path = fitted.save(tmp_path / "model")
    edit_tensors(path / "model.safetensors", lambda t: t.update({name: change(t[name])}))
    with pytest.raises(CheckpointError, match=match):
        DAKAdditiveRegressor.load(path)


def test_files_hold_no_code(fitted, tmp_path):
    path = fitted.save(tmp_path / "model")
    assert {part.name for part in path.iterdir()} == {
        "config.json",
        "model.safetensors",
        "SHA256SUMS",
    }
    assert json.loads((path / "config.json").read_text())["estimator"]["feature_names"]


@pytest.mark.parametrize(
    ("parameters", "match"),
    [
        ({"pairs": "all"}, "`pairs` must be"),
        ({"pairs": -1}, "negative"),
        ({"pairs": [("a", "a")]}, "different columns"),
        ({"pairs": [("a", "b"), ("b", "a")]}, "same pair twice"),
        ({"pairs": [("a", "z")]}, "`z` is no column"),
        ({"level": 0}, "`level`"),
        ({"categorical_features": "all"}, "`categorical_features` must be"),
        ({"categorical_features": ["z"]}, "`z` is no column"),
    ],
)
@pytest.mark.usefixtures("no_type_checker")
def test_wrong_parameters_are_named(parameters, match):
    table, y = frame(30)
    with pytest.raises(ValueError, match=match):
        DAKAdditiveRegressor(**parameters).fit(table, y)


def test_columns_can_be_declared_categories():
    X = np.column_stack([RNG.normal(size=80), RNG.choice([1.0, 2.0, 7.0], 80)])
    model = DAKAdditiveRegressor(level=2, categorical_features=[1]).fit(X, X[:, 0])
    assert model.columns_.categories == {"x1": ["1", "2", "7"]}
    by_mask = DAKAdditiveRegressor(level=2, categorical_features=[False, True]).fit(X, X[:, 0])
    assert by_mask.columns_ == model.columns_


def test_texts_where_numbers_were_are_refused(fitted):
    table, _ = frame(10)
    table["a"] = "text"
    with pytest.raises(ValueError, match="`a` must hold numbers"):
        fitted.predict(table)
    table["a"] = np.inf
    with pytest.raises(ValueError, match="infinite"):
        fitted.predict(table)


def test_names_are_not_categories():
    table = pd.DataFrame({"name": [f"n{k}" for k in range(600)]})
    with pytest.raises(ValueError, match="looks like names"):
        DAKAdditiveRegressor().fit(table, np.arange(600.0))


def test_too_many_weights_are_refused_before_they_are_computed_with():
    words = [f"w{k}" for k in range(100)] * 2
    table = pd.DataFrame({"a": words, "b": words[::-1]})
    y = RNG.normal(size=200)
    with pytest.raises(ValueError, match="10403 weights"):
        DAKAdditiveRegressor(pairs=[("a", "b")]).fit(table, y)
    assert DAKAdditiveRegressor(pairs=1).fit(table, y).term_names_ == ["a", "b"]


def test_a_failed_fit_leaves_the_estimator_as_it_was(fitted):
    table, y = frame(30)
    before = fitted.predict(table)
    with pytest.raises(ValueError, match="infinite"):
        fitted.fit(table.assign(b=np.inf), y)
    np.testing.assert_array_equal(fitted.predict(table), before)
