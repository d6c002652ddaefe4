"""Draws of posteriors and their densities."""

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide import AutoDelta, AutoLowRankMultivariateNormal, AutoNormal
from torch.testing import assert_close

from pyro_dak import HorseshoePrior, StudentTPrior
from pyro_dak.inference.densities import (
    cached_inputs,
    checked_data,
    draw_functions,
    log_joint,
    log_likelihood,
    log_prior,
    predictive_draws,
    response,
)
from pyro_dak.inference.draws import Draws, draw_posterior, site_labels
from tests import scenarios

likelihoods = pytest.mark.parametrize("likelihood", scenarios.LIKELIHOODS)
guides = pytest.mark.parametrize("guide", scenarios.GUIDES)


def of(case, num_samples=5, **options):
    return draw_posterior(case.model, case.guide, num_samples=num_samples, **options)


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


@guides
@pytest.mark.parametrize("num_outputs", [1, 2])
def test_log_q_is_the_joint_density_of_the_guide(guide, num_outputs):
    case = scenarios.make(guide=guide, num_outputs=num_outputs, linear_term=True)
    draws = of(case, num_samples=3, num_chains=2)
    flat = scenarios.flat(case.guide, draws.flat())
    expected = scenarios.joint(case.guide).log_prob(flat).reshape(2, 3)
    assert draws.log_q is not None
    assert_close(draws.log_q, expected)


@pytest.mark.parametrize("kind", [AutoNormal, AutoLowRankMultivariateNormal])
def test_log_q_of_an_autoguide_is_that_of_its_own_trace(kind):
    case = scenarios.make(prior={"shrinkage": HorseshoePrior()})
    guide = kind(case.model)
    guide(case.x, case.y)
    draws = draw_posterior(case.model, guide, num_samples=4, x=case.x, seed=3)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        trace = poutine.trace(guide).get_trace(case.x, case.y)
    assert set(draws.sites) == set(case.model.site_shapes)
    single = draw_posterior(case.model, guide, num_samples=1, x=case.x, seed=3)
    assert_close(single.sites["z"][0, 0], trace.nodes["z"]["value"].detach())
    assert_close(single.log_q.flatten(), trace.log_prob_sum().detach().reshape(1))


def test_draws_of_a_point_are_known_as_such():
    case = scenarios.make()
    guide = AutoDelta(case.model)
    guide(case.x, case.y)
    assert draw_posterior(case.model, guide, num_samples=3, x=case.x).is_point
    assert not of(case).is_point


def test_the_seed_fixes_the_draws_and_leaves_the_global_state():
    case = scenarios.make()
    before = torch.get_rng_state()
    first, second = of(case, seed=5), of(case, seed=5)
    assert torch.equal(first.sites["z"], second.sites["z"])
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(of(case).sites["z"], of(case).sites["z"])


def test_runs_of_pyro_and_dictionaries_are_read():
    case = scenarios.make(num_outputs=1)
    mcmc = MCMC(NUTS(case.model.observe), num_samples=6, warmup_steps=2, disable_progbar=True)
    mcmc.run(case.h.detach(), case.y)
    draws = draw_posterior(case.model, mcmc)
    assert (draws.num_chains, draws.num_samples) == (1, 6)
    flat = mcmc.get_samples()
    assert torch.equal(draw_posterior(case.model, flat).sites["z"], draws.sites["z"])
    trailing = {
        name: value.unsqueeze(1) for name, value in flat.items()
    }  # as Predictive gives them
    assert torch.equal(draw_posterior(case.model, trailing).sites["mu"], draws.sites["mu"])
    assert draw_posterior(case.model, draws) is draws


def test_samples_of_another_model_are_refused():
    case = scenarios.make()
    flat = of(case).flat()
    with pytest.raises(ValueError, match=r"every site of the model; \['z'\] are missing"):
        draw_posterior(case.model, {"mu": flat["mu"]})
    with pytest.raises(ValueError, match=r"`samples\['z'\]` must have shape \(draws, 2, 2, 3\)"):
        draw_posterior(case.model, flat | {"z": flat["z"][..., :2]})
    other = scenarios.make(linear_term=True).model
    with pytest.raises(ValueError, match="The guide has no site `linear`"):
        draw_posterior(other, case.guide)


@pytest.mark.usefixtures("no_type_checker")
def test_what_is_no_posterior_is_refused():
    with pytest.raises(TypeError, match="`posterior` must be a guide"):
        draw_posterior(scenarios.make().model, 3)


@likelihoods
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
    assert response(case.model, case.guide, h, draws).mean.dtype == torch.float64


def test_labels_name_every_element():
    model = scenarios.make(prior={"shrinkage": HorseshoePrior()}).model
    labels = site_labels(model)
    assert len(labels) == sum(shape.numel() for shape in model.site_shapes.values())
    assert labels[:3] == ["mu[0]", "mu[1]", "z[0,0,0]"]
    assert "global_shrinkage" in labels


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


def test_chains_lie_in_a_row():
    draws = Draws({"mu": torch.arange(6.0).reshape(2, 3, 1)})
    assert draws.flat()["mu"].flatten().tolist() == [0, 1, 2, 3, 4, 5]
