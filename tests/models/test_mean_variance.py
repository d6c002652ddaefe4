"""The network of a mean and a variance: what it learns, and its calibration."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import models
from tests.models.tables import RECIPE, data


def noisy_rows(num_rows, seed):
    """y = sin(x) + noise, whose standard deviation is 0.1 below zero and 0.5 above."""
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.randn(num_rows, 1, generator=generator)
    scale = torch.where(x > 0, 0.5, 0.1)
    return x, x.sin() + scale * torch.randn(num_rows, 1, generator=generator)


def test_it_learns_where_the_noise_is_large():
    x, y = noisy_rows(1000, 0)
    model = models.build("nn_mean_variance", 1, feature_dim=8, recipe=replace(RECIPE, epochs=40))
    model.fit(x, y)
    x, y = noisy_rows(1000, 1)
    prediction = model.predict(x)
    assert (prediction.epistemic == 0).all()
    loud, quiet = (prediction.std[rows].median() for rows in (x > 0.5, x < -0.5))
    assert loud > 2 * quiet  # five times in truth, and smoothly in between
    normal = torch.distributions.Normal(prediction.mean, prediction.std)
    assert_close(prediction.log_prob(y), normal.log_prob(y).sum(-1))


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_the_factor_maximises_the_likelihood_of_the_rows(num_outputs):
    model = models.build("nn_mean_variance", 3, num_outputs, feature_dim=8, recipe=RECIPE)
    x, y = data(50)
    y = y * torch.tensor([1.0, 7.0])[:num_outputs]
    model.calibrate(x, y)
    best = model.predict(x)
    standardised = (y - best.mean).square() / best.variance
    assert_close(standardised.mean(0), torch.ones(num_outputs))
    for factor in (0.9, 1.1):
        other = torch.distributions.Normal(best.mean, factor * best.std)
        assert other.log_prob(y).sum() < best.log_prob(y).sum()


def test_rows_that_calibrate_do_not_train():
    x, y = data(40)
    recipe = replace(RECIPE, epochs=2, batch_size=40)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(recipe.seed))
    strange = y.clone()
    strange[order[:4]] += 100
    means = []
    for target in (y, strange):
        model = models.build("nn_mean_variance", 3, feature_dim=8, recipe=recipe)
        model.fit(x, target)
        means.append(model.predict(x).mean)
    assert_close(*means, rtol=0, atol=0)


def test_rows_that_lie_far_outside_have_a_variance():
    x, y = noisy_rows(200, 0)
    model = models.build("nn_mean_variance", 1, feature_dim=8, recipe=replace(RECIPE, epochs=2))
    model.fit(x, y)
    far = torch.tensor([[-1e4], [1e4], [1e6], [-1e6]], dtype=x.dtype)
    assert (model.predict(far).aleatoric > 0).all()
