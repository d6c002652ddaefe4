"""Inputs of several parts: what is taken, what is refused, and how they are remembered."""

from collections import UserDict

import pytest
import torch
from torch import nn

from pyro_dak import DAK, MeanFieldGuide, predict
from pyro_dak.model.rows import (
    blank_rows,
    call,
    check_parts,
    checked_row_shape,
    like_model,
    num_bytes,
    num_numbers,
    row_shape,
    shown_shape,
    take,
)

WORDS = {"ids": torch.ones(4, 5, dtype=torch.long), "mask": torch.ones(4, 5, dtype=torch.bool)}
PAIR = (torch.zeros(4, 2, 3), torch.zeros(4, dtype=torch.uint8))
SHAPES = [
    (torch.zeros(4, 2), (2,), "floating (2,)", 16),
    (torch.zeros(4, dtype=torch.int32), ("int32",), "int32 ()", 8),
    (PAIR, [(2, 3), ("uint8",)], "[floating (2, 3), uint8 ()]", 56),
    (
        WORDS,
        {"ids": ("int64", 5), "mask": ("bool", 5)},
        "{'ids': int64 (5,), 'mask': bool (5,)}",
        80,
    ),
]


@pytest.mark.parametrize(("x", "shape", "words", "size"), SHAPES)
def test_the_shape_of_a_row_is_plain_data_from_which_rows_are_made(x, shape, words, size):
    assert row_shape(x) == shape
    assert checked_row_shape("input_shape", shape) == shape
    assert (shown_shape(shape), num_bytes(shape)) == (words, size)
    rows = blank_rows(shape, 3, torch.zeros(1, dtype=torch.float32))
    assert row_shape(rows) == shape
    assert type(rows) is type(x)


def test_blank_rows_have_tokens_to_look_at_and_the_dtype_of_the_model():
    words = blank_rows(row_shape(WORDS), 2, torch.zeros(1))
    assert words["mask"].all()
    like = torch.zeros(1, dtype=torch.bfloat16)
    image, number = blank_rows(row_shape(PAIR), 2, like)
    assert (image.dtype, number.dtype, len(number)) == (torch.bfloat16, torch.uint8, 2)


@pytest.mark.parametrize("value", [["float64", 3], [[3], [-1]], {"a": ["int64", 0.5]}, 3, "x"])
def test_a_shape_from_a_file_is_checked(value):
    with pytest.raises((TypeError, ValueError)):
        checked_row_shape("input_shape", value)


def test_floating_parts_follow_the_model_and_others_stay():
    image, number = like_model(PAIR, torch.zeros(1, dtype=torch.float32))
    assert (image.dtype, number.dtype) == (torch.float32, torch.uint8)


def test_rows_are_taken_from_every_part():
    assert {len(part) for part in take(WORDS, slice(1, 3)).values()} == {2}
    assert {len(part) for part in take(PAIR, torch.tensor([3, 0, 1]))} == {3}
    assert num_numbers(PAIR) == 7


def test_a_network_gets_a_tuple_by_position_and_a_dictionary_by_name():
    class Network(nn.Module):
        def forward(self, first, second=None):
            return first, second

    assert call(Network(), PAIR) == PAIR
    assert call(Network(), {"second": 2, "first": 1}) == (1, 2)
    assert call(Network(), UserDict(second=2, first=1)) == (1, 2)
    assert call(Network(), WORDS["ids"])[0] is WORDS["ids"]


@pytest.mark.usefixtures("no_type_checker")
@pytest.mark.parametrize(("x", "error", "message"), [
    ((), ValueError, "at least one tensor; got an empty tuple"),
    ({}, ValueError, "at least one tensor; got an empty dictionary"),
    ({1: torch.zeros(3)}, TypeError, "strings as keys"),
    ([1.0, 2.0], TypeError, r"`x\[0\]` must be a torch.Tensor; got float"),
    ((torch.zeros(2), [torch.zeros(2)]), TypeError, r"`x\[1\]` must be a tensor.*not nested"),
    ({"a": {"b": torch.zeros(2)}}, TypeError, r"`x\['a'\]` must be.*a dictionary. Put its"),
    ((torch.zeros(3), torch.zeros(2)), ValueError, r"3 in `x\[0\]`, 2 in `x\[1\]`"),
    ((torch.zeros(()),), ValueError, "an entry per row"),
    ((torch.zeros(2).to_sparse(),), TypeError, "must be dense"),
    (None, TypeError, "a tuple or dictionary of tensors; got NoneType"),
])  # fmt: skip
def test_other_inputs_are_refused_by_name(x, error, message):
    with pytest.raises(error, match=message):
        check_parts("x", x)
    with pytest.raises(error, match=message):
        DAK(nn.Linear(3, 4), 4)(x)


class Sum(nn.Module):
    """The sum of all parts, as features."""

    def forward(self, *parts):
        return sum(part.double().reshape(len(part), -1).sum(-1, keepdim=True) for part in parts)


ROWS = torch.zeros(3, 2, dtype=torch.float64)


@pytest.mark.parametrize(("x", "error", "message"), [
    ((ROWS, ROWS.float()), TypeError, r"`x\[1\]` must have the dtype"),
    ((ROWS, ROWS.cfloat()), TypeError, r"`x\[1\]` must have the dtype"),
    ((ROWS, ROWS / 0), ValueError, r"`x\[1\]` must be finite"),
    ((torch.zeros(0, 2), torch.zeros(0, 2)), ValueError, r"`x\[0\]` must have .*at least one row"),
    (torch.zeros(3), ValueError, r"`x` must have shape \(N, \.\.\.\)"),
    ((torch.zeros(3, 2, device="meta"),), ValueError, "meta device"),
])  # fmt: skip
def test_values_of_each_part_are_checked(x, error, message):
    model = DAK(Sum(), 1, num_units=2, level=2).eval()
    with pytest.raises(error, match=message):
        predict(model, MeanFieldGuide(model), x)


def test_parts_and_integers_may_have_one_number_per_row():
    model = DAK(Sum(), 1, num_units=2, level=2).eval()
    guide = MeanFieldGuide(model)
    expected = predict(model, guide, torch.arange(3.0).unsqueeze(-1)).mean
    assert predict(model, guide, torch.arange(3)).mean.equal(expected)
    assert predict(model, guide, (torch.arange(3.0), torch.zeros(3))).mean.equal(expected)
