import copy
import math

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch.testing import assert_close

from pyro_dak import (
    DAK,
    BernoulliLikelihood,
    CategoricalLikelihood,
    ClosedFormELBO,
    FullRankGuide,
    GammaScalePrior,
    GaussianLikelihood,
    HeteroscedasticLikelihood,
    LaplacePrior,
    LocalReparamELBO,
    MeanFieldGuide,
    NaturalGuide,
    NaturalVI,
    NormalPrior,
    PoissonLikelihood,
    StudentTPrior,
    exact_posterior,
    run_nuts,
)
from pyro_dak.additive.gaussian import ExpectedDerivatives
from pyro_dak.diagnostics.posterior_moments import response
from pyro_dak.inference.draws import draw_posterior
from pyro_dak.inference.guides.natural import RowSums
from pyro_dak.inference.natural import divergence, expected_and_rows, of_weights, rates
from pyro_dak.inference.objectives import kl
from tests import scenarios
from tests.scenarios import LIKELIHOODS

COVARIANCES = ("joint", "shared", "diagonal")
covariances = pytest.mark.parametrize("covariance", COVARIANCES)
PRIOR = {"z": NormalPrior(0.3, 0.8), "mu": NormalPrior(-1.0, 2.0)}


def regression(num_rows=60, noise=0.3, **options):
    """Two outputs, a linear term and priors that are not standard."""
    options = {
        "num_outputs": 2,
        "num_rows": num_rows,
        "linear_term": True,
        "prior": PRIOR,
    } | options
    case = scenarios.make(GaussianLikelihood(torch.as_tensor(noise)), **options)
    with torch.no_grad():
        case.y = torch.sin(3 * case.h[:, :1]) + 0.3 * case.y
    return case


def train(vi, x, y, num_passes, batch_size):
    for _ in range(num_passes):
        for rows in torch.randperm(len(x)).split(batch_size):
            vi.step(x[rows], y[rows], len(x))
    return vi.guide


def covariance_of(guide):
    """Covariances of the functions, `(F, K, K)`."""
    tril = guide.scale_tril
    return (tril @ tril.mT).expand(len(guide.loc), -1, -1)


# The guide


@covariances
def test_q_starts_at_the_prior(covariance):
    case = scenarios.gaussian_regression(prior=PRIOR, linear_term=True)
    guide = NaturalGuide(case.model, covariance)
    assert kl(case.model, guide).item() == pytest.approx(0, abs=1e-12)
    assert guide.num_rows == 0
    assert not list(guide.parameters())


@covariances
def test_what_q_knows_stays_in_double_precision(covariance):
    case = scenarios.gaussian_regression(guide=f"natural_{covariance}")
    case.model.float()
    guide = NaturalGuide(case.model, covariance)
    assert guide.loc.dtype == guide.scale_tril.dtype == torch.float32
    before = {name: value.clone() for name, value in case.guide.state_dict().items()}
    case.guide.float()
    assert case.guide.loc.dtype == torch.float32
    case.x = case.x.float()
    assert case.guide.moments(case.model.layer, case.h).mean.dtype == torch.float32
    assert_close(case.guide.double().state_dict(), before, rtol=0, atol=0)


@covariances
def test_a_loaded_state_is_what_counts(covariance):
    case = scenarios.gaussian_regression(guide=f"natural_{covariance}")
    other = NaturalGuide(case.model, covariance)
    other.moments(case.model.layer, case.h)  # keeps a root of the prior's covariance
    other.load_state_dict(case.guide.state_dict())
    expected = case.guide.moments(case.model.layer, case.h)
    assert_close(other.moments(case.model.layer, case.h), expected)
    copied = copy.deepcopy(other)
    for guide in (other, copied):
        guide.precision.mul_(4)
        assert_close(guide.moments(case.model.layer, case.h).var, expected.var / 4)


@pytest.mark.parametrize(
    ("prior", "kind"),
    [
        ({"z": LaplacePrior()}, "LaplacePrior"),
        ({"mu": StudentTPrior()}, "StudentTPrior"),
        ({"shrinkage": GammaScalePrior()}, "GammaScalePrior"),
    ],
)
def test_priors_that_are_not_normal_are_refused(prior, kind):
    model = scenarios.gaussian_regression(prior=prior).model
    with pytest.raises(NotImplementedError, match=f"has {kind}. Use MeanFieldGuide"):
        NaturalGuide(model)


