"""Predictive distributions of an ensemble, as numpy arrays in the units of the data.

The functions at the end calibrate them: they find the scale and the tails of predictions from the
residuals of rows that were held out.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy import stats
from scipy.special import betaln, entr

from pyro_dak.prediction.results import NoveltyScores, WithNovelty
from pyro_dak.validation import check_probability

__all__ = [
    "Array",
    "Calibration",
    "ClassMixture",
    "StudentPrediction",
    "calibrate",
    "covering_scale",
    "fit_members",
    "fit_student",
    "mixture_factor",
]

Array = np.ndarray[Any, np.dtype[Any]]

# The degrees of freedom that `fit_student` chooses from.
_TAILS = (2.1, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0, 20.0, math.inf)
# From this many residuals on, tails may be normal.
_MANY = 40
# Members have scales of their own if equal ones would give such differences this rarely.
_CLEAR = 0.99


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

    def crps(self, y: Any) -> Array:
        """The continuous ranked probability score of y, in the shape and the units of `mean`.

        With r = (y - mean) / scale, and F and p the distribution function and the density of a
        standard t with df degrees of freedom, it is scale times

            r (2 F(r) - 1) + 2 p(r) (df + r^2) / (df - 1)
            - 2 sqrt(df) / (df - 1) B(1/2, df - 1/2) / B(1/2, df/2)^2,

        where B is the beta function. For a normal distribution the last two terms are 2 p(r) and
        -1 / sqrt(pi).
        """
        df, r = self.df, (self._checked(y) - self.mean) / self.scale
        if math.isinf(df):
            rest = 2 * stats.norm.pdf(r) - 1 / math.sqrt(math.pi)
            return self.scale * (r * (2 * stats.norm.cdf(r) - 1) + rest)
        spread = math.exp(betaln(0.5, df - 0.5) - 2 * betaln(0.5, df / 2))
        rest = 2 * stats.t.pdf(r, df) * (df + r**2) - 2 * math.sqrt(df) * spread
        return self.scale * (r * (2 * stats.t.cdf(r, df) - 1) + rest / (df - 1))

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


class Calibration(NamedTuple):
    """What makes predictions as wide as the errors of held-out rows.

    Attributes:
        scale: the factor of the squared scale of every member; the geometric mean over members.
        df: the degrees of freedom of the t distribution.
        mixture_factor: the factor of the squared scale of the mixture.
        member_factors: each member's own factor beside `scale`, E numbers with geometric mean 1;
            None if the members that predict are not those that were calibrated.
    """

    scale: float
    df: float
    mixture_factor: float
    member_factors: list[float] | None


def calibrate(
    y: Array,
    mean: Array,
    var: Array,
    size: int,
    weights: Array | None = None,
    overlap: int | None = None,
    is_refit: bool = True,
) -> Calibration:
    """The scale and the tails of a mixture of `size` members, from rows they were not trained on.

    Given are the targets of held-out rows, `(E, n, ...)`, the mean and the variance of each
    member's predictions there, and how much each row counts, `(E, n)`; by default all the same.
    The last `overlap` rows of a member are the first rows of the next member; by default half of
    them. With `is_refit` the members that predict are new ones, trained in the same way.

    A held-out row is predicted by the member that has not seen it, and a new row by the mixture,
    which errs less. So the width is found in three steps. First every member becomes as wide as its
    own errors: scale and tails are those under which its residuals are most probable (see
    `fit_members`, or `fit_student` for all members alike after a refit). Then `mixture_factor`
    takes away what the mean of the members gains over one of them, which rows that two members have
    not seen show. The most probable scale is that of most residuals, and where no t distribution
    fits, few may decide how many rows intervals miss. So the squared scale is then multiplied by
    the least number, at least 1, with which 95 % intervals of the members cover 95 % of their rows
    (`covering_scale`).
    """
    residuals = (y - mean) / np.sqrt(var)
    if is_refit or size == 1:
        common, df = fit_student(residuals, weights)
        scales = np.full(len(y), common)
    else:
        scales, df = fit_members(residuals, weights)
    overlap = y.shape[1] // 2 if overlap is None else overlap
    own = scales.reshape(-1, *(1,) * (y.ndim - 1))  # (E, 1, ...)
    factor = mixture_factor(y, mean, own * var, overlap, df, size, weights)
    factor *= max(1.0, covering_scale(residuals / np.sqrt(own), df, weights=weights))
    scale = float(np.exp(np.log(scales).mean()))
    return Calibration(scale, df, factor, None if is_refit else (scales / scale).tolist())


def fit_student(r: Array, weights: Array | None = None) -> tuple[float, float]:
    """Squared scale and degrees of freedom of the t distribution under which r is most probable.

    There are at most as many degrees of freedom as there are residuals, unless these are many:
    a normal distribution whose scale is known from n residuals only predicts by a t with n degrees.
    """
    shares = _shares(r, weights)
    scales, df = _most_probable(r, shares, lambda df: np.array(_squared_scale(r, df, shares)))
    return float(scales), df


def fit_members(r: Array, weights: Array | None = None) -> tuple[Array, float]:
    """Squared scales of the members, `(E,)`, and degrees of freedom, for residuals r `(E, n, ...)`.

    Members differ in how much too narrow they are. One scale for all would be too wide for most of
    them, and would take their differences for heavy tails. The scale of each alone would be known
    from few rows. So log s_e^2, the estimate of member e from n_e residuals, counts as normal
    around its true value, with variance v_e = 2 (1 + 3 / df) / n_e (the inverse of the Fisher
    information of a t distribution), and the true values as normal with variance tau^2 around a
    common one, c:

        log s_e^2 becomes c + tau^2 / (tau^2 + v_e) (log s_e^2 - c).

    tau^2 is what the estimates vary beyond their v_e (the estimator of DerSimonian and Laird). All
    scales are then multiplied by one number, so that the residuals in their units have scale 1
    under this t. Members have scales of their own only if equal scales, with the tails of
    `fit_student`, would show such differences in less than 1 % of cases; else the result is that of
    `fit_student`.
    """
    shares = _shares(r, weights)
    common, df = fit_student(r, weights)
    logs, v = _log_scales(r, df, shares)
    spread = np.sum((logs - np.average(logs, weights=1 / v)) ** 2 / v)
    if len(r) == 1 or spread < stats.chi2.ppf(_CLEAR, len(r) - 1):
        return np.full(len(r), common), df
    scales, df = _most_probable(r, shares, lambda df: _member_scales(r, df, shares))
    return scales.reshape(len(r)), df


def _member_scales(r: Array, df: float, shares: Array) -> Array:
    """The squared scales of `fit_members` for given tails, `(E, 1, ...)`."""
    logs, v = _log_scales(r, df, shares)
    spread = np.sum((logs - np.average(logs, weights=1 / v)) ** 2 / v) - (len(r) - 1)
    tau2 = max(0.0, spread / (np.sum(1 / v) - np.sum(v**-2) / np.sum(1 / v)))
    c = np.average(logs, weights=1 / (tau2 + v))
    factors = np.exp(tau2 / (tau2 + v) * (logs - c)).reshape(-1, *(1,) * (r.ndim - 1))
    return factors * _squared_scale(r / np.sqrt(factors), df, shares)


def _log_scales(r: Array, df: float, shares: Array) -> tuple[Array, Array]:
    """The log squared scale of each member's residuals, and its sampling variance, `(E,)` each."""
    own = [part / part.sum() for part in shares]
    logs = [math.log(_squared_scale(*pair)) for pair in zip(r, [df] * len(r), own, strict=True)]
    return np.array(logs), 2 * (1 + 3 / df) / np.array([_number(part) for part in own])


