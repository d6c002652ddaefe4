"""AdditiveGP as a part of other people's programs, and hyper-parameters as sites."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal
from pyro.nn import PyroModule, PyroSample
from pyro.optim import Adam
from pyro.poutine.util import prune_subsample_sites
from torch import nn
from torch.testing import assert_close

from pyro_dak import (
    DAK,
    AdditiveGP,
    ClosedFormELBO,
    FullRankGuide,
    GammaScalePrior,
    GaussianLikelihood,
    HeteroscedasticLikelihood,
    LaplaceKernel,
    LogNormalPrior,
    MeanFieldGuide,
    NaturalGuide,
    NormalPrior,
    StudentTLikelihood,
    UnitBlockGuide,
    exact_posterior,
    fit,
    load,
    predict,
    save,
    to_arviz,
)
from tests.scenarios import LEARNED


def network():
    """A network from two inputs to four features."""
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh())


def make_gp(**options):
    """An AdditiveGP of two functions with settled scaling, in eval mode."""
    options = {"num_units": 3, "num_functions": 2, "level": 2} | options
    gp = AdditiveGP(network(), feature_dim=4, **options)
    gp.unit_inputs(torch.randn(50, 2))
    return gp.eval()


def make_dak(**options):
    """A DAK with settled scaling, in eval mode, and data."""
    options = {"num_units": 3, "level": 2} | options
    model = DAK(network(), feature_dim=4, **options)
    x = torch.randn(20, 2)
    model.unit_inputs(x)
    return model.eval(), x, torch.randn(20, options.get("num_outputs", 1))


def program(gp, x, y=None):
    """A user's model around a process: its noise has a prior."""
    f = gp(x)
    noise = pyro.sample("noise", dist.LogNormal(torch.tensor(0.0), 1.0))
    with pyro.plate("data", x.shape[-2]):
        return pyro.sample("y", dist.Normal(f, noise.unsqueeze(-1)).to_event(1), obs=y)


def values_of(trace):
    """Values of the latent sites of a trace."""
    pruned = prune_subsample_sites(trace)
    return {name: pruned.nodes[name]["value"] for name in pruned.stochastic_nodes}


# The process as a part


def test_f_is_the_sum_of_the_units():
    gp = make_gp(linear_term=True)
    x = torch.randn(5, 2)
    trace = poutine.trace(gp).get_trace(x)
    values = {name: trace.nodes[f"gp.{name}"]["value"] for name in ("z", "mu", "linear")}
    h = gp.unit_inputs(x)
    phi = gp.layer.activation(h)
    for n in range(5):
        for c in range(2):
            total = values["mu"][c]
            for p in range(3):
                r = 2 * h[n, p] - 1
                process = phi[n, p] @ values["z"][c, p] + r * values["linear"][c, p]
                total = total + gp.unit_scale[p] * process
            assert_close(trace.nodes["_RETURN"]["value"][n, c], total)


def test_two_processes_in_one_program_have_their_own_sites():
    first, second = make_gp(name="trend"), make_gp(name="season")
    x = torch.randn(5, 2)
    trace = poutine.trace(lambda: first(x) + second(x)).get_trace()
    assert {*trace.stochastic_nodes} == {"trend.mu", "trend.z", "season.mu", "season.z"}


def test_one_draw_serves_several_inputs_inside_and_outside_of_plates():
    gp = make_gp()
    x = torch.randn(7, 2)
    draw = gp.sample()
    with pyro.plate("rows", 4):
        inside = draw(x[:4])
    assert_close(torch.cat([inside, draw(x[4:])]), draw(x))


def test_sampling_weights_inside_a_plate_says_what_to_do():
    gp = make_gp(name="trend")
    with (
        pyro.plate("rows", 5),
        pytest.raises(ValueError, match=r"`draw = trend.sample\(\)` before"),
    ):
        gp(torch.randn(5, 2))


def test_leading_batch_dimensions_are_those_of_f():
    gp = make_gp(input_units=2, embedding=True)
    x = torch.randn(3, 4, 6, 2)
    draw = gp.sample()
    f = draw(x)
    assert f.shape == (3, 4, 6, 2)
    for i in range(3):
        for j in range(4):
            assert_close(f[i, j], draw(x[i, j]))


def test_features_of_a_dak_still_need_two_dimensions():
    model, _, _ = make_dak()
    with pytest.raises(ValueError, match="`feature_extractor` must return shape"):
        model(torch.randn(3, 6, 2))


