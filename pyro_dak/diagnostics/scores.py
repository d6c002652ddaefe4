"""Scores of predictions: errors, proper scoring rules, calibration, out-of-distribution detection.

All are means over the N rows (and outputs), returned as scalar tensors; smaller is better unless
the docstring says otherwise.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = [
    "accuracy",
    "auroc",
    "brier_score",
    "categorical_nll",
    "expected_calibration_error",
    "gaussian_crps",
    "gaussian_nlpd",
    "interval_coverage",
    "interval_width",
    "rmse",
]


def rmse(y: Float[Tensor, "*shape"], mean: Float[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Root mean squared error, sqrt(mean (y - mean)^2)."""
    return (y - mean).square().mean().sqrt()


def gaussian_nlpd(
    y: Float[Tensor, "*shape"], mean: Float[Tensor, "*shape"], var: Float[Tensor, "*shape"]
) -> Float[Tensor, ""]:
    """Negative log predictive density under N(mean, var), in nats per value."""
    return 0.5 * (math.log(2 * math.pi) + var.log() + (y - mean).square() / var).mean()


def gaussian_crps(
    y: Float[Tensor, "*shape"], mean: Float[Tensor, "*shape"], var: Float[Tensor, "*shape"]
) -> Float[Tensor, ""]:
    """Continuous ranked probability score of N(mean, var), in units of y.

    s (r (2 Phi(r) - 1) + 2 pdf(r) - 1 / sqrt(pi)) with r = (y - mean) / s.
    """
    scale = var.sqrt()
    r = (y - mean) / scale
    pdf = (-0.5 * r.square()).exp() / math.sqrt(2 * math.pi)
    centred = torch.special.erf(r / math.sqrt(2))  # 2 Phi(r) - 1
    return (scale * (r * centred + 2 * pdf - 1 / math.sqrt(math.pi))).mean()


def interval_coverage(
    y: Float[Tensor, "*shape"], lower: Float[Tensor, "*shape"], upper: Float[Tensor, "*shape"]
) -> Float[Tensor, ""]:
    """Share of y inside [lower, upper]; best at the interval's nominal level."""
    return ((y >= lower) & (y <= upper)).to(lower.dtype).mean()


def interval_width(
    lower: Float[Tensor, "*shape"], upper: Float[Tensor, "*shape"]
) -> Float[Tensor, ""]:
    """Mean width of the intervals."""
    return (upper - lower).mean()


def accuracy(y: Int[Tensor, " n"], probs: Float[Tensor, "n c"]) -> Float[Tensor, ""]:
    """Share of rows whose most probable class is y; larger is better."""
    return (probs.argmax(-1) == y).to(probs.dtype).mean()


def categorical_nll(y: Int[Tensor, " n"], probs: Float[Tensor, "n c"]) -> Float[Tensor, ""]:
    """Mean of -log probs[y], in nats; infinite if a label was given probability zero."""
    return -probs.gather(-1, y.unsqueeze(-1)).log().mean()


def brier_score(y: Int[Tensor, " n"], probs: Float[Tensor, "n c"]) -> Float[Tensor, ""]:
    """Mean over rows of sum_c (probs_c - [y = c])^2, between 0 and 2."""
    one_hot = torch.nn.functional.one_hot(y, probs.shape[-1])
    return (probs - one_hot).square().sum(-1).mean()


def expected_calibration_error(
    y: Int[Tensor, " n"], probs: Float[Tensor, "n c"], num_bins: int = 15
) -> Float[Tensor, ""]:
    """sum_b |B_b| / n |accuracy(B_b) - confidence(B_b)| over equal-width bins of the confidence.

    Bin b holds confidences in (b / num_bins, (b + 1) / num_bins]; a confidence of 1 is in the last.
    """
    confidence, label = probs.max(-1)
    bins = (confidence * num_bins).ceil().long().sub(1).clamp(0, num_bins - 1)
    gap = (label == y).to(probs.dtype) - confidence
    summed = gap.new_zeros(num_bins).index_add_(0, bins, gap)
    return summed.abs().sum() / len(y)


def auroc(negative: Float[Tensor, " n0"], positive: Float[Tensor, " n1"]) -> Float[Tensor, ""]:
    """Probability that a positive outscores a negative, ties counted half; larger is better.

    For out-of-distribution detection the negatives are scores in distribution (entropies, say)
    and the positives those outside. O(n log n).
    """
    ordered = negative.sort().values
    below = torch.searchsorted(ordered, positive, right=False)
    up_to = torch.searchsorted(ordered, positive, right=True)
    return (below + up_to).to(positive.dtype).mean() / (2 * len(negative))
