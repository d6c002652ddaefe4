"""What is learned about the columns of a table, and the numbers that rows become."""

import json
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest

from pyro_dak.tables.files import TableError
from pyro_dak.tables.schema import (
    Columns,
    Target,
    as_frame,
    check_table,
    encode,
    learn_columns,
    learn_target,
    numbers_of_classes,
    raw_columns,
    targets,
    typed,
)

_MISSING = "(missing)"


def table():
    return pd.DataFrame(
        {
            "a": [3.0, np.nan, 1.0, 5.0],
            "b": [1, 2, 3, 4],
            "c": ["red", None, "blue", "red"],
            "y": [0.5, 1.5, 2.5, 3.5],
        }
    )


def encoded(frame, columns):
    return pd.DataFrame(encode(frame, columns), columns=columns.encoded_names)


def inputs():
    return table().drop(columns="y")


def test_missing_numbers_become_medians_and_categories_columns_of_zeros_and_ones():
    expected = pd.DataFrame(
        {
            "a": [3.0, 3.0, 1.0, 5.0],
            "b": [1.0, 2.0, 3.0, 4.0],
            "missingindicator_a": [0.0, 1.0, 0.0, 0.0],
            "c_(missing)": [0.0, 1.0, 0.0, 0.0],
            "c_blue": [0.0, 0.0, 1.0, 0.0],
            "c_red": [1.0, 0.0, 0.0, 1.0],
        }
    )
    columns = learn_columns(inputs(), is_filled=False)
    pd.testing.assert_frame_equal(encoded(inputs(), columns), expected)
    texts = inputs().astype(object).map(str, na_action="ignore")  # as a CSV file has them
    columns = learn_columns(typed(texts), is_filled=False)
    pd.testing.assert_frame_equal(encoded(texts, columns), expected)


def test_new_rows_get_the_medians_and_columns_of_training():
    columns = learn_columns(inputs(), is_filled=False)
    new = inputs()[:1].assign(a=np.nan, b=np.nan, c="green")
    with pytest.warns(UserWarning, match="not there in training: `green`, the first in row 1"):
        assert encode(new, columns).tolist() == [[3, 2.5, 1, 0, 0, 0]]
    check_table(new, columns, ignore_unknown=True)
    with pytest.raises(TableError, match=r"`green`, the first in row 1. Pass --ignore-unknown"):
        check_table(new, columns, ignore_unknown=False)
    with pytest.raises(TableError, match=r"lacks 1 columns of the training table: `b`"):
        check_table(new.drop(columns="b"), columns, ignore_unknown=True)


def test_columns_and_targets_survive_json(no_type_checker):
    dates = pd.to_datetime(["2020-01-01", "2022-01-01", None, "2020-01-05"])
    columns = learn_columns(inputs().assign(d=dates), categorical=["b", "c"])
    assert columns.names == ["a", "b", "c", "d"]
    assert Columns.from_json(json.loads(json.dumps(columns.to_json()))) == columns
    target = learn_target(table(), "y")
    assert Target.from_json(json.loads(json.dumps(target.to_json()))) == target
    for kind in (Columns, Target):
        with pytest.raises(ValueError, match="is not the description of a table"):
            kind.from_json({})
    for change in (
        {"names": ["a"]},
        {"medians": [["a", "x"], ["d", 0.0]]},
        {"medians": [["a", float("nan")], ["d", 0.0]]},
        {"with_missing": ["c"]},
        {"dates": [["d", ["month"]]]},
        {"categories": [["b", [1]]]},
    ):
        with pytest.raises(ValueError, match="is not the description of a table"):
            Columns.from_json(columns.to_json() | change)
    with pytest.raises(ValueError, match="`task` must be one of"):
        Target.from_json(target.to_json() | {"task": "guess"})


@pytest.mark.parametrize(
    ("values", "task"),
    [
        (["a", "b", "a"], "classification"),
        ([True, False, True], "classification"),
        ([1, 2, 3], "classification"),
        ([1.0, 2.0, np.nan], "classification"),
        ([1.5, 2.0, 3.0], "regression"),
        (range(11), "regression"),
    ],
)
def test_the_task_is_found_from_the_target(values, task):
    frame = pd.DataFrame({"x": np.arange(float(len(values))), "y": values})
    assert learn_target(frame, "y").task == task


def test_labels_are_whole_numbers_or_text():
    frame = table().assign(y=[1.0, 2.0, 1.0, 2.0])
    labels = targets(frame, learn_target(frame, "y"))
    assert (labels.dtype, labels.tolist()) == (np.int64, [1, 2, 1, 2])
    frame = table().assign(y=[True, False, True, False])
    assert targets(frame, learn_target(frame, "y")).tolist() == ["True", "False", "True", "False"]


