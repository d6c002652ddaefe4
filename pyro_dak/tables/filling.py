"""Missing numbers: what stands in their place, and whether their being missing tells something.

What stands in their place is what the other numbers of the row say, in linear regressions.
With standardised numbers z, `(N, D)`, in which missing ones are 0, round t has a regression of each
column on all others, fitted to the rows in which this column is known:

    z^(0) = z,  z^(t) = z where known, z^(t-1) W_t elsewhere,  diag W_t = 0.

So the first round predicts from the known numbers alone, with coefficients that suit as many gaps
as there are, and the later ones see what was filled in before. The columns of W_t are those of a
ridge regression, whose prior counts as much as `_PRIOR_ROWS` rows. What is filled in stays within
the range of the known numbers of its column.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyro_dak.tables.predictive import Array

__all__ = ["Filling", "learn_filling", "tells_of_target"]

_NUM_ROUNDS, _PRIOR_ROWS = 3, 10.0
# Rows to learn from, and the most columns: a round solves D systems of D equations.
_MAX_ROWS, _MAX_COLUMNS = 20_000, 100
# How rarely one of all columns may be taken to tell of the target by chance.
_LEVEL = 0.01


@dataclass(frozen=True)
class Filling:
    """Regressions of D columns on each other.

    Attributes:
        loc: means of the columns, D.
        scale: their standard deviations, D.
        low: the least standardised numbers, D.
        high: the largest ones, D.
        weights: W_t, `(T, D, D)`.
    """

    loc: list[float]
    scale: list[float]
    low: list[float]
    high: list[float]
    weights: list[list[list[float]]]

    def __call__(self, x: Array) -> Array:
        """The numbers `(N, D)` with others in place of NaN."""
        is_missing = np.isnan(x)
        if not is_missing.any():
            return x
        loc, scale = np.asarray(self.loc), np.asarray(self.scale)
        known = np.where(is_missing, 0.0, (x - loc) / scale)
        z = known
        for W in self.weights:
            z = np.where(is_missing, np.clip(z @ np.asarray(W), self.low, self.high), known)
        return np.where(is_missing, loc + scale * z, x)

    def check(self, num_columns: int) -> None:
        """Raise a TypeError unless these are numbers for so many columns."""
        values: list[Any] = [self.loc, self.scale, self.low, self.high]
        D = num_columns
        try:
            parts = [np.asarray(value, dtype=np.float64) for value in (*values, self.weights)]
        except ValueError as error:
            raise TypeError(f"regressions of columns must be numbers: {error}") from error
        shapes = [(D,)] * 4 + [(len(self.weights), D, D)]
        if [part.shape for part in parts] != shapes or not all(np.isfinite(p).all() for p in parts):
            raise TypeError(f"regressions of columns must be finite numbers for {D} columns")
        if not (parts[1] > 0).all():
            raise TypeError("scales of columns must be positive")


def learn_filling(x: Array) -> Filling | None:
    """Regressions of the columns of numbers `(N, D)` on each other; None if nothing is missing.

    Also None for a single column, and for very many. Of many rows, evenly spaced ones are used.
    """
    D = x.shape[1]
    if not 2 <= D <= _MAX_COLUMNS or not np.isnan(x).any():
        return None
    x = x[:: -(-len(x) // _MAX_ROWS)]
    is_known = ~np.isnan(x)
    number = is_known.sum(0).clip(1)
    loc = np.where(is_known, x, 0.0).sum(0) / number
    centred = np.where(is_known, x - loc, 0.0)
    scale = np.sqrt(np.square(centred).sum(0) / number)
    scale[~(scale > 1e-12 * np.abs(loc)) | (number < 2)] = 1.0
    known = centred / scale
    z, weights = known, []
    for _ in range(_NUM_ROUNDS):
        W = np.zeros((D, D))
        for column in range(D):
            rows, others = is_known[:, column], np.arange(D) != column
            A = z[rows][:, others]
            gram = A.T @ A + _PRIOR_ROWS * np.eye(D - 1)
            W[others, column] = np.linalg.solve(gram, A.T @ known[rows, column])
        low, high = known.min(0), known.max(0)
        z = np.where(is_known, known, np.clip(z @ W, low, high))
        weights.append(W.tolist())
    return Filling(loc.tolist(), scale.tolist(), low.tolist(), high.tolist(), weights)


def tells_of_target(is_missing: Array, y: Array) -> list[bool]:
    """Whether it tells of the targets `(N, C)` that a number is missing, for `(N, D)` of them.

    A column tells of them if its indicator is correlated with one of them. The correlation of N
    independent rows is about N(0, 1 / N), and D C of them are looked at. An indicator that says
    nothing is worse than none: a network learns from it by heart.
    """
    number = is_missing.shape[1] * y.shape[1]
    with np.errstate(over="ignore", invalid="ignore"):  # of numbers whose squares are infinite
        u, t = (_standardized(np.asarray(part, dtype=np.float64)) for part in (is_missing, y))
    z = np.nan_to_num(np.abs(u.T @ t).max(1)) / math.sqrt(len(y))
    return [math.erfc(value / math.sqrt(2)) * number < _LEVEL for value in z]


def _standardized(values: Array) -> Array:
    """Columns with mean 0 and standard deviation 1, or zeros where they are constant."""
    centred = values - values.mean(0)
    scale = np.sqrt(np.square(centred).mean(0))
    return np.divide(centred, scale, out=np.zeros_like(centred), where=scale > 0)
