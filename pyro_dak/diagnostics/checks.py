"""Checks of one posterior against its data: k-hat, leave-one-out, predictive checks, PIT."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_dak.diagnostics.calibration import gaussian_pit, rank_pit
from pyro_dak.diagnostics.importance import SmoothedWeights, pareto_smooth
from pyro_dak.inference.densities import (
    cached_inputs,
    checked_data,
    log_joint,
    log_likelihood,
    predictive_draws,
    response,
)
from pyro_dak.inference.draws import Draws, Posterior, as_guide, draw_posterior, has_closed_form
from pyro_dak.model.dak import DAK
from pyro_dak.model.likelihoods import CategoricalLikelihood, GaussianLikelihood

__all__ = [
    "LeaveOneOut",
    "PredictiveCheck",
    "guide_weights",
    "k_hat",
    "loo",
    "pit_values",
    "posterior_predictive_check",
]

StatisticFn = Callable[[Tensor], Tensor]


def k_hat(
    model: DAK,
    guide: Posterior,
    x: Tensor,
    y: Tensor,
    *,
    num_samples: int = 4000,
    seed: int | None = 0,
) -> float:
    """Pareto k-hat of p(y, w) / q(w) at draws w of a guide: is q close enough to the posterior?

    Below 0.5 it is, above 0.7 it is not: expectations under q cannot be mended by weights. The
    exact posterior has constant weights and gets minus infinity, a point mass plus infinity.
    """
    x, y = checked_data(model, x, y)
    if as_guide(guide) is None:
        raise TypeError(
            f"`guide` must have a density q; got {type(guide).__name__}. Samples of a Markov chain "
            "are judged by r-hat and by `loo`."
        )
    h = cached_inputs(model, x)
    draws = draw_posterior(model, guide, num_samples=num_samples, x=x, seed=seed)
    return float(guide_weights(model, h, y.to(h.device), draws).k_hat)


def guide_weights(model: DAK, h: Tensor, y: Tensor, draws: Draws) -> SmoothedWeights:
    """Smoothed importance weights `(S,)` of the draws of a guide, and their k-hat."""
    flat = draws.flat()
    assert draws.log_q is not None
    smoothed = pareto_smooth(log_joint(model, h, y, flat) - draws.log_q.flatten())
    k_hat = torch.full_like(smoothed.k_hat, math.inf) if draws.is_point else smoothed.k_hat
    return smoothed._replace(k_hat=k_hat)


class LeaveOneOut(NamedTuple):
    """Expected log predictive density of each row without itself, `(N,)`, and its k-hat `(N,)`.

    `elpd` is their sum, `se` its standard error over rows, `num_effective` the effective number of
    parameters, in-sample minus left-out density. A row with k-hat above 0.7 is not reliable.
    """

    elpd: float
    se: float
    num_effective: float
    pointwise: Tensor
    k_hat: Tensor

    @property
    def num_bad(self) -> int:
        """Rows with k-hat above 0.7."""
        return int((self.k_hat > 0.7).sum())


@torch.no_grad()
def loo(
    model: DAK,
    posterior: Posterior,
    x: Tensor,
    y: Tensor,
    *,
    num_samples: int = 4000,
    efficiency: float = 1.0,
    seed: int | None = 0,
    chunk_size: int = 256,
) -> LeaveOneOut:
    """Leave-one-out cross-validation of the last layer by Pareto-smoothed importance sampling.

    Row n is left out by weights 1 / p(y_n | w); for a guide they are times p(y, w) / q(w), which
    corrects for the guide not being the posterior (Magnusson et al., 2019). The network has seen
    all rows: this is the density of new rows only as far as the features have not fitted them.

    Args:
        model: the model.
        posterior: a guide, an exact posterior, an MCMC run, or a dictionary of samples.
        x: inputs that the posterior was made from, `(N, ...)`.
        y: their targets.
        num_samples: draws from a guide.
        efficiency: effective over actual number of draws, for Markov chains.
        seed: of the draws from a guide.
        chunk_size: rows at a time.
    """
    x, y = checked_data(model, x, y)
    h = cached_inputs(model, x)
    y = y.to(h.device)
    draws = draw_posterior(model, posterior, num_samples=num_samples, x=x, seed=seed)
    log_lik = log_likelihood(model, h, y, draws.flat()).mT  # (N, S)
    S = log_lik.shape[-1]
    ratios = log_lik.new_zeros(S)
    log_weights = log_lik.new_full((S,), -math.log(S))
    if draws.log_q is not None:
        ratios = log_joint(model, h, y, draws.flat()) - draws.log_q.flatten()
        log_weights = guide_weights(model, h, y, draws).log_weights
    parts = [pareto_smooth(ratios - rows, efficiency) for rows in log_lik.split(chunk_size)]
    left_out = torch.cat([part.log_weights for part in parts])
    pointwise = (left_out + log_lik).logsumexp(-1)
    in_sample = (log_weights + log_lik).logsumexp(-1).sum()
    total = float(pointwise.sum())
    se = math.sqrt(len(pointwise) * float(pointwise.var(correction=0)))
    k = torch.cat([part.k_hat for part in parts])
    return LeaveOneOut(total, se, float(in_sample) - total, pointwise, k)


@torch.no_grad()
def pit_values(
    model: DAK,
    posterior: Posterior,
    x: Tensor,
    y: Tensor,
    *,
    num_samples: int = 1000,
    seed: int = 0,
) -> Tensor:
    """P(y_new <= y) under the predictive distribution, `(N, C)`: uniform if it is right.

    In closed form for Gaussian noise and a Gaussian guide, else the rank of y among predictive
    draws with ties broken at random. For classes, which have no order, use `reliability_curve`.
    """
    if isinstance(model.likelihood, CategoricalLikelihood):
        raise NotImplementedError(
            "Classes have no order, and so no PIT. Use "
            "`pyro_dak.diagnostics.calibration.reliability_curve`."
        )
    x, y = checked_data(model, x, y)
    h = cached_inputs(model, x)
    y = y.to(h.device)
    draws = draw_posterior(model, posterior, num_samples=num_samples, x=x, seed=seed)
    is_gaussian = isinstance(model.likelihood, GaussianLikelihood)
    if is_gaussian and has_closed_form(as_guide(posterior), model):
        mean, sd, noise_var = response(model, posterior, h, draws)
        return gaussian_pit(y, mean, sd.square() + noise_var)
    with torch.random.fork_rng():
        torch.manual_seed(seed + 1)
        y_new = predictive_draws(model, h, draws.flat())
    return rank_pit(y, y_new, torch.Generator().manual_seed(seed + 2))


class PredictiveCheck(NamedTuple):
    """A statistic of the observed y, of the replicated ones `(S,)`, and P(replicated >= observed).

    A p-value near 0 or 1 says that data like these would surprise the model.
    """

    observed: float
    replicated: Tensor
    p_value: float


def _skewness(y: Tensor) -> Tensor:
    centred = y - y.mean(-1, keepdim=True)
    return centred.pow(3).mean(-1) / centred.square().mean(-1).pow(1.5)


STATISTICS: dict[str, StatisticFn] = {
    "mean": lambda y: y.mean(-1),
    "sd": lambda y: y.std(-1),
    "min": lambda y: y.amin(-1),
    "max": lambda y: y.amax(-1),
    "skewness": _skewness,
}


@torch.no_grad()
def posterior_predictive_check(
    model: DAK,
    posterior: Posterior,
    x: Tensor,
    y: Tensor,
    *,
    statistics: Mapping[str, StatisticFn] | None = None,
    num_samples: int = 1000,
    seed: int = 0,
) -> dict[str, PredictiveCheck]:
    """Compare statistics of y with those of data sets replicated by the posterior.

    Args:
        model: the model.
        posterior: a guide, an exact posterior, an MCMC run, or a dictionary of samples.
        x: inputs, `(N, ...)`.
        y: targets.
        statistics: functions of the values of one output, `(..., N)` to `(...)`, by name; by
            default mean, sd, min, max and skewness, and for classes the share of each.
        num_samples: draws from a guide.
        seed: of the draws.

    Returns:
        A check by the name of its statistic; with several outputs "name[output]".
    """
    x, y = checked_data(model, x, y)
    h = cached_inputs(model, x)
    draws = draw_posterior(model, posterior, num_samples=num_samples, x=x, seed=seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed + 1)
        y_new = predictive_draws(model, h, draws.flat())
    y = y.to(h.device)
    if isinstance(model.likelihood, CategoricalLikelihood):
        C = model.num_outputs
        y, y_new = (torch.nn.functional.one_hot(v, C).double() for v in (y, y_new))
        statistics = {"share": lambda v: v.mean(-1)} if statistics is None else statistics
    checks = {}
    for name, statistic_fn in (STATISTICS if statistics is None else statistics).items():
        for c in range(y.shape[-1]):
            label = name if y.shape[-1] == 1 else f"{name}[{c}]"
            checks[label] = _check(statistic_fn(y[:, c]), statistic_fn(y_new[..., c]))
    return checks


def _check(observed: Tensor, replicated: Tensor) -> PredictiveCheck:
    above, same = replicated > observed, replicated == observed
    p_value = float(above.double().mean() + 0.5 * same.double().mean())
    return PredictiveCheck(float(observed), replicated, p_value)