@pytest.mark.parametrize(
    ("texts", "labels"),
    [
        (["1", "-2", "0"], [1, -2, 0]),
        (["1", "2.0", "1"], ["1", "2.0", "1"]),
        (["01", "2", "2"], ["01", "2", "2"]),
        (["18446744073709551615", "1", "1"], ["18446744073709551615", "1", "1"]),
        (["9223372036854775807", "1", "1"], [2**63 - 1, 1, 1]),
        (["true", "false", "true"], ["true", "false", "true"]),
    ],
)
def test_labels_are_whole_numbers_only_if_that_is_how_they_are_written(texts, labels):
    frame = pd.DataFrame({"x": ["1", "2", "3"], "y": texts}, dtype=object)
    found = targets(frame, Target("y", "classification"))
    assert found.tolist() == labels


def test_labels_written_otherwise_are_the_class_with_the_same_number():
    assert numbers_of_classes([1, 2, 3], np.array(["1", "2"])).tolist() == [0, 1, -1]
    assert numbers_of_classes(["1.0", "01", "x"], np.array([0, 1])).tolist() == [1, 1, -1]
    assert numbers_of_classes(["1.0", "01"], np.array(["01", "1"])).tolist() == [-1, 0]
    assert numbers_of_classes(["x", "nan"], np.array(["a", "b"])).tolist() == [-1, -1]


@pytest.mark.parametrize(
    "column",
    [
        pd.array([1, None, 2, 1], dtype="Int64"),
        [1.0, None, 2.0, 1.0],
        ["1", None, "2", "1"],
        ["1.0", None, "2.0", "1.0"],
    ],
)
@pytest.mark.parametrize("known", [["1", "2"], ["1.0", "2.0"]])
def test_categories_are_known_whatever_missing_values_make_of_them(column, known):
    """Files of earlier versions hold 1.0 where a value was missing in training."""
    columns = Columns(["c"], categories={"c": [_MISSING, *known]})
    found = encode(pd.DataFrame({"c": pd.Series(column)}), columns).tolist()
    assert found == [[0, 1, 0], [1, 0, 0], [0, 0, 1], [0, 1, 0]]


@pytest.mark.parametrize("values", [["true", "FALSE", None, "True"], [True, False, None, True]])
def test_booleans_are_numbers(values):
    frame = pd.DataFrame({"a": values}, dtype=object)
    columns = learn_columns(typed(frame))
    assert encode(frame, columns).tolist() == [[1, 0], [0, 0], [1, 1], [1, 0]]


def test_decimals_are_numbers_and_categorical_columns_are_text():
    decimals = pd.Series([Decimal("1.5"), Decimal("2"), None], dtype=object)
    kinds = pd.Categorical(["1", "2", "2"])
    frame = pd.DataFrame({"d": decimals, "c": kinds})
    found = encode(frame, learn_columns(frame)).tolist()
    assert found == [[1.5, 0, 1, 0], [2, 0, 0, 1], [1.75, 1, 0, 1]]


def test_the_task_is_not_found_from_a_target_that_could_be_anything():
    def task(values):
        return learn_target(pd.DataFrame({"x": range(len(values)), "y": values}, dtype=object), "y")

    assert task(["0", "1", "2", "3+"] * 3).task == "classification"
    assert task(["a", "b"] * 6).task == "classification"
    for values, match in [
        ([*map(str, np.arange(0.5, 12)), "?"], r"first '\?' in row 13. Clean it, or pass --task"),
        (["1", "2", "1", "-"], "first '-' in row 4"),
        (["1", "2", "1", "1,5"], "first '1,5' in row 4"),
        (["1,5", "2,25", "3,0"], "decimal comma .* first '1,5' in row 1; write them as 1.5"),
        (["1 234", "12 345 678", "1 000"], "separated thousands, first '1 234'"),
        ([f"n{i}" for i in range(12)], "12 different texts in 12 rows"),
    ]:
        with pytest.raises(TableError, match=match):
            task(values)


@pytest.mark.parametrize("kind", ["datetime64", "with time zone", "text", "objects"])
def test_dates_are_days_and_the_cycles_that_the_rows_span(kind):
    times = pd.Series(pd.to_datetime(["2020-01-01T06", "2021-12-01T18", None, "2020-01-08T00"]))
    days = np.array([18262.25, 18962.75, np.nan, 18269.0])
    column = {
        "datetime64": times,
        "with time zone": times.dt.tz_localize("UTC").dt.tz_convert("Asia/Tokyo"),
        "text": times.dt.strftime("%Y-%m-%dT%H:%M").astype(object).where(times.notna(), None),
        "objects": times.astype(object),
    }[kind]
    frame = pd.DataFrame({"when": column})
    columns = learn_columns(frame)
    assert columns.dates == {"when": ["year", "week", "day"]}
    expected = [np.where(np.isnan(days), 18269.0, days), np.isnan(days)]
    for length in (365.2425, 7, 1):
        angle = 2 * np.pi * days / length
        expected += [np.nan_to_num(np.sin(angle)), np.nan_to_num(np.cos(angle))]
    np.testing.assert_allclose(encode(frame, columns), np.stack(expected, -1), atol=1e-9)
    with pytest.raises(TableError, match="column `when` must hold dates; got 'soon' in row 1"):
        encode(pd.DataFrame({"when": ["soon"]}), columns)
    with pytest.raises(TableError, match="must hold dates; got '3' in row 1"):
        encode(pd.DataFrame({"when": [3]}), columns)


