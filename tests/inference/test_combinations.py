"""Every guide with every prior and every likelihood: one step of SVI and a Predictive."""

import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.optim import Adam
from torch import nn

import guides
from pyro_dak import (
    DAK,
    GammaScalePrior,
    HorseshoePrior,
    LaplacePrior,
    NormalPrior,
    StudentTPrior,
)
from tests import scenarios
from tests.scenarios import LIKELIHOODS

PRIORS = {
    "normal": {"z": NormalPrior(0.5, 2.0), "mu": NormalPrior(-1.0, 0.5)},
    "laplace": {"z": LaplacePrior(), "mu": LaplacePrior(2.0)},
    "student_t": {"z": StudentTPrior(4.0)},
    "horseshoe": {"shrinkage": HorseshoePrior()},
    "gamma": {"shrinkage": GammaScalePrior(2.0, 2.0)},
    "own": {"z": dist.Logistic(0.0, 1.0) if hasattr(dist, "Logistic") else dist.Cauchy(0.0, 1.0)},
    "function": {"z": lambda shape: dist.Normal(0.0, torch.ones(shape)).to_event(3)},
}


@pytest.mark.parametrize("guide_name", guides.names())
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("likelihood_name", LIKELIHOODS)
def test_a_step_and_a_predictive(guide_name, prior, likelihood_name):
    likelihood = LIKELIHOODS[likelihood_name]()
    x, y = torch.randn(4, 2), scenarios.targets(likelihood, 4, 2)
    model = DAK(
        nn.Linear(2, 2),
        feature_dim=2,
        num_units=2,
        num_outputs=2,
        level=1,
        likelihood=likelihood,
        prior=PRIORS[prior],
        linear_term=prior == "student_t",
    )
    if guide_name == "natural" and prior not in ("normal", "function"):
        with pytest.raises(NotImplementedError, match="NaturalGuide needs normal priors"):
            guides.build(guide_name, model)
        return
    guide = guides.build(guide_name, model)
    loss = SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO()).step(x, y, num_data=20)
    assert torch.isfinite(torch.tensor(loss))
    parameters = [*model.parameters(), *guide.parameters()]
    assert all(torch.isfinite(p).all() for p in parameters)
    draws = Predictive(model, guide=guide, num_samples=2, parallel=True)(x)
    assert draws["y"].shape == (2, *y.shape)
    assert torch.isfinite(draws["y"].double()).all()
