"""Simulation-based calibration accepts the exact posterior and catches a wrong one."""

import pytest
import torch
from pyro.infer import Predictive

from pyro_dak import GaussianLikelihood, HorseshoePrior, exact_posterior
from pyro_dak.diagnostics import simulation_based_calibration
from tests import scenarios


@pytest.mark.usefixtures("no_type_checker")
@pytest.mark.parametrize("noise", [0.3, torch.tensor([0.3, 0.8])], ids=["one", "each"])
def test_ranks_of_the_exact_posterior_are_uniform(noise):
    case = scenarios.make(GaussianLikelihood(noise), num_rows=15, linear_term=True)
    result = simulation_based_calibration(case.model, case.x, num_simulations=200, progress=False)
    assert result.ranks.shape == (200, len(result.names))
    assert result.names[-1] == "log_likelihood"
    assert result.p_value() > 0.01


@pytest.mark.usefixtures("no_type_checker")
@pytest.mark.parametrize(("factor", "is_wrong"), [(0.6, True), (1.0, False), (1.6, True)])
def test_a_guide_of_the_wrong_width_is_caught(factor, is_wrong):
    case = scenarios.gaussian_regression(num_outputs=1, num_rows=15)

    def posterior_fn(model, x, y):
        guide = exact_posterior(model, x, y).guide
        guide.set_parameters(guide.loc, factor * guide.scale_tril.detach())
        return guide

    result = simulation_based_calibration(
        case.model, case.x, posterior_fn, num_simulations=100, progress=False
    )
    assert (result.p_value() < 1e-4) == is_wrong


@pytest.mark.usefixtures("no_type_checker")
def test_truths_are_draws_from_the_prior_with_its_hierarchy():
    """Among draws that Pyro takes from the prior, weights and scales have uniform ranks."""
    case = scenarios.make(num_outputs=1, prior={"shrinkage": HorseshoePrior()})
    model, h = case.model, case.h.detach()

    def prior_fn(model, x, y):
        sites = Predictive(model.observe, num_samples=9, parallel=True)(h)
        return {name: sites[name].squeeze(1) for name in model.site_shapes}

    options = {"num_simulations": 200, "num_samples": 9, "progress": False}
    result = simulation_based_calibration(model, case.x, prior_fn, **options)
    p_values = dict(zip(result.names, result.p_values(), strict=True))
    assert {"global_shrinkage", "shrinkage[1]", "z[0,1,2]", "mu[0]"} <= set(p_values)
    weights = [p for name, p in p_values.items() if not name.startswith(("f[", "log_"))]
    assert min(weights) * len(weights) > 0.01
    # log shrinkage is log global_shrinkage plus a term of the same variance: correlation 0.7.
    names = ("global_shrinkage", "shrinkage[0]")
    columns = [result.ranks[:, result.names.index(name)].double() for name in names]
    assert torch.stack(columns).corrcoef()[0, 1] > 0.3


def test_bins_must_divide_the_ranks():
    case = scenarios.gaussian_regression(num_outputs=1)
    result = simulation_based_calibration(case.model, case.x, num_simulations=4, num_samples=9)
    assert result.counts(5).sum(-1).tolist() == [4] * len(result.names)
    with pytest.raises(ValueError, match="`num_bins` must divide the 10 ranks"):
        result.counts(4)


def test_a_posterior_with_too_few_draws_is_refused():
    case = scenarios.gaussian_regression(num_outputs=1)

    def posterior_fn(model, x, y):
        return {"mu": torch.zeros(5, 1), "z": torch.zeros(5, 1, 2, 3)}

    with pytest.raises(ValueError, match="`num_samples`=99 draws, but the posterior has only 5"):
        simulation_based_calibration(case.model, case.x, posterior_fn, num_simulations=2)
