"""Mean and variance of f for weights that do not change any more."""

import math

import pytest
import torch
from torch.testing import assert_close

from pyro_dak import DyadicGrid, KernelActivation, LaplaceKernel
from pyro_dak.additive import bridge
from pyro_dak.additive.factor import level_constants
from pyro_dak.fast import serving
from pyro_dak.fast.serving import FixedMoments
from tests import reference


def fixed_moments(activation, loc, var):
    intervals = activation.local_constants(loc).intervals
    return FixedMoments(activation.node_table(loc, var), intervals)


@pytest.mark.filterwarnings("ignore:The grid is coarse")
@pytest.mark.parametrize("num_functions", [1, 3])
@pytest.mark.parametrize(
    ("level", "lengthscale"), [(1, 0.5), (1, 1.0), (3, 0.125), (3, 1.0), (9, 2.0)]
)
def test_fixed_moments_are_the_loop_inside_and_outside_the_grid(
    level, lengthscale, num_functions, monkeypatch
):
    activation = KernelActivation(DyadicGrid(level, (-1.0, 1.0)), LaplaceKernel(lengthscale))
    nodes = activation.grid.inducing_points[:2].expand(2, 2)[: min(2, activation.num_inducing)]
    bounds = torch.tensor([[-1.0, 1.0], [40.0, -40.0], [math.inf, -math.inf]])
    h = torch.cat([torch.randn(30, 2), nodes.reshape(-1, 2), bounds])
    loc = torch.randn(num_functions, 2, activation.num_inducing)
    var = torch.rand_like(loc)
    moments = fixed_moments(activation, loc, var)
    phi = reference.phi(h, activation.grid.inducing_points, lengthscale)
    sigma, zero = torch.ones(2), torch.zeros(num_functions)
    expected = reference.moments_of_f(phi, loc, var.sqrt(), sigma, zero, zero)
    assert_close(moments(h), expected, rtol=0, atol=1e-10)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert_close(moments(h), expected, rtol=0, atol=1e-10)


def test_fixed_moments_in_single_precision_are_those_in_double_on_a_fine_grid():
    activation = KernelActivation(DyadicGrid(10))
    h, loc, var = torch.rand(200, 3).float(), torch.randn(1, 3, 1023), torch.rand(1, 3, 1023)
    mean, variance = fixed_moments(activation, loc.float(), var.float())(h)
    expected = fixed_moments(activation, loc, var)(h.double())
    assert (variance > 0).all()
    assert_close((mean.double(), variance.double()), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("level", "lengthscale"), [(2, 0.25), (3, 1.0), (6, 1.0)])
def test_fixed_variance_next_to_a_node_that_is_known_is_exact_in_single_precision(
    level, lengthscale, monkeypatch
):
    """The finest level is unknown, the others nearly known: towards them the variance vanishes."""
    activation = KernelActivation(DyadicGrid(level), LaplaceKernel(lengthscale))
    M = activation.num_inducing
    var = torch.full((1, 1, M), 1e-8)
    var[..., M // 2 :] = 1
    nodes = activation.grid.inducing_points
    steps = torch.logspace(-8, -1, 40) * activation.grid.spacing
    h = (nodes.unsqueeze(-1) - steps).reshape(-1, 1).float()
    moments = fixed_moments(activation, 0 * var.float(), var.float())
    _, expected = activation.combine_moments(h, 0 * var.float(), var.float(), route="local")
    for is_compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda value=is_compiling: value)
        found = moments(h)[1]
        assert (found > 0).all()
        assert_close(found, expected, rtol=3e-6, atol=0)


def test_nan_shows_in_its_own_row_of_fixed_moments(monkeypatch):
    activation = KernelActivation(DyadicGrid(3))
    loc = torch.randn(2, 3, 7)
    h = torch.rand(4, 3)
    h[1, 2] = math.nan
    moments = fixed_moments(activation, loc, loc.square())
    for is_compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda value=is_compiling: value)
        for part in moments(h):
            assert torch.equal(part.isnan().any(-1), torch.tensor([False, True, False, False]))


@pytest.mark.filterwarnings("ignore:The grid is coarse")
@pytest.mark.parametrize("num_functions", [1, 3])
@pytest.mark.parametrize(("level", "lengthscale"), [(1, 0.5), (3, 0.125), (3, 1.0), (7, 2.0)])
@pytest.mark.parametrize("furthest", [0.9, 1.9, 40.0])
def test_fixed_moments_of_many_rows_are_those_of_the_dense_route(
    level, lengthscale, num_functions, furthest
):
    """All inputs within the grid, within the nodes added to it, and one beyond even these."""
    activation = KernelActivation(DyadicGrid(level, (-1.0, 1.0)), LaplaceKernel(lengthscale))
    h = torch.rand(3000, 2) * 1.8 - 0.9
    h[17, 0], h[18, 1] = furthest, -furthest
    loc = torch.randn(num_functions, 2, activation.num_inducing)
    moments = fixed_moments(activation, loc, loc.square())
    expected = activation.combine_moments(h, loc, loc.square(), route="dense")
    assert_close(moments(h), expected, rtol=0, atol=1e-10)


def test_many_rows_have_the_moments_of_few():
    activation = KernelActivation(DyadicGrid(4), LaplaceKernel(0.7))
    loc = torch.randn(2, 3, 15)
    moments = fixed_moments(activation, loc, loc.square())
    h = 0.5 + 0.3 * torch.randn(2048, 3)
    for many, few in zip(moments(h), zip(*map(moments, h.split(100)), strict=True), strict=True):
        assert_close(many, torch.cat(few))


