"""Observation models: the distribution of y given f, its expectation under a Gaussian q(f)."""

import copy
import math
from abc import ABC, abstractmethod
from typing import Any, cast

import pyro.distributions as dist
import torch
from torch import Tensor, nn

from pyro_dak.additive.gaussian import (
    ExpectedDerivatives,
    FunctionMoments,
    class_averages,
    expected_derivatives_heteroscedastic,
    expected_derivatives_normal,
    expected_derivatives_student_t,
    expected_log_categorical_bound,
    expected_log_heteroscedastic,
    expected_log_normal,
    log_normalizer_bound,
    sample_marginals,
)
from pyro_dak.additive.quadrature import (
    expected_sigmoid,
    gauss_hermite,
    log_expectation,
    log_student_t,
    normal_nodes,
)
from pyro_dak.model.priors import (
    PriorLike,
    check_positive_prior,
    is_prior,
    sample_scale,
    scale_shape,
)
from pyro_dak.validation import (
    check_finite,
    check_floating,
    check_has_values,
    check_positive,
    check_tensor,
)

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

    Attributes:
        coupling: a number r for which the matrix of second derivatives of -log p by all functions
            of a row is at most r times its diagonal. Natural-gradient steps, which look at one
            function at a time, are kept shorter by it.
        is_shift_invariant: whether p(y | f) stays the same if one number is added to all functions
            of a row, as for classes.
        prior_scale: the standard deviation that f has in the prior at the start. With 1, classes
            could hardly be told apart with more than 95 % certainty.
        missing: what marks targets that do not count, "nan" or for labels an integer; None if there
            must not be any. `fit(..., missing=...)` sets it while it runs.
    """

    has_closed_form = False
    has_bound = False
    takes_integers = False
    coupling = 1.0
    is_shift_invariant = False
    prior_scale = 1.0
    missing: str | int | None = None

    def num_functions(self, num_outputs: int) -> int:
        """F, the functions that C outputs need."""
        return num_outputs

    @abstractmethod
    def distribution(self, f: Tensor) -> dist.Distribution:
        """p(y | f), batch shape `(..., N)`.

        A likelihood that samples parameters takes them as further arguments, by name.
        """

    def sample_parameters(self) -> dict[str, Tensor]:
        """Sample the parameters that have priors, outside of the data plate; here there are none.

        The values go to `distribution` by name, in a shape that broadcasts against f `(..., N, F)`:
        a number for all rows as `(..., 1)`, where the dots are draws and the data plate.
        """
        return {}

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        """log p(y | f) of each row, `(..., N)`, for draws f `(..., N, F)`, with its gradient in f.

        Here it is that of `distribution`. A formula of tensors alone, where a subclass has one, can
        be compiled, while a distribution of Pyro cannot.
        """
        return self.distribution(f).log_prob(y)

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

    def expected_derivatives(
        self, y: Tensor, moments: FunctionMoments, num_samples: int = 8
    ) -> ExpectedDerivatives:
        """E_q[d log p / d f] and a non-negative -E_q[d^2 log p / d f^2], each `(..., N, F)`.

        Natural-gradient updates of q take them. Here they are estimated from draws f = m +- d, with
        one backward pass. The gradient is the mean of the gradients g at the draws. The curvature
        is minus the slope of the regression of g on f, -sum g (f - m) / sum (f - m)^2, at least 0:
        by Stein's identity E[g (f - m)] = v E[dg / df], also where log p has kinks.
        """
        f = _antithetic_draws(moments, num_samples)
        with torch.enable_grad():
            f = f.detach().requires_grad_()
            (gradients,) = torch.autograd.grad(self.log_prob(y, f).sum(), f)
        shift = f.detach() - moments.mean
        slope = (gradients * shift).sum(0) / shift.square().sum(0)
        return ExpectedDerivatives(gradients.mean(0), (-slope).clamp(min=0))

    @property
    def closed_noise(self) -> nn.Parameter | None:
        """The logarithm of a noise scale that is learned and whose best value is closed, or None.

        Natural-gradient training takes it from `expected_squares` instead of an optimiser.
        """
        return None

    def keep_noise_from_optimizers(self) -> None:
        """Let `closed_noise` have no gradient, so that it is learned in closed form only."""

    def expected_squares(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        """The sum over rows whose mean is the best noise variance, in the shape of the noise."""
        raise NotImplementedError(f"{type(self).__name__} has no noise scale in closed form.")

    def with_noise(self, log_scale: Tensor) -> Any:
        """A copy whose noise scale has this logarithm, which may broadcast against f in any way."""
        other = copy.copy(self)
        other._modules = {**self._modules, "noise": _Noise(log_scale, learn=False)}
        return other

    def predictive_moments(self, moments: FunctionMoments) -> tuple[Tensor, Tensor, Tensor]:
        """Mean of y, its epistemic and its aleatoric variance, each `(..., N, C)`.

        The law of total variance: Var_q E[y | f] and E_q Var[y | f]. Here by quadrature over each
        function, for likelihoods with one function per output that are smooth on the scale of q(f).
        Where outputs depend on each other given f, or on several functions, it is by draws of f,
        always the same ones.
        """
        if not self._is_elementwise(moments.mean):
            return _moments_by_draws(self.distribution(_fixed_draws(moments)))
        nodes, weights = gauss_hermite(moments.mean, moments.var)
        y = self.distribution(nodes)  # batch (Q, ..., N), event (C,)
        mean = (weights * y.mean).sum(0)
        epistemic = (weights * (y.mean - mean).square()).sum(0)
        return mean, epistemic, (weights * y.variance).sum(0)

    def predictive_log_prob(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        """log E_q p(y | f) of each row, `(..., N)`; by quadrature or by draws, as above.

        By quadrature this is the sum of the log densities of the outputs. Where functions covary
        and y has several outputs, a subclass that knows the joint density gives it instead. By
        draws it is the joint density.
        """
        if not self._is_elementwise(moments.mean):
            log_probs = self.distribution(_fixed_draws(moments)).log_prob(y)
            return log_probs.logsumexp(0) - math.log(len(log_probs))
        nodes, weights = gauss_hermite(moments.mean, moments.var)
        element = self.distribution(nodes).base_dist
        return torch.logsumexp(element.log_prob(y) + weights.log(), 0).sum(-1)

    def _is_elementwise(self, f: Tensor) -> bool:
        """Whether y has a distribution for each function by itself, as far as shapes tell."""
        p = self.distribution(f)
        is_independent = isinstance(p, torch.distributions.Independent)
        return is_independent and p.base_dist.batch_shape == f.shape

    def check_targets(self, y: Tensor, num_outputs: int) -> Tensor:
        """y as the likelihood wants it, or an error; `(N,)` is read as one output."""
        if self.takes_integers and isinstance(y, Tensor) and not y.is_complex():
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
        check_tensor("y", y)
        check_has_values("y", y)
        check_finite("y", y)


class _Noise(nn.Module):
    """A positive scale, kept as its logarithm: a parameter if it is learned, else a buffer.

    With `is_closed` it is learned in closed form, although no optimiser gets a gradient of it.
    """

    log_scale: Tensor
    is_closed = False

    def __init__(self, log_scale: Tensor, learn: bool):
        super().__init__()
        if learn:
            self.log_scale = nn.Parameter(log_scale)
        else:
            self.register_buffer("log_scale", log_scale)

    def forward(self) -> Tensor:
        return self.log_scale.exp()


class _NoisyLikelihood(Likelihood):
    """y = f + noise with a scale of the noise, one or one per output.

    It is learned, fixed, or a site `noise_scale` with a prior.
    """

    def __init__(self, noise_scale: float | Tensor | PriorLike = 0.1, learn: bool = True):
        super().__init__()
        self.noise_prior: PriorLike | None = None
        if is_prior(noise_scale):
            shape = scale_shape(noise_scale)
            check_positive_prior("noise_scale", noise_scale, shape)
            self.noise_prior, noise_scale, learn = noise_scale, torch.ones(shape), False
        if isinstance(noise_scale, Tensor):
            (check_floating if noise_scale.is_complex() else check_tensor)(
                "noise_scale", noise_scale
            )
        try:
            value = torch.as_tensor(noise_scale, dtype=torch.get_default_dtype()).detach().clone()
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"`noise_scale` must be a number or one per output; got {noise_scale!r:.80}."
            ) from error
        if value.dim() > 1 or value.numel() == 0:
            raise ValueError(
                f"`noise_scale` must be a number or one per output, (C,); "
                f"got shape {tuple(value.shape)}."
            )
        for entry in [] if value.is_meta else value.flatten().tolist():
            check_positive("noise_scale", entry)
        self.noise = _Noise(value.log(), learn)

    @property
    def noise_scale(self) -> Tensor:
        """Scale of the noise, a scalar or `(C,)`; 1 if it is a site."""
        return self.noise.log_scale.exp()

    @property
    def parameter_priors(self) -> dict[str, PriorLike]:
        """Priors of the parameters that are sites."""
        return {} if self.noise_prior is None else {"noise_scale": self.noise_prior}

    def sample_parameters(self) -> dict[str, Tensor]:
        """Sample the parameters that have priors."""
        return {
            name: sample_scale(name, prior, self.noise_scale)
            for name, prior in self.parameter_priors.items()
        }


class GaussianLikelihood(_NoisyLikelihood):
    """y = f + noise, noise ~ N(0, noise_scale^2), independent over outputs.

    Args:
        noise_scale: standard deviation (sigma_f of the paper), one or one per output; or a prior of
            it, such as `pyro.distributions.LogNormal(-2.0, 1.0)`, which makes it a site.
        learn: whether it is a parameter.
    """

    has_closed_form = True

    def distribution(self, f: Tensor, noise_scale: Tensor | None = None) -> dist.Distribution:
        return dist.Normal(f, self.noise_scale if noise_scale is None else noise_scale).to_event(1)

    def expected_log_prob(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        noise_scale = self.noise_scale
        if noise_scale.numel() not in (1, moments.mean.shape[-1]) and noise_scale.dim() == 1:
            raise ValueError(
                f"`noise_scale` must be a number or one per output, ({moments.mean.shape[-1]},); "
                f"got shape {tuple(noise_scale.shape)}. Set `num_outputs` or give one noise scale."
            )
        return expected_log_normal(y, moments.mean, moments.var, noise_scale)

    def expected_derivatives(
        self, y: Tensor, moments: FunctionMoments, num_samples: int = 8
    ) -> ExpectedDerivatives:
        """Exact; nothing is drawn."""
        return expected_derivatives_normal(y, moments.mean, self.noise_scale)

    @property
    def closed_noise(self) -> nn.Parameter | None:
        """The logarithm of the noise scale, if it is learned."""
        log_scale = self.noise.log_scale
        is_learned = log_scale.requires_grad or self.noise.is_closed
        is_learned = isinstance(log_scale, nn.Parameter) and is_learned
        return cast(nn.Parameter, log_scale) if is_learned else None

    def keep_noise_from_optimizers(self) -> None:
        """Let `closed_noise` have no gradient, so that it is learned in closed form only.

        Optimisers then leave it alone, and so does their weight decay.
        """
        if self.closed_noise is not None:
            self.closed_noise.requires_grad_(False)
            self.noise.is_closed = True

    def expected_squares(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        """The sum of E_q (y - f)^2 = (y - m)^2 + v; a mean over outputs if they share their noise.

        In sigma the bound is -N log sigma - sum E_q (y - f)^2 / (2 sigma^2), whose maximum is at
        sigma^2 = sum E_q (y - f)^2 / N.
        """
        log_scale = self.noise.log_scale
        squares = (y - moments.mean).square() + moments.var  # (N, C)
        squares = squares if log_scale.numel() > 1 else squares.mean(-1, keepdim=True)
        return squares.sum(0).reshape(log_scale.shape)

    def predictive_moments(self, moments: FunctionMoments) -> tuple[Tensor, Tensor, Tensor]:
        return moments.mean, moments.var, self.noise_scale.square().expand_as(moments.mean)

    def predictive_log_prob(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        """log N(y | mean, cov + noise_scale^2 I), exactly, with the covariance between outputs."""
        mean, var, root = moments
        var = var + self.noise_scale.square()
        if root is None:
            return dist.Normal(mean, var.sqrt()).log_prob(y).sum(-1)
        own = torch.maximum(var - root.square().sum(0), self.noise_scale.square())
        return dist.LowRankMultivariateNormal(mean, root.movedim(0, -1), own).log_prob(y)


class HeteroscedasticLikelihood(_NoisyLikelihood):
    """y = f + noise with log noise variance eta(x), one more function per output.

    The functions are (f_1 .. f_C, eta_1 .. eta_C); eta = offset + its own additive process, so
    that the noise starts at `noise_scale`.

    Args:
        noise_scale: standard deviation of the noise where the process eta is zero, or a prior.
        learn: whether that level is a parameter.
    """

    has_closed_form = True
    coupling = 3.0  # |w r a b| <= w a^2 / 2 + w r^2 b^2 / 2 in the mixed second derivative

    def __init__(self, noise_scale: float | Tensor | PriorLike = 0.5, learn: bool = True):
        super().__init__(noise_scale, learn)

    def num_functions(self, num_outputs: int) -> int:
        return 2 * num_outputs

    def distribution(self, f: Tensor, noise_scale: Tensor | None = None) -> dist.Distribution:
        mean, eta = f.chunk(2, -1)
        log_scale = self.noise.log_scale if noise_scale is None else noise_scale.log()
        return dist.Normal(mean, (0.5 * eta + log_scale).exp()).to_event(1)

    def expected_log_prob(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        return expected_log_heteroscedastic(y, *self._parts(moments), _covariance(moments))

    def expected_derivatives(
        self, y: Tensor, moments: FunctionMoments, num_samples: int = 8
    ) -> ExpectedDerivatives:
        """Exact up to the bound of `_with_bounded_steps` for eta; nothing is drawn."""
        parts = (*self._parts(moments), _covariance(moments))
        exact = expected_derivatives_heteroscedastic(y, *parts)
        return _with_bounded_steps(exact, exact.gradient.new_tensor([math.inf, 4.0]))

    def predictive_moments(self, moments: FunctionMoments) -> tuple[Tensor, Tensor, Tensor]:
        """Var y = v_f + E exp(eta) = v_f + exp(m_eta + v_eta / 2)."""
        mean, var, eta_mean, eta_var = self._parts(moments)
        return mean, var, (eta_mean + 0.5 * eta_var).exp()

    def predictive_log_prob(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        """log E_eta N(y | m_f, v_f + exp(eta)) by quadrature, with the covariance of f and eta.

        Where functions covary, all of them are a lower triangular map of independent standard
        normals, first those of eta: given these, eta is known and f is normal.
        """
        mean, var, eta_mean, eta_var = self._parts(moments)
        if moments.root is None:
            eta, weights = gauss_hermite(eta_mean, eta_var)
            element = dist.Normal(mean, (var + eta.exp()).sqrt())
            return torch.logsumexp(element.log_prob(y) + weights.log(), 0).sum(-1)
        C = mean.shape[-1]
        root = moments.root.movedim(0, -2)  # (..., N, R, 2 C)
        own = (moments.var - root.square().sum(-2)).clamp(min=0)
        columns = torch.cat([root, torch.diag_embed(own.sqrt())], -2).roll(C, -1)  # eta before f
        upper = torch.linalg.qr(columns, mode="r").R  # (..., N, 2 C, 2 C)
        given = upper[..., C:, C:].mT  # a root of Cov(f | eta)
        parts = []
        for nodes, weights in zip(*(part.split(64) for part in normal_nodes(C, mean)), strict=True):
            shifts = torch.einsum("qc,...cf->q...f", nodes, upper[..., :C, :])  # (q, ..., N, 2 C)
            eta_shift, f_shift = shifts.chunk(2, -1)
            noise_var = (eta_mean + eta_shift).exp()
            root = given.expand(*noise_var.shape, C)
            y_given_eta = dist.LowRankMultivariateNormal(mean + f_shift, root, noise_var)
            log_weights = weights.log().reshape(-1, *[1] * (mean.dim() - 1))
            parts.append(torch.logsumexp(y_given_eta.log_prob(y) + log_weights, 0))
        return torch.logsumexp(torch.stack(parts), 0)

    def _parts(self, moments: FunctionMoments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mean and variance of f, and those of the log noise variance."""
        mean, eta_mean = moments.mean.chunk(2, -1)
        var, eta_var = moments.var.chunk(2, -1)
        return mean, var, eta_mean + 2 * self.noise.log_scale, eta_var


