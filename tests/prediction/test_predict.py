"""`predict`: exact moments, row by row, calibrated quantiles, class probabilities, components."""

import math
import sys
from concurrent.futures import ThreadPoolExecutor

import pyro
import pyro.distributions as dist
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyro.infer.autoguide import AutoDelta, AutoLowRankMultivariateNormal, AutoNormal
from torch import nn
from torch.testing import assert_close

from pyro_dak import (
    DAK,
    CategoricalLikelihood,
    GaussianLikelihood,
    HorseshoePrior,
    MaternKernel,
    MeanFieldGuide,
    NormalPrior,
    RBFKernel,
    StudentTPrior,
    components,
    exact_posterior,
    predict,
    sample_functions,
)
from pyro_dak.additive.gaussian import FunctionMoments, sample_marginals
from pyro_dak.additive.layer import Weights
from pyro_dak.diagnostics import loo
from pyro_dak.inference.draws import draw_posterior, draw_sites
from pyro_dak.model.likelihoods import Likelihood
from pyro_dak.prediction import freeze
from tests import scenarios

REGRESSIONS = ["gaussian", "heteroscedastic", "student_t", "poisson", "bernoulli"]


def make(likelihood: str = "gaussian", num_outputs: int = 2, guide: str = "mean_field"):
    model = DAK(
        nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)),
        4,
        num_units=3,
        num_outputs=num_outputs,
        level=3,
        likelihood=scenarios.LIKELIHOODS[likelihood](),
    )
    x = torch.randn(40, 3)
    model(x)
    q = scenarios.GUIDES[guide](model, init_scale=0.4, init_loc_scale=0.7)
    return model.eval(), q, x


def draws_of_f(model, guide, x, num_samples=4000):
    with torch.no_grad():
        return model.functions(model.unit_inputs(x), draw_sites(guide, num_samples))


@pytest.mark.parametrize("likelihood", REGRESSIONS)
def test_moments_agree_with_draws_of_y(likelihood):
    model, guide, x = make(likelihood)
    prediction = predict(model, guide, x)
    y = model.likelihood.distribution(draws_of_f(model, guide, x, 20000)).sample()
    error = y.std(0) / len(y) ** 0.5
    assert ((y.mean(0) - prediction.mean).abs() < 5 * error).all()
    # The noise of Student-t has no fourth moment: its variance is compared more loosely.
    ratio = y.var(0) / prediction.variance
    assert (ratio.log().abs() < (0.5 if likelihood == "student_t" else 0.25)).all()


@pytest.mark.parametrize("guide", list(scenarios.GUIDES))
def test_gaussian_prediction_is_closed_form(guide):
    model, q, x = make(guide=guide)
    prediction = predict(model, q, x)
    moments = q.moments(model.layer, model.unit_inputs(x))
    noise = model.likelihood.noise_scale
    assert_close(prediction.mean, moments.mean.detach())
    assert_close(prediction.epistemic, moments.var.detach())
    assert_close(prediction.std, (moments.var + noise**2).sqrt().detach())
    y = torch.randn_like(prediction.mean)
    cov = torch.diag_embed(prediction.variance)
    if moments.root is not None:
        shared = torch.einsum("rnf,rng->nfg", moments.root, moments.root)
        cov = cov + shared - torch.diag_embed(shared.diagonal(dim1=-2, dim2=-1))
    expected = torch.distributions.MultivariateNormal(prediction.mean, cov).log_prob(y)
    assert_close(prediction.log_prob(y), expected.detach())


@pytest.mark.parametrize("likelihood", ["heteroscedastic", "student_t", "poisson", "bernoulli"])
def test_log_prob_by_quadrature_agrees_with_draws(likelihood):
    model, guide, x = make(likelihood, num_outputs=1)
    prediction = predict(model, guide, x)
    y = prediction.sample(1)[0]
    f = draws_of_f(model, guide, x, 20000)
    densities = model.likelihood.distribution(f).log_prob(y).exp()
    error = densities.std(0) / len(f) ** 0.5
    assert ((densities.mean(0) - prediction.log_prob(y).exp()).abs() < 5 * error).all()


def correlated(likelihood, num_outputs, spread=1.0):
    """A model whose functions covary strongly under its guide, with the guide and inputs."""
    model, guide, x = make(likelihood, num_outputs, "low_rank")
    with torch.no_grad():
        guide.factor.copy_(spread * torch.randn_like(guide.factor))
        guide.log_scale.fill_(math.log(0.2))
    return model, guide, x[:3]


