"""Observation models: the distribution of y given f, its expectation under a Gaussian q(f)."""

import copy
import math
from abc import ABC, abstractmethod
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn

from pyro_dak.additive.gaussian import (
    FunctionMoments,
    expected_log_categorical_bound,
    expected_log_heteroscedastic,
    expected_log_normal,
    log_normalizer_bound,
)
from pyro_dak.additive.quadrature import gauss_hermite, log_expectation
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
    `has_bound`. Targets are `(N, C)`, one column per output, unless the subclass says otherwise,
    and floating; with `takes_integers` integers are converted.
    """

    has_closed_form = False
    has_bound = False
    takes_integers = False

    def num_functions(self, num_outputs: int) -> int:
        """F, the functions that C outputs need."""
        return num_outputs

    @abstractmethod
    def distribution(self, f: Tensor) -> dist.Distribution:
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

    def with_noise(self, log_scale: Tensor) -> Any:
        """A copy whose noise scale has this logarithm, which may broadcast against f in any way."""
        other = copy.copy(self)
        other._modules = {**self._modules, "noise": _Noise(log_scale, learn=False)}
        return other

    def predictive_moments(self, moments: FunctionMoments) -> tuple[Tensor, Tensor, Tensor]:
        """Mean of y, its epistemic and its aleatoric variance, each `(..., N, C)`.

        The law of total variance: Var_q E[y | f] and E_q Var[y | f]. Here by quadrature over each
        function, for likelihoods with one function per output that are smooth on the scale of q(f).
        """
        nodes, weights = gauss_hermite(moments.mean, moments.var)
        y = self.distribution(nodes)  # batch (Q, ..., N), event (C,)
        mean = (weights * y.mean).sum(0)
        epistemic = (weights * (y.mean - mean).square()).sum(0)
        return mean, epistemic, (weights * y.variance).sum(0)

    def predictive_log_prob(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        """log E_q p(y | f) of each row, summed over outputs, `(..., N)`; by quadrature as above."""
        nodes, weights = gauss_hermite(moments.mean, moments.var)
        element = self.distribution(nodes).base_dist
        return torch.logsumexp(element.log_prob(y) + weights.log(), 0).sum(-1)

    def check_targets(self, y: Tensor, num_outputs: int) -> Tensor:
        """y as the likelihood wants it, or an error; `(N,)` is read as one output."""
        if self.takes_integers and isinstance(y, Tensor):
            y = y.to(torch.get_default_dtype())
        if isinstance(y, Tensor) and y.is_floating_point() and y.shape[1:] == (num_outputs,):
            return y
        check_floating("y", y)
        if y.dim() == 1 and num_outputs == 1:
            return y.unsqueeze(-1)
        raise ValueError(
            f"`y` must have shape (N, {num_outputs}), one column per output"
            f"{', or (N,)' if num_outputs == 1 else ''}; got {tuple(y.shape)}. "
            f"Set `num_outputs` or reshape `y`."
        )

    def placeholder_targets(self, num_rows: int, num_outputs: int) -> Tensor:
        """Targets of the right kind and shape, for a dry run."""
        return torch.zeros(num_rows, num_outputs)

    def check_values(self, y: Tensor, num_outputs: int) -> None:
        """Raise if targets are not in the support; reads the values, so it is for entry points."""
        check_finite("y", y)


class _Noise(nn.Module):
    """A positive scale, kept as its logarithm: a parameter if it is learned, else a buffer."""

    log_scale: Tensor

    def __init__(self, log_scale: Tensor, learn: bool):
        super().__init__()
        if learn:
            self.log_scale = nn.Parameter(log_scale)
        else:
            self.register_buffer("log_scale", log_scale)

    def forward(self) -> Tensor:
        return self.log_scale.exp()


class _NoisyLikelihood(Likelihood):
    """y = f + noise with a scale of the noise, one or one per output, which may be learned."""

    def __init__(self, noise_scale: float | Tensor = 0.1, learn: bool = True):
        super().__init__()
        value = torch.as_tensor(noise_scale, dtype=torch.get_default_dtype()).detach().clone()
        if value.dim() > 1:
            raise ValueError(
                f"`noise_scale` must be a number or one per output, (C,); "
                f"got shape {tuple(value.shape)}."
            )
        for entry in [] if value.is_meta else value.flatten().tolist():
            check_positive("noise_scale", entry)
        self.noise = _Noise(value.log(), learn)

    @property
    def noise_scale(self) -> Tensor:
        """Scale of the noise, a scalar or `(C,)`."""
        return self.noise.log_scale.exp()


class GaussianLikelihood(_NoisyLikelihood):
    """y = f + noise, noise ~ N(0, noise_scale^2), independent over outputs.

    Args:
        noise_scale: standard deviation (sigma_f of the paper), one or one per output.
        learn: whether it is a parameter.
    """

    has_closed_form = True

    def distribution(self, f: Tensor) -> dist.Distribution:
        return dist.Normal(f, self.noise_scale).to_event(1)

    def expected_log_prob(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        noise_scale = self.noise_scale
        if noise_scale.numel() not in (1, moments.mean.shape[-1]) and noise_scale.dim() == 1:
            raise ValueError(
                f"`noise_scale` must be a number or one per output, ({moments.mean.shape[-1]},); "
                f"got shape {tuple(noise_scale.shape)}. Set `num_outputs` or give one noise scale."
            )
        return expected_log_normal(y, moments.mean, moments.var, noise_scale)

    def predictive_moments(self, moments: FunctionMoments) -> tuple[Tensor, Tensor, Tensor]:
        return moments.mean, moments.var, self.noise_scale.square().expand_as(moments.mean)

    def predictive_log_prob(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        """log N(y | mean, var + noise_scale^2), exactly."""
        scale = (moments.var + self.noise_scale.square()).sqrt()
        return dist.Normal(moments.mean, scale).log_prob(y).sum(-1)


class HeteroscedasticLikelihood(_NoisyLikelihood):
    """y = f + noise with log noise variance eta(x), one more function per output.

    The functions are (f_1 .. f_C, eta_1 .. eta_C); eta = offset + its own additive process, so
    that the noise starts at `noise_scale`.

    Args:
        noise_scale: standard deviation of the noise where the process eta is zero.
        learn: whether that level is a parameter.
    """

    has_closed_form = True

    def __init__(self, noise_scale: float | Tensor = 0.5, learn: bool = True):
        super().__init__(noise_scale, learn)

    def num_functions(self, num_outputs: int) -> int:
        return 2 * num_outputs

    def distribution(self, f: Tensor) -> dist.Distribution:
        mean, eta = f.chunk(2, -1)
        return dist.Normal(mean, (0.5 * eta + self.noise.log_scale).exp()).to_event(1)

    def expected_log_prob(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        covariance: Tensor | float = 0.0
        if moments.root is not None:
            covariance = torch.mul(*moments.root.chunk(2, -1)).sum(0)
        return expected_log_heteroscedastic(y, *self._parts(moments), covariance)

    def predictive_moments(self, moments: FunctionMoments) -> tuple[Tensor, Tensor, Tensor]:
        """Var y = v_f + E exp(eta) = v_f + exp(m_eta + v_eta / 2)."""
        mean, var, eta_mean, eta_var = self._parts(moments)
        return mean, var, (eta_mean + 0.5 * eta_var).exp()

    def predictive_log_prob(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        """log E_eta N(y | m_f, v_f + exp(eta)) for independent f and eta, by quadrature."""
        mean, var, eta_mean, eta_var = self._parts(moments)
        eta, weights = gauss_hermite(eta_mean, eta_var)
        element = dist.Normal(mean, (var + eta.exp()).sqrt())
        return torch.logsumexp(element.log_prob(y) + weights.log(), 0).sum(-1)

    def _parts(self, moments: FunctionMoments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mean and variance of f, and those of the log noise variance."""
        mean, eta_mean = moments.mean.chunk(2, -1)
        var, eta_var = moments.var.chunk(2, -1)
        return mean, var, eta_mean + 2 * self.noise.log_scale, eta_var


