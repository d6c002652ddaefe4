import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.optim import Adam
from torch import nn
from torch.testing import assert_close

import pyro_dak
from pyro_dak import (
    DAK,
    CategoricalLikelihood,
    ClosedFormELBO,
    GaussianLikelihood,
    HorseshoePrior,
    MeanFieldGuide,
    exact_posterior,
    to_arviz,
)
from pyro_dak.diagnostics import k_hat
from pyro_dak.model.modes import evaluating
from tests import scenarios
from tests.scenarios import LIKELIHOODS, agrees

AUTOGUIDES = [
    AutoNormal,
    AutoDiagonalNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoDelta,
    AutoIAFNormal,
]


# Sites


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("linear_term", [False, True])
def test_sites_have_the_stated_shapes(likelihood, linear_term):
    case = scenarios.make(
        likelihood, num_outputs=3, linear_term=linear_term, prior={"shrinkage": HorseshoePrior()}
    )
    F = 6 if likelihood == "heteroscedastic" else 3
    expected = {"mu": (F,), "z": (F, 2, 3), "global_shrinkage": (), "shrinkage": (2,)}
    if linear_term:
        expected["linear"] = (F, 2)
    trace = poutine.trace(case.model).get_trace(case.x, case.y)
    latent = {n: trace.nodes[n]["fn"].event_shape for n in trace.stochastic_nodes if n in expected}
    assert latent == expected == case.model.site_shapes
    assert [frame.name for frame in trace.nodes["y"]["cond_indep_stack"]] == ["data"]
    assert all(not trace.nodes[n]["cond_indep_stack"] for n in expected)
    assert trace.nodes["y"]["fn"].batch_shape == (8,)


@pytest.mark.parametrize("num_data", [None, 8, 40])
def test_density_is_prior_plus_scaled_likelihood(num_data):
    case = scenarios.gaussian_regression()
    sites = case.guide()
    trace = poutine.trace(poutine.condition(case.model, sites)).get_trace(
        case.x, case.y, num_data=num_data
    )
    normal = torch.distributions.Normal(0.0, 1.0)
    log_prior = sum(normal.log_prob(value).sum() for value in sites.values())
    f = case.model.functions(case.h, sites)
    noise = case.model.likelihood.noise_scale
    log_lik = torch.distributions.Normal(f, noise).log_prob(case.y).sum()
    assert_close(trace.log_prob_sum(), log_prior + (num_data or 8) / 8 * log_lik)


def test_observe_is_the_program_from_the_unit_inputs_on():
    case = scenarios.gaussian_regression()
    conditioned = {"data": case.guide()}
    runs = [(case.model, case.x), (case.model.observe, case.h)]
    values = [
        poutine.trace(poutine.condition(program, conditioned["data"]))
        .get_trace(inputs, case.y)
        .log_prob_sum()
        for program, inputs in runs
    ]
    assert_close(values[0], values[1])


def test_conditioned_on_weights_the_model_returns_noise_around_f():
    case = scenarios.make(GaussianLikelihood(1e-6))
    sites = case.guide()
    y = poutine.condition(case.model, sites)(case.x)
    assert_close(y, case.model.functions(case.h, sites), rtol=0, atol=1e-5)


def test_prior_draws_of_f_have_the_prior_variance():
    case = scenarios.gaussian_regression(num_outputs=1)
    with torch.no_grad():
        y = Predictive(case.model, {}, num_samples=5000, parallel=True)(case.x)["y"]
        var = case.model.layer.design(case.h).square().sum(-1, keepdim=True) + 0.25
    assert agrees(y, 0.0)
    assert agrees(y.square(), var)


class WithNoisePrior(GaussianLikelihood):
    """Noise sampled inside `distribution`: in the data plate, and so once for every row."""

    has_column = False

    def distribution(self, f):
        scale = pyro.sample("noise", pyro.distributions.HalfNormal(1.0))
        return pyro.distributions.Normal(
            f, scale.unsqueeze(-1) if self.has_column else scale
        ).to_event(1)


def test_an_observation_by_condition_has_the_density_of_one_by_argument():
    case = scenarios.gaussian_regression(num_outputs=1)
    sites = case.guide()
    by_argument = poutine.condition(case.model, sites)
    by_condition = poutine.condition(by_argument, {"y": case.y})
    expected = poutine.trace(by_argument).get_trace(case.x, case.y).log_prob_sum()
    assert_close(poutine.trace(by_condition).get_trace(case.x).log_prob_sum(), expected)


