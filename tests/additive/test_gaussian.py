import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import (
    Categorical,
    Independent,
    LowRankMultivariateNormal,
    MultivariateNormal,
    Normal,
    kl_divergence,
)
from torch.testing import assert_close

from pyro_dak.additive import gaussian
from pyro_dak.additive.activation import KernelActivation
from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.additive.grid import DyadicGrid
from pyro_dak.additive.kernels import RBFKernel
from tests import reference

ROUTES = ["dense", "local"]
PRIORS = {
    "standard": (0.0, 1.0),
    "scalar": (0.5, 2.0),
    "one per element": (
        torch.linspace(-1, 1, 5, dtype=torch.float64),
        torch.tensor(0.3, dtype=torch.float64),
    ),
    "all different": (
        torch.linspace(-1, 1, 5, dtype=torch.float64),
        torch.linspace(0.5, 2, 5, dtype=torch.float64),
    ),
}
priors = pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS.keys())


def mean_field(num_outputs=2, num_units=3, num_inducing=7, batch=()):
    """z_loc, z_scale, unit_scale, mu_loc, mu_scale."""
    shape = (*batch, num_outputs, num_units, num_inducing)
    return (
        torch.randn(shape),
        torch.rand(shape) + 0.1,
        torch.rand(num_units) + 0.5,
        torch.randn(*batch, num_outputs),
        torch.rand(*batch, num_outputs) + 0.1,
    )


def random_tril(*shape):
    tril = torch.randn(*shape, shape[-1]).tril(-1)
    return tril + torch.diag_embed(torch.rand(shape) + 0.2)


def within_four_standard_errors(draws, truth):
    """Whether the mean over the first axis of draws is where it should be, everywhere."""
    standard_error = draws.std(0) / math.sqrt(len(draws))
    return bool(((draws.mean(0) - truth).abs() < 4 * standard_error).all())


# Moments of f


@pytest.mark.parametrize("route", ["auto", *ROUTES])
@pytest.mark.parametrize("num_outputs", [1, 2])
def test_moments_equal_the_quadruple_loop(num_outputs, route):
    activation = KernelActivation(DyadicGrid(3))
    h = 3 * torch.rand(4, 3) - 1
    q = mean_field(num_outputs)
    phi = reference.phi(h, activation.grid.inducing_points, 1.0)
    moments = gaussian.mean_field_moments(activation, h, *q, route=route)
    assert_close(moments, reference.moments_of_f(phi, *q), rtol=1e-11, atol=1e-11)


def test_moments_of_a_smooth_kernel_equal_the_quadruple_loop():
    activation = KernelActivation(DyadicGrid(3), RBFKernel(0.3))
    h, q = torch.rand(4, 3), mean_field()
    moments = gaussian.mean_field_moments(activation, h, *q)
    assert_close(moments, reference.moments_of_f(activation(h), *q))


@pytest.mark.parametrize("route", ROUTES)
def test_moments_equal_those_of_draws_of_z_and_mu(route):
    activation = KernelActivation(DyadicGrid(3))
    h = 3 * torch.rand(4, 3) - 1
    z_loc, z_scale, sigma, mu_loc, mu_scale = q = mean_field()
    mean, var = gaussian.mean_field_moments(activation, h, *q, route=route)
    z = z_loc + z_scale * torch.randn(20_000, *z_loc.shape)
    mu = mu_loc + mu_scale * torch.randn(20_000, 1, 2)
    phi = reference.phi(h, activation.grid.inducing_points, 1.0)
    f = torch.einsum("npm,scpm,p->snc", phi, z, sigma) + mu
    assert within_four_standard_errors(f, mean)
    assert within_four_standard_errors((f - mean).square(), var)


@pytest.mark.parametrize("route", ROUTES)
def test_moments_with_prior_weights_are_the_prior(route):
    activation = KernelActivation(DyadicGrid(3))
    h, sigma = 3 * torch.rand(4, 3) - 1, torch.rand(3)
    z = torch.zeros(2, 3, 7)
    mean, var = gaussian.mean_field_moments(
        activation, h, z, z + 1, sigma, torch.zeros(2), torch.ones(2), route=route
    )
    kept = sigma.square() * (1 - activation.residual_variance(h))
    assert_close(mean, torch.zeros(4, 2))
    assert_close(var, 1 + kept.sum(-1, keepdim=True).expand(4, 2))


