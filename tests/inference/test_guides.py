import math

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive
from torch.testing import assert_close

from pyro_dak import (
    DAK,
    FullRankGuide,
    GammaScalePrior,
    HorseshoePrior,
    LowRankGuide,
    MeanFieldGuide,
    UnitBlockGuide,
)
from pyro_dak.inference.objectives import kl
from tests import scenarios
from tests.scenarios import GUIDES, LEARNED, agrees

guides = pytest.mark.parametrize("guide", GUIDES)
learned_guides = pytest.mark.parametrize("guide", LEARNED)
linear_terms = pytest.mark.parametrize("linear_term", [False, True])


def moments_by_design(case):
    """Mean `(N, F)`, covariance `(N, F, F)` of f from the joint q: f is linear in the weights."""
    shapes = {n: s for n, s in case.guide.site_shapes.items() if n in case.guide.weight_sites}
    q = scenarios.joint(case.guide)

    def f(flat):
        return case.model.functions(case.h, scenarios.unflat(case.guide, flat, shapes))

    columns = f(torch.eye(len(q.loc)))  # (K, N, F)
    return f(q.loc), torch.einsum("kna,kl,lnb->nab", columns, q.covariance_matrix, columns)


@guides
@linear_terms
def test_moments_of_f_equal_those_of_draws(guide, linear_term):
    case = scenarios.gaussian_regression(guide=guide, linear_term=linear_term)
    with torch.no_grad():
        f = case.model.functions(case.h, scenarios.weight_draws(case.guide, 20_000))
        mean, var, _ = case.guide.moments(case.model.layer, case.h)
    assert agrees(f, mean)
    assert agrees((f - mean).square(), var)


def test_low_rank_functions_covary_as_in_draws():
    case = scenarios.heteroscedastic(guide="low_rank", num_outputs=1)
    with torch.no_grad():
        f = case.model.functions(case.h, scenarios.weight_draws(case.guide, 20_000))
        moments = case.guide.moments(case.model.layer, case.h)
        covariance = moments.root.prod(-1, keepdim=True).sum(0)
    assert covariance.abs().min() > 1e-3
    products = (f[..., :1] - moments.mean[:, :1]) * (f[..., 1:] - moments.mean[:, 1:])
    assert agrees(products, covariance)


@guides
@linear_terms
def test_density_of_the_sites_is_that_of_the_joint_normal(guide, linear_term):
    case = scenarios.gaussian_regression(guide=guide, linear_term=linear_term)
    trace = poutine.trace(case.guide).get_trace(case.x)
    values = {name: trace.nodes[name]["value"] for name in case.guide.weight_sites}
    expected = scenarios.joint(case.guide).log_prob(scenarios.flat(case.guide, values))
    assert_close(trace.log_prob_sum(), expected)


@guides
@linear_terms
def test_draws_have_the_joint_mean_and_covariance(guide, linear_term):
    case = scenarios.gaussian_regression(guide=guide, num_outputs=1, linear_term=linear_term)
    q = scenarios.joint(case.guide)
    with torch.no_grad():
        values = scenarios.weight_draws(case.guide, 20_000)
        flat = scenarios.flat(case.guide, values).squeeze(1)
    assert agrees(flat, q.loc)
    centred = flat - q.loc
    assert agrees(centred.unsqueeze(-1) * centred.unsqueeze(-2), q.covariance_matrix)


@guides
@linear_terms
def test_sites_have_the_shapes_of_the_model(guide, linear_term):
    prior = {"shrinkage": HorseshoePrior()} if guide in LEARNED else None
    case = scenarios.gaussian_regression(guide=guide, linear_term=linear_term, prior=prior)
    values = case.guide(case.x, case.y)
    assert {name: value.shape for name, value in values.items()} == case.model.site_shapes
    if prior is not None:
        assert (values["shrinkage"] > 0).all()
        assert values["global_shrinkage"] > 0


@learned_guides
def test_scales_of_units_are_log_normal(guide):
    case = scenarios.gaussian_regression(guide=guide, prior={"shrinkage": GammaScalePrior()})
    with torch.no_grad():
        draws = scenarios.weight_draws(case.guide, 5000)["shrinkage"].squeeze(1).log()
    assert agrees(draws, case.guide.shrinkage_loc)
    spread = case.guide.shrinkage_log_scale.exp().square()
    assert agrees((draws - case.guide.shrinkage_loc).square(), spread)


