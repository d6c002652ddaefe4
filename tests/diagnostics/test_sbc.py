"""Simulation-based calibration accepts the exact posterior and catches a wrong one."""

import pytest
import torch
from torch.testing import assert_close

from pyro_dak import GaussianLikelihood, HorseshoePrior, exact_posterior
from pyro_dak.diagnostics.sbc import _draw_prior, _exact_draws, simulation_based_calibration
from pyro_dak.inference.densities import cached_inputs
from tests import scenarios

noises = pytest.mark.parametrize("noise", [0.3, torch.tensor([0.3, 0.8])], ids=["one", "each"])


@pytest.mark.usefixtures("no_type_checker")
@noises
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


@noises
def test_all_simulations_at_once_are_those_one_by_one(noise):
    case = scenarios.make(GaussianLikelihood(noise), num_rows=15, linear_term=True)
    h, ys = cached_inputs(case.model, case.x), torch.randn(3, 15, 2)
    draw_fn = _exact_draws(case.model, case.x, h, ys)
    for s in range(3):
        guide = exact_posterior(case.model, case.x, ys[s]).guide
        draws = draw_fn(s, 4000)
        for name, mean in guide.weight_means()._asdict().items():
            assert scenarios.agrees(draws[name], mean.detach())
        var = (guide.scale_tril @ guide.scale_tril.mT).diagonal(dim1=-2, dim2=-1).detach()
        ratio = draws["mu"].var(0) / var[:, 0]
        assert_close(ratio, torch.ones(2), rtol=0, atol=4.5 * (2 / 4000) ** 0.5)


def test_prior_draws_follow_the_hierarchy():
    model = scenarios.make(prior={"shrinkage": HorseshoePrior()}).model
    sites = _draw_prior(model, 20_000, torch.zeros((), dtype=torch.float64))
    assert {n: v.shape[1:] for n, v in sites.items()} == dict(model.site_shapes)
    # Half-Cauchy: the median is the scale, so the median of the ratio is one.
    ratio = sites["shrinkage"][:, 0] / sites["global_shrinkage"]
    assert abs((ratio > 1).double().mean() - 0.5) < 4 * 0.5 / 20_000**0.5


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

    with pytest.raises(ValueError, match="`num_samples`=99 draws are to be ranked"):
        simulation_based_calibration(case.model, case.x, posterior_fn, num_simulations=2)
