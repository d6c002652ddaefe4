"""The fused moments of jointly Gaussian weights equal the plain ones."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from pyro_dak import DAK, LaplaceKernel, NaturalGuide, RBFKernel


def make(covariance, num_outputs, linear_term, **options):
    """A guide that knows some rows, and inputs inside and outside the grid."""
    options = {"level": 3, "linear_term": linear_term, "embedding": False} | options
    model = DAK(nn.Identity(), 4, 4, num_outputs, scaling="none", **options)
    guide = NaturalGuide(model, covariance)
    guide.update(model, torch.randn(50, 4), torch.randn(50, num_outputs))
    with torch.no_grad():
        model.layer.log_unit_scale.add_(0.3 * torch.randn(4))
    return model, guide, (0.7 * torch.randn(20, 4) + 0.5).requires_grad_()


@pytest.mark.parametrize("covariance", ["joint", "shared"])
@pytest.mark.parametrize("num_outputs", [1, 3])
@pytest.mark.parametrize("options", [
    {"linear_term": False},
    {"linear_term": True},
    {"linear_term": True, "level": 1},
    {"linear_term": False, "kernel": LaplaceKernel(0.05), "level": 6, "bounds": (-1.0, 1.0)},
    {"linear_term": True, "kernel": RBFKernel(1.0)},
])  # fmt: skip
def test_moments_of_training_equal_those_of_prediction(covariance, num_outputs, options):
    model, guide, h = make(covariance, num_outputs, **options)
    parameters = (h, model.layer.log_unit_scale)
    moments, design = model.layer.joint_moments(h, *guide.fixed_weights(model.layer, h.dtype))
    plain = guide.own_moments(model.layer, h)
    assert_close(moments.mean, plain.mean)
    assert_close(moments.var, plain.var)
    # Row by row, the map of the sums takes the design of node values to that of the weights.
    assert_close(model.layer.from_nodes(design), model.layer.design(h).detach())
    a, b = torch.randn(2, 20, num_outputs)
    gradients = [
        torch.autograd.grad((a * q.mean + b * q.var).sum(), parameters) for q in (moments, plain)
    ]
    assert_close(*gradients)


def test_second_derivatives_are_refused():
    model, guide, h = make("joint", 1, linear_term=False)
    mean = model.layer.joint_moments(h, *guide.fixed_weights(model.layer, h.dtype))[0].mean
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        torch.autograd.grad(mean.sum(), h, create_graph=True)
