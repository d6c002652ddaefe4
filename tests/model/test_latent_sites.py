"""Closed forms refuse latent sites that they do not know; through Pyro these go on working."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroParam, PyroSample
from pyro.optim import Adam
from torch import nn
from torch.testing import assert_close

from pyro_dak import (
    DAK,
    ClosedFormELBO,
    GaussianLikelihood,
    LocalReparamELBO,
    MeanFieldGuide,
    NaturalGuide,
    components,
    exact_posterior,
    fit,
    predict,
    run_nuts,
    sample_functions,
    to_arviz,
)
from pyro_dak.diagnostics import compare_posteriors, k_hat, loo, summary
from pyro_dak.inference.draws import draw_sites
from pyro_dak.inference.mcmc.nuts import run_hmc
from pyro_dak.inference.natural import NaturalVI


class Shift(nn.Module):
    """A layer that samples its own bias."""

    def forward(self, x):
        return x + pyro.sample("shift", dist.Normal(0.0, 1.0))


class NoisePrior(GaussianLikelihood):
    """Noise with a prior, one for each row."""

    def distribution(self, f):
        scale = pyro.sample("noise", dist.LogNormal(torch.tensor(-1.0), 1.0))
        return dist.Normal(f, scale.unsqueeze(-1)).to_event(1)


def hierarchical(shape):
    """Weights with a common scale that has a prior itself."""
    tau = pyro.sample("tau", dist.LogNormal(torch.tensor(0.0), 1.0))
    return dist.Normal(torch.zeros(shape), tau.reshape(*tau.shape, 1, 1, 1)).to_event(3)


def make(kind):
    """A model with a site of its own, and data."""
    network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), Shift() if kind == "network" else nn.Tanh())
    likelihood = NoisePrior() if kind == "likelihood" else GaussianLikelihood(0.3)
    prior = {"z": hierarchical} if kind == "prior" else None
    model = DAK(network, 4, num_units=2, level=2, likelihood=likelihood, prior=prior)
    if kind == "embedding":
        model.embedding = PyroModule[nn.Linear](4, 2, bias=False)
        model.embedding.weight = PyroSample(dist.Normal(torch.zeros(2, 4), 1.0).to_event(2))
    x = torch.randn(12, 2)
    model(x)
    return model.eval(), x, torch.randn(12, 1)


SITES = {
    "embedding": "embedding.weight",
    "network": "shift",
    "likelihood": "noise",
    "prior": "tau",
}
QUICK = {"num_samples": 4, "warmup_steps": 2, "progress": False}


def svi_step(model, guide, x, y):
    pyro.clear_param_store()
    SVI(model, guide, Adam({"lr": 0.01}), ClosedFormELBO()).step(x, y)


# What needs the density of the model, by name.
DENSITIES = {
    "compare": lambda m, g, x, y: compare_posteriors(m, {"q": g}, x, y, num_samples=5),
    "elbo": lambda m, g, x, y: ClosedFormELBO().loss(m, g, x, y),
    "exact": lambda m, g, x, y: exact_posterior(m, x, y),
    "fit": lambda m, g, x, y: fit(m, g, (x, y), epochs=1, progress=False),
    "hmc": lambda m, g, x, y: run_hmc(m, x, y, **QUICK),
    "k_hat": lambda m, g, x, y: k_hat(m, g, x, y, num_samples=30),
    "local": lambda m, g, x, y: LocalReparamELBO().terms(m, g, x, y),
    "loo": lambda m, g, x, y: loo(m, g, x, y, num_samples=30),
    "natural": lambda m, g, x, y: NaturalVI(m, NaturalGuide(m)).step(x, y),
    "natural_update": lambda m, g, x, y: NaturalGuide(m).update(m, x, y),
    "nuts": lambda m, g, x, y: run_nuts(m, x, y, **QUICK),
    "summary": lambda m, g, x, y: summary(m, g, x, y, num_samples=30),
    "svi": svi_step,
    "to_arviz": lambda m, g, x, y: to_arviz(m, g, x, y, num_samples=5),
}
# What needs f, and what needs y, given a posterior of the weights.
FUNCTIONS = {
    "components": lambda m, g, x, y: components(m, g, x),
    "functions": lambda m, g, x, y: sample_functions(m, g, 3)(x),
}
PREDICTIONS = {"predict": lambda m, g, x, y: predict(m, g, x)}


@pytest.mark.parametrize("kind", SITES)
@pytest.mark.parametrize("name", DENSITIES)
def test_a_density_that_does_not_know_a_site_is_refused(kind, name):
    model, x, y = make(kind)
    with pytest.raises(NotImplementedError, match=rf"`{SITES[kind]}`.*Trace_ELBO"):
        DENSITIES[name](model, MeanFieldGuide(model), x, y)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *[(kind, name) for kind in ("embedding", "network") for name in FUNCTIONS | PREDICTIONS],
        ("likelihood", "predict"),
    ],
)
def test_a_prediction_that_does_not_know_a_site_is_refused(kind, name):
    model, x, y = make(kind)
    with pytest.raises(NotImplementedError, match=rf"`{SITES[kind]}`.*Predictive"):
        (FUNCTIONS | PREDICTIONS)[name](model, MeanFieldGuide(model), x, y)


def test_a_site_that_is_added_later_is_found():
    model, x, y = make("none")
    predict(model, MeanFieldGuide(model), x)
    model.feature_extractor[2] = Shift()
    with pytest.raises(NotImplementedError, match="`shift`"):
        predict(model, MeanFieldGuide(model), x)
    model, x, y = make("none")
    model.embedding = PyroModule[nn.Linear](4, 2, bias=False)
    exact_posterior(model, x, y)
    model.embedding.weight = PyroSample(dist.Normal(torch.zeros(2, 4), 1.0).to_event(2))
    with pytest.raises(NotImplementedError, match=r"`embedding\.weight`"):
        exact_posterior(model, x, y)


def test_weights_computed_from_others_are_no_sites():
    model, x, y = make("none")
    truth = exact_posterior(model, x, y).log_evidence
    weight = model.embedding.weight.detach()
    model.embedding = PyroModule[nn.Linear](4, 2, bias=False)
    model.embedding.weight = PyroSample(lambda self: weight)
    assert math.isclose(exact_posterior(model, x, y).log_evidence, truth)


@pytest.mark.parametrize("kind", SITES)
def test_sites_of_any_kind_train_and_predict_through_pyro(kind):
    model, x, y = make(kind)
    pyro.clear_param_store()
    guide = AutoNormal(model)
    svi = SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO())
    assert math.isfinite(svi.step(x, y))
    model.eval()
    assert Predictive(model, guide=guide, num_samples=3)(x)["y"].shape == (3, 12, 1)
    if kind != "likelihood":  # the shape of a site in the plate depends on the batch
        pyro.clear_param_store()
        fit(model, AutoNormal(model), (x, y), objective=Trace_ELBO(), epochs=1, progress=False)


def test_a_hierarchical_prior_is_predicted_with_by_the_draws_of_its_guide():
    model, x, y = make("prior")
    guide = AutoNormal(model, init_scale=0.3)
    fit(model, guide, (x, y), objective=Trace_ELBO(), epochs=2, progress=False)
    found = predict(model, guide, x, num_samples=500, seed=3)
    torch.manual_seed(3)
    with torch.no_grad():
        f = model.functions(model.unit_inputs(x), draw_sites(guide, 500, x[:1]))
    assert_close(found.mean, f.mean(0))
    assert_close(found.epistemic, f.var(0))


def test_parameters_of_a_network_of_pyro_fill_no_store():
    network = PyroModule[nn.Linear](3, 4)
    network.weight = PyroParam(torch.randn(4, 3))
    model = DAK(nn.Sequential(network), 4, num_units=2)
    guide = MeanFieldGuide(model)
    pyro.clear_param_store()
    predict(model, guide, torch.randn(5, 3))
    assert not pyro.get_param_store()


def test_the_check_draws_nothing_and_fills_no_store():
    model, x, y = make("none")
    guide = MeanFieldGuide(model)
    pyro.clear_param_store()
    state = torch.get_rng_state()
    predict(model, guide, x)
    exact_posterior(model, x, y)
    assert torch.equal(torch.get_rng_state(), state)
    assert not pyro.get_param_store()
