"""Closed forms for Gaussian q: moments of f, expected log-likelihoods, bounds, KL divergences."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_dak.additive.activation import KernelActivation, Route
from pyro_dak.annotations import Bool, Float, Int
from pyro_dak.fast import classes, fused
from pyro_dak.fast.transforms import needs_plain_operations
from pyro_dak.validation import (
    check_finite,
    check_floating,
    check_last_dim,
    check_shape,
)

__all__ = [
    "ExpectedDerivatives",
    "FunctionMoments",
    "class_averages",
    "compact",
    "draws_of_moments",
    "expected_derivatives_heteroscedastic",
    "expected_derivatives_normal",
    "expected_derivatives_student_t",
    "expected_log_categorical_bound",
    "expected_log_heteroscedastic",
    "expected_log_normal",
    "kl_diagonal",
    "kl_elements",
    "kl_low_rank",
    "kl_tril",
    "log_normalizer_bound",
    "mean_field_moments",
    "moments_of_draws",
    "sample_marginals",
    "tril_of_inverse",
]

_LOG_2PI = math.log(2 * math.pi)
# Of the trapezium rule in log t: their distance is then at most a half for all but huge ratios.
_NUM_NODES = 96
# From so many numbers on, averages over draws of classes have a faster way.
_MANY_NUMBERS = 2**14
# Sums of probabilities have their precision if they are so many times the smallest normal number.
_TINY_FACTOR = 1e8


class FunctionMoments(NamedTuple):
    """The Gaussian q(f(x)) of every row: mean and variance `(..., N, F)` of F functions.

    `root`, if given, is `(R, ..., N, F)`: the covariance of functions a and b at a row is
    sum_r root[r, a] root[r, b] for a != b, and `var` contains sum_r root[r]^2. Without a root the
    functions are independent.
    """

    mean: Tensor
    var: Tensor
    root: Tensor | None = None


def compact(moments: FunctionMoments) -> FunctionMoments:
    """The same q(f) with a root of at most F rows, and with none for a single function."""
    mean, var, root = moments
    F = mean.shape[-1]
    if root is None or F == 1:
        return FunctionMoments(mean, var)
    if len(root) > F:  # A = Q R has A^T A = R^T R
        root = torch.linalg.qr(root.movedim(0, -2), mode="r").R.movedim(-2, 0)
    return FunctionMoments(mean, var, root)


def moments_of_draws(f: Tensor) -> FunctionMoments:
    """Mean and covariance over S draws of f `(S, ..., N, F)`, with S - 1 in the denominator.

    Row s of the root is (f_s - mean) / sqrt(S - 1), so that the draws can be had back: see
    `draws_of_moments`. A single draw has no variance.
    """
    mean = f.mean(0)
    root = (f - mean) / math.sqrt(max(len(f) - 1, 1))
    return FunctionMoments(mean, root.square().sum(0), root)


def draws_of_moments(moments: FunctionMoments) -> Tensor:
    """The draws, `(S, ..., N, F)`, that `moments_of_draws` has made these moments of."""
    mean, _, root = moments
    assert root is not None
    return mean + math.sqrt(max(len(root) - 1, 1)) * root


class ExpectedDerivatives(NamedTuple):
    """Expected derivatives of log p(y | f) by each function at every row, `(..., N, F)` each.

    The gradient is E_q[d log p / d f], and the curvature is -E_q[d^2 log p / d f^2], or a number
    near it that is not negative.
    """

    gradient: Tensor
    curvature: Tensor


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
    # Nothing, up to rounding, where the root is all; but the square root needs a gradient there.
    own = (var - root.square().sum(0)).clamp(min=torch.finfo(var.dtype).tiny)
    return mean + own.sqrt() * noise + torch.einsum("sr...,r...f->s...f", shared, root)


def class_averages(
    draws: Float[Tensor, "s *batch n c"],
) -> tuple[Float[Tensor, "*batch n c"], Float[Tensor, "*batch n"]]:
    """The log of the mean of softmax(f) over S draws of f, and the mean of its entropy.

    log p_c = log mean_s softmax(f_s)_c, `(..., N, C)`, and mean_s H[softmax(f_s)], `(..., N)`.
    """
    is_fast = draws.numel() >= _MANY_NUMBERS and draws.device.type == "cpu"
    if not is_fast or draws.requires_grad or needs_plain_operations():
        log_probs = draws.log_softmax(-1)
        entropies = -(log_probs.exp() * log_probs).sum(-1)
        return torch.logsumexp(log_probs, 0) - math.log(len(draws)), entropies.mean(0)
    flat = draws.flatten(1, -2)
    probs, entropies = classes.averaged_classes(flat)
    log_probs = probs.log()
    is_tiny = (probs < _TINY_FACTOR * torch.finfo(probs.dtype).tiny).any(-1)
    if bool(is_tiny.any()):  # the logarithm itself may still be a number
        exact = flat[:, is_tiny].log_softmax(-1).logsumexp(0) - math.log(len(draws))
        log_probs[is_tiny] = exact
    return log_probs.view(draws.shape[1:]), entropies.view(draws.shape[1:-1])


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
        h: inputs of the units, `(..., N, P)`.
        z_loc: means of the weights, `(..., C, P, M)`.
        z_scale: their standard deviations, like `z_loc`.
        unit_scale: sigma, `(P,)`.
        mu_loc: mean of the bias, `(..., C)`.
        mu_scale: its standard deviation, `(..., C)`.
        route: "dense", "local", or "auto" for the faster one.
    """
    check_floating("h", h)
    check_shape("h", h, ("N", "P"), "rows x units")
    M = activation.num_inducing
    check_shape("z_loc", z_loc, ("C", "P", M), "outputs x units x inducing points")
    P = z_loc.shape[-2]
    check_last_dim("h", h, P, "one per additive unit", f"Set `num_units={h.shape[-1]}` or embed.")
    check_shape("z_scale", z_scale, tuple(z_loc.shape[-3:]), "like `z_loc`")
    check_shape("unit_scale", unit_scale, (P,), "one per unit")
    check_finite("h", h)
    mean, var = activation.combine_moments(h, z_loc, z_scale.square(), route, unit_scale)
    return mean + mu_loc.unsqueeze(-2), var + mu_scale.square().unsqueeze(-2)


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
    if not needs_plain_operations():
        return fused.ExpectedLogNormal.apply(y, f_mean, f_var, noise_scale)
    squares = (y - f_mean).square() + f_var
    return -0.5 * (_LOG_2PI + 2 * noise_scale.log() + squares / noise_scale.square()).sum(-1)


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
    if isinstance(covariance, float) and covariance == 0 and not needs_plain_operations():
        return fused.ExpectedLogHeteroscedastic.apply(y, f_mean, f_var, eta_mean, eta_var)
    squares = ((y - f_mean + covariance).square() + f_var) * (0.5 * eta_var - eta_mean).exp()
    return -0.5 * (_LOG_2PI + eta_mean + squares).sum(-1)


