"""Any posterior predicts: closed forms as they are, draws as a naive loop over them does."""

import math
import re

import numpy
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, Predictive
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal
from torch.testing import assert_close

from pyro_dak import (
    GaussianLikelihood,
    HorseshoePrior,
    calibrate,
    compare_posteriors,
    components,
    learn_novelty,
    predict,
    run_nuts,
    sample_functions,
)
from pyro_dak.diagnostics import loo
from pyro_dak.inference.draws import draw_posterior, resolve_posterior
from pyro_dak.prediction.results import MixturePrediction
from pyro_dak.training.plan import History
from tests import scenarios

SHORT = pytest.mark.filterwarnings("ignore:.*(diverged|r-hat).*:UserWarning")


def run_of(case, **options):
    return run_nuts(
        case.model, case.x, case.y, 6, 6, 2, max_tree_depth=3, progress=False, **options
    )


def of_pyro(case):
    mcmc = MCMC(NUTS(case.model.observe), num_samples=6, warmup_steps=2, disable_progbar=True)
    mcmc.run(case.h.detach(), case.y)
    return mcmc


def listed(case):
    """An autoguide for z, and another for the rest."""
    guide = AutoGuideList(case.model)
    guide.append(AutoNormal(poutine.block(case.model, expose=["z"]), init_scale=0.3))
    guide.append(AutoDelta(poutine.block(case.model, hide=["z"])))
    guide(case.x, case.y)
    return guide


def draws_by_loop(case, sites):
    """f at the rows of the case, one draw after the other, `(S, N, F)`."""
    h = case.h
    f = [
        case.model.functions(h, {name: value[s] for name, value in sites.items()})
        for s in range(len(sites["mu"]))
    ]
    return torch.stack(f).detach()


def assert_moments_of(prediction, f):
    assert_close(prediction.functions.mean, f.mean(0))
    assert_close(prediction.functions.var, f.var(0))
    root = prediction.functions.root
    assert_close(
        torch.einsum("rna,rnb->nab", root, root),
        torch.stack([f[:, n].mT.cov() for n in range(f.shape[1])]),
    )


POSTERIORS = {
    "nuts": run_of,
    "pyro": of_pyro,
    "dictionary": lambda case: run_of(case).flat(),
    "chains": lambda case: run_of(case).get_samples(group_by_chain=True),
    "arrays": lambda case: {n: v.numpy() for n, v in run_of(case).flat().items()},
    "single": lambda case: {n: v.float() for n, v in run_of(case).flat().items()},
    "autoguides": listed,
}


@SHORT
@pytest.mark.parametrize("kind", POSTERIORS)
def test_moments_of_f_are_those_over_the_draws(kind):
    case = scenarios.make(linear_term=True)
    posterior = POSTERIORS[kind](case)
    draws = draw_posterior(case.model, posterior, num_samples=100, x=case.x, seed=0)
    prediction = predict(case.model, posterior, case.x)
    assert_moments_of(prediction, draws_by_loop(case, draws.flat()))
    noise = case.model.likelihood.noise_scale.square().expand_as(prediction.mean)
    assert_close(prediction.aleatoric, noise)


@pytest.mark.parametrize("residual_variance", [False, True])
def test_an_exact_posterior_predicts_as_its_guide_does(residual_variance):
    case = scenarios.gaussian_regression(num_rows=20)
    exact = case.exact()
    own, other = (
        predict(case.model, q, case.x, residual_variance=residual_variance)
        for q in (exact, exact.guide)
    )
    assert torch.equal(own.functions.mean, other.functions.mean)
    assert torch.equal(own.functions.var, other.functions.var)
    design = case.model.layer.design(case.h)
    for c in range(2):
        cov = exact.guide.weight_covariance()[c * 7 : c * 7 + 7, c * 7 : c * 7 + 7]
        var = torch.einsum("nk,kl,nl->n", design, cov, design)
        lost = case.model.residual_variance(case.h)[:, c] * residual_variance
        assert_close(own.epistemic[:, c], (var + lost).detach())


