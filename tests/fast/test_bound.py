"""The bound with Gaussian noise as one operation, held to its terms one by one."""

import copy
import math

import pytest
import torch
from torch.testing import assert_close

from pyro_dak import (
    DAK,
    ClosedFormELBO,
    FullRankGuide,
    GaussianLikelihood,
    LaplaceKernel,
    MeanFieldGuide,
    RBFKernel,
)
from pyro_dak.additive import bridge
from pyro_dak.fast import bound, fused
from pyro_dak.model.missing import with_missing

NUM_DATA = 400


@pytest.fixture
def num_bounds(monkeypatch):
    """How often the operation ran, as a list that grows."""
    calls, apply = [], bound.GaussianBound.apply

    def counted(*args):
        calls.append(args)
        return apply(*args)

    monkeypatch.setattr(bound.GaussianBound, "apply", counted)
    return calls


def case(num_outputs=1, level=3, **options):
    options = {"route": "auto" if "kernel" in options else "local"} | options
    network = torch.nn.Linear(4, 6)
    model = DAK(network, 6, num_units=5, num_outputs=num_outputs, level=level, **options)
    # Inputs inside the grid, outside on either side, and at nodes and bounds.
    h = torch.cat(
        [3 * torch.rand(40, 5) - 1, torch.tensor([0.0, 0.5, 1.0, 9.0, -9.0]).expand(2, 5)]
    )
    return model, MeanFieldGuide(model), h.requires_grad_(), torch.randn(42, num_outputs)


def gradients(terms, model, guide, h):
    parameters = [h, *model.layer.parameters(), *model.likelihood.parameters(), *guide.parameters()]
    total = 1.7 * terms.expected_log_lik - 0.3 * terms.kl
    return torch.autograd.grad(total, parameters)


def assert_bounds_agree(model, guide, h, y):
    elbo = ClosedFormELBO()
    found = elbo.terms_from_units(model, guide, h, y, NUM_DATA)
    expected, _ = elbo.terms_and_moments(model, guide, h, y, NUM_DATA)
    assert_close(tuple(found), tuple(expected))
    assert_close(gradients(found, model, guide, h), gradients(expected, model, guide, h))


@pytest.mark.parametrize("num_outputs", [1, 3])
@pytest.mark.parametrize("level", [1, 3, 8])
def test_bound_is_the_sum_of_its_plain_terms(num_outputs, level, num_bounds):
    model, guide, h, y = case(num_outputs, level)
    assert_bounds_agree(model, guide, h, y)
    assert len(num_bounds) == 1


@pytest.mark.parametrize("lengthscale", [0.05, 0.3, 100.0])
def test_bound_is_the_sum_of_its_plain_terms_on_coarse_and_fine_grids(lengthscale, num_bounds):
    model, guide, h, y = case(2, level=1, kernel=LaplaceKernel(lengthscale), route="local")
    assert_bounds_agree(model, guide, h, y)
    assert len(num_bounds) == 1


@pytest.mark.parametrize("level", [1, 2, 5, 10])
def test_table_holds_both_coefficients_and_their_moments_in_every_interval(level):
    M, delta = 2**level - 1, 0.3
    L = bridge.node_factor(level, delta)
    loc, var = torch.randn(M), torch.rand(M)
    table = bound.middle_matrix(L, delta).to_dense() @ torch.cat([loc, var])
    # Values at both nodes, from A and B: those of `interval_matrix`, for any weights.
    decay = math.exp(-delta)
    left, right = (fused.interval_matrix(L, decay).to_dense()[: 2 * (M + 1), :M]).chunk(2)
    c, s = math.cosh(delta / 2), math.sinh(delta / 2)
    A, B = torch.linalg.solve(
        torch.tensor([[c, -s], [c, s]]), torch.stack([left, right]).flatten(1)
    )
    A, B = A.view(M + 1, M), B.view(M + 1, M)
    rows = [A @ loc, B @ loc, (A.square() + B.square()) @ var, 2 * (A * B) @ var, A.square() @ var]
    assert_close(table.view(5, M + 1), torch.stack(rows))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_bound_is_that_of_the_dense_route(shape, num_bounds):
    noise = torch.full(shape, 0.3)
    model, guide, h, y = case(2, likelihood=GaussianLikelihood(noise))
    found = ClosedFormELBO().terms_from_units(model, guide, h, y, NUM_DATA)
    model.layer.activation.route = "dense"
    expected = ClosedFormELBO().terms_from_units(model, guide, h, y, NUM_DATA)
    assert_close(tuple(found), tuple(expected))
    assert_close(gradients(found, model, guide, h), gradients(expected, model, guide, h))
    assert len(num_bounds) == 1


