"""The draws of NUTS and HMC are those of the posterior."""

import copy

import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC
from torch.testing import assert_close

from pyro_dak import GaussianLikelihood, StudentTLikelihood, exact_posterior, predict, run_nuts
from pyro_dak.diagnostics.posterior_moments import gaussian_fit
from pyro_dak.inference.densities import log_joint, log_likelihood
from pyro_dak.inference.draws import draw_posterior
from pyro_dak.inference.mcmc.chains import effective_sample_size
from pyro_dak.inference.mcmc.nuts import run_hmc
from tests import scenarios
from tests.inference.test_target import PRIORS


def within_monte_carlo_error(run, fit):
    """Largest distances of means and variances from a Gaussian truth, in their standard errors.

    Of n independent draws the mean has variance sd^2 / n, and the mean of squares 2 sd^4 / n.
    """
    names = [name for name in ("mu", "linear", "z") if name in run.sites]
    parts = [run.sites[n].flatten(3) if n == "z" else run.sites[n].unsqueeze(-1) for n in names]
    draws = torch.cat(parts, -1).flatten(2)  # (chains, draws, W)
    mean_se = fit.sd / effective_sample_size(draws).sqrt()
    squares = (draws - fit.mean).square()
    var_se = fit.sd.square() * (2 / effective_sample_size(squares)).sqrt()
    mean_error = (draws.flatten(0, 1).mean(0) - fit.mean) / mean_se
    sd_error = (squares.flatten(0, 1).mean(0) - fit.sd.square()) / var_se
    return mean_error.abs().max(), sd_error.abs().max()


@pytest.mark.usefixtures("no_type_checker")
def test_nuts_agrees_with_the_exact_posterior():
    """49 weights; means and variances within four Monte Carlo standard errors."""
    case = scenarios.gaussian_regression(num_outputs=1, num_units=16, level=2, num_rows=60)
    exact = exact_posterior(case.model, case.x, case.y)
    run = run_nuts(case.model, case.x, case.y, 400, 150, 2, progress=False)
    fit = gaussian_fit(case.model, exact)
    assert len(fit.mean) == 49
    mean_error, sd_error = within_monte_carlo_error(run, fit)
    assert mean_error < 4
    assert sd_error < 4
    assert run.num_divergences == 0
    assert run.max_r_hat() < 1.05


@pytest.mark.usefixtures("no_type_checker")
def test_hmc_agrees_with_the_exact_posterior():
    case = scenarios.gaussian_regression(num_rows=30)
    run = run_hmc(case.model, case.x, case.y, 400, 100, progress=False)
    fit = gaussian_fit(case.model, exact_posterior(case.model, case.x, case.y))
    assert max(within_monte_carlo_error(run, fit)) < 4


@pytest.mark.usefixtures("no_type_checker")
def test_nuts_without_whitening_has_the_same_posterior():
    case = scenarios.gaussian_regression(num_outputs=1, num_units=1)
    run = run_nuts(case.model, case.x, case.y, 300, 100, whiten=False, progress=False)
    fit = gaussian_fit(case.model, exact_posterior(case.model, case.x, case.y))
    assert max(within_monte_carlo_error(run, fit)) < 4


def importance_moments(case, num_draws=50_000):
    """Mean of every mu under the posterior, from draws of the prior weighted by the likelihood."""
    like = torch.zeros(())
    sites = {
        n: case.model.prior_distribution(n, like).sample((num_draws,))
        for n in case.model.site_shapes
    }
    weights = log_likelihood(case.model, case.h.detach(), case.y, sites).sum(-1).softmax(0)
    mean = weights @ sites["mu"]
    se = (weights.square().unsqueeze(-1) * (sites["mu"] - mean).square()).sum(0).sqrt()
    return mean, se


@pytest.mark.usefixtures("no_type_checker")
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_nuts_of_classes_agrees_with_importance_sampling(likelihood):
    case = scenarios.make(likelihood, num_units=1, level=1, num_outputs=2, num_rows=6)
    run = run_nuts(case.model, case.x, case.y, 300, 100, progress=False)
    mean, se = importance_moments(case)
    error = (run.standard_error()["mu"].square() + se.square()).sqrt()
    assert ((run.flat()["mu"].mean(0) - mean).abs() < 4 * error).all()