@pytest.mark.parametrize(
    ("likelihood", "num_outputs", "spread"),
    [
        ("gaussian", 3, 1.0),
        ("heteroscedastic", 1, 1.0),
        ("heteroscedastic", 2, 0.4),
        ("heteroscedastic", 3, 0.4),
    ],
)
def test_log_prob_counts_the_covariance_between_functions(likelihood, num_outputs, spread):
    model, guide, x = correlated(likelihood, num_outputs, spread)
    y = model.likelihood.distribution(draws_of_f(model, guide, x, 1)).sample()[0]
    with torch.no_grad():
        f = draws_of_f(model, guide, x, 60_000)
        densities = model.likelihood.distribution(f).log_prob(y).exp()
    error = densities.std(0) / densities.mean(0) / len(f) ** 0.5
    found = predict(model, guide, x).log_prob(y)
    assert ((densities.mean(0).log() - found).abs() < 4 * error + 1e-3).all()


@pytest.mark.parametrize("likelihood", REGRESSIONS)
def test_draws_of_y_have_the_covariance_of_the_outputs(likelihood):
    model, guide, x = correlated(likelihood, 2, spread=0.4)
    truth = model.likelihood.distribution(draws_of_f(model, guide, x, 40_000)).sample()
    draws = predict(model, guide, x).sample(40_000)

    def are_together(y):
        """Whether both outputs of a row are on the same side of their means, `(S, N)`."""
        return ((y > truth.mean(0)).sum(-1) != 1).double()

    here, there = are_together(draws), are_together(truth)
    error = ((here.var(0) + there.var(0)) / 40_000).sqrt()
    assert ((here.mean(0) - there.mean(0)).abs() < 4 * error).all()


def test_class_probabilities_count_the_covariance_between_functions():
    model, guide, x = correlated("categorical", 3, spread=2.0)
    probs = draws_of_f(model, guide, x, 40_000).softmax(-1)
    found = predict(model, guide, x, num_samples=40_000, seed=0)
    error = (2 * probs.var(0) / len(probs)).sqrt()
    assert ((found.probs - probs.mean(0)).abs() < 4 * error).all()
    independent = sample_marginals(found.functions, 40_000).softmax(-1).mean(0)
    assert not ((independent - probs.mean(0)).abs() < 4 * error).all()


def test_draws_of_any_guide_carry_the_covariance_between_functions():
    model, guide, x = correlated("gaussian", 3)

    class Other(pyro.nn.PyroModule):
        """The same posterior, of which nothing is known but its draws."""

        def __init__(self):
            super().__init__()
            self.inner = guide

        def forward(self, x, y):
            return self.inner()

    y = torch.randn(3, 3)
    known = predict(model, guide, x)
    drawn = predict(model, Other(), x, num_samples=40_000, seed=0)
    assert drawn.functions.root.shape == (3, 3, 3)  # no longer one row for each draw
    assert_close(drawn.log_prob(y), known.log_prob(y), rtol=0.02, atol=0.02)


def test_intervals_hold_their_share_of_draws():
    model, guide, x = make()
    prediction = predict(model, guide, x)
    lower, upper = prediction.interval(0.8)
    y = prediction.sample(4000)
    share = ((y > lower) & (y < upper)).double().mean()
    assert abs(share - 0.8) < 4 * (0.8 * 0.2 / y.numel()) ** 0.5
    assert_close(prediction.quantile(0.5), prediction.mean)


def test_quantiles_of_counts_come_from_draws():
    model, guide, x = make("poisson")
    lower, upper = predict(model, guide, x).interval(0.9)
    assert (lower <= upper).all()
    assert torch.equal(lower, lower.round())


@pytest.mark.parametrize("level", [0.0, 1.0, -1.0])
def test_levels_outside_zero_and_one_are_refused(level):
    model, guide, x = make()
    prediction = predict(model, guide, x)
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        prediction.interval(level)
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        prediction.quantile(level)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.permutations(range(40)))
def test_prediction_is_row_wise(chunk_size, order):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, guide, x = make("heteroscedastic")
    whole = predict(model, guide, x)
    parts = predict(model, guide, x[list(order)], chunk_size=chunk_size)
    assert_close(parts.mean, whole.mean[list(order)], atol=1e-12, rtol=1e-12)
    assert_close(parts.variance, whole.variance[list(order)], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kernel", [RBFKernel(50.0), RBFKernel(1.0), MaternKernel(20.0)])
def test_smooth_kernels_are_row_wise_in_single_precision(kernel):
    network = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 4))
    model = DAK(network, 4, num_units=3, kernel=kernel).float()
    x = torch.randn(64, 3, dtype=torch.float32)
    model(x)
    guide = MeanFieldGuide(model.eval(), init_loc_scale=3.0).float()
    rows = [predict(model, guide, row).mean for row in x.split(1)]
    assert_close(torch.cat(rows), predict(model, guide, x).mean, rtol=1e-5, atol=1e-5)


