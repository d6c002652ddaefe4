"""Scores of predictions: errors, proper scoring rules, intervals, detection of strange inputs.

Each score is a mean over the N rows (and outputs), a scalar tensor. Smaller is better unless the
docstring says otherwise.
"""

import math

import torch
from torch import Tensor

from pyro_dak.annotations import Float
from pyro_dak.diagnostics.arguments import check_classes, check_same, check_variances
from pyro_dak.diagnostics.calibration import Labels, Probs, Values, confidence_bins

__all__ = [
    "accuracy",
    "auroc",
    "brier_score",
    "expected_calibration_error",
    "gaussian_crps",
    "gaussian_nlpd",
    "interval_coverage",
    "interval_width",
    "rmse",
]

Score = Float[Tensor, ""]


def rmse(y: Values, mean: Values) -> Score:
    """Root mean squared error, sqrt(mean (y - mean)^2), of errors of any size."""
    check_same(y=y, mean=mean)
    errors = y - mean
    largest = errors.abs().max().clamp(min=torch.finfo(errors.dtype).tiny)
    return largest * (errors / largest).square().mean().sqrt()


def gaussian_nlpd(y: Values, mean: Values, var: Values) -> Score:
    """Negative log predictive density under N(mean, var), in nats per value."""
    check_same(y=y, mean=mean, var=var)
    check_variances(var)
    return 0.5 * (math.log(2 * math.pi) + var.log() + (y - mean).square() / var).mean()


def gaussian_crps(y: Values, mean: Values, var: Values) -> Score:
    """Continuous ranked probability score of N(mean, var), in units of y.

    s (r (2 Phi(r) - 1) + 2 pdf(r) - 1 / sqrt(pi)) with s = sqrt(var) and r = (y - mean) / s.
    """
    check_same(y=y, mean=mean, var=var)
    check_variances(var)
    scale = var.sqrt()
    r = (y - mean) / scale
    pdf = (-0.5 * r.square()).exp() / math.sqrt(2 * math.pi)
    centred = torch.special.erf(r / math.sqrt(2))  # 2 Phi(r) - 1
    return (scale * (r * centred + 2 * pdf - 1 / math.sqrt(math.pi))).mean()


def interval_coverage(y: Values, lower: Values, upper: Values) -> Score:
    """Share of y inside [lower, upper]. It is best at the nominal level of the intervals."""
    check_same(y=y, lower=lower, upper=upper)
    return ((y >= lower) & (y <= upper)).to(lower.dtype).mean()


def interval_width(lower: Values, upper: Values) -> Score:
    """Mean width of the intervals."""
    check_same(lower=lower, upper=upper)
    return (upper - lower).mean()


def accuracy(y: Labels, probs: Probs) -> Score:
    """Share of rows whose most probable class is y. Larger is better."""
    check_classes(y, probs, is_probability=False)
    return (probs.argmax(-1) == y).to(probs.dtype).mean()


def brier_score(y: Labels, probs: Probs) -> Score:
    """Mean over rows of sum_c (probs_c - [y = c])^2, between 0 and 2."""
    check_classes(y, probs)
    one_hot = torch.nn.functional.one_hot(y.long(), probs.shape[-1])
    return (probs - one_hot).square().sum(-1).mean()


def expected_calibration_error(y: Labels, probs: Probs, num_bins: int = 15) -> Score:
    """sum_b |B_b| / n |accuracy(B_b) - confidence(B_b)| over the bins B_b of `confidence_bins`."""
    bins = confidence_bins(y, probs, num_bins)
    return (bins.num_rows * (bins.accuracy - bins.confidence).abs()).sum() / len(y)


def auroc(negative: Float[Tensor, " n0"], positive: Float[Tensor, " n1"]) -> Score:
    """Probability that a positive scores higher than a negative. Larger is better; O(n log n).

    A tie counts as one half. To judge the detection of strange inputs, the negatives are scores
    (entropies, for example) of inputs like the training data, and the positives those of others.
    """
    for name, value in (("negative", negative), ("positive", positive)):
        check_same(**{name: value})
        if value.dim() != 1:
            raise ValueError(
                f"`{name}` must have shape (N,), a score for each input; got {tuple(value.shape)}."
            )
    ordered = negative.sort().values
    below = torch.searchsorted(ordered, positive, right=False)
    up_to = torch.searchsorted(ordered, positive, right=True)
    return (below + up_to).to(positive.dtype).mean() / (2 * len(negative))
