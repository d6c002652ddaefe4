import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive
from torch.testing import assert_close

from pyro_dak import LocalReparamELBO, NaturalGuide, NaturalVI, NormalPrior, components
from pyro_dak.additive.gaussian import ExpectedDerivatives
from pyro_dak.diagnostics.posterior_moments import gaussian_fit
from pyro_dak.inference.draws import draw_posterior
from pyro_dak.inference.objectives import kl
from tests import reference, scenarios
from tests.scenarios import agrees, trace_elbo_draws

covariances = pytest.mark.parametrize("covariance", ["joint", "shared", "diagonal"])
linear_terms = pytest.mark.parametrize("linear_term", [False, True])
PRIOR = {"z": NormalPrior(0.2, 0.7), "mu": NormalPrior(-0.5, 2.0)}


def classification(covariance, **options):
    """Three classes, priors that are not standard, and a guide that knows something."""
    options = {"guide": f"natural_{covariance}", "prior": PRIOR} | options
    case = scenarios.classification(**options)
    for name in ("precision", "coarse_precision"):  # at least the prior's
        if hasattr(case.guide, name):
            getattr(case.guide, name).mul_(1.5)
    assert case.guide.has_common_shift
    return case


def test_only_classes_share_a_shift():
    assert not scenarios.gaussian_regression(guide="natural_joint").guide.has_common_shift
    assert not scenarios.make("bernoulli", guide="natural_joint").guide.has_common_shift


@covariances
@linear_terms
def test_density_of_the_sites_is_that_of_the_joint_normal(covariance, linear_term):
    case = classification(covariance, linear_term=linear_term)
    trace = poutine.trace(case.guide).get_trace(case.x)
    values = {name: trace.nodes[name]["value"] for name in case.guide.weight_sites}
    expected = scenarios.joint(case.guide).log_prob(scenarios.flat(case.guide, values))
    assert_close(trace.log_prob_sum(), expected)


@covariances
def test_draws_have_the_joint_mean_and_covariance(covariance):
    case = classification(covariance, linear_term=True)
    q = scenarios.joint(case.guide)
    flat = scenarios.flat(case.guide, scenarios.weight_draws(case.guide, 20_000)).squeeze(1)
    assert agrees(flat, q.loc)
    centred = flat - q.loc
    assert agrees(centred.unsqueeze(-1) * centred.unsqueeze(-2), q.covariance_matrix)
    assert_close(case.guide.weight_covariance(), q.covariance_matrix)
    assert_close(case.guide.scale.flatten(), q.stddev)
    assert_close(gaussian_fit(case.model, case.guide).cov, q.covariance_matrix)


@covariances
@linear_terms
def test_kl_equals_that_of_the_joint_normal(covariance, linear_term):
    case = classification(covariance, linear_term=linear_term)
    q = scenarios.joint(case.guide)
    guide = case.guide
    cov = torch.diag(guide.prior_precision.flatten().reciprocal())
    prior = guide.prior_mean.flatten()
    expected = reference.kl_gaussians(q.loc, q.covariance_matrix, prior, cov)
    assert_close(kl(case.model, guide), expected)


@covariances
def test_the_shift_has_the_least_kl(covariance):
    case = classification(covariance)
    best, q = kl(case.model, case.guide), scenarios.joint(case.guide)
    F, K = case.guide.mean.shape
    prior = (
        case.guide.prior_mean.flatten(),
        torch.diag(case.guide.prior_precision.flatten().reciprocal()),
    )
    shift = torch.kron(torch.ones(F, F), torch.diag(torch.rand(K)))
    for step in (-0.01, 0.01):
        cov = q.covariance_matrix + step * shift
        assert reference.kl_gaussians(q.loc, cov, *prior) > best


@covariances
def test_moments_of_f_equal_those_of_the_joint_normal(covariance):
    case = classification(covariance, linear_term=True)
    q, design = scenarios.joint(case.guide), case.model.layer.design(case.h).detach()
    mean, var, root = case.guide.moments(case.model.layer, case.h)
    cov = q.covariance_matrix.unflatten(0, (3, -1)).unflatten(-1, (3, -1))
    expected = torch.einsum("nk,akbl,nl->nab", design, cov, design)
    assert_close(mean, design @ case.guide.mean.mT)
    assert_close(var, expected.diagonal(dim1=-2, dim2=-1))
    between = torch.einsum("rna,rnb->nab", root, root)
    apart = ~torch.eye(3, dtype=torch.bool)
    assert_close(between[:, apart], expected[:, apart])