def test_f_is_a_site_of_a_dak():
    model, x, y = make_dak(num_outputs=2)
    trace = poutine.trace(model).get_trace(x, y)
    sites = {name: trace.nodes[name]["value"] for name in ("z", "mu")}
    assert_close(trace.nodes["f"]["value"], model.functions(model.unit_inputs(x), sites))
    samples = Predictive(model, num_samples=3, parallel=True)(x)
    assert samples["f"].shape == (3, 20, 2)


@pytest.mark.parametrize("kind", ["model", "process", "guide", "predict"])
def test_nothing_reaches_the_store_outside_of_handlers(kind):
    model, x, y = make_dak()
    guide = MeanFieldGuide(model)
    calls = {
        "model": lambda: model(x, y),
        "process": lambda: make_gp()(x),
        "guide": guide,
        "predict": lambda: predict(model, guide, x),
    }
    calls[kind]()
    assert not list(pyro.get_param_store())


def test_svi_still_finds_the_parameters_in_the_store():
    gp = make_gp()
    guide = MeanFieldGuide(gp)
    x, y = torch.randn(20, 2), torch.randn(20, 2)
    guides = AutoGuideList(program)
    guides.append(guide)
    guides.append(AutoNormal(poutine.block(program, expose=["noise"])))
    before = guide.z_loc.detach().clone()
    SVI(program, guides, Adam({"lr": 0.1}), Trace_ELBO()).step(gp, x, y)
    assert not torch.equal(guide.z_loc.detach(), before)
    assert any("layer" in name for name in pyro.get_param_store())


# Guides of processes, and of models inside of handlers


@pytest.mark.parametrize("name", LEARNED)
def test_guides_have_the_sites_of_a_process(name):
    gp = make_gp(name="trend", linear_term=True)
    trace = poutine.trace(LEARNED[name](gp)).get_trace()
    shapes = {n: trace.nodes[n]["value"].shape for n in trace.stochastic_nodes}
    assert shapes == {f"trend.{n}": shape for n, shape in gp.site_shapes.items()}


@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("name", LEARNED)
def test_processes_train_inside_a_users_program(name, vectorize):
    gp = make_gp()
    guide = AutoGuideList(program)
    guide.append(LEARNED[name](gp))
    guide.append(AutoNormal(poutine.block(program, expose=["noise"])))
    elbo = Trace_ELBO(num_particles=4, vectorize_particles=vectorize, max_plate_nesting=1)
    x, y = torch.randn(30, 2), torch.randn(30, 2)
    losses = [SVI(program, guide, Adam({"lr": 0.02}), elbo).step(gp, x, y) for _ in range(30)]
    assert sum(losses[-5:]) < sum(losses[:5])
    samples = Predictive(program, guide=guide, num_samples=6, parallel=True)(gp, x)
    assert samples["y"].shape == (6, 30, 2)


def test_vectorised_particles_give_the_density_of_single_ones():
    gp = make_gp()
    x, y = torch.randn(6, 2), torch.randn(6, 2)
    with pyro.plate("particles", 3, dim=-2):
        trace = poutine.trace(program).get_trace(gp, x, y)
    trace.compute_log_prob()
    latent = values_of(trace)
    for s in range(3):
        one = {name: value[s, 0] for name, value in latent.items()}
        single = poutine.trace(pyro.condition(program, one)).get_trace(gp, x, y)
        single.compute_log_prob()
        assert_close(trace.nodes["y"]["log_prob"][s], single.nodes["y"]["log_prob"])


def test_natural_guides_need_a_likelihood(no_type_checker):
    with pytest.raises(TypeError, match="`model` must be a DAK"):
        NaturalGuide(make_gp())


@pytest.mark.parametrize("guide_fn", [MeanFieldGuide, UnitBlockGuide])
def test_hidden_and_given_sites_are_left_to_others(guide_fn):
    model, x, y = make_dak(linear_term=True)
    hidden = guide_fn(poutine.block(model, hide=["mu"]))
    given = guide_fn(pyro.condition(model, {"linear": torch.zeros(1, 3)}))
    assert {*hidden()} == {"linear", "z"}
    assert {*given()} == {"mu", "z"}
    assert not hidden.has_closed_form
    guide = AutoGuideList(model)
    guide.append(hidden)
    guide.append(AutoDelta(poutine.block(model, expose=["mu"])))
    model.train()
    assert SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO()).step(x, y) > 0