@pytest.mark.parametrize("route", ROUTES)
def test_gradients_by_every_argument_equal_finite_differences(route):
    activation = KernelActivation(DyadicGrid(2))
    h = torch.tensor([[0.1, 0.6, -0.7], [1.9, 0.45, 0.3]])
    leaves = [leaf.requires_grad_() for leaf in (h, *mean_field(num_inducing=3))]
    assert torch.autograd.gradcheck(
        lambda *args: gaussian.mean_field_moments(activation, *args, route=route), leaves
    )


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("input_batch", [(), (4,)])
def test_an_ensemble_of_posteriors_equals_its_members(input_batch, route):
    activation = KernelActivation(DyadicGrid(3))
    h = torch.rand(*input_batch, 5, 3)
    q = mean_field(batch=(4,))
    sigma = q[2]
    mean, var = gaussian.mean_field_moments(activation, h, *q, route=route)
    for e in range(4):
        member = [q[0][e], q[1][e], sigma, q[3][e], q[4][e]]
        expected = gaussian.mean_field_moments(
            activation, h[e] if input_batch else h, *member, route="dense"
        )
        assert_close((mean[e], var[e]), expected, rtol=1e-11, atol=1e-11)


@settings(derandomize=True, max_examples=25, deadline=None)
@given(order=st.permutations(range(3)), seed=st.integers(0, 2**32 - 1))
def test_permuting_units_leaves_the_moments_unchanged(order, seed):
    torch.manual_seed(seed)
    activation = KernelActivation(DyadicGrid(3))
    h, (z_loc, z_scale, sigma, *mu) = torch.rand(4, 3), mean_field()
    moments = gaussian.mean_field_moments(activation, h, z_loc, z_scale, sigma, *mu)
    permuted = gaussian.mean_field_moments(
        activation, h[:, order], z_loc[:, order], z_scale[:, order], sigma[order], *mu
    )
    assert_close(permuted, moments, rtol=0, atol=1e-12)


def test_moments_of_meta_tensors_have_shapes():
    activation = KernelActivation(DyadicGrid(3))
    q = [value.to("meta") for value in mean_field()]
    mean, var = gaussian.mean_field_moments(activation, torch.empty(4, 3, device="meta"), *q)
    assert mean.shape == var.shape == (4, 2)


WRONG_ARGUMENTS = {
    "columns": ({"h": torch.rand(4, 5)}, r"`h` must have 3 columns, one per .*got shape \(4, 5\)"),
    "one row": (
        {"h": torch.rand(3)},
        r"`h` must have shape \(..., N, P\), rows x units; got \(3,\)",
    ),
    "a number": (
        {"h": torch.tensor(0.5)},
        r"`h` must have shape \(..., N, P\), rows x units; got \(\)",
    ),
    "nan": ({"h": torch.full((4, 3), math.nan)}, "`h` must be finite; got 12 NaN and 0 infinite"),
    "no outputs": (
        {"z_loc": torch.rand(3, 7)},
        r"`z_loc` must have shape \(..., C, P, 7\), outputs x",
    ),
    "nodes": (
        {"z_loc": torch.rand(2, 3, 6)},
        r"`z_loc` must have shape \(..., C, P, 7\), outputs x",
    ),
    "scales": ({"z_scale": torch.rand(1, 3, 7)}, r"`z_scale` must have shape \(..., 2, 3, 7\), l"),
    "units": ({"unit_scale": torch.rand(2)}, r"`unit_scale` must have shape \(..., 3\), one per"),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS.keys())
def test_wrong_shapes_and_values_are_named(wrong, message):
    names = ["z_loc", "z_scale", "unit_scale", "mu_loc", "mu_scale"]
    arguments = {"h": torch.rand(4, 3), **dict(zip(names, mean_field(), strict=True)), **wrong}
    with pytest.raises(ValueError, match=message):
        gaussian.mean_field_moments(KernelActivation(DyadicGrid(3)), **arguments)


def test_integer_inputs_are_named():
    with pytest.raises(TypeError, match=r"`h` must have a floating dtype; got torch.int64. Conv"):
        gaussian.mean_field_moments(
            KernelActivation(DyadicGrid(3)), torch.ones(4, 3, dtype=torch.int64), *mean_field()
        )


@pytest.mark.parametrize("rank", [0, 2])
def test_sampled_marginals_have_their_moments(rank):
    mean, root = torch.randn(3, 2), torch.randn(rank, 3, 2)
    var = root.square().sum(0) + torch.rand(3, 2)
    moments = gaussian.FunctionMoments(mean, var, root if rank else None)
    draws = gaussian.sample_marginals(moments, 20_000) - mean
    assert within_four_standard_errors(draws, torch.zeros(3, 2))
    assert within_four_standard_errors(draws.square(), var)
    covariance = (root[..., :1] * root[..., 1:]).sum(0)
    assert within_four_standard_errors(draws[..., :1] * draws[..., 1:], covariance)


