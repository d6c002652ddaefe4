import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from torch.distributions import kl_divergence
from torch.testing import assert_close

from pyro_dak import (
    ClosedFormELBO,
    GammaScalePrior,
    GaussianLikelihood,
    HeteroscedasticLikelihood,
    JensenELBO,
    LaplacePrior,
    LocalReparamELBO,
    MeanFieldGuide,
    NormalPrior,
    StudentTPrior,
)
from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.inference.objectives import kl
from tests import scenarios
from tests.scenarios import GUIDES, LEARNED, agrees, standard_error, trace_elbo_draws

guides = pytest.mark.parametrize("guide", GUIDES)
learned_guides = pytest.mark.parametrize("guide", LEARNED)


def elbo(objective, case, **kwargs):
    return objective.terms(case.model, case.guide, case.x, case.y, **kwargs).elbo.detach()


def elbo_draws(objective, case, num_batches=30, **kwargs):
    return torch.stack([elbo(objective, case, **kwargs) for _ in range(num_batches)])


# Closed form


@guides
@pytest.mark.parametrize("likelihood", ["gaussian", "heteroscedastic", "poisson"])
@pytest.mark.parametrize("num_outputs", [1, 3])
@pytest.mark.parametrize("linear_term", [False, True])
def test_closed_form_elbo_equals_mean_of_trace_elbo(guide, likelihood, num_outputs, linear_term):
    case = scenarios.make(
        likelihood, guide, num_outputs=num_outputs, linear_term=linear_term, spread=0.2
    )
    draws = trace_elbo_draws(case, num_data=40)
    assert agrees(draws, elbo(ClosedFormELBO(), case, num_data=40))


@guides
def test_closed_form_elbo_holds_for_noise_and_normal_priors_of_any_scale(guide):
    noise = scenarios.GaussianLikelihood(torch.tensor([0.3, 0.9]))
    prior = {"z": NormalPrior(0.2, 0.7), "mu": NormalPrior(-1.0, 2.0)}
    case = scenarios.make(noise, guide, prior=prior)
    assert agrees(trace_elbo_draws(case), elbo(ClosedFormELBO(), case))


def test_closed_form_elbo_counts_the_covariance_of_f_and_log_noise():
    case = scenarios.heteroscedastic(guide="low_rank", num_outputs=2)
    with torch.no_grad():
        case.guide.factor.mul_(1.5)
        mean, var, root = case.guide.moments(case.model.layer, case.h)
        independent = case.model.likelihood.expected_log_prob(case.y, FunctionMoments(mean, var))
    draws = trace_elbo_draws(case, num_batches=60)
    terms = ClosedFormELBO().terms(case.model, case.guide, case.x, case.y)
    assert root.shape == (2, 8, 4)
    assert agrees(draws, terms.elbo.detach())
    assert not agrees(draws, independent.sum() - terms.kl.detach())


@guides
@pytest.mark.parametrize("seed", range(5))
def test_elbo_is_below_the_log_evidence(guide, seed):
    torch.manual_seed(seed)
    case = scenarios.gaussian_regression(guide=guide, spread=0.5 * seed)
    assert elbo(ClosedFormELBO(), case) < case.exact().log_evidence


@pytest.mark.parametrize(
    ("objective", "likelihood"), [(ClosedFormELBO(), "gaussian"), (JensenELBO(), "categorical")]
)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_elbo_of_minibatches_averages_to_that_of_all_rows(objective, likelihood, batch_size):
    case = scenarios.make(likelihood, num_outputs=3, num_rows=12)
    parts = [
        objective.terms(case.model, case.guide, x, y, num_data=12).elbo
        for x, y in zip(case.x.split(batch_size), case.y.split(batch_size), strict=True)
    ]
    assert_close(torch.stack(parts).mean(), elbo(objective, case))


@guides
def test_closed_form_elbo_from_units_equals_that_from_inputs(guide):
    case = scenarios.heteroscedastic(guide=guide)
    from_units = ClosedFormELBO().terms_from_units(case.model, case.guide, case.h, case.y)
    assert_close(from_units, ClosedFormELBO().terms(case.model, case.guide, case.x, case.y))


