"""Exported estimators predict as the estimators do: gaps, words, dates and novelty included."""

import io
import json

import numpy as np
import onnx
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from pyro_dak import (
    DAKAdditiveClassifier,
    DAKAdditiveRegressor,
    DAKClassifier,
    DAKRegressor,
    export,
    predict,
    save,
)
from pyro_dak.tables.additive_files import write_additive
from pyro_dak.tables.cli import app
from pyro_dak.tables.exported import read_table_model
from pyro_dak.tables.exporting import raw_rows
from pyro_dak.tables.files import TableError
from pyro_dak.tables.schema import Target, raw_columns
from pyro_dak.training.export import sealed
from tests import scenarios

pytestmark = pytest.mark.filterwarnings("ignore:column `colour` has values")
FAST = {"epochs": 3, "progress": False, "random_state": 0}


def table(num_rows, seed=0):
    rng = np.random.default_rng(seed)
    days = pd.to_timedelta(rng.integers(0, 900, num_rows), unit="D")
    frame = pd.DataFrame({
        "size": 1000 * rng.normal(size=num_rows) + 20_000,
        "colour": rng.choice(["red", "green", "blue", None], num_rows),
        "gap": rng.normal(size=num_rows),
        "when": pd.Timestamp("2020-01-01") + days,
        "is_new": rng.random(num_rows) < 0.5,
        "grade": pd.Categorical(rng.integers(0, 3, num_rows)),
    })  # fmt: skip
    frame.loc[rng.random(num_rows) < 0.1, "gap"] = np.nan
    frame.loc[rng.random(num_rows) < 0.1, "when"] = pd.NaT
    y = frame["size"] / 1000 + frame["gap"].fillna(0) + 2 * (frame["colour"] == "red")
    return frame, (y + 0.1 * rng.normal(size=num_rows)).to_numpy()


def classes(y):
    return np.array(["low", "middle", "high"])[np.digitize(y, [20, 21])]


def fitted(name):
    X, y = table(240)
    if name == "several outputs of an array":
        return DAKRegressor(ensemble_size=2, **FAST).fit(
            X[["size", "gap"]].to_numpy(), np.c_[y, -y]
        )
    if name == "after partial_fit":
        own = DAKRegressor(ensemble_size=2, heteroscedastic=False, **FAST).fit(X, y)
        return own.partial_fit(X[:20], y[:20])
    kinds = {
        "regressor": DAKRegressor(ensemble_size=3, **FAST),
        "one network, equal noise": DAKRegressor(ensemble_size=1, heteroscedastic=False, **FAST),
        "bins and input units": DAKRegressor(
            ensemble_size=2, numeric_embedding="piecewise", input_units=True, **FAST
        ),
        "classifier": DAKClassifier(ensemble_size=3, **FAST),
        "additive regressor": DAKAdditiveRegressor(
            pairs=[("size", "gap"), ("colour", "size"), ("colour", "grade")]
        ),
        "additive classifier": DAKAdditiveClassifier(pairs=[("size", "gap")]),
        "additive classifier of two": DAKAdditiveClassifier(),
    }
    own = kinds[name]
    if name == "additive classifier of two":
        return own.fit(X, y > 20)
    own.fit(X, classes(y) if "classifier" in name else y)
    if name == "classifier":
        own.variance_factor_ = 0.3
    return own


NAMES = (
    "regressor",
    "one network, equal noise",
    "bins and input units",
    "after partial_fit",
    "several outputs of an array",
    "classifier",
    "additive regressor",
    "additive classifier",
    "additive classifier of two",
)


@pytest.fixture(scope="module")
def estimators():
    torch.set_default_dtype(torch.float32)
    found = {}

    def get(name):
        if name not in found:
            found[name] = fitted(name)
        return found[name]

    return get


def new_rows(estimator):
    X, _ = table(100, seed=1)
    X.loc[3, "colour"] = "purple"  # not there in training
    X.loc[4, "size"] = 1e7
    return X if hasattr(estimator, "feature_names_in_") else X[["size", "gap"]].to_numpy()


