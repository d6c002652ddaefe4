"""Rows to train on: which of them are held out, and the settings that follow from their number."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["FEW_ROWS", "Rows", "default_batch_size", "default_epochs", "held_out_rows", "without"]

# With fewer rows than this, one held-out part is too small to calibrate on, so several are used.
FEW_ROWS = 2000
# More held-out rows than this would not improve the calibration.
_MAX_HELD_OUT = 5000


class Rows(NamedTuple):
    """Inputs `(N, D)`, targets, and how much each row counts: `(N,)`, or `(E, N)` by member."""

    x: Tensor
    y: Tensor
    weights: Tensor


def default_batch_size(num_rows: int) -> int:
    """128 rows for small tables, and up to 512 for large ones."""
    return 128 if num_rows < FEW_ROWS else 256 if num_rows < 10_000 else 512


def default_epochs(num_rows: int) -> int:
    """200 epochs up to 10,000 rows, then fewer with the square root of the rows; at least 10."""
    return max(10, min(200, round(200 * math.sqrt(10_000 / max(num_rows, 1)))))


def held_out_rows(
    num_rows: int, num_members: int, fraction: float, seed: int, overlap: bool = False
) -> Tensor:
    """The numbers of the rows that each member does not train on, `(E, n)`.

    The parts follow each other in a random order of the rows, and start again at its end. A part
    has at most 5,000 rows. With `overlap`, the last n // 2 rows of a part are the first rows of the
    next member's part, so that two members have not seen them.
    """
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
    n = min(max(1, round(fraction * num_rows)), num_rows - 1, _MAX_HELD_OUT)
    distance = n - n // 2 if overlap else n
    positions = torch.arange(num_members).unsqueeze(-1) * distance + torch.arange(n)
    return order[positions % num_rows]


def without(rows: Rows, held_out: Tensor) -> Rows:
    """Rows in which those held out from a member have weight zero for it.

    Rows that are held out from all members are left out.
    """
    weights = rows.weights.expand(len(held_out), -1).clone()  # (E, N)
    weights.scatter_(1, held_out, 0.0)
    keep = (weights > 0).any(0)
    return Rows(rows.x[keep], rows.y[keep], weights[:, keep])