@pytest.mark.parametrize(("likelihood", "shape"), [("gaussian", (8,)), ("categorical", (8, 1))])
def test_an_observation_by_condition_of_another_shape_is_refused(likelihood, shape):
    case = scenarios.make(likelihood, num_outputs=1)
    conditioned = poutine.condition(case.model, {"y": case.y.reshape(shape)})
    with pytest.raises(ValueError, match=r"`y` must have shape \(8,.* got \(8,.*`pyro.condition`"):
        poutine.trace(conditioned).get_trace(case.x)


def test_noise_sampled_for_every_row_that_does_not_fit_the_outputs_is_refused():
    case = scenarios.make(WithNoisePrior(), num_outputs=1)
    with pytest.raises(ValueError, match=r"`y` must have shape \(8, 8\), that of.* got \(8, 1\)"):
        case.model(case.x, case.y)
    case.model.likelihood.has_column = True
    trace = poutine.trace(case.model).get_trace(case.x, case.y)
    assert trace.nodes["y"]["fn"].batch_shape == trace.nodes["noise"]["value"].shape == (8,)


def test_a_plate_around_the_model_is_refused():
    case = scenarios.gaussian_regression()
    with (
        pytest.raises(ValueError, match="plate `rows`, which would give every row weights of its"),
        pyro.plate("rows", 8),
    ):
        case.model(case.x, case.y)
    with pyro.plate("draws", 5, dim=-2):
        assert case.model(case.x).shape == (5, 8, 2)


# Evaluation


def nuts_of_pyro(model, guide, x, y):
    MCMC(NUTS(model), num_samples=2, warmup_steps=2, disable_progbar=True).run(x, y)


EVALUATIONS = {
    "evaluate_loss": lambda m, g, x, y: SVI(m, g, Adam({}), Trace_ELBO()).evaluate_loss(x, y),
    "exact": lambda m, g, x, y: exact_posterior(m, x, y).log_evidence,
    "k_hat": lambda m, g, x, y: k_hat(m, g, x, y, num_samples=30),
    "our_loss": lambda m, g, x, y: ClosedFormELBO().loss(m, g, x, y),
    "predictive": lambda m, g, x, y: Predictive(m, guide=g, num_samples=2)(x)["y"].sum().item(),
    "run_nuts": lambda m, g, x, y: pyro_dak.run_nuts(m, x, y, 4, 200, progress=False).max_r_hat(),
    "to_arviz": lambda m, g, x, y: to_arviz(m, g, x, num_samples=4).posterior["mu"].sum().item(),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The largest r-hat")
@pytest.mark.parametrize("name", EVALUATIONS)
def test_an_evaluation_in_training_mode_is_that_of_eval_mode_and_changes_nothing(name):
    case = scenarios.gaussian_regression(num_outputs=1)
    before = {key: value.clone() for key, value in case.model.state_dict().items()}
    x, values = case.x[:5] + 1, []
    for is_training in (False, True):
        case.model.train(is_training)
        pyro.set_rng_seed(0)
        values.append(EVALUATIONS[name](case.model, case.guide, x, case.y[:5]))
    assert values[0] == values[1]
    assert_close(dict(case.model.state_dict()), before, rtol=0, atol=0)


def test_nuts_of_pyro_in_training_mode_warns():
    case = scenarios.gaussian_regression(num_outputs=1)
    nuts_of_pyro(case.model, case.guide, case.x, case.y)
    case.model.train()
    with pytest.warns(UserWarning, match=r"in training mode.*Call `model.eval\(\)` first"):
        nuts_of_pyro(case.model, case.guide, case.x, case.y)


def test_training_with_given_weights_does_not_warn():
    case = scenarios.gaussian_regression(num_outputs=1)
    given = poutine.condition(case.model.train(), case.guide())
    svi = SVI(given, lambda x, y: None, Adam({"lr": 0.01}), Trace_ELBO())
    before = case.model.scaling.num_batches.item()
    svi.step(case.x, case.y)
    assert case.model.scaling.num_batches == before + 1


# Pyro's store of parameters


@pytest.mark.parametrize("is_new", ["model", "guide"])
def test_a_second_model_or_guide_in_the_store_of_the_first_is_refused(is_new):
    case = scenarios.gaussian_regression(num_outputs=1)
    model, guide = case.model, MeanFieldGuide(case.model)
    svi = SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO())
    svi.step(case.x, case.y)
    svi.step(case.x, case.y)
    model = scenarios.gaussian_regression(num_outputs=1).model if is_new == "model" else model
    second = SVI(model, MeanFieldGuide(model), Adam({"lr": 0.01}), Trace_ELBO())
    with pytest.raises(RuntimeError, match=r"another tensor under the name.*clear_param_store"):
        second.step(case.x, case.y)
    pyro.clear_param_store()
    second.step(case.x, case.y)


