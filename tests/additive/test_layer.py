import pytest
import torch
from torch.testing import assert_close

from pyro_dak.additive.activation import KernelActivation
from pyro_dak.additive.grid import DyadicGrid
from pyro_dak.additive.kernels import LaplaceKernel, RBFKernel
from pyro_dak.additive.layer import AdditiveLayer, Weights
from tests import reference

BOUNDS = (-1.0, 3.0)
linear_terms = pytest.mark.parametrize("linear_term", [False, True])


def layer(linear_term=False, num_units=3, num_functions=2, level=3):
    activation = KernelActivation(DyadicGrid(level, BOUNDS), LaplaceKernel(1.5))
    made = AdditiveLayer(activation, num_units, num_functions, linear_term)
    with torch.no_grad():
        made.log_unit_scale += 0.3 * torch.randn(num_units)
    return made


def weights(made, *batch, positive=False):
    draw = torch.rand if positive else torch.randn
    return made.split(draw(*batch, made.num_functions, made.num_weights))


def inputs(made, num_rows=5):
    return 5 * torch.rand(num_rows, made.num_units) - 1.5  # inside and outside the bounds


@linear_terms
def test_f_equals_the_sum_over_units_and_nodes(linear_term):
    made = layer(linear_term)
    h, w = inputs(made), weights(made)
    phi = reference.phi(h, reference.dyadic_points(3, BOUNDS), 1.5)
    expected = torch.zeros(5, 2)
    for n in range(5):
        for c in range(2):
            expected[n, c] = w.mu[c]
            for p in range(3):
                unit = phi[n, p] @ w.z[c, p]
                if linear_term:
                    unit = unit + (h[n, p] - 1.0) / 2.0 * w.linear[c, p]
                expected[n, c] += made.unit_scale[p] * unit
    assert_close(made(h, w), expected)


@linear_terms
def test_f_equals_the_design_times_the_flat_weights(linear_term):
    made = layer(linear_term)
    flat = torch.randn(2, made.num_weights)
    h = inputs(made)
    assert_close(made(h, made.split(flat)), made.design(h) @ flat.mT)


@linear_terms
def test_moments_equal_those_of_the_design(linear_term):
    made = layer(linear_term)
    loc, scale = torch.randn(2, made.num_weights), torch.rand(2, made.num_weights)
    h = inputs(made)
    mean, var, root = made.moments(h, made.split(loc), made.split(scale))
    assert_close(mean, made.design(h) @ loc.mT)
    assert_close(var, made.design(h).square() @ scale.square().mT)
    assert root is None


@linear_terms
@pytest.mark.parametrize("level", [1, 3, 6])  # few nodes take the dense route, many the local one
def test_row_sums_equal_those_of_the_design(linear_term, level):
    made = layer(linear_term, level=level)
    h, a, b = inputs(made), torch.randn(5, 2), torch.rand(5, 2)
    phi = made.design(h).detach()
    expected = torch.zeros(2, 2, made.num_weights)
    for n in range(5):
        for c in range(2):
            expected[0, c] += a[n, c] * phi[n]
            expected[1, c] += b[n, c] * phi[n] ** 2
    assert_close(made.row_sums(h, a, b), tuple(expected))


@linear_terms
@pytest.mark.parametrize("kernel", [LaplaceKernel(1.5), RBFKernel(1.5)])
@pytest.mark.parametrize("num_levels", [0, 1, 2, 3])
def test_the_coarse_design_has_the_first_columns_of_each_unit(linear_term, kernel, num_levels):
    made = layer(linear_term)
    made.activation = KernelActivation(DyadicGrid(3, BOUNDS), kernel)
    h = inputs(made)
    mu, linear, z = made.design(h).split((1, 3 * linear_term, 21), -1)
    z = z.unflatten(-1, (3, 7))[..., : 2**num_levels - 1]
    assert_close(made.design(h, num_levels), torch.cat([mu, linear, z.flatten(-2)], -1))


@linear_terms
def test_a_batch_of_weights_equals_a_loop(linear_term):
    made = layer(linear_term)
    h, w = inputs(made), weights(made, 4)
    shrinkage = torch.rand(4, 3)
    looped = [
        made(h, Weights(w.z[s], w.mu[s], w.linear[s] if linear_term else None), shrinkage[s])
        for s in range(4)
    ]
    assert_close(made(h, w, shrinkage), torch.stack(looped))


@linear_terms
def test_shrinkage_multiplies_the_scale_of_units(linear_term):
    made = layer(linear_term)
    h, w, shrinkage = inputs(made), weights(made), torch.tensor([0.5, 2.0, 0.0])
    shrunk = made(h, w, shrinkage)
    with torch.no_grad():
        made.log_unit_scale += shrinkage.log()
    assert_close(shrunk, made(h, w))


@linear_terms
@pytest.mark.parametrize("order", [[2, 0, 1], [1, 0, 2]])
def test_permuting_units_leaves_f_unchanged(linear_term, order):
    made = layer(linear_term)
    h, w = inputs(made), weights(made)
    expected = made(h, w)
    with torch.no_grad():
        made.log_unit_scale.copy_(made.log_unit_scale[order])
    linear = w.linear[:, order] if linear_term else None
    assert_close(made(h[:, order], Weights(w.z[:, order], w.mu, linear)), expected)


def test_prior_variance_and_residual_variance_add_to_that_of_the_process():
    made = layer()
    h = inputs(made, 20)
    induced = made.design(h).square().sum(-1) - 1  # without the bias
    total = made.unit_scale.square().sum().expand(20)
    assert_close(induced + made.unit_residuals(h).sum(-1), total)


@pytest.mark.parametrize("num_units", [1, 16])
def test_units_start_with_unit_prior_variance_in_all(num_units):
    activation = KernelActivation(DyadicGrid(3), LaplaceKernel())
    made = AdditiveLayer(activation, num_units, 1)
    assert_close(made.unit_scale.square().sum(), torch.ones(()))


def test_linear_inputs_take_the_bounds_to_minus_one_and_one():
    ends = torch.tensor([[-1.0, 1.0, 3.0]])
    assert_close(layer(True).linear_inputs(ends), torch.tensor([[-1.0, 0.0, 1.0]]))


@linear_terms
def test_weights_are_counted_in_the_order_of_the_design(linear_term):
    made = layer(linear_term)
    assert made.num_weights == 1 + (3 if linear_term else 0) + 3 * 7
    w = made.split(torch.arange(2.0 * made.num_weights).unflatten(0, (2, -1)))
    assert w.mu[0] == 0
    assert w.z.shape == (2, 3, 7)
    assert w.z[0, 0, 0] == (4 if linear_term else 1)
    assert (w.linear is None) != linear_term