def test_prediction_computes_features_once_per_row_and_restores_modes():
    rows = 0

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, x):
            nonlocal rows
            rows += len(x)
            assert not torch.is_grad_enabled()
            return self.dropout(x)

    model = DAK(Counting(), 3, num_units=2, level=2, likelihood=CategoricalLikelihood())
    model.train()
    model.scaling.eval()
    guide = MeanFieldGuide(model).train()
    predict(model, guide, torch.randn(30, 3), num_samples=50, chunk_size=7)
    assert rows == 30
    assert model.training
    assert model.feature_extractor.dropout.training
    assert not model.scaling.training
    assert guide.training


def test_residual_variance_returns_to_the_prior_far_away():
    model = DAK(nn.Identity(), 2, num_units=2, embedding=False, scaling="none", level=4,
                likelihood=GaussianLikelihood(0.1))  # fmt: skip
    guide = MeanFieldGuide(model, init_scale=0.01)
    far = torch.full((1, 2), 60.0)
    without = predict(model, guide, far)
    with_it = predict(model, guide, far, residual_variance=True)
    assert without.epistemic.item() < 1e-3
    assert_close(
        with_it.epistemic.item(), model.unit_scale.square().sum().item(), atol=1e-3, rtol=0
    )
    at_nodes = model.layer.activation.grid.inducing_points[:2].expand(1, 2)
    assert_close(
        predict(model, guide, at_nodes, residual_variance=True).epistemic,
        predict(model, guide, at_nodes).epistemic,
    )


@pytest.mark.parametrize("guide", list(scenarios.GUIDES))
def test_class_probabilities_are_averaged_after_the_softmax(guide):
    model, q, x = make("categorical", num_outputs=4, guide=guide)
    prediction = predict(model, q, x, num_samples=20000)
    probs = draws_of_f(model, q, x, 20000).softmax(-1)
    error = (2 * probs.var(0) / len(probs)).sqrt()
    assert ((prediction.probs - probs.mean(0)).abs() < 5 * error).all()
    assert_close(prediction.probs.sum(-1), torch.ones(40))
    entropy = -(probs * probs.log()).sum(-1)
    error = (2 * entropy.var(0) / len(probs)).sqrt()
    assert ((prediction.expected_entropy - entropy.mean(0)).abs() < 5 * error).all()
    assert (prediction.mutual_information >= -1e-12).all()
    assert (prediction.entropy <= math.log(4) + 1e-12).all()


def test_probit_is_close_to_monte_carlo_and_samples_nothing():
    model, guide, x = make("categorical", num_outputs=3)
    state = torch.get_rng_state()
    prediction = predict(model, guide, x, method="probit")
    assert torch.equal(state, torch.get_rng_state())
    exact = predict(model, guide, x, num_samples=5000)
    assert (prediction.probs - exact.probs).abs().max() < 0.06
    with pytest.raises(NotImplementedError, match='method="mc"'):
        _ = prediction.mutual_information


def test_class_log_prob_and_labels():
    model, guide, x = make("categorical", num_outputs=3)
    prediction = predict(model, guide, x)
    y = prediction.sample(1)[0]
    expected = prediction.probs[torch.arange(40), y].log()
    assert_close(prediction.log_prob(y), expected)
    assert torch.equal(prediction.label, prediction.probs.argmax(-1))


def test_other_guides_are_summarised_by_draws():
    model, _, x = make()
    guide = AutoNormal(model, init_scale=0.3)
    guide(x, torch.zeros(40, 2))
    prediction = predict(model, guide, x, num_samples=20000)
    with torch.no_grad(), pyro.plate("draws", 20000, dim=-2):
        f = model.functions(model.unit_inputs(x), guide())
    error = (2 * f.var(0) / len(f)).sqrt()
    assert ((f.mean(0) - prediction.mean).abs() < 5 * error).all()
    assert_close(prediction.epistemic, f.var(0), atol=0, rtol=0.2)


def test_a_point_estimate_has_no_epistemic_variance():
    model, _, x = make()
    guide = AutoDelta(model)
    guide(x, torch.zeros(40, 2))
    assert_close(predict(model, guide, x).epistemic, torch.zeros(40, 2), atol=1e-12, rtol=0)


def test_shrinkage_goes_through_draws():
    model = DAK(nn.Identity(), 3, num_units=3, embedding=False, level=2,
                prior={"shrinkage": HorseshoePrior()}).eval()  # fmt: skip
    guide = MeanFieldGuide(model)
    moments = freeze(model, guide, draw_sites(guide, 10))(torch.rand(5, 3))
    assert moments.root.shape == (10, 5, 1)