@SHORT
def test_probabilities_of_classes_are_averages_over_the_draws():
    case = scenarios.classification(num_rows=12)
    run = run_of(case)
    f = draws_by_loop(case, run.flat())
    prediction = predict(case.model, run, case.x, chunk_size=5)
    assert_close(prediction.probs, f.softmax(-1).mean(0))
    entropies = torch.special.entr(f.softmax(-1)).sum(-1)
    assert_close(prediction.expected_entropy, entropies.mean(0))
    case.model.calibration = torch.tensor(2.0)
    assert_close(predict(case.model, run, case.x).probs, (f / 2).softmax(-1).mean(0))


def test_residual_variance_widens_draws_of_classes():
    case = scenarios.classification(num_rows=4)
    far = torch.full((1, 2), 50.0)
    case.model.scaling.first.zero_()
    sites = {name: value.expand(4000, *value.shape[1:]) for name, value in draw_posterior(
        case.model, case.guide, num_samples=1).flat().items()}  # fmt: skip
    residual = case.model.residual_variance(case.model.unit_inputs(far))
    f = draws_by_loop(scenarios.Scenario(case.model, case.guide, far, case.y), sites)[:1]
    noisy = f + residual.detach().sqrt() * torch.randn(40_000, 1, 3)
    found = predict(case.model, sites, far, residual_variance=True).probs
    difference = noisy.softmax(-1).mean(0) - found
    error = noisy.softmax(-1).std(0) * (1 / 40_000 + 1 / 4000) ** 0.5
    assert (difference.abs() < 4 * error).all()


@SHORT
def test_sampled_noise_makes_a_mixture_over_the_draws():
    case = scenarios.gaussian_regression(num_rows=10)
    run = run_of(case, noise_prior=dist.LogNormal(torch.tensor(-0.5), torch.tensor(0.5)))
    sites = run.flat()
    noise = sites["noise_scale"]
    f = draws_by_loop(case, {name: sites[name] for name in ("z", "mu")})
    prediction = predict(case.model, run, case.x)
    assert isinstance(prediction, MixturePrediction)
    assert_close(prediction.mean, f.mean(0))
    assert_close(prediction.epistemic, f.var(0))
    assert_close(prediction.aleatoric, noise.square().mean().expand_as(prediction.mean))
    densities = [
        dist.Normal(f_s, noise_s).log_prob(case.y).sum(-1).exp()
        for f_s, noise_s in zip(f, noise, strict=True)
    ]
    assert_close(prediction.log_prob(case.y), torch.stack(densities).mean(0).log())
    y = prediction.sample(60_000)
    shares = [(y < bound).double().mean(0) for bound in prediction.interval(0.9)]
    assert_close(shares[0], torch.full_like(shares[0], 0.05), atol=0.03, rtol=0)
    assert_close(shares[1], torch.full_like(shares[1], 0.95), atol=0.03, rtol=0)
    squares = (y - prediction.mean).square()
    # The variance over S draws has S - 1 in its denominator, that of the mixture has S.
    expected = prediction.aleatoric + prediction.epistemic * (len(f) - 1) / len(f)
    assert scenarios.agrees(squares, expected)


@SHORT
def test_sampled_noise_is_not_rescaled():
    case = scenarios.gaussian_regression(num_rows=12)
    run = run_of(case, noise_prior=dist.LogNormal(torch.tensor(-0.5), torch.tensor(0.5)))
    with pytest.raises(NotImplementedError, match="draws of `noise_scale`, which say how wide"):
        calibrate(case.model, run, case.x, case.y)
    case.model.calibration = torch.tensor(2.0)
    with pytest.raises(NotImplementedError, match=r"Set `model\.calibration = None`"):
        predict(case.model, run, case.x)


