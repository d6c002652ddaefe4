"""The terms of an additive model on the columns of a table: their bases and their priors.

A term of a column is a function of this column alone. It is written in a basis whose functions add
up to 1 at every value (a partition of unity), so that weights are values of the function:

- a column of numbers has hat functions at its knots, and one more function for a missing number;
- a column of categories has a function for each category, and one for all that training has not
  seen;
- a pair of columns has the products of the two bases, at fewer knots.

A row has two numbers in the hats of a column and four in those of a pair, so designs are sparse.

**Priors.** The values g at the knots of a column are a Gaussian process: a rough part, a Laplace
kernel of the rank u of a value, and a smooth part, a Matern kernel (3/2) of the standardised value
x; between knots it is linear. A straight line in x comes beside it:

    Cov(g_i, g_k) = a^2 exp(-|u_i - u_k| / l) + b^2 (1 + d) exp(-d),   d = sqrt(3) |x_i - x_k| / r,

with variance c^2 of the slope. The effects of categories, and those of a missing number, are
independent. The values of a pair have the product of two Laplace kernels of ranks.

**Centring.** Let v be the mean of the basis over the training rows. Since the basis adds up to 1,
(phi - v) g = phi J g with J = I - 1 v^T: the term without its mean over the training rows is the
same basis with the covariance J C J^T. Pairs lose their means over either column, too, so that
they hold only what the columns do not say by themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from pyro_dak.tables.predictive import Array

__all__ = [
    "CategoryTerm",
    "Column",
    "Hats",
    "Levels",
    "NumberTerm",
    "PairTerm",
    "Term",
    "rank_knots",
]

# Added to the variance of each value of a smooth process, relative to it.
_JITTER = 1e-6


class Column(NamedTuple):
    """A column as numbers: values with NaN for missing ones, or codes of categories from 0 on.

    The code of a category that is not known is -1. `categories` is None for numbers.
    """

    values: Array
    categories: list[str] | None = None


@dataclass(frozen=True)
class _Prior:
    """Where a logarithm of a hyper-parameter lies before the data are seen.

    Scales are in units of the function: the standard deviation of the target, or log odds.
    """

    mean: float
    std: float
    is_scale: bool = False


_SCALE = _Prior(np.log(0.3), 1.5, is_scale=True)
_SLOPE = _Prior(np.log(0.1), 1.5, is_scale=True)
_RANK_LENGTH = _Prior(np.log(0.5), 1.0)
_LENGTH = _Prior(np.log(2.0), 0.7)


def _measure(values: Array, weights: Array) -> tuple[Array, Array]:
    """The different values, sorted, and the place of each between 0 and 1.

    A place is the share of the measure below the value and half of that at the value. The measure
    is half that of the rows and half that of the different values, so that a value that most rows
    have leaves room for the others.
    """
    distinct, inverse = np.unique(values, return_inverse=True)
    shares = np.bincount(inverse, weights, minlength=len(distinct))
    shares = 0.5 * shares / shares.sum() + 0.5 / len(distinct)
    return distinct, np.cumsum(shares) - 0.5 * shares


def _known(values: Array, weights: Array) -> tuple[Array, Array]:
    """The numbers that are not missing, with shares of their weight; a zero if all are missing."""
    is_there = ~np.isnan(values)
    if not is_there.any():
        return np.zeros(1), np.ones(1)
    return values[is_there], weights[is_there] / weights[is_there].sum()


def rank_knots(values: Array, weights: Array, most: int) -> tuple[Array, Array]:
    """Knots `(M,)` and their ranks `(M,)`: all different values, or quantiles with both ends.

    A row of weight two counts as two rows do.
    """
    distinct, places = _measure(values, weights)
    if len(distinct) <= most:
        return distinct, places
    knots = np.interp(np.linspace(places[0], places[-1], most), places, distinct)
    knots = np.unique(np.concatenate([distinct[:1], knots[1:-1], distinct[-1:]]))
    return knots, np.interp(knots, distinct, places)


class Hats(NamedTuple):
    """The hats of a column of numbers and the place for a missing one: knots, and their ranks."""

    knots: Array
    ranks: Array

    @property
    def size(self) -> int:
        return len(self.knots) + 1

    def design(self, values: Array) -> sparse.csr_array:
        """The basis, `(N, M + 1)`; beyond the outer knots it is that of the nearest one."""
        M, N = len(self.knots), len(values)
        is_missing = np.isnan(values)
        inside = np.clip(np.where(is_missing, self.knots[0], values), self.knots[0], self.knots[-1])
        left = np.clip(np.searchsorted(self.knots, inside, side="right") - 1, 0, max(M - 2, 0))
        right = np.minimum(left + 1, M - 1)
        width = np.where(right > left, self.knots[right] - self.knots[left], 1.0)
        share = np.where(is_missing, 0.0, (inside - self.knots[left]) / width)
        left, right = np.where(is_missing, M, left), np.where(is_missing, M, right)
        return _rows([(left, 1 - share), (right, share)], N, self.size)

    def correlation(self, log_length: Tensor) -> Tensor:
        """The Laplace kernel of the ranks of the knots, and 1 for a missing number."""
        u = torch.from_numpy(self.ranks)
        kernel = (-(u[:, None] - u).abs() / log_length.exp()).exp()
        return torch.block_diag(kernel, torch.ones(1, 1, dtype=u.dtype))


class Levels(NamedTuple):
    """The functions of a column of categories: one for each, and one for the others."""

    categories: list[str]

    @property
    def size(self) -> int:
        return len(self.categories) + 1

    def design(self, codes: Array) -> sparse.csr_array:
        """The basis, `(N, number + 1)`."""
        places = np.where(codes < 0, len(self.categories), codes).astype(np.int64)
        return _rows([(places, np.ones(len(codes)))], len(codes), self.size)

    def correlation(self, log_length: Tensor) -> Tensor:
        """The effects of categories are independent."""
        return torch.eye(self.size, dtype=torch.float64)


Basis = Hats | Levels


def _rows(parts: Sequence[tuple[Array, Array]], N: int, size: int) -> sparse.csr_array:
    """A sparse matrix from the columns and values of each row."""
    columns = np.stack([columns for columns, _ in parts], -1)
    values = np.stack([values for _, values in parts], -1)
    starts = np.arange(N + 1) * len(parts)
    return sparse.csr_array((values.ravel(), columns.ravel(), starts), (N, size))


def _means(design: sparse.csr_array, weights: Array) -> Array:
    return (design.T @ weights) / weights.sum()


def _centring(means: Array) -> Tensor:
    """J = I - 1 v^T."""
    v = torch.from_numpy(means)
    return torch.eye(len(v), dtype=torch.float64) - v.expand(len(v), -1)


class Term:
    """A function of one column, or of two, in a basis with a Gaussian prior.

    `columns` are the numbers of its columns in the table, and `priors` are those of the logarithms
    of its hyper-parameters.
    """

    columns: tuple[int, ...]
    priors: tuple[_Prior, ...]

    @property
    def size(self) -> int:
        """The number of weights."""
        raise NotImplementedError

    def design(self, columns: Sequence[Array]) -> sparse.csr_array:
        """The basis at the rows of a table that is given by columns, `(N, size)`."""
        raise NotImplementedError

    def covariance(self, theta: Tensor) -> Tensor:
        """The prior covariance of the weights for these logarithms of hyper-parameters."""
        raise NotImplementedError

    def root(self, theta: Tensor) -> Tensor:
        """R with R R^T the covariance."""
        raise NotImplementedError

    def lost_variance(self, columns: Sequence[Array], theta: Array) -> Array:
        """The prior variance of the change from the nearest knot to values beyond all, `(N,)`."""
        return np.zeros(len(columns[self.columns[0]]))


@dataclass(frozen=True)
class NumberTerm(Term):
    """The term of a column of numbers: a line, and a process at the knots of its hats.

    The hyper-parameters are a, l, b, r and c, as in the docstring of the module. `loc` and `scale`
    standardise values, and `means` are those of the hats.
    """

    columns: tuple[int]
    hats: Hats
    loc: float
    scale: float
    means: Array

    priors = (_SCALE, _RANK_LENGTH, _SCALE, _LENGTH, _SLOPE)

    @classmethod
    def of(cls, index: int, values: Array, weights: Array, num_knots: int) -> "NumberTerm":
        """The term of a column with at most so many knots."""
        known, shares = _known(values, weights)
        hats = Hats(*rank_knots(known, shares, num_knots))
        size = max(float(np.abs(known).max()), 1e-300)
        loc = float(shares @ (known / size)) * size
        scale = float(np.sqrt(shares @ ((known - loc) / size) ** 2)) * size
        scale = scale if scale > 1e-12 * size else size
        return cls((index,), hats, loc, scale, _means(hats.design(values), weights))

    @property
    def size(self) -> int:
        return self.hats.size + 1

    def design(self, columns: Sequence[Array]) -> sparse.csr_array:
        values = columns[self.columns[0]]
        line = np.nan_to_num((values - self.loc) / self.scale, nan=0.0)[:, None]
        return sparse.hstack([sparse.csr_array(line), self.hats.design(values)], format="csr")

    def _process(self, theta: Tensor) -> Tensor:
        """The covariance of values at the knots and of the effect of a missing number."""
        a2, length, b2, smooth_length, c2 = (theta * theta.new_tensor([2, 1, 2, 1, 2])).exp()
        u = torch.from_numpy(self.hats.ranks)
        x = torch.from_numpy((self.hats.knots - self.loc) / self.scale)
        d = 3**0.5 * (x[:, None] - x).abs() / smooth_length
        kernel = a2 * (-(u[:, None] - u).abs() / length).exp() + b2 * (1 + d) * (-d).exp()
        missing = (a2 + b2 + c2).reshape(1, 1)
        noise = _JITTER * torch.eye(self.hats.size, dtype=u.dtype)
        return torch.block_diag(kernel, missing) + (a2 + b2) * noise

    def covariance(self, theta: Tensor) -> Tensor:
        J = _centring(self.means)
        slope = (2 * theta[4]).exp().reshape(1, 1)
        return torch.block_diag(slope, J @ self._process(theta) @ J.mT)

    def root(self, theta: Tensor) -> Tensor:
        process = _centring(self.means) @ torch.linalg.cholesky(self._process(theta))
        return torch.block_diag(theta[4].exp().reshape(1, 1), process)

    def lost_variance(self, columns: Sequence[Array], theta: Array) -> Array:
        """2 (C(0) - C(d)) at distance d from the outer knot; ranks go on as fast as on average."""
        values, knots = columns[self.columns[0]], self.hats.knots
        beyond = np.nan_to_num(np.maximum(knots[0] - values, values - knots[-1]), nan=0.0)
        d = np.maximum(beyond, 0) / self.scale
        a, length, b, smooth_length, _ = np.exp(theta)
        u = d * (self.scale / max(knots[-1] - knots[0], self.scale))
        r = 3**0.5 * d / smooth_length
        return -2 * a**2 * np.expm1(-u / length) + 2 * b**2 * (1 - (1 + r) * np.exp(-r))


@dataclass(frozen=True)
class CategoryTerm(Term):
    """The term of a column of categories, whose effects are independent; one hyper-parameter."""

    columns: tuple[int]
    levels: Levels
    means: Array

    priors = (_SCALE,)

    @classmethod
    def of(cls, index: int, column: Column, weights: Array) -> "CategoryTerm":
        """The term of a column."""
        assert column.categories is not None
        levels = Levels(column.categories)
        return cls((index,), levels, _means(levels.design(column.values), weights))

    @property
    def size(self) -> int:
        return self.levels.size

    def design(self, columns: Sequence[Array]) -> sparse.csr_array:
        return self.levels.design(columns[self.columns[0]])

    def covariance(self, theta: Tensor) -> Tensor:
        J = _centring(self.means)
        return (2 * theta[0]).exp() * (J @ J.mT)

    def root(self, theta: Tensor) -> Tensor:
        return theta[0].exp() * _centring(self.means)


@dataclass(frozen=True)
class PairTerm(Term):
    """What two columns say together and not each by itself.

    The hyper-parameters are the scale and the two lengths of ranks. `means` are those of the basis
    of either column and of their products.
    """

    columns: tuple[int, int]
    bases: tuple[Basis, Basis]
    means: tuple[Array, Array, Array]

    priors = (_SCALE, _RANK_LENGTH, _RANK_LENGTH)

    @classmethod
    def of(
        cls, indices: tuple[int, int], columns: Sequence[Column], weights: Array, num_knots: int
    ) -> "PairTerm":
        """The term of two columns with at most so many knots in each."""
        bases: list[Basis] = []
        designs: list[sparse.csr_array] = []
        for index in indices:
            values, categories = columns[index]
            if categories is None:
                bases.append(Hats(*rank_knots(*_known(values, weights), num_knots)))
            else:
                bases.append(Levels(categories))
            designs.append(bases[-1].design(values))
        products = _products(*designs)
        means = [_means(design, weights) for design in (*designs, products)]
        return cls(indices, (bases[0], bases[1]), (means[0], means[1], means[2]))

    @property
    def size(self) -> int:
        return self.bases[0].size * self.bases[1].size

    def design(self, columns: Sequence[Array]) -> sparse.csr_array:
        parts = zip(self.bases, self.columns, strict=True)
        return _products(*(basis.design(columns[index]) for basis, index in parts))

    def _factors(self, theta: Tensor, is_root: bool) -> Tensor:
        """The product of the centred covariances of the two columns, or of their roots."""
        factors = []
        for basis, means, log_length in zip(self.bases, self.means, theta[1:], strict=False):
            C, J = basis.correlation(log_length), _centring(means)
            factors.append(J @ torch.linalg.cholesky(C) if is_root else J @ C @ J.mT)
        return torch.kron(*factors)

    def covariance(self, theta: Tensor) -> Tensor:
        J = _centring(self.means[2])
        return (2 * theta[0]).exp() * (J @ self._factors(theta, is_root=False) @ J.mT)

    def root(self, theta: Tensor) -> Tensor:
        return theta[0].exp() * (_centring(self.means[2]) @ self._factors(theta, is_root=True))


def _products(first: sparse.csr_array, second: sparse.csr_array) -> sparse.csr_array:
    """The products of all functions of two bases, `(N, size_a size_b)`; rows of equal length."""
    N = first.shape[0]
    columns = [part.indices.reshape(N, -1).astype(np.int64) for part in (first, second)]
    values = [part.data.reshape(N, -1) for part in (first, second)]
    places = columns[0][:, :, None] * second.shape[1] + columns[1][:, None]
    products = values[0][:, :, None] * values[1][:, None]
    number = places[0].size if N else 0
    starts = np.arange(N + 1) * number
    shape = (N, first.shape[1] * second.shape[1])
    return sparse.csr_array((products.ravel(), places.ravel(), starts), shape)
