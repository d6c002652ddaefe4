"""Have Markov chains mixed, and what are their draws worth? Split r-hat and effective sample size.

Every chain is first cut into halves, so that a chain that drifts disagrees with itself (Vehtari et
al., 2021). Draws are `(chains, draws, *event)`; results have the shape of the event.
"""

import math

import torch
from torch import Tensor

from pyro_dak.annotations import Float

__all__ = ["effective_sample_size", "split_r_hat"]


def split_r_hat(draws: Float[Tensor, "chains draws *event"]) -> Float[Tensor, "*event"]:
    """sqrt(((n - 1) / n W + B / n) / W), with variances W within and B / n between half-chains.

    It is one if all half-chains have the same distribution, and infinite if no draw ever moves.
    """
    within, total = _variances(_split(draws))
    return torch.where(within > 0, (total / within).sqrt(), math.inf)


def effective_sample_size(draws: Float[Tensor, "chains draws *event"]) -> Float[Tensor, "*event"]:
    """S / (1 + 2 sum_t rho_t), with the autocorrelations rho_t of the half-chains.

    The sum is over pairs rho_2t + rho_2t+1. It ends before the first negative pair, and pairs are
    made to decrease (Geyer, 1992). Antithetic chains may be worth more than their S draws, but not
    more than S log10 S. The result is zero if no draw ever moves.
    """
    halves = _split(draws)
    m, n = halves.shape[:2]
    within, total = _variances(halves)
    centred = halves - halves.mean(1, keepdim=True)
    spectrum = torch.fft.rfft(centred, 2 * n, dim=1).abs().square().mean(0)
    covariance = torch.fft.irfft(spectrum, 2 * n, dim=0)[:n] / n  # at all lags, (n, *event)
    rho = 1 - (within - covariance * n / (n - 1)) / torch.where(total > 0, total, 1.0)
    rho = torch.cat([torch.ones_like(rho[:1]), rho[1:]])
    pairs = rho[: n // 2 * 2].unflatten(0, (-1, 2)).sum(1)
    is_before_cut = (pairs > 0).cumprod(0)
    decreasing = pairs.cummin(0).values * is_before_cut
    tau = (2 * decreasing.sum(0) - 1).clamp(min=1 / math.log10(max(m * n, 11)))
    return torch.where(total > 0, m * n / tau, 0.0)


def _split(draws: Tensor) -> Tensor:
    """The halves of the chains as chains, without the middle draw if their number is odd."""
    half = draws.shape[1] // 2
    return torch.cat([draws[:, :half], draws[:, -half:]])


def _variances(chains: Tensor) -> tuple[Tensor, Tensor]:
    """The variance within chains, W, and that of all draws, (n - 1) / n W + B / n."""
    n = chains.shape[1]
    within = chains.var(1).mean(0)
    return within, (n - 1) / n * within + chains.mean(1).var(0)
