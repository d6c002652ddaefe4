"""Targets that are missing: they do not count in the likelihood, while their rows count in N.

Given f, the outputs of a row are independent: log p(y | f) = sum_c log p(y_c | f_c), where f_c is
the function of output c, or two of them with a noise that depends on x. A missing y_c integrates
to one, so its term is left out. The expectations of the terms need the marginals of the f_c only,
and are computed by taking every output for a row of its own. Of classes the row is left out.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_dak.additive.gaussian import ExpectedDerivatives, FunctionMoments
from pyro_dak.model.likelihoods import (
    BernoulliLikelihood,
    CategoricalLikelihood,
    GaussianLikelihood,
    HeteroscedasticLikelihood,
    Likelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)

__all__ = [
    "Missing",
    "check_observed_values",
    "is_observed",
    "observed_derivatives",
    "observed_distribution",
    "observed_rows",
    "observed_squares",
    "with_missing",
]

# What marks a missing target: NaN, or for class labels an integer.
Missing = str | int

_KNOWN = (
    BernoulliLikelihood,
    CategoricalLikelihood,
    GaussianLikelihood,
    HeteroscedasticLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)


@contextmanager
def with_missing(likelihood: Likelihood, missing: Missing | None) -> Iterator[None]:
    """A context in which targets may be missing; None changes nothing.

    Args:
        likelihood: one of this library.
        missing: "nan", or for class labels an integer such as -100.
    """
    if missing is None:
        yield
        return
    if type(likelihood) not in _KNOWN:
        raise NotImplementedError(
            f"{type(likelihood).__name__} does not say what it is without some targets. Leave "
            "their rows out, or use one of "
            f"{', '.join(sorted(cls.__name__ for cls in _KNOWN))}."
        )
    is_label = isinstance(missing, int) and not isinstance(missing, bool) and missing < 0
    has_labels = isinstance(likelihood, CategoricalLikelihood)
    if is_label != has_labels or (not is_label and missing != "nan"):
        expected = "a negative integer such as -100" if has_labels else '"nan"'
        raise ValueError(
            f"`missing` must be {expected} for the targets of {type(likelihood).__name__}; got "
            f"{missing!r}."
        )
    before, likelihood.missing = likelihood.missing, missing
    try:
        yield
    finally:
        likelihood.missing = before


def is_observed(likelihood: Likelihood, y: Tensor) -> Tensor | None:
    """Which targets are there, like y; None if none may be missing."""
    if likelihood.missing is None:
        return None
    return y != likelihood.missing if isinstance(likelihood.missing, int) else ~y.isnan()


def check_observed_values(likelihood: Likelihood, y: Tensor, num_outputs: int) -> None:
    """Raise if targets that are there are not in the support."""
    observed = is_observed(likelihood, y)
    likelihood.check_values(y if observed is None else y[observed], num_outputs)


def _filled(y: Tensor, observed: Tensor) -> Tensor:
    """y with zeros, which every likelihood knows, in the place of missing targets."""
    return y.masked_fill(~observed, 0)


def observed_distribution(
    likelihood: Likelihood, y_given_f: Any, y: Tensor | None
) -> tuple[dist.Distribution, Tensor | None]:
    """p(y | f) in which missing targets have no density, and y without marks for them."""
    observed = None if y is None else is_observed(likelihood, y)
    if y is None or observed is None:
        return y_given_f, y
    if isinstance(likelihood, CategoricalLikelihood):
        return y_given_f.mask(observed), _filled(y, observed)
    return y_given_f.base_dist.mask(observed).to_event(1), _filled(y, observed)


def observed_rows(
    rows_fn: Callable[[Likelihood, Tensor, FunctionMoments], Tensor],
    likelihood: Likelihood,
    y: Tensor,
    moments: FunctionMoments,
) -> Tensor:
    """Sums over the outputs of each row that are there, `(..., N)`, such as E_q log p(y | f).

    Args:
        rows_fn: gives the sums over all outputs of rows.
        likelihood: with a mark of missing targets, or without.
        y: targets.
        moments: q(f).
    """
    observed = is_observed(likelihood, y)
    if observed is None:
        return rows_fn(likelihood, y, moments)
    y = _filled(y, observed)
    if isinstance(likelihood, CategoricalLikelihood):
        return rows_fn(likelihood, y, moments).masked_fill(~observed, 0)
    one = _for_one_output(likelihood)
    terms = rows_fn(one, y.unsqueeze(-1), _by_output(moments, y.shape[-1]))  # (..., N, C)
    return terms.masked_fill(~observed, 0).sum(-1)


def _for_one_output(likelihood: Any) -> Likelihood:
    """The likelihood of rows `(..., C, 1)`, which has the noise of output c at row c."""
    noise = getattr(likelihood, "noise", None)
    if noise is None or noise.log_scale.dim() == 0:
        return likelihood
    return likelihood.with_noise(noise.log_scale.unsqueeze(-1))


def _by_output(moments: FunctionMoments, num_outputs: int) -> FunctionMoments:
    """q(f) with the functions of each output as a row, `(..., N, C, F / C)`."""
    parts = [None if p is None else p.unflatten(-1, (-1, num_outputs)).mT for p in moments]
    return FunctionMoments(*parts)  # type: ignore[arg-type]


def observed_derivatives(
    likelihood: Likelihood, y: Tensor, moments: FunctionMoments
) -> ExpectedDerivatives:
    """`Likelihood.expected_derivatives`, which are zero where targets are missing."""
    observed = is_observed(likelihood, y)
    if observed is None:
        return likelihood.expected_derivatives(y, moments)
    gradient, curvature = likelihood.expected_derivatives(_filled(y, observed), moments)
    observed = observed.unsqueeze(-1) if observed.dim() == 1 else observed
    num_kinds = gradient.shape[-1] // observed.shape[-1]  # functions of an output, or all classes
    is_missing = ~observed.repeat(1, num_kinds)
    return ExpectedDerivatives(
        gradient.masked_fill(is_missing, 0), curvature.masked_fill(is_missing, 0)
    )


def observed_squares(
    likelihood: Likelihood, y: Tensor, moments: FunctionMoments
) -> tuple[Tensor, Tensor | None]:
    """`Likelihood.expected_squares` of the targets that are there, and how many these are.

    Both are in the shape of the noise. The number is None if it is that of the rows.
    """
    observed = is_observed(likelihood, y)
    if observed is None:
        return likelihood.expected_squares(y, moments), None
    mean, var, _ = moments
    at_mean = FunctionMoments(mean, var.masked_fill(~observed, 0))
    squares = likelihood.expected_squares(torch.where(observed, y, mean), at_mean)
    nothing = FunctionMoments(torch.zeros_like(mean), torch.zeros_like(mean))
    return squares, likelihood.expected_squares(observed.to(mean), nothing)  # a sum of ones