@pytest.mark.parametrize("linear_term", [False, True])
@pytest.mark.parametrize("guide", list(scenarios.GUIDES))
def test_components_are_the_moments_of_each_units_share(guide, linear_term):
    model = DAK(nn.Identity(), 3, num_units=3, embedding=False, level=3, num_outputs=2,
                linear_term=linear_term).eval()  # fmt: skip
    q = scenarios.GUIDES[guide](model, init_scale=0.4, init_loc_scale=0.7)
    x = torch.rand(6, 3)
    shares = components(model, q, x, chunk_size=4)
    with torch.no_grad():
        sites = draw_sites(q, 20000)
        h = model.unit_inputs(x)
        phi = model.layer.activation(h)
        draws = torch.einsum("npm,scpm->sncp", phi, sites["z"].squeeze(1))
        if linear_term:
            r = model.layer.linear_inputs(h)
            draws = draws + r.unsqueeze(-2) * sites["linear"]
        draws = draws * model.unit_scale
    error = (draws.var(0) / len(draws)).sqrt()
    assert ((draws.mean(0) - shares.mean).abs() < 5 * error).all()
    assert_close(shares.variance, draws.var(0), atol=0, rtol=0.1)
    bias = q.weight_means().mu
    assert_close(shares.mean.sum(-1) + bias.detach(), predict(model, q, x).mean)


def test_components_of_draws_are_the_moments_over_them():
    model, guide, x = make()
    sites = draw_posterior(model, guide, num_samples=7).flat()
    shares = components(model, sites, x, chunk_size=16)
    naive = torch.stack(
        [model.layer.component_means(model.unit_inputs(x), Weights(z, mu)).detach()
         for z, mu in zip(sites["z"], sites["mu"], strict=True)]
    )  # fmt: skip
    assert_close(shares.mean, naive.mean(0))
    assert_close(shares.variance, naive.var(0))
    automatic = AutoNormal(model)
    automatic(x, torch.zeros(40, 2))
    again = draw_posterior(model, automatic, num_samples=100, x=x, seed=0)
    assert_close(components(model, automatic, x), components(model, again, x))


def test_a_drawn_function_is_the_same_at_every_call_and_in_any_batch():
    model, guide, x = make()
    draws = sample_functions(model, guide, 5)
    assert len(draws) == 5
    everywhere = draws(x)
    assert everywhere.shape == (5, 40, 2)
    assert_close(draws(x[7:9]), everywhere[:, 7:9])
    assert_close(draws[3](x), everywhere[3])
    assert not torch.equal(everywhere[0], everywhere[1])


def test_bad_inputs_are_refused(no_type_checker):
    model, guide, x = make()
    with pytest.raises(ValueError, match=r"as before, floating \(3,\); got .* torch.int64"):
        predict(model, guide, x.long())
    with pytest.raises(TypeError, match="dtype of the model"):
        predict(model, guide, x.float())
    with pytest.raises(ValueError, match="1 NaN"):
        predict(
            model,
            guide,
            x.masked_fill(torch.eye(40, 3) * (torch.arange(40) == 0)[:, None] > 0, math.nan),
        )
    with pytest.raises(ValueError, match="at least one row"):
        predict(model, guide, x[:0])
    with pytest.raises(ValueError, match="'mc', 'probit'"):
        predict(model, guide, x, method="laplace")
    with pytest.raises(ValueError, match=r"shape \(N, 2\)"):
        predict(model, guide, x).log_prob(torch.zeros(40))


@pytest.mark.usefixtures("no_type_checker")
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
@pytest.mark.parametrize("at_fault", ["embedding.weight", "layer.log_unit_scale", "z_loc"])
def test_weights_that_are_not_finite_are_not_predicted_with(at_fault, likelihood, value):
    model, guide, x = make(likelihood)
    tensors = {**dict(model.named_parameters()), **dict(guide.named_parameters())}
    with torch.no_grad():
        tensors[at_fault].flatten()[0] = value
    message = rf"must have weights whose squares are finite; `{at_fault}` has others"
    with pytest.raises(ValueError, match=message):
        predict(model, guide, x)
    with pytest.raises(ValueError, match=message):
        components(model, guide, x)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_make_no_functions_and_no_posterior(value):
    model, guide, x = make()
    draws = sample_functions(model, guide, 2)
    with torch.no_grad():
        model.embedding.weight[0, 0] = value
    with pytest.raises(ValueError, match=r"`embedding.weight` has others"):
        exact_posterior(model, x, torch.zeros(40, 2))
    with pytest.raises(ValueError, match=r"`embedding.weight` has others"):
        draws(x)