def wide_model(num_units, num_outputs=1, level=1):
    options = {"num_units": num_units, "num_outputs": num_outputs, "embedding": False}
    return DAK(torch.nn.Identity(), num_units, level=level, scaling="none", **options)


@pytest.mark.parametrize("covariance", ["joint", "shared"])
def test_too_many_weights_name_the_other_families(covariance):
    NaturalGuide(wide_model(1999), covariance)
    with pytest.raises(ValueError, match=r'up to 2000 weights.* has 2001.*covariance="diagonal"'):
        NaturalGuide(wide_model(2000), covariance)
    NaturalGuide(wide_model(2000), "diagonal")


def test_too_many_functions_for_joint_name_shared():
    with torch.device("meta"):
        model = wide_model(1999, num_outputs=100)
        NaturalGuide(model, "shared")
        with pytest.raises(ValueError, match='Use covariance="shared"'):
            NaturalGuide(model, "joint")


def test_an_unknown_covariance_lists_the_known_ones(no_type_checker):
    with pytest.raises(ValueError, match="one of 'diagonal', 'joint', 'shared'; got 'full'"):
        NaturalGuide(wide_model(1), "full")


# Steps


def dense_step(guide, design, derivatives, keep, gain):
    """The formulas of a step in loops: means `(F, K)` and precisions `(F, K, K)` after it."""
    g, k = derivatives
    N, F = g.shape
    if guide.has_common_shift:
        k = k * F / (F - 1)
    prior = [torch.diag(row) for row in guide.prior_precision]
    if guide.covariance == "shared":
        k = k.mean(-1, keepdim=True).expand(N, F)
        prior = [sum(prior) / F] * F
    rests, precisions = [], []
    for c in range(F):
        precision = keep * torch.linalg.inv(covariance_of(guide)[c]) + (1 - keep) * prior[c]
        rest = -(1 - keep) * guide.prior_precision[c] * (guide.mean[c] - guide.prior_mean[c])
        for n in range(N):
            curvature = gain * k[n, c] * torch.outer(design[n], design[n])
            if guide.covariance == "diagonal":
                curvature = torch.diag(curvature.diagonal())
            precision = precision + curvature
            rest = rest + gain * g[n, c] * design[n]
        rests.append(rest)
        precisions.append(precision)
    means = guide.mean.clone()
    for c in range(F):
        means[c] += torch.linalg.solve(precisions[c], rests[c])
        if guide.has_common_shift:
            means[c] += sum(rests) / guide.prior_precision.sum(0)
            means[c] -= torch.linalg.solve(sum(precisions), sum(rests))
    return means, torch.stack(precisions)


@covariances
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_a_step_is_that_of_the_formulas(covariance, likelihood):
    prior = {"z": NormalPrior(0.2, 0.7), "mu": NormalPrior(0.5, 2.0)}
    case = scenarios.make(likelihood, guide=f"natural_{covariance}", linear_term=True, prior=prior)
    design = case.model.layer.design(case.h).detach()
    g = torch.randn(8, case.model.num_functions)
    derivatives = ExpectedDerivatives(g, torch.rand_like(g))
    means, precisions = dense_step(case.guide, design, derivatives, keep=0.9, gain=0.4)
    sums = case.guide.row_sums(case.model.layer, case.h, derivatives)
    case.guide.step(sums, 8, keep=0.9, gain=0.4, share=0.1)
    assert_close(torch.linalg.inv(covariance_of(case.guide)), precisions)
    assert case.guide.num_rows == pytest.approx(0.4 * 8)
    if covariance != "diagonal":  # whose means are found jointly
        assert_close(case.guide.mean, means)


