"""Are the probabilities right? Curves and tests from probability integral transforms and ranks."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = [
    "ReliabilityCurve",
    "chi_square_p_value",
    "coverage_curve",
    "dispersion",
    "gaussian_pit",
    "rank_pit",
    "reliability_curve",
    "uniformity_p_value",
]


def gaussian_pit(
    y: Float[Tensor, "*shape"], mean: Float[Tensor, "*shape"], var: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Phi((y - mean) / sqrt(var)): uniform on (0, 1) if y ~ N(mean, var)."""
    return torch.special.ndtr((y - mean) / var.sqrt())


def rank_pit(
    y: Float[Tensor, "*shape"],
    draws: Float[Tensor, "s *shape"],
    generator: torch.Generator | None = None,
) -> Float[Tensor, "*shape"]:
    """(#{draws < y} + U (1 + #{draws = y})) / (S + 1) with U uniform.

    Uniform on (0, 1), exactly, if y and the draws have one distribution, discrete or not.
    """
    u = torch.rand(y.shape, generator=generator, dtype=y.dtype).to(y.device)
    below, same = (draws < y).sum(0), (draws == y).sum(0)
    return (below + u * (1 + same)) / (len(draws) + 1)


def coverage_curve(
    pit: Float[Tensor, "*shape"], levels: Float[Tensor, " k"]
) -> Float[Tensor, " k"]:
    """Share of y inside the central interval of each level: |pit - 1/2| <= level / 2."""
    inside = (pit.flatten() - 0.5).abs() <= levels.unsqueeze(-1) / 2
    return inside.to(pit.dtype).mean(-1)


class Dispersion(NamedTuple):
    """12 Var(pit), one if calibrated, and its distance from one in standard errors."""

    ratio: float
    z_score: float


def dispersion(pit: Float[Tensor, "*shape"]) -> Dispersion:
    """12 mean (pit - 1/2)^2: above one, predictions are too narrow; below, too wide.

    For uniform values the mean of 12 (pit - 1/2)^2 is 1 and its variance 4/5.
    """
    ratio = float(12 * (pit - 0.5).square().mean())
    return Dispersion(ratio, (ratio - 1) / math.sqrt(0.8 / pit.numel()))


class ReliabilityCurve(NamedTuple):
    """Of the bins of the confidence that are not empty: mean confidence, accuracy, rows."""

    confidence: Tensor
    accuracy: Tensor
    num_rows: Tensor


def reliability_curve(
    y: Int[Tensor, " n"], probs: Float[Tensor, "n c"], num_bins: int = 10
) -> ReliabilityCurve:
    """Accuracy against confidence in equal-width bins (b / B, (b + 1) / B]."""
    confidence, label = probs.max(-1)
    bins = (confidence * num_bins).ceil().long().sub(1).clamp(0, num_bins - 1)
    zeros = probs.new_zeros(num_bins)
    count = zeros.index_add(0, bins, torch.ones_like(confidence))
    hits = zeros.index_add(0, bins, (label == y).to(probs.dtype))
    sums = zeros.index_add(0, bins, confidence)
    kept = count > 0
    return ReliabilityCurve(sums[kept] / count[kept], hits[kept] / count[kept], count[kept].long())


def chi_square_p_value(
    counts: Float[Tensor, "*batch bins"] | Int[Tensor, "*batch bins"],
) -> Float[Tensor, "*batch"]:
    """P(chi^2 with bins - 1 degrees of freedom >= the statistic), for equally likely bins."""
    counts = counts.double()
    expected = counts.mean(-1, keepdim=True)
    statistic = ((counts - expected).square() / expected).sum(-1)
    half = torch.full_like(statistic, (counts.shape[-1] - 1) / 2)
    return torch.special.gammaincc(half, statistic / 2)


def uniformity_p_value(values: Float[Tensor, "*shape"], num_bins: int = 20) -> float:
    """p-value of the chi-square test that values in [0, 1] are uniform."""
    counts = torch.histc(values.double().flatten(), num_bins, 0.0, 1.0)
    return float(chi_square_p_value(counts))
