import pytest
import torch
from torch.testing import assert_close

from pyro_dak.additive.activation import KernelActivation
from pyro_dak.additive.factor import dense_inverse_factor, level_coefficients, sparse_inverse_factor
from pyro_dak.additive.grid import DyadicGrid
from pyro_dak.additive.kernels import LaplaceKernel, MaternKernel, RBFKernel
from tests import reference

BOUNDS = (-1.0, 2.0)
LENGTHSCALES_IN_SPACINGS = [0.02, 0.3, 1.0, 7.0, 50.0]


def setting(level, lengthscale_in_spacings):
    grid = DyadicGrid(level, BOUNDS)
    return grid, LaplaceKernel(lengthscale_in_spacings * grid.spacing)


def relative_gap(value, expected):
    return (value - expected).abs().max() / expected.abs().max()


@pytest.mark.parametrize("lengthscale_in_spacings", LENGTHSCALES_IN_SPACINGS)
@pytest.mark.parametrize("level", range(1, 11))
def test_sparse_factor_equals_dense_cholesky(level, lengthscale_in_spacings):
    grid, kernel = setting(level, lengthscale_in_spacings)
    sparse = sparse_inverse_factor(grid, kernel).to_dense()
    assert relative_gap(sparse, dense_inverse_factor(grid, kernel, jitter=0.0)) < 1e-10


@pytest.mark.parametrize("level", range(1, 11))
def test_sparse_factor_equals_dense_cholesky_with_unit_lengthscale(level):
    grid, kernel = DyadicGrid(level), LaplaceKernel(1.0)
    sparse = sparse_inverse_factor(grid, kernel).to_dense()
    assert relative_gap(sparse, dense_inverse_factor(grid, kernel, jitter=0.0)) < 1e-10


@pytest.mark.parametrize("lengthscale_in_spacings", LENGTHSCALES_IN_SPACINGS)
@pytest.mark.parametrize("level", [1, 2, 3, 5])
def test_sparse_factor_equals_algorithm_1_with_its_3x3_systems(level, lengthscale_in_spacings):
    grid, kernel = setting(level, lengthscale_in_spacings)
    literal = reference.algorithm_1(level, BOUNDS[1] - BOUNDS[0], kernel.lengthscale)
    assert relative_gap(sparse_inverse_factor(grid, kernel).to_dense(), literal) < 1e-12


@pytest.mark.parametrize("level", range(1, 11))
def test_sparse_factor_has_at_most_three_non_zeros_a_column(level):
    factor = sparse_inverse_factor(*setting(level, 2.0))
    assert factor.is_sparse
    assert torch.bincount(factor.indices()[1]).max() == min(3, level)


@pytest.mark.parametrize("level", [1, 4, 10])
def test_sparse_factor_whitens_the_kernel_matrix(level):
    grid, kernel = setting(level, 3.0)
    R = sparse_inverse_factor(grid, kernel).to_dense()
    U = grid.inducing_points
    assert_close(R.mT @ kernel(U, U) @ R, torch.eye(len(U)), rtol=0, atol=1e-11)
    assert torch.equal(R, R.triu())


@pytest.mark.parametrize("lengthscale", [1e-6, 1.0, 1e6])
def test_sparse_factor_stays_finite_at_level_14(lengthscale):
    factor = sparse_inverse_factor(DyadicGrid(14), LaplaceKernel(lengthscale))
    assert factor.values().isfinite().all()


@pytest.mark.parametrize("delta", [1e-8, 0.1, 1.0, 30.0, 1e4])
def test_level_coefficients_are_those_of_the_bridge(delta):
    c, scale, c_edge, scale_edge = level_coefficients(2, delta)
    d = torch.tensor(delta)
    assert_close(c, 0.5 / d.cosh())
    assert_close(scale, d.tanh().sqrt())
    assert_close(c_edge, (-d).exp())
    assert_close(scale_edge, (-torch.expm1(-2 * d)).sqrt())


def test_first_level_has_no_neighbours():
    assert level_coefficients(1, 0.3) == (0.0, 1.0, 0.0, 1.0)


@pytest.mark.parametrize("kernel", [MaternKernel(0.3, nu=1.5), MaternKernel(0.3), RBFKernel(0.3)])
def test_dense_factor_inverts_the_jittered_matrix(kernel):
    grid = DyadicGrid(4)
    R = dense_inverse_factor(grid, kernel, jitter=1e-6)
    K_UU = kernel(grid.inducing_points, grid.inducing_points)
    eye = torch.eye(grid.num_inducing)
    assert_close(R.mT @ (K_UU + 1e-6 * eye) @ R, eye, rtol=0, atol=1e-9)


def test_too_small_a_jitter_is_named():
    message = r"`jitter`=0.0 is too small: the RBFKernel matrix of 255 points .* Raise `jitter`"
    with pytest.raises(ValueError, match=message):
        dense_inverse_factor(DyadicGrid(8), RBFKernel(1.0), jitter=0.0)


@pytest.mark.parametrize("kernel", [MaternKernel(1.0), RBFKernel(1.0)])
def test_sparse_factor_of_a_kernel_that_is_not_markov_is_refused(kernel):
    message = f"`kernel` must be Markov .* got {type(kernel).__name__}. Use LaplaceKernel"
    with pytest.raises(ValueError, match=message):
        sparse_inverse_factor(DyadicGrid(3), kernel)


def test_the_sparse_factor_gives_the_features():
    grid, kernel = DyadicGrid(4), LaplaceKernel(0.3)
    h = torch.rand(6, 2)
    expected = kernel(h, grid.inducing_points) @ sparse_inverse_factor(grid, kernel).to_dense()
    assert_close(KernelActivation(grid, kernel)(h), expected, rtol=0, atol=1e-12)