@covariances
@pytest.mark.parametrize("likelihood", ["gaussian", "heteroscedastic", "poisson"])
def test_a_step_is_along_the_gradient_by_the_mean_parameters(covariance, likelihood):
    case = scenarios.make(likelihood, guide=f"natural_{covariance}", spread=0.1)
    model, guide, rho = case.model, case.guide, 0.01
    mean = guide.mean.clone().requires_grad_()
    before = torch.linalg.inv(covariance_of(guide)).clone()
    var = covariance_of(guide).clone()
    if covariance == "shared":
        var = var[:1].clone()
    var.requires_grad_()
    cov = var.expand(len(mean), -1, -1)
    if covariance == "diagonal":
        cov = torch.diag_embed(cov.diagonal(dim1=-2, dim2=-1))
    design = model.layer.design(case.h).detach()
    moments = guide.moments(model.layer, case.h)._replace(
        mean=design @ mean.mT, var=torch.einsum("nk,fkl,nl->nf", design, cov, design)
    )
    total = model.likelihood.expected_log_prob(case.y, moments).sum()
    by_mean, by_cov = torch.autograd.grad(total, (mean, var))
    # Of N(m, V): the natural parameters are (V^{-1} m, -V^{-1} / 2), their natural gradient is that
    # by (m, V + m m^T), which is (d / dm - 2 d / dV m, d / dV). F functions share a V.
    by_cov = by_cov / (len(mean) if covariance == "shared" else 1)
    eye = torch.eye(mean.shape[-1])
    precision = (1 - rho) * before + rho * (eye - 2 * by_cov)
    natural = (1 - rho) * before @ mean.unsqueeze(-1)
    natural = natural + rho * (by_mean.unsqueeze(-1) - 2 * by_cov @ mean.unsqueeze(-1))
    weights = guide.fixed_weights(model.layer, case.h.dtype)
    _, rows = expected_and_rows(ClosedFormELBO(), model, guide, case.h, case.y, *weights)
    sums = of_weights(model, guide, rows.sums(model, guide))
    guide.step(sums, 8, keep=1 - rho, gain=rho, share=rho)
    assert_close(torch.linalg.inv(covariance_of(guide)), precision.expand_as(before))
    if covariance != "diagonal":  # whose means are found jointly
        expected = torch.linalg.solve(precision, natural).squeeze(-1)
        assert_close(guide.mean, expected.detach())


@covariances
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_sums_of_parts_add_up(covariance, likelihood):
    case = scenarios.make(likelihood, guide=f"natural_{covariance}", linear_term=True)
    g = torch.randn(8, case.model.num_functions)
    derivatives = ExpectedDerivatives(g, torch.rand_like(g))

    def sums(rows):
        part = ExpectedDerivatives(*(value[rows] for value in derivatives))
        return case.guide.row_sums(case.model.layer, case.h[rows], part, 2.0)

    assert_close(RowSums.plus(sums(slice(0, 3)), sums(slice(3, 8))), sums(slice(0, 8)))


def test_a_precision_that_is_not_definite_shows_as_nan():
    case = scenarios.gaussian_regression(guide="natural_joint")
    case.guide.precision[0].neg_()
    moments = case.guide.moments(case.model.layer, case.h)
    assert moments.var[:, 0].isnan().all()
    assert moments.var[:, 1].isfinite().all()


# Gaussian likelihoods on fixed features


@pytest.mark.parametrize("noise", [0.3, [0.3, 0.8]])
def test_one_step_on_all_rows_is_the_exact_posterior(noise):
    case = regression(noise=noise)
    guide, exact = NaturalGuide(case.model), case.exact()
    NaturalVI(case.model, guide).step(case.x, case.y)
    assert_close(guide.loc, exact.guide.loc.detach(), rtol=1e-10, atol=1e-10)
    assert_close(guide.scale_tril, exact.guide.scale_tril.detach(), rtol=1e-10, atol=1e-10)
    elbo = ClosedFormELBO().terms(case.model, guide, case.x, case.y).elbo.item()
    assert elbo == pytest.approx(exact.log_evidence, rel=1e-10)
    assert guide.num_rows == 60


def test_a_shared_precision_is_exact_if_the_outputs_share_the_noise():
    case = regression()
    guide, exact = NaturalGuide(case.model, "shared"), case.exact()
    NaturalVI(case.model, guide).step(case.x, case.y)
    assert_close(guide.loc, exact.guide.loc.detach(), rtol=1e-10, atol=1e-10)
    assert_close(covariance_of(guide), covariance_of(exact.guide).detach(), rtol=1e-10, atol=1e-10)


@covariances
@pytest.mark.parametrize("batch_size", [7, 20])
def test_batches_converge_to_the_best_of_the_family(covariance, batch_size):
    case = regression()
    guide, exact = NaturalGuide(case.model, covariance), case.exact()
    train(NaturalVI(case.model, guide), case.x, case.y, num_passes=20, batch_size=batch_size)
    elbo = ClosedFormELBO().terms(case.model, guide, case.x, case.y).elbo.item()
    gap = exact.log_evidence - elbo  # the KL to the posterior
    if covariance == "diagonal":  # q has its mean and the diagonal of its precision
        precision = torch.linalg.inv(covariance_of(exact.guide).detach())
        log_det = precision.diagonal(dim1=-2, dim2=-1).log().sum() - precision.logdet().sum()
        gap = gap - 0.5 * log_det.item()
    assert abs(gap) < 1e-6


