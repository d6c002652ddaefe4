import math

import pytest
import scipy.stats
import torch
from torch.testing import assert_close

from pyro_dak.diagnostics.calibration import (
    chi_square_p_value,
    confidence_bins,
    coverage_curve,
    dispersion,
    gaussian_pit,
    rank_pit,
    reliability_curve,
)
from pyro_dak.diagnostics.scores import expected_calibration_error


def test_pit_of_a_gaussian_is_its_distribution_function():
    y, mean, var = torch.randn(5, 2), torch.randn(5, 2), torch.rand(5, 2) + 0.1
    expected = torch.distributions.Normal(mean, var.sqrt()).cdf(y)
    assert_close(gaussian_pit(y, mean, var), expected)


@pytest.mark.parametrize("discrete", [False, True])
def test_ranks_among_draws_of_the_same_distribution_are_uniform(discrete):
    values = torch.randn(21, 5000)
    values = values.mul(2).round() if discrete else values
    pit = rank_pit(values[0], values[1:])
    assert chi_square_p_value(torch.histc(pit, 21, 0, 1)) > 1e-3


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_coverage_of_a_gaussian_with_a_wrong_scale(scale):
    """y ~ N(0, 1) predicted by N(0, scale^2): the central interval covers P(|y| < q scale)."""
    normal = torch.distributions.Normal(0.0, 1.0)
    y = torch.randn(20_000)
    pit = gaussian_pit(y, torch.zeros_like(y), torch.full_like(y, scale**2))
    levels = torch.tensor([0.1, 0.5, 0.9])
    expected = 2 * normal.cdf(scale * normal.icdf((1 + levels) / 2)) - 1
    error = (expected * (1 - expected) / 20_000).sqrt()
    assert ((coverage_curve(pit, levels) - expected).abs() < 4 * error).all()


def test_dispersion_of_uniform_values_has_the_stated_moments():
    ratios = torch.tensor([dispersion(torch.rand(50)).ratio for _ in range(4000)])
    z_scores = torch.tensor([dispersion(torch.rand(50)).z_score for _ in range(4000)])
    assert abs(ratios.mean() - 1) < 4 * math.sqrt(0.8 / 50 / 4000)
    assert_close(z_scores.std(), torch.tensor(1.0), rtol=0.05, atol=0)


@pytest.mark.parametrize(("scale", "sign"), [(0.5, 1), (2.0, -1)])
def test_narrow_predictions_raise_the_dispersion_and_wide_ones_lower_it(scale, sign):
    y = torch.randn(2000)
    pit = gaussian_pit(y, torch.zeros_like(y), torch.full_like(y, scale**2))
    assert sign * dispersion(pit).z_score > 4


def test_reliability_curve_adds_up_to_the_calibration_error():
    probs = torch.randn(500, 4).mul(2).softmax(-1)
    y = torch.randint(0, 4, (500,))
    curve = reliability_curve(y, probs, num_bins=15)
    gaps = (curve.accuracy - curve.confidence).abs() * curve.num_rows / 500
    assert curve.num_rows.sum() == 500
    assert_close(gaps.sum(), expected_calibration_error(y, probs, num_bins=15))


def test_confidence_bins_keep_the_empty_ones_that_the_curve_leaves_out():
    probs = torch.tensor([[0.75, 0.25], [0.6, 0.4], [0.0, 1.0]])
    y = torch.tensor([0, 1, 1])
    bins = confidence_bins(y, probs, num_bins=4)
    assert bins.num_rows.tolist() == [0, 0, 2, 1]
    assert_close(bins.confidence, torch.tensor([0.0, 0.0, 0.675, 1.0]))
    assert_close(bins.accuracy, torch.tensor([0.0, 0.0, 0.5, 1.0]))
    for part, expected in zip(reliability_curve(y, probs, num_bins=4), bins, strict=True):
        assert_close(part, expected[2:])


def test_chi_square_p_value_equals_that_of_scipy():
    counts = torch.randint(1, 30, (3, 8))
    expected = scipy.stats.chisquare(counts.numpy(), axis=-1).pvalue
    assert_close(chi_square_p_value(counts), torch.as_tensor(expected))