def test_inputs_that_overflow_the_network_are_not_predicted_with():
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    nn.init.constant_(network[0].weight, 10.0)
    model = DAK(network, 4, num_units=2, level=3)
    x = torch.randn(10, 3)
    model(x)
    model, guide = model.float().eval(), MeanFieldGuide(model).float()
    with pytest.raises(ValueError, match="`x` gives features that are not finite"):
        predict(model, guide, 3e38 * x.float().sign())


@pytest.mark.parametrize("guide", ["mean_field", "low_rank"])
def test_sampled_class_probabilities_are_row_wise_too(guide):
    model, q, x = make("categorical", num_outputs=3, guide=guide)
    whole = predict(model, q, x, num_samples=30, seed=5)
    parts = predict(model, q, x.flip(0), num_samples=30, seed=5, chunk_size=7)
    assert_close(parts.probs, whole.probs.flip(0))
    assert not torch.equal(predict(model, q, x, num_samples=30, seed=6).probs, whole.probs)


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
@pytest.mark.parametrize("guide", ["mean_field", "low_rank", "normal"])
def test_predictions_are_the_same_at_every_call_and_leave_the_global_state(guide, likelihood):
    model, q, x = make(likelihood, guide="mean_field" if guide == "normal" else guide)
    if guide == "normal":
        q = AutoNormal(model, init_scale=0.3)
        q(x, model.likelihood.placeholder_targets(40, 2))
    state = torch.get_rng_state()
    first, second = (predict(model, q, x, num_samples=10) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.functions.mean, second.functions.mean)
    name = "probs" if likelihood == "categorical" else "variance"
    assert torch.equal(getattr(first, name), getattr(second, name))
    seeded = predict(model, q, x, num_samples=10, seed=0)
    assert torch.equal(getattr(first, name), getattr(seeded, name))
    other = predict(model, q, x, num_samples=10, seed=1)
    is_drawn = guide == "normal" or likelihood == "categorical"
    assert torch.equal(getattr(first, name), getattr(other, name)) != is_drawn


@pytest.mark.parametrize("likelihood", ["student_t", "poisson", "bernoulli"])
def test_quantiles_from_draws_are_the_same_at_every_call_and_samples_are_not(likelihood):
    model, guide, x = make(likelihood)
    prediction = predict(model, guide, x)
    state = torch.get_rng_state()
    (lower, upper), again = prediction.interval(), prediction.interval()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(lower, again[0])
    assert torch.equal(upper, again[1])
    assert (lower <= upper).all()
    assert not torch.equal(prediction.sample(20), prediction.sample(20))


def test_quantiles_from_draws_have_no_largest_number_of_rows():
    model, guide, x = make("student_t", num_outputs=1)
    prediction = predict(model, guide, x.repeat(500, 1))  # 20 million draws
    quantile = prediction.quantile(0.9)
    assert quantile.shape == (20_000, 1)
    share = (prediction.sample(100) < quantile).double().mean()
    # A row's share of new draws below its quantile has mean 0.9 up to 1 / 1000, of 1,000 draws.
    error = (0.09 / 20_000 * (1 / 100 + 1 / 1000)) ** 0.5
    assert (share - 0.9).abs() < 4 * error + 1e-3


def test_draws_of_other_guides_are_row_wise_too():
    model, _, x = make()
    guide = AutoNormal(model, init_scale=0.3)
    guide(x, torch.zeros(40, 2))
    whole = predict(model, guide, x, num_samples=30, seed=5)
    parts = predict(model, guide, x.flip(0), num_samples=30, seed=5, chunk_size=7)
    assert_close(parts.mean, whole.mean.flip(0))


def test_a_plain_guide_that_takes_the_data_and_returns_nothing_predicts():
    model, q, x = make()

    class Plain(pyro.nn.PyroModule):
        def forward(self, x, y):
            for name in ("mu", "z"):
                value = getattr(q, f"{name}_loc").detach()
                pyro.sample(name, pyro.distributions.Delta(value).to_event(value.dim()))

    assert_close(predict(model, Plain(), x).mean, predict(model, q, x).mean)


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_residual_variance_follows_the_prior_of_the_weights(scale):
    model = DAK(nn.Identity(), 2, num_units=2, embedding=False, scaling="none", level=4,
                prior={"z": NormalPrior(scale=scale)})  # fmt: skip
    guide = MeanFieldGuide(model, init_scale=1e-3)
    far = predict(model, guide, torch.full((1, 2), 60.0), residual_variance=True)
    expected = scale**2 * model.unit_scale.square().sum()
    assert_close(far.epistemic.item(), expected.item(), rtol=1e-3, atol=0)


