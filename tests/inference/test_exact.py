import math

import pyro.distributions as dist
import pytest
import torch
from torch.testing import assert_close

import models
from pyro_dak import (
    DAK,
    ClosedFormELBO,
    FullRankGuide,
    GammaScalePrior,
    GaussianLikelihood,
    HeteroscedasticLikelihood,
    LaplaceKernel,
    LaplacePrior,
    NormalPrior,
    exact_posterior,
)
from tests import reference, scenarios

# K = 1 + 2 * 3 = 7 weights, 9 with the linear term.
ROWS = {"fewer rows than weights": 5, "more rows than weights": 30}
rows = pytest.mark.parametrize("num_rows", ROWS.values(), ids=ROWS)
linear_terms = pytest.mark.parametrize("linear_term", [False, True])

PRIORS = {
    "standard": None,
    "normal": {"z": NormalPrior(0.3, 0.8), "mu": NormalPrior(-1.0, 2.0)},
    "one per element": {
        "z": dist.Normal(0.1, torch.linspace(0.5, 2.0, 3).double()).expand([2, 2, 3])
    },
}
priors = pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)


def regression(num_rows, **options):
    noise = GaussianLikelihood(torch.tensor([0.3, 0.8]))
    return scenarios.make(noise, num_outputs=2, num_rows=num_rows, **options)


def dense_prior(model):
    """Means and standard deviations of the weights, `(F, K)`, in the order of the design."""
    names = [name for name in ("mu", "linear", "z") if name in model.site_shapes]
    sites = [model.prior_distribution(name, torch.zeros(())) for name in names]
    loc = torch.cat([site.mean.reshape(2, -1) for site in sites], -1)
    return loc, torch.cat([site.stddev.reshape(2, -1) for site in sites], -1)


@rows
@linear_terms
@priors
def test_log_evidence_is_the_density_of_y_under_the_prior(num_rows, linear_term, prior):
    case = regression(num_rows, linear_term=linear_term, prior=prior)
    design, (loc, scale) = case.model.layer.design(case.h), dense_prior(case.model)
    expected = torch.zeros(())
    for c in range(2):
        noise = case.model.likelihood.noise_scale[c]
        cov = (design * scale[c].square()) @ design.mT + noise.square() * torch.eye(num_rows)
        y = torch.distributions.MultivariateNormal(design @ loc[c], cov)
        expected = expected + y.log_prob(case.y[:, c])
    assert case.exact().log_evidence == pytest.approx(expected.item(), rel=1e-9)


@rows
@linear_terms
@priors
def test_posterior_is_that_of_bayesian_linear_regression(num_rows, linear_term, prior):
    case = regression(num_rows, linear_term=linear_term, prior=prior)
    design, (loc, scale) = case.model.layer.design(case.h), dense_prior(case.model)
    guide = case.exact().guide
    for c in range(2):
        noise = case.model.likelihood.noise_scale[c]
        precision = torch.diag(scale[c] ** -2) + design.mT @ design / noise.square()
        shift = loc[c] / scale[c].square() + design.mT @ case.y[:, c] / noise.square()
        cov = torch.linalg.inv(precision)
        tril = guide.scale_tril[c]
        assert_close(guide.loc[c], cov @ shift)
        assert_close(tril @ tril.mT, cov)


@rows
@linear_terms
@priors
def test_elbo_at_the_exact_posterior_is_the_log_evidence(num_rows, linear_term, prior):
    case = regression(num_rows, linear_term=linear_term, prior=prior)
    guide, log_evidence = case.exact()
    elbo = ClosedFormELBO().terms(case.model, guide, case.x, case.y).elbo.item()
    assert elbo == pytest.approx(log_evidence, rel=1e-8)


@rows
def test_any_other_guide_has_a_lower_elbo(num_rows):
    case = regression(num_rows)
    guide, log_evidence = case.exact()
    for parameter in guide.parameters():
        with torch.no_grad():
            parameter += 1e-3 * torch.randn_like(parameter)
    assert ClosedFormELBO().terms(case.model, guide, case.x, case.y).elbo.item() < log_evidence


