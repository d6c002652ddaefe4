"""Posteriors side by side, and what variational inference owes to the exact posterior."""

import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoNormal
from torch.testing import assert_close

from pyro_dak import (
    ClosedFormELBO,
    FullRankGuide,
    MeanFieldGuide,
    NormalPrior,
    StudentTPrior,
    UnitBlockGuide,
    compare_posteriors,
    exact_posterior,
)
from pyro_dak.diagnostics.comparison import wasserstein_2
from pyro_dak.diagnostics.posterior_moments import GaussianFit, gaussian_fit
from pyro_dak.inference.draws import Draws, draw_posterior
from tests import scenarios


def test_wasserstein_distance_of_commuting_covariances():
    """With common eigenvectors W2^2 = |m_a - m_b|^2 + sum (s_a - s_b)^2."""
    Q = torch.linalg.qr(torch.randn(5, 5)).Q
    a, b, shift = torch.rand(5), torch.rand(5), torch.randn(5)
    first = GaussianFit(torch.zeros(5), Q @ torch.diag(a.square()) @ Q.mT)
    second = GaussianFit(shift, Q @ torch.diag(b.square()) @ Q.mT)
    expected = (shift.square().sum() + (a - b).square().sum()).sqrt()
    assert wasserstein_2(first, second) == pytest.approx(float(expected))
    assert wasserstein_2(first, first) == pytest.approx(0, abs=1e-6)


def test_wasserstein_distance_from_draws_has_the_stated_error():
    truth, squared = GaussianFit(torch.zeros(20), torch.eye(20)), []
    for _ in range(20):
        draws = torch.randn(2000, 20)
        squared.append(wasserstein_2(GaussianFit(draws.mean(0), draws.mT.cov()), truth) ** 2)
    mean = torch.tensor(squared).mean().sqrt()
    assert_close(mean, torch.tensor((20 * 25 / 2000) ** 0.5 / 2), rtol=0.05, atol=0)


def many_weights(**options):
    """49 weights, 60 rows, one output."""
    options = {"num_outputs": 1, "num_units": 16, "level": 2, "num_rows": 60} | options
    return scenarios.gaussian_regression(**options)


def train(case, guide, steps=600, learning_rate=0.05):
    """SVI on cached unit inputs with the closed form, at a rate that falls a thousandfold."""
    h = case.h.detach()
    case.model.requires_grad_(False)
    optimizer = torch.optim.Adam(guide.parameters(), learning_rate)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 1e-3 ** (1 / steps))
    for _ in range(steps):
        optimizer.zero_grad()
        (-ClosedFormELBO().terms_from_units(case.model, guide, h, case.y).elbo).backward()
        optimizer.step()
        decay.step()
    return guide


@pytest.mark.usefixtures("no_type_checker")
def test_full_rank_guide_finds_the_exact_sds_by_svi():
    case = many_weights()
    guide = train(case, FullRankGuide(case.model), steps=1500, learning_rate=0.1)
    exact = gaussian_fit(case.model, case.exact())
    ratio = gaussian_fit(case.model, guide).sd / exact.sd
    assert len(ratio) == 49
    assert (ratio - 1).abs().max() < 0.02


