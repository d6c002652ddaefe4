import math

import mpmath
import pyro.distributions as dist
import pytest
import torch
from torch.testing import assert_close

from pyro_dak import (
    BernoulliLikelihood,
    CategoricalLikelihood,
    GaussianLikelihood,
    HeteroscedasticLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)
from pyro_dak.additive.gaussian import FunctionMoments, sample_marginals
from pyro_dak.model.likelihoods import Likelihood
from tests import scenarios
from tests.scenarios import LIKELIHOODS, agrees

N, C = 5, 3
likelihoods = pytest.mark.parametrize("name", LIKELIHOODS)


def moments(likelihood, rank=None):
    F = likelihood.num_functions(C)
    root = None if rank is None else 0.4 * torch.randn(rank, N, F)
    var = 0.1 + 0.2 * torch.rand(N, F)
    if root is not None:
        var = var + root.square().sum(0)
    return FunctionMoments(0.5 * torch.randn(N, F), var, root)


@likelihoods
def test_y_given_f_has_one_batch_entry_per_row(name):
    likelihood = LIKELIHOODS[name]()
    f = torch.randn(4, N, likelihood.num_functions(C))
    y = scenarios.targets(likelihood, N, C)
    distribution = likelihood.distribution(f)
    assert distribution.batch_shape == (4, N)
    assert distribution.log_prob(y).shape == (4, N)
    assert distribution.sample().shape == (4, *y.shape)


@likelihoods
def test_log_prob_is_that_of_the_distribution_with_its_gradient(name):
    likelihood = LIKELIHOODS[name]()
    f = torch.randn(4, N, likelihood.num_functions(C), requires_grad=True)
    y = scenarios.targets(likelihood, N, C)
    own, expected = likelihood.log_prob(y, f), likelihood.distribution(f).log_prob(y)
    assert_close(own, expected)
    inputs = (f, *likelihood.parameters())
    weights = torch.randn(4, N)
    gradients = (torch.autograd.grad(rows, inputs, weights) for rows in (own, expected))
    for first, second in zip(*gradients, strict=True):
        assert_close(first, second)


@pytest.mark.parametrize("name", ["gaussian", "heteroscedastic", "poisson"])
@pytest.mark.parametrize("rank", [None, 2])
def test_expected_log_prob_equals_monte_carlo(name, rank):
    likelihood = LIKELIHOODS[name]()
    y, q = scenarios.targets(likelihood, N, C), moments(likelihood, rank)
    with torch.no_grad():
        draws = likelihood.distribution(sample_marginals(q, 40_000)).log_prob(y)
        assert agrees(draws, likelihood.expected_log_prob(y, q))
        assert_close(likelihood.expected_log_prob_bound(y, q), likelihood.expected_log_prob(y, q))
    assert likelihood.has_closed_form


@pytest.mark.parametrize("name", ["categorical", "bernoulli"])
def test_bound_is_below_monte_carlo_and_tight_without_variance(name):
    likelihood = LIKELIHOODS[name]()
    y, q = scenarios.targets(likelihood, N, C), moments(likelihood)
    draws = likelihood.distribution(sample_marginals(q, 10_000)).log_prob(y)
    above = likelihood.expected_log_prob_bound(y, q) - draws.mean(0)
    assert (above <= 4 * draws.std(0) / len(draws) ** 0.5).all()
    point = FunctionMoments(q.mean, torch.zeros_like(q.var))
    tight = likelihood.expected_log_prob_bound(y, point)
    assert_close(tight, likelihood.distribution(q.mean).log_prob(y))
    assert likelihood.has_bound


def test_bernoulli_bound_is_that_of_two_classes():
    y, q = torch.tensor([[1.0], [0.0]]), FunctionMoments(torch.randn(2, 1), torch.rand(2, 1))
    classes = FunctionMoments(*(torch.nn.functional.pad(part, (1, 0)) for part in q[:2]))
    assert_close(
        BernoulliLikelihood().expected_log_prob_bound(y, q),
        CategoricalLikelihood().expected_log_prob_bound(y[:, 0].long(), classes),
    )


