"""Lengthscales in models: learned, for each unit, and as the site `lengthscale`."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from torch import nn
from torch.testing import assert_close

from pyro_dak import (
    DAK,
    AdditiveGP,
    ClosedFormELBO,
    GammaScalePrior,
    GaussianLikelihood,
    LaplaceKernel,
    MaternKernel,
    MeanFieldGuide,
    NormalPrior,
    exact_posterior,
    fit,
    predict,
)
from pyro_dak.diagnostics.summary import summary
from tests import reference, scenarios

SCALES = (0.3, 0.9)


def case_of(guide="mean_field", scales=SCALES, learn=True, **options):
    return scenarios.gaussian_regression(
        guide=guide, level=3, kernel=LaplaceKernel(scales, learn=learn), **options
    )


def phi_of(model, h, scales):
    U = model.layer.activation.grid.inducing_points
    return torch.stack([reference.phi(h[:, p], U, float(t)) for p, t in enumerate(scales)], 1)


# Learned, or for each unit


@pytest.mark.parametrize("guide", scenarios.GUIDES)
def test_the_bound_and_its_gradients_are_those_of_the_dense_route(guide):
    results = []
    for route in ("local", "dense"):
        torch.manual_seed(0)
        case = case_of(guide, route=route)
        loss = ClosedFormELBO().differentiable_loss(case.model, case.guide, case.x, case.y)
        loss.backward()
        slopes = {
            name: parameter.grad
            for part in (case.model, case.guide)
            for name, parameter in part.named_parameters()
        }
        results.append({"loss": loss, **slopes})
    assert_close(*results, rtol=1e-8, atol=1e-8)
    assert results[0]["layer.activation.log_lengthscale"].abs().min() > 0


@pytest.mark.parametrize("guide", scenarios.GUIDES)
def test_moments_of_every_guide_are_those_of_its_draws(guide):
    case = case_of(guide)
    draws = scenarios.weight_draws(case.guide, 4000)
    f = case.model.functions(case.h, draws)
    moments = case.guide.moments(case.model.layer, case.h)
    assert scenarios.agrees(f, moments.mean)
    assert scenarios.agrees((f - moments.mean).square(), moments.var)


@pytest.mark.parametrize("learn", [True, False])
@pytest.mark.parametrize("num_rows", [8, 3000])  # many rows have a fast path of their own
def test_predictions_are_the_loop_over_units(learn, num_rows):
    case = case_of(learn=learn, num_outputs=1)
    scales = torch.tensor(SCALES)
    if learn:  # what counts is the parameter, not where it started
        with torch.no_grad():
            case.model.layer.activation.log_lengthscale += torch.tensor([0.7, -0.4])
        scales = scales * torch.tensor([0.7, -0.4]).exp()
    x = torch.randn(num_rows, 2)
    found = predict(case.model, case.guide, x, residual_variance=True)
    h, guide = case.model.unit_inputs(x), case.guide
    phi = phi_of(case.model, h, scales)
    sigma = case.model.unit_scale.unsqueeze(-1)
    mean = torch.einsum("npm,cpm->nc", phi * sigma, guide.z_loc) + guide.mu_loc
    var = torch.einsum("npm,cpm->nc", (phi * sigma).square(), guide.z_scale.square())
    lost = (case.model.unit_scale.square() * (1 - phi.square().sum(-1))).sum(-1, keepdim=True)
    assert_close(found.mean, mean.detach(), rtol=0, atol=1e-9)
    expected = var + guide.normal("mu")[1].square() + lost
    assert_close(found.epistemic, expected.detach(), rtol=0, atol=1e-9)


def test_compiled_predictions_are_the_plain_ones():
    scenarios.run_alone(
        """
import torch
from pyro_dak import DAK, LaplaceKernel, MeanFieldGuide, predict