def test_means_of_fine_levels_converge_too(monkeypatch):
    monkeypatch.setattr("pyro_dak.inference.guides.natural._MAX_COARSE_WEIGHTS", 20)
    case = regression(num_rows=200, level=4, noise=0.5)  # 33 weights, of which 17 are coarse
    guide = NaturalGuide(case.model, "diagonal")
    assert guide.coarse_precision.shape == (2, 17, 17)
    train(NaturalVI(case.model, guide), case.x, case.y, num_passes=40, batch_size=20)
    best = NaturalGuide(case.model, "diagonal")
    exact = exact_posterior(case.model, case.x, case.y).guide
    best.mean.copy_(exact.loc.detach())
    precision = torch.linalg.inv(covariance_of(exact).detach())
    best.precision.copy_(precision.diagonal(dim1=-2, dim2=-1))
    elbos = [
        ClosedFormELBO().terms(case.model, q, case.x, case.y).elbo.item() for q in (best, guide)
    ]
    assert 0 <= elbos[0] - elbos[1] < 200 * 1e-3


# Other likelihoods on fixed features


def bound_and_slopes(case, guide):
    """The bound, and its derivatives by the means of the weights, `(F, K)`."""
    design = case.model.layer.design(case.h).detach()
    mean = guide.mean.clone().requires_grad_()
    moments = guide.moments(case.model.layer, case.h)._replace(mean=design @ mean.mT)
    total = case.model.likelihood.expected_log_prob(case.y, moments).sum()
    shift = guide.prior_precision * (mean - guide.prior_mean).square()
    (slopes,) = torch.autograd.grad(total - 0.5 * shift.sum(), mean)
    return ClosedFormELBO().terms(case.model, guide, case.x, case.y).elbo.item(), slopes


@covariances
@pytest.mark.parametrize("likelihood", [PoissonLikelihood(), HeteroscedasticLikelihood(0.5)])
def test_full_batches_come_to_rest_at_the_maximum_of_the_bound(covariance, likelihood):
    case = scenarios.make(likelihood, num_outputs=2, num_rows=30)
    guide = NaturalGuide(case.model, covariance)
    vi = NaturalVI(case.model, guide)
    start = bound_and_slopes(case, guide)[1].abs().max()
    for _ in range(120):
        vi.step(case.x, case.y)
    best, slopes = bound_and_slopes(case, guide)
    assert slopes.abs().max() < 1e-3 * start
    for change in (0.9, 1.1):
        other = copy.deepcopy(guide)
        other.precision.mul_(change)
        assert bound_and_slopes(case, other)[0] < best


@covariances
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("batch_size", [10, 40])
def test_the_bound_rises_from_the_prior_with_any_likelihood(covariance, likelihood, batch_size):
    case = scenarios.make(likelihood, num_rows=40, num_outputs=3)
    guide = NaturalGuide(case.model, covariance)
    vi = NaturalVI(case.model, guide, loss=LocalReparamELBO(500))
    losses = [vi.evaluate_loss(case.x, case.y)]
    train(vi, case.x, case.y, 1, batch_size)
    losses.append(vi.evaluate_loss(case.x, case.y))
    train(vi, case.x, case.y, 9, batch_size)
    losses.append(vi.evaluate_loss(case.x, case.y))
    assert losses[2] < losses[1] + 0.5  # half a nat of noise in 500 draws of 40 rows
    assert losses[1] < losses[0]


def classes(num_rows=400, num_classes=8):
    """Classes with features that do not move, and prior scale 3 of f."""
    x = torch.randn(num_rows, 3)
    centres = 1.5 * torch.randn(num_classes, 3)
    y = (-(x.unsqueeze(1) - centres).square().sum(-1)).softmax(-1).multinomial(1).squeeze(-1)
    options = {"num_outputs": num_classes, "level": 2, "linear_term": True, "embedding": False}
    likelihood = CategoricalLikelihood()
    model = DAK(torch.nn.Identity(), 3, num_units=3, likelihood=likelihood, **options)
    with torch.no_grad():
        model.layer.log_unit_scale += math.log(3)
    model.unit_inputs(x)
    return model.eval(), x, y


