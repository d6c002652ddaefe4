"""Averages over draws of classes are those of the plain formula."""

import math

import pytest
import torch
from torch.testing import assert_close

from pyro_dak.additive import gaussian
from pyro_dak.additive.gaussian import class_averages
from pyro_dak.fast import classes


def fast_and_plain(draws, monkeypatch):
    monkeypatch.setattr(gaussian, "_MANY_NUMBERS", 0)
    fast = class_averages(draws)
    monkeypatch.setattr(gaussian, "_MANY_NUMBERS", math.inf)
    return fast, class_averages(draws)


@pytest.mark.parametrize("shape", [(7, 30, 3), (5, 2, 11, 4), (1, 1, 2), (20, 3, 100)])
@pytest.mark.parametrize("block", [1, 50, 2**16])
def test_fast_averages_are_those_of_log_probabilities(shape, block, monkeypatch):
    monkeypatch.setattr(classes, "_MAX_NUMBERS", block)
    fast, plain = fast_and_plain(3 * torch.randn(shape), monkeypatch)
    assert_close(fast, plain, rtol=1e-12, atol=1e-12)


def test_fast_averages_in_single_precision_are_those_in_double(monkeypatch):
    draws = 10 * torch.randn(100, 40, 10).float()
    fast, _ = fast_and_plain(draws, monkeypatch)
    _, plain = fast_and_plain(draws.double(), monkeypatch)
    assert_close([part.double() for part in fast], [*plain], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("size", [60.0, 90.0, 1e4])
def test_probabilities_that_are_tiny_keep_their_logarithms(size, monkeypatch):
    draws = torch.randn(50, 6, 3).float()
    draws[:, 2, 1] -= size
    draws[:, 4] += torch.tensor([size, 0, -size])
    fast, plain = fast_and_plain(draws, monkeypatch)
    assert_close(fast, plain, rtol=2e-6, atol=2e-6)


def test_a_row_that_is_not_finite_is_alone(monkeypatch):
    draws = torch.randn(50, 6, 3)
    draws[3, 2, 1] = math.nan
    given = draws.clone()
    for fast, plain in zip(*fast_and_plain(draws, monkeypatch), strict=True):
        assert_close(fast, plain, equal_nan=True)
        is_nan = fast.isnan() if fast.dim() == 1 else fast.isnan().any(-1)
        assert is_nan.nonzero().tolist() == [[2]]
    assert_close(draws, given, rtol=0, atol=0, equal_nan=True)


def test_averages_have_gradients():
    draws = torch.randn(20, 300, 4, requires_grad=True)
    log_probs, entropies = class_averages(draws)
    (log_probs.sum() + entropies.sum()).backward()
    assert draws.grad.isfinite().all()