@pytest.mark.usefixtures("no_type_checker")
def test_sampled_noise_has_the_posterior_of_the_evidence():
    """p(noise | y) ~ p(noise) p(y | noise), with the evidence in closed form, on a grid."""
    case = scenarios.gaussian_regression(num_outputs=1, num_rows=12)
    prior = dist.LogNormal(torch.tensor(-0.5), torch.tensor(0.5))
    run = run_nuts(case.model, case.x, case.y, 200, 100, noise_prior=prior, progress=False)
    log_noise = torch.linspace(-2.5, 1.5, 41)
    log_density = []
    for value in log_noise:
        case.model.likelihood = GaussianLikelihood(float(value.exp()))
        log_evidence = exact_posterior(case.model, case.x, case.y).log_evidence
        log_density.append(log_evidence + prior.log_prob(value.exp()) + value)
    weights = torch.stack(log_density).softmax(0)
    sampled = run.sites["noise_scale"].log()
    assert sampled.shape == (1, 200)
    mean = (weights * log_noise).sum()
    se = sampled.std() / effective_sample_size(sampled).sqrt()
    assert abs(sampled.mean() - mean) < 4 * se
    squares = (sampled - mean).square()
    se = squares.std() / effective_sample_size(squares).sqrt()
    assert abs(squares.mean() - (weights * (log_noise - mean).square()).sum()) < 4 * se


@pytest.mark.filterwarnings("ignore:.*(diverged|r-hat).*:UserWarning")
@pytest.mark.usefixtures("no_type_checker")
@pytest.mark.parametrize("prior", list(PRIORS.values())[1:], ids=list(PRIORS)[1:])
def test_priors_are_swapped_under_nuts(prior):
    case = scenarios.make("gaussian", num_outputs=1, prior=prior)
    run = run_nuts(
        case.model,
        case.x,
        case.y,
        20,
        20,
        max_tree_depth=4,
        unit_scale_prior=dist.LogNormal(torch.tensor(0.0), torch.tensor(0.3)),
        progress=False,
    )
    shapes = {name: tuple(value.shape[2:]) for name, value in run.sites.items()}
    assert shapes == {n: tuple(s) for n, s in case.model.site_shapes.items()} | {"unit_scale": (2,)}
    assert all(bool(torch.isfinite(value).all()) for value in run.sites.values())
    if case.model.has_shrinkage:
        assert (run.sites["shrinkage"] > 0).all()


@pytest.mark.filterwarnings("ignore:.*(diverged|r-hat).*:UserWarning")
@pytest.mark.usefixtures("no_type_checker")
def test_scales_with_priors_in_the_model_are_sampled_as_by_options():
    noise = dist.LogNormal(torch.tensor(-0.5), torch.tensor(0.5))
    scales = dist.LogNormal(torch.tensor(0.0), torch.tensor(0.3))
    case = scenarios.make(GaussianLikelihood(noise), num_rows=20, prior={"unit_scale": scales})
    run = run_nuts(case.model, case.x, case.y, 10, 10, progress=False)
    plain = copy.deepcopy(case.model)
    plain.likelihood = GaussianLikelihood(1.0)
    plain._set_priors({})
    options = {"noise_prior": noise, "unit_scale_prior": scales}
    again = run_nuts(plain, case.x, case.y, 10, 10, **options, progress=False)
    assert set(run.sites) == {"mu", "z", "noise_scale", "unit_scale"}
    for name, value in run.sites.items():
        assert_close(value, again.sites[name])
    assert_close(run.stats["lp"], again.stats["lp"])
    assert predict(case.model, run, case.x).mean.shape == (20, 2)
    with pytest.raises(ValueError, match="`noise_scale` has a prior in the model already"):
        run_nuts(case.model, case.x, case.y, 4, 0, noise_prior=noise, progress=False)
    heavy = scenarios.make(StudentTLikelihood(dist.Gamma(torch.tensor(4.0), 1.0)))
    with pytest.raises(NotImplementedError, match="`df`"):
        run_nuts(heavy.model, heavy.x, heavy.y, 4, 0, progress=False)


@pytest.mark.filterwarnings("ignore:.*r-hat.*:UserWarning")
def test_runs_are_seeded_chain_by_chain_and_leave_no_trace():
    case = scenarios.make("categorical", num_outputs=3)
    before, mode = torch.get_rng_state(), case.model.training
    first = run_nuts(case.model, case.x, case.y, 10, 10, 2, seed=1, progress=False)
    again = run_nuts(case.model, case.x, case.y, 10, 10, 1, seed=2, progress=False)
    assert torch.equal(first.sites["z"][1], again.sites["z"][0])
    assert not torch.equal(first.sites["z"][0], first.sites["z"][1])
    assert torch.equal(torch.get_rng_state(), before)
    assert case.model.training == mode
    assert all(parameter.grad is None for parameter in case.model.parameters())