def test_a_model_is_not_restored_from_a_file_of_the_store_without_a_word(tmp_path):
    case = scenarios.gaussian_regression(num_outputs=1)
    SVI(case.model, case.guide, Adam({"lr": 0.01}), Trace_ELBO()).step(case.x, case.y)
    pyro.get_param_store().save(tmp_path / "store")
    pyro.clear_param_store()
    pyro.get_param_store().load(tmp_path / "store")
    case = scenarios.gaussian_regression(num_outputs=1)
    with pytest.raises(RuntimeError, match=r"or from a file.*`load_state_dict`"):
        SVI(case.model, AutoNormal(case.model), Adam({}), Trace_ELBO()).step(case.x, case.y)


def test_other_models_are_evaluated_beside_what_is_in_the_store():
    case, other = scenarios.gaussian_regression(), scenarios.gaussian_regression()
    SVI(case.model, case.guide, Adam({"lr": 0.01}), Trace_ELBO()).step(case.x, case.y)
    Trace_ELBO().loss(other.model, other.guide, other.x, other.y)
    Predictive(other.model, guide=other.guide, num_samples=2)(other.x)


@pytest.mark.parametrize(
    ("scaling", "is_zero"), [("standardize", True), ("minmax", True), ("none", False)]
)
def test_the_length_of_a_row_of_the_embedding_has_no_gradient_where_features_are_scaled(
    scaling, is_zero
):
    case = scenarios.gaussian_regression(scaling=scaling)
    loss = ClosedFormELBO().differentiable_loss(case.model.train(), case.guide, case.x, case.y)
    loss.backward()
    W = case.model.embedding.weight
    along = (W * W.grad).sum(-1).abs() / (W.norm(dim=-1) * W.grad.norm(dim=-1))
    assert bool((along < 1e-6).all()) == is_zero


# Functions


@pytest.mark.parametrize("linear_term", [False, True])
@pytest.mark.parametrize("batch", [(4,), (4, 1), (2, 3)], ids=["draws", "pyro", "chains"])
def test_functions_of_draws_equal_a_loop(linear_term, batch):
    prior = {"shrinkage": HorseshoePrior()}
    case = scenarios.gaussian_regression(linear_term=linear_term, prior=prior)
    sites = {n: torch.rand(*batch, *shape) for n, shape in case.model.site_shapes.items()}
    f = case.model.functions(case.h, sites)
    flat = {n: sites[n].reshape(-1, *shape) for n, shape in case.model.site_shapes.items()}
    num_draws = len(flat["mu"])
    looped = [
        case.model.functions(case.h, {n: value[s] for n, value in flat.items()})
        for s in range(num_draws)
    ]
    assert f.shape == (*(batch[:1] if batch[-1] == 1 else batch), 8, 2)
    assert_close(f.reshape(num_draws, 8, 2), torch.stack(looped))


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((), ()),
        ((5,), (5,)),
        ((5, 1), (5,)),
        ((1,), ()),
        ((1, 1), (1,)),
        ((4, 5, 1), (4, 5)),
    ],
)
@pytest.mark.parametrize("num_outputs", [1, 2])
def test_the_dimension_of_the_data_plate_is_dropped(num_outputs, batch, expected):
    case = scenarios.gaussian_regression(num_outputs=num_outputs)
    sites = {n: torch.zeros(*batch, *shape) for n, shape in case.model.site_shapes.items()}
    assert case.model.functions(case.h, sites).shape == (*expected, 8, num_outputs)


def test_permuting_units_leaves_f_unchanged():
    case = scenarios.gaussian_regression(num_units=3, linear_term=True)
    sites = case.guide()
    before = case.model.functions(case.h, sites)
    order = [2, 0, 1]
    with torch.no_grad():
        case.model.embedding.weight.copy_(case.model.embedding.weight[order])
        case.model.layer.log_unit_scale.copy_(case.model.layer.log_unit_scale[order])
        for buffer in case.model.scaling.buffers():
            buffer.copy_(buffer[..., order] if buffer.dim() else buffer)
    sites = {"z": sites["z"][:, order], "mu": sites["mu"], "linear": sites["linear"][:, order]}
    assert_close(case.model.functions(case.h, sites), before)


def test_rows_are_independent_in_eval_mode():
    case = scenarios.gaussian_regression()
    assert_close(case.h, torch.cat([case.model.unit_inputs(row) for row in case.x.split(1)]))


