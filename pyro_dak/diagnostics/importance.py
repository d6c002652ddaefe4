"""Pareto-smoothed importance sampling: how well draws from one density q stand for another, p.

The tail of the importance ratios p / q is fitted by a generalized Pareto distribution (Vehtari et
al., 2024). Its shape, k-hat, says how heavy the tail is: below 0.5 the ratios have finite variance;
above 0.7 no reasonable number of draws is enough.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_dak.annotations import Float

__all__ = ["SmoothedWeights", "fit_pareto", "pareto_smooth"]


class SmoothedWeights(NamedTuple):
    """Normalised log weights `(..., S)` of which the largest are smoothed, and k-hat `(...)`."""

    log_weights: Tensor
    k_hat: Tensor


def pareto_smooth(
    log_ratios: Float[Tensor, "*batch s"], efficiency: float = 1.0, tolerance: float = 1e-8
) -> SmoothedWeights:
    """Importance weights whose largest values are replaced by quantiles of a fitted distribution.

    The tail has min(S / 5, 3 sqrt(S / efficiency)) ratios, rounded up.

    Args:
        log_ratios: log p - log q at S draws from q, up to a constant.
        efficiency: effective over actual number of draws, for Markov chains.
        tolerance: if the log ratios differ by no more than this, they are taken as constant: q is
            p, there is no tail, and k-hat is minus infinity.

    Returns:
        Weights that sum to one. k-hat is plus infinity if the tail has fewer than five draws, or
        if its ratios are infinite or all the same.
    """
    S = log_ratios.shape[-1]
    if bool(torch.isnan(log_ratios).any()):
        raise ValueError("`log_ratios` must not be NaN; look for draws with an undefined density.")
    shifted = log_ratios - log_ratios.amax(-1, keepdim=True)
    spread = -shifted.amin(-1)
    size = min(math.ceil(min(S / 5, 3 * math.sqrt(S / efficiency))), S - 1)
    k_hat, smoothed = torch.full_like(spread, math.inf), shifted
    if size >= 5:
        values, order = shifted.sort(-1)
        cutoff = values[..., -size - 1 : -size].exp()  # the largest ratio below the tail
        k_hat, sigma = fit_pareto(values[..., -size:].exp() - cutoff)
        quantiles = _pareto_quantiles(size, k_hat, sigma) + cutoff
        is_fit = torch.isfinite(k_hat).unsqueeze(-1)
        tail = torch.where(is_fit, quantiles.log().clamp(max=0), values[..., -size:])
        smoothed = torch.empty_like(values).scatter(
            -1, order, torch.cat([values[..., :-size], tail], -1)
        )
    is_constant = spread <= tolerance
    k_hat = torch.where(is_constant, -math.inf, k_hat)
    smoothed = torch.where(is_constant.unsqueeze(-1), shifted, smoothed)
    return SmoothedWeights(smoothed - smoothed.logsumexp(-1, keepdim=True), k_hat)


def fit_pareto(
    exceedances: Float[Tensor, "*batch n"],
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """Shape k and scale sigma of a generalized Pareto distribution, from its sorted draws.

    The density is (1 + k x / sigma)^(-1/k - 1) / sigma. With b = -k / sigma, the profile likelihood
    of b is averaged over a grid whose spacing is its prior (Zhang and Stephens, 2009). Then k is
    moved towards 1/2 with the weight of ten draws. k is infinite, and sigma has no meaning, unless
    the upper three quarters of the exceedances are positive, finite and not all the same.
    """
    x, n = exceedances, exceedances.shape[-1]
    quartile, largest = x[..., int(n / 4 + 0.5) - 1], x[..., -1]
    is_valid = (quartile > 0) & torch.isfinite(largest) & (largest > quartile)
    size = 30 + int(math.sqrt(n))
    steps = torch.arange(1, size + 1, dtype=x.dtype, device=x.device)
    spacing = 1 - (size / (steps - 0.5)).sqrt()
    b = spacing / (3 * quartile.unsqueeze(-1)) + 1 / largest.unsqueeze(-1)  # (..., G)
    k = torch.log1p(-b.unsqueeze(-1) * x.unsqueeze(-2)).mean(-1)
    profile = n * ((-b / k).log() - k - 1)
    b_mean = (profile.softmax(-1) * b).sum(-1)
    k_mean = torch.log1p(-b_mean.unsqueeze(-1) * x).mean(-1)
    k_hat = (n * k_mean + 5) / (n + 10)
    return torch.where(is_valid, k_hat, math.inf), -k_mean / b_mean


def _pareto_quantiles(n: int, k: Tensor, sigma: Tensor) -> Tensor:
    """Quantiles at (i - 1/2) / n, sigma ((1 - p)^-k - 1) / k, `(..., n)`."""
    levels = (torch.arange(n, dtype=sigma.dtype, device=sigma.device) + 0.5) / n
    k, log_tail = k.unsqueeze(-1), -torch.log1p(-levels)
    powers = torch.where(k.abs() > 1e-12, torch.expm1(k * log_tail) / k, log_tail)
    return sigma.unsqueeze(-1) * powers