def test_a_model_that_hides_nothing_has_any_guide():
    model, _, _ = make_dak()
    guide = FullRankGuide(poutine.block(model, hide=["y"]))
    assert guide.has_closed_form
    assert {*guide()} == {"mu", "z"}


def test_joint_guides_refuse_models_that_hide_weights():
    model, _, _ = make_dak()
    with pytest.raises(NotImplementedError, match=r"`mu` is hidden or given.*MeanFieldGuide"):
        FullRankGuide(poutine.block(model, hide=["mu"]))


def test_guides_refuse_other_programs(no_type_checker):
    with pytest.raises(TypeError, match=r"`model` must be an AdditiveGP or a DAK.*poutine.block"):
        MeanFieldGuide(poutine.block(lambda x: x))


def test_closed_forms_refuse_guides_that_leave_sites_to_others():
    model, x, y = make_dak()
    guide = MeanFieldGuide(poutine.block(model, hide=["mu"]))
    with pytest.raises(NotImplementedError, match=r"does not have `mu`"):
        ClosedFormELBO().terms(model, guide, x, y)


@pytest.mark.parametrize("name", LEARNED)
def test_guides_have_dtype_and_device_of_the_model(name):
    model, _, _ = make_dak()
    for like in (torch.empty(0, dtype=torch.float32), torch.empty(0, device="meta")):
        model.to(like)
        guide = LEARNED[name](model)
        assert all(p.dtype == like.dtype for p in guide.parameters())
        assert all(p.device == like.device for p in guide.parameters())


# Hyper-parameters as sites


def test_scales_of_units_can_be_a_site():
    model, x, y = make_dak(prior={"unit_scale": dist.LogNormal(torch.tensor(0.0), 1.0)})
    trace = poutine.trace(model).get_trace(x, y)
    sites = values_of(trace)
    assert sites["unit_scale"].shape == (3,)
    phi = model.layer.activation(model.unit_inputs(x))
    f = torch.einsum("npm,p,cpm->nc", phi, sites["unit_scale"], sites["z"]) + sites["mu"]
    assert_close(trace.nodes["f"]["value"], f)
    assert not model.layer.log_unit_scale.requires_grad


def test_a_site_takes_the_place_of_the_parameter_in_a_program():
    """Of fixed parameters Pyro warns in train mode, so that there must be none."""
    gp = AdditiveGP(nn.Linear(2, 3), 3, 3, prior={"unit_scale": GammaScalePrior(2.0, 2.0)})
    assert "layer.log_unit_scale" in gp.state_dict()
    assert "layer.log_unit_scale" not in dict(gp.named_parameters())

    def program(x):
        f = gp(x)[..., 0]
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, 1.0), obs=x[:, 0])

    svi = SVI(program, AutoNormal(program), Adam({"lr": 0.01}), Trace_ELBO())
    assert svi.step(torch.randn(5, 2)) > 0


@pytest.mark.parametrize(
    "likelihood",
    [
        GaussianLikelihood(dist.LogNormal(torch.tensor(-1.0), 0.5)),
        GaussianLikelihood(dist.LogNormal(torch.zeros(2), 0.5)),
        GaussianLikelihood(GammaScalePrior(2.0, 2.0)),
        HeteroscedasticLikelihood(dist.LogNormal(torch.tensor(-1.0), 0.5)),
        StudentTLikelihood(
            dist.Gamma(torch.tensor(4.0), 1.0), dist.LogNormal(torch.tensor(-1.0), 0.5)
        ),
    ],
)
def test_parameters_of_likelihoods_are_sampled_once_for_all_rows(likelihood):
    model, x, y = make_dak(num_outputs=2, likelihood=likelihood)
    with pyro.plate("particles", 3, dim=-2):
        trace = poutine.trace(model).get_trace(x, y)
    trace.compute_log_prob()
    latent = values_of(trace)
    assert "noise_scale" in latent
    for s in range(3):
        one = {name: value[s, 0] for name, value in latent.items()}
        f = model.functions(model.unit_inputs(x), one)
        noise = one["noise_scale"]
        if isinstance(likelihood, HeteroscedasticLikelihood):
            f, eta = f.chunk(2, -1)
            noise = noise * (0.5 * eta).exp()
        y_given_f = dist.Normal(f, noise)
        if isinstance(likelihood, StudentTLikelihood):
            y_given_f = dist.StudentT(one["df"], f, noise)
        assert_close(trace.nodes["y"]["log_prob"][s], y_given_f.log_prob(y).sum(-1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_dak(prior={"unit_scale": NormalPrior()}), r"`prior\['unit_scale'\]` must be"),
        (lambda: GaussianLikelihood(dist.Normal(0.0, 1.0)), "`noise_scale` must be a prior of pos"),
        (lambda: StudentTLikelihood(dist.Normal(0.0, 1.0)), "`df` must be a prior of positive"),
    ],
)
def test_priors_of_scales_must_be_positive(make, message):
    with pytest.raises(ValueError, match=message):
        make()


