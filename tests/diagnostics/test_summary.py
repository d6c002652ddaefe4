"""The summary says what is wrong, and only that."""

import importlib
import math

import pytest
import torch
from pyro.infer.autoguide import AutoDelta
from torch import nn

import pyro_dak
from pyro_dak import (
    DAK,
    GaussianLikelihood,
    LaplaceKernel,
    StudentTPrior,
    exact_posterior,
    run_nuts,
)
from pyro_dak.diagnostics import summary
from pyro_dak.inference.mcmc.nuts import MCMCRun
from tests import scenarios


def additive(x, noise_scale=0.3, **options):
    """An additive GP on two inputs in (0, 1)."""
    options = {"level": 3} | options
    likelihood = options.pop("likelihood", GaussianLikelihood(noise_scale))
    model = DAK(
        nn.Identity(), 2, 2, embedding=False, scaling="none", likelihood=likelihood, **options
    )
    return model.eval()


def data(num_rows=200, noise_scale=0.3):
    x = torch.rand(num_rows, 2)
    y = torch.sin(6 * x[:, :1]) + x[:, 1:] + noise_scale * torch.randn(num_rows, 1)
    return x, y


def findings(model, posterior, x, y):
    return summary(model, posterior, x, y, num_samples=1000)


def test_the_room_gives_the_function_and_not_its_module():
    importlib.import_module("pyro_dak.diagnostics.summary")
    assert pyro_dak.diagnostics.summary is summary
    assert callable(summary)


def test_nothing_is_found_where_nothing_is_wrong():
    x, y = data()
    model = additive(x)
    report = findings(model, exact_posterior(model, x, y), x, y)
    assert report.topics == []
    assert str(report).endswith("Nothing found wrong.")
    assert report.values["k_hat"] == -math.inf


@pytest.mark.parametrize(
    ("noise_scale", "topic"), [(0.1, "under-dispersed"), (1.0, "over-dispersed")]
)
def test_wrong_noise_is_found(noise_scale, topic):
    x, y = data()
    model = additive(x, noise_scale)
    report = findings(model, exact_posterior(model, x, y), x, y)
    assert topic in report.topics
    assert topic in str(report)


def test_units_that_do_not_vary_are_found():
    x, y = data()
    x[:, 1] = 0.5
    model = additive(x)
    report = findings(model, exact_posterior(model, x, y), x, y)
    assert "dead units" in report.topics
    assert "[1]" in str(report)


def test_inputs_outside_the_grid_are_found():
    x, y = data()
    model = additive(x)
    report = findings(model, exact_posterior(model, x, y), 3 * x, y)
    assert "outside the grid" in report.topics


@pytest.mark.filterwarnings("ignore:The grid is coarse")
def test_a_coarse_grid_is_found():
    x, y = data()
    model = additive(x, level=1 + 1, kernel=LaplaceKernel(0.05))
    report = findings(model, exact_posterior(model, x, y), x, y)
    assert "coarse grid" in report.topics


def test_collapse_to_the_prior_is_found():
    x, y = data()
    model = additive(x, noise_scale=100.0)
    report = findings(model, exact_posterior(model, x, y), x, y)
    assert {"collapse to the prior", "constant predictions", "over-dispersed"} <= set(report.topics)


def test_an_idle_unit_is_found():
    x, y = data()
    model = additive(x)
    with torch.no_grad():
        model.layer.log_unit_scale[1] = -8.0
    report = findings(model, exact_posterior(model, x, y), x, y)
    assert "idle units" in report.topics
    assert "1 of 2 units are as in the prior ([1])" in str(report)


def test_a_bad_guide_is_found():
    x, y = data()
    model = additive(x)
    guide = AutoDelta(model)
    guide(x, y)
    assert "k-hat" in findings(model, guide, x, y).topics
    report = findings(model, scenarios.GUIDES["mean_field"](model), x, y)
    assert "k-hat" in report.topics
    assert "above 0.7" in str(report)


def test_bias_is_found():
    x, y = data()
    model = additive(x)
    report = findings(model, exact_posterior(model, x, y), x, y + 2)
    assert "bias" in report.topics
    assert "too low" in str(report)


def test_outliers_are_found_by_leaving_them_out():
    x, y = data()
    y[0] += 8
    model = additive(x)
    report = findings(model, exact_posterior(model, x, y), x, y)
    assert "leave-one-out" in report.topics


def test_overconfident_classes_are_found():
    case = scenarios.classification(num_rows=200)
    with torch.no_grad():
        case.guide.mu_loc.copy_(torch.tensor([8.0, 0.0, 0.0]))
    report = findings(case.model, case.guide, case.x, case.y)
    assert "overconfident" in report.topics
    assert report.values["confidence"] > 0.9


def test_priors_without_variance_are_passed_over():
    case = scenarios.gaussian_regression(prior={"z": StudentTPrior(1.0)})
    assert "nats_learned" not in findings(case.model, case.guide, case.x, case.y).values


@pytest.mark.filterwarnings("ignore:.*r-hat.*:UserWarning")
def test_chains_are_judged():
    x, y = data(30)
    model = additive(x, level=1)
    run = run_nuts(model, x, y, 50, 50, progress=False)
    good = findings(model, run, x, y)
    assert {"divergences", "max_r_hat", "min_ess"} <= set(good.values)
    sites = {name: value[:, :1].expand_as(value) for name, value in run.sites.items()}
    stuck = MCMCRun(sites, stats={"diverging": torch.ones(1, 50, dtype=torch.bool)})
    assert {"divergences", "r-hat", "effective sample size"} <= set(
        findings(model, stuck, x, y).topics
    )