def test_evaluating_brings_every_mode_back():
    model = DAK(nn.Sequential(nn.Linear(3, 4), nn.Dropout()), 4, num_units=2)
    model.feature_extractor[1].eval()
    before = [module.training for module in model.modules()]
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == before
    model.eval()
    with evaluating(model):
        model.train()
    assert not any(module.training for module in model.modules())


def test_parameters_are_counted_as_in_the_paper():
    model = DAK(
        nn.Identity(),
        512,
        num_units=128,
        num_outputs=100,
        level=6,
        likelihood=CategoricalLikelihood(),
    )
    guide = MeanFieldGuide(model)
    z = guide.z_loc.numel() + guide.z_log_scale.numel()
    assert z + model.embedding.weight.numel() == 1_678_336  # Table 3: 1.68M


# Pyro's tools


@pytest.mark.parametrize("objective", [Trace_ELBO, TraceMeanField_ELBO])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_vectorised_particles_have_the_mean_of_a_loop(objective, likelihood):
    case = scenarios.make(likelihood, num_outputs=3, linear_term=True, spread=0.1)
    vectorised = objective(300, max_plate_nesting=1, vectorize_particles=True)
    draws = [
        torch.tensor(
            [estimator.loss(case.model, case.guide, case.x, case.y) for _ in range(number)]
        )
        for estimator, number in ((vectorised, 10), (objective(), 40))
    ]
    error = sum(scenarios.standard_error(d).square() for d in draws).sqrt()
    assert (draws[0].mean() - draws[1].mean()).abs() < 4 * error


def test_predictive_from_posterior_samples_uses_each_draw():
    case = scenarios.make(GaussianLikelihood(1e-6))
    posterior = {
        name: v.squeeze(1).detach() for name, v in scenarios.weight_draws(case.guide, 6).items()
    }
    y = Predictive(case.model, posterior, parallel=True)(case.x)["y"]
    assert_close(y, case.model.functions(case.h, posterior).detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("autoguide", AUTOGUIDES)
def test_autoguides_train_and_predict(autoguide):
    case = scenarios.gaussian_regression()
    guide = autoguide(case.model)
    svi = SVI(case.model, guide, Adam({"lr": 0.02}), Trace_ELBO(8, vectorize_particles=True))
    losses = [svi.step(case.x, case.y) for _ in range(30)]
    assert sum(losses[-5:]) < sum(losses[:5])
    y = Predictive(case.model, guide=guide, num_samples=3, parallel=True)(case.x)["y"]
    assert y.shape == (3, 8, 2)


def test_autonormal_has_the_elbo_of_our_mean_field_guide():
    case = scenarios.gaussian_regression()
    guide = AutoNormal(case.model)
    guide(case.x, case.y)
    with torch.no_grad():
        for name in ("mu", "z"):
            getattr(guide.locs, name).copy_(getattr(case.guide, f"{name}_loc"))
            setattr(guide.scales, name, getattr(case.guide, f"{name}_log_scale").exp())
    closed = ClosedFormELBO().terms(case.model, case.guide, case.x, case.y).elbo.item()
    draws = scenarios.trace_elbo_draws(scenarios.Scenario(case.model, guide, case.x, case.y))
    assert agrees(draws, closed)


def run_nuts(case, num_samples, **options):
    mcmc = MCMC(
        NUTS(case.model.observe, **options), num_samples, num_samples // 2, disable_progbar=True
    )
    mcmc.run(case.h.detach(), case.y)
    return mcmc.get_samples()


def test_nuts_runs():
    case = scenarios.classification(num_units=1, level=1)
    samples = run_nuts(case, 10, max_tree_depth=3)
    assert samples["z"].shape == (10, 3, 1, 1)
    assert samples["mu"].std(0).min() > 0


@pytest.mark.slow
def test_nuts_finds_the_exact_posterior():
    case = scenarios.gaussian_regression(num_outputs=1, num_units=1)
    z = run_nuts(case, 400)["z"].flatten(1)
    guide = case.exact().guide
    scale = guide.scale_tril[0].square().sum(-1).sqrt()[1:]
    # Neighbouring draws of NUTS are nearly independent here: a quarter of them is a safe count.
    error = scale / (len(z) / 4) ** 0.5
    assert ((z.mean(0) - guide.loc[0, 1:]).abs() < 4 * error).all()


def test_render_model_draws_every_site():
    pytest.importorskip("graphviz")
    case = scenarios.gaussian_regression(linear_term=True)
    graph = pyro.render_model(case.model, model_args=(case.x, case.y))
    assert all(site in graph.source for site in ("mu", "linear", "z", "y", "data"))


def test_plain_pyro_script_trains_through_the_global_store():
    case = scenarios.gaussian_regression()
    parameters = [*case.model.parameters(), *case.guide.parameters()]
    before = [p.detach().clone() for p in parameters]
    svi = SVI(case.model, case.guide, Adam({"lr": 0.01}), Trace_ELBO())
    svi.step(case.x, case.y, num_data=80)
    assert all((p != q).any() for p, q in zip(parameters, before, strict=True))
    assert len(pyro.get_param_store()) == len(parameters)


def test_building_a_model_leaves_the_settings_of_pyro():
    before = dict(pyro.settings.get())
    scenarios.gaussian_regression()
    assert dict(pyro.settings.get()) == before
    assert len(pyro.get_param_store()) == 0


def test_a_model_on_the_meta_device_takes_a_state():
    case = scenarios.gaussian_regression()
    with torch.device("meta"):
        extractor = nn.Sequential(nn.Linear(2, 4), nn.Tanh())
        model = DAK(extractor, 4, num_units=2, num_outputs=2, level=2)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu").load_state_dict(case.model.state_dict())
    assert_close(model.eval().unit_inputs(case.x), case.h)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_a_step_and_a_predictive_run_on_the_gpu(likelihood):
    case = scenarios.make(likelihood, num_outputs=3)
    case.model.cuda(), case.guide.cuda()
    x, y = case.x.cuda(), case.y.cuda()
    SVI(case.model, case.guide, Adam({"lr": 0.01}), Trace_ELBO()).step(x, y)
    assert Predictive(case.model, guide=case.guide, num_samples=2, parallel=True)(x)["y"].is_cuda


# Errors


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"feature_dim": 0}, ValueError, "`feature_dim` must be at least 1"),
        ({"num_units": 0}, ValueError, "`num_units` must be at least 1"),
        ({"num_outputs": -1}, ValueError, "`num_outputs` must be at least 1"),
        ({"level": 0}, ValueError, "`level`"),
        ({"scaling": "zscore"}, ValueError, "`scaling` must be one of 'minmax', 'none', 'stand"),
        ({"bounds": (1.0, 0.0)}, ValueError, "low < high"),
        (
            {"embedding": False, "num_units": 3},
            ValueError,
            r"`num_units` must equal `feature_dim`=4 without an embedding.*got 3",
        ),
    ],
)
def test_wrong_arguments_are_named(options, kind, message):
    with pytest.raises(kind, match=message):
        DAK(nn.Identity(), **{"feature_dim": 4, **options})


