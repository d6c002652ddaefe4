"""What is learned about the columns of a table, and the numbers that rows become."""

import json

import numpy as np
import pandas as pd
import pytest

from pyro_dak.tables.files import TableError
from pyro_dak.tables.schema import Schema, inputs, learn_schema, targets


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


def test_dates_are_refused():
    frame = table().assign(a=pd.to_datetime(["2020-01-01"] * 4))
    with pytest.raises(TableError, match="holds dates"):
        learn_schema(frame, "y")