def expected_derivatives_normal(
    y: Float[Tensor, "*batch n c"],
    f_mean: Float[Tensor, "*batch n c"],
    noise_scale: Float[Tensor, "..."],
) -> ExpectedDerivatives:
    """Expected derivatives of log N(y | f, s^2) by f: (y - m) / s^2 and 1 / s^2, exactly."""
    precision = noise_scale.square().reciprocal().expand_as(f_mean)
    return ExpectedDerivatives((y - f_mean) * precision, precision)


def expected_derivatives_heteroscedastic(
    y: Float[Tensor, "*batch n c"],
    f_mean: Float[Tensor, "*#batch n c"],
    f_var: Float[Tensor, "*#batch n c"],
    eta_mean: Float[Tensor, "*#batch n c"],
    eta_var: Float[Tensor, "*#batch n c"],
    covariance: Float[Tensor, "*#batch n c"] | float = 0.0,
) -> ExpectedDerivatives:
    """Expected derivatives of log N(y | f, exp(eta)) by f, then by eta, `(..., N, 2 C)`, exactly.

    With w = E exp(-eta) = exp(-m_eta + v_eta / 2), r = y - m_f + cov(f, eta) and Q = r^2 + v_f, the
    expectation of exp(-eta) (y - f)^2 is w Q (see `expected_log_heteroscedastic`). Hence

        by f: gradient w r, curvature w;   by eta: gradient (w Q - 1) / 2, curvature w Q / 2.
    """
    r = y - f_mean + covariance
    w = (0.5 * eta_var - eta_mean).exp()
    w_Q = w * (r.square() + f_var)
    gradient = torch.cat([w * r, 0.5 * (w_Q - 1)], -1)
    return ExpectedDerivatives(gradient, torch.cat([w, 0.5 * w_Q], -1))