@SHORT
def test_sampled_unit_scales_and_shrinkage_enter_f():
    case = scenarios.make(num_outputs=1, prior={"shrinkage": HorseshoePrior()})
    prior = dist.LogNormal(torch.tensor(0.0), torch.tensor(0.3))
    run = run_of(case, unit_scale_prior=prior)
    sites, sigma = run.flat(), case.model.unit_scale.detach()
    f = []
    for s in range(len(sites["mu"])):
        with torch.no_grad():
            case.model.layer.log_unit_scale.copy_(sites["unit_scale"][s].log())
        one = {n: v[s] for n, v in sites.items() if n != "unit_scale"}
        f.append(case.model.functions(case.h, one).detach())
    with torch.no_grad():
        case.model.layer.log_unit_scale.copy_(sigma.log())
    prediction = predict(case.model, run, case.x)
    assert_close(prediction.mean, torch.stack(f).mean(0))
    assert_close(prediction.epistemic, torch.stack(f).var(0))


@SHORT
def test_functions_are_drawn_from_any_posterior():
    case = scenarios.gaussian_regression()
    run = run_of(case)
    f = draws_by_loop(case, run.flat())
    draws = sample_functions(case.model, run, 5, seed=1)
    found = draws(case.x)
    assert found.shape == (5, 8, 2)
    distances = (found.unsqueeze(1) - f).abs().amax((-2, -1))
    assert (distances.amin(1) < 1e-10).all()
    assert len(set(distances.argmin(1).tolist())) == 5  # each at most once
    assert_close(draws[-1](case.x), found[-1])
    assert_close(draws[1:3](case.x), found[1:3])
    assert sample_functions(case.model, case.exact(), 3)(case.x).shape == (3, 8, 2)
    with pytest.raises(ValueError, match="must be at most 12, the draws that the posterior has"):
        sample_functions(case.model, run, 13)


@SHORT
@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
def test_draws_calibrate_and_tell_what_is_strange(likelihood):
    case = scenarios.make(likelihood, num_rows=60)
    run = run_of(case)
    result = calibrate(case.model, run, case.x, case.y, progress=False)
    before = -float(predict(case.model, run, case.x).log_prob(case.y).mean())
    assert_close(before, result.nlpd_after)
    case.model.calibration = None
    learn_novelty(case.model, run, case.x, progress=False)
    assert predict(case.model, run, case.x).novelty.shape == (60,)


@SHORT
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_go_into_predictive_in_the_dtype_of_the_model(dtype):
    torch.set_default_dtype(dtype)
    case = scenarios.gaussian_regression(num_outputs=1)
    run = run_of(case)
    assert {value.dtype for value in run.get_samples().values()} == {dtype}
    assert {value.dtype for value in run.sites.values()} == {torch.float64}
    for parallel in (False, True):
        y = Predictive(case.model, run.get_samples(), parallel=parallel)(case.x)["y"]
        assert y.reshape(12, 8).dtype == dtype


@SHORT
def test_draws_of_single_precision_models_are_cast_to_it():
    torch.set_default_dtype(torch.float32)
    case = scenarios.gaussian_regression(num_outputs=1)
    run = run_of(case)
    assert {v.dtype for v in resolve_posterior(case.model, run).values()} == {torch.float32}
    assert predict(case.model, run, case.x).mean.dtype == torch.float32


def test_wrong_draws_are_named():
    case = scenarios.gaussian_regression()
    sites = draw_posterior(case.model, case.guide, num_samples=4).flat()
    with pytest.raises(ValueError, match=r"every site of the model; \['z'\] are missing"):
        predict(case.model, {"mu": sites["mu"]}, case.x)
    with pytest.raises(ValueError, match=r"\['mu', 'z', .*\]; it does not know \['noise'\]"):
        predict(case.model, sites | {"noise": torch.ones(4)}, case.x)
    with pytest.raises(ValueError, match=r"`samples\['z'\]` must have shape \(draws, 2, 2, 3\)"):
        predict(case.model, sites | {"z": sites["z"][:, 0]}, case.x)
    with pytest.raises(ValueError, match="as many draws of every site"):
        predict(case.model, sites | {"z": sites["z"][:3]}, case.x)
    with pytest.raises(TypeError, match=r"`samples\['mu'\]` must have a floating dtype"):
        predict(case.model, sites | {"mu": numpy.zeros((4, 2), int)}, case.x)
    with pytest.raises(ValueError, match=r"`samples\['noise_scale'\]` must have shape \(draws\)"):
        predict(case.model, sites | {"noise_scale": torch.ones(4, 3)}, case.x)