def test_heteroscedastic_noise_starts_at_its_scale():
    likelihood = HeteroscedasticLikelihood(torch.tensor([0.3, 0.9]))
    scale = likelihood.distribution(torch.zeros(4, 4)).base_dist.scale
    assert_close(scale, torch.tensor([0.3, 0.9]).expand(4, 2))


def test_heteroscedastic_functions_are_means_then_log_variances():
    f = torch.tensor([[1.0, 2.0, 0.0, math.log(4.0)]])
    base = HeteroscedasticLikelihood(1.0).distribution(f).base_dist
    assert_close(base.loc, torch.tensor([[1.0, 2.0]]))
    assert_close(base.scale, torch.tensor([[1.0, 2.0]]))


@pytest.mark.parametrize(
    "kind", [GaussianLikelihood, HeteroscedasticLikelihood, StudentTLikelihood]
)
@pytest.mark.parametrize("learn", [True, False])
def test_noise_is_a_parameter_only_if_it_is_learned(kind, learn):
    likelihood = kind(noise_scale=0.3, learn=learn)
    assert len(list(likelihood.parameters())) == int(learn)
    assert_close(likelihood.noise.log_scale.exp().detach(), torch.tensor(0.3))
    assert "noise.log_scale" in likelihood.state_dict()


def test_the_given_noise_is_copied():
    scale = torch.tensor([0.3, 0.9])
    likelihood = GaussianLikelihood(scale, learn=False)
    scale.zero_()
    assert_close(likelihood.noise_scale, torch.tensor([0.3, 0.9]))


def test_student_t_with_many_degrees_of_freedom_is_gaussian():
    f, y = torch.randn(N, C), torch.randn(N, C)
    heavy = StudentTLikelihood(1e8, 0.5).distribution(f).log_prob(y)
    assert_close(heavy, GaussianLikelihood(0.5).distribution(f).log_prob(y), rtol=1e-5, atol=1e-5)


# Expected derivatives


def derivatives_at(likelihood, y, f):
    """d log p / d f and d^2 log p / d f^2 by each function at draws of f, `(S, N, F)` each."""
    f = f.detach().requires_grad_()
    (first,) = torch.autograd.grad(
        likelihood.distribution(f).log_prob(y).sum(), f, create_graph=True
    )
    columns = [
        torch.autograd.grad(first[..., c].sum(), f, retain_graph=True)[0][..., c]
        for c in range(f.shape[-1])
    ]
    return first.detach(), torch.stack(columns, -1)


# The longest Newton step of one datum, by kind of function.
LONGEST = {"heteroscedastic": [math.inf, 4], "poisson": [4], "categorical": [32], "bernoulli": [32]}