def test_bound_in_single_precision_is_near_that_in_double():
    model, guide, h, y = case(level=10)
    expected = ClosedFormELBO().terms_from_units(model, guide, h, y, NUM_DATA)
    model, guide = copy.deepcopy(model).float(), copy.deepcopy(guide).float()
    found = ClosedFormELBO().terms_from_units(model, guide, h.float(), y.float(), NUM_DATA)
    assert_close(found.elbo.double(), expected.elbo, rtol=1e-5, atol=0)


def test_bound_of_a_fixed_noise_has_no_gradient_of_it():
    model, guide, h, y = case(likelihood=GaussianLikelihood(0.2, learn=False))
    assert_bounds_agree(model, guide, h, y)


def test_nan_shows_in_the_bound_and_its_gradient():
    model, guide, h, y = case()
    with torch.no_grad():
        h[3, 2] = math.nan
    terms = ClosedFormELBO().terms_from_units(model, guide, h, y)
    assert terms.elbo.isnan()
    assert gradients(terms, model, guide, h)[0][3, 2].isnan()


class OtherGuide(MeanFieldGuide):
    """A class that may do anything."""


class OtherLikelihood(GaussianLikelihood):
    """Likewise."""


class OtherELBO(ClosedFormELBO):
    """Likewise."""


OTHERS = {
    "guide": ({}, OtherGuide, ClosedFormELBO),
    "joint guide": ({}, FullRankGuide, ClosedFormELBO),
    "likelihood": ({"likelihood": OtherLikelihood()}, MeanFieldGuide, ClosedFormELBO),
    "noise of each output": (
        {"likelihood": GaussianLikelihood(torch.tensor([0.1, 0.2]))},
        MeanFieldGuide,
        ClosedFormELBO,
    ),
    "objective": ({}, MeanFieldGuide, OtherELBO),
    "kernel": ({"kernel": RBFKernel(0.3)}, MeanFieldGuide, ClosedFormELBO),
    "lengthscales": ({"kernel": LaplaceKernel(0.3, learn=True)}, MeanFieldGuide, ClosedFormELBO),
    "coarse grid": (
        {"level": 1, "kernel": LaplaceKernel(0.02), "route": "local"},
        MeanFieldGuide,
        ClosedFormELBO,
    ),
    "route": ({"route": "dense"}, MeanFieldGuide, ClosedFormELBO),
    "linear term": ({"linear_term": True}, MeanFieldGuide, ClosedFormELBO),
    "prior": (
        {"prior": {"z": torch.distributions.Normal(0.0, 2.0)}},
        MeanFieldGuide,
        ClosedFormELBO,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_may_be_different_is_computed_plainly(name, num_bounds):
    options, guide_class, elbo_class = OTHERS[name]
    model, _, h, y = case(2, **options)
    terms = elbo_class().terms_from_units(model, guide_class(model), h, y)
    assert terms.elbo.isfinite()
    assert not num_bounds


def test_missing_targets_are_left_out_plainly(num_bounds):
    model, guide, h, y = case(2)
    y[3, 1] = math.nan
    with with_missing(model.likelihood, "nan"):
        assert ClosedFormELBO().terms_from_units(model, guide, h, y).elbo.isfinite()
    assert not num_bounds


def test_transforms_take_the_plain_terms(num_bounds):
    model, guide, h, y = case()

    def elbo(h):
        return ClosedFormELBO().terms_from_units(model, guide, h, y).elbo

    h = h.detach()
    assert_close(torch.func.vmap(elbo)(torch.stack([h, h])), elbo(h).expand(2))
    assert len(num_bounds) == 1


def test_second_derivatives_are_refused():
    model, guide, h, y = case()
    elbo = ClosedFormELBO().terms_from_units(model, guide, h, y).elbo
    with pytest.raises(NotImplementedError, match="second ones were asked for"):
        torch.autograd.grad(elbo, h, create_graph=True)


def test_bound_keeps_one_tensor_of_rows():
    model, guide, h, y = case()

    def sizes(repeats):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: (kept.append(tensor.numel()), tensor)[1], lambda tensor: tensor
        ):
            ClosedFormELBO().terms_from_units(
                model, guide, h.repeat(repeats, 1), y.repeat(repeats, 1)
            )
        return kept

    # Of 42 rows more it keeps as many numbers as h has in them.
    assert [b - a for a, b in zip(sizes(1), sizes(2), strict=True) if b > a] == [h.numel()]