HYPER = {
    "lengthscale": {"kernel": LaplaceKernel(dist.LogNormal(torch.tensor(0.0), 0.5))},
    "unit_scale": {"prior": {"unit_scale": GammaScalePrior(2.0, 2.0)}},
    "noise_scale": {"likelihood": GaussianLikelihood(dist.LogNormal(torch.tensor(-1.0), 0.5))},
}


@pytest.mark.parametrize(
    "call",
    [
        lambda model, guide, x, y: ClosedFormELBO().terms(model, guide, x, y),
        lambda model, guide, x, y: fit(model, guide, (x, y), epochs=1, progress=False),
        lambda model, guide, x, y: predict(model, guide, x),
        lambda model, guide, x, y: exact_posterior(model, x, y),
        lambda model, guide, x, y: to_arviz(model, guide, x, y),
    ],
    ids=["elbo", "fit", "predict", "exact", "arviz"],
)
@pytest.mark.parametrize("site", HYPER)
def test_closed_forms_refuse_sites_of_hyper_parameters(site, call):
    model, x, y = make_dak(**HYPER[site])
    with pytest.raises(NotImplementedError, match=f"`{site}`"):
        call(model, MeanFieldGuide(model), x, y)


@pytest.mark.parametrize("site", HYPER)
def test_hyper_parameters_are_learned_by_composition(site):
    model, x, y = make_dak(**HYPER[site])
    guide = AutoGuideList(model)
    guide.append(MeanFieldGuide(model))
    guide.append(AutoNormal(poutine.block(model, expose=[site])))
    history = fit(model, guide, (x, y), epochs=3, seed=0, progress=False)
    assert history.status == "finished"


def scale_of_all_weights(shape):
    """Weights with a common scale that has a prior itself."""
    tau = pyro.sample("tau", dist.LogNormal(torch.tensor(0.0), 1.0))
    return dist.Normal(0.0, tau[..., None, None, None])


@pytest.mark.parametrize("vectorize", [False, True])
def test_priors_that_sample_join_the_program(vectorize):
    model, x, y = make_dak(prior={"z": scale_of_all_weights})
    guide = AutoNormal(model)
    elbo = Trace_ELBO(num_particles=3, vectorize_particles=vectorize, max_plate_nesting=1)
    assert SVI(model, guide, Adam({"lr": 0.01}), elbo).step(x, y) > 0
    samples = Predictive(model, guide=guide, num_samples=4, parallel=True)(x)
    assert samples["y"].shape == (4, 20, 1)


def test_priors_that_sample_have_the_density_of_their_draws():
    model, x, y = make_dak(prior={"z": scale_of_all_weights})
    with pyro.plate("particles", 3, dim=-2):
        trace = poutine.trace(model).get_trace(x, y)
    trace.compute_log_prob()
    z, tau = trace.nodes["z"]["value"][:, 0], trace.nodes["tau"]["value"][:, 0]
    expected = dist.Normal(0.0, tau[:, None, None, None]).log_prob(z).sum((-3, -2, -1))
    assert_close(trace.nodes["z"]["log_prob"][:, 0], expected)


def test_a_prior_that_cannot_be_vectorised_says_how_to_write_it():
    def expanded(shape):
        tau = pyro.sample("tau", dist.LogNormal(torch.tensor(0.0), 1.0))
        return dist.Normal(0.0, tau).expand(shape).to_event(3)

    model, x, y = make_dak(prior={"z": expanded})
    assert model(x, y).shape == (20, 1)
    with (
        pyro.plate("particles", 4, dim=-2),
        pytest.raises((TypeError, ValueError), match=r"tau\[\.\.\., None, None, None\]"),
    ):
        model(x, y)