# Expected log-likelihoods


@pytest.mark.parametrize("noise_scale", [0.7, [0.7, 0.1, 2.0]])
def test_expected_log_normal_equals_gauss_hermite(noise_scale):
    y, f_mean, f_var = torch.randn(4, 3), torch.randn(4, 3), torch.rand(4, 3)
    noise_scale = torch.tensor(noise_scale)
    noise = noise_scale.expand(3)
    expected = torch.zeros(4)
    for n in range(4):
        for c in range(3):
            expected[n] += reference.gauss_hermite_expectation(
                lambda f, n=n, c=c: float(Normal(f, noise[c]).log_prob(y[n, c])),
                float(f_mean[n, c]),
                float(f_var[n, c]),
            )
    assert_close(gaussian.expected_log_normal(y, f_mean, f_var, noise_scale), expected)


def test_expected_log_normal_equals_monte_carlo():
    y, f_mean, f_var = torch.randn(4, 3), torch.randn(4, 3), torch.rand(4, 3)
    noise_scale = torch.tensor([0.7, 0.3, 2.0])
    f = f_mean + f_var.sqrt() * torch.randn(20_000, 4, 3)
    draws = Normal(f, noise_scale).log_prob(y).sum(-1)
    value = gaussian.expected_log_normal(y, f_mean, f_var, noise_scale)
    assert within_four_standard_errors(draws, value)


def test_expected_log_normal_without_variance_is_the_log_density():
    y, f_mean, noise_scale = torch.randn(4, 3), torch.randn(4, 3), torch.rand(3) + 0.1
    value = gaussian.expected_log_normal(y, f_mean, torch.zeros(4, 3), noise_scale)
    assert_close(value, Normal(f_mean, noise_scale).log_prob(y).sum(-1))


def test_expected_log_heteroscedastic_equals_monte_carlo():
    y, f_mean, eta_mean = torch.randn(3, 4, 2)
    f_var, eta_var = 0.5 * torch.rand(2, 4, 2)
    f = f_mean + f_var.sqrt() * torch.randn(50_000, 4, 2)
    eta = eta_mean + eta_var.sqrt() * torch.randn(50_000, 4, 2)
    draws = Normal(f, (eta / 2).exp()).log_prob(y).sum(-1)
    value = gaussian.expected_log_heteroscedastic(y, f_mean, f_var, eta_mean, eta_var)
    assert within_four_standard_errors(draws, value)


def test_expected_log_heteroscedastic_with_covariance_equals_monte_carlo():
    y, f_mean, eta_mean = torch.randn(3, 4, 2)
    f_root, eta_root = 0.4 * torch.randn(2, 3, 4, 2)  # the functions share three standard normals
    shared = torch.randn(50_000, 3, 4, 1)
    f, eta = f_mean + (shared * f_root).sum(1), eta_mean + (shared * eta_root).sum(1)
    draws = Normal(f, (eta / 2).exp()).log_prob(y).sum(-1)
    moments = [f_mean, f_root.square().sum(0), eta_mean, eta_root.square().sum(0)]
    covariance = (f_root * eta_root).sum(0)
    value = gaussian.expected_log_heteroscedastic(y, *moments, covariance)
    assert within_four_standard_errors(draws, value)


def test_expected_log_heteroscedastic_with_known_noise_is_homoscedastic():
    y, f_mean, f_var = torch.randn(4, 2), torch.randn(4, 2), torch.rand(4, 2)
    noise_scale = torch.tensor([0.3, 2.0])
    eta = (2 * noise_scale.log()).expand(4, 2)
    value = gaussian.expected_log_heteroscedastic(y, f_mean, f_var, eta, torch.zeros(4, 2))
    assert_close(value, gaussian.expected_log_normal(y, f_mean, f_var, noise_scale))


def class_moments(spread=1.0, rank=None, num_rows=6, num_classes=4):
    """q(f) of a few classes, with correlations if there is a rank."""
    mean, var = torch.randn(num_rows, num_classes), spread * torch.rand(num_rows, num_classes)
    if rank is None:
        return FunctionMoments(mean, var)
    root = (spread / 2) ** 0.5 * torch.randn(rank, num_rows, num_classes)
    return FunctionMoments(mean, var + root.square().sum(0), root)


