import math

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