def test_a_network_with_priors_is_a_deeper_bayesian_network():
    layer = PyroModule[nn.Linear](2, 4)
    layer.weight = PyroSample(dist.Normal(0.0, torch.ones(4, 2)).to_event(2))
    model = DAK(layer, feature_dim=4, num_units=3, level=2, scaling="none")
    x, y = torch.randn(20, 2), torch.randn(20, 1)
    guide = AutoNormal(model)
    svi = SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO(num_particles=2))
    assert svi.step(x, y) > 0
    assert "feature_extractor.weight" in guide.median()
    with pytest.raises(NotImplementedError, match=r"`feature_extractor.weight`"):
        predict(model, MeanFieldGuide(model), x)


@pytest.mark.parametrize(
    "options",
    [
        lambda: {"prior": {"unit_scale": LogNormalPrior(-1.0, 0.5)}},
        lambda: {"likelihood": GaussianLikelihood(LogNormalPrior(-1.0, 0.5))},
        lambda: {"likelihood": StudentTLikelihood(GammaScalePrior(4.0, 1.0), LogNormalPrior())},
    ],
)
def test_hyper_parameters_with_priors_are_saved(options, tmp_path):
    model, x, y = make_dak(**options())
    guide = AutoNormal(model)
    guide(x, y)
    save(model, guide, tmp_path / "model")
    loaded, _ = load(tmp_path / "model")
    log_probs = []
    for program in (model, loaded):
        pyro.set_rng_seed(1)
        log_probs.append(poutine.trace(program).get_trace(x, y).log_prob_sum())
    assert_close(*log_probs)


def test_priors_without_a_name_are_not_saved(tmp_path):
    model, _, _ = make_dak(likelihood=GaussianLikelihood(dist.LogNormal(torch.tensor(0.0), 1.0)))
    with pytest.raises(ValueError, match=r"prior of noise_scale \(LogNormal\).*LogNormalPrior"):
        save(model, MeanFieldGuide(model), tmp_path / "model")


def test_draws_are_not_taken_for_leading_dimensions():
    gp = make_gp()
    x = torch.randn(3, 6, 2)
    with pyro.plate("particles", 3, dim=-2), pytest.raises(ValueError, match="told from draws"):
        gp(x)
    with pyro.plate("particles", 5, dim=-3):
        draw = gp.sample()
    f = draw(x)
    assert f.shape == (5, 3, 6, 2)
    for s in range(5):
        one = {name: value[s, 0, 0] for name, value in draw.sites.items()}
        assert_close(f[s], gp.functions(gp.unit_inputs(x), one))


@pytest.mark.parametrize("num_particles", [3, 4])
def test_a_sampled_scale_is_never_taken_for_one_of_each_unit(num_particles):
    def scalar(shape):
        return dist.Normal(0.0, pyro.sample("tau", dist.LogNormal(torch.tensor(0.0), 1.0)))

    model, x, y = make_dak(prior={"z": scalar}, num_units=4)
    assert model(x, y).shape == (20, 1)
    plate = pyro.plate("particles", num_particles, dim=-2)
    with plate, pytest.raises(ValueError, match=r"tau\[\.\.\., None"):
        model(x, y)


def test_residual_variance_is_refused_for_draws_of_scales():
    model, x, _ = make_dak()
    sites = {n: torch.randn(5, *shape) for n, shape in model.site_shapes.items()}
    draws = sites | {"unit_scale": torch.rand(5, 3)}
    assert predict(model, draws, x).mean.shape == (20, 1)
    with pytest.raises(NotImplementedError, match="draws of `unit_scale`"):
        predict(model, draws, x, residual_variance=True)


def test_sites_inside_the_prior_of_the_noise_are_no_arguments_of_the_likelihood():
    def noise(shape):
        level = pyro.sample("level", dist.Normal(torch.tensor(-2.0), 0.1))
        return dist.LogNormal(level, 0.1)

    model, x, _ = make_dak(likelihood=GaussianLikelihood(noise))
    draws = {n: torch.randn(5, *shape) for n, shape in model.site_shapes.items()}
    draws |= {"noise_scale": torch.rand(5) + 0.1, "level": torch.randn(5)}
    p = predict(model, draws, x)
    assert_close(p.aleatoric, draws["noise_scale"].square().mean().expand_as(p.mean))
