"""Class probabilities averaged over draws of functions, with one exponential for each number."""

import torch
from torch import Tensor

from pyro_dak.annotations import Float

__all__ = ["averaged_classes"]

# So many numbers are computed at a time, which fit the cache.
_MAX_NUMBERS = 2**16


def averaged_classes(
    draws: Float[Tensor, "s n c"],
) -> tuple[Float[Tensor, "n c"], Float[Tensor, "n"]]:
    """The mean of softmax(f) over S draws of f, and of its entropy.

    The twin of `additive.gaussian.class_averages`, with probabilities instead of their logarithms,
    so that they are zero where they are too small for the dtype. Classes are first in memory: sums
    over a few adjacent numbers are slow. With a = f - max f and Z = sum_c exp a_c the entropy is
    log Z - sum_c p_c a_c.
    """
    S, _, C = draws.shape
    rows = max(1, _MAX_NUMBERS // max(1, C))
    parts = [_of_rows(block) for block in draws.split(rows, 1)]
    probs, entropies = (torch.cat(part, -1) for part in zip(*parts, strict=True))
    return probs.mT / S, entropies / S


def _of_rows(draws: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over the draws: of probabilities `(C, N)`, and of entropies `(N,)`."""
    _, N, C = draws.shape
    probs, entropies = draws.new_zeros(C, N), draws.new_zeros(N)
    for block in draws.split(max(1, _MAX_NUMBERS // max(1, N * C))):
        a = block.permute(2, 0, 1).clone(memory_format=torch.contiguous_format)  # (C, s, N)
        a -= a.amax(0)
        p = a.exp()
        Z = p.sum(0)
        p /= Z
        probs += p.sum(1)
        entropies += (Z.log_() - a.mul_(p).sum(0)).sum(0)
    return probs, entropies