@pytest.mark.skipif(pd.__version__ < "3", reason="pandas 2 counts nanoseconds, up to 2262")
def test_dates_far_away_are_days():
    columns = learn_columns(pd.DataFrame({"when": ["2020-01-01", "2020-01-02"]}))
    far = pd.DataFrame({"when": ["0001-01-01", "9999-12-31"]})
    found = raw_columns(far, columns)[0]
    np.testing.assert_array_equal(found, [-719162, 2932896])  # days of datetime.date


def test_dates_of_a_few_days_have_no_cycles():
    frame = pd.DataFrame({"when": pd.to_datetime(["2020-01-01", "2020-01-02", "2020-01-03"])})
    assert learn_columns(frame).dates == {"when": []}


def test_columns_that_cannot_be_used_are_refused():
    for values, match in [
        (pd.to_timedelta([1, 2], unit="h"), "holds times or periods"),
        ([1 + 2j, 3], "neither numbers nor text"),
        ([{"a": 1}, 2], "neither numbers nor text"),
        ([np.inf, 2], "infinite"),
    ]:
        with pytest.raises(TableError, match=match):
            learn_columns(pd.DataFrame({"x": pd.Series(values)}))
    with pytest.raises(TableError, match="201 different texts, more than 200"):
        learn_columns(pd.DataFrame({"x": [f"n{i}" for i in range(201)]}))
    with pytest.raises(TableError, match="several columns called `a`"):
        learn_columns(pd.DataFrame([[1, 2]], columns=["a", "a"]))
    with pytest.raises(TableError, match="must hold numbers; got 'red' in row 1"):
        learn_columns(inputs(), categorical=[])


def test_frames_of_polars_are_those_of_pandas():
    polars = pytest.importorskip("polars")
    content = {"a": [1.5, None], "b": ["x", None], "c": [True, None], "n": [3, None]}
    frame = polars.DataFrame(content).with_columns(
        polars.col("b").cast(polars.Categorical).alias("k"),
        polars.Series("d", ["2020-01-01", None]).str.to_date(),
    )
    found = as_frame(frame)
    expected = pd.DataFrame(content | {"k": pd.Categorical(["x", None])})
    expected["d"] = pd.to_datetime(["2020-01-01", None])
    assert learn_columns(found) == learn_columns(expected)
    np.testing.assert_array_equal(
        encode(found, learn_columns(expected)), encode(expected, learn_columns(found))
    )
    assert as_frame([[1.0]]) is None


def test_embedded_numbers_are_shares_of_bins():
    frame = pd.DataFrame({"a": [0.0, 1.0, 2.0, 4.0, 8.0], "b": [0, 1, 0, 1, 1]})
    columns = learn_columns(frame, num_bins=4)
    assert columns.bins == {"a": [0.0, 1.0, 2.0, 4.0, 8.0]}  # `b` has only two values
    new = pd.DataFrame({"a": [-1.0, 0.5, 3.0, 12.0, np.nan], "b": 0})
    expected = [
        [-1.0, 0, 0, 0],
        [0.5, 0, 0, 0],
        [1, 1, 0.5, 0],
        [1, 1, 1, 2.0],
        [1, 1, 0, 0],
    ]
    found = pd.DataFrame(encode(new, columns), columns=columns.encoded_names)
    np.testing.assert_array_equal(found[[f"a_bin{n}" for n in range(1, 5)]], expected)
    widths = np.diff(columns.bins["a"])
    np.testing.assert_allclose(np.array(expected) @ widths, found["a"])  # nothing is lost
    assert Columns.from_json(json.loads(json.dumps(columns.to_json()))) == columns
    with pytest.raises(ValueError, match="increasing numbers"):
        Columns.from_json(columns.to_json() | {"bins": [["a", [1.0, 1.0]]]})


def test_edges_of_bins_are_quantiles_of_weighted_rows():
    rng = np.random.default_rng(0)
    values = rng.normal(size=101)
    table = pd.DataFrame({"a": values})
    edges = learn_columns(table, num_bins=4).bins["a"]
    np.testing.assert_allclose(edges, np.quantile(values, [0, 0.25, 0.5, 0.75, 1]))
    is_used = rng.uniform(size=101) < 0.5
    weights = np.where(is_used, 2.0, 1e-9)
    edges = learn_columns(table, num_bins=4, weights=weights).bins["a"]
    expected = np.quantile(values[is_used], [0.25, 0.5, 0.75])
    gap = np.diff(np.sort(values[is_used])[8:-8]).max()  # the others may lie between two used ones
    np.testing.assert_allclose(edges[1:4], expected, rtol=0, atol=gap)
    far = np.where(is_used, values, 10 + values)
    edges = learn_columns(pd.DataFrame({"a": far}), num_bins=4, weights=weights).bins["a"]
    np.testing.assert_allclose(edges[1:4], expected, rtol=0, atol=gap)
