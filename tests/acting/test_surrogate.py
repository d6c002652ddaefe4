import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from pyro_dak import DAK, GaussianLikelihood, MaternKernel
from pyro_dak.acting.surrogate import Projections, build_surrogate, maximize_evidence


def test_many_directions_make_a_rational_quadratic_kernel():
    D = 3
    features = Projections(D, 200_000)
    features.log_inverse_lengthscale.data = torch.tensor([0.3, -0.5, 1.0])
    x = torch.rand(2, D)
    along = features(x)[:, D:].diff(dim=0).square()
    values = (-0.5 * along).exp()
    r = (x.diff(dim=0) * features.log_inverse_lengthscale.exp()).norm()
    # The component of r along a uniform direction in three dimensions is uniform in (-|r|, |r|).
    expected = math.sqrt(math.pi / 2) * torch.erf(r / math.sqrt(2)) / r
    assert (values.mean() - expected).abs() < 4 * values.std() / 200_000**0.5
    assert_close(expected, (1 + r.square() / D).rsqrt(), rtol=0.05, atol=0)


def test_the_columns_are_the_first_units():
    features, x = Projections(2, 4, lengthscale=0.5), torch.rand(5, 2)
    assert_close(features(x)[:, :2], 2 * (x - 0.5))
    assert features.num_units == 6
    assert Projections(1, 4).num_units == 1


def test_a_network_bends_nothing_at_first():
    x = torch.rand(5, 2)
    assert_close(Projections(2, 4, hidden_size=8)(x), Projections(2, 4)(x))


@pytest.mark.parametrize("num_inputs", [1, 5])
def test_the_prior_variance_is_one(num_inputs):
    model = build_surrogate(num_inputs, num_outputs=2)
    assert_close(model.unit_scale.square().sum(), torch.tensor(1.0))
    assert model.likelihood.noise_scale.shape == (2,)
    h = model.unit_inputs(torch.rand(20, num_inputs))
    assert float(model.residual_variance(h).detach().max()) < 1e-3  # the grid loses next to nothing


@pytest.mark.parametrize("hidden_size", [0, 4])
def test_the_evidence_rises_and_parameters_stay_at_its_best(hidden_size):
    x = torch.rand(20, 2)
    y = torch.sin(5 * x[:, :1])
    model = build_surrogate(2, hidden_size=hidden_size, kernel=MaternKernel())
    options = {"log_unit_scale": model.layer.log_unit_scale.detach().clone()}
    values = [maximize_evidence(model, x, y, max_steps=n, **options) for n in (0, 5, 20)]
    assert values[0] < values[1] < values[2]
    assert_close(maximize_evidence(model, x, y, max_steps=0, **options), values[2])


@pytest.mark.parametrize("level_deviation", [0.0, 0.7])
def test_unit_scales_of_a_group_share_a_level_in_the_prior(level_deviation):
    model = build_surrogate(2, num_directions=3, noise_scale=0.2).double()
    x, y = torch.rand(8, 2).double(), torch.randn(8, 1).double()
    centre = model.layer.log_unit_scale.detach().clone()
    options = {"log_deviation": 0.3, "level_deviation": level_deviation, "max_steps": 0}

    def log_prior(shift):
        """By the densities of all log scales of each group, from what the whole differs by."""
        parts = []
        for part in (shift[:2], shift[2:]):
            n = len(part)
            covariance = 0.09 * torch.eye(n) + level_deviation**2 * torch.ones(n, n)
            covariance = covariance.double()
            normal = torch.distributions.MultivariateNormal(torch.zeros(n).double(), covariance)
            parts.append(normal.log_prob(part))
        return float(sum(parts))

    shifts = torch.randn(2, 5).double()
    values = []
    for shift in shifts:
        with torch.no_grad():
            model.layer.log_unit_scale.copy_(centre + shift)
        value = maximize_evidence(model, x, y, log_unit_scale=centre, **options)
        # Around where they are, the prior is at its mode: the rest is the same.
        value -= maximize_evidence(model, x, y, **options)
        values.append(value)
    expected = log_prior(shifts[0]) - log_prior(shifts[1])
    assert_close(values[0] - values[1], expected, rtol=1e-10, atol=1e-8)


def test_lengthscales_share_a_level_in_the_prior():
    features = Projections(3, 2, lengthscale=0.4, log_deviation=0.3, level_deviation=0.7).double()
    covariance = 0.09 * torch.eye(3) + 0.49 * torch.ones(3, 3)
    mean = torch.full((3,), -math.log(0.4))
    normal = torch.distributions.MultivariateNormal(mean.double(), covariance.double())
    values = torch.randn(4, 3).double()
    found = []
    for value in values:
        features.log_inverse_lengthscale.data = value
        found.append(features.log_prior())
    expected = normal.log_prob(values)
    assert_close(torch.stack(found).diff(), expected.diff())


def test_irrelevant_columns_get_long_lengthscales():
    x = torch.rand(40, 3)
    y = torch.sin(6 * x[:, :1])
    model = build_surrogate(3)
    maximize_evidence(model, x, (y - y.mean()) / y.std())
    a = model.feature_extractor.log_inverse_lengthscale
    assert bool(a[0] > a[1:].max() + 0.5)


def test_a_network_without_a_prior_is_kept_small_by_weight_decay():
    x = torch.rand(20, 2)
    y = torch.sin(5 * x[:, :1])
    sizes = []
    for weight_decay in (1e-3, 10.0):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(2, 8), nn.Tanh())
        model = DAK(network, 8, 4, bounds=(-2.0, 2.0), scaling="none", input_units=2)
        model.likelihood = GaussianLikelihood(0.1)
        maximize_evidence(model, x, y, weight_decay=weight_decay)
        sizes.append(float(network[0].weight.detach().norm()))
    assert sizes[1] < 0.5 * sizes[0]
