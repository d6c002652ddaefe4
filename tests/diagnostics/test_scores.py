import math

import pytest
import torch
from torch.distributions import Normal
from torch.testing import assert_close
from torchmetrics.classification import MulticlassCalibrationError

from pyro_dak.diagnostics import scores
from tests import reference


def random_classification(num_rows=500, num_classes=4):
    probs = torch.softmax(3 * torch.randn(num_rows, num_classes), -1)
    return torch.randint(num_classes, (num_rows,)), probs


def random_regression(shape=(50, 2)):
    return torch.randn(shape), torch.randn(shape), torch.rand(shape) + 0.1


def test_rmse_of_known_errors():
    y, mean = torch.tensor([1.0, 2.0, 5.0]), torch.tensor([1.0, 4.0, 4.0])
    assert_close(scores.rmse(y, mean), torch.tensor(math.sqrt(5 / 3)))


def test_nlpd_is_the_negative_log_density():
    y, mean, var = random_regression()
    expected = -Normal(mean, var.sqrt()).log_prob(y).mean()
    assert_close(scores.gaussian_nlpd(y, mean, var), expected)


@pytest.mark.parametrize(
    ("y", "mean", "scale"), [(0.0, 0.0, 1.0), (2.0, 0.5, 0.3), (-3.0, 1.0, 2.0), (9.0, 0.0, 0.5)]
)
def test_crps_equals_its_integral(y, mean, scale):
    value = scores.gaussian_crps(*(torch.tensor([v]) for v in (y, mean, scale**2)))
    assert float(value) == pytest.approx(reference.crps(y, mean, scale), rel=1e-8)


def test_crps_tends_to_the_absolute_error():
    y, mean, _ = random_regression()
    value = scores.gaussian_crps(y, mean, torch.full_like(y, 1e-20))
    assert_close(value, (y - mean).abs().mean())


def test_crps_is_the_mean_over_values():
    y, mean, var = random_regression((3, 2))
    terms = [scores.gaussian_crps(*one) for one in zip(y, mean, var, strict=True)]
    assert_close(scores.gaussian_crps(y, mean, var), torch.stack(terms).mean())


def test_coverage_counts_closed_intervals():
    y = torch.tensor([0.0, 1.0, 2.0, -0.1])
    lower, upper = torch.zeros(4), torch.ones(4)
    assert scores.interval_coverage(y, lower, upper) == 0.5
    assert scores.interval_width(lower, 3 * upper) == 3


def test_coverage_of_true_intervals_is_nominal():
    y = torch.randn(10_000)
    end = Normal(0.0, 1.0).icdf(torch.tensor(0.95)).expand(10_000)
    standard_error = math.sqrt(0.9 * 0.1 / 10_000)
    assert abs(scores.interval_coverage(y, -end, end) - 0.9) < 4 * standard_error


def test_accuracy_and_brier_score_equal_their_loops():
    y, probs = random_classification(20)
    rows = list(zip(y.tolist(), probs.tolist(), strict=True))
    hits = [float(p.index(max(p)) == label) for label, p in rows]
    squares = [sum((v - (c == label)) ** 2 for c, v in enumerate(p)) for label, p in rows]
    assert_close(float(scores.accuracy(y, probs)), sum(hits) / 20)
    assert_close(float(scores.brier_score(y, probs)), sum(squares) / 20)


def test_certain_and_right_is_perfect_and_certain_and_wrong_is_worst():
    right, wrong = torch.tensor([0, 1]), torch.tensor([1, 0])
    probs = torch.eye(2)
    assert scores.accuracy(right, probs) == 1
    assert (scores.brier_score(right, probs), scores.brier_score(wrong, probs)) == (0, 2)
    assert scores.expected_calibration_error(right, probs) == 0
    assert scores.expected_calibration_error(wrong, probs) == 1


@pytest.mark.parametrize("num_bins", [1, 5, 15])
def test_ece_equals_the_loop_over_bins(num_bins):
    y, probs = random_classification(200)
    value = scores.expected_calibration_error(y, probs, num_bins)
    assert_close(value, reference.expected_calibration_error(y, probs, num_bins))


@pytest.mark.parametrize("num_classes", [2, 4, 10])
def test_ece_equals_torchmetrics(num_classes):
    y, probs = random_classification(2000, num_classes)
    # torchmetrics opens a bin of its own for a confidence of exactly one
    assert probs.max() < 1
    theirs = MulticlassCalibrationError(num_classes, n_bins=15, norm="l1")
    # it compares and accumulates in float32
    value = scores.expected_calibration_error(y, probs)
    assert_close(value.float(), theirs(probs, y).float(), rtol=1e-5, atol=1e-6)


def test_ece_bins_are_closed_on_the_right():
    probs = torch.tensor([[0.75, 0.25], [0.6, 0.4]])  # both in (0.5, 0.75]
    value = scores.expected_calibration_error(torch.tensor([0, 1]), probs, num_bins=4)
    assert_close(value, torch.tensor(abs((1 - 0.75) + (0 - 0.6)) / 2))


def test_ece_puts_a_confidence_of_one_into_the_last_bin():
    probs = torch.tensor([[1.0, 0.0], [0.97, 0.03]])
    value = scores.expected_calibration_error(torch.tensor([0, 1]), probs)
    assert_close(value, torch.tensor(abs((1 - 1.0) + (0 - 0.97)) / 2))


def test_auroc_equals_the_loop_over_pairs():
    negative, positive = torch.randint(6, (30,)).double(), torch.randint(2, 8, (40,)).double()
    assert_close(float(scores.auroc(negative, positive)), reference.auroc(negative, positive))


@pytest.mark.parametrize(("shift", "expected"), [(10.0, 1.0), (-10.0, 0.0), (0.0, 0.5)])
def test_auroc_of_separated_and_of_equal_scores(shift, expected):
    values = torch.rand(50)
    assert float(scores.auroc(values, values + shift)) == pytest.approx(expected)