@guides
@pytest.mark.parametrize("likelihood", ["gaussian", "heteroscedastic"])
def test_gradient_of_the_closed_form_equals_mean_gradient_of_trace_elbo(guide, likelihood):
    case = scenarios.make(likelihood, guide, spread=0.1)
    watched = [
        case.model.layer.log_unit_scale,
        case.model.embedding.weight,
        *case.guide.parameters(),
    ]
    exact = torch.autograd.grad(elbo_loss(ClosedFormELBO(), case), watched)
    sampled = Trace_ELBO(500, max_plate_nesting=1, vectorize_particles=True)
    draws = [torch.autograd.grad(elbo_loss(sampled, case), watched) for _ in range(40)]
    for truth, *values in zip(exact, *draws, strict=True):
        assert agrees(torch.stack(values), truth)


def elbo_loss(objective, case):
    return objective.differentiable_loss(case.model, case.guide, case.x, case.y)


# Kullback-Leibler


@guides
@pytest.mark.parametrize("linear_term", [False, True])
def test_kl_equals_that_of_the_joint_distributions(guide, linear_term):
    prior = {"z": NormalPrior(0.3, 0.8), "mu": NormalPrior(scale=2.0)}
    case = scenarios.gaussian_regression(guide=guide, linear_term=linear_term, prior=prior)
    like = torch.zeros(())
    bases = {n: case.model.prior_distribution(n, like).base_dist for n in case.guide.weight_sites}
    prior_loc = scenarios.flat(case.guide, {n: base.loc for n, base in bases.items()})
    prior_scale = scenarios.flat(case.guide, {n: base.scale for n, base in bases.items()})
    p = torch.distributions.MultivariateNormal(prior_loc, torch.diag(prior_scale.square()))
    expected = kl_divergence(scenarios.joint(case.guide), p)
    assert_close(kl(case.model, case.guide).detach(), expected)


@guides
def test_kl_from_a_normal_given_as_a_distribution_equals_that_from_our_prior(guide):
    case = scenarios.gaussian_regression(guide=guide, prior={"z": NormalPrior(0.5, 2.0)})
    ours = kl(case.model, case.guide)
    case.model.prior["z"] = pyro.distributions.Normal(0.5, 2.0)
    assert_close(kl(case.model, case.guide), ours)
    case.model.prior["z"] = pyro.distributions.Normal(0.5, 2.0 * torch.ones(2, 2, 3)).to_event(3)
    assert_close(kl(case.model, case.guide), ours)


def test_kl_of_mean_field_from_laplace_is_torchs_and_has_no_noise():
    case = scenarios.gaussian_regression(prior={"z": LaplacePrior(0.7)})
    q = torch.distributions.Normal(case.guide.z_loc, case.guide.z_scale)
    q_mu = torch.distributions.Normal(case.guide.mu_loc, case.guide.mu_log_scale.exp())
    expected = kl_divergence(q, torch.distributions.Laplace(0.0, 0.7 / 2**0.5)).sum()
    expected = expected + kl_divergence(q_mu, torch.distributions.Normal(0.0, 1.0)).sum()
    assert_close(kl(case.model, case.guide), expected)


@learned_guides
@pytest.mark.parametrize("prior", [StudentTPrior(4.0), LaplacePrior(0.7)], ids=["t", "laplace"])
def test_kl_from_other_priors_is_unbiased(guide, prior):
    case = scenarios.gaussian_regression(guide=guide, prior={"z": prior}, num_rows=2)
    like = torch.zeros(())
    with torch.no_grad():
        draws = torch.stack([kl(case.model, case.guide) for _ in range(200)])
        values = scenarios.weight_draws(case.guide, 10_000)
        log_p = sum(case.model.prior_distribution(n, like).log_prob(values[n]) for n in values)
    truth = -scenarios.joint(case.guide).entropy() - log_p.mean()
    assert (draws.mean() - truth).abs() < 4 * standard_error(draws) + 4 * standard_error(log_p)


def test_trace_mean_field_elbo_takes_the_kl_of_our_guide_exactly():
    case = scenarios.gaussian_regression(prior={"mu": NormalPrior(0.5, 2.0)})
    without_data = pyro.poutine.block(case.model, hide=["y"])
    losses = [
        TraceMeanField_ELBO().loss(without_data, case.guide, case.x, case.y) for _ in range(3)
    ]
    assert_close(torch.tensor(losses), kl(case.model, case.guide).detach().expand(3))


# Classes and other likelihoods


@guides
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_jensen_elbo_is_below_trace_elbo(guide, likelihood):
    case = scenarios.make(likelihood, guide, num_outputs=3)
    draws = trace_elbo_draws(case, num_data=20)
    assert elbo(JensenELBO(), case, num_data=20) <= draws.mean() + 4 * standard_error(draws)