@pytest.mark.slow
def test_joint_has_at_least_the_bound_of_full_rank_by_adam_with_ten_times_the_passes():
    model, x, y = classes()
    natural = NaturalGuide(model)
    train(NaturalVI(model, natural), x, y, num_passes=20, batch_size=50)
    bounds = [_bound(model, natural, x, y)]
    for rate in (0.01, 0.03, 0.1):
        adam = FullRankGuide(model, init_scale=0.3, init_loc_scale=0.0)
        optimizer = torch.optim.Adam(adam.parameters(), rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200 * 8)
        for _ in range(200):
            for rows in torch.randperm(len(x)).split(50):
                loss = LocalReparamELBO(8).differentiable_loss(model, adam, x[rows], y[rows], 400)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
        bounds.append(_bound(model, adam, x, y))
    assert bounds[0] > max(bounds[1:])


def _bound(model, guide, x, y):
    torch.manual_seed(0)  # the same draws for all
    return -LocalReparamELBO(2000).loss(model, guide, x, y)


@pytest.mark.slow
def test_joint_has_the_predictive_deviations_of_nuts():
    model, x, y = classes()
    guide = NaturalGuide(model)
    train(NaturalVI(model, guide), x, y, num_passes=20, batch_size=50)
    nuts = run_nuts(model, x, y, num_samples=1000, warmup_steps=300, progress=False)
    h = model.unit_inputs(torch.randn(200, 3)).detach()
    expected = response(model, nuts, h, draw_posterior(model, nuts))
    found = response(model, guide, h, draw_posterior(model, guide, num_samples=4000, seed=0))
    assert (found.mean - expected.mean).abs().mean() < 0.01
    assert 0.9 < found.sd.mean() / expected.sd.mean() < 1.1


# The schedule


def test_the_first_pass_is_a_sum_and_later_ones_an_average():
    weights, passes = torch.zeros(0), 0.0
    for number in range(1, 41):
        for _ in range(4):
            keep, gain, share = rates(passes, 0.25)
            assert gain <= 1
            if number > 1:
                assert keep == pytest.approx(1 - share)
                assert gain == pytest.approx(4 * share)
            weights = torch.cat([keep * weights, torch.tensor([gain])])
            passes += 0.25
        by_pass = weights.reshape(number, 4)
        assert_close(by_pass, by_pass[:, :1].expand(number, 4))  # each row of a pass counts alike
        assert by_pass.sum().item() == pytest.approx(4)  # and all of them like the data set
    ratios = by_pass[20:, 0] / by_pass[19:-1, 0]
    p = torch.arange(20.0, 40.0)
    assert_close(ratios, 1 + 4 / p, rtol=0.01, atol=0)  # p^4


@pytest.mark.parametrize("fraction", [1.0, 0.25])
def test_the_share_of_a_batch_is_its_part_of_what_q_knows(fraction):
    known, passes = 0.0, 0.0
    for _ in range(30):
        keep, gain, share = rates(passes, fraction)
        known = keep * known + gain * fraction
        assert share == pytest.approx(gain * fraction / known)
        passes += fraction
    assert known == pytest.approx(1)


def test_gathered_rows_give_the_step_of_one_large_batch(monkeypatch):
    case = regression(num_rows=200)
    sizes, vi = [], NaturalVI(case.model, NaturalGuide(case.model))
    step = NaturalGuide.step

    def counting(guide, sums, num_rows, **options):
        sizes.append(num_rows)
        step(guide, sums, num_rows, **options)

    monkeypatch.setattr(NaturalGuide, "step", counting)
    for number, rows in enumerate(torch.arange(200).split(2), 1):
        vi.step(case.x[rows], case.y[rows], 200)
        if number == 17:
            assert sizes == [2.0] * 16  # each was at least a sixteenth of what q knows
    assert sum(sizes) == 200  # a pass ends with a step
    assert max(sizes) > 6
    assert_close(vi.guide.loc, case.exact().guide.loc.detach())
    for _ in range(7):
        for rows in torch.arange(200).split(2):
            vi.step(case.x[rows], case.y[rows], 200)
    assert set(sizes[-12:-1]) == {16.0}
    one = NaturalVI(case.model, NaturalGuide(case.model))
    one.gathering.passes = 7.5
    many = copy.deepcopy(one)
    for rows in torch.arange(16).split(2):
        assert many.gathering.num_batches < 8
        many.step(case.x[rows], case.y[rows], 2000)
    one.step(case.x[:16], case.y[:16], 2000)
    one.gathering.step(one.model, one.guide)
    assert_close(many.guide.mean, one.guide.mean)
    assert_close(many.guide.precision, one.guide.precision)