@pytest.mark.parametrize("shape", [(8, 5), (8, 4, 1), (8,)])
def test_an_extractor_of_another_width_is_named(shape):
    model = DAK(nn.Identity(), feature_dim=4, num_units=2, level=3)
    with pytest.raises(
        ValueError, match=r"`feature_extractor` must return shape \(N, feature_dim=4\)"
    ):
        model(torch.zeros(shape))


def test_targets_of_another_shape_are_named():
    case = scenarios.gaussian_regression()
    with pytest.raises(ValueError, match=r"`y` must have shape \(N, 2\).*got \(8,\)"):
        case.model(case.x, case.y[:, 0])


def test_float_labels_are_named():
    case = scenarios.classification()
    with pytest.raises(TypeError, match="class labels of an integer dtype"):
        case.model(case.x, case.y.double())


def test_a_vector_of_targets_is_one_output():
    case = scenarios.gaussian_regression(num_outputs=1)
    losses = [
        ClosedFormELBO().loss(case.model, case.guide, case.x, y) for y in (case.y, case.y[:, 0])
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("likelihood", "prior_scale", "expected"), [
    (GaussianLikelihood(), None, 1.0),
    (CategoricalLikelihood(), None, 3.0),
    (CategoricalLikelihood(), 0.5, 0.5),
])  # fmt: skip
def test_f_starts_with_the_prior_scale_of_its_likelihood(likelihood, prior_scale, expected):
    model = DAK(
        nn.Identity(), 4, 4, 2, likelihood=likelihood, embedding=False, prior_scale=prior_scale
    )
    at_node = model.layer.activation.grid.inducing_points[:1].expand(4).unsqueeze(0)
    phi = model.layer.design(at_node.to(model.unit_scale))[:, 1:]  # without the bias
    assert phi.square().sum().sqrt().item() == pytest.approx(expected)


def test_a_prior_scale_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="`prior_scale` must be positive"):
        DAK(nn.Identity(), 4, prior_scale=0.0)
