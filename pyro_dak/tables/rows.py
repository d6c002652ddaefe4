"""Rows to train on: which of them are held out, and the settings that follow from their number."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_dak.training.parquet import mixed_bits

__all__ = [
    "FEW_ROWS",
    "Rows",
    "default_batch_size",
    "default_epochs",
    "default_fraction",
    "effective_number",
    "held_out_rows",
    "rows_kept_apart",
    "share_kept_apart",
    "without",
]

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


def default_fraction(num_rows: float) -> float:
    """A fifth of the rows of small tables is held out from each member, and a tenth of others."""
    return 0.2 if num_rows < FEW_ROWS else 0.1


def effective_number(weights: Tensor) -> float:
    """How many rows of equal weight say as much: (sum w)^2 / sum w^2. Their scale is irrelevant."""
    weights = weights.double() / weights.max().double()
    return float(weights.sum().square() / weights.square().sum())


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


def share_kept_apart(num_rows: int, fraction: float) -> float:
    """The share of the rows for `rows_kept_apart`: `fraction`, but about 5 to 5,000 rows."""
    return min(max(fraction, 5 / num_rows), _MAX_HELD_OUT / num_rows)


def rows_kept_apart(rows: Rows, share: float, seed: int) -> Tensor:
    """The numbers of about this share of the rows, chosen by what stands in them, `(n,)`.

    A row is chosen, or not, whatever the other rows are and in whatever order they come. So with
    the same seed, rows that were kept apart once are kept apart ever after. Of several equal rows
    each is chosen by its own.
    """
    columns = torch.cat([part.reshape(len(part), -1).double() for part in rows[:2]], 1)
    code = np.full(len(columns), seed, dtype=np.uint64)
    for column in columns.cpu().numpy().T:
        code = mixed_bits(code ^ np.ascontiguousarray(column).view(np.uint64))
    order = np.argsort(code, kind="stable")
    is_new = np.append(True, np.diff(code[order]) != 0)
    positions = np.arange(len(code))
    copy_number = np.empty_like(code)
    copy_number[order] = positions - np.maximum.accumulate(np.where(is_new, positions, 0))
    uniform = mixed_bits(code ^ mixed_bits(copy_number)) / 2.0**64
    return torch.from_numpy(np.flatnonzero(uniform < share))