def least_curvature(name, gradient):
    """|gradient| over the longest step of each function, like the gradient."""
    longest = torch.tensor([float(value) for value in LONGEST.get(name, [math.inf])])
    return gradient.abs() / longest.repeat_interleave(gradient.shape[-1] // len(longest))


@likelihoods
@pytest.mark.parametrize("rank", [None, 2])
def test_expected_derivatives_equal_monte_carlo(name, rank):
    likelihood = LIKELIHOODS[name]()
    y, q = scenarios.targets(likelihood, N, C), moments(likelihood, rank)
    first, second = derivatives_at(likelihood, y, sample_marginals(q, 20_000))
    with torch.no_grad():
        gradient, curvature = likelihood.expected_derivatives(y, q, num_samples=40_000)
    error = math.sqrt(2) if name == "categorical" else 1.0  # the others are exact
    assert agrees(gradient + (first - gradient) / error, gradient)
    if name == "student_t":  # its curvature is a surrogate
        return
    is_bound = curvature <= (1 + 1e-9) * least_curvature(name, gradient)
    assert (~is_bound).float().mean() > 0.5
    assert agrees((curvature + (-second - curvature) / error)[:, ~is_bound], curvature[~is_bound])


@pytest.mark.parametrize("name", ["gaussian", "heteroscedastic", "poisson"])
@pytest.mark.parametrize("rank", [None, 2])
def test_expected_derivatives_are_those_of_the_expectation_by_the_moments(name, rank):
    likelihood = LIKELIHOODS[name]()
    y, q = scenarios.targets(likelihood, N, C), moments(likelihood, rank)
    mean, var = q.mean.requires_grad_(), q.var.requires_grad_()
    total = likelihood.expected_log_prob(y, q._replace(mean=mean, var=var)).sum()
    by_mean, by_var = torch.autograd.grad(total, (mean, var))
    gradient, curvature = likelihood.expected_derivatives(y, q)
    assert_close(gradient, by_mean)  # Bonnet's theorem
    least = least_curvature(name, gradient)
    assert_close(curvature, torch.maximum(-2 * by_var, least))  # Price's theorem


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_bernoulli_derivatives_equal_the_integral(scale):
    mean = torch.linspace(-6.0, 6.0, 7).unsqueeze(-1)
    q = FunctionMoments(mean, torch.full_like(mean, scale**2))
    t = torch.linspace(-10.0, 10.0, 20_001)
    density = torch.exp(-0.5 * t.square()) / math.sqrt(2 * math.pi)
    p = (mean + scale * t).sigmoid()
    integrals = [torch.trapezoid(value * density, t) for value in (p, p * (1 - p))]
    gradient, curvature = BernoulliLikelihood().expected_derivatives(torch.ones(7, 1), q)
    assert_close(gradient[:, 0], 1 - integrals[0], rtol=0, atol=2e-8)
    is_exact = curvature > 1.001 * gradient.abs() / 32
    assert is_exact.sum() >= 4
    assert_close(curvature[is_exact], integrals[1].unsqueeze(-1)[is_exact], rtol=0, atol=2e-8)


@pytest.mark.parametrize("noise_scale", [1e-3, 0.5, 30.0])
@pytest.mark.parametrize("df", [1.5, 4.0, 30.0])
def test_student_t_gradient_equals_the_integral(df, noise_scale):
    y = torch.tensor([[-40.0], [-0.3], [0.0], [1e-3], [2.0], [1e4]])
    q = FunctionMoments(torch.full_like(y, 0.2), torch.full_like(y, 0.8**2))
    gradient = StudentTLikelihood(df, noise_scale).expected_derivatives(y, q).gradient
    f = torch.cat([y, q.mean]) + 12 * torch.sinh(torch.linspace(-14.0, 14.0, 30_001)) / 6e5
    f = f.flatten().sort().values  # dense at y and at the mean
    r = y - f
    values = (df + 1) * r / (df * noise_scale**2 + r.square())
    density = torch.distributions.Normal(0.2, 0.8).log_prob(f).exp()
    assert_close(gradient[:, 0], torch.trapezoid(values * density, f), rtol=1e-5, atol=1e-8)


def test_student_t_curvature_is_the_fisher_information_on_average():
    df, noise_scale = 5.0, 0.7
    likelihood = StudentTLikelihood(df, noise_scale)
    y = likelihood.distribution(torch.zeros(20_000, 1)).sample()
    q = FunctionMoments(torch.zeros_like(y), torch.full_like(y, 1e-12))
    curvature = likelihood.expected_derivatives(y, q).curvature
    assert agrees(curvature, (df + 1) / (df + 3) / noise_scale**2)
    _, second = derivatives_at(likelihood, y, torch.zeros_like(y))
    assert agrees(-second, (df + 1) / (df + 3) / noise_scale**2)


class LaplaceNoise(Likelihood):
    """A likelihood of a user, with a kink: its second derivative is zero almost everywhere."""

    def distribution(self, f):
        return dist.Laplace(f, 0.5).to_event(1)


class OwnGaussian(Likelihood):
    """A likelihood of a user whose derivatives are known."""

    def distribution(self, f):
        return dist.Normal(f, torch.tensor([0.5, 1.0, 2.0])).to_event(1)


def test_a_likelihood_of_a_user_gets_its_derivatives_from_draws():
    y, q = torch.randn(N, C), moments(OwnGaussian())
    known = GaussianLikelihood(torch.tensor([0.5, 1.0, 2.0])).expected_derivatives(y, q)
    assert_close(OwnGaussian().expected_derivatives(y, q, num_samples=2), known)


def test_derivatives_from_draws_see_kinks():
    q = moments(LaplaceNoise())
    y = q.mean + 0.3 * torch.randn(N, C)
    calls = [LaplaceNoise().expected_derivatives(y, q, num_samples=1000) for _ in range(100)]
    gradient, curvature = (torch.stack(part) for part in zip(*calls, strict=True))
    at_y = torch.distributions.Normal(q.mean, q.var.sqrt())
    assert agrees(gradient, 2 * (2 * at_y.cdf(y) - 1))
    assert agrees(curvature, 4 * at_y.log_prob(y).exp())


def test_derivatives_from_draws_see_slopes_without_variance():
    y, q = torch.randn(N, C), moments(OwnGaussian())
    q = q._replace(var=torch.zeros_like(q.var))
    curvature = OwnGaussian().expected_derivatives(y, q).curvature
    expected = torch.tensor([4.0, 1.0, 0.25]).expand(N, C)
    assert_close(curvature, expected, rtol=1e-4, atol=0)


@likelihoods
def test_curvature_is_not_negative_and_steps_are_bounded(name):
    likelihood = LIKELIHOODS[name]()
    y, q = scenarios.targets(likelihood, N, C), moments(likelihood)
    far = FunctionMoments(30 * q.mean, 10 * q.var)
    gradient, curvature = likelihood.expected_derivatives(y, far)
    assert (curvature >= 0).all()
    assert (curvature >= (1 - 1e-12) * least_curvature(name, gradient)).all()


@pytest.mark.parametrize("name", ["categorical", "heteroscedastic"])
def test_coupling_bounds_the_second_derivatives_by_their_diagonal(name):
    likelihood = LIKELIHOODS[name]()
    f = 2 * torch.randn(50, likelihood.num_functions(C))
    y = scenarios.targets(likelihood, 50, C)
    for n in range(50):
        hessian = torch.autograd.functional.hessian(
            lambda row, n=n: -likelihood.distribution(row).log_prob(y[n : n + 1]).sum(),
            f[n : n + 1],
        ).reshape(f.shape[-1], -1)
        excess = likelihood.coupling * torch.diag(hessian.diagonal()) - hessian
        assert torch.linalg.eigvalsh(excess).min() > -1e-9


# Targets


@pytest.mark.parametrize("name", [name for name in LIKELIHOODS if name != "categorical"])
def test_a_vector_is_read_as_one_output(name):
    likelihood = LIKELIHOODS[name]()
    y = scenarios.targets(likelihood, N, 1)
    assert_close(likelihood.check_targets(y[:, 0], 1), y)


@pytest.mark.parametrize("name", [name for name in LIKELIHOODS if name != "categorical"])
@pytest.mark.parametrize("shape", [(N,), (N, 2), (N, C, 1), (C, N)])
def test_targets_of_another_shape_are_named(name, shape):
    with pytest.raises(
        ValueError, match=r"`y` must have shape \(N, 3\), one column per output; got"
    ):
        LIKELIHOODS[name]().check_targets(torch.ones(shape), C)


@pytest.mark.parametrize("name", ["bernoulli", "poisson"])
def test_counts_may_be_integers(name):
    y = LIKELIHOODS[name]().check_targets(torch.ones(N, C, dtype=torch.int64), C)
    assert y.dtype == torch.float64


@pytest.mark.parametrize("name", ["gaussian", "heteroscedastic", "student_t"])
def test_integer_targets_of_a_regression_are_refused(name):
    with pytest.raises(TypeError, match="`y` must have a floating dtype"):
        LIKELIHOODS[name]().check_targets(torch.ones(N, C, dtype=torch.int64), C)


def test_labels_must_be_integers_in_one_column():
    likelihood = CategoricalLikelihood()
    with pytest.raises(TypeError, match=r"integer dtype; got torch.float64\. Use `y.long\(\)`"):
        likelihood.check_targets(torch.zeros(N), C)
    with pytest.raises(ValueError, match=r"shape \(N,\), one label per row; got \(5, 1\)"):
        likelihood.check_targets(torch.zeros(N, 1, dtype=torch.int64), C)
    assert likelihood.check_targets(torch.zeros(N, dtype=torch.uint8), C).dtype == torch.int64


@pytest.mark.parametrize(
    ("likelihood", "y", "message"),
    [
        (CategoricalLikelihood(), torch.tensor([0, 3]), r"between 0 and 2; got values from 0 to 3"),
        (CategoricalLikelihood(), torch.tensor([-1, 0]), "Labels count from 0"),
        (BernoulliLikelihood(), torch.tensor([[0.5]]), "zeros and ones only"),
        (PoissonLikelihood(), torch.tensor([[-1.0]]), "Counts are not negative"),
        (PoissonLikelihood(), torch.tensor([[1.5]]), "whole numbers"),
        (GaussianLikelihood(), torch.tensor([[math.nan]]), "`y` must be finite; got 1 NaN"),
        (StudentTLikelihood(), torch.tensor([[math.inf]]), "1 infinite"),
    ],
)
def test_values_outside_the_support_are_named(likelihood, y, message):
    with pytest.raises(ValueError, match=message):
        likelihood.check_values(y, C)


@likelihoods
def test_values_in_the_support_pass(name):
    likelihood = LIKELIHOODS[name]()
    likelihood.check_values(scenarios.targets(likelihood, N, C), C)


@pytest.mark.parametrize("noise_scale", [0.0, -1.0, math.nan])
def test_noise_must_be_positive(noise_scale):
    with pytest.raises(ValueError, match="`noise_scale` must be positive"):
        GaussianLikelihood(noise_scale)


def test_noise_must_be_one_number_or_one_per_output():
    with pytest.raises(ValueError, match=r"a number or one per output, \(C,\); got shape \(2, 2\)"):
        GaussianLikelihood(torch.ones(2, 2))


def test_degrees_of_freedom_must_be_positive():
    with pytest.raises(ValueError, match="`df` must be positive"):
        StudentTLikelihood(df=0.0)


# Predictive densities where p(y | f) is much narrower than q(f), against a fine grid over f


def grid_log_prob(likelihood, y, mean, var, num_nodes=400_001):
    f = mean + var**0.5 * torch.linspace(-12, 12, num_nodes)
    log_q = torch.distributions.Normal(mean, var**0.5).log_prob(f)
    log_p = likelihood.distribution(f.unsqueeze(-1)).log_prob(torch.tensor([y]))
    return torch.logsumexp(log_q + log_p, 0) + math.log(24 * var**0.5 / (num_nodes - 1))


@pytest.mark.parametrize(("likelihood", "y", "mean", "var"), [
    (StudentTLikelihood(4.0, 0.1), 0.0, 0.0, 1.0),
    (StudentTLikelihood(4.0, 0.02), 0.2, 0.0, 1.0),
    (StudentTLikelihood(1.5, 0.5), 7.0, 0.0, 0.1),
    (StudentTLikelihood(30.0, 0.5), -1.0, 0.3, 0.5),
    (StudentTLikelihood(1e3, 0.5), 1.0, 0.3, 0.5),
    (StudentTLikelihood(1e6, 0.5), 1.0, 0.3, 0.5),
    (PoissonLikelihood(), 1000.0, 6.9, 0.25),
    (PoissonLikelihood(), 0.0, 3.0, 2.0),
    (PoissonLikelihood(), 40.0, -2.0, 1.0),
    (BernoulliLikelihood(), 1.0, -3.0, 100.0),
    (BernoulliLikelihood(), 0.0, 8.0, 0.5),
])  # fmt: skip
def test_predictive_log_prob_is_exact_for_sharp_likelihoods(likelihood, y, mean, var):
    moments = FunctionMoments(torch.tensor([[mean]]), torch.tensor([[var]]))
    ours = likelihood.predictive_log_prob(torch.tensor([[y]]), moments)
    assert_close(ours.item(), grid_log_prob(likelihood, y, mean, var).item(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("mean", "var"), [(0.3, 1e-9), (0.3, 0.7), (-900.0, 800.0), (200.0, 0.0)])
def test_the_variance_of_a_rate_is_that_of_a_log_normal_at_any_scale(mean, var):
    moments = FunctionMoments(torch.tensor([[mean]]), torch.tensor([[var]]))
    found = PoissonLikelihood().predictive_moments(moments)[1].item()
    with mpmath.workdps(20):
        m, v = mpmath.mpf(mean), mpmath.mpf(var)
        expected = float(mpmath.expm1(v) * mpmath.exp(2 * m + v))
    assert found == pytest.approx(expected, rel=1e-12, abs=0)
