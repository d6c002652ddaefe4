"""Sums of terms: their hyper-parameters by evidence, their posterior, and which pairs to take.

A row of the design is 1, for the intercept, and the bases of all terms. For regression the
posterior is exact. For classes it is that of natural-gradient steps: the expected log-likelihood is
a quadratic around q, with gradient g and curvature k of each row, as if f + g / k had been observed
with variance 1 / k; steps and evidence are then those of regression. Hyper-parameters are at the
maximum of evidence times their priors.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import sparse
from scipy.optimize import minimize
from torch import Tensor

from pyro_dak.additive.gaussian import ExpectedDerivatives, FunctionMoments, sample_marginals
from pyro_dak.inference.regression import RegressionSums, evidence, linear_posterior
from pyro_dak.model.likelihoods import BernoulliLikelihood, CategoricalLikelihood, Likelihood
from pyro_dak.tables.predictive import Array
from pyro_dak.tables.terms import Column, PairTerm, Term

__all__ = ["Posterior", "Rows", "choose_pairs", "fit_classes", "fit_numbers"]

_CHUNK = 16_384
# Steps of the optimiser: those of regression, and those of classes between two changes of q.
_STEPS, _STEPS_OF_CLASSES = 300, 5
_ROUNDS, _LAST_STEPS, _TOLERANCE = 12, 50, 1e-4
# The standard deviation of the intercept of classes, and draws of f in their derivatives.
_INTERCEPT_SCALE, _NUM_DRAWS = 5.0, 32
# Mean and standard deviation of the log noise before the data are seen, and the least log noise,
# below which sums over rows are not exact enough.
_LOG_NOISE, _LEAST_LOG_NOISE = (math.log(0.3), 2.0), -5.0
# Logarithms of hyper-parameters stay between these, and are rounded, so that rounding errors of
# sums over rows do not show.
_BOUNDS, _DECIMALS = (-9.0, 6.0), 2
# Scales at which pairs are tried, the rows that they are tried on, and the least gain in nats.
_PAIR_SCALES, _PAIR_ROWS, _LEAST_GAIN = (0.05, 0.15, 0.5), 20_000, 0.5
_CANDIDATES = 4


class Rows(NamedTuple):
    """Rows by columns, `(N,)` each: numbers with NaN, or codes of categories; and their weights."""

    columns: list[Array]
    weights: Array

    def chunks(self) -> Iterator[tuple[slice, list[Array]]]:
        """Parts of the rows, and their columns."""
        for start in range(0, len(self.weights), _CHUNK):
            part = slice(start, start + _CHUNK)
            yield part, [column[part] for column in self.columns]


@dataclass(frozen=True)
class Posterior:
    """The sum of terms after the data: q(w_c) = N(mean_c, root_c^T root_c) for F functions.

    The first weight is the intercept, the others are those of the terms in their order.

    Attributes:
        terms: the terms.
        theta: the logarithms of their hyper-parameters, term by term, `(H,)`.
        mean: `(F, K)`.
        root: `(F, Z, K)`.
    """

    terms: list[Term]
    theta: Array
    mean: Array
    root: Array

    def parts(self) -> list[slice]:
        """Where the weights of each term are."""
        ends = np.cumsum([1, *(term.size for term in self.terms)])
        return [slice(*pair) for pair in pairwise(ends.tolist())]

    def own_theta(self) -> list[Array]:
        """The hyper-parameters of each term."""
        return _split(self.theta, self.terms)

    def means(self, columns: Sequence[Array]) -> Array:
        """The mean of f, `(N, F)`; much less work than its variance."""
        chunks = Rows(list(columns), np.ones(len(columns[0]))).chunks()
        return np.concatenate([_design(self.terms, chunk) @ self.mean.T for _, chunk in chunks])

    def moments(self, columns: Sequence[Array]) -> tuple[Array, Array]:
        """Mean and variance of f, `(N, F)` each."""
        variances = []
        for _, chunk in Rows(list(columns), np.ones(len(columns[0]))).chunks():
            phi = _design(self.terms, chunk)
            var = np.stack([np.square(phi @ root.T).sum(-1) for root in self.root], -1)
            for term, own in zip(self.terms, self.own_theta(), strict=True):
                var = var + term.lost_variance(chunk, own)[:, None]
            variances.append(var)
        return self.means(columns), np.concatenate(variances)

    def term_moments(self, index: int, columns: Sequence[Array]) -> tuple[Array, Array]:
        """Mean and standard deviation of a term, `(N, F)` each, at columns of the table.

        Only the columns of the term are looked at.
        """
        term, part = self.terms[index], self.parts()[index]
        phi = term.design(columns)
        mean = phi @ self.mean[:, part].T
        var = np.stack([np.square(phi @ root[:, part].T).sum(-1) for root in self.root], -1)
        return mean, np.sqrt(var + term.lost_variance(columns, self.own_theta()[index])[:, None])

    def draws(self, index: int, number: int, seed: int = 0) -> Array:
        """Draws of the weights of a term, `(S, F, size)`."""
        part = self.parts()[index]
        noise = np.random.default_rng(seed).standard_normal((number, *self.root.shape[:2]))
        return self.mean[:, part] + np.einsum("sfz,fzk->sfk", noise, self.root[:, :, part])


def _split(theta: Any, terms: Sequence[Term]) -> list[Any]:
    """The hyper-parameters of each term, from an array or a tensor of all."""
    ends = np.cumsum([0, *(len(term.priors) for term in terms)]).tolist()
    return [theta[start:end] for start, end in pairwise(ends)]


def _design(terms: Sequence[Term], columns: Sequence[Array]) -> sparse.csr_array:
    """The intercept and the bases of all terms, `(N, K)`."""
    ones = sparse.csr_array(np.ones((len(columns[0]), 1)))
    return sparse.hstack([ones, *(term.design(columns) for term in terms)], format="csr")


def _sums(rows: Rows, terms: Sequence[Term], y: Array, weights: Array) -> RegressionSums:
    """The sums of weighted rows over the whole design, in chunks."""
    gram: Any = 0.0
    projection: Any = 0.0
    for part, columns in rows.chunks():
        phi = _design(terms, columns)
        weighted = phi.multiply(weights[part, None]).tocsr()
        gram = gram + (weighted.T @ phi).toarray()
        projection = projection + weighted.T @ y[part]
    total = float(weights @ np.square(y))
    return RegressionSums(
        torch.from_numpy(gram), torch.from_numpy(projection), total, float(weights.sum())
    )


def _prior_of(terms: Sequence[Term], unit: float) -> tuple[Array, Array]:
    """Means and standard deviations of the logarithms of all hyper-parameters.

    `unit` is the size of the function, by which the prior of scales is multiplied.
    """
    priors = [prior for term in terms for prior in term.priors]
    means = np.array([p.mean + p.is_scale * math.log(unit) for p in priors])
    return means, np.array([p.std for p in priors])


def _maximise(
    terms: Sequence[Term],
    all_sums: Sequence[RegressionSums],
    theta: Array,
    log_noise: float | None,
    max_steps: int,
    unit: float = 1.0,
) -> tuple[Array, float]:
    """The hyper-parameters and the log noise at the maximum of the evidence times their priors.

    Several sums share the hyper-parameters, as functions of classes do. Without `log_noise` the
    noise is 1 and the sums hold the intercept, whose prior is normal.
    """
    means, stds = _prior_of(terms, unit)
    has_noise = log_noise is not None
    if log_noise is not None:
        means, stds = np.append(means, _LOG_NOISE[0]), np.append(stds, _LOG_NOISE[1])
        theta = np.append(theta, log_noise)
    first = [] if has_noise else [torch.full((1, 1), _INTERCEPT_SCALE, dtype=torch.float64)]

    def loss(x: Array) -> tuple[float, Array]:
        point = torch.from_numpy(x).requires_grad_()
        own = _split(point, terms)
        with torch.no_grad():
            roots = first + [term.root(part) for term, part in zip(terms, own, strict=True)]
        noise = math.exp(x[-1]) if has_noise else 1.0
        found = [evidence(sums, roots, noise) for sums in all_sums]
        covariances = [term.covariance(part) for term, part in zip(terms, own, strict=True)]
        by_blocks = [sum(blocks) for blocks in zip(*(e.by_blocks for e in found), strict=True)]
        pairs = zip(by_blocks[len(first) :], covariances, strict=True)
        torch.stack([(block * C).sum() for block, C in pairs]).sum().backward()
        gradient = np.zeros_like(x) if point.grad is None else point.grad.numpy().copy()
        gradient[-1] += sum(e.by_log_noise for e in found) if has_noise else 0.0
        z = (x - means) / stds
        return float(0.5 * z @ z) - sum(e.value for e in found), z / stds - gradient

    options = {"maxiter": max_steps, "maxcor": 20, "ftol": 1e-13, "gtol": 1e-6}
    bounds = [_BOUNDS] * len(theta)
    if has_noise:
        bounds[-1] = (_LEAST_LOG_NOISE, _BOUNDS[1])
    result = minimize(loss, theta, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    found = result.x.round(_DECIMALS)
    return (found[:-1], float(found[-1])) if has_noise else (found, 0.0)


def _roots(terms: Sequence[Term], theta: Array) -> list[Tensor]:
    own = _split(torch.from_numpy(theta), terms)
    return [term.root(part) for term, part in zip(terms, own, strict=True)]


def fit_numbers(
    rows: Rows, y: Array, terms: Sequence[Term], start: Posterior | None = None
) -> tuple[Posterior, float]:
    """The exact posterior of the terms for standardised targets `(N,)`, and the noise scale.

    The hyper-parameters start at those of `start`, for the terms that it has.
    """
    sums = _sums(rows, terms, y, rows.weights)
    inner = RegressionSums(sums.gram[1:, 1:], sums.projection[1:], sums.total, sums.num_rows)
    theta, log_noise = _maximise(terms, [inner], _first_theta(terms, start), _LOG_NOISE[0], _STEPS)
    noise = math.exp(log_noise)
    mean, root = linear_posterior(inner, _roots(terms, theta), noise)
    # The intercept has mean 0, because targets do, and variance s^2 / n.
    mean, root = torch.nn.functional.pad(mean, (1, 0)), torch.nn.functional.pad(root, (1, 0, 1, 0))
    root[0, 0] = noise / math.sqrt(sums.num_rows)
    return Posterior(list(terms), theta, mean.numpy()[None], root.numpy()[None]), noise


def _first_theta(terms: Sequence[Term], start: Posterior | None, unit: float = 1.0) -> Array:
    """The means of the priors, or the hyper-parameters of `start` for the terms that it has."""
    theta = _prior_of(terms, unit)[0]
    if start is not None:
        theta[: len(start.theta)] = start.theta
    return theta


def fit_classes(
    rows: Rows, labels: Array, num_classes: int, terms: Sequence[Term], start: Posterior | None
) -> tuple[Posterior, tuple[Array, Array]]:
    """The posterior of the log odds of labels 0 .. C - 1, and pseudo-targets of the rows.

    Two classes have one function, the log odds of the second; more classes have one each. The
    pseudo-targets are residuals g / k and curvatures k, `(N, F)` each.
    """
    likelihood: Likelihood
    F = 1 if num_classes == 2 else num_classes
    likelihood = BernoulliLikelihood() if F == 1 else CategoricalLikelihood()
    y = torch.from_numpy(labels.astype(np.float64)[:, None] if F == 1 else labels)
    unit = likelihood.prior_scale
    theta = _first_theta(terms, start, unit)
    posterior = _with_prior(terms, theta, F)
    for _ in range(_ROUNDS):
        before = theta
        for _ in range(3):
            posterior, all_sums, sites = _natural_step(rows, y, likelihood, posterior)
        theta, _ = _maximise(terms, all_sums, theta, None, _STEPS_OF_CLASSES, unit)
        posterior = Posterior(list(terms), theta, posterior.mean, posterior.root)
        if np.abs(theta - before).max() < 0.05:
            break
    for _ in range(_LAST_STEPS):
        old = posterior.mean
        posterior, _, sites = _natural_step(rows, y, likelihood, posterior)
        if np.abs(posterior.mean - old).max() < _TOLERANCE:
            break
    return posterior, sites


def _with_prior(terms: Sequence[Term], theta: Array, num_functions: int) -> Posterior:
    """The posterior before any row: the prior, with a hundredth of its scale.

    Near zero the expected curvature is largest, so that the first step is short.
    """
    first = torch.full((1, 1), _INTERCEPT_SCALE, dtype=torch.float64)
    root = 0.01 * torch.block_diag(first, *_roots(terms, theta)).mT.numpy()
    mean = np.zeros((num_functions, root.shape[1]))
    return Posterior(list(terms), theta, mean, np.repeat(root[None], num_functions, 0))


def _natural_step(
    rows: Rows, y: Tensor, likelihood: Likelihood, q: Posterior
) -> tuple[Posterior, list[RegressionSums], tuple[Array, Array]]:
    """q after a step, the sums of the pseudo-targets, and residuals and curvatures of the rows."""
    mean, var = q.moments(rows.columns)
    moments = FunctionMoments(torch.from_numpy(mean), torch.from_numpy(var))
    g, k = _derivatives(y, moments, likelihood)
    curvature = np.maximum(k.numpy(), 1e-10)
    residual = g.numpy() / curvature
    roots = [torch.full((1, 1), _INTERCEPT_SCALE, dtype=torch.float64), *_roots(q.terms, q.theta)]
    all_sums, means, all_roots = [], [], []
    for c in range(mean.shape[1]):
        weights = rows.weights * curvature[:, c]
        sums = _sums(rows, q.terms, mean[:, c] + residual[:, c], weights)
        found = linear_posterior(sums, roots, 1.0)
        step = (found.mean.numpy() - q.mean[c]) / likelihood.coupling
        all_sums.append(sums)
        means.append(q.mean[c] + step)
        all_roots.append(found.root.numpy())
    after = Posterior(q.terms, q.theta, np.stack(means), np.stack(all_roots))
    return after, all_sums, (residual, curvature)


def _derivatives(
    y: Tensor, moments: FunctionMoments, likelihood: Likelihood
) -> ExpectedDerivatives:
    """Expected gradient and curvature of log p(y | f) for each row, `(N, F)` each.

    Those of several classes, 1{y = c} - E p_c and E p_c (1 - p_c), are means over draws that all
    rows share, each with its mirror image, so that a row of weight two counts as two rows do.
    """
    if isinstance(likelihood, BernoulliLikelihood):
        return likelihood.expected_derivatives(y, moments)
    generator = torch.Generator().manual_seed(0)
    draws = sample_marginals(moments, _NUM_DRAWS, generator)
    p = torch.cat([draws, 2 * moments.mean - draws]).softmax(-1)
    one_hot = torch.nn.functional.one_hot(y, p.shape[-1])
    return ExpectedDerivatives(one_hot - p.mean(0), (p * (1 - p)).mean(0))


def choose_pairs(
    table: Sequence[Column],
    rows: Rows,
    residual: Array,
    precision: Array,
    candidates: Iterable[tuple[int, int]],
    number: int,
    num_knots: int,
) -> list[PairTerm]:
    """The pairs of columns whose terms say most about what other terms leave over.

    A candidate is worth the evidence that its term adds to residuals `(N, F)` which have these
    precisions, at the best of a few scales. The best one is taken, its posterior mean is subtracted
    from the residuals, and so on, until `number` are taken or none adds half a nat.
    """
    chosen: list[PairTerm] = []
    N = len(rows.weights)
    some = np.random.default_rng(0).permutation(N)[:_PAIR_ROWS] if N > _PAIR_ROWS else slice(None)
    columns = [Column(column.values[some], column.categories) for column in table]
    weights = rows.weights[some]
    residual, precision = residual[some].copy(), precision[some] * weights[:, None]
    precision *= rows.weights.sum() / weights.sum()
    terms = [PairTerm.of(pair, columns, weights, num_knots) for pair in candidates]
    values = [column.values for column in columns]
    found = [(*_gain(term, values, residual, precision), term) for term in terms]
    found = sorted(found, key=lambda entry: -entry[0])[: _CANDIDATES * number]
    while found and len(chosen) < number and found[0][0] > _LEAST_GAIN:
        _, fitted, best = found[0]
        chosen.append(best)
        residual -= fitted
        left = [term for _, _, term in found[1:]]
        found = [(*_gain(term, values, residual, precision), term) for term in left]
        found.sort(key=lambda entry: -entry[0])
    return chosen


def _gain(
    term: PairTerm, columns: Sequence[Array], residual: Array, precision: Array
) -> tuple[float, Array]:
    """The log evidence that a term adds, and its posterior mean at the rows, `(N, F)`."""
    phi = term.design(columns)
    all_sums = []
    for r, k in zip(residual.T, precision.T, strict=True):
        weighted = phi.multiply(k[:, None]).tocsr()
        gram, projection = (weighted.T @ phi).toarray(), weighted.T @ r
        sums = torch.from_numpy(gram), torch.from_numpy(projection), float(k @ r**2), 1.0
        all_sums.append(RegressionSums(*sums))
    theta = torch.tensor([prior.mean for prior in term.priors], dtype=torch.float64)
    best, best_roots = 0.0, None
    for scale in _PAIR_SCALES:
        theta[0] = math.log(scale)
        roots = [term.root(theta)]
        values = [evidence(sums, roots, 1.0).value + sums.total / 2 for sums in all_sums]
        if sum(values) > best:
            best, best_roots = sum(values), roots
    if best_roots is None:
        return 0.0, np.zeros_like(residual)
    fits = [phi @ linear_posterior(sums, best_roots, 1.0).mean.numpy() for sums in all_sums]
    return best, np.stack(fits, -1)
