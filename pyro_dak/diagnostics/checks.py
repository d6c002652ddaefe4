"""Checks of one posterior against its data: k-hat, leave-one-out, PIT values, predictive checks."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_dak.diagnostics.calibration import gaussian_pit, rank_pit
from pyro_dak.diagnostics.importance import pareto_smooth
from pyro_dak.diagnostics.posterior_moments import response
from pyro_dak.inference.densities import log_joint, log_likelihood, predictive_draws
from pyro_dak.inference.draws import Draws, Posterior, as_guide, draws_and_data, has_closed_form
from pyro_dak.model.dak import DAK
from pyro_dak.model.inputs import check_model
from pyro_dak.model.likelihoods import CategoricalLikelihood, GaussianLikelihood
from pyro_dak.model.rows import Inputs
from pyro_dak.validation import check_integer, check_kind, check_positive

__all__ = [
    "STATISTICS",
    "LeaveOneOut",
    "PredictiveCheck",
    "k_hat",
    "log_ratios",
    "loo",
    "pit_values",
    "posterior_predictive_check",
]

StatisticFn = Callable[[Tensor], Tensor]


def k_hat(
    model: DAK,
    guide: Posterior,
    x: Inputs,
    y: Tensor,
    *,
    num_samples: int = 4000,
    seed: int | None = 0,
) -> float:
    """Pareto k-hat of p(y, w) / q(w) at draws w from a guide: is q close to the posterior?

    Below 0.5 it is close enough. Above 0.7 it is not, and importance weights cannot correct
    expectations under q. The exact posterior has constant ratios and gets minus infinity; a point
    estimate gets plus infinity.
    """
    draws, h, y = draws_and_data(model, guide, x, y, num_samples=num_samples, seed=seed)
    if draws.log_q is None:
        raise TypeError(
            f"`guide` must have a density q; got {type(guide).__name__}. Judge the samples of a "
            "Markov chain by r-hat and by `loo`."
        )
    if draws.is_point:
        return math.inf
    return float(pareto_smooth(log_ratios(model, h, y, draws)).k_hat)


def log_ratios(model: DAK, h: Tensor, y: Tensor, draws: Draws) -> Tensor:
    """log p(y, w) - log q(w) at draws w from a guide, `(S,)`. Their mean estimates the ELBO."""
    assert draws.log_q is not None
    return log_joint(model, h, y, draws.flat()) - draws.log_q.flatten()


class LeaveOneOut(NamedTuple):
    """Log predictive density of each row when it is left out, `(N,)`, and its k-hat, `(N,)`.

    `elpd` is the sum of `pointwise` over rows and `se` the standard error of that sum.
    `num_effective`, the effective number of parameters, is the density with all rows minus `elpd`.
    A row with k-hat above 0.7 is not reliable.
    """

    elpd: float
    se: float
    num_effective: float
    pointwise: Tensor
    k_hat: Tensor

    def __repr__(self) -> str:
        return (
            f"LeaveOneOut(elpd {self.elpd:.2f}, se {self.se:.2f}, num_effective "
            f"{self.num_effective:.2f}; {len(self.k_hat)} rows, of which {self.num_bad} have a "
            "k-hat above 0.7)"
        )

    @property
    def num_bad(self) -> int:
        """Number of rows with k-hat above 0.7."""
        return int((self.k_hat > 0.7).sum())


@torch.no_grad()
def loo(
    model: DAK,
    posterior: Posterior,
    x: Inputs,
    y: Tensor,
    *,
    num_samples: int = 4000,
    efficiency: float = 1.0,
    seed: int | None = 0,
    chunk_size: int = 256,
) -> LeaveOneOut:
    """Leave-one-out cross-validation of the last layer by Pareto-smoothed importance sampling.

    Weights 1 / p(y_n | w) leave out row n. For a guide they are multiplied by p(y, w) / q(w), which
    corrects for the guide not being the posterior (Magnusson et al., 2019). The network has seen
    all rows: this is the density of new rows only if the features have not been fitted to the old.
    x `(N, ...)` and y are the rows that the posterior was made from.

    Args:
        num_samples: number of draws from a guide.
        efficiency: effective over actual number of draws, for Markov chains.
        chunk_size: number of rows that are treated at a time.
    """
    check_positive("efficiency", efficiency)
    check_integer("chunk_size", chunk_size, minimum=1)
    draws, h, y = draws_and_data(model, posterior, x, y, num_samples=num_samples, seed=seed)
    log_lik = log_likelihood(model, h, y, draws.flat()).mT  # (N, S)
    has_density = draws.log_q is not None
    ratios = log_ratios(model, h, y, draws) if has_density else torch.zeros_like(log_lik[0])
    log_weights = pareto_smooth(ratios).log_weights
    parts = [pareto_smooth(ratios - rows, efficiency) for rows in log_lik.split(int(chunk_size))]
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
    x: Inputs,
    y: Tensor,
    *,
    num_samples: int = 1000,
    seed: int = 0,
) -> Tensor:
    """P(y_new <= y) under the predictive distribution, `(N, C)`, uniform if predictions are right.

    They are exact for Gaussian noise and a Gaussian guide. Otherwise they are ranks of y among
    `num_samples` predictive draws, with ties broken at random. Classes have no order: use
    `pyro_dak.diagnostics.calibration.reliability_curve` for them.
    """
    check_model(model)
    check_integer("seed", seed, minimum=-(2**63))
    if isinstance(model.likelihood, CategoricalLikelihood):
        raise NotImplementedError(
            "Classes have no order, and so no PIT. Use "
            "`pyro_dak.diagnostics.calibration.reliability_curve`."
        )
    draws, h, y = draws_and_data(model, posterior, x, y, num_samples=num_samples, seed=seed)
    is_gaussian = isinstance(model.likelihood, GaussianLikelihood)
    if is_gaussian and has_closed_form(as_guide(posterior)):
        mean, sd, noise_var = response(model, posterior, h, draws)
        return gaussian_pit(y, mean, sd.square() + noise_var)
    y_new = predictive_draws(model, h, draws.flat(), seed + 1)
    return rank_pit(y, y_new, torch.Generator().manual_seed(int(seed) + 2))


class PredictiveCheck(NamedTuple):
    """A statistic of the observed y, of the replicated ones `(S,)`, and P(replicated >= observed).

    A p-value near 0 or 1 says that data like the observed ones would surprise the model.
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
    x: Inputs,
    y: Tensor,
    *,
    statistics: Mapping[str, StatisticFn] | None = None,
    num_samples: int = 1000,
    seed: int = 0,
) -> dict[str, PredictiveCheck]:
    """Compare statistics of y with those of data sets that the posterior predicts at the same x.

    The checks have the names of their statistics, or "name[output]" with several outputs. x is
    `(N, ...)`, and y its targets.

    Args:
        statistics: functions from the values of one output, `(..., N)`, to a statistic, `(...)`,
            by name. By default these are `STATISTICS`, and the share of each class for classes.
        num_samples: number of draws from a guide.
    """
    check_integer("seed", seed, minimum=-(2**63))
    draws, h, y = draws_and_data(model, posterior, x, y, num_samples=num_samples, seed=seed)
    y_new, default = predictive_draws(model, h, draws.flat(), seed + 1), STATISTICS
    if isinstance(model.likelihood, CategoricalLikelihood):
        y, y_new = (torch.nn.functional.one_hot(v, model.num_outputs).double() for v in (y, y_new))
        default = {"share": lambda v: v.mean(-1)}
    if statistics is not None:
        check_kind("statistics", statistics, Mapping, "a dictionary of functions by name")
        for name, statistic_fn in statistics.items():
            check_kind(f"statistics[{name!r}]", statistic_fn, Callable, "a function of values")
    checks = {}
    for name, statistic_fn in (default if statistics is None else statistics).items():
        for c in range(y.shape[-1]):
            label = name if y.shape[-1] == 1 else f"{name}[{c}]"
            observed, replicated = statistic_fn(y[:, c]), statistic_fn(y_new[..., c])
            above, same = replicated > observed, replicated == observed
            p_value = float(above.double().mean() + 0.5 * same.double().mean())
            checks[label] = PredictiveCheck(float(observed), replicated, p_value)
    return checks