@guides
def test_means_of_the_weights_give_the_mean_of_f(guide):
    case = scenarios.gaussian_regression(guide=guide, linear_term=True)
    mean = case.guide.moments(case.model.layer, case.h).mean
    assert_close(case.model.layer(case.h, case.guide.weight_means()), mean)


def test_full_rank_with_a_diagonal_factor_is_mean_field():
    case = scenarios.gaussian_regression(linear_term=True)
    mean_field, full = case.guide, FullRankGuide(case.model)
    scales = {n: getattr(mean_field, f"{n}_log_scale").exp() for n in mean_field.weight_sites}
    locs = {n: getattr(mean_field, f"{n}_loc") for n in mean_field.weight_sites}
    loc, scale = (scenarios.flat(full, part).reshape(2, -1) for part in (locs, scales))
    full.set_parameters(loc, torch.diag_embed(scale))
    assert_close(
        full.moments(case.model.layer, case.h), mean_field.moments(case.model.layer, case.h)
    )
    assert_close(kl(case.model, full), kl(case.model, mean_field))


def test_unit_block_with_diagonal_factors_is_mean_field():
    case = scenarios.gaussian_regression(linear_term=True)
    block = UnitBlockGuide(case.model)
    with torch.no_grad():
        for name in ("mu_loc", "mu_log_scale", "linear_loc", "linear_log_scale", "z_loc"):
            getattr(block, name).copy_(getattr(case.guide, name))
        block.z_raw_tril.copy_(torch.diag_embed(case.guide.z_log_scale))
    ours = case.guide.moments(case.model.layer, case.h)
    assert_close(block.moments(case.model.layer, case.h), ours)
    assert_close(kl(case.model, block), kl(case.model, case.guide))


def test_low_rank_without_a_factor_is_mean_field():
    case = scenarios.gaussian_regression(guide="low_rank")
    with torch.no_grad():
        case.guide.factor.zero_()
    plain = MeanFieldGuide(case.model)
    parts = case.guide.loc.split([2, 12]), case.guide.log_scale.split([2, 12])
    with torch.no_grad():
        for suffix, (mu, z) in zip(("loc", "log_scale"), parts, strict=True):
            getattr(plain, f"mu_{suffix}").copy_(mu)
            getattr(plain, f"z_{suffix}").copy_(z.reshape(2, 2, 3))
    mean, var, _ = case.guide.moments(case.model.layer, case.h)
    assert_close((mean, var), plain.moments(case.model.layer, case.h)[:2])
    assert_close(kl(case.model, case.guide), kl(case.model, plain))


def test_set_parameters_is_what_is_read_back():
    guide = FullRankGuide(scenarios.gaussian_regression().model)
    loc, tril = torch.randn(2, 7), torch.randn(2, 7, 7).tril(-1) + torch.eye(7) * torch.rand(7)
    guide.set_parameters(loc, tril)
    assert_close(guide.loc.detach(), loc)
    assert_close(guide.scale_tril.detach(), tril)


# Construction


@learned_guides
def test_initial_values_are_those_asked_for(guide):
    model = scenarios.gaussian_regression().model
    made = GUIDES[guide](model, init_scale=0.3, init_loc_scale=0.0)
    if guide == "low_rank":
        assert made.factor.abs().max() < 0.3
        with torch.no_grad():
            made.factor.zero_()
    q = scenarios.joint(made)
    assert_close(q.loc, torch.zeros(14))
    assert_close(q.covariance_matrix, 0.09 * torch.eye(14))


@learned_guides
def test_initial_means_have_the_spread_asked_for(guide):
    model = scenarios.gaussian_regression(num_units=8, level=5).model
    loc = scenarios.joint(GUIDES[guide](model, init_loc_scale=0.5)).loc
    assert loc.std().item() == pytest.approx(0.5, rel=4 / math.sqrt(2 * len(loc)))


@guides
@linear_terms
def test_a_saved_guide_loads_cold(guide, linear_term, tmp_path):
    prior = {"shrinkage": HorseshoePrior()} if guide in LEARNED else None
    case = scenarios.gaussian_regression(guide=guide, linear_term=linear_term, prior=prior)
    torch.save(case.guide.state_dict(), tmp_path / "guide.pt")
    fresh = GUIDES[guide](case.model)
    fresh.load_state_dict(torch.load(tmp_path / "guide.pt"))
    assert_close(scenarios.joint(fresh).loc, scenarios.joint(case.guide).loc)
    assert_close(fresh.state_dict(), case.guide.state_dict(), rtol=0, atol=0)