def _most_probable(
    r: Array, shares: Array, scales_fn: Callable[[float], Array]
) -> tuple[Array, float]:
    """The squared scales and the degrees of freedom under which the residuals are most probable."""
    best = (-math.inf, np.ones(()), math.inf)
    number = _number(shares)
    for df in _TAILS:
        if df > max(_TAILS[0], number) and number < _MANY:
            continue
        s2 = scales_fn(df)
        log_density = float(np.sum(shares * stats.t.logpdf(r, df, scale=np.sqrt(s2))))
        best = max(best, (log_density, s2, df), key=lambda found: found[0])
    return best[1], best[2]


def covering_scale(r: Array, df: float, level: float = 0.95, weights: Array | None = None) -> float:
    """The least squared scale with which central t intervals of this level cover that share of r.

    The share is counted as if there were one more residual, larger than all others, as in
    conformal prediction.
    """
    shares = _shares(r, weights)
    number = _number(shares)
    size = _quantile(np.abs(r), level * (number + 1) / number, shares)
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

    Let a new row have the error y - m_e under member e. Members are exchangeable there, so that
    E (y - m_e)^2 = A + B, and E (y - m_e)(y - m_k) = A for two of them: B is what is their own.
    The mean of E members has the squared error A + B / E. If every member is as wide as its own
    errors, A + B, the mixture has the variance A + B + (1 - 1/E) B, which is too wide, by

        factor_E = (1 - q_E) / (1 + q_E),   q_E = (1 - 1/E) B / (A + B) = 2 (1 - 1/E) q_2.

    Rows that two members have not seen show factor_2. It is s_2^2 / (s_1^2 (1 + b)): s_1^2 is the
    squared scale of the residuals of the two, each in its own units; s_2^2 is that of the residuals
    of their mean, in units of their average variance; and b is the variance between the two in the
    same units, B / (2 (A + B)), averaged over rows, of which the largest 2 % count no more than the
    next. Then q_2 = (1 - factor_2) / (1 + factor_2), at most 1/2, gives factor_E. As the units are
    those in which the mixture predicts, factor_2 also holds what else mixing changes, such as that
    an average of uncertain variances is too large.

    The arguments are those of `calibrate`, except that `var` is the squared scale of each member,
    calibrated. The last `overlap` rows of a member are the first rows of the next member.
    """
    if overlap == 0 or size == 1:
        return 1.0
    last, first = (slice(None, -1), slice(-overlap, None)), (slice(1, None), slice(overlap))
    pair_mean, pair_var = (np.stack((part[last], part[first])) for part in (mean, var))
    shares = _shares(y[last], None if weights is None else weights[last])
    own_residuals = (y[last] - pair_mean) / np.sqrt(pair_var)
    single = _squared_scale(own_residuals, df, np.stack((shares, shares)) / 2)
    average = pair_var.mean(0)
    between = pair_mean.var(0) / average
    between = np.minimum(between, _quantile(between, 0.98, shares))
    mixed = _squared_scale((y[last] - pair_mean.mean(0)) / np.sqrt(average), df, shares)
    mixed /= 1 + float(np.sum(shares * between))
    q = 2 * (1 - 1 / size) * min(max((single - mixed) / (single + mixed), 0.0), 0.5)
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


def _quantile(values: Array, level: float, shares: Array) -> float:
    """The least of the values below or at which this share of them lies; at most the largest."""
    order = np.argsort(values, axis=None, kind="stable")
    covered = np.cumsum(shares.ravel()[order]) * (1 + 1e-12)  # sums of shares are rounded
    index = int(np.searchsorted(covered, level))
    return float(values.ravel()[order[min(index, len(order) - 1)]])


def _squared_scale(r: Array, df: float, shares: Array) -> float:
    """The squared scale of the t distribution with these tails under which r is most probable.

    It is the fixed point s^2 = mean((df + 1) r^2 / (df + r^2 / s^2)), which is robust to outliers.
    """
    squares = np.square(r)
    s2 = max(float(np.sum(shares * squares)), 1e-12)
    for _ in range(0 if math.isinf(df) else 100):
        before = s2
        s2 = max(float(np.sum(shares * ((df + 1) * squares / (df + squares / s2)))), 1e-12)
        if abs(s2 - before) < 1e-12 * s2:
            break
    return s2