def naive_bound(moments, a):
    """E a^T f + log sum_c E exp(f_c - a^T f), from the covariance of f."""
    mean, var, root = moments
    covariance = torch.diag_embed(var)
    if root is not None:
        shared = torch.einsum("rna,rnb->nab", root, root)
        covariance = torch.diag_embed(var - root.square().sum(0)) + shared
    rows = torch.eye(mean.shape[-1]) - a.unsqueeze(-2)  # (N, C, C): e_c - a
    shifted_mean = torch.einsum("nck,nk->nc", rows, mean)
    shifted_var = torch.einsum("nck,nkl,ncl->nc", rows, covariance, rows)
    return (a * mean).sum(-1) + torch.logsumexp(shifted_mean + shifted_var / 2, -1)


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("spread", [0.01, 1.0, 9.0])
def test_categorical_bound_is_below_monte_carlo(spread, rank):
    y, q = torch.randint(4, (6,)), class_moments(spread, rank)
    draws = Categorical(logits=gaussian.sample_marginals(q, 20_000)).log_prob(y)
    standard_error = draws.std(0) / math.sqrt(len(draws))
    bound = gaussian.expected_log_categorical_bound(y, q)
    assert (bound <= draws.mean(0) + 4 * standard_error).all()


def test_categorical_bound_is_tight_without_variance():
    y, q = torch.randint(4, (6,)), class_moments(spread=0.0)
    bound = gaussian.expected_log_categorical_bound(y, q)
    assert_close(bound, Categorical(logits=q.mean).log_prob(y))


@pytest.mark.parametrize("rank", [None, 2])
def test_bound_without_steps_is_jensens_inequality(rank):
    q = class_moments(rank=rank)
    bound = gaussian.log_normalizer_bound(q, num_steps=0)
    assert_close(bound, torch.logsumexp(q.mean + q.var / 2, -1))


def test_bound_of_one_class_is_exact_in_the_limit():
    q = class_moments(num_classes=1)
    assert_close(gaussian.log_normalizer_bound(q, num_steps=200), q.mean.squeeze(-1))


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("spread", [0.01, 1.0, 9.0, 400.0])
def test_steps_never_loosen_the_bound(spread, rank):
    q = class_moments(spread, rank, num_rows=50)
    bounds = [gaussian.log_normalizer_bound(q, steps) for steps in range(12)]
    assert all((tighter <= looser + 1e-9).all() for looser, tighter in pairwise(bounds))
    assert (bounds[3] < bounds[0]).all()


@pytest.mark.parametrize("rank", [None, 2])
def test_bound_in_the_limit_is_the_least_over_all_shifts(rank):
    q = class_moments(rank=rank)
    a = torch.zeros(6, 4, requires_grad=True)
    optimizer = torch.optim.LBFGS([a], max_iter=500, tolerance_grad=1e-12, tolerance_change=0)

    def loss():
        optimizer.zero_grad()
        value = naive_bound(q, a).sum()
        value.backward()
        return value

    optimizer.step(loss)
    bound = gaussian.log_normalizer_bound(q, num_steps=500)
    assert_close(bound, naive_bound(q, a.detach()))


@pytest.mark.parametrize("rank", [None, 2])
def test_gradient_of_the_bound_in_the_limit_is_that_of_its_value(rank):
    q = [part.requires_grad_() for part in class_moments(rank=rank) if part is not None]
    assert torch.autograd.gradcheck(
        lambda *parts: gaussian.log_normalizer_bound(FunctionMoments(*parts), num_steps=300), q
    )


# KL divergences


def normal_like(loc, prior):
    prior_loc, prior_scale = (torch.as_tensor(value).expand_as(loc) for value in prior)
    return Normal(prior_loc, prior_scale)


@priors
def test_kl_of_independent_normals_equals_torch(prior):
    loc, scale = torch.randn(2, 3, 5), torch.rand(2, 3, 5) + 0.1
    expected = kl_divergence(Normal(loc, scale), normal_like(loc, prior)).sum()
    assert_close(gaussian.kl_diagonal(loc, scale, *prior), expected)


@priors
@pytest.mark.parametrize("blocks", [(), (3,), (2, 3)])
def test_kl_of_blocks_equals_torch(blocks, prior):
    loc, tril = torch.randn(*blocks, 5), random_tril(*blocks, 5)
    prior_normal = normal_like(loc, prior)
    prior_tril = torch.diag_embed(prior_normal.scale)
    expected = kl_divergence(
        MultivariateNormal(loc, scale_tril=tril),
        MultivariateNormal(prior_normal.loc, scale_tril=prior_tril),
    ).sum()
    assert_close(gaussian.kl_tril(loc, tril, *prior), expected)