@covariances
def test_the_bound_equals_the_mean_of_trace_elbo(covariance):
    case = classification(covariance)
    with torch.no_grad():
        bound = LocalReparamELBO(200_000).terms(case.model, case.guide, case.x, case.y).elbo
    assert agrees(trace_elbo_draws(case), bound)


@covariances
def test_components_have_the_variance_of_draws(covariance):
    case = classification(covariance, linear_term=True)
    found = components(case.model, case.guide, case.x, progress=False)
    draws = scenarios.weight_draws(case.guide, 5000)
    draws["z"][..., 1, :], draws["linear"][..., 1], draws["mu"][:] = 0, 0, 0  # the first unit alone
    with torch.no_grad():
        f = case.model.functions(case.h, draws)
    assert agrees(f, found.mean[..., 0])
    assert agrees((f - found.mean[..., 0]).square(), found.variance[..., 0])


@covariances
def test_predictive_and_draws_have_the_sites_of_the_model(covariance):
    case = classification(covariance)
    draws = Predictive(case.model, guide=case.guide, num_samples=7, parallel=True)(case.x)
    assert draws["y"].shape == (7, 8)
    sites = draw_posterior(case.model, case.guide, num_samples=5, num_chains=2).sites
    assert {name: value.shape[2:] for name, value in sites.items()} == case.model.site_shapes


@pytest.mark.parametrize("covariance", ["joint", "shared"])
def test_two_classes_are_one_logistic_regression(covariance):
    case = scenarios.classification(num_outputs=2)
    guide = NaturalGuide(case.model, covariance)
    k = torch.rand(8, 1).expand(8, 2)  # both classes have the curvature p (1 - p)
    sums = guide.row_sums(case.model.layer, case.h, ExpectedDerivatives(torch.zeros(8, 2), k), 2.0)
    guide.step(sums, 8, coupling=2.0)
    # The weights of f_1 - f_0 have prior variance 2.
    design = case.model.layer.design(case.h).detach()
    precision = 0.5 * torch.eye(7) + (design.mT * k[:, 0]) @ design
    cov = scenarios.joint(guide).covariance_matrix.unflatten(0, (2, 7)).unflatten(-1, (2, 7))
    contrast = cov[1, :, 1] + cov[0, :, 0] - cov[0, :, 1] - cov[1, :, 0]
    assert_close(contrast, torch.linalg.inv(precision))


@covariances
def test_the_sum_of_the_functions_keeps_its_prior(covariance):
    case = scenarios.classification(prior=PRIOR)
    guide = NaturalGuide(case.model, covariance)
    vi = NaturalVI(case.model, guide)
    for _ in range(60):
        vi.step(case.x, case.y)
    assert_close(guide.mean.sum(0), guide.prior_mean.sum(0), rtol=1e-3, atol=1e-3)
    cov = scenarios.joint(guide).covariance_matrix.unflatten(0, (3, 7)).unflatten(-1, (3, 7))
    if covariance == "shared":  # the others have a precision for each class
        assert_close(cov.sum((0, 2)), torch.diag(guide.prior_precision.reciprocal().sum(0)))


@covariances
@pytest.mark.parametrize("sizes", [[40], [30, 10]])
def test_rows_can_be_added(covariance, sizes):
    case = scenarios.classification(prior=PRIOR, num_rows=40)
    prior, guide, trained = (NaturalGuide(case.model, covariance) for _ in range(3))
    vi = NaturalVI(case.model, trained)
    for _ in range(60):
        vi.step(case.x, case.y)
    for x, y in zip(case.x.split(sizes), case.y.split(sizes), strict=True):
        guide.update(case.model, x, y)
    start, best, found = (
        LocalReparamELBO(10_000).loss(case.model, q, case.x, case.y)
        for q in (prior, trained, guide)
    )
    assert found - best < 0.02 * (start - best)
