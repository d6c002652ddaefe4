import copy
import math
import pickle

import pytest
import torch
from hypothesis import settings
from torch.testing import assert_close

from pyro_dak.additive.activation import KernelActivation, dense_is_faster
from pyro_dak.additive.grid import DyadicGrid
from pyro_dak.additive.kernels import LaplaceKernel, MaternKernel, RBFKernel
from tests import reference

ROUTES = ["dense", "local"]
DTYPES = {torch.float64: 1e-10, torch.float32: 1e-5}
SMOOTH = [MaternKernel(0.3, nu=1.5), MaternKernel(0.3), RBFKernel(0.3)]
SEEDS = range(12)
any_lengthscale = pytest.mark.filterwarnings("ignore:The grid is coarse")
properties = settings(derandomize=True, max_examples=25, deadline=None)


def random_activation(seed, bounds=None, max_level=9):
    """Level, bounds and a lengthscale between 0.02 and 50 spacings at random."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(4, generator=generator).tolist()
    low = 4 * uniform[1] - 2
    bounds = bounds or (low, low + 0.1 + 3 * uniform[2])
    grid = DyadicGrid(1 + seed % max_level, bounds)
    lengthscale = grid.spacing * math.exp(math.log(0.02) + uniform[3] * math.log(50 / 0.02))
    return KernelActivation(grid, LaplaceKernel(lengthscale))


def inputs_inside_and_outside(grid, num_units):
    """Up to ten grid widths outside, and as many rows between the bounds, `(40, P)`."""
    low, high = grid.bounds
    inside = low + (high - low) * torch.rand(20, num_units)
    outside = low + (high - low) * (21 * torch.rand(20, num_units) - 10)
    return torch.cat([inside, outside])


def nodes_and_bounds(grid, num_units):
    points = torch.cat([grid.inducing_points, torch.tensor(grid.bounds)])
    return points.unsqueeze(-1).expand(-1, num_units)


def moments_and_gradients(activation, leaves, route, probe):
    """Moments of f, then gradients of a random functional of them by h, loc, scale and sigma."""
    h, loc, scale, sigma = (leaf.detach().requires_grad_() for leaf in leaves)
    unit = sigma.unsqueeze(-1)
    mean, var = activation.combine_moments(h, unit * loc, (unit * scale).square(), route=route)
    loss = (probe[0] * mean).sum() + (probe[1] * var).sum()
    return [mean, var, *torch.autograd.grad(loss, (h, loc, scale, sigma))]


def assert_relatively_close(values, expected, tolerance):
    for value, truth in zip(values, expected, strict=True):
        gap = (value.double() - truth.double()).abs().max()
        assert gap <= tolerance * truth.abs().max().clamp(min=1e-30)


def random_leaves(activation, h, num_outputs, dtype):
    shape = (num_outputs, h.shape[-1], activation.num_inducing)
    leaves = [h, torch.randn(shape), torch.rand(shape) + 0.1, torch.rand(h.shape[-1]) + 0.5]
    return [leaf.to(dtype) for leaf in leaves]


# Identities of phi


@any_lengthscale
@pytest.mark.parametrize("seed", SEEDS)
def test_features_at_the_nodes_factorise_the_kernel_matrix(seed):
    activation = random_activation(seed)
    U = activation.grid.inducing_points
    phi = activation(U.unsqueeze(-1)).squeeze(-2)
    assert_close(phi @ phi.mT, activation.kernel(U, U), rtol=0, atol=1e-10)


@any_lengthscale
@pytest.mark.parametrize("seed", SEEDS)
def test_features_have_the_nystrom_covariance(seed):
    activation = random_activation(seed)
    U, kernel = activation.grid.inducing_points, activation.kernel
    h = inputs_inside_and_outside(activation.grid, 1)
    phi = activation(h).squeeze(-2)
    k_hU = kernel(h.squeeze(-1), U)
    expected = k_hU @ torch.linalg.solve(kernel(U, U), k_hU.mT)
    assert_close(phi @ phi.mT, expected, rtol=0, atol=1e-11)


@any_lengthscale
@pytest.mark.parametrize("seed", SEEDS)
def test_features_equal_dense_cholesky_reference(seed):
    activation = random_activation(seed)
    grid = activation.grid
    h = torch.cat([inputs_inside_and_outside(grid, 3), nodes_and_bounds(grid, 3)])
    expected = reference.phi(h, grid.inducing_points, activation.kernel.lengthscale)
    assert_close(activation(h), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("level", [1, 2, 3, 6, 9])
def test_features_have_exactly_level_non_zeros_off_the_nodes(level):
    activation = KernelActivation(DyadicGrid(level))
    h = torch.rand(200, 1)
    assert ((activation(h) != 0).sum(-1) == level).all()
    at_nodes = activation(nodes_and_bounds(activation.grid, 1))
    assert ((at_nodes != 0).sum(-1) <= level).all()


@pytest.mark.parametrize("kernel", SMOOTH)
def test_features_of_smooth_kernels_have_the_nystrom_covariance(kernel):
    activation = KernelActivation(DyadicGrid(4), kernel, jitter=1e-6)
    U, h = activation.grid.inducing_points, inputs_inside_and_outside(activation.grid, 1)
    phi = activation(h).squeeze(-2)
    k_hU = kernel(h.squeeze(-1), U)
    K_UU = kernel(U, U) + 1e-6 * torch.eye(len(U))
    expected = k_hU @ torch.linalg.solve(K_UU, k_hU.mT)
    assert_close(phi @ phi.mT, expected, rtol=0, atol=1e-8)


# Local route = dense route


@any_lengthscale
@pytest.mark.parametrize("num_outputs", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_local_moments_and_gradients_equal_dense(seed, dtype, num_outputs):
    activation = random_activation(seed)
    h = inputs_inside_and_outside(activation.grid, 2)
    leaves = random_leaves(activation, h, num_outputs, dtype)
    probe = torch.randn(2, len(h), num_outputs).to(dtype)
    local, dense = (moments_and_gradients(activation, leaves, route, probe) for route in ROUTES)
    assert_relatively_close(local, dense, DTYPES[dtype])


@any_lengthscale
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_local_moments_and_gradients_equal_dense_at_the_nodes(seed, dtype):
    activation = random_activation(seed, bounds=(-1.0, 1.0))
    h = nodes_and_bounds(activation.grid, 2)
    leaves = random_leaves(activation, h, 2, dtype)
    probe = torch.randn(2, len(h), 2).to(dtype)
    local, dense = (moments_and_gradients(activation, leaves, route, probe) for route in ROUTES)
    assert_relatively_close(local, dense, DTYPES[dtype])


@any_lengthscale
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_both_routes_equal_the_dense_cholesky_reference(seed, dtype, route):
    activation = random_activation(seed, bounds=(0.0, 1.0))
    h = inputs_inside_and_outside(activation.grid, 2).to(dtype)
    leaves = random_leaves(activation, h, 2, dtype)
    probe = torch.randn(2, len(h), 2).to(dtype)
    values = moments_and_gradients(activation, leaves, route, probe)

    h, loc, scale, sigma = (leaf.double().requires_grad_() for leaf in leaves)
    phi = reference.phi(h, activation.grid.inducing_points, activation.kernel.lengthscale)
    mean = torch.einsum("npm,cpm,p->nc", phi, loc, sigma)
    var = torch.einsum("npm,cpm,p->nc", phi**2, scale**2, sigma**2)
    loss = (probe[0] * mean).sum() + (probe[1] * var).sum()
    expected = [mean, var, *torch.autograd.grad(loss, (h, loc, scale, sigma))]
    assert_relatively_close(values, expected, DTYPES[dtype])


@any_lengthscale
@pytest.mark.parametrize("seed", SEEDS)
def test_local_combine_equals_dense(seed):
    activation = random_activation(seed)
    h = inputs_inside_and_outside(activation.grid, 3)
    z = torch.randn(2, 3, activation.num_inducing)
    dense, local = (activation.combine(h, z, route=route) for route in ("dense", "local"))
    assert_close(local, dense, rtol=0, atol=1e-10 * float(dense.abs().max()))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("num_outputs", [1, 2])
@pytest.mark.parametrize("level", [1, 3, 8])
def test_gradients_equal_finite_differences(level, num_outputs, route):
    activation = KernelActivation(DyadicGrid(level, (-1.0, 1.0)), LaplaceKernel(0.5))
    h = torch.tensor([[-1.7, 0.33], [0.11, -0.61], [0.83, 2.3]], requires_grad=True)
    shape = (num_outputs, 2, activation.num_inducing)
    loc, var = torch.randn(shape, requires_grad=True), torch.rand(shape, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *leaves: activation.combine_moments(*leaves, route=route),
        (h, loc, var),
        fast_mode=level > 3,
    )


def test_gradient_of_the_residual_variance_equals_finite_differences():
    activation = KernelActivation(DyadicGrid(3, (-1.0, 1.0)), LaplaceKernel(0.5))
    h = torch.tensor([[-1.7, 0.33], [0.11, -0.61]], requires_grad=True)
    assert torch.autograd.gradcheck(activation.residual_variance, (h,))


@pytest.mark.parametrize("route", ROUTES)
def test_gradient_at_a_node_is_the_one_from_the_right(route):
    activation = KernelActivation(DyadicGrid(3))
    z = torch.randn(1, 1, 7)
    nodes = activation.grid.sorted_points.unsqueeze(-1)
    slopes = []
    for h in (nodes, nodes + 1e-7):
        h = h.clone().requires_grad_()
        slopes.append(torch.autograd.grad(activation.combine(h, z, route=route).sum(), h)[0])
    assert_close(slopes[0], slopes[1], rtol=1e-5, atol=1e-5)


# Nodes


@pytest.mark.parametrize("level", [1, 3, 7, 8, 10])
def test_node_values_are_the_process_at_the_nodes(level):
    activation = KernelActivation(DyadicGrid(level))
    z = torch.randn(2, 3, activation.num_inducing)
    U = activation.grid.sorted_points
    expected = z @ reference.phi(U, activation.grid.inducing_points, 1.0).mT
    assert_close(activation.node_values(z), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("level", [1, 3, 7, 8])
def test_table_of_moments_is_the_tridiagonal_of_the_covariance(level):
    activation = KernelActivation(DyadicGrid(level))
    loc, var = torch.randn(2, activation.num_inducing).abs()
    phi = reference.phi(activation.grid.sorted_points, activation.grid.inducing_points, 1.0)
    covariance = phi @ var.diag() @ phi.mT
    table = activation.interval_table(loc.unsqueeze(0), var.unsqueeze(0)).squeeze(-1)
    for left, right, expected in ((0, 1, phi @ loc), (2, 3, covariance.diagonal())):
        assert_close(table[left, 1:], expected, rtol=0, atol=1e-10)
        assert_close(table[right, :-1], expected, rtol=0, atol=1e-10)
    assert_close(table[4, 1:-1], 2 * covariance.diagonal(1), rtol=0, atol=1e-10)


def test_recursion_of_meta_tensors_has_the_shapes_of_the_node_maps():
    activation = KernelActivation(DyadicGrid(8))
    z = torch.rand(2, 3, activation.num_inducing)
    on_cpu, on_meta = (activation.interval_table(v, v) for v in (z, z.to("meta")))
    assert on_meta.shape == on_cpu.shape


# Residual variance


@any_lengthscale
@pytest.mark.parametrize("seed", SEEDS)
def test_residual_variance_is_one_minus_the_squared_features(seed):
    activation = random_activation(seed)
    h = inputs_inside_and_outside(activation.grid, 2)
    residual = activation.residual_variance(h)
    expected = reference.residual_variance(
        h, activation.grid.inducing_points, activation.kernel.lengthscale
    )
    assert_close(residual, expected, rtol=0, atol=1e-11)
    assert_close(residual, 1 - activation(h).square().sum(-1), rtol=0, atol=1e-12)
    assert (residual >= 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", [1, 3, 14])
def test_residual_variance_is_zero_at_nodes_and_one_far_outside(level, dtype):
    activation = KernelActivation(DyadicGrid(level, (-1.0, 1.0)))
    nodes = activation.grid.inducing_points.to(dtype).unsqueeze(-1)
    far = torch.tensor([[-500.0], [500.0]], dtype=dtype)
    assert (activation.residual_variance(nodes) == 0).all()
    assert_close(activation.residual_variance(far), torch.ones_like(far))


@pytest.mark.parametrize("kernel", SMOOTH)
@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_variance_of_smooth_kernels_is_the_difference_and_not_negative(kernel, dtype):
    activation = KernelActivation(DyadicGrid(4), kernel)
    h = torch.cat(
        [inputs_inside_and_outside(activation.grid, 2), nodes_and_bounds(activation.grid, 2)]
    )
    residual = activation.residual_variance(h.to(dtype))
    assert (residual >= 0).all()
    tolerance = 1e-4 if dtype == torch.float32 else 1e-9
    expected = (1 - activation(h).square().sum(-1)).clamp(min=0)
    assert_close(residual.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kernel", [LaplaceKernel(0.3), MaternKernel(0.3), RBFKernel(0.3)])
@pytest.mark.parametrize("level", [2, 4])
def test_prior_variance_between_nodes_is_the_least_over_the_grid(kernel, level):
    activation = KernelActivation(DyadicGrid(level), kernel)
    nodes = activation.grid.sorted_points
    h = torch.linspace(float(nodes[0]), float(nodes[-1]), 100 * (len(nodes) - 1) + 1)
    least = float(activation(h.unsqueeze(-1)).square().sum(-1).min())
    assert activation.prior_variance_between_nodes() == pytest.approx(least, rel=1e-3)


# Extremes


@any_lengthscale
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("lengthscale", [1e-6, 1e-2, 1.0, 1e6])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", [1, 14])
def test_very_coarse_and_very_fine_grids_stay_finite(level, dtype, lengthscale, route):
    activation = KernelActivation(DyadicGrid(level), LaplaceKernel(lengthscale))
    h = torch.tensor([[-10.0, 0.0], [0.5, 0.25], [0.3, 1.0], [11.0, 1e4], [2**-14, 1e-9]])
    leaves = random_leaves(activation, h, 2, dtype)
    mean, var, *gradients = moments_and_gradients(
        activation, leaves, route, torch.ones(2, len(h), 2, dtype=dtype)
    )
    assert all(value.isfinite().all() for value in (mean, var, *gradients))
    assert (var >= 0).all()


@any_lengthscale
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengthscale", [1e-6, 1.0, 1e6])
def test_variance_at_level_14_is_not_above_the_largest_prior_variance(lengthscale, dtype):
    activation = KernelActivation(DyadicGrid(14), LaplaceKernel(lengthscale))
    h = (3 * torch.rand(50, 1) - 1).to(dtype)
    ones = torch.ones(1, 1, activation.num_inducing, dtype=dtype)
    _, var = activation.combine_moments(h, 0 * ones, ones, route="local")
    total = var + activation.residual_variance(h)
    assert_close(total, torch.ones_like(total))  # explained + residual = prior variance


@pytest.mark.parametrize("route", ROUTES)
def test_nan_in_unchecked_paths_shows_in_its_row_only(route):
    activation = KernelActivation(DyadicGrid(3))
    h, z = torch.rand(4, 2), torch.randn(3, 2, 7)
    clean = activation.combine(h, z, route=route)
    h[1, 0] = math.nan
    f = activation.combine(h, z, route=route)
    assert f[1].isnan().all()
    assert_close(f[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("route", ROUTES)
def test_an_input_at_infinity_contributes_nothing(route, value):
    activation = KernelActivation(DyadicGrid(3))
    f = activation.combine(torch.full((1, 2), value), torch.randn(3, 2, 7), route=route)
    assert_close(f, torch.zeros(1, 3))


# Routes, devices, copies


@pytest.mark.parametrize(
    ("num_inducing", "num_outputs", "expected"),
    [(7, 1, False), (4095, 1, False), (7, 100, True), (63, 100, True), (1023, 10, False)],
)
def test_route_is_chosen_by_shape(num_inducing, num_outputs, expected):
    assert dense_is_faster(num_inducing, num_outputs) is expected


@pytest.mark.parametrize("num_outputs", [1, 100])
def test_auto_is_one_of_the_routes(num_outputs):
    activation = KernelActivation(DyadicGrid(3))
    h, z = torch.rand(5, 2), torch.randn(num_outputs, 2, 7)
    route = "dense" if dense_is_faster(7, num_outputs) else "local"
    assert torch.equal(activation.combine(h, z), activation.combine(h, z, route=route))


@pytest.mark.parametrize("kernel", SMOOTH)
def test_auto_takes_the_dense_route_of_smooth_kernels(kernel):
    activation = KernelActivation(DyadicGrid(3), kernel)
    h, z = torch.rand(5, 2), torch.randn(3, 2, 7)
    expected = torch.einsum("npm,cpm->nc", activation(h), z)
    assert_close(activation.combine(h, z), expected)
    assert not activation.has_local_route


@pytest.mark.parametrize("level", [3, 8])
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))])
def test_a_used_activation_can_be_copied(level, clone):
    activation = KernelActivation(DyadicGrid(level))
    h, z = torch.rand(5, 2), torch.randn(1, 2, activation.num_inducing)
    f = activation.combine(h, z, route="local")
    assert torch.equal(clone(activation).combine(h, z, route="local"), f)


def test_module_holds_no_state():
    activation = KernelActivation(DyadicGrid(3))
    assert not activation.state_dict()
    assert not list(activation.parameters())
    assert "DyadicGrid(level=3" in repr(activation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", [LaplaceKernel(), RBFKernel()])
def test_dtype_follows_the_input(kernel, dtype):
    activation = KernelActivation(DyadicGrid(3), kernel)
    h, z = torch.rand(5, 2, dtype=dtype), torch.rand(3, 2, 7, dtype=dtype)
    assert activation(h).dtype == activation.combine(h, z).dtype == dtype


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("level", [3, 8])
def test_meta_tensors_have_the_shapes_of_real_ones(level, route):
    activation = KernelActivation(DyadicGrid(level))
    h, w = torch.rand(4, 5, 2), torch.rand(3, 2, activation.num_inducing)
    real = activation.combine_moments(h, w, w, route=route)
    meta = activation.combine_moments(h.to("meta"), w.to("meta"), w.to("meta"), route=route)
    assert [m.shape for m in meta] == [r.shape for r in real]
    assert activation(h.to("meta")).shape == activation(h).shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("level", [3, 8])
def test_cuda_equals_cpu(level, route):
    activation = KernelActivation(DyadicGrid(level))
    h, w = torch.rand(5, 2), torch.rand(3, 2, activation.num_inducing)
    on_gpu = activation.combine_moments(h.cuda(), w.cuda(), w.cuda(), route=route)
    on_cpu = activation.combine_moments(h, w, w, route=route)
    assert_close([value.cpu() for value in on_gpu], list(on_cpu))


# Errors and warnings


@pytest.mark.parametrize(
    ("h", "error", "message"),
    [
        (torch.tensor([[0, 1]]), TypeError, r"`h` must have a floating dtype; got torch.int64"),
        (torch.tensor([[0.1, math.nan]]), ValueError, "`h` must be finite; got 1 NaN and 0 infin"),
        (torch.tensor([[0.1, math.inf]]), ValueError, "`h` must be finite; got 0 NaN and 1 infin"),
    ],
)
def test_wrong_inputs_are_named(h, error, message):
    with pytest.raises(error, match=message):
        KernelActivation(DyadicGrid(3))(h)


@pytest.mark.usefixtures("no_type_checker")
def test_an_array_is_not_a_tensor():
    with pytest.raises(TypeError, match=r"`h` must be a torch.Tensor; got list"):
        KernelActivation(DyadicGrid(3))([[0.1, 0.2]])


@pytest.mark.usefixtures("no_type_checker")
def test_unknown_route_lists_the_known_ones():
    activation = KernelActivation(DyadicGrid(3))
    with pytest.raises(ValueError, match="`route` must be one of 'auto', 'dense', 'local'; got 'f"):
        activation.combine(torch.rand(5, 2), torch.rand(1, 2, 7), route="fast")


def test_local_route_of_a_smooth_kernel_is_refused():
    activation = KernelActivation(DyadicGrid(3), RBFKernel())
    with pytest.raises(ValueError, match="`kernel` must be Markov for the local route; got RBFK"):
        activation.combine(torch.rand(5, 2), torch.rand(1, 2, 7), route="local")


def test_too_small_a_jitter_is_named_at_construction():
    with pytest.raises(ValueError, match=r"`jitter`=0.0 is too small: the RBFKernel matrix"):
        KernelActivation(DyadicGrid(8), RBFKernel(), jitter=0.0)


@pytest.mark.parametrize("kernel", [LaplaceKernel(0.05), MaternKernel(0.02), RBFKernel(0.02)])
def test_a_coarse_grid_warns(kernel):
    with pytest.warns(UserWarning, match=r"The grid is coarse .* Raise `level` or the lengthscale"):
        KernelActivation(DyadicGrid(3), kernel)


@pytest.mark.parametrize("kernel", [LaplaceKernel(0.12), MaternKernel(0.12), RBFKernel(0.12)])
def test_a_fine_grid_does_not_warn(kernel):
    assert KernelActivation(DyadicGrid(3), kernel).prior_variance_between_nodes() > 0.5


def test_half_the_prior_variance_is_the_threshold_of_the_warning():
    threshold = 1 / 8 / (2 * math.atanh(0.5))  # 1 - tanh(spacing / (2 t)) = 1 / 2
    KernelActivation(DyadicGrid(3), LaplaceKernel(1.001 * threshold))
    with pytest.warns(UserWarning, match="keeps only 50% of its variance"):
        KernelActivation(DyadicGrid(3), LaplaceKernel(0.999 * threshold))


@pytest.mark.parametrize("lengthscale", [0.3, 1.0, 50.0])
@pytest.mark.parametrize("kernel_class", [RBFKernel, MaternKernel, LaplaceKernel])
@pytest.mark.parametrize("level", [3, 6])
def test_single_precision_loses_nothing_but_its_own_digits(kernel_class, lengthscale, level):
    activation = KernelActivation(DyadicGrid(level), kernel_class(lengthscale))
    h = torch.rand(100, 4, dtype=torch.float32)
    found = activation.features(h)
    assert found.dtype == torch.float32
    assert_close(found, activation.features(h.double()).float(), rtol=1e-5, atol=1e-6)


@any_lengthscale
@pytest.mark.parametrize("seed", SEEDS)
def test_residual_covariance_is_what_the_nodes_do_not_explain(seed):
    activation = random_activation(seed)
    h = inputs_inside_and_outside(activation.grid, 3)
    close = h + 0.1 * activation.grid.spacing * torch.randn_like(h)  # often in the same interval
    h = torch.cat([h, close])
    phi = activation(h).transpose(0, 1)  # (P, N, M)
    prior = activation.kernel.of_distance((h.mT.unsqueeze(-1) - h.mT.unsqueeze(-2)).abs())
    covariance = activation.residual_covariance(h)
    assert_close(covariance, prior - phi @ phi.mT, rtol=1e-9, atol=1e-11)
    diagonal = covariance.diagonal(dim1=-2, dim2=-1).mT
    assert_close(diagonal, activation.residual_variance(h), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kernel", SMOOTH, ids=str)
def test_residual_covariance_of_a_smooth_kernel_is_a_difference(kernel):
    activation = KernelActivation(DyadicGrid(3), kernel)
    h = inputs_inside_and_outside(activation.grid, 2)
    phi = activation(h).transpose(0, 1)
    prior = kernel.of_distance((h.mT.unsqueeze(-1) - h.mT.unsqueeze(-2)).abs())
    covariance = activation.residual_covariance(h)
    assert_close(covariance, prior - phi @ phi.mT, rtol=0, atol=1e-6)
    diagonal = covariance.diagonal(dim1=-2, dim2=-1).mT
    assert_close(diagonal, activation.residual_variance(h), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", [LaplaceKernel(0.4), *SMOOTH], ids=str)
def test_residual_covariance_has_the_right_gradient(kernel):
    activation = KernelActivation(DyadicGrid(2), kernel)
    h = (1.4 * torch.rand(5, 2) - 0.2).requires_grad_()
    assert torch.autograd.gradcheck(activation.residual_covariance, h)


@pytest.mark.parametrize("kind", [LaplaceKernel, RBFKernel])
@pytest.mark.parametrize("learn", [True, False])
def test_residual_covariance_with_a_lengthscale_for_each_unit(kind, learn):
    scales = (0.2, 0.5)
    activation = KernelActivation(DyadicGrid(3), kind(scales, learn=learn))
    h = inputs_inside_and_outside(activation.grid, 2)
    covariance = activation.residual_covariance(h)
    for unit, scale in enumerate(scales):
        alone = KernelActivation(DyadicGrid(3), kind(scale))
        expected = alone.residual_covariance(h[:, unit : unit + 1])
        assert_close(covariance[unit : unit + 1], expected, rtol=1e-8, atol=1e-8)