@priors
@pytest.mark.parametrize("rank", [1, 3])
def test_kl_of_low_rank_equals_torch(rank, prior):
    loc, scale, factor = torch.randn(5), torch.rand(5) + 0.1, torch.randn(5, rank)
    q = LowRankMultivariateNormal(loc, factor, scale.square())
    prior_normal = normal_like(loc, prior)
    p = MultivariateNormal(prior_normal.loc, scale_tril=prior_normal.scale.diag())
    assert_close(gaussian.kl_low_rank(loc, scale, factor, *prior), kl_divergence(q, p))


@priors
def test_every_kl_equals_the_formula_with_full_covariances(prior):
    loc, scale, tril, factor = (
        torch.randn(5),
        torch.rand(5) + 0.1,
        random_tril(5),
        torch.randn(5, 2),
    )
    prior_normal = normal_like(loc, prior)
    prior_loc, prior_cov = prior_normal.loc, prior_normal.variance.diag()
    covariances = [
        scale.square().diag(),
        tril @ tril.mT,
        scale.square().diag() + factor @ factor.mT,
    ]
    values = [
        gaussian.kl_diagonal(loc, scale, *prior),
        gaussian.kl_tril(loc, tril, *prior),
        gaussian.kl_low_rank(loc, scale, factor, *prior),
    ]
    expected = [reference.kl_gaussians(loc, cov, prior_loc, prior_cov) for cov in covariances]
    assert_close(values, expected)
    assert min(values) > 0


def test_full_rank_with_a_diagonal_factor_is_the_diagonal():
    loc, scale = torch.randn(3, 5), torch.rand(3, 5) + 0.1
    tril = torch.diag_embed(scale)
    assert_close(gaussian.kl_tril(loc, tril), gaussian.kl_diagonal(loc, scale))


def test_low_rank_with_a_zero_factor_is_the_diagonal():
    loc, scale = torch.randn(5), torch.rand(5) + 0.1
    value = gaussian.kl_low_rank(loc, scale, torch.zeros(5, 2))
    assert_close(value, gaussian.kl_diagonal(loc, scale))


def test_kl_of_a_distribution_from_itself_is_zero():
    loc, scale = torch.randn(5), torch.rand(5) + 0.1
    zero = torch.zeros(())
    assert_close(gaussian.kl_diagonal(loc, scale, loc, scale), zero)
    assert_close(gaussian.kl_tril(loc, scale.diag(), loc, scale), zero)
    assert_close(gaussian.kl_low_rank(loc, scale, torch.zeros(5, 2), loc, scale), zero)


def test_kl_of_the_standard_normal_equals_monte_carlo():
    loc, scale = torch.randn(5), torch.rand(5) + 0.1
    q, p = Independent(Normal(loc, scale), 1), Independent(Normal(torch.zeros(5), 1.0), 1)
    z = q.sample((20_000,))
    draws = q.log_prob(z) - p.log_prob(z)
    assert within_four_standard_errors(draws, gaussian.kl_diagonal(loc, scale))


@pytest.mark.parametrize("prior", [(0.0, 1.0), (0.3, 2.0), (torch.tensor(0.3), torch.tensor(2.0))])
def test_kl_of_normals_equals_torch_and_has_two_derivatives(prior):
    leaves = [torch.randn(2, 3).requires_grad_(), (torch.rand(2, 3) + 0.5).requires_grad_()]
    q, p = torch.distributions.Normal(*leaves), torch.distributions.Normal(*prior)
    assert_close(
        gaussian.kl_diagonal(*leaves, *prior), torch.distributions.kl_divergence(q, p).sum()
    )

    def kl(loc, scale):
        return gaussian.kl_diagonal(loc, scale, *prior)

    assert torch.autograd.gradcheck(kl, leaves)
    assert torch.autograd.gradgradcheck(kl, leaves)


@pytest.mark.parametrize("noise_shape", [(), (2,)])
def test_expected_log_normal_has_two_derivatives_with_draws_in_front(noise_shape):
    leaves = (torch.randn(3, 2), torch.randn(4, 3, 2), torch.rand(4, 3, 2))
    leaves = [leaf.requires_grad_() for leaf in (*leaves, 0.5 + torch.rand(noise_shape))]

    def fn(y, mean, var, noise):
        return gaussian.expected_log_normal(y.expand_as(mean), mean, var, noise)

    y, mean, var, noise = leaves
    naive = torch.distributions.Normal(mean, noise).log_prob(y) - var / (2 * noise**2)
    assert_close(fn(*leaves), naive.sum(-1))
    assert torch.autograd.gradcheck(fn, leaves)
    assert torch.autograd.gradgradcheck(fn, leaves)
