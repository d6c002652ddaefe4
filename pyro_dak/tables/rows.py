"""Rows of tables: chunks, scales, defaults by their number, and parts that are held out."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "FEW_ROWS",
    "Array",
    "Rows",
    "chunks",
    "default_batch_size",
    "default_epochs",
    "held_out_rows",
    "scales",
    "without",
]

Array = np.ndarray[Any, np.dtype[Any]]

# With fewer rows than this, one held-out part is too small to calibrate on: several are used.
FEW_ROWS = 2000
# Rows at a time, and how many numbers of q(f) they may have.
_CHUNK, _CHUNK_NUMBERS = 8192, 1_000_000
# More held-out rows than this would not calibrate better.
_MAX_HELD_OUT = 5000


class Rows(NamedTuple):
    """Inputs `(N, D)`, targets, and how much each row counts: `(N,)`, or `(E, N)` by member."""

    x: Tensor
    y: Tensor
    weights: Tensor


def chunks(num_rows: int, numbers_per_row: int = 1) -> list[slice]:
    """Slices that cover the rows, shorter where a row has many numbers."""
    size = max(64, min(_CHUNK, _CHUNK_NUMBERS // numbers_per_row))
    return [slice(start, start + size) for start in range(0, num_rows, size)]


def scales(values: Array, weights: Array) -> tuple[Array, Array]:
    """Weighted mean and standard deviation of every column; 1 where a column is constant."""
    total = weights.sum()
    mean = np.einsum("n,nd->d", weights, values, dtype=np.float64) / total
    var = np.zeros(values.shape[1])
    for rows in chunks(len(values)):
        var += np.einsum("n,nd->d", weights[rows], (values[rows] - mean) ** 2)
    scale = np.sqrt(var / total)
    is_constant = scale <= 1e-12 * np.maximum(np.abs(mean), 1e-300)
    return mean, np.where(is_constant, 1.0, scale)


def default_batch_size(num_rows: int) -> int:
    """128 rows for small tables, more where there are more."""
    return 128 if num_rows < FEW_ROWS else 256 if num_rows < 10_000 else 512


def default_epochs(num_rows: int) -> int:
    """200 up to 10,000 rows, then fewer, so that the number of steps grows slowly; at least 10."""
    return max(10, min(200, round(200 * math.sqrt(10_000 / max(num_rows, 1)))))


def held_out_rows(
    num_rows: int, num_members: int, fraction: float, seed: int, overlap: bool = False
) -> Tensor:
    """Row numbers that each member does not train on, `(E, n)`.

    The parts follow each other in a random order of the rows, and start over at its end. No part
    has more than 5,000 rows. With `overlap` the last n // 2 rows of a part are the first of the
    next member's: two members have not seen them.
    """
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
    n = min(max(1, round(fraction * num_rows)), num_rows - 1, _MAX_HELD_OUT)
    distance = n - n // 2 if overlap else n
    positions = torch.arange(num_members).unsqueeze(-1) * distance + torch.arange(n)
    return order[positions % num_rows]


def without(rows: Rows, held_out: Tensor) -> Rows:
    """Rows for each member without those held out from it; those held out from all are dropped."""
    weights = rows.weights.expand(len(held_out), -1).clone()  # (E, N)
    weights.scatter_(1, held_out, 0.0)
    keep = (weights > 0).any(0)
    return Rows(rows.x[keep], rows.y[keep], weights[:, keep])