def expected_derivatives_student_t(
    y: Float[Tensor, "*batch n c"],
    f_mean: Float[Tensor, "*#batch n c"],
    f_var: Float[Tensor, "*#batch n c"],
    df: float,
    noise_scale: Float[Tensor, "..."],
) -> ExpectedDerivatives:
    """Expected derivatives of log StudentT(y | df, f, s) by f, `(..., N, C)`.

    The gradient is E[(df + 1) r / (df s^2 + r^2)] with r ~ N(d, v), d = y - m. Since
    1 / a = int_0^inf exp(-a u) du and the expectation of r exp(-u r^2) is closed, it is

        (df + 1) d / a int_0^inf exp(-t) D^{-3/2} exp(-t d^2 / (a D)) dt,   D = 1 + 2 t v / a,

    with a = df s^2: a smooth integrand, for which the trapezium rule in log t is exact up to
    rounding, however narrow the noise is against q(f).

    The second derivative is negative far from f, so the curvature is a surrogate: the weight
    (df + 1) / (a + d^2 + v), which the datum has when the t is written as a mixture of normals,
    times (df + 1) / (df + 3). For a narrow q its mean over y is (df + 1) / ((df + 3) s^2), the
    Fisher information, which is the mean of the second derivative too; outliers count little.
    """
    d, a = y - f_mean, df * noise_scale.square()
    ratio, spread = d.square() / a, 2 * f_var / a
    # The integrand grows like t up to 1 / (1 + ratio + spread) and ends by t = 40.
    low = -(1 + ratio + spread).log() - 20
    step = (math.log(40.0) - low) / (_NUM_NODES - 1)
    nodes = torch.arange(_NUM_NODES, dtype=d.dtype, device=d.device)
    log_t = low + step * nodes.reshape(-1, *[1] * d.dim())
    t = log_t.exp()
    D = 1 + t * spread
    integral = step * (log_t - t - 1.5 * D.log() - t * ratio / D).exp().sum(0)
    curvature = (df + 1) ** 2 / (df + 3) / (a + d.square() + f_var)
    return ExpectedDerivatives((df + 1) * d / a * integral, curvature)


def _var_of_shifted(a: Tensor, moments: FunctionMoments) -> Tensor:
    """Var(f_c - a^T f) of each function, `(..., N, F)`: of its own part and of the shared one."""
    own, root = moments.var, moments.root
    if root is not None:
        own = (own - root.square().sum(0)).clamp(min=0)
    var = (1 - 2 * a) * own + (a.square() * own).sum(-1, keepdim=True)
    if root is None:
        return var
    return var + (root - (a * root).sum(-1, keepdim=True)).square().sum(0)


