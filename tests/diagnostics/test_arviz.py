"""ArviZ, 0.x or 1.x, reads what we export, from samplers and from guides."""

import math
import sys

import numpy
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide import AutoDelta, AutoNormal
from torch.testing import assert_close

from pyro_dak import GaussianLikelihood, HorseshoePrior, run_nuts, to_arviz
from pyro_dak.diagnostics import k_hat, loo
from pyro_dak.inference.densities import log_joint, log_likelihood
from pyro_dak.validation import import_optional
from tests import scenarios

matplotlib = import_optional("matplotlib")
matplotlib.use("Agg")
pyplot = import_optional("matplotlib.pyplot")
arviz = import_optional("arviz")

# Warnings of ArviZ about itself and about short runs; those about us stay errors.
quiet = pytest.mark.filterwarnings(
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
    "ignore:.*r-hat.*:UserWarning",
    "ignore:Estimated shape parameter.*:UserWarning",
    "ignore:The draws come from a guide.*:UserWarning",
    "ignore:.*(layout|tight).*:UserWarning",
)


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    pyplot.close("all")


def regression():
    return scenarios.gaussian_regression(num_outputs=1, num_rows=20)


def posterior_of(case, kind):
    if kind == "exact":
        return case.exact()
    if kind == "auto":
        guide = AutoNormal(case.model, init_scale=0.3)
        guide(case.x, case.y)
        return guide
    if kind == "nuts":
        return run_nuts(case.model, case.x, case.y, 40, 40, 2, progress=False)
    return case.guide


kinds = pytest.mark.parametrize("kind", ["guide", "auto", "exact", "nuts"])


def export(case, kind, **options):
    return to_arviz(case.model, posterior_of(case, kind), case.x, case.y, num_samples=50, **options)


def values(data, group, name):
    return torch.as_tensor(numpy.asarray(data[group][name]))


@quiet
@kinds
def test_groups_and_dimensions(kind):
    data = export(regression(), kind)
    assert data["posterior"]["z"].dims == ("chain", "draw", "output", "unit", "node")
    assert data["posterior"]["mu"].dims == ("chain", "draw", "output")
    assert data["posterior_predictive"]["y"].dims == ("chain", "draw", "obs_id")
    assert data["log_likelihood"]["y"].dims == ("chain", "draw", "obs_id")
    assert data["observed_data"]["y"].dims == ("obs_id",)
    assert data["constant_data"]["unit_inputs"].dims == ("obs_id", "unit")
    stats = {"log_p", "log_q", "log_weight"}
    if kind == "nuts":
        stats = {"lp", "energy", "diverging", "n_steps", "step_size"}
    assert set(data["sample_stats"].data_vars) == stats


@quiet
@pytest.mark.parametrize("likelihood", scenarios.LIKELIHOODS)
def test_every_likelihood_is_exported(likelihood):
    case = scenarios.make(likelihood, prior={"shrinkage": HorseshoePrior()})
    data = export(case, "guide")
    function = "function" if likelihood == "heteroscedastic" else "output"
    assert data["posterior"]["z"].dims[2:] == (function, "unit", "node")
    assert data["posterior"]["shrinkage"].dims[2:] == ("unit",)
    columns = () if likelihood == "categorical" else ("output",)
    assert data["observed_data"]["y"].dims == ("obs_id", *columns)
    assert data["posterior_predictive"]["y"].dims == ("chain", "draw", "obs_id", *columns)
    assert data["log_likelihood"]["y"].dims == ("chain", "draw", "obs_id")
    draws = {n: values(data, "posterior", n).flatten(0, 1) for n in case.model.site_shapes}
    expected = log_likelihood(case.model, case.h.detach(), case.y, draws)
    assert_close(values(data, "log_likelihood", "y").flatten(0, 1), expected)
    expected = log_joint(case.model, case.h.detach(), case.y, draws)
    assert_close(values(data, "sample_stats", "log_p").flatten(), expected)


