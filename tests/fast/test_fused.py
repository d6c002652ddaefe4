"""The fused moments against their naive twins: values, gradients, a stack of members."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from pyro_dak import DyadicGrid, KernelActivation, LaplaceKernel
from pyro_dak.additive import bridge, gaussian
from pyro_dak.additive.factor import level_constants
from pyro_dak.additive.gaussian import mean_field_moments
from pyro_dak.fast import fused
from pyro_dak.fast.fused import LinearMap
from tests import reference, scenarios


def stack(level, lengthscale=1.0, E=3, P=2, N=40, F=2):
    activation = KernelActivation(DyadicGrid(level), LaplaceKernel(lengthscale))
    h = (0.5 + 0.6 * torch.randn(E, P, N)).requires_grad_()  # many outside the nodes
    loc = torch.randn(F, E, P, activation.num_inducing, requires_grad=True)
    var = torch.rand_like(loc, requires_grad=True)
    return activation, h, loc, var


@pytest.mark.parametrize(("level", "lengthscale"), [(1, 1.0), (2, 0.5), (5, 1.0), (9, 2.0)])
def test_stacked_moments_and_gradients_are_those_of_each_member(level, lengthscale):
    activation, h, loc, var = stack(level, lengthscale)
    mean, variance = activation.stacked_moments(h, loc, var)
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
        lambda h, loc, var: activation.stacked_moments(h, loc, var), (h, loc, var)
    )


@pytest.mark.parametrize(("level", "lengthscale"), [(1, 1.0), (3, 0.5), (8, 2.0)])
def test_terms_of_members_and_gradients_are_those_of_each(level, lengthscale):
    activation = KernelActivation(DyadicGrid(level), LaplaceKernel(lengthscale))
    E, F, P, N, M = 3, 2, 4, 30, activation.num_inducing
    shapes = [(E, P, N), (E, F, P, M), (E, F, P, M), (E, P), (E, F), (E, F)]
    tensors = [torch.randn(shape).mul_(0.5).requires_grad_() for shape in shapes]
    found = activation.member_terms(*tensors)
    parts = []
    for e in range(E):
        h, *others = (tensor[e] for tensor in tensors)
        constants = activation.local_constants(h)
        maps = constants.interval_map, constants.intervals
        parts.append(fused.MeanFieldTerms.apply(h.mT, *others, None, *maps))
    mean, var, kl = zip(*parts, strict=True)
    expected = [torch.stack([m.mT for m in part], 1) for part in (mean, var)]
    expected.append(torch.stack(kl))
    weights = [torch.randn_like(part) for part in found]
    gradients = [
        torch.autograd.grad(
            sum((w * t).sum() for w, t in zip(weights, terms, strict=True)), tensors
        )
        for terms in (found, expected)
    ]
    for one, other in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
        assert_close(one, other, rtol=1e-7, atol=1e-9)


def test_expected_log_density_with_uneven_noise_is_the_formula_with_its_slopes():
    y, f_mean, eta_mean = (torch.randn(2, 5, 3, requires_grad=True) for _ in range(3))
    f_var, eta_var = (torch.rand(2, 5, 3, requires_grad=True) for _ in range(2))
    tensors = (y, f_mean, f_var, eta_mean, eta_var[:1])  # some are shared
    zero = torch.zeros_like(f_mean)
    plain = gaussian.expected_log_heteroscedastic(*tensors, covariance=zero)
    found = fused.ExpectedLogHeteroscedastic.apply(*tensors)
    assert_close(found, plain)
    assert torch.autograd.gradcheck(fused.ExpectedLogHeteroscedastic.apply, tensors)
    assert torch.autograd.gradgradcheck(fused.ExpectedLogHeteroscedastic.apply, tensors)


def test_stacked_variance_in_single_precision_is_never_negative_on_a_fine_grid():
    activation, h, loc, _ = stack(level=10)
    var = torch.full_like(loc, 1e-8)
    _, variance = activation.stacked_moments(h.float(), loc.float(), var.float())
    assert (variance >= 0).all()


@pytest.mark.parametrize("num_functions", [1, 3])
@pytest.mark.parametrize("level", [1, 3, 8])
def test_mean_field_moments_are_the_loop_inside_and_outside_the_grid(level, num_functions):
    activation = KernelActivation(DyadicGrid(level, (-1.0, 1.0)), LaplaceKernel(0.5))
    h = torch.cat([1.5 * torch.randn(6, 2), torch.tensor([[-1.0, 1.0], [40.0, -40.0]])])
    loc = torch.randn(num_functions, 2, activation.num_inducing)
    scale, sigma = torch.rand_like(loc), torch.rand(2) + 0.5
    mu, mu_scale = torch.randn(num_functions), torch.rand(num_functions)
    found = mean_field_moments(activation, h, loc, scale, sigma, mu, mu_scale, route="local")
    phi = reference.phi(h, activation.grid.inducing_points, 0.5)
    expected = reference.moments_of_f(phi, loc, scale, sigma, mu, mu_scale)
    assert_close(found, expected, rtol=0, atol=1e-10)


def test_gradients_of_mean_field_moments_are_those_of_the_dense_route():
    activation = KernelActivation(DyadicGrid(3))
    loc, scale = torch.randn(2, 4, 7), torch.rand(2, 4, 7)
    leaves = [torch.rand(9, 4), loc, scale, torch.rand(4) + 0.5, torch.randn(2), torch.rand(2)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    gradients = []
    for route in ("dense", "local"):
        mean, var = mean_field_moments(activation, *leaves, route=route)
        gradients.append(torch.autograd.grad(mean.sin().sum() + var.square().sum(), leaves))
    assert_close(*gradients, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("value", [float("inf"), -float("inf")])
def test_moments_at_infinity_are_zero(value):
    activation = KernelActivation(DyadicGrid(3))
    loc = torch.randn(1, 2, 7)
    h = torch.full((1, 2), value)
    mean, var = activation.combine_moments(h, loc, loc.square(), unit_scale=torch.ones(2))
    assert_close((mean, var), (0 * mean, 0 * var))


@pytest.mark.parametrize("level", [1, 2, 5, 10])
def test_table_holds_means_variances_and_twice_the_covariance_of_every_interval(level):
    M = 2**level - 1
    loc, var = torch.randn(M), torch.rand(M)
    matrix = fused.interval_matrix(bridge.node_factor(level, 0.3)).to_dense()
    table = (matrix @ torch.cat([loc, var])).view(5, M + 1)
    nodes = bridge.node_moments(loc, var, level_constants(level, 0.3))
    mean, node_var, cov = (torch.nn.functional.pad(part, (1, 1)) for part in nodes)
    rows = [mean[:-1], mean[1:], node_var[:-1], node_var[1:], 2 * cov]
    assert_close(table, torch.stack(rows), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_columns", [3, 40])
def test_map_in_compressed_rows_is_the_dense_one(num_columns, dtype):
    matrix = fused.interval_matrix(bridge.node_factor(6, 0.3))
    z = torch.randn(num_columns, matrix.shape[1], dtype=dtype, requires_grad=True)
    grad = torch.randn(matrix.shape[0], num_columns, dtype=dtype)
    maps = [fused.LinearMap(matrix.to(dtype), is_dense) for is_dense in (True, False)]
    dense, compressed = (
        (found := own.columns(z), torch.autograd.grad(found, z, grad), own.transpose_rows(grad))
        for own in maps
    )
    assert_close(compressed, dense)


def mean_field(level, num_functions=2, num_units=3):
    """Means and logarithms of scales of z, those of sigma, and the same for mu."""
    M = 2**level - 1
    loc = torch.randn(num_functions, num_units, M)
    log_sigma, mu = 0.3 * torch.randn(num_units), torch.randn(num_functions)
    return loc, torch.randn_like(loc), log_sigma, mu, torch.randn_like(mu)


@pytest.mark.parametrize("num_functions", [1, 3])
@pytest.mark.parametrize("level", [5, 8])
def test_terms_are_the_loop_inside_and_outside_the_grid_and_the_divergence(level, num_functions):
    activation = KernelActivation(DyadicGrid(level, (-1.0, 1.0)), LaplaceKernel(0.5))
    h = torch.cat([1.5 * torch.randn(6, 3), torch.tensor([[-1.0, 1.0, 0.0], [40.0, -40.0, 1e3]])])
    loc, log_scale, log_sigma, mu, mu_log_scale = weights = mean_field(level, num_functions)
    mean, var, kl = activation.mean_field_terms(h, *weights)
    phi = reference.phi(h, activation.grid.inducing_points, 0.5)
    scale, mu_scale = log_scale.exp(), mu_log_scale.exp()
    expected = reference.moments_of_f(phi, loc, scale, log_sigma.exp(), mu, mu_scale)
    assert_close((mean, var), expected, rtol=0, atol=1e-10)
    q = [torch.distributions.Normal(*part) for part in ((loc, scale), (mu, mu_scale))]
    prior = torch.distributions.Normal(0.0, 1.0)
    assert_close(kl, sum(torch.distributions.kl_divergence(one, prior).sum() for one in q))


@pytest.mark.parametrize(("level", "num_functions"), [(3, 1), (4, 1), (5, 2)])
def test_gradient_of_terms_is_the_slope(level, num_functions):
    activation = KernelActivation(DyadicGrid(level), LaplaceKernel(0.7))
    leaves = [0.5 + 0.6 * torch.randn(5, 3), *mean_field(level, num_functions)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    assert torch.autograd.gradcheck(lambda *args: activation.mean_field_terms(*args), leaves)


def test_divergence_of_terms_at_the_prior_is_exactly_zero_in_single_precision():
    activation = KernelActivation(DyadicGrid(6))
    weights = [torch.zeros_like(part, dtype=torch.float32) for part in mean_field(6)]
    assert activation.mean_field_terms(torch.rand(4, 3).float(), *weights)[2] == 0


@pytest.mark.parametrize("delta", [1e-6, 0.01, 0.5, 1.0, 1.01, 30.0, 1e5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ratio_of_hyperbolic_sines_is_exact_on_fine_and_coarse_grids(delta, dtype):
    intervals = fused.intervals_of_grid(7, 0.0, 0.125, delta, dtype, torch.device("cpu"))
    a = torch.linspace(0, 1, 101, dtype=dtype)
    found = fused.sinh_ratio(a, intervals)
    a = a.double()
    exact = ((a - 1) * delta).exp() * (-2 * delta * a).expm1() / math.expm1(-2 * delta)
    eps = torch.finfo(dtype).eps
    assert_close(found.double(), exact, rtol=(4 + 2 * delta) * eps, atol=1e-37)


COMPILE = """
import torch
from pyro_dak import DyadicGrid, KernelActivation, LaplaceKernel

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
for level, lengthscale, F in ((3, 0.1, 1), (3, 1.0, 3), (8, 1.0, 1)):
    activation = KernelActivation(DyadicGrid(level), LaplaceKernel(lengthscale))
    activation.prepare(torch.zeros(()))
    loc, scale = torch.randn(F, 2, 2**level - 1), torch.rand(F, 2, 2**level - 1)
    leaves = [0.5 + 0.6 * torch.randn(30, 2), loc, scale, 1 + torch.rand(2), torch.ones(F)]
    leaves = [leaf.requires_grad_() for leaf in leaves]

    def total():
        h, loc, scale, sigma, mu = leaves
        mean, var = activation.combine_moments(h, loc, scale.square(), "local", sigma)
        mean, var = mean + mu, var + mu.square()
        return mean.sin().sum() + var.square().sum()

    assert torch._dynamo.explain(total)().graph_break_count == 0
    compiled = torch.compile(total, backend="aot_eager")
    torch.testing.assert_close(compiled(), total())
    torch.testing.assert_close(*(torch.autograd.grad(f(), leaves) for f in (compiled, total)))