def test_the_divergence_is_that_of_the_q_of_now():
    case = scenarios.gaussian_regression(guide="natural_joint")
    model, guide = case.model, case.guide
    state = copy.deepcopy(guide.state_dict())
    for change in (
        lambda: None,
        lambda: guide.update(model, case.x, case.y),
        lambda: guide.mean.add_(0.1),
        lambda: guide.load_state_dict(state),
    ):
        change()
        assert_close(divergence(model, guide), kl(model, guide))


@pytest.mark.parametrize(("noise_scale", "is_rounded"), [(0.5, True), (0.001, False)])
def test_sums_are_rounded_only_where_that_is_little_to_the_prior(noise_scale, is_rounded):
    case = scenarios.gaussian_regression(num_rows=60)
    layer, guide = case.model.float().layer, NaturalGuide(case.model)
    g = torch.randn(500, guide.mean.shape[0], dtype=torch.float32)
    k = torch.full_like(g, noise_scale**-2)
    h = torch.rand(500, layer.num_units, dtype=torch.float32)
    derivatives = ExpectedDerivatives(g, k)
    exact = guide.row_sums(layer, h, derivatives).curvature
    found = guide.row_sums(layer, h, derivatives, may_round=True).curvature
    assert found.dtype == torch.float64
    assert torch.equal(found, exact) != is_rounded
    error = torch.linalg.matrix_norm(found - exact, 2).max()
    assert error < 0.05 * guide.prior_precision.min()


# NaturalVI


def network_case(likelihood="gaussian", num_rows=40):
    case = scenarios.make(likelihood, num_rows=num_rows)
    return case.model.train(), case.x, case.y


def test_the_network_follows_the_gradient_of_the_expected_log_likelihood():
    model, x, y = network_case()
    guide = NaturalGuide(model)
    expected = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    loss = NaturalVI(model, guide, optimizer).step(x, y, 80)
    start = NaturalGuide(expected)
    terms = ClosedFormELBO().terms(expected, start, x, y, 80)
    h = expected.unit_inputs(x)
    assert loss == pytest.approx(-terms.elbo.item())
    (-terms.expected_log_lik).backward()
    with torch.no_grad():
        squares = (y - start.mean[:, 0]).square() + start.moments(expected.layer, h).var
        for parameter in expected.parameters():
            parameter -= 1e-3 * parameter.grad
        expected.likelihood.noise.log_scale.copy_(0.5 * squares.mean().log())  # closed
    assert_close(dict(model.named_parameters()), dict(expected.named_parameters()))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_pyros_optimisers_take_the_same_steps_as_those_of_torch(likelihood):
    model, x, y = network_case(likelihood)
    other = copy.deepcopy(model)
    adams = torch.optim.Adam(model.parameters(), 0.01), pyro.optim.Adam({"lr": 0.01})
    losses = []
    for own, optimizer in zip((model, other), adams, strict=True):
        torch.manual_seed(0)
        vi = NaturalVI(own, NaturalGuide(own), optimizer)
        losses.append([vi.step(x, y) for _ in range(5)])
    assert losses[0] == pytest.approx(losses[1])
    assert_close(dict(model.named_parameters()), dict(other.named_parameters()))


@covariances
def test_a_network_learns(covariance):
    torch.manual_seed(1)
    x = torch.randn(200, 2)
    y = torch.sin(2 * x[:, :1]) * x[:, 1:] + 0.1 * torch.randn(200, 1)
    network = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))
    model = DAK(network, 16, num_units=4, level=3, likelihood=GaussianLikelihood(1.0))
    guide = NaturalGuide(model, covariance)
    vi = NaturalVI(model, guide, torch.optim.Adam(model.parameters(), 0.01))
    train(vi, x, y, num_passes=150, batch_size=50)
    model.eval()
    mean = guide.moments(model.layer, model.unit_inputs(x)).mean
    assert (mean - y).square().mean().sqrt() < 0.25
    assert model.likelihood.noise_scale < 0.4


def test_single_precision_is_close_to_double():
    case = regression()
    expected = case.exact()
    case.model.float()
    guide = NaturalGuide(case.model)
    train(NaturalVI(case.model, guide), case.x.float(), case.y.float(), 3, batch_size=20)
    assert_close(guide.loc.double(), expected.guide.loc.detach(), rtol=1e-3, atol=1e-3)
    tril = expected.guide.scale_tril.detach()
    assert_close(guide.scale_tril.double(), tril, rtol=1e-3, atol=1e-3)