@guides
def test_a_guide_on_the_meta_device_has_shapes_and_takes_a_state(guide):
    case = scenarios.gaussian_regression(guide=guide)
    with torch.device("meta"):
        model = DAK(torch.nn.Linear(2, 4), 4, num_units=2, num_outputs=2, level=2)
        made = GUIDES[guide](model)
        mean, var, _ = made.moments(model.layer, model.unit_inputs(torch.empty(8, 2)))
    assert mean.shape == var.shape == (8, 2)
    assert mean.is_meta
    made.to_empty(device="cpu").load_state_dict(case.guide.state_dict())
    expected = case.guide.moments(case.model.layer, case.h)
    assert_close(made.moments(case.model.layer, case.h), expected)


@guides
def test_gradients_by_inputs_and_parameters_equal_finite_differences(guide):
    case = scenarios.gaussian_regression(guide=guide, num_rows=3, num_outputs=1)
    h = case.h.detach().requires_grad_()
    names = [name for name, _ in case.guide.named_parameters()]

    def moments(h, *values):
        parameters = dict(zip(names, values, strict=True))
        call = torch.func.functional_call(
            _Moments(case), {f"guide.{name}": value for name, value in parameters.items()}, (h,)
        )
        return call[:2]

    values = [p.detach().requires_grad_() for p in case.guide.parameters()]
    assert torch.autograd.gradcheck(moments, (h, *values))


class _Moments(torch.nn.Module):
    def __init__(self, case):
        super().__init__()
        self.guide, self.layer = case.guide, case.model.layer

    def forward(self, h):
        return self.guide.moments(self.layer, h)


@guides
def test_predictive_has_the_mean_and_variance_of_the_moments(guide):
    case = scenarios.gaussian_regression(guide=guide)
    predictive = Predictive(case.model, guide=case.guide, num_samples=5000, parallel=True)
    with torch.no_grad():
        draws = predictive(case.x)["y"]
        mean, var, _ = case.guide.moments(case.model.layer, case.h)
        var = var + case.model.likelihood.noise_scale.square()
    assert draws.shape == (5000, 8, 2)
    assert agrees(draws, mean)
    assert agrees((draws - mean).square(), var)


@guides
def test_sequential_predictive_has_the_shape_of_the_parallel_one(guide):
    case = scenarios.gaussian_regression(guide=guide)
    shapes = [
        Predictive(case.model, guide=case.guide, num_samples=3, parallel=parallel)(case.x)[
            "y"
        ].shape
        for parallel in (True, False)
    ]
    assert shapes[0] == shapes[1] == (3, 8, 2)


@guides
def test_single_precision_of_the_model_is_followed(guide):
    case = scenarios.gaussian_regression(guide=guide)
    case.model.float(), case.guide.float()
    case.x = case.x.float()
    moments = case.guide.moments(case.model.layer, case.h)
    assert moments.mean.dtype == moments.var.dtype == torch.float32
    assert all(value.dtype == torch.float32 for value in case.guide().values())


# Errors


@learned_guides
@pytest.mark.parametrize("init_scale", [0.0, -1.0, math.nan])
def test_initial_scale_must_be_positive(guide, init_scale):
    model = scenarios.gaussian_regression().model
    with pytest.raises(ValueError, match="`init_scale` must be positive"):
        GUIDES[guide](model, init_scale=init_scale)


@pytest.mark.parametrize("rank", [0, -2])
def test_rank_must_be_positive(rank):
    with pytest.raises(ValueError, match="`rank` must be at least 1"):
        LowRankGuide(scenarios.gaussian_regression().model, rank=rank)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@guides
def test_moments_on_the_gpu_equal_those_on_the_cpu(guide):
    case = scenarios.gaussian_regression(guide=guide)
    expected = case.guide.moments(case.model.layer, case.h)
    case.model.cuda(), case.guide.cuda()
    case.x = case.x.cuda()
    found = case.guide.moments(case.model.layer, case.h)
    assert_close(found.mean.cpu(), expected.mean)
    assert_close(found.var.cpu(), expected.var)
    assert all(value.is_cuda for value in case.guide().values())


def test_no_guide_touches_the_global_store_when_parameters_are_local():
    case = scenarios.gaussian_regression()
    with pyro.settings.context(module_local_params=True):
        case.guide(case.x)
    assert len(pyro.get_param_store()) == 0
