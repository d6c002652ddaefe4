"""Moments of a stack of members against those of each member by itself."""

import pytest
import torch
from torch.testing import assert_close

from pyro_dak import DyadicGrid, KernelActivation, LaplaceKernel
from pyro_dak.stacked import stacked_moments


def stack(level, lengthscale=1.0, E=3, P=2, N=40, F=2):
    activation = KernelActivation(DyadicGrid(level), LaplaceKernel(lengthscale))
    h = (0.5 + 0.6 * torch.randn(E, P, N)).requires_grad_()  # many outside the nodes
    loc = torch.randn(F, E, P, activation.num_inducing, requires_grad=True)
    var = torch.rand_like(loc, requires_grad=True)
    return activation, h, loc, var


@pytest.mark.parametrize(("level", "lengthscale"), [(1, 1.0), (2, 0.5), (5, 1.0), (9, 2.0)])
def test_stacked_moments_and_gradients_are_those_of_each_member(level, lengthscale):
    activation, h, loc, var = stack(level, lengthscale)
    mean, variance = stacked_moments(activation, h, loc, var)
    expected = [
        activation.combine_moments(h[e].mT, loc[:, e], var[:, e], route="local") for e in range(3)
    ]
    expected_mean = torch.stack([m.mT for m, _ in expected], 1)
    expected_var = torch.stack([v.mT for _, v in expected], 1)
    assert_close(mean, expected_mean)
    assert_close(variance, expected_var)
    u, v = torch.randn_like(mean), torch.randn_like(mean)
    found = torch.autograd.grad((u * mean + v * variance).sum(), (h, loc, var))
    wanted = torch.autograd.grad((u * expected_mean + v * expected_var).sum(), (h, loc, var))
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, rtol=1e-7, atol=1e-9)


def test_gradient_of_stacked_moments_is_the_slope():
    activation, h, loc, var = stack(level=3, N=5)
    assert torch.autograd.gradcheck(
        lambda h, loc, var: stacked_moments(activation, h, loc, var), (h, loc, var)
    )


def test_stacked_variance_in_single_precision_is_never_negative_on_a_fine_grid():
    activation, h, loc, _ = stack(level=10)
    var = torch.full_like(loc, 1e-8)
    _, variance = stacked_moments(activation, h.float(), loc.float(), var.float())
    assert (variance >= 0).all()