@SHORT
def test_any_posteriors_are_compared():
    case = scenarios.gaussian_regression(num_outputs=1, num_rows=20)
    run = run_of(case)
    posteriors = {
        "exact": case.exact(),
        "run": run,
        "draws": run.get_samples(),
        "mcmc": of_pyro(case),
    }
    rows = {row["posterior"]: row for row in compare_posteriors(
        case.model, posteriors, case.x, case.y).summary()}  # fmt: skip
    assert rows["exact"]["mean_difference"] == 0
    assert rows["run"] | {"posterior": ""} == rows["draws"] | {"posterior": ""}


@SHORT
def test_results_are_shown_as_summaries():
    case = scenarios.gaussian_regression(num_rows=300)
    exact, run = case.exact(), run_of(case)
    labels = scenarios.classification(num_rows=300)
    comparison = compare_posteriors(case.model, {"exact": exact, "run": run}, case.x, case.y)
    shown = {
        "exact": (repr(exact), "2 functions x 7 weights, log evidence"),
        "run": (repr(run), r"2 x 6 draws of mu \(2,\), z \(2, 2, 3\); max r-hat .*, min ESS"),
        "prediction": (repr(predict(case.model, exact, case.x)), "300 rows x 2 outputs, Gaussian"),
        "classes": (repr(predict(labels.model, labels.guide, labels.x)), "300 rows x 3 classes"),
        "draws": (
            repr(sample_functions(case.model, exact, 50)),
            "50 draws of 2 functions; float64",
        ),
        "components": (repr(components(case.model, exact, case.x)), "300 rows x 2 functions x 2"),
        "comparison": (repr(comparison), "exact, run, against exact; 14 weights"),
        "loo": (repr(loo(case.model, exact, case.x, case.y, num_samples=50)), "300 rows, of which"),
        "history": (
            repr(History([{"loss": 1.0}] * 500, seconds=[0.1] * 500)),
            "500 epochs, running",
        ),
    }
    for text, expected in shown.values():
        assert re.search(expected, text), text
        assert len(text) < 300


@SHORT
def test_hyper_parameters_with_priors_are_known_by_their_draws():
    """A guide made of parts has draws of the noise: it predicts, and is judged with them."""
    noise = dist.LogNormal(torch.tensor(-0.5), 0.5)
    case = scenarios.make(GaussianLikelihood(noise), num_outputs=1, num_rows=10)
    guide = AutoGuideList(case.model)
    guide.append(case.guide)
    guide.append(AutoNormal(poutine.block(case.model, expose=["noise_scale"])))
    guide(case.x, case.y)
    draws = draw_posterior(case.model, guide, num_samples=100, x=case.x, seed=0)
    sites = draws.flat()
    assert set(sites) == {"mu", "z", "noise_scale"}
    f = draws_by_loop(case, {name: sites[name] for name in ("z", "mu")})
    densities = dist.Normal(f, sites["noise_scale"].reshape(-1, 1, 1)).log_prob(case.y)
    prediction = predict(case.model, guide, case.x)
    expected = densities.sum(-1).logsumexp(0) - math.log(100)
    assert_close(prediction.log_prob(case.y), expected)
    left_out = loo(case.model, guide, case.x, case.y, num_samples=100)
    again = loo(case.model, draws, case.x, case.y)
    assert left_out.elpd == again.elpd
    rows = compare_posteriors(case.model, {"a": guide, "b": run_of(case)}, case.x, case.y)
    assert set(rows.fits) == {"a", "b"}
    with pytest.raises(NotImplementedError, match="`noise_scale`"):
        predict(case.model, case.guide, case.x)
