import math
from dataclasses import dataclass

import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from pyro_dak import (
    DAK,
    GammaScalePrior,
    HorseshoePrior,
    LaplacePrior,
    NormalPrior,
    StudentTPrior,
)
from pyro_dak.model.priors import Prior, resolve_priors, site_prior
from tests import scenarios

SHAPES = {"mu": torch.Size((2,)), "z": torch.Size((2, 3, 4))}
LIKE = torch.zeros((), dtype=torch.float64)


@pytest.mark.parametrize(
    ("prior", "std"),
    [
        (NormalPrior(0.5, 2.0), 2.0),
        (LaplacePrior(0.7), 0.7),
        (StudentTPrior(4.0, 0.5), 0.5 * math.sqrt(2)),
        (GammaScalePrior(4.0, 2.0), 1.0),
    ],
)
def test_a_prior_has_the_shape_of_its_site_and_the_stated_spread(prior, std):
    made = site_prior("z", prior, SHAPES["z"], LIKE)
    assert made.event_shape == SHAPES["z"]
    assert made.batch_shape == ()
    assert_close(made.stddev, torch.full(SHAPES["z"], std))


@pytest.mark.parametrize(
    "value",
    [
        dist.Laplace(0.0, 2.0),
        dist.Laplace(0.0, 2.0 * torch.ones(2, 3, 4)),
        dist.Laplace(0.0, 2.0 * torch.ones(2, 3, 4)).to_event(1),
        dist.Laplace(0.0, 2.0 * torch.ones(2, 3, 4)).to_event(3),
        torch.distributions.Laplace(0.0, 2.0),
        lambda shape: dist.Laplace(0.0, 2.0).expand(shape).to_event(3),
        lambda shape: dist.Laplace(0.0, 2.0),
    ],
    ids=["scalar", "batch", "mixed", "event", "torch", "function", "function to scalar"],
)
def test_a_distribution_of_the_right_shape_becomes_one_event(value):
    made = site_prior("z", value, SHAPES["z"], LIKE)
    z = torch.randn(SHAPES["z"])
    expected = torch.distributions.Laplace(0.0, 2.0).log_prob(z).sum()
    assert_close(made.log_prob(z), expected)
    assert made().shape == SHAPES["z"]


def test_a_multivariate_distribution_of_torch_can_be_sampled_by_pyro():
    value = torch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2))
    assert site_prior("mu", value, SHAPES["mu"], LIKE)().shape == (2,)


def test_sites_without_a_prior_are_standard_normal():
    resolved = resolve_priors({"mu": LaplacePrior()}, SHAPES)
    assert resolved == {"mu": LaplacePrior(), "z": NormalPrior(0.0, 1.0)}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (NormalPrior(0.5, 2.0), (0.5, 2.0)),
        (dist.Normal(0.5, 2.0), (0.5, 2.0)),
        (dist.Normal(0.5, 2.0).expand([2]).to_event(1), (0.5, 2.0)),
        (lambda shape: dist.Normal(0.5, 2.0), (0.5, 2.0)),
        (LaplacePrior(), None),
        (dist.StudentT(3.0), None),
    ],
)
def test_normal_priors_are_recognised(value, expected):
    found = scenarios.gaussian_regression(prior={"mu": value}).model.normal_prior("mu")
    if expected is None:
        assert found is None
    else:
        assert [float(torch.as_tensor(p).flatten()[0]) for p in found] == list(expected)


def test_horseshoe_is_a_half_cauchy_of_a_half_cauchy():
    case = scenarios.gaussian_regression(prior={"shrinkage": HorseshoePrior(0.5)}, num_units=3)
    trace = scenarios.prior_trace(case.model, case.x)
    overall = trace.nodes["global_shrinkage"]
    shrinkage = trace.nodes["shrinkage"]
    assert_close(overall["fn"].scale, torch.tensor(0.5))
    assert_close(shrinkage["fn"].base_dist.scale, overall["value"].expand(3))
    assert shrinkage["value"].shape == (3,)


