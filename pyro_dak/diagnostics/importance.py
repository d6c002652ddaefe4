"""Pareto-smoothed importance sampling: how far draws from one density stand for another.

The tail of the importance ratios is fitted by a generalized Pareto distribution (Vehtari et al.,
2024). Its shape k-hat says how heavy the tail is: below 0.5 the ratios have finite variance, above
0.7 no reasonable number of draws is enough.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["SmoothedWeights", "fit_pareto", "pareto_smooth"]


class SmoothedWeights(NamedTuple):
    """Normalised log weights `(..., S)` with their largest ones smoothed, and k-hat `(...)`."""

    log_weights: Tensor
    k_hat: Tensor


def pareto_smooth(
    log_ratios: Float[Tensor, "*batch s"], efficiency: float = 1.0, tolerance: float = 1e-8
) -> SmoothedWeights:
    """Smooth the largest ratios by the order statistics of a generalized Pareto fit to them.

    The tail has min(S / 5, 3 sqrt(S / efficiency)) ratios, rounded up.

    Args:
        log_ratios: log p - log q at S draws from q, up to a constant; NaN nowhere.
        efficiency: effective over actual number of draws, for Markov chains.
        tolerance: ratios whose logarithms spread by no more than this are constant: q is p, there
            is no tail, and k-hat is minus infinity.

    Returns:
        Weights that sum to one. k-hat is plus infinity where the tail has fewer than five draws or
        holds ratios that are infinite or the same.
    """
    S = log_ratios.shape[-1]
    if bool(torch.isnan(log_ratios).any()):
        raise ValueError("`log_ratios` must not be NaN; look for draws with an undefined density.")
    shifted = log_ratios - log_ratios.amax(-1, keepdim=True)
    spread = -shifted.amin(-1)
    size = min(math.ceil(min(S / 5, 3 * math.sqrt(S / efficiency))), S - 1)
    if size < 5:
        k_hat = torch.full_like(spread, math.inf)
        smoothed = shifted
    else:
        values, order = shifted.sort(-1)
        cutoff = values[..., -size - 1 : -size].exp()  # the largest ratio below the tail
        exceedances = values[..., -size:].exp() - cutoff
        k_hat, sigma = fit_pareto(exceedances)
        quantiles = _pareto_quantiles(size, k_hat, sigma) + cutoff
        is_fit = torch.isfinite(k_hat).unsqueeze(-1)
        tail = torch.where(is_fit, quantiles.log().clamp(max=0), values[..., -size:])
        smoothed = values.new_empty(values.shape).scatter(
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
    of b is averaged over a grid whose spacing is its prior (Zhang and Stephens, 2009); k is then
    drawn towards 1/2 with the weight of ten draws. k is infinite where the exceedances are not
    positive and finite in their upper three quarters.
    """
    n = exceedances.shape[-1]
    quartile = exceedances[..., int(n / 4 + 0.5) - 1]
    largest = exceedances[..., -1]
    is_valid = (quartile > 0) & torch.isfinite(largest) & (largest > quartile)
    x = torch.where(is_valid.unsqueeze(-1), exceedances, _like_exponential(exceedances))
    size = 30 + int(math.sqrt(n))
    steps = torch.arange(1, size + 1, dtype=x.dtype, device=x.device)
    scale = 1 - (size / (steps - 0.5)).sqrt()
    b = scale / (3 * x[..., int(n / 4 + 0.5) - 1, None]) + 1 / x[..., -1:]  # (..., G)
    k = torch.log1p(-b.unsqueeze(-1) * x.unsqueeze(-2)).mean(-1)
    profile = n * ((-b / k).log() - k - 1)
    weights = profile.softmax(-1)
    b_mean = (weights * b).sum(-1)
    k_mean = torch.log1p(-b_mean.unsqueeze(-1) * x).mean(-1)
    k_hat = (n * k_mean + 5) / (n + 10)
    return torch.where(is_valid, k_hat, math.inf), -k_mean / b_mean


def _like_exponential(like: Tensor) -> Tensor:
    """A sample that can be fitted, in the place of one that cannot."""
    n = like.shape[-1]
    levels = (torch.arange(n, dtype=like.dtype, device=like.device) + 0.5) / n
    return -torch.log1p(-levels).expand_as(like)


def _pareto_quantiles(n: int, k: Tensor, sigma: Tensor) -> Tensor:
    """Quantiles at (i - 1/2) / n, sigma ((1 - p)^-k - 1) / k, `(..., n)`."""
    levels = (torch.arange(n, dtype=sigma.dtype, device=sigma.device) + 0.5) / n
    k, sigma = k.unsqueeze(-1), sigma.unsqueeze(-1)
    log_tail = -torch.log1p(-levels)
    safe = torch.where((k.abs() > 1e-12) & torch.isfinite(k), k, 1.0)
    powers = torch.expm1(safe * log_tail) / safe
    return sigma * torch.where(k.abs() > 1e-12, powers, log_tail)
