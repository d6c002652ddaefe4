import math

import pytest
import torch
from torch.testing import assert_close

from pyro_dak.diagnostics.importance import fit_pareto, pareto_smooth
from pyro_dak.validation import import_optional

arviz = import_optional("arviz")


def pareto_draws(k, num_draws=20_000):
    return (((1 - torch.rand(num_draws)) ** -k - 1) / k).sort().values


@pytest.mark.parametrize("k", [-0.3, 0.3, 0.7, 1.2])
def test_fit_recovers_shape_and_scale_of_a_pareto_distribution(k):
    k_hat, sigma = fit_pareto(3.0 * pareto_draws(k))
    # Asymptotic standard errors of the maximum likelihood estimates: (1 + k) / sqrt(n), ...
    assert abs(k_hat - k) < 4 * (1 + k) / math.sqrt(20_000)
    assert abs(sigma / 3 - 1) < 4 * math.sqrt(2 * (1 + k) / 20_000)


@pytest.mark.parametrize("scale", [0.3, 0.5, 0.8])
def test_k_hat_of_a_gaussian_that_is_too_narrow(scale):
    """With x ~ N(0, s^2) the ratio to N(0, 1) has P(ratio > t) ~ t^(-1 / (1 - s^2))."""
    x = scale * torch.randn(100_000)
    ratios = -0.5 * x.square() + 0.5 * (x / scale).square()
    assert_close(pareto_smooth(ratios).k_hat, torch.tensor(1 - scale**2), rtol=0, atol=0.15)


def test_smoothing_agrees_with_arviz():
    ratios = torch.randn(5, 1000) * torch.tensor([0.01, 0.3, 1.0, 2.0, 5.0]).unsqueeze(-1)
    smoothed = pareto_smooth(ratios, efficiency=0.8)
    if not hasattr(arviz, "psislw"):
        pytest.skip("ArviZ 1.x has no psislw")
    log_weights, k_hat = arviz.psislw(ratios.numpy(), reff=0.8)
    assert_close(smoothed.log_weights, torch.as_tensor(log_weights))
    assert_close(smoothed.k_hat, torch.as_tensor(k_hat))


def test_weights_sum_to_one_and_estimate_a_known_mean():
    x = 1.2 * torch.randn(50_000)
    weights = pareto_smooth(-0.5 * (x - 0.5).square() + 0.5 * (x / 1.2).square()).log_weights.exp()
    assert_close(weights.sum(), torch.tensor(1.0))
    se = (weights.square() * (x - 0.5).square()).sum().sqrt()
    assert abs((weights * x).sum() - 0.5) < 4 * se


@pytest.mark.parametrize("noise", [0.0, 1e-10])
def test_constant_ratios_have_no_tail(noise):
    smoothed = pareto_smooth(7.0 + noise * torch.randn(1000))
    assert smoothed.k_hat == -math.inf
    assert_close(smoothed.log_weights, torch.full((1000,), -math.log(1000)))


def test_a_batch_is_smoothed_row_by_row():
    ratios = torch.stack([torch.zeros(200), torch.randn(200), 4 * torch.randn(200)])
    together = pareto_smooth(ratios)
    for row, log_weights, k_hat in zip(ratios, *together, strict=True):
        alone = pareto_smooth(row)
        assert_close(alone.log_weights, log_weights)
        assert alone.k_hat == k_hat


def test_a_tail_that_cannot_be_fitted_is_not_trusted():
    assert pareto_smooth(torch.randn(10)).k_hat == math.inf
    same = torch.cat([torch.zeros(999), torch.tensor([-50.0])])
    assert pareto_smooth(same).k_hat == math.inf
    assert torch.isfinite(pareto_smooth(same).log_weights).all()


def test_ratios_that_are_nan_are_refused():
    with pytest.raises(ValueError, match="`log_ratios` must not be NaN"):
        pareto_smooth(torch.tensor([0.0, math.nan]))
