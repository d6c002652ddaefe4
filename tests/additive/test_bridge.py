import math

import pytest
import torch
from torch.testing import assert_close

from pyro_dak import DyadicGrid, KernelActivation
from pyro_dak.additive import bridge
from pyro_dak.additive.factor import level_constants
from pyro_dak.fast.fused import LinearMap
from tests import reference

DELTAS = [0.02, 0.3, 1.0, 5.0, 50.0]
LEVELS = [1, 2, 3, 6]


def dense_factor(level, delta):
    """L_U with sorted rows and level-ordered columns, in grid coordinates."""
    U = reference.dyadic_points(level, (0.0, 2.0**level))
    L_U = torch.linalg.cholesky(reference.laplace(U, U, 1 / delta))
    return L_U[U.argsort()]


def weights_of(x, level, delta):
    interval = bridge.locate(x, 2**level - 1, delta)
    return interval, *bridge.bridge_weights(interval, delta)


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("level", LEVELS)
def test_node_values_are_the_dense_factor_times_z(level, delta):
    z = torch.randn(2, 3, 2**level - 1)
    constants = level_constants(level, delta)
    expected = z @ dense_factor(level, delta).mT
    assert_close(bridge.node_values(z, constants), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("level", LEVELS)
def test_node_moments_are_the_tridiagonal_of_the_dense_covariance(level, delta):
    z_loc, z_var = torch.randn(3, 2**level - 1), torch.rand(3, 2**level - 1)
    constants = level_constants(level, delta)
    mean, var, cov = bridge.node_moments(z_loc, z_var, constants)
    L_U = dense_factor(level, delta)
    covariance = L_U @ torch.diag_embed(z_var) @ L_U.mT
    assert_close(mean, z_loc @ L_U.mT, rtol=0, atol=1e-12)
    assert_close(var, covariance.diagonal(dim1=-2, dim2=-1), rtol=0, atol=1e-12)
    assert_close(cov, covariance.diagonal(1, dim1=-2, dim2=-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("level", LEVELS)
def test_node_factor_is_the_dense_factor(level, delta):
    found = bridge.node_factor(level, delta).to_dense()
    assert_close(found, dense_factor(level, delta), rtol=0, atol=1e-12)


@pytest.mark.parametrize("delta", [1e-3, 1.0, 20.0])
def test_node_factor_equals_the_recursion_on_a_fine_grid(delta):
    level = 10
    z = torch.randn(2**level - 1)
    recursion = bridge.node_values(z, level_constants(level, delta))
    assert_close(bridge.node_factor(level, delta) @ z, recursion, rtol=0, atol=1e-12)


@pytest.mark.parametrize("level", LEVELS)
def test_rows_of_the_node_factor_hold_at_most_one_non_zero_per_level(level):
    rows, _ = bridge.node_factor(level, 1.0).indices()
    assert torch.bincount(rows).max() <= level


@pytest.mark.parametrize(
    ("x", "j"), [(-7.0, 0), (0.5, 0), (1.0, 1), (1.5, 1), (2.0, 2), (6.9, 6), (7.0, 7), (99.0, 7)]
)
def test_locate_finds_the_interval_and_the_distances_to_its_nodes(x, j):
    interval = bridge.locate(torch.tensor(x), 7, 0.3)
    assert interval.j == j
    assert interval.a == (x - j if j > 0 else bridge.FAR)
    assert_close(float(interval.b), j + 1 - x if j < 7 else bridge.FAR)


@pytest.mark.parametrize("x", [math.nan, math.inf, -math.inf])
def test_locate_never_returns_an_index_out_of_range(x):
    assert 0 <= int(bridge.locate(torch.tensor([x]), 7, 0.3).j) <= 7


def test_nan_shows_in_the_weights():
    _, w0, w1 = weights_of(torch.tensor([math.nan]), 3, 0.3)
    assert w0.isnan() or w1.isnan()


@pytest.mark.parametrize("delta", DELTAS)
def test_weights_are_the_ratios_of_sinh_inside(delta):
    x = 1 + 6 * torch.rand(50)
    interval, w0, w1 = weights_of(x, 3, delta)
    a = x - interval.j
    assert_close(w0, ((1 - a) * delta).sinh() / math.sinh(delta), rtol=1e-11, atol=1e-14)
    assert_close(w1, (a * delta).sinh() / math.sinh(delta), rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("delta", DELTAS)
def test_weights_outside_are_exponentials_on_the_last_node(delta):
    _, w0, w1 = weights_of(torch.tensor([-2.5, 9.0]), 3, delta)
    assert_close(w0, torch.tensor([0.0, math.exp(-2 * delta)]))
    assert_close(w1, torch.tensor([math.exp(-3.5 * delta), 0.0]))


@pytest.mark.parametrize("delta", [1e-9, 1e-4, 1.0, 1e3, 1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_and_residual_variance_stay_between_zero_and_one(delta, dtype):
    x = torch.cat([torch.linspace(-70, 80, 997), torch.arange(9.0)]).to(dtype)
    interval, w0, w1 = weights_of(x, 3, delta)
    eps = torch.finfo(dtype).eps
    for value in (w0, w1, bridge.bridge_variance(interval, delta)):
        assert (value >= 0).all()
        assert (value <= 1 + 4 * eps).all()


@pytest.mark.parametrize("delta", [0.02, 0.3, 1.0, 5.0])
def test_bridge_variance_is_what_the_two_weights_leave(delta):
    interval, w0, w1 = weights_of(torch.linspace(-3, 11, 101), 3, delta)
    expected = 1 - w0.square() - w1.square() - 2 * w0 * w1 * math.exp(-delta)
    assert_close(bridge.bridge_variance(interval, delta), expected, rtol=0, atol=1e-12)


def test_bridge_variance_keeps_its_digits_where_the_difference_cancels():
    delta, a = 1e-10, 0.25
    interval = bridge.locate(torch.tensor([3 + a]), 7, delta)
    expected = torch.tensor([2 * delta * a * (1 - a)])  # first order in delta
    assert_close(bridge.bridge_variance(interval, delta), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("level", LEVELS)
def test_level_features_are_the_non_zeros_of_dense_phi(level, delta):
    width = 2.0**level
    x = torch.cat([width * (3 * torch.rand(40) - 1), torch.arange(1.0, width)])
    U = reference.dyadic_points(level, (0.0, width))
    constants = bridge.feature_constants(level, delta)
    index, value = bridge.level_features(x, constants, delta)
    phi = torch.zeros(len(x), len(U)).scatter(-1, index, value)
    assert_close(phi, reference.phi(x, U, 1 / delta), rtol=0, atol=1e-11)


@pytest.mark.parametrize("x", [math.nan, math.inf, -math.inf])
def test_level_features_never_index_out_of_range(x):
    constants = bridge.feature_constants(3, 0.3)
    index, value = bridge.level_features(torch.tensor([x]), constants, 0.3)
    assert ((index >= 0) & (index < 7)).all()
    assert value.isnan().any() == math.isnan(x)


@pytest.mark.parametrize("is_dense", [True, False])
def test_linear_map_is_a_product_with_its_gradient(is_dense):
    matrix = torch.randn(5, 4) * (torch.rand(5, 4) < 0.5)
    linear_map = LinearMap(matrix.to_sparse_coo(), is_dense)
    z = torch.randn(2, 3, 4, requires_grad=True)
    assert_close(linear_map(z), z @ matrix.mT)
    assert torch.autograd.gradcheck(linear_map, (z,))


def test_half_precision_has_a_distance_to_nodes_that_do_not_exist():
    h = torch.linspace(-0.5, 1.5, 9).unsqueeze(-1)
    activation = KernelActivation(DyadicGrid(2))
    assert_close(activation(h.half()), activation(h).half(), atol=5e-3, rtol=0)
