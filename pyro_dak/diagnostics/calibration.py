"""Are predicted probabilities right? Confidence against accuracy, and PIT values.

The PIT value (probability integral transform) of an observation y is P(y_new <= y) under the
prediction. If the predictions are right, PIT values are uniform on (0, 1).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_dak.annotations import Float, Int
from pyro_dak.diagnostics.arguments import check_classes, check_pit, check_same, check_variances
from pyro_dak.validation import (
    check_floating,
    check_has_values,
    check_integer,
    check_shape,
    check_tensor,
)

__all__ = [
    "ConfidenceBins",
    "Dispersion",
    "chi_square_p_value",
    "confidence_bins",
    "coverage_curve",
    "dispersion",
    "gaussian_pit",
    "rank_pit",
    "reliability_curve",
]


_MAX_BINS = 1_000_000
Labels = Int[Tensor, " n"]
Probs = Float[Tensor, "n c"]
Values = Float[Tensor, "*shape"]


class ConfidenceBins(NamedTuple):
    """Mean confidence, accuracy and number of rows of each bin of the confidence."""

    confidence: Tensor
    accuracy: Tensor
    num_rows: Tensor


def confidence_bins(y: Labels, probs: Probs, num_bins: int) -> ConfidenceBins:
    """Rows sorted into bins by their confidence, the probability of the most probable class.

    Bin b holds the confidences in (b / num_bins, (b + 1) / num_bins]. Empty bins have zeros.
    """
    check_classes(y, probs)
    check_integer("num_bins", num_bins, minimum=1, maximum=_MAX_BINS)
    confidence, label = probs.max(-1)
    bins = (confidence * num_bins).ceil().long().sub(1).clamp(0, num_bins - 1)
    num_rows = torch.bincount(bins, minlength=num_bins)
    confidence, accuracy = (
        probs.new_zeros(num_bins).index_add_(0, bins, values) / num_rows.clamp(min=1)
        for values in (confidence, (label == y).to(probs.dtype))
    )
    return ConfidenceBins(confidence, accuracy, num_rows)


def reliability_curve(y: Labels, probs: Probs, num_bins: int = 10) -> ConfidenceBins:
    """Accuracy against confidence: `confidence_bins` without the empty ones."""
    bins = confidence_bins(y, probs, num_bins)
    return ConfidenceBins(*(part[bins.num_rows > 0] for part in bins))


def gaussian_pit(y: Values, mean: Values, var: Values) -> Values:
    """PIT values of y under N(mean, var), Phi((y - mean) / sqrt(var))."""
    check_same(y=y, mean=mean, var=var)
    check_variances(var)
    return torch.special.ndtr((y - mean) / var.sqrt())


def rank_pit(
    y: Values, draws: Float[Tensor, "s *shape"], generator: torch.Generator | None = None
) -> Values:
    """PIT values of y from predictive draws, (#{draws < y} + U (1 + #{draws = y})) / (S + 1).

    U is uniform. The values are uniform on (0, 1), exactly, if y and the draws have the same
    distribution, be it discrete or not.
    """
    check_same(y=y)
    check_floating("draws", draws)
    if draws.dim() == 0 or len(draws) == 0 or draws.shape[1:] != y.shape:
        raise ValueError(
            f"`draws` must have shape (S, {', '.join(map(str, y.shape))}), draws of each value of "
            f"`y`; got {tuple(draws.shape)}."
        )
    check_same(draws=draws)
    u = torch.rand(y.shape, generator=generator, dtype=y.dtype).to(y.device)
    below, same = (draws < y).sum(0), (draws == y).sum(0)
    return (below + u * (1 + same)) / (len(draws) + 1)


def coverage_curve(pit: Values, levels: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
    """Share of y inside the central interval of each level, |pit - 1/2| <= level / 2."""
    check_pit(pit)
    check_same(levels=levels)
    check_shape("levels", levels, ("K",), "one per level")
    inside = (pit.flatten() - 0.5).abs() <= levels.unsqueeze(-1) / 2
    return inside.to(pit.dtype).mean(-1)


class Dispersion(NamedTuple):
    """12 Var(pit), which is one if predictions are right, and its distance in standard errors."""

    ratio: float
    z_score: float


def dispersion(pit: Values) -> Dispersion:
    """12 mean (pit - 1/2)^2: above one, predictions are too narrow; below one, too wide.

    For uniform values the mean of 12 (pit - 1/2)^2 is 1 and its variance 4/5.
    """
    check_pit(pit)
    ratio = float(12 * (pit - 0.5).square().mean())
    return Dispersion(ratio, (ratio - 1) / math.sqrt(0.8 / pit.numel()))


def chi_square_p_value(
    counts: Float[Tensor, "*batch bins"] | Int[Tensor, "*batch bins"],
) -> Float[Tensor, "*batch"]:
    """P(chi^2 with bins - 1 degrees of freedom >= the statistic), for equally likely bins."""
    check_tensor("counts", counts)
    check_has_values("counts", counts)
    check_shape("counts", counts, ("bins",), "one per bin")
    if counts.is_complex() or counts.shape[-1] < 2 or not bool((counts >= 0).all()):
        raise ValueError("`counts` must hold two bins or more of real numbers, none negative.")
    counts = counts.double()
    if not bool((0 < counts.sum(-1)).all() and counts.sum(-1).isfinite().all()):
        raise ValueError("`counts` must have a positive and finite sum.")
    expected = counts.mean(-1, keepdim=True)
    statistic = ((counts - expected).square() / expected).sum(-1)
    half = torch.full_like(statistic, (counts.shape[-1] - 1) / 2)
    return torch.special.gammaincc(half, statistic / 2)