def test_a_guide_that_knows_rows_does_not_count_them_twice():
    case = regression()
    guide = NaturalGuide(case.model)
    for _ in range(3):  # three runs, as three calls of a training function
        train(NaturalVI(case.model, guide), case.x, case.y, 1, batch_size=20)
    assert guide.num_rows.item() == pytest.approx(60)
    assert_close(guide.loc, case.exact().guide.loc.detach())


def test_evaluate_loss_takes_no_step():
    case = scenarios.gaussian_regression(guide="natural_joint")
    before = copy.deepcopy(case.guide.state_dict())
    vi = NaturalVI(case.model, case.guide)
    expected = SVI(case.model, case.guide, pyro.optim.Adam({}), ClosedFormELBO())
    assert vi.evaluate_loss(case.x, case.y, 80) == expected.evaluate_loss(case.x, case.y, 80)
    assert_close(case.guide.state_dict(), before, rtol=0, atol=0)


def test_other_guides_and_optimisers_are_refused(no_type_checker):
    model = scenarios.gaussian_regression().model
    with pytest.raises(TypeError, match=r"`guide` must be a NaturalGuide.*got MeanFieldGuide"):
        NaturalVI(model, MeanFieldGuide(model))
    with pytest.raises(TypeError, match=r"`optim` must be .*got float"):
        NaturalVI(model, NaturalGuide(model), 0.1)


# Conditioning


@covariances
@pytest.mark.parametrize("sizes", [[30, 30], [50, 1, 9], [20, 40], [1, 59]])
def test_rows_that_come_later_give_the_posterior_of_all_rows(covariance, sizes):
    case = regression()
    once, exact = NaturalGuide(case.model, covariance), case.exact()
    once.update(case.model, case.x, case.y)
    guide = NaturalGuide(case.model, covariance)
    for x, y in zip(case.x.split(sizes), case.y.split(sizes), strict=True):
        guide.update(case.model, x, y)
    assert_close(guide.loc, exact.guide.loc.detach(), rtol=1e-8, atol=1e-8)
    assert_close(covariance_of(guide), covariance_of(once), rtol=1e-8, atol=1e-8)
    assert_close(guide.moments(case.model.layer, case.h), once.moments(case.model.layer, case.h))
    if covariance != "diagonal":
        expected = covariance_of(exact.guide).detach()
        assert_close(covariance_of(guide), expected, rtol=1e-8, atol=1e-8)
    assert guide.num_rows == 60


def test_many_single_rows_keep_the_root_of_the_covariance_true(monkeypatch):
    monkeypatch.setattr("pyro_dak.inference.guides.natural._MAX_CHANGES", 25)
    case = regression(noise=[0.3, 0.8])
    guide = NaturalGuide(case.model)
    for x, y in zip(case.x.split(1), case.y.split(1), strict=True):
        guide.update(case.model, x, y)
        moments = guide.moments(case.model.layer, case.h)
        whole = copy.deepcopy(guide).moments(case.model.layer, case.h)  # without the root
        assert_close(moments, whole, rtol=1e-10, atol=1e-10)
    assert_close(guide.loc, case.exact().guide.loc.detach(), rtol=1e-8, atol=1e-8)


@covariances
@pytest.mark.parametrize("num_rows", [1, 30])
def test_rows_taken_out_leave_the_posterior_of_the_others(covariance, num_rows):
    case = regression()
    guide, kept = NaturalGuide(case.model, covariance), NaturalGuide(case.model, covariance)
    guide.update(case.model, case.x, case.y)
    guide.downdate(case.model, case.x[:num_rows], case.y[:num_rows])
    kept.update(case.model, case.x[num_rows:], case.y[num_rows:])
    assert_close(guide.loc, kept.loc, rtol=1e-8, atol=1e-8)
    assert_close(covariance_of(guide), covariance_of(kept), rtol=1e-8, atol=1e-8)
    assert guide.num_rows == 60 - num_rows


@covariances
def test_rows_that_q_does_not_know_cannot_be_taken_out(covariance):
    case = regression()
    guide = NaturalGuide(case.model, covariance)
    guide.update(case.model, case.x[:30], case.y[:30])
    before = copy.deepcopy(guide.state_dict())
    with pytest.raises(ValueError, match="must be rows that q knows"):
        guide.downdate(case.model, case.x[30:], case.y[30:])
    assert_close(guide.state_dict(), before, rtol=0, atol=0)