@pytest.mark.parametrize("value", [dist.HalfNormal(2.0), lambda shape: dist.HalfNormal(2.0)])
def test_any_positive_distribution_can_be_the_prior_of_unit_scales(value):
    case = scenarios.gaussian_regression(prior={"shrinkage": value})
    trace = scenarios.prior_trace(case.model, case.x)
    scale = trace.nodes["shrinkage"]["fn"].base_dist.scale
    assert_close(scale, torch.full((2,), 2.0), check_dtype=False)
    assert "global_shrinkage" not in trace.nodes


def test_shrinkage_enters_f():
    case = scenarios.gaussian_regression(prior={"shrinkage": GammaScalePrior()})
    sites = case.guide()
    sites["shrinkage"] = torch.zeros(2)
    assert_close(case.model.functions(case.h, sites), sites["mu"].expand(8, 2))


# Errors


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (
            {"w": NormalPrior()},
            r"`prior` must be one of 'mu', 'shrinkage', 'unit_scale', 'z'; got 'w'",
        ),
        (
            {"z": dist.Normal(0.0, torch.ones(3))},
            r"`prior\['z'\]` must have event shape \(2, 3, 4\)",
        ),
        ({"mu": dist.Normal(0.0, torch.ones(3))}, r"event shape \(2,\).*got batch \(3,\)"),
        ({"z": lambda shape: dist.Normal(0.0, torch.ones(3))}, "or pass a function of the shape"),
        ({"z": HorseshoePrior()}, "HorseshoePrior is not a prior for the site `z`"),
        ({"mu": GammaScalePrior()}, "GammaScalePrior is not a prior for the site `mu`"),
    ],
)
def test_wrong_priors_are_named(prior, message):
    with pytest.raises(ValueError, match=message):
        resolve_priors(prior, SHAPES)


def test_a_prior_of_weights_is_refused_for_the_scales_of_units():
    with pytest.raises(ValueError, match="NormalPrior is not a prior for the site `shrinkage`"):
        scenarios.gaussian_regression(prior={"shrinkage": NormalPrior()})


def test_a_linear_prior_without_a_linear_term_is_refused():
    with pytest.raises(ValueError, match="got 'linear'"):
        scenarios.gaussian_regression(prior={"linear": NormalPrior()})


@pytest.mark.usefixtures("no_type_checker")
def test_a_value_that_is_no_prior_is_refused():
    with pytest.raises(
        TypeError, match=r"`prior\['z'\]` must be a Prior, a distribution or a func"
    ):
        resolve_priors({"z": 3.0}, SHAPES)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf])
@pytest.mark.parametrize("kind", [NormalPrior, LaplacePrior, StudentTPrior])
def test_scales_must_be_positive(kind, scale):
    with pytest.raises(ValueError, match="`scale` must be positive"):
        kind(scale=scale)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (StudentTPrior, "df"),
        (HorseshoePrior, "global_scale"),
        (GammaScalePrior, "concentration"),
        (GammaScalePrior, "rate"),
    ],
)
def test_parameters_must_be_positive(kind, name):
    with pytest.raises(ValueError, match=f"`{name}` must be positive"):
        kind(**{name: -1.0})


@dataclass(frozen=True)
class ShiftedPrior(Prior):
    """A prior of one's own, with a number that may be negative and a word."""

    low: float = -1.0
    name: str = "shifted"

    def element(self, like):
        return dist.Normal(like.new_tensor(self.low), like.new_tensor(1.0))


def test_numbers_of_a_prior_of_ones_own_are_its_own_business():
    model = DAK(
        torch.nn.Identity(), 2, num_units=2, embedding=False, prior={"mu": ShiftedPrior(-3.0)}
    )
    assert_close(model.prior_distribution("mu", torch.zeros(())).mean, torch.tensor([-3.0]))


def test_a_scale_for_each_element_is_a_distribution(no_type_checker):
    with pytest.raises(TypeError, match=r"one number for all.*pyro.distributions.Normal"):
        NormalPrior(scale=torch.ones(3))
    scales = torch.rand(1, 3, 3) + 0.5
    model = DAK(nn.Linear(2, 3), 3, num_units=3, level=2, prior={"z": dist.Normal(0.0, scales)})
    assert_close(model.normal_prior("z")[1], scales)
