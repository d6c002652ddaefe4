"""Batches in front of inputs and weights, any shapes, and sums unit by unit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from pyro_dak.additive.activation import KernelActivation
from pyro_dak.additive.grid import DyadicGrid
from pyro_dak.additive.kernels import LaplaceKernel, RBFKernel
from tests import reference
from tests.additive.test_activation import ROUTES, nodes_and_bounds, properties

BATCHES = {
    "one input, samples of weights": ((), (4,)),
    "one input, samples of an ensemble": ((1,), (4, 3)),
    "batched input, one set of weights": ((2, 3), ()),
    "an ensemble with its own inputs": ((3,), (3,)),
    "samples of an ensemble with its own inputs": ((3,), (4, 3)),
    "batches that broadcast both ways": ((2, 1), (3,)),
    "trivial batches": ((1,), (1, 1)),
    "no batch": ((), ()),
}


def loop_over_batches(h, loc, var, lengthscale, U):
    batch = torch.broadcast_shapes(h.shape[:-2], loc.shape[:-3])
    h = h.expand(*batch, *h.shape[-2:]).reshape(-1, *h.shape[-2:])
    loc, var = (w.expand(*batch, *w.shape[-3:]).reshape(-1, *w.shape[-3:]) for w in (loc, var))
    means, variances = [], []
    for b in range(len(h)):
        phi = reference.phi(h[b], U, lengthscale)
        ones, zeros = torch.ones(loc.shape[-2]), torch.zeros(loc.shape[-3])
        mean, variance = reference.moments_of_f(phi, loc[b], var[b].sqrt(), ones, zeros, zeros)
        means.append(mean)
        variances.append(variance)
    shape = (*batch, h.shape[-2], loc.shape[-3])
    return torch.stack(means).reshape(shape), torch.stack(variances).reshape(shape)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("num_outputs", [1, 2])
@pytest.mark.parametrize("batches", BATCHES.values(), ids=BATCHES.keys())
def test_batched_moments_equal_the_loop(batches, num_outputs, route):
    activation = KernelActivation(DyadicGrid(3))
    input_batch, weight_batch = batches
    h = 2 * torch.rand(*input_batch, 3, 2) - 0.5
    loc = torch.randn(*weight_batch, num_outputs, 2, 7)
    var = torch.rand(*weight_batch, num_outputs, 2, 7)
    moments = activation.combine_moments(h, loc, var, route=route)
    expected = loop_over_batches(h, loc, var, 1.0, activation.grid.inducing_points)
    assert_close(moments, expected, rtol=0, atol=1e-11)
    assert_close(activation.combine(h, loc, route=route), expected[0], rtol=0, atol=1e-11)


@pytest.mark.parametrize("batches", BATCHES.values(), ids=BATCHES.keys())
def test_batched_gradients_equal_dense(batches):
    activation = KernelActivation(DyadicGrid(3))
    leaves = [torch.rand(*batches[0], 3, 2), *torch.rand(2, *batches[1], 2, 2, 7)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    gradients = []
    for route in ROUTES:
        mean, var = activation.combine_moments(*leaves, route=route)
        loss = mean.sin().sum() + var.square().sum()
        gradients.append(torch.autograd.grad(loss, leaves))
    assert_close(*gradients, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("route", ROUTES)
def test_no_rows_give_no_rows(route):
    activation = KernelActivation(DyadicGrid(3))
    assert activation.combine(torch.rand(0, 2), torch.rand(4, 2, 7), route=route).shape == (0, 4)


@pytest.mark.parametrize("kernel", [LaplaceKernel(0.3), RBFKernel(0.3)])
def test_unit_values_are_the_terms_of_the_sum(kernel):
    activation = KernelActivation(DyadicGrid(3), kernel)
    h, z = 3 * torch.rand(5, 2) - 1, torch.randn(3, 2, 7)
    terms = activation.unit_values(h, z)  # (N, C, P)
    assert_close(terms, torch.einsum("npm,cpm->ncp", activation(h), z))
    assert_close(terms.sum(-1), activation.combine(h, z))


@pytest.mark.parametrize("kernel", [LaplaceKernel(0.3), RBFKernel(0.3)])
def test_unit_block_variances_are_quadratic_forms_of_the_features(kernel):
    activation = KernelActivation(DyadicGrid(3), kernel)
    h = torch.cat([3 * torch.rand(5, 2) - 1, nodes_and_bounds(activation.grid, 2)])
    tril = torch.randn(3, 2, 7, 7).tril()
    phi = activation(h)
    expected = torch.einsum("npm,cpmk,cplk,npl->ncp", phi, tril, tril, phi)
    assert_close(activation.unit_block_variances(h, tril), expected)


sizes = st.integers(1, 3)
batch_shapes = st.lists(sizes, max_size=2).map(tuple)


@properties
@given(level=st.integers(1, 5), n=sizes, p=sizes, c=sizes, batch=batch_shapes, seed=st.integers(0))
def test_any_shape_of_batch_gives_the_same_rows(level, n, p, c, batch, seed):
    torch.manual_seed(seed % 2**32)
    activation = KernelActivation(DyadicGrid(level))
    h = 3 * torch.rand(*batch, n, p, dtype=torch.float64) - 1
    z = torch.randn(c, p, activation.num_inducing, dtype=torch.float64)
    flat = activation.combine(h.reshape(-1, p), z, route="dense")
    for route in ("dense", "local", "auto"):
        f = activation.combine(h, z, route=route)
        assert f.shape == (*batch, n, c)
        assert_close(f.reshape(-1, c), flat, rtol=0, atol=1e-11)


@properties
@given(level=st.integers(1, 5), order=st.permutations(range(4)), seed=st.integers(0))
def test_permuting_units_leaves_f_unchanged(level, order, seed):
    torch.manual_seed(seed % 2**32)
    activation = KernelActivation(DyadicGrid(level))
    h = 3 * torch.rand(3, 4, dtype=torch.float64) - 1
    loc, var = torch.rand(2, 2, 4, activation.num_inducing, dtype=torch.float64)
    for route in ROUTES:
        moments = activation.combine_moments(h, loc, var, route=route)
        permuted = activation.combine_moments(
            h[:, order], loc[:, order], var[:, order], route=route
        )
        assert_close(permuted, moments, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "batches", [((), ()), ((4,), ()), ((), (4,)), ((4,), (4,)), ((4, 1), (3,))]
)
def test_local_and_dense_sums_agree_in_values_and_two_derivatives_for_any_batches(batches):
    activation = KernelActivation(DyadicGrid(3), LaplaceKernel(0.7))
    h = torch.rand(*batches[0], 3, 2, requires_grad=True)
    weights = torch.randn(*batches[1], 2, 2, 7, requires_grad=True)
    dense, local = (activation.combine(h, weights, route) for route in ("dense", "local"))
    assert_close(local, dense, rtol=0, atol=1e-12)

    def sums(h, weights):
        return activation.combine(h, weights, "local")

    assert torch.autograd.gradcheck(sums, (h, weights))
    assert torch.autograd.gradgradcheck(sums, (h, weights))
