"""Closed forms for Gaussian q: moments of f, expected log-likelihoods, bounds, KL divergences."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_dak.additive.activation import KernelActivation, Route
from pyro_dak.validation import (
    check_finite,
    check_floating,
    check_last_dim,
    check_rank,
    check_shape,
)

__all__ = [
    "FunctionMoments",
    "expected_log_categorical_bound",
    "expected_log_heteroscedastic",
    "expected_log_normal",
    "kl_diagonal",
    "kl_diagonals",
    "kl_elements",
    "kl_low_rank",
    "kl_tril",
    "kl_tril_to_tril",
    "log_normalizer_bound",
    "mean_field_moments",
    "sample_marginals",
    "total_expected_log_normal",
]

_LOG_2PI = math.log(2 * math.pi)


class FunctionMoments(NamedTuple):
    """The Gaussian q(f(x)) of every row: mean and variance `(..., N, F)` of F functions.

    `root`, if given, is `(R, ..., N, F)`: the covariance of functions a and b at a row is
    sum_r root[r, a] root[r, b] for a != b, and `var` contains sum_r root[r]^2. Without a root the
    functions are independent.
    """

    mean: Tensor
    var: Tensor
    root: Tensor | None = None

    def covariance(self, a: slice, b: slice) -> Tensor | float:
        """Covariance of functions a with functions b, pairwise; a and b are disjoint."""
        if self.root is None:
            return 0.0
        return (self.root[..., a] * self.root[..., b]).sum(0)


def sample_marginals(
    moments: FunctionMoments, num_samples: int, generator: torch.Generator | None = None
) -> Tensor:
    """Draws of f at every row from its exact marginal, `(S, ..., N, F)`.

    Functions that share a root are drawn with their covariance. Rows are independent; with a
    `generator` they share the same standard normals instead, so that what a row gets does not
    depend on the rows beside it.
    """
    mean, var, root = moments
    rows = mean.shape[:-1] if generator is None else (1,) * (mean.dim() - 1)
    options: dict[str, Any] = {"dtype": mean.dtype, "device": mean.device, "generator": generator}
    noise = torch.randn(num_samples, *rows, mean.shape[-1], **options)
    if root is None:
        return mean + var.sqrt() * noise
    shared = torch.randn(num_samples, len(root), *rows, **options)
    shared = shared.expand(num_samples, len(root), *mean.shape[:-1])
    own = (var - root.square().sum(0)).clamp(min=0)  # zero up to rounding where the root is all
    return mean + own.sqrt() * noise + torch.einsum("sr...,r...f->s...f", shared, root)


def mean_field_moments(
    activation: KernelActivation,
    h: Tensor,
    z_loc: Tensor,
    z_scale: Tensor,
    unit_scale: Tensor,
    mu_loc: Tensor,
    mu_scale: Tensor,
    route: Route = "auto",
) -> tuple[Tensor, Tensor]:
    """Mean and variance of f under a mean-field q, each `(..., N, C)` (paper, eq. 17).

        E f = sum_p sigma_p phi_p . m_p + m_mu,   Var f = sum_p sigma_p^2 phi_p^2 . s_p^2 + s_mu^2

    Args:
        activation: phi.
        h: inputs of the units, `(..., N, P)`.
        z_loc: means of the weights, `(..., C, P, M)`.
        z_scale: their standard deviations, like `z_loc`.
        unit_scale: sigma, `(P,)`.
        mu_loc: mean of the bias, `(..., C)`.
        mu_scale: its standard deviation, `(..., C)`.
        route: "dense", "local", or "auto" for the faster one.
    """
    check_floating("h", h)
    check_rank("h", h, ("N", "P"))
    check_rank("z_loc", z_loc, ("C", "P", "M"))
    P = z_loc.shape[-2]
    check_last_dim("h", h, P, "one per additive unit", f"Set `num_units={h.shape[-1]}` or embed.")
    check_shape("z_loc", z_loc, (P, activation.num_inducing), "units x inducing points")
    check_shape("z_scale", z_scale, tuple(z_loc.shape[-3:]), "like `z_loc`")
    check_shape("unit_scale", unit_scale, (P,), "one per unit")
    check_finite("h", h)
    weights = (z_loc, z_scale, unit_scale, mu_loc, mu_scale)
    return activation.mean_field_moments(h, *weights, route)


class _ExpectedLogNormal(torch.autograd.Function):
    """`expected_log_normal` as one operation; differentiable as often as one likes.

    With r = y - m and p = s^-2 the gradients per output are p r for m, -p r for y, -p / 2 for v
    and (p (r^2 + v) - 1) / s for s.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, f_mean: Tensor, f_var: Tensor, noise_scale: Tensor) -> Tensor:
        ctx.save_for_backward(y, f_mean, f_var, noise_scale)
        r = y - f_mean
        weight = noise_scale.square().mul_(-2).reciprocal_()
        constant = noise_scale.log().add_(0.5 * _LOG_2PI)
        return torch.addcmul(f_var, r, r).mul(weight).sub_(constant).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, f_mean, f_var, noise_scale = ctx.saved_tensors
        grad = grad.unsqueeze(-1)
        r = y - f_mean
        weighted = grad * noise_scale.square().reciprocal()
        grad_y = grad_mean = grad_var = grad_scale = None
        if ctx.needs_input_grad[0]:
            grad_y = (-weighted * r).sum_to_size(y.shape)
        if ctx.needs_input_grad[1]:
            grad_mean = (weighted * r).sum_to_size(f_mean.shape)
        if ctx.needs_input_grad[2]:
            grad_var = (-0.5 * weighted).expand_as(r).sum_to_size(f_var.shape)
        if ctx.needs_input_grad[3]:
            total = (weighted * torch.addcmul(f_var, r, r) - grad).sum_to_size(noise_scale.shape)
            grad_scale = total / noise_scale
        return grad_y, grad_mean, grad_var, grad_scale


