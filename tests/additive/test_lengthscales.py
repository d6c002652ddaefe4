"""Lengthscales for each unit: fixed, learned, given as draws; both routes, and smooth kernels."""

import copy
import pickle

import pytest
import torch
from torch.autograd import gradcheck
from torch.testing import assert_close

from pyro_dak.additive import bridge
from pyro_dak.additive.activation import KernelActivation
from pyro_dak.additive.factor import dense_inverse_factor, level_constants, sparse_inverse_factor
from pyro_dak.additive.grid import DyadicGrid
from pyro_dak.additive.kernels import LaplaceKernel, MaternKernel, RBFKernel
from pyro_dak.additive.layer import AdditiveLayer
from tests import reference

SCALES = (0.07, 0.3, 1.0, 7.0)  # of the units, from far below the bounds to far above
LEVELS = [1, 2, 3, 5, 10]  # M = 1, 3, 7, 31, 1023
ROUTES = ["dense", "local"]
KERNELS = [LaplaceKernel, RBFKernel, MaternKernel]
pytestmark = pytest.mark.filterwarnings("ignore:The grid is coarse")


def activation_of(level=3, scales=SCALES, learn=True, kernel=LaplaceKernel, **options):
    return KernelActivation(DyadicGrid(level, (-1.0, 1.0)), kernel(scales, learn=learn), **options)


def inputs(activation, num_units=4):
    """Inside, outside, at nodes and at the bounds, `(N, P)`."""
    nodes = activation.grid.inducing_points[:15].unsqueeze(-1).expand(-1, num_units)
    bounds = torch.tensor([[-1.0], [1.0]]).expand(-1, num_units)
    inside, around = 2 * torch.rand(20, num_units) - 1, 4 * torch.randn(20, num_units)
    return torch.cat([inside, around, nodes, bounds])


def assert_relatively_close(found, expected, tolerance=1e-10):
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max().clamp(min=1e-30)


def one_by_one(activation, fn):
    """`fn(activation of unit p with a number, p)` of every unit."""
    kind, scales = type(activation.kernel), activation.kernel.lengthscale
    return [fn(KernelActivation(activation.grid, kind(t)), p) for p, t in enumerate(scales)]


# Values: those of an activation with a number, unit by unit