@pytest.mark.filterwarnings("ignore:The grid is coarse")
@pytest.mark.parametrize("num_functions", [1, 3])
@pytest.mark.parametrize("level", [1, 3, 6])
def test_sums_over_gathered_rows_are_those_of_blocks(level, num_functions, monkeypatch):
    activation = KernelActivation(DyadicGrid(level, (-1.0, 1.0)), LaplaceKernel(0.7))
    loc = torch.randn(num_functions, 2, activation.num_inducing)
    moments = fixed_moments(activation, loc, loc.square())
    nodes = activation.grid.inducing_points.unsqueeze(-1).expand(-1, 2)
    h = torch.cat([2 * torch.rand(30, 2) - 1, torch.tensor([[-1.0, 0.999]]), nodes])
    found = moments(h.mT.contiguous().mT)
    assert moments.rows is not None
    monkeypatch.setattr(serving, "_MAX_FEW", 0)
    for own, other in zip(found, moments(h), strict=True):
        assert_close(own, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("furthest", [0.9, 1.9, 40.0])
@pytest.mark.parametrize("num_rows", [1, 100, 3000])
def test_means_alone_are_those_with_variances(num_rows, furthest, monkeypatch):
    monkeypatch.setattr(serving, "_MAX_NUMBERS", 2500)
    activation = KernelActivation(DyadicGrid(3, (-1.0, 1.0)))
    loc = torch.randn(3, 2, 7)
    moments = fixed_moments(activation, loc, loc.square())
    h = torch.rand(num_rows, 2)
    h[-1, 1] = furthest
    assert_close(moments.means(h, 2), moments(h)[0][:, :2])


@pytest.mark.parametrize("furthest", [0.9, 40.0])
def test_blocks_of_rows_have_the_moments_of_all(furthest, monkeypatch):
    activation = KernelActivation(DyadicGrid(3, (-1.0, 1.0)))
    loc = torch.randn(2, 3, 7)
    moments = fixed_moments(activation, loc, loc.square())
    h = torch.rand(2500, 3)
    h[2100, 1] = furthest
    expected = moments(h)
    monkeypatch.setattr(serving, "_MAX_NUMBERS", 6000)
    assert_close(moments(h), expected)


def test_nan_among_many_rows_shows_in_its_own():
    activation = KernelActivation(DyadicGrid(3))
    loc = torch.randn(1, 3, 7)
    h = torch.rand(3000, 3)
    h[1234, 2] = math.nan
    for part in fixed_moments(activation, loc, loc.square())(h):
        assert part.isnan().any(-1).nonzero().flatten().tolist() == [1234]


def test_fixed_moments_of_no_rows_are_empty():
    activation = KernelActivation(DyadicGrid(3))
    loc = torch.randn(2, 3, 7)
    for part in fixed_moments(activation, loc, loc.square())(torch.empty(0, 3)):
        assert part.shape == (0, 2)


@pytest.mark.filterwarnings("ignore:The grid is coarse")
@pytest.mark.parametrize(("level", "delta"), [(1, 0.5), (3, 0.1), (5, 2.0), (8, 0.004)])
def test_node_table_is_that_of_the_recursion_continued_on_either_side(level, delta):
    M = 2**level - 1
    loc, var = torch.randn(M), torch.rand(M)
    mean, node_var, cov = bridge.node_moments(loc, var, level_constants(level, delta))
    grid = DyadicGrid(level)
    activation = KernelActivation(grid, LaplaceKernel(grid.spacing / delta))
    table = activation.node_table(loc.view(1, 1, M), var.view(1, 1, M)).view(3, M + 2)
    rho = math.exp(-delta)
    assert_close(table[0, 1:-1], mean)
    assert_close(table[1, 1:-1], node_var)
    assert_close(table[2, 1:-2], 2 * cov)
    ends = [0, -1]
    assert_close(table[0, ends], rho * mean[ends])
    assert_close(table[1, ends], rho**2 * node_var[ends])
    assert_close(table[2, [0, M]], 2 * rho * node_var[ends])
    assert_close(table[2, -1], 2 * rho**3 * node_var[-1])


def test_fixed_moments_on_the_meta_device_have_shapes():
    activation = KernelActivation(DyadicGrid(3))
    loc = torch.empty(2, 3, 7, device="meta")
    moments = fixed_moments(activation, loc, loc)
    for part in moments(torch.empty(3000, 3, device="meta")):
        assert part.shape == (3000, 2)
        assert part.is_meta


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-0.3, 0.7), (100.0, 103.0), (1950.0, 2020.0)])
@pytest.mark.parametrize("num_rows", [50, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fixed_moments_are_as_exact_as_those_of_training(bounds, num_rows, dtype):
    """With the usual default dtype, and with bounds at which numbers are coarse or not dyadic."""
    torch.set_default_dtype(torch.float32)
    low, high = bounds
    activation = KernelActivation(DyadicGrid(5, bounds), LaplaceKernel(high - low))
    h = (low + (high - low) * (1.4 * torch.rand(num_rows, 3, dtype=torch.float64) - 0.2)).to(dtype)
    loc = torch.randn(2, 3, 31, dtype=dtype)
    exact = activation.combine_moments(h.double(), loc.double(), loc.double().square(), "dense")
    trained = activation.combine_moments(h, loc, loc.square(), "local")
    fixed = fixed_moments(activation, loc, loc.square())(h)
    eps = torch.finfo(dtype).eps
    for part, other, truth in zip(fixed, trained, exact, strict=True):
        error = (part - truth).abs().max()
        assert error < 2 * (other - truth).abs().max() + 20 * eps * truth.abs().max()