class StudentTLikelihood(_NoisyLikelihood):
    """y = f + noise with Student-t noise: robust to outliers. Expectations by Monte Carlo.

    Args:
        df: degrees of freedom.
        noise_scale: scale of the noise, one or one per output.
        learn: whether the scale is a parameter.
    """

    def __init__(self, df: float = 4.0, noise_scale: float | Tensor = 0.1, learn: bool = True):
        super().__init__(noise_scale, learn)
        check_positive("df", df)
        self.df = float(df)

    def distribution(self, f: Tensor) -> dist.Distribution:
        return dist.StudentT(self.df, f, self.noise_scale).to_event(1)

    def predictive_moments(self, moments: FunctionMoments) -> tuple[Tensor, Tensor, Tensor]:
        """The variance of the noise is s^2 df / (df - 2), infinite for df <= 2."""
        factor = self.df / (self.df - 2) if self.df > 2 else math.inf
        noise_var = factor * self.noise_scale.square()
        return moments.mean, moments.var, noise_var.expand_as(moments.mean)

    def predictive_log_prob(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        """log E N(y | m, v + s^2 / g) over g ~ Gamma(df / 2, df / 2): t as a mixture of normals.

        By the trapezoidal rule in log g, which for a smooth integrand with both ends at zero is as
        exact as can be, however small s is.
        """
        half = self.df / 2
        low, high = -30 / half, math.log(10 + 60 / half)
        t = torch.linspace(low, high, 257, dtype=moments.mean.dtype, device=moments.mean.device)
        log_weights = half * (t - t.exp() + math.log(half)) - math.lgamma(half)
        log_weights = log_weights + math.log((high - low) / 256)
        shape = (-1, *[1] * moments.mean.dim())
        noise_var = self.noise_scale.square() * (-t).exp().reshape(shape)
        element = dist.Normal(moments.mean, (moments.var + noise_var).sqrt())
        return torch.logsumexp(element.log_prob(y) + log_weights.reshape(shape), 0).sum(-1)


class CategoricalLikelihood(Likelihood):
    """y ~ softmax(f): C classes, labels 0 .. C-1 of an integer dtype, `(N,)`."""

    has_bound = True

    def distribution(self, f: Tensor) -> dist.Distribution:
        return dist.Categorical(logits=f)

    def expected_log_prob_bound(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        return expected_log_categorical_bound(y, moments)

    def class_probabilities(
        self, moments: FunctionMoments, draws: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """log E_q softmax(f) `(..., N, C)` and the expected entropy E_q H[softmax(f)] `(..., N)`.

        Averages of probabilities and entropies over `draws` of f, `(S, ..., N, C)`; with None the
        probit approximation softmax(m_c / sqrt(1 + pi v_c / 8)), whose expected entropy is unknown:
        NaN.
        """
        if draws is None:
            scaled = moments.mean / (1 + math.pi / 8 * moments.var).sqrt()
            return scaled.log_softmax(-1), torch.full_like(scaled[..., 0], math.nan)
        log_probs = draws.log_softmax(-1)
        entropies = -(log_probs.exp() * log_probs).sum(-1)
        return torch.logsumexp(log_probs, 0) - math.log(len(draws)), entropies.mean(0)

    def check_targets(self, y: Tensor, num_outputs: int) -> Tensor:
        if not isinstance(y, Tensor) or y.is_floating_point() or y.is_complex():
            kind = y.dtype if isinstance(y, Tensor) else type(y).__name__
            raise TypeError(
                f"`y` must hold class labels of an integer dtype; got {kind}. Use `y.long()`."
            )
        if y.dim() != 1:
            raise ValueError(f"`y` must have shape (N,), one label per row; got {tuple(y.shape)}.")
        return y.long()

    def placeholder_targets(self, num_rows: int, num_outputs: int) -> Tensor:
        return torch.zeros(num_rows, dtype=torch.long)

    def check_values(self, y: Tensor, num_outputs: int) -> None:
        _check_range(y, 0, num_outputs - 1, "Labels count from 0; set `num_outputs`.")


class BernoulliLikelihood(Likelihood):
    """y in {0, 1} with log odds f, independent over outputs."""

    takes_integers = True
    has_bound = True

    def distribution(self, f: Tensor) -> dist.Distribution:
        return dist.Bernoulli(logits=f).to_event(1)

    def expected_log_prob_bound(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        """y m less the bound of E log(1 + exp f), the normalizer of the softmax over (0, f)."""
        with_zero = [
            nn.functional.pad(part.unsqueeze(-1), (1, 0)) for part in (moments.mean, moments.var)
        ]
        return (y * moments.mean - log_normalizer_bound(FunctionMoments(*with_zero))).sum(-1)

    def predictive_log_prob(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        """log E sigmoid(f) or log E sigmoid(-f), by quadrature."""
        sign = 2 * y - 1

        def slope_and_curvature_fn(f: Tensor) -> tuple[Tensor, Tensor]:
            p = (sign * f).sigmoid()
            return sign * (1 - p), -p * (1 - p)

        def log_prob_fn(f: Tensor) -> Tensor:
            return nn.functional.logsigmoid(sign * f)

        return log_expectation(log_prob_fn, slope_and_curvature_fn, *moments[:2]).sum(-1)

    def check_values(self, y: Tensor, num_outputs: int) -> None:
        check_finite("y", y)
        if not bool(((y == 0) | (y == 1)).all()):
            raise ValueError("`y` must hold zeros and ones only.")


class PoissonLikelihood(Likelihood):
    """Counts y with log rate f, independent over outputs."""

    takes_integers = True
    has_closed_form = True

    def distribution(self, f: Tensor) -> dist.Distribution:
        return dist.Poisson(f.exp()).to_event(1)

    def expected_log_prob(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        """y m - exp(m + v / 2) - log y!, which is exact."""
        rate = (moments.mean + 0.5 * moments.var).exp()
        return (y * moments.mean - rate - torch.lgamma(y + 1)).sum(-1)

    def predictive_moments(self, moments: FunctionMoments) -> tuple[Tensor, Tensor, Tensor]:
        """E y = E exp f = exp(m + v / 2), Var exp f = (exp(v) - 1) E[y]^2, E Var[y | f] = E y."""
        mean = (moments.mean + 0.5 * moments.var).exp()
        return mean, torch.expm1(moments.var) * mean.square(), mean

    def predictive_log_prob(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        """log E exp(y f - exp f) / y!, by quadrature around the mode."""
        return log_expectation(
            lambda f: y * f - f.exp() - torch.lgamma(y + 1),
            lambda f: (y - f.exp(), -f.exp()),
            *moments[:2],
        ).sum(-1)

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