def expected_log_normal(
    y: Float[Tensor, "*batch n c"],
    f_mean: Float[Tensor, "*#batch n c"],
    f_var: Float[Tensor, "*#batch n c"],
    noise_scale: Float[Tensor, "..."],
) -> Float[Tensor, "*batch n"]:
    """E_q log N(y | f, noise_scale^2), summed over the outputs, `(..., N)` (paper, eq. 23).

    -(log 2 pi + log s^2 + ((y - m)^2 + v) / s^2) / 2 for each output; `noise_scale` is a scalar
    or one per output, `(C,)`.
    """
    return _ExpectedLogNormal.apply(y, f_mean, f_var, noise_scale)


class _TotalExpectedLogNormal(torch.autograd.Function):
    """See `total_expected_log_normal`; differentiable as often as one likes.

    With r = y - m, p = s^-2 and S = sum_n r^2 + v the gradients are p r for m, -p r for y, -p / 2
    for v and p S - N for log s.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, f_mean: Tensor, f_var: Tensor, log_scale: Tensor) -> Tensor:
        ctx.save_for_backward(y, f_mean, f_var, log_scale)
        N, C = y.shape
        r = y - f_mean
        S = torch.addcmul(f_var, r, r).sum(0)  # (C,)
        total = torch.addcmul(N * log_scale, (-2 * log_scale).exp_(), S, value=0.5).sum()
        return total.add_(0.5 * N * C * _LOG_2PI).neg_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, f_mean, f_var, log_scale = ctx.saved_tensors
        r = y - f_mean
        weight = grad * (-2 * log_scale).exp()
        grad_mean = r * weight
        grad_y = -grad_mean if ctx.needs_input_grad[0] else None
        grad_log_scale = None
        if ctx.needs_input_grad[3]:
            S = torch.addcmul(f_var, r, r).sum(0)
            grad_log_scale = (S * weight - len(r) * grad).sum_to_size(log_scale.shape)
        return grad_y, grad_mean, (-0.5 * weight).expand_as(r), grad_log_scale


def total_expected_log_normal(
    y: Float[Tensor, "n c"],
    f_mean: Float[Tensor, "n c"],
    f_var: Float[Tensor, "n c"],
    log_noise_scale: Float[Tensor, "..."],
) -> Float[Tensor, ""]:
    """Sum of `expected_log_normal` over rows, a scalar, from log s, which is one or one per output.

    -(sum_n ((y - m)^2 + v) / s^2 + N log(2 pi s^2)) / 2 for each output.
    """
    return _TotalExpectedLogNormal.apply(y, f_mean, f_var, log_noise_scale)


def expected_log_heteroscedastic(
    y: Float[Tensor, "*batch n c"],
    f_mean: Float[Tensor, "*#batch n c"],
    f_var: Float[Tensor, "*#batch n c"],
    eta_mean: Float[Tensor, "*#batch n c"],
    eta_var: Float[Tensor, "*#batch n c"],
    covariance: Float[Tensor, "*#batch n c"] | float = 0.0,
) -> Float[Tensor, "*batch n"]:
    """E_q log N(y | f, exp(eta)) for jointly Gaussian f and eta, summed over outputs, `(..., N)`.

    E exp(-eta) = exp(-m_eta + v_eta / 2), and under the density tilted by exp(-eta) f keeps its
    variance while its mean moves by -c = -cov(f, eta). Hence, for each output,
    -(log 2 pi + m_eta + ((y - m_f + c)^2 + v_f) exp(-m_eta + v_eta / 2)) / 2.
    """
    squares = ((y - f_mean + covariance).square() + f_var) * (0.5 * eta_var - eta_mean).exp()
    return -0.5 * (_LOG_2PI + eta_mean + squares).sum(-1)


def _var_of_shifted(a: Tensor, moments: FunctionMoments) -> Tensor:
    """Var(f_c - a^T f) of each function, `(..., N, F)`: of its own part and of the shared one."""
    own = moments.var
    if moments.root is not None:
        own = (own - moments.root.square().sum(0)).clamp(min=0)
    var = (1 - 2 * a) * own + (a.square() * own).sum(-1, keepdim=True)
    if moments.root is not None:
        shifted = moments.root - (a * moments.root).sum(-1, keepdim=True)  # (R, ..., N, F)
        var = var + shifted.square().sum(0)
    return var


def log_normalizer_bound(moments: FunctionMoments, num_steps: int = 3) -> Float[Tensor, "*batch n"]:
    """An upper bound of E_q log sum_c exp f_c, `(..., N)`.

    For any a, log sum_c exp f_c = a^T f + log sum_c exp(f_c - a^T f). Jensen's inequality on the
    second part gives, with f ~ N(m, V),

        B(a) = log sum_c exp(m_c + Var(f_c - a^T f) / 2)

    (Knowles and Minka, 2011). a = 0 is Jensen's inequality alone. B is convex, with gradient
    V (a - s), s the softmax of the exponents, and Hessian V + V (diag(s) - s s^T) V, at most
    (1 + t / 2) V for any t above the eigenvalues of V, since diag(s) - s s^T is at most I / 2.
    Steps a + (s - a) / (1 + t / 2) from a = 0 therefore never loosen the bound. Gradients are
    those of B at the a that was found: where B is least, its derivative in a is zero.

    Args:
        moments: m and V.
        num_steps: how often a is improved.
    """
    with torch.no_grad():
        largest = moments.var.amax(-1, keepdim=True)
        if moments.root is not None:
            largest = largest + moments.root.square().sum((0, -1)).unsqueeze(-1)
        a = torch.zeros_like(moments.var)
        for _ in range(num_steps):
            exponents = moments.mean + 0.5 * _var_of_shifted(a, moments)
            a = torch.lerp(a, exponents.softmax(-1), 1 / (1 + 0.5 * largest))
    return torch.logsumexp(moments.mean + 0.5 * _var_of_shifted(a, moments), -1)


def expected_log_categorical_bound(
    y: Int[Tensor, "*batch n"], moments: FunctionMoments
) -> Float[Tensor, "*batch n"]:
    """A lower bound of E_q log softmax(f)_y, `(..., N)`: m_y - `log_normalizer_bound`."""
    at_label = moments.mean.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    return at_label - log_normalizer_bound(moments)


class _KLDiagonals(torch.autograd.Function):
    """`kl_diagonals` for one prior, two numbers, as one operation; differentiable at will.

    With r = s / s0 the gradients are (m - m0) / s0^2 for m and r^2 - 1 for log s.
    """

    @staticmethod
    def forward(ctx: Any, prior: tuple[float, float], *parameters: Tensor) -> Tensor:
        ctx.prior = prior
        ctx.save_for_backward(*parameters)
        total = parameters[0].new_zeros(())
        for loc, log_scale in zip(parameters[::2], parameters[1::2], strict=True):
            shift, log_ratio = _whitened(loc.reshape(-1), log_scale.reshape(-1), prior)
            # By element: a sum of squares minus their number would cancel where q is the prior.
            rest = (2 * log_ratio).exp_().sub_(1).sub_(log_ratio, alpha=2)
            total.add_(torch.dot(shift, shift)).add_(rest.sum())
        return total.div_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        parameters = ctx.saved_tensors
        minus_grad, grad_shift = -grad, grad / ctx.prior[1]
        grads: list[Tensor] = []
        for loc, log_scale in zip(parameters[::2], parameters[1::2], strict=True):
            shift, log_ratio = _whitened(loc, log_scale, ctx.prior)
            grads.append(shift * grad_shift)
            grads.append(torch.addcmul(minus_grad, grad, (2 * log_ratio).exp()))
        return None, *grads


def _whitened(loc: Tensor, log_scale: Tensor, prior: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """(m - m0) / s0 and log (s / s0)."""
    if prior == (0, 1):
        return loc, log_scale
    return (loc - prior[0]) / prior[1], log_scale - math.log(prior[1])


def kl_diagonals(
    sites: Sequence[tuple[Tensor, Tensor]], priors: Sequence[tuple[Any, Any]]
) -> Float[Tensor, ""]:
    """Sum of `kl_diagonal` over sites, each (loc, log_scale), from their priors (loc, scale)."""
    is_number = all(isinstance(p, int | float) for prior in priors for p in prior)
    if is_number and all(prior == priors[0] for prior in priors):
        return _KLDiagonals.apply(tuple(priors[0]), *(part for site in sites for part in site))
    pairs = zip(sites, priors, strict=True)
    parts = [kl_diagonal(loc, log_scale.exp(), *prior) for (loc, log_scale), prior in pairs]
    return torch.stack(parts).sum()


def kl_diagonal(
    loc: Float[Tensor, "*shape"],
    scale: Float[Tensor, "*shape"],
    prior_loc: Float[Tensor, "..."] | float = 0.0,
    prior_scale: Float[Tensor, "..."] | float = 1.0,
) -> Float[Tensor, ""]:
    """KL of independent normals from independent normals, summed over all elements, a scalar.

    sum (r^2 + ((m - m0) / s0)^2 - 1) / 2 - log r with r = s / s0.
    """
    return kl_elements((loc - prior_loc) / prior_scale, (scale / prior_scale).log()).sum()


def kl_elements(
    loc: Float[Tensor, "*shape"], log_scale: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """KL of N(m, s^2) from N(0, 1) of every element: (s^2 + m^2 - 1) / 2 - log s."""
    return 0.5 * (loc.square() + (2 * log_scale).exp() - 1) - log_scale


def kl_tril(
    loc: Float[Tensor, "*blocks k"],
    scale_tril: Float[Tensor, "*blocks k k"],
    prior_loc: Float[Tensor, "..."] | float = 0.0,
    prior_scale: Float[Tensor, "..."] | float = 1.0,
) -> Float[Tensor, ""]:
    """KL of N(loc, T T^T) from independent normals, summed over blocks, a scalar.

    Block-diagonal covariances are a batch of blocks; one block is the full covariance.

    Args:
        loc: means.
        scale_tril: lower Cholesky factors T with positive diagonal.
        prior_loc: means of the prior, broadcast to `loc`.
        prior_scale: standard deviations of the prior, broadcast to `loc`.
    """
    prior_scale = torch.as_tensor(prior_scale, dtype=loc.dtype, device=loc.device).expand_as(loc)
    trace = (scale_tril / prior_scale.unsqueeze(-1)).square().sum()
    shift = ((loc - prior_loc) / prior_scale).square().sum()
    log_ratio = (scale_tril.diagonal(dim1=-2, dim2=-1) / prior_scale).log().sum()
    return 0.5 * (trace + shift - loc.numel()) - log_ratio


def kl_tril_to_tril(
    loc: Float[Tensor, "*blocks k"],
    scale_tril: Float[Tensor, "*blocks k k"],
    prior_loc: Float[Tensor, "*#blocks k"],
    prior_scale_tril: Float[Tensor, "*#blocks k k"],
) -> Float[Tensor, ""]:
    """KL of N(loc, T T^T) from N(loc0, T0 T0^T), summed over blocks, a scalar: whiten by T0."""
    whitened = torch.linalg.solve_triangular(prior_scale_tril, scale_tril, upper=False)
    shift = (loc - prior_loc).unsqueeze(-1)
    shift = torch.linalg.solve_triangular(prior_scale_tril, shift, upper=False)
    log_ratio = whitened.diagonal(dim1=-2, dim2=-1).log().sum()
    return 0.5 * (whitened.square().sum() + shift.square().sum() - loc.numel()) - log_ratio


def kl_low_rank(
    loc: Float[Tensor, " k"],
    scale: Float[Tensor, " k"],
    factor: Float[Tensor, "k rank"],
    prior_loc: Float[Tensor, "..."] | float = 0.0,
    prior_scale: Float[Tensor, "..."] | float = 1.0,
) -> Float[Tensor, ""]:
    """KL of N(loc, diag(scale^2) + F F^T) from independent normals, a scalar; O(k rank^2).

    The determinant lemma gives log det = sum log scale^2 + log det(I + F^T diag(scale^-2) F).
    """
    whitened = factor / scale.unsqueeze(-1)  # (k, rank)
    capacitance = whitened.mT @ whitened
    capacitance = capacitance + torch.eye(
        factor.shape[-1], dtype=factor.dtype, device=factor.device
    )
    log_det = torch.linalg.cholesky(capacitance).diagonal().log().sum()
    prior_scale = torch.as_tensor(prior_scale, dtype=loc.dtype, device=loc.device).expand_as(loc)
    spread = (factor / prior_scale.unsqueeze(-1)).square().sum()
    return kl_diagonal(loc, scale, prior_loc, prior_scale) + 0.5 * spread - log_det