@pytest.mark.filterwarnings("ignore:.*r-hat.*:UserWarning")
def test_a_run_says_what_it_did():
    case = scenarios.gaussian_regression(num_outputs=1)
    run = run_nuts(case.model, case.x, case.y, 20, 20, 2, progress=False)
    assert set(run.stats) == {"lp", "energy", "diverging", "n_steps", "step_size"}
    assert {tuple(value.shape) for value in run.stats.values()} == {(2, 20)}
    assert (run.stats["n_steps"] >= 1).all()
    expected = log_joint(case.model, case.h.detach(), case.y, run.flat())
    assert_close(run.stats["lp"].flatten(), expected)
    report = run.report()
    assert "2 chains of 20 draws" in report
    assert "0 divergences" in report
    assert [line.split()[0] for line in report.splitlines()[2:]] == ["mu", "z"]
    assert run.get_samples()["z"].shape == (40, 1, 2, 3)
    assert run.get_samples(group_by_chain=True)["z"].shape == (2, 20, 1, 2, 3)
    assert draw_posterior(case.model, run) is run


@pytest.mark.filterwarnings("ignore:.*r-hat.*:UserWarning")
def test_energy_is_potential_plus_kinetic():
    """A whitened regression of K weights is a standard normal: E = U + K is chi^2 / 2 of 2 K."""
    case = scenarios.gaussian_regression(num_outputs=1)
    run = run_nuts(case.model, case.x, case.y, 400, 50, progress=False)
    K = case.model.layer.num_weights
    lowest = run.stats["energy"].new_tensor(-log_joint_at_mean(case))
    kinetic = run.stats["energy"][:, 1:] + run.stats["lp"][:, :-1]  # lp is -U up to a constant
    assert (kinetic > 0).all()
    se = effective_sample_size(kinetic).rsqrt() * kinetic.std()
    assert (kinetic.mean() - K / 2).abs() < 4 * se
    energy = run.stats["energy"] - lowest
    assert (energy.mean() - K).abs() < 4 * energy.std() * effective_sample_size(energy).rsqrt()


def log_joint_at_mean(case):
    """log p(y, w) at the posterior mean of a regression, where it is largest."""
    means = case.exact().guide.weight_means()
    sites = {"z": means.z.detach().unsqueeze(0), "mu": means.mu.detach().unsqueeze(0)}
    return float(log_joint(case.model, case.h.detach(), case.y, sites))


def test_progress_is_shown_on_stderr_when_asked_for(capsys):
    case = scenarios.gaussian_regression(num_outputs=1, num_units=1)
    run_nuts(case.model, case.x, case.y, 100, 50, progress=True)
    shown = capsys.readouterr()
    assert "chain 1/1: 100%" in shown.err
    assert shown.out == ""


def test_runs_that_cannot_be_trusted_warn(monkeypatch):
    monkeypatch.setattr(MCMC, "diagnostics", lambda self: {"divergences": {"chain 0": [1, 3]}})
    case = scenarios.gaussian_regression(num_outputs=1)
    mixing = pytest.warns(UserWarning, match="above 1.05: the chains have not mixed")
    diverged = "^2 of 4 transitions diverged: .* Raise `target_accept_prob`"
    with mixing, pytest.warns(UserWarning, match=diverged):
        run = run_nuts(case.model, case.x, case.y, num_samples=4, warmup_steps=0, progress=False)
    assert run.stats["diverging"].tolist() == [[False, True, False, True]]


@pytest.mark.filterwarnings("ignore:.*r-hat.*:UserWarning")
def test_single_precision_models_are_sampled():
    torch.set_default_dtype(torch.float32)
    case = scenarios.make("categorical", num_outputs=3, num_rows=30)
    run = run_nuts(case.model, case.x, case.y, 100, 50, progress=False)
    assert run.sites["z"].dtype == torch.float64
    assert run.max_r_hat() < 1.1


def test_bad_requests_are_refused():
    case = scenarios.make("categorical", num_outputs=3)
    with pytest.raises(ValueError, match="`noise_prior` needs a likelihood with a noise scale"):
        run_nuts(case.model, case.x, case.y, noise_prior=dist.HalfNormal(torch.tensor(1.0)))
    with pytest.raises(ValueError, match="`y` must lie between 0 and 2"):
        run_nuts(case.model, case.x, case.y + 2)
    with pytest.raises(ValueError, match="`num_samples` must be at least 4"):
        run_nuts(case.model, case.x, case.y, num_samples=3)
    positive = scenarios.make(prior={"z": dist.HalfNormal(torch.tensor(1.0))})
    with pytest.raises(NotImplementedError, match="must have the real line as its support"):
        run_nuts(positive.model, positive.x, positive.y)
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_tree_depth'"):
        run_hmc(case.model, case.x, case.y, max_tree_depth=3)
    with pytest.raises(ValueError, match="`trajectory_length` must be positive"):
        run_hmc(case.model, case.x, case.y, trajectory_length=0.0)


@pytest.mark.parametrize("run", [run_nuts, run_hmc])
def test_inputs_of_another_dtype_are_named(run):
    case = scenarios.gaussian_regression()
    message = r"`x` must have the dtype of the model, torch\.float64; got torch\.float32"
    with pytest.raises(TypeError, match=message):
        run(case.model, case.x.float(), case.y, 4, 2, progress=False)