class StudentTLikelihood(_NoisyLikelihood):
    """y = f + noise with Student-t noise: robust to outliers. Expectations by Monte Carlo.

    Args:
        df: degrees of freedom, or a prior of it, which makes it a site `df`.
        noise_scale: scale of the noise, one or one per output, or a prior of it.
        learn: whether the scale is a parameter.
    """

    def __init__(
        self,
        df: float | PriorLike = 4.0,
        noise_scale: float | Tensor | PriorLike = 0.1,
        learn: bool = True,
    ):
        super().__init__(noise_scale, learn)
        self.df_prior: PriorLike | None = None
        if is_prior(df):
            check_positive_prior("df", df, torch.Size())
            self.df_prior, df = df, 4.0
        check_positive("df", df)
        self.df = float(cast(float, df))
        # The weight of the mixture of normals, which bounds the curvature, over the surrogate.
        self.coupling = (self.df + 3) / (self.df + 1)

    @property
    def parameter_priors(self) -> dict[str, PriorLike]:
        """Priors of the scale of the noise and of the degrees of freedom, if they have any."""
        own = {} if self.df_prior is None else {"df": self.df_prior}
        return super().parameter_priors | own

    def distribution(
        self, f: Tensor, noise_scale: Tensor | None = None, df: Tensor | None = None
    ) -> dist.Distribution:
        scale = self.noise_scale if noise_scale is None else noise_scale
        return dist.StudentT(self.df if df is None else df, f, scale).to_event(1)

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        """log of c / s (1 + r^2 / df)^(-(df + 1) / 2), r = (y - f) / s, summed over outputs."""
        half, log_scale = (self.df + 1) / 2, self.noise.log_scale
        constant = math.lgamma(half) - math.lgamma(self.df / 2) - 0.5 * math.log(self.df * math.pi)
        squares = ((y - f) * (-log_scale).exp()).square() / self.df
        return (constant - log_scale - half * squares.log1p()).sum(-1)

    def expected_derivatives(
        self, y: Tensor, moments: FunctionMoments, num_samples: int = 8
    ) -> ExpectedDerivatives:
        """The exact gradient and a surrogate of the curvature; nothing is drawn."""
        return expected_derivatives_student_t(y, *moments[:2], self.df, self.noise_scale)

    def predictive_moments(self, moments: FunctionMoments) -> tuple[Tensor, Tensor, Tensor]:
        """The variance of the noise is s^2 df / (df - 2), infinite for df <= 2."""
        factor = self.df / (self.df - 2) if self.df > 2 else math.inf
        noise_var = factor * self.noise_scale.square()
        return moments.mean, moments.var, noise_var.expand_as(moments.mean)

    def predictive_log_prob(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        """log density of f + noise at y, a normal and a Student-t variable, by quadrature."""
        residual = y - moments.mean
        return log_student_t(residual, moments.var, self.noise_scale, self.df).sum(-1)


class CategoricalLikelihood(Likelihood):
    """y ~ softmax(f): C classes, labels 0 .. C-1 of an integer dtype, `(N,)`."""

    has_bound = True
    coupling = 2.0  # the rows of diag(p) - p p^T sum to zero
    is_shift_invariant = True
    prior_scale = 3.0

    def distribution(self, f: Tensor) -> dist.Distribution:
        return dist.Categorical(logits=f)

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        """The log softmax of f at the label."""
        labels = y.expand(f.shape[:-1]).unsqueeze(-1)
        return f.log_softmax(-1).gather(-1, labels).squeeze(-1)

    def expected_derivatives(
        self, y: Tensor, moments: FunctionMoments, num_samples: int = 8
    ) -> ExpectedDerivatives:
        """1{y = c} - E p_c and E p_c (1 - p_c), p = softmax(f), from antithetic draws of f.

        The draws are fresh at each call, so that averages over calls have no bias. With more than
        100 classes there are fewer of them, at least two: a row draws all of its classes, and
        precisions that classes share average over these as well.
        """
        num_samples = max(2, min(num_samples, num_samples * 100 // moments.mean.shape[-1]))
        p = _antithetic_draws(moments, num_samples).softmax(-1)
        gradient = nn.functional.one_hot(y, p.shape[-1]) - p.mean(0)
        curvature = (p * (1 - p)).mean(0)
        return _with_bounded_steps(ExpectedDerivatives(gradient, curvature), 32.0)

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
        return class_averages(draws)

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
        super().check_values(y, num_outputs)
        _check_range(y, 0, num_outputs - 1, "Labels count from 0; set `num_outputs`.")


class BernoulliLikelihood(Likelihood):
    """y in {0, 1} with log odds f, independent over outputs."""

    takes_integers = True
    has_bound = True
    prior_scale = 3.0

    def distribution(self, f: Tensor) -> dist.Distribution:
        return dist.Bernoulli(logits=f).to_event(1)

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        """y f - log(1 + exp f), summed over outputs."""
        return (y * f - nn.functional.softplus(f)).sum(-1)

    def expected_log_prob_bound(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        """y m less the bound of E log(1 + exp f), the normalizer of the softmax over (0, f)."""
        with_zero = [
            nn.functional.pad(part.unsqueeze(-1), (1, 0)) for part in (moments.mean, moments.var)
        ]
        return (y * moments.mean - log_normalizer_bound(FunctionMoments(*with_zero))).sum(-1)

    def expected_derivatives(
        self, y: Tensor, moments: FunctionMoments, num_samples: int = 8
    ) -> ExpectedDerivatives:
        """y - E sigmoid(f) and E sigmoid'(f), to 2e-8; nothing is drawn."""
        probability, slope = expected_sigmoid(*moments[:2])
        return _with_bounded_steps(ExpectedDerivatives(y - probability, slope), 32.0)

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
        super().check_values(y, num_outputs)
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

    def expected_derivatives(
        self, y: Tensor, moments: FunctionMoments, num_samples: int = 8
    ) -> ExpectedDerivatives:
        """y - E exp f and E exp f = exp(m + v / 2), exact up to `_with_bounded_steps`."""
        rate = (moments.mean + 0.5 * moments.var).exp()
        return _with_bounded_steps(ExpectedDerivatives(y - rate, rate), 4.0)

    def predictive_moments(self, moments: FunctionMoments) -> tuple[Tensor, Tensor, Tensor]:
        """E y = E exp f = exp(m + v / 2), Var exp f = (exp(v) - 1) E[y]^2, E Var[y | f] = E y.

        The variance is computed as exp(m + v) (1 - exp(-v)) exp(m + v): where exp(v) overflows and
        E y underflows, their product would be NaN.
        """
        mean = (moments.mean + 0.5 * moments.var).exp()
        factor = (moments.mean + moments.var).exp()
        return mean, factor * -torch.expm1(-moments.var) * factor, mean

    def predictive_log_prob(self, y: Tensor, moments: FunctionMoments) -> Tensor:
        """log E exp(y f - exp f) / y!, by quadrature around the mode."""
        return log_expectation(
            lambda f: y * f - f.exp() - torch.lgamma(y + 1),
            lambda f: (y - f.exp(), -f.exp()),
            *moments[:2],
        ).sum(-1)

    def check_values(self, y: Tensor, num_outputs: int) -> None:
        super().check_values(y, num_outputs)
        _check_range(y, 0, math.inf, "Counts are not negative.")
        if not bool((y == y.round()).all()):
            raise ValueError("`y` must hold whole numbers: they are counts.")


def _fixed_draws(moments: FunctionMoments, num_samples: int = 1000) -> Tensor:
    """Draws of f, `(S, ..., N, F)`, the same at every call and for every row."""
    generator = torch.Generator(moments.mean.device).manual_seed(0)
    return sample_marginals(moments, num_samples, generator)


def _moments_by_draws(y: dist.Distribution) -> tuple[Tensor, Tensor, Tensor]:
    """Mean of y, its epistemic and its aleatoric variance, `(..., N, C)`, over a batch of draws."""
    means, variances = y.mean, y.variance
    if isinstance(y, torch.distributions.Categorical):  # has none of its own
        values = torch.arange(y.probs.shape[-1]).to(y.probs)
        means = (y.probs * values).sum(-1)
        variances = (y.probs * (values - means.unsqueeze(-1)).square()).sum(-1)
    if not y.event_shape:
        means, variances = means.unsqueeze(-1), variances.unsqueeze(-1)
    return means.mean(0), means.var(0), variances.mean(0)


def _antithetic_draws(moments: FunctionMoments, num_samples: int) -> Tensor:
    """Draws of f, half of them the others mirrored at the mean, `(S, ..., N, F)`; S is even.

    Functions with hardly any variance are spread a little, so that slopes can be seen.
    """
    smallest = torch.finfo(moments.var.dtype).eps ** (2 / 3)
    var = torch.maximum(moments.var, smallest * (1 + moments.mean.square()))
    f = sample_marginals(moments._replace(var=var), max(1, num_samples // 2))
    return torch.cat([f, 2 * moments.mean - f])


def _with_bounded_steps(
    derivatives: ExpectedDerivatives, longest: float | Tensor
) -> ExpectedDerivatives:
    """The derivatives with curvature of at least |gradient| / longest.

    A Newton step of a single datum is then at most `longest`, for functions that are logarithms of
    something: where curvature has all but gone, as in the tail of a sigmoid, it would be of any
    length. Near the optimum, where gradients are small against curvature, nothing changes. With a
    tensor, each kind of function has its own bound; the functions of a kind follow each other.
    """
    gradient, curvature = derivatives
    if isinstance(longest, Tensor):
        longest = longest.repeat_interleave(gradient.shape[-1] // len(longest))
    return ExpectedDerivatives(gradient, torch.maximum(curvature, gradient.abs() / longest))


def _covariance(moments: FunctionMoments) -> Tensor | float:
    """Covariance of the two functions of each output, `(..., N, C)`."""
    if moments.root is None:
        return 0.0
    return torch.mul(*moments.root.chunk(2, -1)).sum(0)


def _check_range(y: Tensor, low: float, high: float, remedy: str) -> None:
    if y.numel() and not bool(((y >= low) & (y <= high)).all()):
        raise ValueError(
            f"`y` must lie between {low} and {high}; got values from {y.min().item()} "
            f"to {y.max().item()}. {remedy}"
        )