def test_jensen_elbo_equals_the_closed_form_where_there_is_one():
    case = scenarios.heteroscedastic()
    assert_close(elbo(JensenELBO(), case), elbo(ClosedFormELBO(), case))


@guides
@pytest.mark.parametrize(
    "likelihood", ["categorical", "student_t", "bernoulli", "heteroscedastic", "gaussian"]
)
def test_local_reparam_elbo_has_the_mean_of_trace_elbo(guide, likelihood):
    case = scenarios.make(likelihood, guide, num_outputs=3, spread=0.2)
    ours = elbo_draws(LocalReparamELBO(2000), case, num_data=20)
    pyros = trace_elbo_draws(case, num_data=20)
    error = (standard_error(ours).square() + standard_error(pyros).square()).sqrt()
    assert (ours.mean() - pyros.mean()).abs() < 4 * error


@guides
def test_local_reparam_elbo_has_the_mean_of_the_closed_form(guide):
    case = scenarios.heteroscedastic(guide=guide, spread=0.2)
    assert agrees(elbo_draws(LocalReparamELBO(2000), case), elbo(ClosedFormELBO(), case))


@learned_guides
def test_local_reparam_gradient_has_at_most_half_the_variance_of_trace_elbo(guide):
    case = scenarios.classification(guide=guide, num_rows=40)
    parameter = case.guide.z_loc if hasattr(case.guide, "z_loc") else case.guide.loc

    def gradient_variance(objective):
        draws = [torch.autograd.grad(elbo_loss(objective, case), parameter)[0] for _ in range(50)]
        return torch.stack(draws).var(0).sum()

    assert gradient_variance(LocalReparamELBO(1)) < 0.5 * gradient_variance(Trace_ELBO())


def test_local_reparam_gradient_is_finite_where_the_root_is_all_of_the_variance():
    torch.set_default_dtype(torch.float32)
    case = scenarios.classification(guide="low_rank")
    with torch.no_grad():
        case.guide.log_scale.fill_(-12.0)
        case.guide.factor.normal_()
    elbo_loss(LocalReparamELBO(), case).backward()
    assert all(p.grad.isfinite().all() for p in case.guide.parameters())


# In SVI and as a module


@guides
@pytest.mark.parametrize("linear_term", [False, True])
def test_svi_names_the_same_parameters_with_and_without_tracing(guide, linear_term):
    case = scenarios.heteroscedastic(guide=guide, linear_term=linear_term)
    names = []
    for objective in (Trace_ELBO(), ClosedFormELBO()):
        pyro.clear_param_store()
        SVI(case.model, case.guide, Adam({"lr": 0.0}), objective).step(case.x, case.y)
        names.append(set(pyro.get_param_store().keys()))
    assert names[0] == names[1]
    num_parameters = len([*case.model.parameters(), *case.guide.parameters()])
    assert len(names[0]) == num_parameters


@learned_guides
@pytest.mark.parametrize("objective", [ClosedFormELBO(), LocalReparamELBO(4)])
def test_svi_updates_every_parameter_in_place(guide, objective):
    case = scenarios.gaussian_regression(guide=guide)
    parameters = [*case.model.parameters(), *case.guide.parameters()]
    before = [p.detach().clone() for p in parameters]
    svi = SVI(case.model, case.guide, Adam({"lr": 0.01}), objective)
    losses = [svi.step(case.x, case.y, num_data=80) for _ in range(3)]
    assert all((p != q).any() for p, q in zip(parameters, before, strict=True))
    assert losses[-1] < losses[0]
    stored = {id(value.unconstrained()) for _, value in pyro.get_param_store().items()}
    assert stored == {id(p) for p in parameters}


def test_second_derivatives_of_the_closed_form_are_right_on_the_dense_route():
    case = scenarios.gaussian_regression(level=2)
    case.model.eval()
    z_loc = case.guide.z_loc

    def slope(create_graph=False):
        loss = ClosedFormELBO().differentiable_loss(case.model, case.guide, case.x, case.y)
        return torch.autograd.grad(loss, z_loc, create_graph=create_graph)[0]

    direction = torch.randn_like(z_loc)
    (found,) = torch.autograd.grad((slope(create_graph=True) * direction).sum(), z_loc)
    slopes = []
    for step in (1e-4, -1e-4):
        with torch.no_grad():
            z_loc.add_(direction, alpha=step)
        slopes.append(slope())
        with torch.no_grad():
            z_loc.sub_(direction, alpha=step)
    assert_close(found, (slopes[0] - slopes[1]) / 2e-4, rtol=1e-6, atol=1e-6)