"""


@scenarios.compiles_training
def test_compiled_moments_are_one_graph_with_the_same_values_and_gradients():
    # In a process of its own: the compiler cannot look through the shape checks of the tests.
    command = [sys.executable, "-W", "ignore", "-c", COMPILE]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("level", [1, 3, 8])
def test_two_nodes_and_their_weights_are_those_of_the_bridge(level):
    activation = KernelActivation(DyadicGrid(level, (-1.0, 1.0)), LaplaceKernel(0.5))
    h = torch.cat([1.5 * torch.randn(40, 2), torch.tensor([[-1.0, 1.0], [40.0, -40.0]])])
    sigma = torch.rand(1, 2) + 0.5
    j, weights = fused.two_nodes(h.mT.unsqueeze(0), sigma, activation.local_constants(h).intervals)
    x = (h + 1) / activation.grid.spacing
    interval = bridge.locate(x, activation.num_inducing, activation.delta)
    expected = torch.stack(bridge.bridge_weights(interval, activation.delta)) * sigma
    assert torch.equal(j[0].mT.long(), interval.j)
    assert_close(weights[:, 0].mT, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("per_output", [True, False])
def test_expected_log_normal_is_its_plain_twin_in_values_and_gradients(per_output, monkeypatch):
    noise = torch.rand(2 if per_output else ()) + 0.5
    leaves = [torch.randn(5, 2), torch.randn(5, 2), torch.rand(5, 2), noise]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    found = gaussian.expected_log_normal(*leaves)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    expected = gaussian.expected_log_normal(*leaves)
    assert_close(found, expected)
    gradients = [torch.autograd.grad(value.sin().sum(), leaves) for value in (found, expected)]
    assert_close(*gradients)


@pytest.mark.parametrize("is_dense", [True, False])
def test_transpose_of_a_map_is_its_adjoint(is_dense):
    matrix = torch.randn(5, 4) * (torch.rand(5, 4) < 0.5)
    linear_map = LinearMap(matrix.to_sparse_coo(), is_dense)
    z, grad = torch.randn(2, 3, 4), torch.randn(2, 5, 3)
    assert_close(linear_map.units_last(z), torch.einsum("rm,fpm->frp", matrix, z))
    left, right = (linear_map.units_last(z) * grad).sum(), (z * linear_map.transpose(grad)).sum()
    assert_close(left, right)


@pytest.mark.parametrize("route", ["dense", "local"])
def test_variances_of_weights_may_have_a_batch_that_the_means_lack(route):
    activation = KernelActivation(DyadicGrid(3), LaplaceKernel())
    h, loc, var = torch.rand(5, 2), torch.randn(3, 2, 7), torch.rand(4, 3, 2, 7)
    mean, variance = activation.combine_moments(h, loc, var, route=route)
    for s in range(4):
        expected = activation.combine_moments(h, loc, var[s], route="dense")
        assert_close((mean if mean.dim() == 2 else mean[s], variance[s]), expected)