def test_residual_variance_refuses_priors_without_one_variance():
    options = {"num_units": 2, "embedding": False, "level": 2}
    x = torch.rand(3, 2)
    model = DAK(nn.Identity(), 2, **options, prior={"shrinkage": HorseshoePrior()}).eval()
    with pytest.raises(NotImplementedError, match="shrinkage"):
        predict(model, MeanFieldGuide(model), x, residual_variance=True)
    model = DAK(nn.Identity(), 2, **options, prior={"z": StudentTPrior(df=1.5)}).eval()
    with pytest.raises(NotImplementedError, match="finite variance"):
        predict(model, MeanFieldGuide(model), x, residual_variance=True)


def test_a_prediction_does_not_change_with_later_training():
    model, guide, x = make()
    prediction = predict(model, guide, x)
    y = torch.zeros(40, 2)
    before = prediction.log_prob(y)
    with torch.no_grad():
        model.likelihood.noise.log_scale.add_(1.0)
    assert torch.equal(prediction.log_prob(y), before)


def test_log_prob_wants_as_many_rows():
    model, guide, x = make(num_outputs=1)
    with pytest.raises(ValueError, match="must have 40 rows"):
        predict(model, guide, x).log_prob(torch.zeros(1, 1))
    model, guide, x = make("categorical", num_outputs=3)
    with pytest.raises(ValueError, match="must have 40 rows"):
        predict(model, guide, x).log_prob(torch.zeros(3, dtype=torch.long))


def test_extreme_logits_keep_a_finite_log_probability():
    model, guide, x = make("categorical", num_outputs=2)
    with torch.no_grad():
        guide.mu_loc.copy_(torch.tensor([500.0, -500.0]))
        guide.mu_log_scale.fill_(-5.0)
    log_prob = predict(model.float(), guide.float(), x.float()).log_prob(torch.ones(40).long())
    assert_close(log_prob, torch.full((40,), -1000.0, dtype=torch.float32), rtol=0.02, atol=0)


def test_training_works_after_inference_mode():
    model, guide, x = make()
    with torch.inference_mode():
        model(x)
    guide.moments(model.layer, model.unit_inputs(x)).mean.sum().backward()
    assert guide.z_loc.grad is not None


COMPILED = """
import warnings, torch
from itertools import product
from torch.testing import assert_close
from torch import nn
from pyro_dak import DAK, CategoricalLikelihood, FullRankGuide, GaussianLikelihood, MeanFieldGuide
from pyro_dak import predict

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
warnings.simplefilter("error", UserWarning)
warnings.filterwarnings("ignore", module="torch")
cases = [(MeanFieldGuide, GaussianLikelihood, 1), (FullRankGuide, GaussianLikelihood, 2),
         (MeanFieldGuide, CategoricalLikelihood, 3)]
for guide_class, likelihood, num_outputs in cases:
    network = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
    model = DAK(network, 4, 3, num_outputs, 3, likelihood=likelihood())
    x = torch.randn(40, 3)
    model(x)
    guide = guide_class(model, init_scale=0.4, init_loc_scale=0.7)
    for weights in range(2):
        before = torch._dynamo.utils.counters["frames"]["ok"]
        for num_rows, residual in product((40, 17, 1), (False, True)):
            options = {"method": "probit", "chunk_size": 25, "residual_variance": residual}
            eager, compiled = (
                predict(model, guide, x[:num_rows], compile=how, **options) for how in (False, True)
            )
            assert_close(compiled.functions[:2], eager.functions[:2])
        num_compiled = torch._dynamo.utils.counters["frames"]["ok"] - before
        assert num_compiled == 0 if weights else num_compiled >= 1, num_compiled
        assert not torch._dynamo.utils.counters["graph_break"]
        with torch.no_grad():  # what is compiled must read the weights, not remember them
            for parameter in (*network.parameters(), *guide.parameters()):
                parameter.mul_(1.1)
"""


@pytest.mark.slow
def test_compiled_predictions_are_the_eager_ones_also_after_training_goes_on():
    # In a process of its own: the compiler cannot look through the shape checks of the tests.
    scenarios.run_alone(COMPILED)


class MoreResidual(DAK):
    """A model with a residual variance of its own."""

    def residual_variance(self, h):
        return super().residual_variance(h) + 100


def test_residual_variance_of_a_subclass_is_added():
    model = MoreResidual(nn.Linear(3, 4), 4, num_units=2)
    guide, x = MeanFieldGuide(model), torch.randn(5, 3)
    model(x)
    found = predict(model, guide, x, residual_variance=True).epistemic
    assert (found > 100).all()