@pytest.mark.parametrize("learn", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("level", [1, 3, 5])
def test_features_are_those_of_each_unit_alone(level, kernel, learn):
    activation = activation_of(level, learn=learn, kernel=kernel)
    h = inputs(activation)
    expected = one_by_one(activation, lambda a, p: a(h[:, p : p + 1]))
    assert_close(activation(h), torch.cat(expected, -2), rtol=0, atol=1e-9)
    coarse = activation.features(h, num_levels=1)
    assert_close(coarse, torch.cat(expected, -2)[..., :1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("level", LEVELS[:-1])
def test_features_equal_the_dense_cholesky_reference(level):
    activation = activation_of(level)
    h, U = inputs(activation), activation.grid.inducing_points
    expected = [reference.phi(h[:, p], U, t) for p, t in enumerate(SCALES)]
    assert_close(activation(h), torch.stack(expected, -2), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kernel", KERNELS)
def test_residual_variance_and_node_values_are_those_of_each_unit_alone(kernel):
    activation = activation_of(kernel=kernel)
    h, z = inputs(activation), torch.randn(2, 4, 7)
    expected = one_by_one(activation, lambda a, p: a.residual_variance(h[:, p : p + 1]))
    assert_close(activation.residual_variance(h), torch.cat(expected, -1), rtol=0, atol=1e-9)
    if kernel is LaplaceKernel:
        expected = one_by_one(activation, lambda a, p: a.node_values(z[:, p : p + 1]))
        assert_close(activation.node_values(z), torch.cat(expected, -2))
        assert_close(activation.node_values(z[0]), torch.cat(expected, -2)[0])


@pytest.mark.parametrize("kernel", KERNELS)
def test_values_and_variances_of_units_are_those_of_each_alone(kernel):
    activation = activation_of(kernel=kernel)
    h, z, tril = inputs(activation), torch.randn(2, 4, 7), torch.randn(2, 4, 7, 7).tril()
    values = one_by_one(activation, lambda a, p: a.unit_values(h[:, [p]], z[:, [p]]))
    assert_close(activation.unit_values(h, z), torch.cat(values, -1), rtol=0, atol=1e-8)
    blocks = one_by_one(activation, lambda a, p: a.unit_block_variances(h[:, [p]], tril[:, [p]]))
    found = activation.unit_block_variances(h, tril)
    assert_close(found, torch.cat(blocks, -1), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("route", ROUTES)
def test_design_and_joint_moments_are_those_of_dense_algebra(route):
    layer = AdditiveLayer(activation_of(route=route), 4, 2, linear_term=True)
    h = inputs(layer.activation)
    root = torch.randn(2, layer.num_weights, layer.num_weights) / 10
    loc, covariance = torch.randn(2, layer.num_weights), root @ root.mT
    moments, design = layer.joint_moments(h, loc, covariance)
    U, columns = layer.activation.grid.inducing_points, [torch.ones(len(h), 1)]
    columns += [layer.unit_scale * h]  # the bounds are -1 and 1 already
    columns += [s * reference.phi(h[:, p], U, SCALES[p]) for p, s in enumerate(layer.unit_scale)]
    expected = torch.cat(columns, -1)
    assert_close(design, expected.detach(), rtol=0, atol=1e-10)
    assert_close(moments.mean, expected @ loc.mT)
    assert_close(moments.var, torch.einsum("nk,fkl,nl->nf", expected, covariance, expected))


# Local route = dense route, with the gradient of the lengthscale


@pytest.mark.parametrize("num_outputs", [1, 3])
@pytest.mark.parametrize("level", LEVELS)
def test_moments_and_gradients_of_the_local_route_equal_dense(level, num_outputs):
    activation = activation_of(level)
    shape = (num_outputs, 4, activation.num_inducing)
    start = [inputs(activation), torch.randn(shape), torch.rand(shape), torch.rand(4) + 0.5]
    probe = torch.randn(2, len(start[0]), num_outputs)
    results = []
    for route in ROUTES:
        h, loc, var, sigma = leaves = [leaf.clone().requires_grad_() for leaf in start]
        mean, variance = activation.combine_moments(h, loc, var, route, sigma)
        loss = (probe[0] * mean + probe[1] * variance).sum()
        gradients = torch.autograd.grad(loss, [*leaves, activation.log_lengthscale])
        results.append([mean, variance, *gradients])
    assert_relatively_close(*results)


@pytest.mark.parametrize("level", LEVELS)
def test_functions_and_gradients_of_the_local_route_equal_dense(level):
    activation = activation_of(level)
    start = [inputs(activation), torch.randn(2, 4, activation.num_inducing)]
    probe = torch.randn(len(start[0]), 2)
    results = []
    for route in ROUTES:
        leaves = [leaf.clone().requires_grad_() for leaf in start]
        f = activation.combine(*leaves, route)
        gradients = torch.autograd.grad((probe * f).sum(), [*leaves, activation.log_lengthscale])
        results.append([f, *gradients])
    assert_relatively_close(*results)


@pytest.mark.parametrize("level", LEVELS)
def test_terms_of_the_bound_and_gradients_equal_the_dense_moments(level):
    activation = activation_of(level, route="local")
    shape = (2, 4, activation.num_inducing)
    start = [inputs(activation), torch.randn(shape), torch.randn(shape), torch.randn(4) / 3]
    start += [torch.randn(2), torch.randn(2)]
    probe = torch.randn(2, len(start[0]), 2)
    results = []
    for is_fast in (True, False):
        leaves = [leaf.clone().requires_grad_() for leaf in start]
        if is_fast:
            mean, var, _ = activation.mean_field_terms(*leaves)
        else:
            h, loc, log_scale, log_sigma, mu, mu_log_scale = leaves
            z_var, sigma = (2 * log_scale).exp(), log_sigma.exp()
            mean, var = activation.combine_moments(h, loc, z_var, "dense", sigma)
            mean, var = mean + mu, var + (2 * mu_log_scale).exp()
        loss = (probe[0] * mean + probe[1] * var).sum()
        gradients = torch.autograd.grad(loss, [*leaves, activation.log_lengthscale])
        results.append([mean, var, *gradients])
    assert_relatively_close(*results)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("level", [1, 3, 5])
def test_gradients_of_moments_and_functions_are_the_slopes(level, route):
    activation = activation_of(level, route=route)
    h = torch.tensor([[-1.7, 0.33, 0.1, 0.9], [0.11, -0.61, 0.83, 2.3]], requires_grad=True)
    shape = (2, 4, activation.num_inducing)
    loc, var = torch.randn(shape, requires_grad=True), torch.rand(shape, requires_grad=True)

    def results(h, loc, var, log_lengthscale):
        activation._parameters["log_lengthscale"] = log_lengthscale
        return *activation.combine_moments(h, loc, var), activation.combine(h, loc)

    assert gradcheck(results, (h, loc, var, activation.log_lengthscale), fast_mode=level > 3)


def test_gradients_of_the_terms_of_the_bound_are_the_slopes():
    activation = activation_of(3, scales=(0.2, 0.5, 2.0), route="local")
    h = 0.8 * torch.randn(4, 3)
    weights = [torch.randn(2, 3, 7), torch.randn(2, 3, 7), torch.randn(3) / 3]
    leaves = [h, *weights, torch.randn(2), torch.randn(2), activation.log_lengthscale.detach()]

    def terms(*leaves):
        activation._parameters["log_lengthscale"] = leaves[-1]
        return activation.mean_field_terms(*leaves[:-1])

    assert gradcheck(terms, [leaf.requires_grad_() for leaf in leaves])


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_of_residuals_blocks_and_smooth_features_are_the_slopes(kernel):
    activation = activation_of(2, scales=(0.4, 0.9), kernel=kernel)
    h = torch.tensor([[-1.7, 0.33], [0.11, -0.61]])
    tril = torch.randn(1, 2, 3, 3).tril()

    def results(log_lengthscale):
        activation._parameters["log_lengthscale"] = log_lengthscale
        lost, blocks = activation.residual_variance(h), activation.unit_block_variances(h, tril)
        return lost, blocks, activation.features(h)

    assert gradcheck(results, (activation.log_lengthscale,), atol=1e-5)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("level", [1, 3, 10])
def test_very_short_and_very_long_lengthscales_stay_finite(level, dtype, route):
    activation = activation_of(level, scales=(1e-6, 1e-2, 1e6), route=route).to(dtype)
    h = torch.tensor([[-10.0, 0.0, 0.5], [0.25, 0.3, 1.0], [11.0, 1e4, 1e-9]], dtype=dtype)
    shape = (1, 3, activation.num_inducing)
    loc, var = torch.randn(shape, dtype=dtype), torch.rand(shape, dtype=dtype)
    mean, variance = activation.combine_moments(h, loc, var)
    total = (mean + variance + activation.combine(h, loc)).sum()
    (slope,) = torch.autograd.grad(total, activation.log_lengthscale)
    assert slope.isfinite().all()
    assert mean.isfinite().all()
    assert (variance >= 0).all()


@pytest.mark.parametrize("level", [3, 7])
def test_single_precision_keeps_its_digits_in_the_gradient_of_the_lengthscale(level):
    activation = activation_of(level, scales=(0.3, 1.0, 5.0), route="local")
    shape = (1, 3, activation.num_inducing)
    arguments = [2 * torch.rand(50, 3) - 1, torch.randn(shape), torch.randn(shape), torch.randn(3)]
    arguments += [torch.randn(1), torch.randn(1)]
    probe, gradients = torch.randn(2, 50, 1), []
    for dtype in (torch.float64, torch.float32):
        own = activation.to(dtype)
        mean, var, _ = own.mean_field_terms(*(part.to(dtype) for part in arguments))
        loss = (probe[0].to(dtype) * mean + probe[1].to(dtype) * var).sum()
        gradients.append(torch.autograd.grad(loss, own.log_lengthscale)[0].double())
    assert_relatively_close(gradients[1:], gradients[:1], 2e-4)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own
def test_derivatives_of_the_lengthscale_of_any_order_exist_on_the_dense_route():
    activation = activation_of(3, route="dense")
    h, z = inputs(activation), torch.randn(1, 4, 7)

    def total(log_lengthscale):
        return activation.combine(h, z, lengthscale=log_lengthscale.exp()).square().sum()

    at = activation.log_lengthscale.detach()
    found, slope = torch.func.hessian(total)(at), torch.func.grad(total)
    steps = 1e-6 * torch.eye(4)
    expected = torch.stack([(slope(at + step) - slope(at - step)) / 2e-6 for step in steps])
    assert_close(found, expected, rtol=1e-6, atol=1e-6)


# Draws of lengthscales


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("route", ["auto", "dense", "local"])
def test_functions_of_draws_of_lengthscales_are_those_of_each_draw(route, kernel):
    if kernel is not LaplaceKernel and route == "local":
        pytest.skip("smooth kernels have no local route")
    activation = KernelActivation(
        DyadicGrid(3, (-1.0, 1.0)), kernel(torch.distributions.Gamma(2, 2))
    )
    h, scales = inputs(activation), torch.rand(5, 4) + 0.1
    weights = torch.randn(5, 2, 4, 7)
    found = activation.combine(h, weights, route, scales)
    expected = [
        KernelActivation(activation.grid, kernel(t)).combine(h, w, route)
        for t, w in zip(scales, weights, strict=True)
    ]
    assert_close(found, torch.stack(expected), rtol=0, atol=1e-8)
    nested = activation.combine(h, weights.unsqueeze(1), route, scales.unsqueeze(1))
    assert_close(nested, found.unsqueeze(1))
    shared = activation.combine(h, weights[0], route, scales)
    assert_close(shared[0], found[0])


def test_a_given_lengthscale_takes_the_place_of_the_kernels_own():
    activation = KernelActivation(DyadicGrid(3), LaplaceKernel(0.5))
    h, z, scales = torch.rand(6, 4), torch.randn(2, 4, 7), torch.tensor(SCALES)
    expected = KernelActivation(activation.grid, LaplaceKernel(SCALES)).combine(h, z)
    assert_close(activation.combine(h, z, lengthscale=scales), expected)


@pytest.mark.parametrize(
    "call",
    [
        lambda a, h, z: a(h),
        lambda a, h, z: a.combine(h, z),
        lambda a, h, z: a.combine_moments(h, z, z.square()),
        lambda a, h, z: a.residual_variance(h),
        lambda a, h, z: a.mean_field_terms(h, z, z, z[0, :, 0], z[:, 0, 0], z[:, 0, 0]),
        lambda a, h, z: a.prior_variance_between_nodes(),
        lambda a, h, z: a.lengthscale,
    ],
)
def test_closed_forms_refuse_a_random_lengthscale_by_name(call):
    kernel = LaplaceKernel(torch.distributions.LogNormal(0.0, 1.0))
    activation = KernelActivation(DyadicGrid(3), kernel, route="local")
    with pytest.raises(NotImplementedError, match="latent site `lengthscale`"):
        call(activation, torch.rand(5, 2), torch.randn(1, 2, 7))


# The parameter, constants, warnings, errors


def test_learned_lengthscales_are_a_parameter_that_starts_where_the_kernel_says():
    from_number = KernelActivation(DyadicGrid(3), LaplaceKernel(0.4, learn=True), num_units=3)
    assert_close(from_number.lengthscale, torch.full((3,), 0.4))
    assert list(from_number.state_dict()) == ["log_lengthscale"]
    assert_close(activation_of().lengthscale, torch.tensor(SCALES))
    assert_close(activation_of().delta, 0.25 / torch.tensor(SCALES))
    for fixed in (LaplaceKernel(0.4), LaplaceKernel(SCALES)):
        assert not KernelActivation(DyadicGrid(3), fixed).state_dict()


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))])
def test_a_used_activation_with_lengthscales_can_be_copied(clone):
    activation = activation_of()
    h, z = torch.rand(5, 4), torch.randn(1, 4, 7)
    f = activation.combine(h, z, "local")
    assert torch.equal(clone(activation).combine(h, z, "local"), f)


def test_constants_that_depend_on_one_number_are_refused_where_there_is_none():
    activation, z = activation_of(), torch.rand(1, 4, 7)
    with pytest.raises(ValueError, match="`kernel` must have one lengthscale for all units"):
        activation.node_table(z, z)
    with pytest.raises(NotImplementedError, match="Members in one pass need a kernel with one"):
        activation.stacked_moments(
            torch.rand(2, 4, 5), torch.rand(1, 2, 4, 7), torch.rand(1, 2, 4, 7)
        )


@pytest.mark.parametrize("learn", [True, False])
def test_the_shortest_lengthscale_decides_whether_the_grid_is_coarse(learn):
    with pytest.warns(UserWarning, match=r"lengthscale 0.05\) the prior keeps only 1?\d%"):
        KernelActivation(DyadicGrid(3), LaplaceKernel((1.0, 0.05), learn=learn))
    own = KernelActivation(DyadicGrid(5), LaplaceKernel((1.0, 0.1), learn=learn))
    alone = KernelActivation(DyadicGrid(5), LaplaceKernel(0.1))
    kept = alone.prior_variance_between_nodes()
    assert own.prior_variance_between_nodes() == pytest.approx(kept)


def test_prior_variance_between_nodes_of_smooth_kernels_is_the_least_of_the_units():
    own = activation_of(4, scales=(1.0, 0.2), kernel=MaternKernel)
    alone = KernelActivation(own.grid, MaternKernel(0.2))
    assert own.prior_variance_between_nodes() == pytest.approx(alone.prior_variance_between_nodes())


def test_wrong_numbers_of_lengthscales_are_named():
    grid, learned = DyadicGrid(3), LaplaceKernel(1.0, learn=True)
    with pytest.raises(ValueError, match="`num_units` must be given for a kernel that learns"):
        KernelActivation(grid, learned)
    with pytest.raises(
        ValueError, match=r"a lengthscale for each of the 3 units, .* got 2 of them"
    ):
        KernelActivation(grid, LaplaceKernel((1.0, 2.0)), num_units=3)
    with pytest.raises(
        ValueError, match=r"a lengthscale for each of the 3 units, .* got 2 of them"
    ):
        AdditiveLayer(KernelActivation(grid, learned, num_units=2), 3, 1)
    with pytest.raises(
        ValueError, match="`lengthscale` must have 4 columns, one per additive unit"
    ):
        activation_of().combine(torch.rand(5, 4), torch.rand(1, 4, 7), lengthscale=torch.ones(3))
    with pytest.raises(ValueError, match="must have one lengthscale, a number, for the sparse fac"):
        sparse_inverse_factor(grid, LaplaceKernel((1.0, 2.0)))


def test_a_route_is_the_default_of_all_sums():
    h, z = torch.rand(5, 4), torch.randn(1, 4, 7)
    for route in ROUTES:
        activation = KernelActivation(DyadicGrid(3), route=route)
        assert torch.equal(activation.combine(h, z), activation.combine(h, z, route=route))
        terms = activation.mean_field_terms(h, z, z, z[0, :, 0], z[0, 0, :1], z[0, 0, :1])
        assert (terms is None) is (route == "dense")
    with pytest.raises(ValueError, match="`kernel` must be Markov for the local route"):
        KernelActivation(DyadicGrid(3), RBFKernel(), route="local")


# The plain formulas with a delta for each unit


@pytest.mark.parametrize("level", [1, 2, 4])
def test_rows_of_the_factor_and_level_constants_are_those_of_each_delta(level):
    deltas = torch.tensor([[1e-4, 0.3], [2.0, 40.0]])
    columns, values = bridge.node_features(level, deltas)
    constants = level_constants(level, deltas)
    z = torch.randn(2, 2, 2**level - 1)
    found = (z[..., columns] * values).sum(-1)
    assert_close(found, bridge.node_values(z, constants), rtol=0, atol=1e-12)
    for i in range(2):
        for k in range(2):
            factor = bridge.node_factor(level, float(deltas[i, k])).to_dense()
            assert_close(found[i, k], factor @ z[i, k], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", [RBFKernel(0.5), MaternKernel(0.5)])
def test_dense_factors_of_given_lengthscales_are_those_of_kernels_with_them(kernel):
    grid, scales = DyadicGrid(3), torch.tensor([0.2, 0.9])
    found = dense_inverse_factor(grid, kernel, lengthscale=scales)
    expected = [dense_inverse_factor(grid, type(kernel)(float(t))) for t in scales]
    assert_close(found, torch.stack(expected), rtol=1e-8, atol=1e-8)


def test_a_distance_beyond_all_nodes_has_a_gradient_of_zero():
    delta = torch.tensor(0.3, requires_grad=True)
    interval = bridge.locate(torch.tensor([-5.0, 12.0]), 7, delta)
    (slope,) = torch.autograd.grad(bridge.bridge_variance(interval, delta).sum(), delta)
    distances = torch.tensor([6.0, 5.0])  # 1 - exp(-2 r delta)
    assert_close(slope, (2 * distances * (-2 * distances * 0.3).exp()).sum())