@pytest.mark.parametrize("name", NAMES)
def test_the_module_gives_what_predict_dist_gives(estimators, name):
    estimator = estimators(name)
    X = new_rows(estimator)
    columns = estimator.columns_
    raw = raw_rows(raw_columns(X, columns) if isinstance(X, pd.DataFrame) else [*X.T], columns)
    module = estimator._portable() if "additive" in name else estimator._portable(True)
    found = dict(zip(module.outputs, module(torch.from_numpy(raw)), strict=True))
    wanted = estimator.predict_dist(X)
    for key, value in found.items():
        expected = np.asarray(getattr(wanted, key)).reshape(value.shape)
        np.testing.assert_allclose(value.numpy(), expected, rtol=1e-7, atol=1e-9, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "torch"])
@pytest.mark.parametrize("name", NAMES)
def test_files_agree_with_every_estimator(estimators, name, format, tmp_path):
    estimator = estimators(name)
    for x in (new_rows(estimator), None):
        report = estimator.export(tmp_path / "model", format, x=x, overwrite=True)
        assert max(report.differences.values()) < 1e-5


@pytest.fixture(scope="module")
def exported(estimators, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    return {
        name: estimators(name).export(folder / f"{index}.onnx", x=new_rows(estimators(name)))
        for index, name in enumerate(["regressor", "additive classifier"])
    }


@pytest.mark.parametrize("name", ["regressor", "additive classifier"])
def test_an_onnx_file_takes_words_gaps_and_dates(estimators, exported, name):
    estimator, report = estimators(name), exported[name]
    assert max(report.differences.values()) < 1e-5
    model, X = read_table_model(report.path), new_rows(estimator)
    found, wanted = model.predict_dist(X), estimator.predict_dist(X)
    if name == "regressor":
        for key in ("mean", "epistemic", "aleatoric", "novelty", "scale"):
            np.testing.assert_allclose(getattr(found, key), getattr(wanted, key), rtol=1e-5)
        np.testing.assert_allclose(found.interval(0.9), wanted.interval(0.9), rtol=1e-5)
    else:
        np.testing.assert_allclose(found.probs, wanted.probs, atol=1e-6)
        assert model.classes_.tolist() == ["high", "low", "middle"]


def test_records_of_json_are_rows_of_the_table(estimators, exported):
    model, X = read_table_model(exported["regressor"].path), table(30, seed=2)[0]
    records = json.loads(X.to_json(orient="records", date_format="iso"))
    found = model.predict_raw(model.raw_of_records(records))
    np.testing.assert_allclose(found.mean, estimators("regressor").predict(X), rtol=1e-6)
    lists = [[record[name] for name in X.columns] for record in records]
    np.testing.assert_array_equal(model.raw_of_records(lists), model.raw_of_records(records))


@pytest.mark.parametrize(("change", "match"), [
    ({"size": "big"}, "`size` must be a number"), ({"size": 10**400}, "`size` must be a finite"),
    ({"colour": "purple"}, "`colour` has no category"), ({"colour": []}, "must be a text"),
    ({"when": "soon"}, "`when` must be a date"), ({"other": 1}, "unknown ones"),
])  # fmt: skip
def test_records_that_do_not_fit_are_refused(exported, change, match):
    model = read_table_model(exported["regressor"].path)
    record = json.loads(table(1)[0].to_json(orient="records", date_format="iso"))[0]
    with pytest.raises(TableError, match=f"row 1: .*{match}"):
        model.raw_of_records([record, record | change])
    with pytest.raises(TableError, match="has 2 values, expected 6"):
        model.raw_of_records([[1, 2]])
    with pytest.raises(TableError, match="must be an object or a list"):
        model.raw_of_records(["row"])


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_the_command_line_exports_and_predicts(tmp_path):
    X, y = table(240)
    X = X.drop(columns=["grade", "is_new"])
    own = DAKAdditiveRegressor().fit(X, y)
    extra = {"table": Target("price", "regression").to_json()}
    write_additive(own, tmp_path / "model", False, extra)
    X[:50].to_csv(tmp_path / "new.csv", index=False)
    out, new = tmp_path / "out.onnx", tmp_path / "new.csv"
    made = run("export", tmp_path / "model", "--onnx", out, "--check", new)
    assert made.exit_code == 0, made.output
    assert "greatest difference at 50 rows" in made.stderr
    again = run("export", tmp_path / "model", "--onnx", out)
    assert again.exit_code == 1
    assert "exists" in again.stderr
    tables = [run("predict", model, new, "--quiet").stdout for model in (out, tmp_path / "model")]
    first, second = (pd.read_csv(io.StringIO(text)) for text in tables)
    pd.testing.assert_frame_equal(first, second, rtol=1e-5)
    assert list(first) == ["mean", "std", "lower", "upper"]


def test_the_command_line_refuses_what_it_did_not_write(exported, tmp_path):
    table(5)[0].to_csv(tmp_path / "new.csv", index=False)
    data = exported["regressor"].path.read_bytes()
    for name, content in (("cut", data[:-100]), ("foreign", b"\x08\x09 onnx"), ("empty", b"")):
        path = tmp_path / f"{name}.onnx"
        path.write_bytes(content)
        result = run("predict", path, tmp_path / "new.csv")
        assert result.exit_code == 1
        assert result.stdout == ""
        assert len(result.stderr.splitlines()) == 1
        assert "is not an ONNX file that pyro_dak has exported" in result.stderr


def test_the_command_line_reads_no_other_file_for_a_model(exported, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = onnx.load(exported["regressor"].path)
    weights = max(model.graph.initializer, key=lambda own: len(own.raw_data))
    (tmp_path / "secret.bin").write_bytes(weights.raw_data)
    weights.ClearField("raw_data")
    weights.data_location = onnx.TensorProto.EXTERNAL
    weights.external_data.add(key="location", value="secret.bin")
    path = tmp_path / "outside.onnx"
    path.write_bytes(sealed(model.SerializeToString()))
    table(5)[0].to_csv(tmp_path / "new.csv", index=False)
    result = run("predict", path, tmp_path / "new.csv")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert "are in another file, 'secret.bin'; only files that hold all" in result.stderr


def test_a_model_that_is_no_estimator_predicts_tables_of_numbers(tmp_path):
    torch.set_default_dtype(torch.float32)
    case = scenarios.gaussian_regression(num_outputs=1)
    case.model.input_shape = (2,)
    save(case.model, case.guide, tmp_path / "model")
    made = run("export", tmp_path / "model", "--onnx", tmp_path / "a.onnx")
    assert made.exit_code == 0, made.output
    export(case.model, case.guide, tmp_path / "b.onnx", columns=["a", "b"])
    frame = pd.DataFrame(case.x.numpy(), columns=["a", "b"])
    frame.to_csv(tmp_path / "new.csv", index=False)
    result = run("predict", tmp_path / "b.onnx", tmp_path / "new.csv")
    assert result.exit_code == 0, result.output
    found = pd.read_csv(io.StringIO(result.stdout))
    wanted = predict(case.model, case.guide, case.x)
    np.testing.assert_allclose(found["mean"], wanted.mean[:, 0], rtol=1e-4, atol=1e-5)
    assert list(found) == ["mean", "std", "lower", "upper"]
    model = read_table_model(tmp_path / "b.onnx")
    for value in (1e39, -1e300):
        with pytest.raises(TableError, match="too large for float32"):
            model.predict_raw(model.raw_of_records([[value, 0]]))
    lacking = run("predict", tmp_path / "a.onnx", tmp_path / "new.csv")
    assert lacking.exit_code == 1
    assert "lacks 2 columns" in lacking.stderr
