"""Estimators and the command line on Parquet files that are not read into memory at once."""

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from pyro_dak import DAKClassifier, DAKRegressor
from pyro_dak.tables import streaming
from pyro_dak.tables.cli import app
from pyro_dak.tables.files import TableError, read_table
from pyro_dak.tables.schema import encode, learn_columns, with_telling_gaps
from pyro_dak.tables.streaming import TableRows, fit_files, is_large


def houses(num_rows=1500, seed=0):
    rng = np.random.default_rng(seed)
    area = rng.uniform(50, 200, num_rows)
    town = rng.choice(["Ulm", "Bonn", "Kiel"], num_rows).astype(object)
    sold = pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 900, num_rows), unit="D")
    price = area / 50 + (town == "Ulm") + 0.1 * rng.normal(size=num_rows)
    area[rng.uniform(size=num_rows) < 0.1] = np.nan
    town[rng.uniform(size=num_rows) < 0.05] = None
    new = rng.uniform(size=num_rows) < 0.3
    return pd.DataFrame({"area": area, "town": town, "sold": sold, "new": new, "price": price})


def write(folder, frame, num_files=3):
    folder.mkdir()
    for index, part in enumerate(np.array_split(np.arange(len(frame)), num_files)):
        frame.iloc[part].to_parquet(folder / f"{index}.parquet", row_group_size=200)
    return folder


@pytest.fixture
def folder(tmp_path):
    torch.set_default_dtype(torch.float32)
    return write(tmp_path / "houses", houses())


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output + str(result.exception)
    return result


def test_columns_are_those_of_the_table_in_memory(folder):
    rows = TableRows(folder, "price")
    table = read_table(folder)
    expected = learn_columns(table.drop(columns="price"), ["town"])
    assert expected.with_missing == ["area"]
    expected = with_telling_gaps(expected, table, table["price"].to_numpy(), labels=False)
    assert rows.schema == expected
    assert rows.width == len(expected.encoded_names)
    assert (rows.aim.task, rows.classes) == ("regression", None)


def test_scales_are_those_of_the_estimator_in_memory(folder):
    frame = read_table(folder)
    options = {"random_state": 0, "progress": False, "numeric_embedding": None}
    inside = DAKRegressor(1, epochs=1, **options)
    inside.fit(frame.drop(columns="price"), frame["price"])
    scales = TableRows(folder, "price").scales
    for own, expected in zip(
        scales, (inside.x_mean_, inside.x_scale_, inside.y_mean_, inside.y_scale_), strict=True
    ):
        np.testing.assert_allclose(own, expected, rtol=1e-10, atol=1e-12)


INDEXES = {
    "range": lambda frame: frame,
    "filtered": lambda frame: frame[frame["new"]],
    "named": lambda frame: frame.set_index(np.arange(len(frame)) + 7.0).rename_axis("id"),
    "named like a column": lambda frame: frame.set_index(np.arange(len(frame))).rename_axis("town"),
    "of two": lambda frame: frame.assign(a="x", b=1).set_index(["a", "b"]),
    "of dates": lambda frame: frame.set_index(pd.date_range("2020-01-01", periods=len(frame))),
}


@pytest.mark.parametrize("first", INDEXES)
def test_what_a_frame_is_indexed_by_is_no_column(tmp_path, first, monkeypatch):
    torch.set_default_dtype(torch.float32)
    folder, names = tmp_path / "rows", ["area", "town", "sold", "new"]
    folder.mkdir()
    for number, name in enumerate([first, *INDEXES]):
        INDEXES[name](houses(200, number)).to_parquet(folder / f"{number}.parquet")
    for path in (folder, folder / "0.parquet"):
        table, rows = read_table(path), TableRows(path, "price")
        assert [*table] == [*names, "price"]
        assert rows.columns == names
        x, scales = rows.read_all(torch.float64)[0].numpy(), rows.scales
        expected = encode(table[names], rows.schema)
        found = x * scales.x_scale + scales.x_mean
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-9)
    with pytest.raises(TableError, match="has no column `id`"):
        TableRows(folder, "price", drop=["id"])
    monkeypatch.setattr(streaming, "LARGE_TABLE", 200 * 5)
    assert not is_large(folder / "0.parquet")  # the index does not count