def test_forgotten_rows_count_less():
    case = regression()
    guide = NaturalGuide(case.model)
    for x, y in zip(case.x.split(20), case.y.split(20), strict=True):
        guide.update(case.model, x, y, forget=0.5)
    design = case.model.layer.design(case.h).detach()
    weights = torch.tensor([0.25, 0.5, 1.0]).repeat_interleave(20) / 0.3**2
    for c in range(2):
        prior = guide.prior_precision[c]
        precision = torch.diag(prior) + (design.mT * weights) @ design
        right = prior * guide.prior_mean[c] + design.mT @ (weights * case.y[:, c])
        assert_close(covariance_of(guide)[c], torch.linalg.inv(precision))
        assert_close(guide.mean[c], torch.linalg.solve(precision, right))
    assert guide.num_rows == 35


@covariances
@pytest.mark.parametrize("likelihood", [PoissonLikelihood(), BernoulliLikelihood()])
def test_an_update_from_the_prior_is_the_best_q_for_any_likelihood(covariance, likelihood):
    case = scenarios.make(likelihood, num_outputs=2, num_rows=30)
    guide, trained = (NaturalGuide(case.model, covariance) for _ in range(2))
    guide.update(case.model, case.x, case.y, num_steps=60)
    vi = NaturalVI(case.model, trained)
    for _ in range(120):
        vi.step(case.x, case.y)
    assert_close(guide.loc, trained.loc, rtol=1e-4, atol=1e-4)
    assert_close(covariance_of(guide), covariance_of(trained), rtol=1e-4, atol=1e-4)


def test_an_update_of_a_q_that_knows_rows_starts_from_it():
    case = scenarios.make(PoissonLikelihood(), num_outputs=2, num_rows=200)
    guide, whole = NaturalGuide(case.model), NaturalGuide(case.model)
    whole.update(case.model, case.x, case.y)
    guide.update(case.model, case.x[:150], case.y[:150])
    before = (guide.mean - whole.mean).norm()
    guide.update(case.model, case.x[150:], case.y[150:])
    assert (guide.mean - whole.mean).norm() < 0.1 * before  # Gaussian by Gaussian, not exactly


def test_a_float32_model_is_conditioned_in_double_precision():
    case = regression()
    case.model.float()
    x, y = case.x.float(), case.y.float()
    whole = exact_posterior(copy.deepcopy(case.model).double(), x.double(), y.double()).guide
    guide = NaturalGuide(case.model)
    for x_part, y_part in zip(x.split(20), y.split(20), strict=True):
        guide.update(case.model, x_part, y_part)
    # Up to the float32 network; what q adds up is double.
    assert_close(guide.mean, whole.loc.detach(), rtol=1e-4, atol=1e-4)


def test_conditioning_has_clear_errors():
    case = scenarios.make(PoissonLikelihood())
    guide = NaturalGuide(case.model)
    with pytest.raises(NotImplementedError, match="got PoissonLikelihood"):
        guide.downdate(case.model, case.x, case.y)
    for forget in (0.0, 1.5, -1.0):
        with pytest.raises(ValueError, match="`forget` must be above 0 and at most 1"):
            guide.update(case.model, case.x, case.y, forget=forget)
    with pytest.raises(ValueError, match="`num_steps` must be at least 1"):
        guide.update(case.model, case.x, case.y, num_steps=0)


def test_conditioning_needs_means_that_are_found_jointly(monkeypatch):
    monkeypatch.setattr("pyro_dak.inference.guides.natural._MAX_COARSE_WEIGHTS", 3)
    case = scenarios.gaussian_regression()
    guide = NaturalGuide(case.model, "diagonal")
    with pytest.raises(NotImplementedError, match='Use covariance="joint" or "shared"'):
        guide.update(case.model, case.x, case.y)


def test_steps_without_an_optimiser_move_running_statistics_in_training_mode_only():
    case = scenarios.gaussian_regression(num_rows=20)
    guide, before = NaturalGuide(case.model), float(case.model.scaling.num_batches)
    NaturalVI(case.model, guide).step(case.x, case.y)
    assert case.model.scaling.num_batches == before
    NaturalVI(case.model.train(), guide).step(case.x, case.y)
    assert case.model.scaling.num_batches == before + 1
