"""Moments of posteriors: of the weights, and of the predictions."""

import pytest
import torch
from torch.testing import assert_close

from pyro_dak.diagnostics.posterior_moments import gaussian_fit, response
from pyro_dak.inference.densities import cached_inputs, draw_functions, predictive_draws
from pyro_dak.inference.draws import draw_posterior
from tests import scenarios


def of(case, num_samples=5):
    return draw_posterior(case.model, case.guide, num_samples=num_samples)


@pytest.mark.parametrize("guide", scenarios.GUIDES)
@pytest.mark.parametrize("linear_term", [False, True])
def test_fit_of_a_gaussian_guide_is_that_of_its_draws(guide, linear_term):
    case = scenarios.make(guide=guide, linear_term=linear_term)
    fit = gaussian_fit(case.model, case.guide)
    draws = draw_posterior(case.model, case.guide, num_samples=10_000, seed=0)
    empirical = gaussian_fit(case.model, draws)
    z = (empirical.mean - fit.mean) / fit.sd * 100
    assert z.abs().max() < 4.5
    # The variance of an empirical covariance is (s_ii s_jj + s_ij^2) / n.
    var = fit.cov.diagonal()
    se = ((var * var.unsqueeze(-1) + fit.cov.square()) / 10_000).sqrt()
    assert ((empirical.cov - fit.cov).abs() < 5 * se).all()


@pytest.mark.parametrize("likelihood", scenarios.LIKELIHOODS)
def test_response_is_the_mean_over_draws_and_predictive_draws_have_its_moments(likelihood):
    case = scenarios.make(likelihood, num_rows=3)
    h = case.h.detach()
    draws = of(case, num_samples=20_000)
    y = predictive_draws(case.model, h, draws.flat())
    if likelihood == "categorical":
        y = torch.nn.functional.one_hot(y, case.model.num_outputs).double()
    assert scenarios.agrees(y, response(case.model, draws, h, draws).mean)
    if likelihood in ("gaussian", "categorical", "bernoulli"):  # light tails
        mean, sd, noise_var = response(case.model, draws, h, draws)
        assert scenarios.agrees((y - mean).square(), sd.square() + noise_var)


def test_response_in_chunks_equals_that_in_one(monkeypatch):
    case = scenarios.classification()
    draws, h = of(case, num_samples=50), case.h.detach()
    whole = response(case.model, draws, h, draws)
    monkeypatch.setattr("pyro_dak.inference.densities._CHUNK_ELEMENTS", 7 * len(h) * 3)
    for part, expected in zip(response(case.model, draws, h, draws), whole, strict=True):
        assert_close(part, expected)


def test_response_of_a_gaussian_guide_is_exact():
    case = scenarios.gaussian_regression()
    h = case.h.detach()
    mean, sd, noise_var = response(case.model, case.guide, h, of(case))
    draws = of(case, num_samples=20_000)
    f = draw_functions(case.model, h, draws.flat())
    assert scenarios.agrees(f, mean)
    assert scenarios.agrees((f - mean).square(), sd.square())
    assert_close(noise_var, torch.full_like(mean, 0.25))


def test_single_precision_models_have_moments_in_double():
    torch.set_default_dtype(torch.float32)
    case = scenarios.make(guide="unit_block")
    h = cached_inputs(case.model, case.x)
    assert response(case.model, case.guide, h, of(case)).mean.dtype == torch.float64
    assert gaussian_fit(case.model, case.guide).cov.dtype == torch.float64
