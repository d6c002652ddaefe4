"""Batches of loaders: what is x, what is y, and what is refused with a remedy."""

from collections import UserDict

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyro_dak import DAK, MeanFieldGuide, predict
from pyro_dak.model.batches import Unpacking, is_loader
from tests.training.runs import make_data, make_model, train

X, Y = torch.zeros(4, 2), torch.ones(4)
WORDS = {"ids": X, "labels": Y}


def test_pairs_dictionaries_and_others_are_read():
    assert Unpacking().pair((X, Y)) == (X, Y)
    x, y = Unpacking(target="labels").pair(UserDict(WORDS))
    assert (x, y) == ({"ids": X}, Y)
    assert Unpacking(unpack=lambda batch: ((batch[0], batch[2]), batch[1])).pair((X, Y, X)) == (
        (X, X),
        Y,
    )


def test_inputs_come_with_and_without_targets():
    assert Unpacking().inputs(X) is X
    assert Unpacking().inputs([X]) is X
    assert Unpacking().inputs(((X, X), Y)) == (X, X)
    assert Unpacking().inputs({"ids": X}) == {"ids": X}
    assert Unpacking(target="labels").inputs(WORDS) == {"ids": X}
    assert Unpacking(unpack=lambda batch: (batch[1], None)).inputs((Y, X)) is X


@pytest.mark.parametrize(("x", "expected"), [
    (X, False), ((X, X), False), ([X, X], False), ({"ids": X}, False), ([], False),
    (((X, X), Y), False), ("text", False), (numpy.zeros((3, 2)), False), (3, False),
    ([(X, Y)], True), ([{"ids": X}], True), (iter([X]), True),
    (DataLoader(TensorDataset(X)), True),
])  # fmt: skip
def test_loaders_are_told_from_inputs(x, expected):
    assert is_loader(x) is expected


def test_tensors_are_told_from_batches():
    assert Unpacking().of_tensors((X, Y)) == (X, Y)
    assert Unpacking().of_tensors(((X, X), Y)) == ((X, X), Y)
    assert Unpacking().of_tensors(({"ids": X}, Y)) == ({"ids": X}, Y)
    assert Unpacking(target="labels").of_tensors(WORDS) == ({"ids": X}, Y)
    assert Unpacking(target="labels").of_tensors(({"ids": X}, Y)) == ({"ids": X}, Y)
    for batches in ([(X, Y), (X, Y)], ((X, Y), (X, Y)), [WORDS, WORDS], [(X, Y)], (X, Y, Y)):
        assert Unpacking().of_tensors(batches) is None
    assert Unpacking(unpack=lambda batch: (batch, Y)).of_tensors([X, X]) is None


THREE = DataLoader(TensorDataset(*make_data(20), torch.zeros(20)), 5)


@pytest.mark.usefixtures("no_type_checker")
@pytest.mark.parametrize(("data", "options", "error", "message"), [
    (THREE, {}, TypeError, r"a pair \(x, y\); got a list of 3 elements\. .* pass `unpack`"),
    (THREE, {"unpack": lambda batch: batch}, TypeError, r"`unpack` must return a pair \(x, y\)"),
    (THREE, {"target": "labels"}, TypeError, "`target` is for batches that are dictionaries"),
    ([(X,), (X,)], {}, TypeError, "got a tuple of 1 elements"),
    ([X, X, X], {}, TypeError, "got a Tensor"),
    ((X, Y, Y), {}, TypeError, "got a Tensor"),
    ([(X, [1, 2]), (X, Y)], {}, TypeError, "got a list of 2 elements as y"),
    ([(X, Y.sum()), (X, Y)], {}, TypeError, "got a Tensor as y"),
    ([WORDS, WORDS], {}, TypeError, r"entries \['ids', 'labels'\]: say which of them holds y"),
    (WORDS, {}, TypeError, r"entries \['ids', 'labels'\]: say which of them holds y"),
    ([WORDS], {"target": "y"}, ValueError, r"one of \['ids', 'labels'\]; got 'y'"),
    ([{"labels": Y}], {"target": "labels"}, ValueError, "at least one tensor; got an empty dict"),
    ([(X, Y)], {"target": 3}, TypeError, "`target` must be the name of an entry"),
    ([(X, Y)], {"unpack": 3}, TypeError, "`unpack` must be a function"),
    ([(X, Y)], {"unpack": print, "target": "y"}, ValueError, "`target` or `unpack`, not both"),
])  # fmt: skip
def test_batches_that_say_not_what_y_is_are_refused(data, options, error, message):
    with pytest.raises(error, match=message):
        train(*make_model(), data, **options)


@pytest.mark.usefixtures("no_type_checker")
@pytest.mark.parametrize(("x", "error", "message"), [
    (THREE, TypeError, r"every batch of `x` must be a pair.*got a list of 3 elements"),
    (iter([]), ValueError, "`x` yields no batch"),
    (((X, X), Y), TypeError, "not nested"),
    (numpy.zeros((3, 2)), TypeError, "got ndarray. Convert it with torch.as_tensor"),
])  # fmt: skip
def test_what_cannot_be_predicted_at_is_refused(x, error, message):
    model = DAK(nn.Linear(2, 4), 4, num_units=2, level=2).eval()
    with pytest.raises(error, match=message):
        predict(model, MeanFieldGuide(model), x)


@pytest.mark.parametrize(("validation", "error", "message"), [
    ([], ValueError, "`validation` yields no batch"),
    (iter([make_data()]), TypeError, "a loader, or a share"),
    (3.0, ValueError, "share between 0 and 1"),
    ("x", TypeError, "a loader, or a share"),
    (THREE, TypeError, "every batch of `validation` must be a pair"),
    ([(make_data()[0].float(), make_data()[1])], TypeError, "`validation x` must have the dtype"),
])  # fmt: skip
def test_what_cannot_be_scored_is_refused_before_training(validation, error, message):
    model, guide = make_model()
    before = guide.z_loc.clone()
    with pytest.raises(error, match=message):
        train(model, guide, validation=validation)
    assert guide.z_loc.equal(before)