torch.manual_seed(0)
model, x = DAK(torch.nn.Linear(2, 4), 4, 2, kernel=LaplaceKernel(0.5, learn=True)), torch.rand(9, 2)
model.unit_inputs(x)
guide = MeanFieldGuide(model.eval())
plain, compiled = (predict(model, guide, x, compile=value) for value in (False, True))
torch.testing.assert_close(compiled.mean, plain.mean)
torch.testing.assert_close(compiled.variance, plain.variance)
"""
    )


def test_exact_posterior_on_a_fine_grid_is_the_gp_with_a_lengthscale_for_each_unit():
    likelihood = GaussianLikelihood(0.3, learn=False)
    model = DAK(
        nn.Identity(), 2, 2, level=8, scaling="none", embedding=False, likelihood=likelihood,
        kernel=LaplaceKernel(SCALES, learn=True),
    ).eval()  # fmt: skip
    x, y, x_new = torch.rand(30, 2), torch.randn(30, 1), torch.rand(10, 2)
    posterior = exact_posterior(model, x, y, residual_variance=True)
    found = predict(model, posterior.guide, x_new, residual_variance=True)
    sigma = model.unit_scale.detach()
    arguments = (torch.tensor(SCALES), sigma, 1.0, 0.3)
    mean, var = reference.additive_gp_posterior(x, y[:, 0], x_new, *arguments)
    assert_close(found.mean[:, 0], mean, rtol=0, atol=2e-2)
    assert_close(found.epistemic[:, 0], var, rtol=0, atol=2e-2)


def test_a_learned_lengthscale_follows_the_gradient_of_the_evidence():
    case = case_of("full_rank")
    exact = case.exact()
    model, log_scale = case.model, case.model.layer.activation.log_lengthscale
    loss = ClosedFormELBO().differentiable_loss(model, exact.guide, case.x, case.y)
    assert_close(-loss.item(), exact.log_evidence)
    (slope,) = torch.autograd.grad(-loss, log_scale)
    evidence = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            log_scale[0] += step
            evidence.append(case.exact().log_evidence)
            log_scale[0] -= step
    assert float(slope[0]) == pytest.approx((evidence[0] - evidence[1]) / 2e-5, rel=1e-4)


def draws_of_gp(scales, num_rows, num_outputs, noise):
    """Inputs `(N, P)`, and noisy draws at them of the prior: an additive Laplace GP and a bias."""
    x = torch.rand(num_rows, len(scales))
    f = torch.randn(num_outputs).expand(num_rows, -1).clone()
    for p, t in enumerate(scales):
        K = reference.laplace(x[:, p], x[:, p], t) + 1e-10 * torch.eye(num_rows)
        f += torch.linalg.cholesky(K) @ torch.randn(num_rows, num_outputs) / len(scales) ** 0.5
    return x, f + noise * torch.randn(num_rows, num_outputs)


def learned_lengthscales(x, y, level):
    """Lengthscales that maximise the evidence, from 0.3 each; scales and noise are learned too."""
    model = DAK(
        nn.Identity(), x.shape[1], x.shape[1], y.shape[1], level, scaling="none", embedding=False,
        kernel=LaplaceKernel(0.3, learn=True), likelihood=GaussianLikelihood(0.3),
    )  # fmt: skip
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=15, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        posterior = exact_posterior(model, x, y).guide  # there the bound is the evidence
        loss = ClosedFormELBO().differentiable_loss(model, posterior, x, y) / len(x)
        loss.backward()
        return loss

    optimizer.step(closure)
    return model.layer.activation.lengthscale.detach()


def test_a_learned_lengthscale_is_that_of_the_process_which_drew_the_data():
    # 120 draws over 10 lengthscales: the standard error of log t is about sqrt(2 / 1200) = 0.04.
    # The grid takes what lies between its nodes for noise, which shortens t by about a tenth.
    x, y = draws_of_gp([0.1], num_rows=200, num_outputs=120, noise=0.1)
    (found,) = learned_lengthscales(x, y, level=7)
    assert float(found) == pytest.approx(0.1, rel=0.2)


@pytest.mark.slow
def test_learned_lengthscales_of_two_units_are_those_of_the_processes():
    truth = [0.05, 0.1]
    x, y = draws_of_gp(truth, num_rows=300, num_outputs=80, noise=0.1)
    found = learned_lengthscales(x, y, level=7)
    assert_close(found, torch.tensor(truth), rtol=0.2, atol=0)


def test_fit_learns_lengthscales():
    model, x = DAK(nn.Identity(), 2, 2, kernel=LaplaceKernel(0.5, learn=True)), torch.randn(60, 2)
    fit(model, MeanFieldGuide(model), (x, x.sin()[:, :1]), epochs=3, seed=0, progress=False)
    assert (model.layer.activation.lengthscale - 0.5).abs().min() > 1e-4


def test_without_learning_the_length_of_the_rows_of_w_has_no_gradient():
    """Standardised units do not see the length of a row of W, which the paper lets learn it."""
    case = scenarios.gaussian_regression()
    case.model.train()
    loss = ClosedFormELBO().differentiable_loss(case.model, case.guide, case.x, case.y)
    weight = case.model.embedding.weight
    (slope,) = torch.autograd.grad(loss, weight)
    along = (slope * weight).sum(-1).abs()
    assert (along < 1e-6 * slope.norm(dim=-1) * weight.norm(dim=-1)).all()


# A prior: the site `lengthscale`


def random_model(prior=None, **options):
    prior = dist.LogNormal(torch.tensor(0.0), 0.5) if prior is None else prior
    options = {"kernel": LaplaceKernel(prior), "num_units": 3, "level": 3} | options
    model = DAK(nn.Sequential(nn.Linear(2, 4), nn.Tanh()), feature_dim=4, **options)
    x = torch.randn(20, 2)
    model.unit_inputs(x)
    return model.eval(), x, torch.randn(20, 1)


@pytest.mark.parametrize(
    "prior",
    [
        dist.LogNormal(torch.tensor(0.0), 0.5),
        torch.distributions.LogNormal(torch.zeros(3), 0.5),
        dist.LogNormal(torch.zeros(3), 0.5).to_event(1),
        GammaScalePrior(3.0, 3.0),
        lambda shape: dist.LogNormal(torch.zeros(shape), 0.5).to_event(1),
    ],
    ids=["scalar", "torch", "event", "data", "function"],
)
def test_a_random_lengthscale_is_a_site_of_which_f_is_a_function(prior):
    model, x, y = random_model(prior)
    trace = poutine.trace(model).get_trace(x, y)
    values = {name: trace.nodes[name]["value"] for name in ("lengthscale", "z", "mu", "f")}
    assert values["lengthscale"].shape == (3,)
    phi = phi_of(model, model.unit_inputs(x), values["lengthscale"])
    f = torch.einsum("npm,p,cpm->nc", phi, model.unit_scale, values["z"]) + values["mu"]
    assert_close(values["f"], f)


def test_the_site_has_the_name_of_its_process():
    gp = AdditiveGP(nn.Identity(), 2, 2, kernel=LaplaceKernel(GammaScalePrior(2.0, 2.0)))
    trace = poutine.trace(gp).get_trace(torch.randn(5, 2))
    assert "gp.lengthscale" in trace.stochastic_nodes


@pytest.mark.parametrize("kernel", [LaplaceKernel, MaternKernel])
def test_vectorised_particles_are_the_loop_over_draws(kernel):
    prior = dist.LogNormal(torch.tensor(0.0), 0.5)
    model, x, y = random_model(kernel=kernel(prior))
    with pyro.plate("particles", 4, dim=-2):
        trace = poutine.trace(model).get_trace(x, y)
    trace.compute_log_prob()
    sites = {name: trace.nodes[name]["value"] for name in ("lengthscale", "mu", "z")}
    for s in range(4):
        one = poutine.condition(model, {name: value[s, 0] for name, value in sites.items()})
        alone = poutine.trace(one).get_trace(x, y)
        alone.compute_log_prob()
        for name in ("lengthscale", "z", "y"):
            found, expected = (t.nodes[name]["log_prob"] for t in (trace, alone))
            assert_close(found[s].sum(), expected.sum())


def test_a_random_lengthscale_is_learned_by_an_autoguide_and_predicted_in_parallel():
    model, x, y = random_model()
    guide = AutoNormal(model)
    elbo = Trace_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(model, guide, Adam({"lr": 0.01}), elbo)
    assert all(svi.step(x, y) > 0 for _ in range(3))
    samples = Predictive(model, guide=guide, num_samples=6, parallel=True)(x)
    assert samples["y"].shape == (6, 20, 1)


def test_draws_of_lengthscales_give_the_functions_of_each_draw():
    model, x, _ = random_model()
    h, sites = model.unit_inputs(x), {"z": torch.randn(5, 1, 3, 7), "mu": torch.randn(5, 1)}
    sites["lengthscale"] = torch.rand(5, 3) + 0.2
    f = model.functions(h, sites)
    for s in range(5):
        assert_close(f[s], model.functions(h, {name: value[s] for name, value in sites.items()}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": LaplaceKernel(NormalPrior())}, "must be a prior of positive numbers"),
        ({"prior": {"lengthscale": GammaScalePrior()}}, "`prior` must not have the lengthscale"),
        ({"kernel": LaplaceKernel((1.0, 2.0))}, "a lengthscale for each of the 3 units"),
        ({"kernel": LaplaceKernel(dist.LogNormal(torch.zeros(2), 1.0))}, r"event shape \(3,\)"),
    ],
)
def test_lengthscales_that_do_not_fit_the_model_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        DAK(nn.Identity(), 3, 3, embedding=False, **options)


def test_input_units_have_lengthscales_after_those_of_the_network():
    model = DAK(
        nn.Linear(2, 4), 4, 1, input_units=True, kernel=LaplaceKernel((0.3, 0.5, 0.9))
    ).eval()
    h = torch.rand(5, 3)
    assert_close(model.layer.activation(h), phi_of(model, h, (0.3, 0.5, 0.9)))


def test_a_summary_looks_at_the_shortest_lengthscale():
    case = case_of(num_rows=30)
    with torch.no_grad():
        case.model.layer.activation.log_lengthscale[0] = -5
    report = summary(case.model, case.guide, case.x, case.y, num_samples=100, seed=0)
    assert "coarse grid" in report.topics
