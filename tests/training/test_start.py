"""Scales that a model cannot be trained on are refused before the first step, or warned about."""

import warnings

import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from pyro_dak import (
    DAK,
    ClosedFormELBO,
    GaussianLikelihood,
    MeanFieldGuide,
    NormalPrior,
    PoissonLikelihood,
    StudentTPrior,
    TrainingError,
)
from pyro_dak.training.checkpoint import module_tensors
from pyro_dak.training.loop import DAKLoss
from pyro_dak.training.start import check_start
from tests.training.runs import assert_same, make_data, make_model, train


def scaled_data(x_scale=1.0, y_scale=1.0, dtype=torch.float64, num_rows=60):
    x, y = make_data(num_rows)
    return (x * x_scale).to(dtype), (y * y_scale).to(dtype)


def linear_model():
    """A model whose features grow with the inputs."""
    torch.manual_seed(1)
    model = DAK(nn.Sequential(nn.Linear(3, 8), nn.ReLU()), 8, num_units=3, level=3)
    return model, MeanFieldGuide(model)


def refused(model, guide, data, message, **options):
    before = module_tensors(model, guide)
    with pytest.raises(TrainingError, match=message):
        train(model, guide, data, **options)
    assert_same(module_tensors(model, guide), before)


@pytest.mark.parametrize(("dtype", "x_scale", "y_scale", "message"), [
    (torch.float32, 1e20, 1.0, r"scaling.second of some rows is .* largest \|x\| is 3.\d*e\+20"),
    (torch.float64, 1e155, 1.0, r"scaling.second of some rows is"),
    (torch.float64, 1e300, 1.0, r"scaling.second of some rows is"),
    (torch.float32, 1e-30, 1.0, r"fill a share of .* of the grid; the largest \|x\| is 3.*e-30"),
    (torch.float64, 1e-170, 1.0, "fill a share of 0 of the grid"),
    (torch.float64, 1e-300, 1.0, "fill a share of 0 of the grid"),
    (torch.float32, 1.0, 1e20, r"loss of some rows is inf .* largest \|y\| 2.\d*e\+20"),
    (torch.float64, 1.0, 1e100, "norm of the gradient of some rows is inf"),
    (torch.float64, 1.0, 1e155, "loss of some rows is inf"),
    (torch.float64, 1.0, 1e300, "loss of some rows is inf"),
    (torch.float64, 1.0, 1e30, r"targets are about 1.\d*e\+30, where the model expects 1.\d*;"),
    (torch.float64, 1.0, 1e-170, "targets are about 1.*e-170"),
    (torch.float64, 1.0, 1e-300, "targets are about 1.*e-300"),
])  # fmt: skip
def test_extreme_scales_are_refused_before_training(dtype, x_scale, y_scale, message):
    model, guide = (part.to(dtype) for part in linear_model())
    data = scaled_data(x_scale, y_scale, dtype)
    refused(model, guide, data, f"{message}.*Bring inputs and targets to about unit scale")


@pytest.mark.parametrize(("dtype", "x_scale"), [
    (torch.float32, 1e18), (torch.float32, 1e-3), (torch.float64, 1e150), (torch.float64, 1e-4)
])  # fmt: skip
def test_large_and_small_inputs_are_scaled_away_where_numbers_last(dtype, x_scale):
    model, guide = (part.to(dtype) for part in linear_model())
    x, y = scaled_data(x_scale, dtype=dtype)
    assert train(model, guide, (x, y)).final["elbo"] > -1e5


@pytest.mark.parametrize(("x_scale", "y_scale", "message"), [
    (1e-8, 1.0, "unit inputs of some rows fill"),
    (1.0, 1e4, r"targets are about 1.\d*e\+04, where the model expects 1."),
    (1.0, 1e-5, "targets are about 1.*e-05"),
])  # fmt: skip
@pytest.mark.parametrize("as_loader", [False, True])
def test_unusual_scales_are_warned_about(x_scale, y_scale, message, as_loader):
    data = scaled_data(x_scale, y_scale)
    data = DataLoader(TensorDataset(*data), 20) if as_loader else data
    with pytest.warns(UserWarning, match=message):
        train(*make_model(), data, epochs=1)


def test_a_first_batch_of_a_loader_does_not_stand_for_all_rows():
    x, y = make_data()
    loader = DataLoader(TensorDataset(x, torch.cat([1e-20 * y[:20], y[20:]])), 20)
    with pytest.warns(UserWarning, match="targets are about 1.*e-20"):
        train(*make_model(), loader, epochs=1)


def test_rows_that_are_sorted_are_sampled_from_all_over():
    x, y = scaled_data(num_rows=2000)
    y = torch.cat([y[:1000] * 1e-30, y[1000:]])
    train(*make_model(), (x, y), epochs=1)


def test_one_row_that_overflows_is_found():
    x, y = scaled_data(num_rows=2000)
    x[777, 1] = 1e200
    refused(*linear_model(), (x, y), "scaling.second of some rows")


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x


def test_a_network_that_scales_its_inputs_may_have_any():
    for scale in (1e-200, 1e200):
        model, guide = make_model()
        model.feature_extractor.insert(0, Times(1 / scale))
        train(model, guide, scaled_data(scale), epochs=1)


def test_a_network_that_starts_with_zeros_trains():
    model, guide = make_model()
    nn.init.zeros_(model.feature_extractor[2].weight)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "3 of 3 units are dead")
        train(model, guide, epochs=1)


@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_a_model_of_the_scale_of_its_targets_may_have_any(scale):
    prior = {"z": NormalPrior(scale=scale), "mu": NormalPrior(scale=scale)}
    likelihood = GaussianLikelihood(scale)
    model, _ = make_model(prior=prior, likelihood=likelihood)
    guide = MeanFieldGuide(model, init_scale=scale)
    train(model, guide, scaled_data(y_scale=scale), epochs=1)


def test_priors_without_variance_or_of_ones_own_and_counts_are_left_alone():
    x, y = make_data()
    own = dist.Normal(torch.zeros(1), torch.ones(1)).to_event(1)
    for prior in ({"z": StudentTPrior(df=1)}, {"mu": own}):
        train(*make_model(prior=prior), (x, 1e4 * y), epochs=1, objective="local")
    counting = make_model(likelihood=PoissonLikelihood())
    train(*counting, (x, torch.full_like(y, 3000.0)), epochs=1)


def test_a_look_at_some_rows_changes_nothing():
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model = DAK(network, 4, num_units=3, level=3)
    guide = MeanFieldGuide(model)
    before, state = module_tensors(model, guide), torch.get_rng_state()
    check_start(DAKLoss(model, guide, ClosedFormELBO()), *make_data(), 60)
    assert_same(module_tensors(model, guide), before)
    assert_close(torch.get_rng_state(), state)
    assert all(p.grad is None for p in [*model.parameters(), *guide.parameters()])