@rows
@pytest.mark.parametrize("chunk_size", [1, 4])
def test_chunks_of_rows_leave_the_posterior_unchanged(num_rows, chunk_size):
    case = regression(num_rows)
    chunked = exact_posterior(case.model, case.x, case.y, chunk_size=chunk_size)
    whole = case.exact()
    assert chunked.log_evidence == pytest.approx(whole.log_evidence, rel=1e-12)
    assert_close(chunked.guide.state_dict(), whole.guide.state_dict())


def test_evidence_of_one_more_row_is_its_predictive_density():
    case = regression(8)
    whole = case.exact().log_evidence
    guide, log_evidence = exact_posterior(case.model, case.x[:7], case.y[:7])
    mean, var, _ = guide.moments(case.model.layer, case.h[7:])
    scale = (var + case.model.likelihood.noise_scale.square()).sqrt()
    last = torch.distributions.Normal(mean, scale).log_prob(case.y[7:]).sum()
    assert whole == pytest.approx(log_evidence + last.item(), rel=1e-10)


# Rows that come and go


@priors
@pytest.mark.parametrize("sizes", [[15, 15], [29, 1], [1, 2, 27]])
def test_rows_that_come_later_give_the_posterior_of_all_rows(prior, sizes):
    case = regression(30, linear_term=True, prior=prior)
    parts = [*zip(case.x.split(sizes), case.y.split(sizes), strict=True)]
    posterior = exact_posterior(case.model, *parts[0])
    for x, y in parts[1:]:
        posterior = posterior.update(case.model, x, y)
    whole = case.exact()
    assert posterior.log_evidence == pytest.approx(whole.log_evidence, rel=1e-10)
    assert_close(posterior.guide.loc, whole.guide.loc, rtol=1e-8, atol=1e-8)
    assert_close(posterior.guide.scale_tril, whole.guide.scale_tril, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("residual_variance", [False, True])
def test_rows_taken_out_leave_the_posterior_of_the_others(residual_variance):
    case = regression(30, linear_term=True)
    options = {"residual_variance": residual_variance}
    whole = exact_posterior(case.model, case.x, case.y, **options)
    left = whole.downdate(case.model, case.x[:10], case.y[:10], **options)
    expected = exact_posterior(case.model, case.x[10:], case.y[10:], **options)
    assert left.log_evidence == pytest.approx(expected.log_evidence, rel=1e-8)
    assert_close(left.guide.loc, expected.guide.loc, rtol=1e-8, atol=1e-8)
    assert_close(left.guide.scale_tril, expected.guide.scale_tril, rtol=1e-8, atol=1e-8)
    again = left.update(case.model, case.x[:10], case.y[:10], **options)
    assert again.log_evidence == pytest.approx(whole.log_evidence, rel=1e-8)


def test_rows_that_are_not_there_cannot_be_taken_out():
    case = regression(30)
    posterior = exact_posterior(case.model, case.x[:15], case.y[:15])
    with pytest.raises(ValueError, match="must be rows that the posterior knows"):
        posterior.downdate(case.model, case.x[15:], case.y[15:])


@priors
def test_forgotten_rows_count_less(prior):
    case = regression(30, prior=prior)
    first = exact_posterior(case.model, case.x[:20], case.y[:20])
    guide = first.update(case.model, case.x[20:], case.y[20:], forget=0.5).guide
    design, (loc, scale) = case.model.layer.design(case.h), dense_prior(case.model)
    for c in range(2):
        weights = torch.tensor([0.5, 1.0]).repeat_interleave(torch.tensor([20, 10]))
        weights = weights / case.model.likelihood.noise_scale[c].square()
        precision = torch.diag(scale[c] ** -2) + (design.mT * weights) @ design
        shift = loc[c] / scale[c].square() + design.mT @ (weights * case.y[:, c])
        assert_close(guide.loc[c], torch.linalg.solve(precision, shift))
        tril = guide.scale_tril[c]
        assert_close(tril @ tril.mT, torch.linalg.inv(precision))


@pytest.mark.parametrize("forget", [0.0, 1.1])
def test_forget_is_a_share(forget):
    case = regression(5)
    with pytest.raises(ValueError, match="`forget` must be above 0 and at most 1"):
        case.exact().update(case.model, case.x, case.y, forget=forget)


# Gaussian processes


def additive_gp(x, y, x_new, noise_scale):
    """Mean and variance at x_new by the level-10 DAK with its residual, and by the exact GP."""
    input_dim = x.shape[-1]
    model = models.build(
        "additive_gp",
        input_dim,
        bounds=(0.0, 1.0),
        level=10,
        kernel=LaplaceKernel(1.0),
        likelihood=GaussianLikelihood(noise_scale),
        prior={"mu": NormalPrior(scale=1.5)},
    )
    with torch.no_grad():
        model.layer.log_unit_scale += 0.3 * torch.randn(input_dim)
        guide = exact_posterior(model, x, y, residual_variance=True).guide
        mean, var, _ = guide.moments(model.layer, x_new)
        var = var + model.residual_variance(x_new)
        scale = model.unit_scale
        expected = reference.additive_gp_posterior(x, y, x_new, 1.0, scale, 1.5, noise_scale)
    return mean.squeeze(-1), var.squeeze(-1), *expected


def gp_data(input_dim):
    x, x_new = torch.rand(40, input_dim), 1.2 * torch.rand(25, input_dim) - 0.1
    return x, torch.sin(6 * x).sum(-1) + 0.5 * torch.randn(40), x_new


@pytest.mark.parametrize("noise_scale", [0.1, 0.3])
@pytest.mark.parametrize("input_dim", [1, 3])
def test_fine_grid_equals_exact_gp_regression(input_dim, noise_scale):
    # Each input between two nodes of its own: what the grid loses is then independent, and exact.
    cells = torch.stack([torch.randperm(1024)[:65] for _ in range(input_dim)], -1)
    inputs = (cells + torch.rand(65, input_dim)) / 1024
    x, x_new = inputs[:40], inputs[40:]
    y = torch.sin(6 * x).sum(-1) + noise_scale * torch.randn(40)
    mean, var, expected_mean, expected_var = additive_gp(x, y, x_new, noise_scale)
    assert_close(mean, expected_mean, rtol=1e-8, atol=1e-8)
    assert_close(var, expected_var, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("input_dim", [1, 3])
def test_fine_grid_is_close_to_exact_gp_regression_for_any_inputs(input_dim):
    # Inputs between the same two nodes share what the grid loses there; the rest agrees.
    x, y, x_new = gp_data(input_dim)
    mean, var, expected_mean, expected_var = additive_gp(x, y, x_new, noise_scale=0.3)
    for ours, exact in ((mean, expected_mean), (var, expected_var)):
        assert torch.linalg.norm(ours - exact) < 2e-3 * torch.linalg.norm(exact)
        assert ((ours - exact).abs() < 1e-3 * exact.abs()).double().mean() > 0.9


def test_residual_variance_counts_as_noise_of_its_row():
    case = regression(30)
    lost = case.model.residual_variance(case.h).detach()
    noise_var = case.model.likelihood.noise_scale.square().expand(case.y.shape[-1])
    design = case.model.layer.design(case.h).detach()
    expected = 0.0
    for c in range(case.y.shape[-1]):
        cov = design @ design.mT + torch.diag(noise_var[c].detach() + lost[:, 0])
        normal = torch.distributions.MultivariateNormal(torch.zeros(30), cov)
        expected += normal.log_prob(case.y[:, c]).item()
    posterior = exact_posterior(case.model, case.x, case.y, residual_variance=True)
    assert posterior.log_evidence == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("input_dim", [1, 3])
def test_grid_with_all_data_on_nodes_is_exact_gp_regression_anywhere(input_dim):
    x, y, x_new = gp_data(input_dim)
    x = (x * 1024).round().clamp(1, 1023) / 1024
    mean, var, expected_mean, expected_var = additive_gp(x, y, x_new, noise_scale=0.05)
    assert_close(mean, expected_mean, rtol=1e-8, atol=1e-8)
    assert_close(var, expected_var, rtol=1e-8, atol=1e-8)


def test_posterior_of_weights_is_seen_in_draws_of_the_guide():
    case = regression(30)
    guide = case.exact().guide
    values = scenarios.weight_draws(guide, 4000)
    assert scenarios.agrees(values["mu"].squeeze(1).detach(), guide.loc[:, 0])


@pytest.mark.parametrize("is_training", [True, False])
def test_mode_and_statistics_of_the_model_are_left_as_they_were(is_training):
    case = regression(30)
    case.model.train(is_training)
    before = {name: value.clone() for name, value in case.model.state_dict().items()}
    case.exact()
    assert case.model.training == is_training
    assert_close(case.model.state_dict(), before, rtol=0, atol=0)


@rows
def test_single_precision_is_solved_in_double(num_rows):
    case = regression(num_rows)
    expected = case.exact()
    case.model.float()
    single = exact_posterior(case.model, case.x.float(), case.y.float())
    assert single.guide.loc.dtype == torch.float32
    assert single.log_evidence == pytest.approx(expected.log_evidence, rel=1e-4)
    assert_close(single.guide.loc.double(), expected.guide.loc, rtol=1e-3, atol=1e-3)


def test_the_guide_can_be_trained_on():
    case = regression(30)
    guide = case.exact().guide
    assert isinstance(guide, FullRankGuide)
    ClosedFormELBO()(case.model, guide)(case.x, case.y).backward()
    assert_close(guide.loc.grad, torch.zeros_like(guide.loc), rtol=0, atol=1e-8)


@pytest.mark.parametrize("noise_scale", [1e-4, 1e-2, 10.0])
@pytest.mark.parametrize("num_rows", [20, 200])
def test_elbo_is_close_to_the_evidence_whatever_the_noise(noise_scale, num_rows):
    case = scenarios.make(GaussianLikelihood(noise_scale), num_rows=num_rows, level=5)
    guide, log_evidence = case.exact()
    elbo = ClosedFormELBO().terms(case.model, guide, case.x, case.y).elbo.item()
    assert elbo == pytest.approx(log_evidence, rel=1e-6)


# Errors


@pytest.mark.parametrize("num_rows", [20, 200])
def test_noise_too_small_for_double_precision_is_named(num_rows):
    case = scenarios.make(GaussianLikelihood(1e-9), num_rows=num_rows, level=5)
    with pytest.raises(ValueError, match="`noise_scale`=1e-09 is too small against the scale of f"):
        case.exact()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"likelihood": HeteroscedasticLikelihood()}, "needs GaussianLikelihood; got Hetero"),
        ({"prior": {"z": LaplacePrior()}}, "needs normal priors; site `z` has LaplacePrior"),
        ({"prior": {"shrinkage": GammaScalePrior()}}, "a prior on `shrinkage` breaks it"),
    ],
)
def test_models_whose_posterior_is_not_gaussian_are_refused(options, message):
    model = DAK(torch.nn.Identity(), 2, num_units=2, level=2, **options)
    with pytest.raises(NotImplementedError, match=message):
        exact_posterior(model, torch.randn(4, 2), torch.randn(4))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.zeros(4, 2), torch.zeros(3), "the same, positive length; got 4, 3"),
        (torch.zeros(0, 2), torch.zeros(0), "the same, positive length; got 0, 0"),
        (torch.full((1, 2), math.nan), torch.zeros(1), "`x` must be finite"),
        (torch.zeros(1, 2), torch.full((1,), math.inf), "`y` must be finite"),
        (torch.zeros(4, 2), torch.zeros(4, 2), r"`y` must have shape \(N, 1\)"),
    ],
)
def test_wrong_data_are_named(x, y, message):
    model = DAK(torch.nn.Identity(), 2, num_units=2, level=2)
    with pytest.raises(ValueError, match=message):
        exact_posterior(model, x.double(), y.double())


def test_inputs_of_another_dtype_are_named():
    model = DAK(torch.nn.Identity(), 2, num_units=2, level=2)
    for x, message in [
        (torch.zeros(4, 2).float(), r"dtype of the model, torch\.float64; got torch\.float32"),
        (torch.zeros(4, 2).long(), "must return floating features; got torch.int64"),
    ]:
        with pytest.raises(TypeError, match=message):
            exact_posterior(model, x, torch.zeros(4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@rows
def test_posterior_on_the_gpu_equals_that_on_the_cpu(num_rows):
    case = regression(num_rows)
    expected = case.exact()
    case.model.cuda()
    case.x, case.y = case.x.cuda(), case.y.cuda()
    found = case.exact()
    assert found.log_evidence == pytest.approx(expected.log_evidence, rel=1e-9)
    assert_close(found.guide.loc.cpu(), expected.guide.loc)
