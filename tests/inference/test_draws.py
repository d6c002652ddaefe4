"""Draws of posteriors, and the density of a guide at its draws."""

import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide import AutoDelta, AutoLowRankMultivariateNormal, AutoNormal
from torch.testing import assert_close

from pyro_dak import HorseshoePrior
from pyro_dak.inference.draws import Draws, draw_posterior, site_labels
from tests import scenarios

guides = pytest.mark.parametrize("guide", scenarios.GUIDES)


def of(case, num_samples=5, **options):
    return draw_posterior(case.model, case.guide, num_samples=num_samples, **options)


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


def test_a_guide_that_was_set_up_without_targets_has_draws_of_the_weights():
    case = scenarios.make()
    guide = AutoNormal(case.model)
    guide(case.x)
    draws = draw_posterior(case.model, guide, num_samples=4, x=case.x)
    assert set(draws.sites) == {"mu", "z"}
    assert draws.log_q is None  # it is a density of the targets too


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
    with pytest.raises(ValueError, match=r"`guide` must have the sites of the model, .*linear"):
        draw_posterior(other, case.guide)


@pytest.mark.usefixtures("no_type_checker")
def test_what_is_no_posterior_is_refused():
    with pytest.raises(TypeError, match="`posterior` must be a guide"):
        draw_posterior(scenarios.make().model, 3)


def test_labels_name_every_element():
    model = scenarios.make(prior={"shrinkage": HorseshoePrior()}).model
    labels = site_labels(model)
    assert len(labels) == sum(shape.numel() for shape in model.site_shapes.values())
    assert labels[:3] == ["mu[0]", "mu[1]", "z[0,0,0]"]
    assert "global_shrinkage" in labels


def test_chains_lie_in_a_row():
    draws = Draws({"mu": torch.arange(6.0).reshape(2, 3, 1)})
    assert draws.flat()["mu"].flatten().tolist() == [0, 1, 2, 3, 4, 5]