def test_second_derivatives_of_the_local_route_are_refused():
    case = scenarios.gaussian_regression(level=5)
    loss = ClosedFormELBO().differentiable_loss(case.model, case.guide, case.x, case.y)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        torch.autograd.grad(loss, case.guide.z_loc, create_graph=True)


def test_guides_and_likelihoods_of_ones_own_are_not_passed_over():
    class Shifted(MeanFieldGuide):
        def moments(self, layer, h):
            q = super().moments(layer, h)
            return q._replace(mean=q.mean + 1)

    class Doubled(GaussianLikelihood):
        def expected_log_prob(self, y, moments):
            return 2 * super().expected_log_prob(y, moments)

    case = scenarios.gaussian_regression(level=5)
    model, x, y = case.model.eval(), case.x, case.y
    plain, shifted = (guide(model) for guide in (MeanFieldGuide, Shifted))
    shifted.load_state_dict(plain.state_dict())
    objective = ClosedFormELBO()
    moved = objective.terms(model, shifted, x, y)
    assert_close(moved.elbo, objective.terms(model, plain, x, y - 1).elbo)
    once = objective.terms(model, plain, x, y).expected_log_lik
    doubled = Doubled()
    doubled.load_state_dict(model.likelihood.state_dict())
    model.likelihood = doubled
    assert_close(objective.terms(model, plain, x, y).expected_log_lik, 2 * once)


def test_svi_step_and_loss_return_minus_the_elbo():
    case = scenarios.gaussian_regression()
    expected = -float(elbo(ClosedFormELBO(), case, num_data=80))
    svi = SVI(case.model, case.guide, Adam({"lr": 0.01}), ClosedFormELBO())
    assert svi.evaluate_loss(case.x, case.y, num_data=80) == pytest.approx(expected, rel=1e-12)
    assert svi.step(case.x, case.y, num_data=80) == pytest.approx(expected, rel=1e-12)


def test_module_form_returns_minus_the_elbo_and_knows_all_parameters():
    case = scenarios.gaussian_regression()
    module = ClosedFormELBO()(case.model, case.guide)
    assert_close(module(case.x, case.y), -elbo(ClosedFormELBO(), case))
    expected = [*case.model.parameters(), *case.guide.parameters()]
    assert {id(p) for p in module.parameters()} == {id(p) for p in expected}


def test_closed_form_step_uses_no_pyro_primitive(monkeypatch):
    case = scenarios.heteroscedastic(guide="low_rank")
    elbo_loss(ClosedFormELBO(), case)  # the first one looks for sites that it does not know
    monkeypatch.setattr(pyro, "sample", None)
    monkeypatch.setattr(pyro, "param", None)
    elbo_loss(ClosedFormELBO(), case).backward()
    assert len(pyro.get_param_store()) == 0


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_svi_converges_to_the_exact_mean_field_optimum(num_outputs):
    case = scenarios.gaussian_regression(num_outputs=num_outputs, num_rows=40, level=3)
    log_evidence, optimum = mean_field_optimum(case)
    module = ClosedFormELBO()(case.model, case.guide)
    case.model.requires_grad_(False)
    optimiser = torch.optim.LBFGS(
        case.guide.parameters(), max_iter=300, line_search_fn="strong_wolfe"
    )

    def closure():
        optimiser.zero_grad()
        loss = module(case.x, case.y)
        loss.backward()
        return loss

    optimiser.step(closure)
    loss = module(case.x, case.y)
    assert log_evidence - optimum > 0.05 * 40  # mean field has a price
    assert abs(-loss.item() - optimum) < 1e-3 * 40
    assert -loss.item() <= optimum + 1e-9


def mean_field_optimum(case):
    """Log evidence, and the ELBO of the best mean-field q.

    For a Gaussian posterior with precision A the optimum has its means and variances 1 / A_ii,
    and KL(q || posterior) = (sum_i log A_ii - log det A) / 2, since tr(A diag(1 / A_ii)) = K.
    """
    guide, log_evidence = case.exact()
    tril = guide.scale_tril.detach()
    precision = torch.linalg.inv(tril @ tril.mT)
    log_diagonal = precision.diagonal(dim1=-2, dim2=-1).log().sum()
    return log_evidence, float(log_evidence - 0.5 * (log_diagonal - torch.logdet(precision).sum()))


