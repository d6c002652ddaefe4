"""Have Markov chains mixed, and what are their draws worth? Split r-hat and effective sample size.

Every chain is cut into halves first, so that one that drifts disagrees with itself (Vehtari et al.,
2021). Draws are `(chains, draws, *event)`, results like the event.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["effective_sample_size", "split_r_hat"]


def split_r_hat(draws: Float[Tensor, "chains draws *event"]) -> Float[Tensor, "*event"]:
    """sqrt(((n - 1) / n W + B / n) / W), of variances within (W) and between (B / n) half-chains.

    One if all have the same distribution; infinite where no draw ever moves.
    """
    halves = _split(draws)
    n = halves.shape[1]
    within = halves.var(1).mean(0)
    total = (n - 1) / n * within + halves.mean(1).var(0)
    return torch.where(within > 0, (total / within).sqrt(), math.inf)


def effective_sample_size(draws: Float[Tensor, "chains draws *event"]) -> Float[Tensor, "*event"]:
    """S / (1 + 2 sum_t rho_t) with the autocorrelations of the half-chains, summed while positive.

    Pairs rho_2t + rho_2t+1 are cut off at the first that is negative and made to decrease (Geyer,
    1992). Antithetic chains may be worth more than their S draws, but not more than S log10 S. Zero
    where no draw ever moves.
    """
    halves = _split(draws)
    m, n = halves.shape[:2]
    within = halves.var(1).mean(0)
    total = (n - 1) / n * within + halves.mean(1).var(0)
    covariance = _autocovariance(halves).mean(0)  # (n, *event)
    rho = 1 - (within - covariance * n / (n - 1)) / torch.where(total > 0, total, 1.0)
    rho = torch.cat([torch.ones_like(rho[:1]), rho[1:]])
    pairs = rho[: n // 2 * 2].unflatten(0, (-1, 2)).sum(1)
    is_before_cut = (pairs > 0).cumprod(0)
    decreasing = pairs.cummin(0).values * is_before_cut
    tau = (2 * decreasing.sum(0) - 1).clamp(min=1 / math.log10(max(m * n, 11)))
    return torch.where(total > 0, m * n / tau, 0.0)


def _split(draws: Tensor) -> Tensor:
    """Halves of the chains as chains; the draw in the middle of an odd number is left out."""
    half = draws.shape[1] // 2
    return torch.cat([draws[:, :half], draws[:, -half:]])


def _autocovariance(chains: Tensor) -> Tensor:
    """(1 / n) sum_i (x_i - mean)(x_i+t - mean) at all lags t, `(chains, n, *event)`."""
    n = chains.shape[1]
    centred = chains - chains.mean(1, keepdim=True)
    spectrum = torch.fft.rfft(centred, 2 * n, dim=1).abs().square()
    return torch.fft.irfft(spectrum, 2 * n, dim=1)[:, :n] / n
