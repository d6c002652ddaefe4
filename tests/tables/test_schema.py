"""What is learned about the columns of a table, and the numbers that rows become."""

import json
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest

from pyro_dak.tables.files import TableError
from pyro_dak.tables.schema import Schema, inputs, learn_schema, numbers_of_classes, targets

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


def test_missing_numbers_become_medians_and_categories_columns_of_zeros_and_ones():
    schema = learn_schema(table(), "y")
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
    pd.testing.assert_frame_equal(inputs(table(), schema), expected)


def test_new_rows_get_the_medians_and_columns_of_training():
    schema = learn_schema(table(), "y")
    new = table()[:1].assign(a=np.nan, b=np.nan, c="green")
    assert inputs(new, schema, ignore_unknown=True).to_numpy().tolist() == [[3, 2.5, 1, 0, 0, 0]]
    with pytest.raises(TableError, match=r"`green`, the first in row 1. Pass --ignore-unknown"):
        inputs(new, schema)


def test_a_schema_survives_json(no_type_checker):
    schema = learn_schema(table(), "y", categorical=["b"], drop=["a"])
    assert schema.columns == ["b", "c"]
    assert Schema.from_json(json.loads(json.dumps(schema.to_json()))) == schema
    with pytest.raises(ValueError, match="is not the description of a table"):
        Schema.from_json({"target": "y"})
    with pytest.raises(ValueError, match="`task` must be one of"):
        Schema.from_json(schema.to_json() | {"task": "guess"})


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
    assert learn_schema(frame, "y").task == task


def test_labels_are_whole_numbers_or_text():
    frame = table().assign(y=[1.0, 2.0, 1.0, 2.0])
    labels = targets(frame, learn_schema(frame, "y"))
    assert (labels.dtype, labels.tolist()) == (np.int64, [1, 2, 1, 2])
    frame = table().assign(y=[True, False, True, False])
    assert targets(frame, learn_schema(frame, "y")).tolist() == ["True", "False", "True", "False"]


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
    found = targets(frame, Schema("y", "classification", {"x": 0.0}))
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
    schema = Schema("y", "regression", categories={"c": [_MISSING, *known]})
    found = inputs(pd.DataFrame({"c": pd.Series(column)}), schema).to_numpy().tolist()
    assert found == [[0, 1, 0], [1, 0, 0], [0, 0, 1], [0, 1, 0]]


@pytest.mark.parametrize("values", [["true", "FALSE", None, "True"], [True, False, None, True]])
def test_booleans_are_numbers(values):
    frame = pd.DataFrame({"a": values, "y": [0.5, 1.5, 2.5, 3.5]}, dtype=object)
    schema = learn_schema(frame, "y")
    assert inputs(frame, schema).to_numpy().tolist() == [[1, 0], [0, 0], [1, 1], [1, 0]]


def test_decimals_are_numbers_and_categorical_columns_are_text():
    decimals = pd.Series([Decimal("1.5"), Decimal("2"), None], dtype=object)
    kinds = pd.Categorical(["1", "2", "2"])
    frame = pd.DataFrame({"d": decimals, "c": kinds, "y": [0.5, 1.5, 2.5]})
    found = inputs(frame, learn_schema(frame, "y")).to_numpy().tolist()
    assert found == [[1.5, 0, 1, 0], [2, 0, 0, 1], [1.75, 1, 0, 1]]


def test_the_task_is_not_found_from_a_target_that_could_be_anything():
    def task(values):
        return learn_schema(pd.DataFrame({"x": range(len(values)), "y": values}, dtype=object), "y")

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


def test_dates_are_refused():
    frame = table().assign(a=pd.to_datetime(["2020-01-01"] * 4))
    with pytest.raises(TableError, match="holds dates"):
        learn_schema(frame, "y")