@quiet
def test_sampled_scales_have_their_dimensions():
    noise = GaussianLikelihood(torch.tensor([0.3, 0.8]))
    case = scenarios.make(noise, num_rows=20)
    run = run_nuts(
        case.model,
        case.x,
        case.y,
        20,
        20,
        noise_prior=dist.HalfNormal(torch.tensor(1.0)),
        unit_scale_prior=dist.HalfNormal(torch.tensor(1.0)),
        max_tree_depth=4,
        progress=False,
    )
    data = to_arviz(case.model, run, case.x, case.y)
    assert data["posterior"]["noise_scale"].dims == ("chain", "draw", "output")
    assert data["posterior"]["unit_scale"].dims == ("chain", "draw", "unit")


@quiet
@kinds
def test_arviz_reads_it(kind):
    data = export(regression(), kind)
    table = arviz.summary(data, var_names=["mu", "z"])
    assert len(table) == 7
    result = arviz.loo(data)
    assert numpy.isfinite(result.elpd_loo if hasattr(result, "elpd_loo") else result.elpd)
    assert arviz.plot_trace(data, var_names=["mu"]) is not None
    plot_ppc = arviz.plot_ppc if hasattr(arviz, "plot_ppc") else arviz.plot_ppc_dist
    assert plot_ppc(data) is not None


@quiet
def test_arviz_compares_models():
    case = regression()
    ranked = arviz.compare({kind: export(case, kind) for kind in ("exact", "nuts")})
    assert set(ranked.index) == {"exact", "nuts"}


@quiet
def test_our_leave_one_out_equals_that_of_arviz():
    case = regression()
    run = run_nuts(case.model, case.x, case.y, 200, 100, progress=False)
    theirs = arviz.loo(to_arviz(case.model, run, case.x, case.y), reff=1.0)
    elpd = theirs.elpd_loo if hasattr(theirs, "elpd_loo") else theirs.elpd
    assert loo(case.model, run, case.x, case.y).elpd == pytest.approx(float(elpd))


@quiet
@pytest.mark.skipif(not hasattr(arviz, "loo_approximate_posterior"), reason="only in ArviZ 1.x")
def test_arviz_corrects_for_the_guide_as_we_do():
    case = regression()
    data = to_arviz(case.model, case.guide, case.x, case.y, num_samples=500)
    stats = data["sample_stats"]
    theirs = arviz.loo_approximate_posterior(data, log_p=stats["log_p"], log_q=stats["log_q"])
    ours = loo(case.model, case.guide, case.x, case.y, num_samples=2000)
    # This guide is far off, and the two smooth the far end of a heavy tail differently.
    assert ours.elpd == pytest.approx(float(theirs.elpd), rel=1e-3)


def test_a_guide_far_from_the_posterior_is_exported_with_a_warning_and_its_k_hat():
    case = regression()
    with pytest.warns(UserWarning, match=r"k-hat is [\d.]+.*`az.loo`.*`pyro_dak.diagnostics.loo`"):
        data = export(case, "guide")
    assert data["log_likelihood"].attrs["k_hat"] == k_hat(
        case.model, case.guide, case.x, case.y, num_samples=200
    )
    assert "not from the posterior" in data["log_likelihood"].attrs["note"]
    assert data["posterior"].attrs["k_hat"] == data["log_likelihood"].attrs["k_hat"]
    weights = values(data, "sample_stats", "log_weight").exp()
    assert_close(weights.sum(), torch.tensor(1.0))


@quiet
def test_the_fraction_of_missing_information_is_read():
    case = regression()
    run = run_nuts(case.model, case.x, case.y, 100, 50, 2, progress=False)
    found = arviz.bfmi(to_arviz(case.model, run, case.x, case.y))
    found = found if isinstance(found, numpy.ndarray) else numpy.asarray(found["energy"])
    energy = run.stats["energy"].numpy()
    expected = numpy.square(numpy.diff(energy)).mean(1) / energy.var(1)
    assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=0.02, atol=0)
    assert (found > 0.5).all()


