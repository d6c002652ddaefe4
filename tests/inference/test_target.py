"""The target of the samplers is the potential of the Pyro model."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.mcmc.util import initialize_model
from torch.testing import assert_close

from pyro_dak import GammaScalePrior, HorseshoePrior, LaplacePrior, StudentTPrior
from pyro_dak.inference.densities import log_joint, log_likelihood
from pyro_dak.inference.mcmc.target import Target
from tests import scenarios

PRIORS = {
    "normal": None,
    "student_t": {"z": StudentTPrior(3.0)},
    "laplace": {"z": LaplacePrior(), "mu": StudentTPrior(1.0)},  # infinite variance
    "horseshoe": {"shrinkage": HorseshoePrior()},
    "gamma": {"z": StudentTPrior(), "shrinkage": GammaScalePrior(2.0, 3.0)},
    "beta": {"shrinkage": dist.Beta(torch.tensor(2.0), torch.tensor(3.0))},
}


def log_volume(target, position):
    """log |det dw / de| at a position; w is affine in e, so differences are exact."""
    K = target.num_weights
    steps = torch.cat([torch.zeros(1, K), torch.eye(K)])
    steps = torch.nn.functional.pad(steps, (0, len(position) - K))
    sites = target.sites(position + steps)
    flat = [sites[n].flatten(1) for n in ("mu", "linear", "z") if n in sites]
    w = torch.cat(flat, -1)
    return torch.linalg.slogdet(w[1:] - w[0]).logabsdet


@pytest.mark.parametrize(
    ("whiten", "num_rows"), [(False, 5), (True, 5), (True, 30)], ids=str
)  # fewer rows than weights, and more
@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)
@pytest.mark.parametrize("likelihood", ["gaussian", "categorical", "heteroscedastic", "poisson"])
def test_potential_is_that_of_the_pyro_model(likelihood, prior, whiten, num_rows):
    case = scenarios.make(likelihood, prior=prior, linear_term=True, num_rows=num_rows)
    h = case.h.detach()
    _, potential_fn, transforms, _ = initialize_model(case.model.observe, (h, case.y))
    target = Target(case.model, h, case.y, whiten=whiten)
    values, expected = [], []
    for seed in range(3):
        position = target.initial_position(torch.Generator().manual_seed(seed))
        values.append(target({"position": position}))
        sites = {name: value[0] for name, value in target.sites(position.unsqueeze(0)).items()}
        unconstrained = {
            name: transforms[name](value) if name in transforms else value
            for name, value in sites.items()
        }
        expected.append(potential_fn(unconstrained).detach())
        if target.is_collapsed:
            expected[-1] -= log_volume(target, position)
    # Whitening at the mode has a constant Jacobian, which is left out.
    assert_close(torch.stack(values) - values[0], torch.stack(expected) - expected[0])
    assert_close(values[0], expected[0])


@pytest.mark.parametrize("likelihood", ["gaussian", "heteroscedastic", "student_t"])
def test_potential_with_sampled_scales_adds_their_priors(likelihood):
    case = scenarios.make(likelihood, linear_term=True)
    priors = {
        "noise_scale": dist.HalfNormal(torch.tensor(0.7)).expand([]).to_event(0),
        "unit_scale": dist.LogNormal(torch.zeros(2), torch.ones(2)).to_event(1),
    }
    h = case.h.detach()
    target = Target(case.model, h, case.y, priors)
    position = target.initial_position(torch.Generator().manual_seed(0))
    sites = target.sites(position.unsqueeze(0))
    expected = sum(prior.log_prob(sites[name][0]) for name, prior in priors.items())
    expected += log_likelihood(case.model, h, case.y, sites).sum()
    for name in ("mu", "linear", "z"):
        expected += torch.distributions.Normal(0.0, 1.0).log_prob(sites[name]).sum()
    jacobian = sites["noise_scale"].log().sum() + sites["unit_scale"].log().sum()
    assert target.is_collapsed == (likelihood == "gaussian")
    if target.is_collapsed:
        jacobian += log_volume(target, position)
    assert_close(target({"position": position}), -expected - jacobian)


@pytest.mark.parametrize("num_rows", [5, 30])
def test_weights_given_the_scales_have_the_exact_posterior_and_evidence(num_rows):
    case = scenarios.gaussian_regression(num_rows=num_rows, linear_term=True)
    prior = dist.HalfNormal(torch.tensor(0.7)).expand([])
    target = Target(case.model, case.h.detach(), case.y, {"noise_scale": prior})
    exact = case.exact()
    mean, root, log_evidence = target.given_scales({})
    assert_close(mean, exact.guide.loc.detach())
    scale_tril = exact.guide.scale_tril.detach()
    assert_close(root @ root.mT, scale_tril @ scale_tril.mT)
    assert_close(float(log_evidence), exact.log_evidence)


def test_whitened_regression_is_a_standard_normal():
    case = scenarios.gaussian_regression(num_rows=30)
    h = case.h.detach()
    target = Target(case.model, h, case.y)
    position = torch.randn(target.num_weights)
    sites = target.sites(torch.stack([torch.zeros_like(position), position]))
    centre, elsewhere = -log_joint(case.model, h, case.y, sites)
    assert_close(elsewhere - centre, 0.5 * position.square().sum())


def test_a_density_that_is_nowhere_finite_is_reported():
    case = scenarios.make("categorical", num_outputs=3)
    target = Target(case.model, case.h.detach(), case.y, whiten=False)
    target.design.fill_(math.nan)
    with (
        pyro.validation_enabled(False),
        pytest.raises(ValueError, match="at 2 random starts"),
    ):
        target.initial_position(torch.Generator(), max_tries=2)
