"""Densities of draws are those of the Pyro model."""

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch.testing import assert_close

from pyro_dak import HorseshoePrior, StudentTPrior
from pyro_dak.inference.densities import (
    cached_inputs,
    checked_data,
    draw_functions,
    log_joint,
    log_likelihood,
    log_prior,
)
from pyro_dak.inference.draws import draw_posterior
from tests import scenarios

likelihoods = pytest.mark.parametrize("likelihood", scenarios.LIKELIHOODS)


def of(case, num_samples=5):
    return draw_posterior(case.model, case.guide, num_samples=num_samples)


def one(flat, s):
    return {name: value[s] for name, value in flat.items()}


@likelihoods
def test_log_likelihood_equals_a_naive_loop(likelihood):
    case = scenarios.make(likelihood, linear_term=True)
    flat = of(case).flat()
    result = log_likelihood(case.model, case.h.detach(), case.y, flat)
    for s in range(5):
        f = case.model.functions(case.h, one(flat, s))
        for n in range(len(case.x)):
            p = case.model.likelihood.distribution(f[n])
            assert_close(result[s, n], p.log_prob(case.y[n]).detach())


@likelihoods
@pytest.mark.parametrize(
    "prior", [None, {"z": StudentTPrior(3.0), "shrinkage": HorseshoePrior(0.5)}]
)
def test_log_joint_is_that_of_the_pyro_model(likelihood, prior):
    case = scenarios.make(likelihood, prior=prior)
    flat, h = of(case).flat(), case.h.detach()
    result = log_joint(case.model, h, case.y, flat)
    for s in range(5):
        conditioned = poutine.condition(case.model.observe, one(flat, s))
        trace = poutine.trace(conditioned).get_trace(h, case.y)
        assert_close(result[s], trace.log_prob_sum().detach())
        trace = poutine.trace(conditioned).get_trace(h)
        prior_sum = sum(trace.nodes[name]["fn"].log_prob(flat[name][s]) for name in flat)
        assert_close(log_prior(case.model, flat)[s], prior_sum.detach())


def test_sampled_scales_replace_those_of_the_model():
    case = scenarios.gaussian_regression(num_outputs=2)
    flat, h = of(case).flat(), case.h.detach()
    scales = {"unit_scale": torch.rand(5, 2) + 0.5, "noise_scale": torch.rand(5) + 0.5}
    f = draw_functions(case.model, h, flat | scales)
    result = log_likelihood(case.model, h, case.y, flat | scales)
    for s in range(5):
        with torch.no_grad():
            case.model.layer.log_unit_scale.copy_(scales["unit_scale"][s].log())
            expected = case.model.functions(h, one(flat, s))
        assert_close(f[s], expected)
        p = dist.Normal(expected, scales["noise_scale"][s]).to_event(1)
        assert_close(result[s], p.log_prob(case.y))


def test_single_precision_models_are_judged_in_double():
    torch.set_default_dtype(torch.float32)
    case = scenarios.make(guide="unit_block")
    h = cached_inputs(case.model, case.x)
    draws = of(case)
    _, y = checked_data(case.model, case.x, case.y)
    assert {value.dtype for value in draws.sites.values()} == {torch.float64}
    assert h.dtype == y.dtype == log_joint(case.model, h, y, draws.flat()).dtype == torch.float64


def test_cached_inputs_are_those_of_eval_mode_and_leave_the_mode():
    case = scenarios.make(num_rows=20)
    expected = case.h.detach()
    case.model.train()
    assert_close(cached_inputs(case.model, case.x, chunk_size=7), expected)
    assert case.model.training


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.tensor([[float("nan")]] * 8), "`y` must be finite"),
        (torch.zeros(7, 1), "same, positive length; got 8, 7"),
        (torch.zeros(0, 1), "same, positive length; got 8, 0"),
    ],
)
def test_bad_targets_are_refused(y, message):
    case = scenarios.make(num_outputs=1)
    with pytest.raises(ValueError, match=message):
        checked_data(case.model, case.x, y)
