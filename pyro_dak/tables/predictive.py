"""Predictive distributions of an ensemble, as numpy arrays in the units of the data.

The functions at the end calibrate them: they find the scale and the tails of predictions from the
residuals of rows that were held out.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats
from scipy.special import entr

from pyro_dak.prediction.results import NoveltyScores, WithNovelty
from pyro_dak.validation import check_probability

__all__ = [
    "Array",
    "ClassMixture",
    "StudentPrediction",
    "calibrate",
    "covering_scale",
    "fit_student",
    "mixture_factor",
]

Array = np.ndarray[Any, np.dtype[Any]]

# The degrees of freedom that `fit_student` chooses from.
_TAILS = (2.5, 3.0, 4.0, 5.0, 7.0, 10.0, 20.0, math.inf)
# From this many residuals on, tails may be normal.
_MANY = 40


@dataclass(frozen=True)
class StudentPrediction(WithNovelty):
    """The predictive distribution of y in each row, `(N,)` or `(N, C)`.

    It is a Student-t distribution, or a normal one if `df` is infinite. Its variance is that of the
    mixture of the members and has two parts. Intervals, quantiles, draws and densities all belong
    to this one distribution.

    Attributes:
        mean: E y.
        epistemic: the variance that more data could remove, with the variance between members.
        aleatoric: the variance of the noise.
        df: the degrees of freedom, above 2.
    """

    mean: Array
    epistemic: Array
    aleatoric: Array
    df: float = math.inf
    novelty_scores: NoveltyScores | None = None

    @property
    def variance(self) -> Array:
        """Var y."""
        return self.epistemic + self.aleatoric

    @property
    def std(self) -> Array:
        """The standard deviation of y."""
        return np.sqrt(self.variance)

    @property
    def scale(self) -> Array:
        """The scale of the t distribution, std sqrt((df - 2) / df)."""
        return self.std * math.sqrt(1 - 2 / self.df)

    def quantile(self, q: float) -> Array:
        """The q-quantile of y."""
        check_probability("q", q)
        return self._distribution().ppf(q)

    def interval(self, level: float = 0.9) -> tuple[Array, Array]:
        """The lower and the upper end of the central interval with probability `level`."""
        check_probability("level", level)
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def cdf(self, y: Any) -> Array:
        """The probability of values up to y. If predictions are right, it is uniform over rows."""
        return self._distribution().cdf(self._checked(y))

    def log_prob(self, y: Any) -> Array:
        """The log density of y, in the shape of `mean`; its negative mean is the NLPD."""
        return self._distribution().logpdf(self._checked(y))

    def _distribution(self) -> Any:
        loc_scale = self.mean, self.scale
        return stats.norm(*loc_scale) if math.isinf(self.df) else stats.t(self.df, *loc_scale)

    def _checked(self, y: Any) -> Array:
        y = np.asarray(y, dtype=self.mean.dtype)
        if y.shape != self.mean.shape:
            raise ValueError(f"`y` must have shape {self.mean.shape}; got {y.shape}.")
        return y

    def sample(self, num_samples: int, random_state: int | None = None) -> Array:
        """Draws of y, `(S, *mean.shape)`, independent over rows."""
        rng = np.random.default_rng(random_state)
        return self._distribution().rvs((num_samples, *self.mean.shape), random_state=rng)


@dataclass(frozen=True)
class ClassMixture(WithNovelty):
    """Class probabilities `(N, K)`, averaged over members, and how certain they are.

    Attributes:
        probs: the probabilities, in the order of the estimator's `classes_`.
        expected_entropy: the entropy that would remain if the weights were known, `(N,)`, in nats.
    """

    probs: Array
    expected_entropy: Array
    novelty_scores: NoveltyScores | None = None

    @property
    def entropy(self) -> Array:
        """The entropy of the probabilities, `(N,)`, in nats."""
        return entr(self.probs).sum(-1)

    @property
    def mutual_information(self) -> Array:
        """The part of the entropy that is due to unknown weights, `(N,)`, in nats."""
        return self.entropy - self.expected_entropy


def calibrate(
    y: Array,
    mean: Array,
    var: Array,
    size: int,
    weights: Array | None = None,
    overlap: int | None = None,
) -> tuple[float, float, float]:
    """The squared scale, the degrees of freedom and the `mixture_factor` of predictions.

    Given are the targets of held-out rows, `(E, n, ...)`, the mean and the variance of each
    member's predictions there, the number of members of the mixture, and how much each row counts,
    `(E, n)`; by default all the same. Scale and tails are those under which the residuals are most
    probable. The scale of a single member is raised, if necessary, until its 95 % intervals cover
    95 % of these rows. The scale of several members is lowered, because their mean has smaller
    errors. The last `overlap` rows of a member are the first rows of the next member; by default
    half of them.
    """
    residuals = (y - mean) / np.sqrt(var)
    scale, df = fit_student(residuals, weights)
    if size == 1:
        scale = max(scale, covering_scale(residuals, df, weights=weights))
    overlap = y.shape[1] // 2 if overlap is None else overlap
    return scale, df, mixture_factor(y, mean, scale * var, overlap, df, size, weights)


def fit_student(r: Array, weights: Array | None = None) -> tuple[float, float]:
    """Squared scale and degrees of freedom of the t distribution under which r is most probable.

    There are at most as many degrees of freedom as there are residuals, unless these are many:
    a normal distribution whose scale is known from n residuals only predicts by a t with n degrees.
    """
    shares = _shares(r, weights)
    best = (-math.inf, 1.0, math.inf)
    for df in _TAILS:
        if df > max(_TAILS[0], _number(shares)) and _number(shares) < _MANY:
            continue
        s2 = _squared_scale(r, df, shares)
        log_density = float(np.sum(shares * stats.t.logpdf(r, df, scale=math.sqrt(s2))))
        best = max(best, (log_density, s2, df))
    return best[1], best[2]


def covering_scale(r: Array, df: float, level: float = 0.95, weights: Array | None = None) -> float:
    """The least squared scale with which central t intervals of this level cover that share of r.

    The share is counted as if there were one more residual, larger than all others, as in
    conformal prediction.
    """
    sizes, shares = np.abs(r).ravel(), _shares(r, weights).ravel()
    order = np.argsort(sizes, kind="stable")
    covered = np.cumsum(shares[order]) * (1 + 1e-12)  # sums of shares are rounded
    number = _number(shares)
    index = int(np.searchsorted(covered, level * (number + 1) / number))
    size = sizes[order[min(index, len(order) - 1)]]
    return float((size / stats.t.ppf((1 + level) / 2, df)) ** 2)


def mixture_factor(
    y: Array,
    mean: Array,
    var: Array,
    overlap: int,
    df: float,
    size: int,
    weights: Array | None = None,
) -> float:
    """The factor, at most 1, of the squared scale of a mixture of members.

    Let q be the variance between members, divided by the squared error of one of them. The mean of
    E members has the squared error 1 - (1 - 1/E) q, in units of that of one member. If every member
    is as wide as its own errors, their mixture has variance 1 + (1 - 1/E) q, which is too wide.
    Rows that two members have not seen show q: it is half the mean squared difference of the two
    means.

    The arguments are those of `calibrate`, except that `var` is the squared scale of each member,
    calibrated. The last `overlap` rows of a member are the first rows of the next member.
    """
    if overlap == 0 or size == 1:
        return 1.0
    last, first = (slice(None, -1), slice(-overlap, None)), (slice(1, None), slice(overlap))
    pair_mean, pair_var = (np.stack((part[last], part[first])) for part in (mean, var))
    shares = _shares(y[last], None if weights is None else weights[last])
    pair_shares = np.stack((shares, shares)) / 2
    error = _squared_scale((y[last] - pair_mean) / np.sqrt(pair_var), df, pair_shares)
    difference = (pair_mean[0] - pair_mean[1]) / np.sqrt(2 * pair_var.mean(0))
    q = (1 - 1 / size) * min(_squared_scale(difference, df, shares) / error, 1.0)
    return (1 - q) / (1 + q)


def _shares(r: Array, weights: Array | None) -> Array:
    """How much each residual counts, in the shape of r `(E, n, ...)`; the sum is 1."""
    if weights is None:
        return np.full(r.shape, 1 / r.size)
    shares = np.broadcast_to(weights.reshape(weights.shape + (1,) * (r.ndim - 2)), r.shape)
    return shares / shares.sum()


def _number(shares: Array) -> float:
    """How many residuals with equal shares say as much as these."""
    return float(1 / np.square(shares).sum())


def _squared_scale(r: Array, df: float, shares: Array) -> float:
    """The squared scale of the t distribution with these tails under which r is most probable.

    It is the fixed point s^2 = mean((df + 1) r^2 / (df + r^2 / s^2)), which is robust to outliers.
    """
    squares = np.square(r)
    s2 = max(float(np.sum(shares * squares)), 1e-12)
    for _ in range(0 if math.isinf(df) else 100):
        s2 = max(float(np.sum(shares * ((df + 1) * squares / (df + squares / s2)))), 1e-12)
    return s2
