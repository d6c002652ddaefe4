"""What a batch says about a q that is held fixed, as one operation, is what the plain terms say."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from pyro_dak import DAK, ClosedFormELBO, GaussianLikelihood, LaplaceKernel, NaturalGuide
from pyro_dak.fast import natural
from pyro_dak.inference.natural import expected_and_rows, of_weights


@pytest.fixture
def num_operations(monkeypatch):
    """How often the operation ran, as a list that grows."""
    calls, apply = [], natural.GaussianRows.apply

    def counted(*args):
        calls.append(args)
        return apply(*args)

    monkeypatch.setattr(natural.GaussianRows, "apply", counted)
    return calls


class OtherELBO(ClosedFormELBO):
    """A class that may do anything, so that it takes the plain terms."""


def make(covariance, num_outputs, learn=True, **options):
    """A guide that knows some rows, inputs inside and outside the grid, and targets."""
    options = {"level": 3, "embedding": False, "scaling": "none"} | options
    likelihood = GaussianLikelihood(0.3, learn=learn)
    model = DAK(nn.Identity(), 4, 4, num_outputs, likelihood=likelihood, **options)
    guide = NaturalGuide(model, covariance)
    guide.update(model, torch.randn(50, 4), torch.randn(50, num_outputs))
    with torch.no_grad():
        model.layer.log_unit_scale.add_(0.3 * torch.randn(4))
    h = torch.cat(
        [0.7 * torch.randn(20, 4) + 0.5, torch.tensor([0.0, 0.5, 1.0, 9.0, -9.0]).expand(4, 5).mT]
    )
    return model, guide, h.requires_grad_(), torch.randn(25, num_outputs)


def terms(objective, model, guide, h, y):
    weights = guide.fixed_weights(model.layer, h.dtype)
    expected, rows = expected_and_rows(objective, model, guide, h, y, *weights)
    parameters = [p for p in (h, *model.parameters()) if p.requires_grad]
    gradients = torch.autograd.grad(1.7 * expected, parameters)
    sums = of_weights(model, guide, rows.sums(model, guide, may_round=False))
    return expected, gradients, sums._asdict()


OPTIONS = {
    "plain": {},
    "linear term": {"linear_term": True},
    "one node": {"linear_term": True, "level": 1},
    "fine": {"kernel": LaplaceKernel(0.1), "level": 6, "bounds": (-1.0, 1.0)},
}


@pytest.mark.parametrize("covariance", ["joint", "shared", "diagonal"])
@pytest.mark.parametrize("num_outputs", [1, 3])
@pytest.mark.parametrize("options", OPTIONS)
def test_rows_are_those_of_the_plain_terms(covariance, num_outputs, options, num_operations):
    case = make(covariance, num_outputs, **OPTIONS[options])
    found = terms(ClosedFormELBO(), *case)
    assert len(num_operations) == 1
    expected = terms(OtherELBO(), *case)
    assert len(num_operations) == 1
    assert_close(found, expected)


def test_a_fixed_noise_has_no_gradient_and_no_squares(num_operations):
    model, guide, h, y = make("joint", 2, learn=False)
    found, expected = (terms(elbo(), model, guide, h, y) for elbo in (ClosedFormELBO, OtherELBO))
    assert_close(found, expected)
    assert found[2]["squares"] is None
    assert len(num_operations) == 1


def test_weights_that_are_not_all_coarse_take_the_plain_terms(num_operations):
    model = DAK(nn.Identity(), 4, 4, level=8, embedding=False, scaling="none")
    guide, h = NaturalGuide(model, "diagonal"), torch.rand(9, 4).requires_grad_()
    assert not guide.is_joint_in_the_mean
    expected, _, _ = terms(ClosedFormELBO(), model, guide, h, torch.randn(9, 1))
    assert expected.isfinite()
    assert not num_operations


def test_second_derivatives_are_refused():
    model, guide, h, y = make("diagonal", 1)
    expected, _ = expected_and_rows(ClosedFormELBO(), model, guide, h, y)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        torch.autograd.grad(expected, h, create_graph=True)
