"""Predictive distributions of an ensemble, as numpy arrays in the units of the data."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import entr, ndtri, stdtrit

__all__ = [
    "ClassMixture",
    "StudentPrediction",
    "covering_scale",
    "fit_student",
    "mixture_factor",
    "student_log_density",
    "student_scale",
]

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class StudentPrediction:
    """What is known of y in each row, `(N,)` or `(N, C)`: Student-t, or normal if `df` is infinite.

    The variance is that of the mixture of the members, and splits into two parts. Intervals,
    quantiles, draws and densities are all those of the one distribution with this mean, variance
    and number of degrees of freedom.

    Attributes:
        mean: E y.
        epistemic: variance that more data could remove, the spread of the members included.
        aleatoric: variance of the noise.
        df: degrees of freedom, above 2.
    """

    mean: Array
    epistemic: Array
    aleatoric: Array
    df: float = math.inf

    @property
    def variance(self) -> Array:
        """Var y."""
        return self.epistemic + self.aleatoric

    @property
    def std(self) -> Array:
        """Standard deviation of y."""
        return np.sqrt(self.variance)

    @property
    def scale(self) -> Array:
        """Scale of the t distribution, std sqrt((df - 2) / df)."""
        return self.std * math.sqrt(1 - 2 / self.df)

    def quantile(self, q: float) -> Array:
        """The q-quantile of y."""
        if not 0 < q < 1:
            raise ValueError(f"`q` must lie strictly between 0 and 1; got {q}.")
        unit = ndtri(q) if math.isinf(self.df) else stdtrit(self.df, q)
        return self.mean + unit * self.scale

    def interval(self, level: float = 0.9) -> tuple[Array, Array]:
        """Lower and upper end of the central interval with probability `level`."""
        if not 0 < level < 1:
            raise ValueError(f"`level` must lie strictly between 0 and 1; got {level}.")
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def log_prob(self, y: Any) -> Array:
        """log density of y, like `mean`; its negative mean is the NLPD."""
        y = np.asarray(y, dtype=self.mean.dtype)
        if y.shape != self.mean.shape:
            raise ValueError(f"`y` must have shape {self.mean.shape}; got {y.shape}.")
        return student_log_density((y - self.mean) / self.scale, self.df) - np.log(self.scale)

    def sample(self, num_samples: int, random_state: int | None = None) -> Array:
        """Draws of y, `(S, *mean.shape)`, independent over rows."""
        rng = np.random.default_rng(random_state)
        shape = (num_samples, *self.mean.shape)
        is_normal = math.isinf(self.df)
        noise = rng.standard_normal(shape) if is_normal else rng.standard_t(self.df, shape)
        return self.mean + self.scale * noise


def student_log_density(r: Array, df: float) -> Array:
    """log density of the standard t distribution at r; normal if `df` is infinite."""
    if math.isinf(df):
        return -0.5 * (math.log(2 * math.pi) + r**2)
    norm = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(math.pi * df)
    return norm - 0.5 * (df + 1) * np.log1p(r**2 / df)


# Degrees of freedom that a fit chooses among.
_TAILS = (2.5, 3.0, 4.0, 5.0, 7.0, 10.0, 20.0, math.inf)


def student_scale(r: Array, df: float) -> float:
    """Scale^2 of the t distribution with `df` degrees of freedom under which r is most probable.

    The fixed point s^2 = mean((df + 1) r^2 / (df + r^2 / s^2)), which outliers cannot carry away.
    """
    squares = np.square(r).ravel()
    s2 = max(float(squares.mean()), 1e-12)
    for _ in range(0 if math.isinf(df) else 100):
        s2 = max(float(((df + 1) * squares / (df + squares / s2)).mean()), 1e-12)
    return s2


def fit_student(r: Array) -> tuple[float, float]:
    """Scale^2 and degrees of freedom, of a few, of the t under which r is most probable."""
    best = (-math.inf, 1.0, math.inf)
    for df in _TAILS:
        s2 = student_scale(r, df)
        log_density = student_log_density(r / math.sqrt(s2), df).mean() - 0.5 * math.log(s2)
        best = max(best, (float(log_density), s2, df))
    return best[1], best[2]


def mixture_factor(y: Array, mean: Array, var: Array, overlap: int, df: float, size: int) -> float:
    """By how much the squared scale of a mixture is to be multiplied, at most 1.

    With q the variance between members over the squared error of one of them, the mean of E members
    has squared error 1 - (1 - 1/E) q in units of that of one, while the variance of a mixture of
    members as wide as their own errors is 1 + (1 - 1/E) q: too wide. Rows that two members have
    not seen show q: half the mean square of the difference of their means.

    Args:
        y: targets of held-out rows, `(E, n, C)`.
        mean: of each member there.
        var: squared scale of each member's prediction there, calibrated.
        overlap: the last so many rows of a member are the first of the next.
        df: degrees of freedom of the predictions.
        size: members of the mixture.
    """
    if overlap == 0 or size == 1:
        return 1.0
    last, first = (slice(None, -1), slice(-overlap, None)), (slice(1, None), slice(overlap))
    pair_mean, pair_var = (np.stack((part[last], part[first])) for part in (mean, var))
    error = student_scale((y[last] - pair_mean) / np.sqrt(pair_var), df)
    difference = (pair_mean[0] - pair_mean[1]) / np.sqrt(2 * pair_var.mean(0))
    q = (1 - 1 / size) * min(student_scale(difference, df) / error, 1.0)
    return (1 - q) / (1 + q)


def covering_scale(r: Array, df: float, level: float = 0.95) -> float:
    """Least scale^2 with which central t intervals of this level cover that share of r.

    The share is counted with one more residual, larger than all, as in conformal prediction.
    """
    sizes = np.sort(np.abs(r).ravel())
    rank = min(math.ceil(level * (len(sizes) + 1)), len(sizes)) - 1
    tail = (1 + level) / 2
    unit = ndtri(tail) if math.isinf(df) else stdtrit(df, tail)
    return float((sizes[rank] / unit) ** 2)


@dataclass(frozen=True)
class ClassMixture:
    """Class probabilities `(N, K)`, averaged over members, and how sure they are.

    Attributes:
        probs: probabilities, in the order of the estimator's `classes_`.
        expected_entropy: entropy that stays if the weights were known, `(N,)`, in nats.
    """

    probs: Array
    expected_entropy: Array

    @property
    def entropy(self) -> Array:
        """Entropy of the probabilities, `(N,)`, in nats."""
        return entr(self.probs).sum(-1)

    @property
    def mutual_information(self) -> Array:
        """What the posterior does not know, entropy minus expected entropy, `(N,)`, in nats."""
        return self.entropy - self.expected_entropy
