"""Observation models: the distribution of y given f, its expectation under a Gaussian q(f)."""

import math
from abc import ABC, abstractmethod

import pyro.distributions as dist
import torch
from torch import Tensor, nn

from pyro_dak.gaussian import (
    FunctionMoments,
    expected_log_categorical_bound,
    expected_log_heteroscedastic,
    expected_log_normal,
)
from pyro_dak.validation import check_finite, check_floating, check_positive

__all__ = [
    "BernoulliLikelihood",
    "CategoricalLikelihood",
    "GaussianLikelihood",
    "HeteroscedasticLikelihood",
    "Likelihood",
    "PoissonLikelihood",
    "StudentTLikelihood",
]


class Likelihood(nn.Module, ABC):
    """p(y | f) for rows of f `(..., N, F)`.

    A subclass gives `distribution`; where E_q log p(y | f) is closed it gives `expected_log_prob`
    and sets `has_closed_form`; where only a lower bound is closed, `expected_log_prob_bound` and
    `has_bound`. Targets are `(N, C)`, one column per output, unless the subclass says otherwise.
    """

    has_closed_form = False
    has_bound = False

    def num_functions(self, num_outputs: int) -> int:
        """F, the functions that C outputs need."""
        return num_outputs

    @abstractmethod
    def distribution(self, f: Tensor) -> dist.TorchDistribution:
        """p(y | f), batch shape `(..., N)`."""

    def expected_log_prob(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        """E_q log p(y | f) of each row, `(..., N)`."""
        raise NotImplementedError(
            f"{type(self).__name__} has no closed-form expectation. "
            "Use LocalReparamELBO, or Trace_ELBO of Pyro."
        )

    def expected_log_prob_bound(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        """A lower bound of E_q log p(y | f) of each row, `(..., N)`; the value itself if closed."""
        if self.has_closed_form:
            return self.expected_log_prob(y, moments)
        raise NotImplementedError(
            f"{type(self).__name__} has no closed-form bound. "
            "Use LocalReparamELBO, or Trace_ELBO of Pyro."
        )

    def check_targets(self, y: Tensor, num_outputs: int) -> Tensor:
        """y as the likelihood wants it, or an error; `(N,)` is read as one output."""
        check_floating("y", y)
        return _as_columns(y, num_outputs)

    def check_values(self, y: Tensor, num_outputs: int) -> None:
        """Raise if targets are not in the support; reads the values, so it is for entry points."""
        check_finite("y", y)


def _as_columns(y: Tensor, num_outputs: int) -> Tensor:
    if y.dim() == 1 and num_outputs == 1:
        return y.unsqueeze(-1)
    if y.dim() != 2 or y.shape[-1] != num_outputs:
        raise ValueError(
            f"`y` must have shape (N, {num_outputs}), one column per output"
            f"{', or (N,)' if num_outputs == 1 else ''}; got {tuple(y.shape)}. "
            f"Set `num_outputs` or reshape `y`."
        )
    return y


class _NoiseScale(nn.Module):
    """A positive scale, fixed or learned, one or one per output; kept as its logarithm."""

    def __init__(self, noise_scale: float | Tensor, learn: bool):
        super().__init__()
        value = torch.as_tensor(noise_scale, dtype=torch.get_default_dtype()).detach().clone()
        if value.dim() > 1:
            raise ValueError(
                f"`noise_scale` must be a number or one per output, (C,); "
                f"got shape {tuple(value.shape)}."
            )
        for entry in value.flatten().tolist():
            check_positive("noise_scale", entry)
        if learn:
            self.log_scale: Tensor = nn.Parameter(value.log())
        else:
            self.register_buffer("log_scale", value.log())

    def forward(self) -> Tensor:
        return self.log_scale.exp()


class GaussianLikelihood(Likelihood):
    """y = f + noise, noise ~ N(0, noise_scale^2), independent over outputs.

    Args:
        noise_scale: standard deviation (sigma_f of the paper), one or one per output.
        learn: whether it is a parameter.
    """

    has_closed_form = True

    def __init__(self, noise_scale: float | Tensor = 0.1, learn: bool = True):
        super().__init__()
        self.noise = _NoiseScale(noise_scale, learn)

    @property
    def noise_scale(self) -> Tensor:
        """Standard deviation of the noise, a scalar or `(C,)`."""
        return self.noise()

    def distribution(self, f: Tensor) -> dist.TorchDistribution:
        return dist.Normal(f, self.noise_scale).to_event(1)

    def expected_log_prob(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        return expected_log_normal(y, moments.mean, moments.var, self.noise_scale)


class HeteroscedasticLikelihood(Likelihood):
    """y = f + noise with log noise variance eta(x), one more function per output.

    The functions are (f_1 .. f_C, eta_1 .. eta_C); eta = offset + its own additive process, so
    that the noise starts at `noise_scale`.

    Args:
        noise_scale: standard deviation of the noise where the process eta is zero.
        learn: whether that level is a parameter.
    """

    has_closed_form = True

    def __init__(self, noise_scale: float | Tensor = 0.5, learn: bool = True):
        super().__init__()
        self.noise = _NoiseScale(noise_scale, learn)

    @property
    def log_noise_var_offset(self) -> Tensor:
        """Log noise variance where eta is zero, a scalar or `(C,)`."""
        return 2 * self.noise.log_scale

    def num_functions(self, num_outputs: int) -> int:
        return 2 * num_outputs

    def distribution(self, f: Tensor) -> dist.TorchDistribution:
        mean, eta = f.chunk(2, -1)
        return dist.Normal(mean, (0.5 * (eta + self.log_noise_var_offset)).exp()).to_event(1)

    def expected_log_prob(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        C = moments.mean.shape[-1] // 2
        f, eta = slice(0, C), slice(C, 2 * C)
        return expected_log_heteroscedastic(
            y,
            moments.mean[..., f],
            moments.var[..., f],
            moments.mean[..., eta] + self.log_noise_var_offset,
            moments.var[..., eta],
            moments.covariance(f, eta),
        )


class StudentTLikelihood(Likelihood):
    """y = f + noise with Student-t noise: robust to outliers. Expectations by Monte Carlo.

    Args:
        df: degrees of freedom.
        noise_scale: scale of the noise, one or one per output.
        learn: whether the scale is a parameter.
    """

    def __init__(self, df: float = 4.0, noise_scale: float | Tensor = 0.1, learn: bool = True):
        super().__init__()
        check_positive("df", df)
        self.df = float(df)
        self.noise = _NoiseScale(noise_scale, learn)

    @property
    def noise_scale(self) -> Tensor:
        """Scale of the noise, a scalar or `(C,)`."""
        return self.noise()

    def distribution(self, f: Tensor) -> dist.TorchDistribution:
        return dist.StudentT(self.df, f, self.noise_scale).to_event(1)


class CategoricalLikelihood(Likelihood):
    """y ~ softmax(f): C classes, labels 0 .. C-1 of an integer dtype, `(N,)`."""

    has_bound = True

    def distribution(self, f: Tensor) -> dist.TorchDistribution:
        return dist.Categorical(logits=f)

    def expected_log_prob_bound(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        return expected_log_categorical_bound(y, moments.mean, moments.var)

    def check_targets(self, y: Tensor, num_outputs: int) -> Tensor:
        if not isinstance(y, Tensor) or y.is_floating_point() or y.is_complex():
            kind = y.dtype if isinstance(y, Tensor) else type(y).__name__
            raise TypeError(
                f"`y` must hold class labels of an integer dtype; got {kind}. Use `y.long()`."
            )
        if y.dim() != 1:
            raise ValueError(f"`y` must have shape (N,), one label per row; got {tuple(y.shape)}.")
        return y.long()

    def check_values(self, y: Tensor, num_outputs: int) -> None:
        _check_range(y, 0, num_outputs - 1, "Labels count from 0; set `num_outputs`.")


class BernoulliLikelihood(Likelihood):
    """y in {0, 1} with log odds f, independent over outputs."""

    has_bound = True

    def distribution(self, f: Tensor) -> dist.TorchDistribution:
        return dist.Bernoulli(logits=f).to_event(1)

    def expected_log_prob_bound(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        """y m - log(1 + exp(m + v / 2)): Jensen, as for the softmax over (0, f)."""
        penalty = nn.functional.softplus(moments.mean + 0.5 * moments.var)
        return (y * moments.mean - penalty).sum(-1)

    def check_targets(self, y: Tensor, num_outputs: int) -> Tensor:
        return _as_columns(y.to(torch.get_default_dtype()), num_outputs)

    def check_values(self, y: Tensor, num_outputs: int) -> None:
        check_finite("y", y)
        if not bool(((y == 0) | (y == 1)).all()):
            raise ValueError("`y` must hold zeros and ones only.")


class PoissonLikelihood(Likelihood):
    """Counts y with log rate f, independent over outputs."""

    has_closed_form = True

    def distribution(self, f: Tensor) -> dist.TorchDistribution:
        return dist.Poisson(f.exp()).to_event(1)

    def expected_log_prob(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        """y m - exp(m + v / 2) - log y!, which is exact."""
        rate = (moments.mean + 0.5 * moments.var).exp()
        return (y * moments.mean - rate - torch.lgamma(y + 1)).sum(-1)

    def check_targets(self, y: Tensor, num_outputs: int) -> Tensor:
        return _as_columns(y.to(torch.get_default_dtype()), num_outputs)

    def check_values(self, y: Tensor, num_outputs: int) -> None:
        check_finite("y", y)
        _check_range(y, 0, math.inf, "Counts are not negative.")
        if not bool((y == y.round()).all()):
            raise ValueError("`y` must hold whole numbers: they are counts.")


def _check_range(y: Tensor, low: float, high: float, remedy: str) -> None:
    if y.numel() and not bool(((y >= low) & (y <= high)).all()):
        raise ValueError(
            f"`y` must lie between {low} and {high}; got values from {y.min().item()} "
            f"to {y.max().item()}. {remedy}"
        )