@quiet
def test_a_run_of_pyro_keeps_its_statistics():
    case = regression()
    mcmc = MCMC(NUTS(case.model.observe), num_samples=10, warmup_steps=2, disable_progbar=True)
    mcmc.run(case.h.detach(), case.y)
    data = to_arviz(case.model, mcmc, case.x, case.y)
    diverging = numpy.zeros((1, 10), bool)
    diverging[0, mcmc.diagnostics()["divergences"]["chain 0"]] = True
    assert (data["sample_stats"]["diverging"].values == diverging).all()
    lp = log_joint(case.model, case.h.detach(), case.y, mcmc.get_samples())
    assert_close(values(data, "sample_stats", "lp").flatten(), lp)


@quiet
def test_models_with_priors_on_their_noise_are_exported_with_all_sites():
    noise = dist.LogNormal(torch.tensor(-0.5), 0.5)
    case = scenarios.make(GaussianLikelihood(noise), num_outputs=1, num_rows=10)
    mcmc = MCMC(NUTS(case.model.observe), num_samples=6, warmup_steps=2, disable_progbar=True)
    mcmc.run(case.h.detach(), case.y)
    data = to_arviz(case.model, mcmc, case.x, case.y)
    samples = mcmc.get_samples()
    assert_close(values(data, "posterior", "noise_scale").flatten(), samples["noise_scale"])
    f = torch.stack([
        case.model.functions(case.h, {"z": z, "mu": mu})
        for z, mu in zip(samples["z"], samples["mu"], strict=True)
    ]).detach()  # fmt: skip
    scale = samples["noise_scale"].reshape(-1, 1, 1)
    expected = dist.Normal(f, scale).log_prob(case.y).sum(-1)
    assert_close(values(data, "log_likelihood", "y").squeeze(0), expected)
    prior = noise.log_prob(samples["noise_scale"])
    prior = prior + sum(dist.Normal(0.0, 1.0).log_prob(samples[n]).flatten(1).sum(1)
                        for n in ("z", "mu"))  # fmt: skip
    assert_close(values(data, "sample_stats", "lp").flatten(), expected.sum(-1) + prior)


def test_a_point_estimate_is_exported_with_a_warning():
    case = regression()
    guide = AutoDelta(case.model)
    guide(case.x, case.y)
    with pytest.warns(UserWarning, match="k-hat is inf"):
        to_arviz(case.model, guide, case.x, case.y, num_samples=50)


@pytest.mark.filterwarnings("ignore:.*r-hat.*:UserWarning")
def test_draws_of_the_posterior_and_exports_without_log_likelihoods_do_not_warn():
    case = regression()
    assert export(case, "exact")["log_likelihood"].attrs["k_hat"] == -math.inf
    assert "k_hat" not in export(case, "nuts")["log_likelihood"].attrs
    data = export(case, "guide", log_likelihood=False)
    groups = data.groups() if callable(data.groups) else data.groups
    assert "log_likelihood" not in {name.strip("/") for name in groups}
    assert data["observed_data"]["y"].dims == ("obs_id",)


@quiet
def test_without_targets_there_are_predictions_only():
    case = regression()
    data = to_arviz(case.model, case.guide, case.x, num_samples=5)
    groups = data.groups() if callable(data.groups) else data.groups
    assert {name.strip("/") for name in groups} - {""} == {
        "posterior",
        "posterior_predictive",
        "sample_stats",
        "constant_data",
    }
    again = to_arviz(case.model, case.guide, case.x, num_samples=5)
    first, second = (values(d, "posterior_predictive", "y") for d in (data, again))
    assert torch.equal(first, second)


def test_a_missing_arviz_is_named_with_its_remedy(monkeypatch):
    case = regression()
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ImportError, match=r"needs arviz, .*pip install 'pyro_dak\[diagnostics\]'"):
        to_arviz(case.model, case.guide, case.x)