@pytest.mark.usefixtures("no_type_checker")
def test_mean_field_is_narrower_and_its_gap_is_evidence_minus_elbo():
    case = many_weights()
    guide = train(case, MeanFieldGuide(case.model))
    exact = exact_posterior(case.model, case.x, case.y)
    comparison = compare_posteriors(case.model, {"q": guide, "exact": exact}, case.x, case.y)
    row, own = comparison.summary()
    assert row["max_sd_ratio"] <= 1 + 1e-3
    elbo = -ClosedFormELBO().loss(case.model, guide, case.x, case.y)
    assert row["elbo"] == pytest.approx(elbo)
    assert row["evidence_gap"] == pytest.approx(exact.log_evidence - elbo)
    assert row["evidence_gap"] > 0.1
    assert own["evidence_gap"] == pytest.approx(0, abs=1e-8)
    # At the optimum the mean-field precision is the diagonal of the exact one.
    precision = torch.linalg.inv(comparison.fits["exact"].cov).diagonal()
    assert_close(comparison.fits["q"].sd, precision.rsqrt(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("guide_class", [MeanFieldGuide, UnitBlockGuide, FullRankGuide])
@pytest.mark.parametrize("linear_term", [False, True])
def test_what_a_guide_loses_for_not_having_converged_is_told_apart(guide_class, linear_term):
    case = scenarios.gaussian_regression(num_rows=20, num_units=2, linear_term=linear_term)
    guide = guide_class(case.model)
    optimizer = torch.optim.LBFGS(guide.parameters(), max_iter=400, line_search_fn="strong_wolfe")
    optimizer.param_groups[0].update(tolerance_grad=1e-9, tolerance_change=1e-14)

    def loss_fn():
        optimizer.zero_grad()
        loss = ClosedFormELBO().differentiable_loss(case.model, guide, case.x, case.y)
        loss.backward(inputs=list(guide.parameters()))
        return loss

    def row():
        posteriors = {"q": guide, "exact": case.exact()}
        return compare_posteriors(case.model, posteriors, case.x, case.y).summary()[0]

    before = row()
    optimizer.step(loss_fn)
    after = row()
    assert after["unconverged"] == pytest.approx(0, abs=1e-5)
    assert before["unconverged"] == pytest.approx(after["elbo"] - before["elbo"], abs=1e-5)
    assert "of it unconverged" in str(
        compare_posteriors(case.model, {"q": guide}, case.x, case.y, num_samples=10)
    )


def test_of_a_family_whose_best_member_is_not_known_nothing_is_said_about_convergence():
    case = scenarios.gaussian_regression(guide="low_rank")
    comparison = compare_posteriors(case.model, {"q": case.guide}, case.x, case.y)
    assert "unconverged" not in comparison.summary()[0]


@torch.no_grad()
def test_rows_are_differences_in_sds_of_the_reference():
    case = scenarios.gaussian_regression(linear_term=True)
    exact = exact_posterior(case.model, case.x, case.y)
    comparison = compare_posteriors(case.model, {"q": case.guide, "p": exact}, case.x, case.y)
    assert comparison.reference == "p"
    rows = comparison.weights("q")
    assert [row["weight"] for row in rows[:4]] == [
        "mu[0]",
        "linear[0,0]",
        "linear[0,1]",
        "z[0,0,0]",
    ]
    means, tril = exact.guide.weight_means(), exact.guide.scale_tril
    sd = (tril @ tril.mT).diagonal(dim1=-2, dim2=-1).sqrt()
    q_mean, q_sd = case.guide.z_loc[1, 0, 2], case.guide.z_scale[1, 0, 2]
    index = [row["weight"] for row in rows].index("z[1,0,2]")
    expected_sd = sd[1, 3 + 2]
    assert rows[index]["sd_ratio"] == pytest.approx(float(q_sd / expected_sd))
    difference = (q_mean - means.z[1, 0, 2]) / expected_sd
    assert rows[index]["mean_difference"] == pytest.approx(float(difference))
    units = {row["unit"]: row for row in comparison.by_unit("q")}
    assert set(units) == {"bias", "unit 0", "unit 1"}
    assert units["unit 0"]["max_mean_difference"] >= abs(float(difference))
    assert comparison.summary()[1]["mean_difference"] == 0
    assert "evidence gap" in str(comparison)


def test_predictions_are_compared_at_new_inputs():
    case = scenarios.gaussian_regression(num_outputs=1)
    x_new = torch.randn(3, 2)
    posteriors = {"q": case.guide, "p": case.exact()}
    comparison = compare_posteriors(case.model, posteriors, case.x, case.y, x_new=x_new)
    h = case.model.unit_inputs(x_new).detach()
    with torch.no_grad():
        q, p = (g.moments(case.model.layer, h) for g in (case.guide, posteriors["p"].guide))
    row = comparison.summary()[0]
    expected = ((q.mean - p.mean) / p.var.sqrt()).square().mean().sqrt()
    assert row["predictive_mean_difference"] == pytest.approx(float(expected))
    expected = (0.5 * (q.var / p.var).log()).mean().exp()
    assert row["predictive_sd_ratio"] == pytest.approx(float(expected))


def test_samples_and_other_guides_are_compared_by_their_draws():
    case = scenarios.gaussian_regression(num_rows=20)
    exact = case.exact()
    auto = AutoNormal(case.model)
    auto(case.x, case.y)
    draws = draw_posterior(case.model, exact, num_samples=20_000, seed=1)
    posteriors = {"auto": auto, "samples": Draws(draws.sites), "exact": exact}
    comparison = compare_posteriors(case.model, posteriors, case.x, case.y, num_samples=20_000)
    by_name = {row["posterior"]: row for row in comparison.summary()}
    assert by_name["samples"]["max_mean_difference"] < 4.5 / 20_000**0.5
    assert "elbo" not in by_name["samples"]
    assert by_name["auto"]["evidence_gap"] > 0
    assert comparison.elbos["auto"].se > 0


def test_monte_carlo_elbo_agrees_with_the_closed_form():
    case = scenarios.gaussian_regression(prior={"mu": StudentTPrior(1e6)})  # nearly normal
    comparison = compare_posteriors(case.model, {"q": case.guide}, case.x, case.y)
    elbo = comparison.elbos["q"]
    assert comparison.log_evidence is None
    case.model.prior = dict.fromkeys(case.model.prior, NormalPrior())
    closed = -ClosedFormELBO().loss(case.model, case.guide, case.x, case.y)
    assert abs(elbo.value - closed) < 4 * elbo.se


def test_a_point_has_no_elbo_and_no_width():
    case = scenarios.gaussian_regression(num_outputs=1)
    guide = AutoDelta(case.model)
    guide(case.x, case.y)
    posteriors = {"map": guide, "exact": case.exact()}
    row = compare_posteriors(case.model, posteriors, case.x, case.y).summary()[0]
    assert row["max_sd_ratio"] < 1e-12
    assert "elbo" not in row


def test_the_reference_is_exact_then_sampled_then_the_last():
    case = scenarios.classification()
    draws = draw_posterior(case.model, case.guide, num_samples=50, seed=0)
    other = MeanFieldGuide(case.model)
    pair = {"samples": Draws(draws.sites), "q": case.guide}
    assert compare_posteriors(case.model, pair, case.x, case.y).reference == "samples"
    pair = {"q": case.guide, "other": other}
    comparison = compare_posteriors(case.model, pair, case.x, case.y)
    assert comparison.reference == "other"
    assert comparison.log_evidence is None
    with pytest.raises(ValueError, match="`reference` must be one of 'other', 'q'; got 'p'"):
        compare_posteriors(case.model, pair, case.x, case.y, reference="p")
    with pytest.raises(ValueError, match="at least one posterior"):
        compare_posteriors(case.model, {}, case.x, case.y)