@pytest.mark.parametrize("objective", [ClosedFormELBO(), LocalReparamELBO(3), Trace_ELBO()])
def test_two_models_trained_alternately_equal_each_alone(objective):
    def start(seed):
        torch.manual_seed(seed)
        case = scenarios.gaussian_regression(guide="low_rank")
        case.model.train()
        module = objective(case.model, case.guide)
        return case, module, torch.optim.Adam(module.parameters(), lr=0.01)

    def step(number, case, module, optimiser):
        torch.manual_seed(number)
        optimiser.zero_grad()
        module(case.x, case.y).backward()
        optimiser.step()

    with pyro.settings.context(module_local_params=True):
        alone = [start(seed) for seed in (0, 1)]
        for run in alone:
            for number in range(5):
                step(number, *run)
        together = [start(seed) for seed in (0, 1)]
        for number in range(5):
            for run in together:
                step(number, *run)
    assert len(pyro.get_param_store()) == 0
    for run, other in zip(alone, together, strict=True):
        assert_close(run[1].state_dict(), other[1].state_dict(), rtol=0, atol=0)


# Errors


@pytest.mark.parametrize("objective", [ClosedFormELBO(), JensenELBO(), LocalReparamELBO()])
@pytest.mark.usefixtures("no_type_checker")
def test_guides_without_known_moments_are_refused(objective):
    case = scenarios.gaussian_regression()
    with pytest.raises(TypeError, match=r"Gaussian guides.*got AutoNormal.*Trace_ELBO"):
        objective.loss(case.model, AutoNormal(case.model), case.x, case.y)


@pytest.mark.parametrize("objective", [ClosedFormELBO(), JensenELBO(), LocalReparamELBO()])
def test_a_prior_on_the_scales_of_units_is_refused(objective):
    case = scenarios.gaussian_regression(prior={"shrinkage": GammaScalePrior()})
    with pytest.raises(NotImplementedError, match=r"`shrinkage` breaks it\. Use Trace_ELBO"):
        objective.loss(case.model, case.guide, case.x, case.y)


@pytest.mark.parametrize("likelihood", ["categorical", "student_t", "bernoulli"])
def test_likelihoods_without_a_closed_form_are_refused(likelihood):
    case = scenarios.make(likelihood)
    with pytest.raises(NotImplementedError, match=r"no closed-form expectation\. Use Local"):
        ClosedFormELBO().loss(case.model, case.guide, case.x, case.y)


def test_likelihoods_without_a_bound_are_refused():
    case = scenarios.make("student_t")
    with pytest.raises(NotImplementedError, match="no closed-form bound"):
        JensenELBO().loss(case.model, case.guide, case.x, case.y)


def test_unequal_numbers_of_rows_are_named():
    case = scenarios.gaussian_regression()
    with pytest.raises(ValueError, match="one row each per datum; got 8, 7"):
        ClosedFormELBO().loss(case.model, case.guide, case.x, case.y[:7])


@pytest.mark.parametrize("num_samples", [0, -1])
def test_number_of_samples_must_be_positive(num_samples):
    with pytest.raises(ValueError, match="`num_samples` must be at least 1"):
        LocalReparamELBO(num_samples)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@guides
def test_objectives_on_the_gpu_equal_those_on_the_cpu(guide):
    case = scenarios.make(HeteroscedasticLikelihood(0.5), guide)
    expected = elbo(ClosedFormELBO(), case)
    case.model.cuda(), case.guide.cuda()
    case.x, case.y = case.x.cuda(), case.y.cuda()
    assert_close(elbo(ClosedFormELBO(), case).cpu(), expected)
    elbo_loss(LocalReparamELBO(), case).backward()


def test_svi_with_an_older_model_in_the_parameter_store_is_refused():
    first, second = scenarios.make("gaussian"), scenarios.make("gaussian")
    for case, is_refused in ((first, False), (second, True)):
        svi = SVI(case.model, case.guide, Adam({"lr": 1e-2}), ClosedFormELBO())
        if is_refused:
            with pytest.raises(RuntimeError, match=r"clear_param_store\(\) first"):
                svi.step(case.x, case.y)
        else:
            svi.step(case.x, case.y)


def test_a_function_that_returns_a_normal_prior_keeps_the_kl_closed():
    as_function = {"z": lambda shape: dist.Normal(0.5, 2.0).expand(shape).to_event(3)}
    case = scenarios.make("gaussian", prior=as_function)
    twin = scenarios.make("gaussian", prior={"z": NormalPrior(0.5, 2.0)})
    twin.guide.load_state_dict(case.guide.state_dict())
    assert_close(kl(case.model, case.guide), kl(twin.model, twin.guide))