def log_normalizer_bound(moments: FunctionMoments, num_steps: int = 3) -> Float[Tensor, "*batch n"]:
    """An upper bound of E_q log sum_c exp f_c, `(..., N)`.

    For any a, log sum_c exp f_c = a^T f + log sum_c exp(f_c - a^T f). Jensen's inequality on the
    second part gives, with f ~ N(m, V),

        B(a) = log sum_c exp(m_c + Var(f_c - a^T f) / 2)

    (Knowles and Minka, 2011). a = 0 is Jensen's inequality alone. B is convex, with gradient
    V (a - s), s the softmax of the exponents, and Hessian V + V (diag(s) - s s^T) V, at most
    (1 + t / 2) V for any t above the eigenvalues of V, since diag(s) - s s^T is at most I / 2.
    The `num_steps` steps a + (s - a) / (1 + t / 2) from a = 0 therefore never loosen the bound.
    Gradients are those of B at the a that was found: where B is least, its derivative in a is zero.
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


def kl_elements(
    loc: Float[Tensor, "*shape"], log_scale: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """KL of N(m, s^2) from N(0, 1) of every element: (s^2 + m^2 - 1) / 2 - log s."""
    return 0.5 * (loc.square() + (2 * log_scale).exp() - 1) - log_scale


def kl_diagonal(
    loc: Float[Tensor, "*shape"],
    scale: Float[Tensor, "*shape"],
    prior_loc: Float[Tensor, "..."] | float = 0.0,
    prior_scale: Float[Tensor, "..."] | float = 1.0,
) -> Float[Tensor, ""]:
    """KL of independent normals from independent normals, summed over all elements, a scalar.

    It is the KL of (m - m0) / s0 and s / s0 from N(0, 1).
    """
    return kl_elements((loc - prior_loc) / prior_scale, (scale / prior_scale).log()).sum()


def tril_of_inverse(
    matrix: Float[Tensor, "*blocks k k"],
) -> tuple[Float[Tensor, "*blocks k k"], Bool[Tensor, "*blocks"]]:
    """The lower Cholesky factor of the inverse of each matrix, and whether there is one.

    With J the reversal, the Cholesky factor of J A J reversed is an upper U with A = U U^T, so that
    U^{-T} is lower and U^{-T} U^{-1} = A^{-1}. The inverse itself is never formed.
    """
    lower, info = torch.linalg.cholesky_ex(matrix.flip(-1, -2))
    upper = lower.flip(-1, -2)
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return torch.linalg.solve_triangular(upper, eye.expand_as(upper), upper=True).mT, info == 0


def kl_tril(
    loc: Float[Tensor, "*blocks k"],
    scale_tril: Float[Tensor, "*#blocks k k"],
    prior_loc: Float[Tensor, "..."] | float = 0.0,
    prior_scale: Float[Tensor, "..."] | float = 1.0,
) -> Float[Tensor, ""]:
    """KL of N(loc, T T^T) from independent normals, summed over blocks, a scalar.

    Block-diagonal covariances are a batch of blocks; one block is the full covariance. The diagonal
    of T is positive; the prior, and a T that blocks share, broadcast to `loc`.
    """
    prior_scale = torch.as_tensor(prior_scale, dtype=loc.dtype, device=loc.device).expand_as(loc)
    trace = (scale_tril.square().sum(-1) / prior_scale.square()).sum()
    shift = ((loc - prior_loc) / prior_scale).square().sum()
    log_ratio = (scale_tril.diagonal(dim1=-2, dim2=-1) / prior_scale).log().sum()
    return 0.5 * (trace + shift - loc.numel()) - log_ratio


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
    eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    log_det = torch.linalg.cholesky(whitened.mT @ whitened + eye).diagonal().log().sum()
    prior_scale = torch.as_tensor(prior_scale, dtype=loc.dtype, device=loc.device).expand_as(loc)
    spread = (factor / prior_scale.unsqueeze(-1)).square().sum()
    return kl_diagonal(loc, scale, prior_loc, prior_scale) + 0.5 * spread - log_det