def test_a_column_that_other_files_are_indexed_by_is_refused(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    frame = houses(50).assign(id=np.arange(50.0))
    for order, message in (((0, 1), "has the column `id`"), ((1, 0), "lacks the column `id`")):
        for number, table in zip(order, (frame.set_index("id"), frame), strict=True):
            table.to_parquet(folder / f"{number}.parquet")
        for read in (read_table, lambda path: TableRows(path, "price")):
            with pytest.raises(TableError, match=rf"1\.parquet: {message}, which the files before"):
                read(folder)


@pytest.mark.parametrize("size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_an_estimator_learns_from_files_and_is_saved_and_calibrated(folder, tmp_path, size):
    estimator = DAKRegressor(size, epochs=15, batch_size=64, random_state=0, progress=False)
    fit_files(estimator, TableRows(folder, "price"))
    new = houses(2000, seed=1)
    prediction = estimator.predict_dist(new.drop(columns="price"))
    y = new["price"].to_numpy()
    assert np.sqrt(np.mean((prediction.mean - y) ** 2)[None])[0] < 0.5 * y.std()
    low, high = prediction.interval(0.9)
    assert 0.8 < np.mean((low < y) & (y < high)) < 0.97
    assert 0.3 < np.median(prediction.novelty) < 0.7
    estimator.save(tmp_path / "model")
    again = DAKRegressor.load(tmp_path / "model").predict(new.drop(columns="price"))
    np.testing.assert_array_equal(again, prediction.mean)


@pytest.mark.parametrize("labels", [["no", "yes"], [3, 7], [False, True]])
def test_labels_of_classes_come_back(tmp_path, labels):
    torch.set_default_dtype(torch.float32)
    frame = houses(600)
    frame["price"] = np.array(labels)[(frame["price"] > frame["price"].median()).astype(int)]
    rows = TableRows(write(tmp_path / "rows", frame), "price")
    assert rows.aim.task == "classification"
    options = {"epochs": 8, "batch_size": 32, "random_state": 0, "progress": False}
    estimator = fit_files(DAKClassifier(2, **options), rows)
    found = estimator.predict(frame.drop(columns="price"))
    assert (
        np.mean(found == (frame["price"].map(str) if labels[0] is False else frame["price"])) > 0.8
    )


def test_the_command_line_reads_large_folders_part_by_part_and_says_so(
    folder, tmp_path, monkeypatch
):
    arguments = ("fit", folder, "--target", "price", "--epochs", 3, "--ensemble-size", 2, "--out")
    in_memory = run(*arguments, tmp_path / "small")
    assert "Learning `price` from 1500 rows ..." in in_memory.stderr
    monkeypatch.setattr(streaming, "LARGE_TABLE", 1500 * 5 - 1)
    in_parts = run(*arguments, tmp_path / "large")
    first = in_parts.stderr.splitlines()[0]
    assert first.startswith("Learning `price` from 1,500 rows, which are more than ")
    assert "from 3 files, 256 MiB at a time" in first
    assert "training rows" in in_parts.stderr
    houses(20, seed=2).to_csv(tmp_path / "new.csv", index=False)
    for name in ("small", "large"):
        lines = run("predict", tmp_path / name, tmp_path / "new.csv", "--quiet").stdout
        assert len(lines.splitlines()) == 21
        scores = run("evaluate", tmp_path / name, tmp_path / "new.csv", "--quiet").stdout
        assert "nlpd" in scores
    again = run(*arguments, tmp_path / "again", "--quiet")
    assert again.output == ""
    tensors = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("large", "again")]
    assert tensors[0] == tensors[1]


def test_a_single_large_file_is_read_in_parts_too(folder, monkeypatch):
    file = folder / "0.parquet"
    assert not is_large(folder)
    monkeypatch.setattr(streaming, "LARGE_TABLE", 500 * 5 - 1)
    assert is_large(file)
    monkeypatch.setattr(streaming, "LARGE_TABLE", 500 * 5)
    assert not is_large(file)
    assert not is_large(folder / "nothing")


@pytest.mark.parametrize(("change", "options", "message"), [
    ({}, ("--target", "cost"), "has no column `cost`"),
    ({}, ("--target", "price", "--drop", "roof"), "has no column `roof`"),
    ({}, ("--target", "price", "--additive"), "leave --additive out"),
    ({"price": None}, ("--target", "price"), r"row group 0: target `price` has 20"),
    ({"price": 1}, ("--target", "price"), "one class only"),
    ({"town": "many"}, ("--target", "price"), "column `town` has 300 different texts"),
])  # fmt: skip
def test_large_tables_that_cannot_be_used_give_one_clear_line(
    tmp_path, monkeypatch, change, options, message
):
    frame = houses(300)
    for name, value in change.items():
        frame[name] = [f"t{i}" for i in range(300)] if value == "many" else value
    if change.get("price", 1) is None:
        frame["price"] = pd.Series([1.0] * 280 + [None] * 20).iloc[::-1].to_numpy()
    rows = write(tmp_path / "rows", frame, 1)
    monkeypatch.setattr(streaming, "LARGE_TABLE", 10)
    result = run("fit", rows, "--out", tmp_path / "model", "--quiet", *options, code=1)
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("largest", [10, 10**9])
@pytest.mark.parametrize(("change", "message"), [
    (lambda f: f.drop(columns="area"), "lacks the column `area`, which the files before it have"),
    (lambda f: f.assign(area="big"), "column `area` holds "),
    (lambda f: f.assign(town=3), "column `town` holds int64, and "),
    (lambda f: f.assign(sold=f["sold"].astype(str)), "column `sold` holds "),
    (lambda f: f.assign(new=0.5), "column `new` holds double, and bool in the files before it"),
    (lambda f: f.assign(roof=1), "has the column `roof`, which the files before it lack"),
])  # fmt: skip
def test_a_file_with_other_columns_gives_one_clear_line(
    folder, tmp_path, monkeypatch, change, message, largest
):
    change(houses(50)).to_parquet(folder / "1b.parquet")
    monkeypatch.setattr(streaming, "LARGE_TABLE", largest)
    arguments = ("fit", folder, "--target", "price", "--out", tmp_path / "model")
    error = run(*arguments, code=1).stderr
    assert len(error.splitlines()) == 1
    assert f"{folder / '1b.parquet'}: {message}" in error
    assert "Write all files with the same columns and types." in error
    assert "Learning" not in error
    assert not (tmp_path / "model").exists()
    if "area" in message:  # what is left out may differ
        assert TableRows(folder, "price", drop=["area"]).num_rows == 1550


def test_folders_are_tables_and_others_are_refused(folder, tmp_path):
    frame = read_table(folder)
    assert len(frame) == 1500
    assert [*frame] == ["area", "town", "sold", "new", "price"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(TableError, match="is a directory, and it can be read only if it holds"):
        read_table(tmp_path / "empty")


def test_options_that_need_the_table_in_memory_are_refused(folder):
    for options in ({"warm_start": True}, {"early_stopping": False}):
        with pytest.raises(NotImplementedError, match="warm_start"):
            fit_files(DAKRegressor(**options), TableRows(folder, "price"))