def test_prediction_goes_on_without_a_compiler(monkeypatch):
    def broken(fn, **options):
        def fail(*args):
            raise RuntimeError("no compiler here")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    model, guide, x = make()
    with pytest.warns(UserWarning, match="going on without it: no compiler here"):
        found = predict(model, guide, x, compile=True, chunk_size=15)
    predict(model, guide, x, compile=True)  # a second warning would be an error
    assert_close(found.variance, predict(model, guide, x).variance)


def test_inputs_that_are_wrong_are_no_failure_of_the_compiler(monkeypatch):
    calls = []

    def compiling(fn, **options):
        def call(*args):
            calls.append(args)
            return fn(*args)

        return call

    monkeypatch.setattr(torch, "compile", compiling)
    model, guide, x = make()
    with pytest.raises(ValueError, match=r"`x` must .*; got shape"):
        predict(model, guide, x[:, :2], compile=True)
    predict(model, guide, x, compile=True)
    assert len(calls) == 2


# Threads


@pytest.fixture
def hasty_threads():
    """Threads that take turns all the time."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


AUTOGUIDES = {
    "normal": AutoNormal,
    "low_rank_auto": AutoLowRankMultivariateNormal,
    "delta": AutoDelta,
}


@pytest.mark.usefixtures("hasty_threads")
@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("guide", [*scenarios.GUIDES, *AUTOGUIDES])
def test_predictions_of_eight_threads_are_those_of_one(guide, is_training):
    network = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 4))
    model = DAK(network, 4, num_units=3, level=3)
    x = torch.randn(40, 3)
    model(x)
    kind = AUTOGUIDES.get(guide) or scenarios.GUIDES[guide]
    q = kind(model.train(is_training))
    if guide in AUTOGUIDES:
        q(x, torch.zeros(40, 1))
    pyro.clear_param_store()
    expected = [predict(model, q, x, seed=i, num_samples=5, progress=False) for i in range(8)]
    statistics = {name: value.clone() for name, value in model.state_dict().items()}

    def run(i):
        return predict(model, q, x, seed=i % 8, num_samples=5, progress=False)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(run, range(48)))
    for i, prediction in enumerate(found):
        assert_close(prediction.mean, expected[i % 8].mean)
        assert_close(prediction.variance, expected[i % 8].variance)
    assert all(part.training == is_training for part in model.modules())
    assert not pyro.settings.get("module_local_params")
    assert not pyro.get_param_store()
    assert_close(model.state_dict(), statistics, rtol=0, atol=0)


@pytest.mark.usefixtures("hasty_threads")
@pytest.mark.parametrize("guide", ["mean_field", "normal"])
def test_other_uses_of_a_model_by_eight_threads_are_those_of_one(guide):
    model, q, x = make(num_outputs=1)
    y = torch.randn(40, 1)
    if guide == "normal":
        q = AutoNormal(model)
        q(x, y)
    uses = [
        lambda: predict(model, q, x, seed=1, num_samples=5, progress=False).mean,
        lambda: torch.tensor(exact_posterior(model, x, y).log_evidence),
        lambda: loo(model, q, x, y, num_samples=30).pointwise,
        lambda: draw_posterior(model, q, num_samples=5, x=x, seed=2).sites["z"],
    ]
    expected = [use() for use in uses]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: uses[i % 4](), range(64)))
    for i, value in enumerate(found):
        assert_close(value, expected[i % 4])


def test_drawn_functions_have_gradients_and_take_batches():
    case = scenarios.make(num_outputs=2)
    case.model.input_shape = (2,)
    draws = sample_functions(case.model, case.guide, 3)
    x = torch.randn(4, 5, 2, requires_grad=True)
    values = draws(x)
    assert values.shape == (3, 4, 5, 2)
    assert_close(draws(x[1].detach()), values[:, 1].detach())
    assert torch.autograd.gradcheck(draws, x)
    assert torch.autograd.gradcheck(draws[0], x)
    assert not draws(x.detach()).requires_grad


class CorrelatedLikelihood(Likelihood):
    """Two outputs whose noise is correlated: an event that is no product of elements."""

    def distribution(self, f):
        cov = torch.tensor([[0.5, 0.3], [0.3, 0.4]]).to(f)
        return dist.MultivariateNormal(f, cov)


class OwnHeteroscedastic(Likelihood):
    """Two functions for one output, mean and log scale."""

    def num_functions(self, num_outputs):
        return 2 * num_outputs

    def distribution(self, f):
        mean, log_scale = f.chunk(2, -1)
        return dist.Normal(mean, log_scale.exp()).to_event(1)


class OrdinalLikelihood(Likelihood):
    """Four ordered classes of one function, without a column for the output."""

    takes_integers = True

    def distribution(self, f):
        return dist.OrderedLogistic(f.squeeze(-1), torch.tensor([-1.0, 0.0, 1.0]).to(f))

    def check_targets(self, y, num_outputs):
        return y.long()


def with_likelihood(likelihood, num_outputs):
    case = scenarios.make(likelihood, num_outputs=num_outputs, num_rows=6)
    prediction = predict(case.model, case.guide, case.x)
    q = prediction.functions
    f = sample_marginals(q, 40_000)
    return case, prediction, q, f


def test_correlated_noise_is_predicted_jointly():
    case, prediction, q, f = with_likelihood(CorrelatedLikelihood(), 2)
    cov = torch.tensor([[0.5, 0.3], [0.3, 0.4]])
    assert_close(prediction.aleatoric, cov.diagonal().expand(6, 2))
    exact = dist.MultivariateNormal(q.mean, cov + torch.diag_embed(q.var)).log_prob(case.y)
    ratios = (dist.MultivariateNormal(f[:1000], cov).log_prob(case.y) - exact).exp()
    error = 4 * ratios.std(0) / 1000**0.5
    assert ((prediction.log_prob(case.y) - exact).exp() - 1).abs().le(error).all()
    assert prediction.sample(3).shape == (3, 6, 2)
    low, high = prediction.interval(0.9)
    sd = prediction.std
    assert_close(low, prediction.mean - 1.645 * sd, atol=0.3, rtol=0)
    assert_close(high, prediction.mean + 1.645 * sd, atol=0.3, rtol=0)


def test_a_likelihood_of_several_functions_is_predicted_by_draws():
    case, prediction, _, f = with_likelihood(OwnHeteroscedastic(), 1)
    mean, log_scale = f.chunk(2, -1)
    noise = (2 * log_scale).exp()
    assert (prediction.mean - mean.mean(0)).abs().le(4 * mean.std(0) / 1000**0.5).all()
    assert (prediction.aleatoric - noise.mean(0)).abs().le(4 * noise.std(0) / 1000**0.5).all()
    densities = dist.Normal(mean, log_scale.exp()).log_prob(case.y).sum(-1).exp()
    error = 4 * densities.std(0) / 1000**0.5
    assert (prediction.log_prob(case.y).exp() - densities.mean(0)).abs().le(error).all()


def test_ordered_classes_have_moments_and_quantiles():
    _, prediction, _, f = with_likelihood(OrdinalLikelihood(), 1)
    probs = OrdinalLikelihood().distribution(f).probs.mean(0)  # (N, 4)
    k = torch.arange(4.0)
    assert_close(prediction.mean.flatten(), probs @ k, atol=0.05, rtol=0)
    variance = probs @ k.square() - (probs @ k).square()
    assert_close(prediction.variance.flatten(), variance, atol=0.1, rtol=0)
    assert (prediction.interval(0.9)[0] == prediction.interval(0.9)[0].round()).all()
    assert prediction.sample(5).shape == (5, 6, 1)
    log_probs = prediction.log_prob(torch.arange(6) % 4)
    expected = probs.gather(-1, (torch.arange(6) % 4).unsqueeze(-1)).flatten().log()
    assert_close(log_probs, expected, atol=0.1, rtol=0)


@pytest.mark.parametrize("likelihood", ["poisson", "bernoulli"])
@pytest.mark.parametrize("q", [0.05, 0.3, 0.5, 0.95])
def test_quantiles_of_counts_are_counts(likelihood, q):
    _, prediction, _, _ = with_likelihood(scenarios.LIKELIHOODS[likelihood](), 2)
    found = prediction.quantile(q, num_samples=20_000)
    assert (found == found.round()).all()
    # P(y <= found) >= q and P(y < found) <= q, by the predictive density of counts.
    counts = torch.arange(2.0 if likelihood == "bernoulli" else 200.0)
    cdf = torch.stack([_mass(prediction, k) for k in counts]).cumsum(0)  # (K, N, C)
    at = cdf.gather(0, found.long().unsqueeze(0)).squeeze(0)
    below = torch.where(
        found > 0, cdf.gather(0, (found - 1).clamp(min=0).long().unsqueeze(0))[0], 0
    )
    assert (at > q - 0.015).all()
    assert (below < q + 0.015).all()


def _mass(prediction, k):
    """P(y = k) of each output by itself, `(N, C)`."""
    q, likelihood = prediction.functions, prediction.likelihood
    y = torch.full_like(q.mean[:, :1], float(k))
    parts = [
        likelihood.predictive_log_prob(
            y, FunctionMoments(q.mean[:, c : c + 1], q.var[:, c : c + 1])
        )
        for c in range(q.mean.shape[1])
    ]
    return torch.stack(parts, -1).exp().detach()
