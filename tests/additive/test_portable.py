"""Moments in portable operations are those of the layer."""

import pytest
import torch

from pyro_dak.additive.activation import KernelActivation
from pyro_dak.additive.grid import DyadicGrid
from pyro_dak.additive.kernels import LaplaceKernel, MaternKernel, RBFKernel
from pyro_dak.additive.layer import AdditiveLayer, Weights
from pyro_dak.additive.portable import (
    DenseMoments,
    KernelFeatures,
    LocalMoments,
    PortableMoments,
    WeightMoments,
    grid_coordinates,
)

pytestmark = pytest.mark.filterwarnings("ignore:The grid is coarse")
P, F, N = 3, 2, 200
KERNELS = {
    "laplace": LaplaceKernel(0.7),
    "short": LaplaceKernel(0.05),
    "far too short": LaplaceKernel(0.004),
    "per unit": LaplaceKernel([0.05, 0.5, 3.0]),
    "learned": LaplaceKernel(0.4, learn=True),
    "rbf": RBFKernel(0.2),
    "matern per unit": MaternKernel([0.1, 0.3, 0.5]),
}


def layer_of(kernel, level=4, linear_term=True, bounds=(-1.0, 2.0)):
    activation = KernelActivation(DyadicGrid(level, bounds), kernel, num_units=P)
    layer = AdditiveLayer(activation, P, F, linear_term)
    layer.log_unit_scale.data = torch.randn(P)
    return layer.requires_grad_(False)


def inputs(layer):
    """Unit inputs inside and far outside the grid, and at its nodes; and their coordinates."""
    h = 2 * torch.randn(N, P)
    nodes = layer.activation.grid.inducing_points
    h[:15] = nodes[torch.arange(15) % len(nodes)].unsqueeze(-1)
    h[-2:] = torch.tensor([[1e3], [-1e3]])
    gain, shift = grid_coordinates(layer)
    return h, h * gain + shift


def independent(layer):
    M = layer.activation.num_inducing
    loc = Weights(torch.randn(F, P, M), torch.randn(F), torch.randn(F, P))
    scale = Weights(*(torch.rand_like(part) for part in loc))
    parts = [[own.mu[:, None], own.linear, own.z.flatten(-2)] for own in (loc, scale)]
    if not layer.linear_term:
        loc, scale = loc._replace(linear=None), scale._replace(linear=None)
        parts = [[own[0], own[2]] for own in parts]
    return loc, scale, WeightMoments(*(torch.cat(own, -1) for own in parts))


FORMS = [(DenseMoments, name) for name in KERNELS]
FORMS += [(LocalMoments, name) for name, kernel in KERNELS.items() if kernel.is_markov]


@pytest.mark.parametrize("linear_term", [True, False])
@pytest.mark.parametrize(("form", "kernel"), FORMS)
def test_moments_are_those_of_the_layer(form, kernel, linear_term):
    layer = layer_of(KERNELS[kernel], linear_term=linear_term)
    loc, scale, weights = independent(layer)
    h, x = inputs(layer)
    found, wanted = form(layer, weights, None)(x), layer.moments(h, loc, scale)
    torch.testing.assert_close(found.mean, wanted.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found.var, wanted.var, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("level", [1, 2, 10])
def test_both_forms_agree_on_grids_of_any_size(level):
    layer = layer_of(LaplaceKernel(0.9), level)
    _, _, weights = independent(layer)
    _, x = inputs(layer)
    local, dense = (form(layer, weights, None)(x) for form in (LocalMoments, DenseMoments))
    torch.testing.assert_close(local, dense, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kernel", ["laplace", "per unit", "rbf"])
def test_what_the_grid_loses_is_the_residual_variance(kernel):
    layer = layer_of(KERNELS[kernel])
    _, _, weights = independent(layer)
    h, x = inputs(layer)
    prior_var = torch.rand(F, P)
    wanted = layer.unit_residuals(h) @ prior_var.mT
    forms = [DenseMoments] + [LocalMoments] * layer.activation.has_local_route
    for form in forms:
        both = [form(layer, weights, lost)(x).var for lost in (prior_var, None)]
        torch.testing.assert_close(both[0] - both[1], wanted, rtol=1e-7, atol=1e-9)


def test_features_have_the_covariance_of_the_kernel_at_the_nodes():
    layer = layer_of(KERNELS["per unit"])
    grid = layer.activation.grid
    nodes = grid.sorted_points.unsqueeze(-1).expand(-1, P)
    gain, shift = grid_coordinates(layer)
    phi = KernelFeatures(layer.activation, torch.float64)(nodes * gain + shift)  # (M, P, M)
    distance = (grid.sorted_points[:, None] - grid.sorted_points).abs()
    for p, lengthscale in enumerate(KERNELS["per unit"].lengthscale):
        gram = phi[:, p] @ phi[:, p].mT
        torch.testing.assert_close(gram, (-distance / lengthscale).exp(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kernel", ["laplace", "rbf"])
def test_a_nan_shows_in_its_own_row_only(kernel):
    layer = layer_of(KERNELS[kernel])
    _, x = inputs(layer)
    _, _, weights = independent(layer)
    moments = PortableMoments.of(layer, weights)
    clean = moments(x)
    x[5, 1] = torch.nan
    spoilt = moments(x)
    assert bool(spoilt.mean[5].isnan().all())
    keep = torch.arange(N) != 5
    torch.testing.assert_close(spoilt.mean[keep], clean.mean[keep])


def test_few_functions_on_many_nodes_take_the_local_form():
    fine, coarse = layer_of(LaplaceKernel(1.0), level=5), layer_of(LaplaceKernel(1.0), level=1)
    kinds = [type(PortableMoments.of(own, independent(own)[2])) for own in (fine, coarse)]
    assert kinds == [LocalMoments, DenseMoments]
