"""Mean and variance between the nodes in one operation, with the gradient written out.

The local route of `additive.bridge` for q(f). What bounds it is the number of operations, not their
size: here the two nodes of an input share an axis, their weights carry sigma, and means, variances
and covariances are one gather, and one scatter in the backward pass.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_dak.fast.linear_maps import LinearMap
from pyro_dak.validation import check_first_derivative

__all__ = [
    "IntervalConstants",
    "interpolated_moments",
    "interval_constants",
    "mean_field_terms",
    "sinh_ratio",
]


class IntervalConstants(NamedTuple):
    """Constants of a grid whose nodes 1 to M are at low + j spacing; delta is in lengthscales.

    Tensors spare torch the conversion of numbers. `slope` = delta / spacing; `squares` are
    1 / sinh(delta)^2 for the intervals between two nodes and 0 for the first and the last,
    `(M + 1,)`; `ends` = (1, 0) and `signs` = (-1, 1), `(2, 1, 1, 1)`; `coefficients` are those of
    `_sinh_coefficients`, the last of them once more as a number.
    """

    low: Tensor
    spacing: Tensor
    slope: Tensor
    squares: Tensor
    ends: Tensor
    signs: Tensor
    coefficients: tuple[Tensor, ...]
    last_coefficient: float
    delta: float
    num_nodes: int


def interval_constants(
    num_nodes: int,
    low: float,
    spacing: float,
    delta: float,
    dtype: torch.dtype,
    device: torch.device,
) -> IntervalConstants:
    """The constants of a grid, computed in float64 and then cast."""

    def constant(value: float | list[float]) -> Tensor:
        return torch.tensor(value, dtype=torch.float64).to(device, dtype)

    square = 4 * math.exp(-2 * delta) / math.expm1(-2 * delta) ** 2
    coefficients = _sinh_coefficients(delta, torch.finfo(dtype).eps)
    return IntervalConstants(
        low=constant(low),
        spacing=constant(spacing),
        slope=constant(delta / spacing),
        squares=constant([0.0, *[square] * (num_nodes - 1), 0.0]),
        ends=constant([1.0, 0.0]).view(2, 1, 1, 1),
        signs=constant([-1.0, 1.0]).view(2, 1, 1, 1),
        coefficients=constant(coefficients).unbind(),
        last_coefficient=coefficients[-1] if coefficients else math.nan,
        delta=delta,
        num_nodes=num_nodes,
    )


def _sinh_coefficients(delta: float, eps: float) -> list[float]:
    """c_k with sinh(a delta) / sinh(delta) = sum_k c_k a^(2 k + 1), as many as matter for a <= 1.

    c_k = delta^(2 k + 1) / ((2 k + 1)! sinh(delta)). They are positive and sum to 1, so nothing
    cancels. Three do in float32 for M = 7 on one lengthscale, two for M = 63, and cost a fraction
    of expm1. None for delta > 1, where there would be too many.
    """
    if delta > 1:
        return []
    coefficients, c, k = [], delta / math.sinh(delta), 0
    while c > eps / 8:
        coefficients.append(c)
        k += 1
        c *= delta**2 / (2 * k * (2 * k + 1))
    return coefficients


def _two_nodes(
    h: Tensor, sigma: Tensor | None, constants: IntervalConstants
) -> tuple[Tensor, Tensor]:
    """The interval of each input, `(E, P, N)`, and the weights of its two nodes, `(2, E, P, N)`.

    A NaN lands in interval 0 and shows in the weights.
    """
    M = constants.num_nodes
    x = h.new_empty(h.shape)  # rows last in memory, whatever the strides of h
    torch.sub(h, constants.low, out=x).div_(constants.spacing)
    j = x.clamp(0, M).to(torch.int32).clamp_(0, M)
    nearest = x.clamp(1, M)
    decay = x.sub_(nearest).abs_().mul_(-constants.delta).exp_()
    # 1 - a of the left node, a of the right
    a = torch.addcmul(constants.ends, constants.signs, nearest.sub_(j))
    w = sinh_ratio(a, constants)
    return j, w.mul_(decay if sigma is None else decay.mul_(sigma.unsqueeze(-1)))


def sinh_ratio(a: Tensor, constants: IntervalConstants) -> Tensor:
    """sinh(a delta) / sinh(delta) for a in [0, 1]: by its series, on coarse grids by exp."""
    coefficients, delta = constants.coefficients, constants.delta
    if not coefficients:
        left = ((a - 1) * delta).exp()
        return (a * (-2 * delta)).expm1() * left / math.expm1(-2 * delta)
    if len(coefficients) == 1:
        return a * coefficients[0]
    squares = a * a
    # One pass: torch is three times slower at `addcmul` where two of the three are scalars.
    w = torch.add(coefficients[-2], squares, alpha=constants.last_coefficient)
    for c in coefficients[-3::-1]:
        w = torch.addcmul(c, w, squares)
    return a * w


def _interpolate(
    h: Tensor, table: Tensor, sigma: Tensor | None, constants: IntervalConstants
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """`interpolated_moments`, and what its gradient needs."""
    F, five, R, U = table.shape
    j, w = _two_nodes(h, sigma, constants)
    units = torch.arange(U, dtype=torch.int32, device=h.device).view(*h.shape[:2], 1)
    places = torch.add(units, j, alpha=U).view(-1)
    picked = table.reshape(F * five, R * U).index_select(1, places).view(F, five, *h.shape)
    mean, s = picked[:, :2], picked[:, 2:4]  # (F, 2, E, P, N)
    # In the memory of what was picked, which the gradient needs anyway: s_k of `_grad_inputs`.
    s.mul_(w).addcmul_(w.flip(0), picked[:, 4:], value=0.5)
    return (mean * w).sum((1, 3)), (s * w).sum((1, 3)), (j, places, w, picked)


def _grad_table(
    grad_mean: Tensor, grad_var: Tensor, saved: Sequence[Tensor], shape: torch.Size
) -> Tensor:
    """Gradient of the table, `(F, 5, R, U)`, from those of mean and variance, `(F, 1, E, 1, N)`.

    In an interval the means get w_k g_m, the variances w_k^2 g_v, twice the covariance w0 w1 g_v.
    """
    _, places, w, picked = saved
    F, five, R, U = shape
    values = torch.empty_like(picked)
    torch.mul(w, grad_mean, out=values[:, :2])
    w_g = w * grad_var
    torch.mul(w_g, w, out=values[:, 2:4])
    torch.mul(w_g[:, 0], w[1], out=values[:, 4])
    values = values.view(F * five, -1)
    table = values.new_zeros(F * five, R * U)
    return table.scatter_add_(1, places.long().expand_as(values), values).view(shape)


def _grad_inputs(
    grad_mean: Tensor,
    grad_var: Tensor,
    saved: Sequence[Tensor],
    sigma: Tensor | None,
    constants: IntervalConstants,
) -> Tensor:
    """Gradient of h, `(E, P, N)`.

    With s_k = w_k var_k + w_{1-k} cov over the two nodes k, so that the variance is sum w_k s_k,

        grad w_k = sum_f g_m mean_k + 2 g_v s_k,
        grad h = (grad w1 |w1'| - grad w0 |w0'|) delta / spacing,

    where |w'|^2 = w^2 + (sigma / sinh(delta))^2 between the nodes, since cosh^2 = 1 + sinh^2, and
    w^2 outside, where w decays.
    """
    j, _, w, picked = saved
    grad_w = (picked[:, :2] * grad_mean).add_(picked[:, 2:4] * grad_var, alpha=2)
    grad_w = grad_w[0] if len(grad_w) == 1 else grad_w.sum(0)  # (2, E, P, N)
    squares = constants.squares.index_select(0, j.view(-1)).view(j.shape)
    if sigma is not None:
        squares.mul_((sigma * sigma).unsqueeze(-1))
    slopes = torch.addcmul(squares, w, w).sqrt_().mul_(grad_w)
    return (slopes[1] - slopes[0]).mul_(constants.slope)


class _InterpolatedMoments(torch.autograd.Function):
    """See `interpolated_moments`; differentiable once in h, table and sigma."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, table: Tensor, sigma: Tensor | None, constants: IntervalConstants
    ) -> tuple[Tensor, Tensor]:
        mean, var, saved = _interpolate(h, table, sigma, constants)
        ctx.save_for_backward(table, sigma, *saved)
        ctx.constants = constants
        return mean, var

    @staticmethod
    def backward(
        ctx: Any, grad_mean: Tensor, grad_var: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        check_first_derivative()
        table, sigma, *saved = ctx.saved_tensors
        F, E, N = grad_mean.shape
        grad_mean, grad_var = (g.reshape(F, 1, E, 1, N) for g in (grad_mean, grad_var))
        grad_h = grad_table = grad_sigma = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            grad_table = _grad_table(grad_mean, grad_var, saved, table.shape)
        if sigma is not None and ctx.needs_input_grad[2]:
            assert grad_table is not None
            # Means grow with sigma, variances and covariances with its square.
            by_unit = (table * grad_table).sum((0, 2)).view(5, E, -1)
            grad_log_sigma = by_unit[:2].sum(0) + 2 * by_unit[2:].sum(0)
            grad_sigma = grad_log_sigma.sum_to_size(sigma.shape).div_(sigma)
        if ctx.needs_input_grad[0]:
            grad_h = _grad_inputs(grad_mean, grad_var, saved, sigma, ctx.constants)
        return grad_h, grad_table, grad_sigma, None


class _MeanFieldTerms(torch.autograd.Function):
    """See `mean_field_terms`; differentiable once in all tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        loc: Tensor,
        log_scale: Tensor,
        log_sigma: Tensor,
        mu: Tensor,
        mu_log_scale: Tensor,
        table_map: LinearMap,
        constants: IntervalConstants,
    ) -> tuple[Tensor, Tensor, Tensor]:
        z_var, mu_var = (2 * log_scale).exp_(), (2 * mu_log_scale).exp_()
        sigma = log_sigma.exp().unsqueeze(0)
        table = table_map.units_last(torch.cat([loc, z_var], -1)).unflatten(1, (5, -1))
        mean, var, saved = _interpolate(h.mT.unsqueeze(0), table, sigma, constants)
        mean.add_(mu.view(-1, 1, 1))
        var.add_(mu_var.view(-1, 1, 1))
        kl = _twice_kl(loc, log_scale, z_var).add_(_twice_kl(mu, mu_log_scale, mu_var)).div_(2)
        ctx.save_for_backward(loc, z_var, sigma, mu, mu_var, *saved)
        ctx.table_map, ctx.constants, ctx.shape = table_map, constants, table.shape
        return mean.squeeze(1).mT, var.squeeze(1).mT, kl

    @staticmethod
    def backward(
        ctx: Any, grad_mean: Tensor, grad_var: Tensor, grad_kl: Tensor
    ) -> tuple[Tensor | None, ...]:
        check_first_derivative()
        loc, z_var, sigma, mu, mu_var, *saved = ctx.saved_tensors
        N, F = grad_mean.shape
        grad_m, grad_v = (g.mT.reshape(F, 1, 1, 1, N) for g in (grad_mean, grad_var))
        grad_h = _grad_inputs(grad_m, grad_v, saved, sigma, ctx.constants)
        table = _grad_table(grad_m, grad_v, saved, ctx.shape).flatten(1, 2)
        grad_loc, grad_z_var = ctx.table_map.transpose(table).chunk(2, -1)
        # The mean of f grows with sigma, its variance with the square.
        grad_log_sigma = torch.addcmul(loc * grad_loc, z_var, grad_z_var, value=2).sum((0, 2))
        return (
            grad_h.squeeze(0).mT.contiguous(),  # batch normalisation is slow for other strides
            *_grad_normal(grad_loc, grad_z_var, grad_kl, loc, z_var),
            grad_log_sigma,
            *_grad_normal(grad_mean.sum(0), grad_var.sum(0), grad_kl, mu, mu_var),
            None,
            None,
        )


def _twice_kl(loc: Tensor, log_scale: Tensor, var: Tensor) -> Tensor:
    """Twice the KL of independent normals from N(0, 1).

    By element: a sum of variances minus their number would cancel where q is the prior.
    """
    loc = loc.reshape(-1)
    return torch.sub(var, log_scale, alpha=2).sub_(1).sum().add_(torch.dot(loc, loc))


def _grad_normal(
    grad_mean: Tensor, grad_var: Tensor, grad_kl: Tensor, loc: Tensor, var: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of loc and log_scale: those of mean and variance, and loc and var - 1 of the KL."""
    grad_log_scale = torch.add(grad_kl, grad_var, alpha=2).mul_(var).sub_(grad_kl)
    return torch.addcmul(grad_mean, loc, grad_kl), grad_log_scale


def interpolated_moments(
    h: Float[Tensor, "e p n"],
    table: Float[Tensor, "f 5 r u"],
    sigma: Float[Tensor, "#e p"] | None,
    constants: IntervalConstants,
) -> tuple[Float[Tensor, "f e n"], Float[Tensor, "f e n"]]:
    """Mean and variance of sum_p sigma_p g_p(h_p) for F functions of E members, from their nodes.

    With h in interval j, at distances a and 1 - a (in spacings) from its nodes,

        mean = sum_p w0 mean_j + w1 mean_{j+1},
        variance = sum_p w0^2 var_j + w1^2 var_{j+1} + 2 w0 w1 cov_j,
        w0 = sigma sinh((1 - a) delta) / sinh(delta),   w1 = sigma sinh(a delta) / sinh(delta).

    Before the first and after the last node g decays: there the node has the weight
    sigma exp(-distance / lengthscale), and the other, which does not exist, counts for nothing.

    Args:
        h: inputs of the units; any strides.
        table: for each interval 0 to M, between nodes j and j + 1, the two means, the two variances
            and twice the covariance; nodes 0 and M + 1 do not exist and have zeros. For U = E P
            units.
        sigma: scales of the units, positive, or None for 1.
        constants: of the grid.
    """
    if torch.compiler.is_compiling():
        return _plain_moments(h, table, sigma, constants)
    return _InterpolatedMoments.apply(h, table, sigma, constants)


def _plain_moments(
    h: Tensor, table: Tensor, sigma: Tensor | None, constants: IntervalConstants
) -> tuple[Tensor, Tensor]:
    """`interpolated_moments` for the compiler, which fuses it and finds the gradient by itself."""
    E, P, _ = h.shape
    M = constants.num_nodes
    x = (h - constants.low) / constants.spacing
    j = x.detach().clamp(0, M).int().clamp(0, M)
    nearest = x.clamp(1, M)
    decay = (-constants.delta * (x - nearest).abs()).exp()
    decay = decay if sigma is None else decay * sigma.unsqueeze(-1)
    a = nearest - j
    w0, w1 = (sinh_ratio(part, constants) * decay for part in (1 - a, a))
    units = torch.arange(E * P, dtype=torch.int32, device=h.device).view(E, P, 1)
    places = (j * (E * P) + units).long()
    mean0, mean1, var0, var1, cov = (row[:, places] for row in table.flatten(2).unbind(1))
    mean = w0 * mean0 + w1 * mean1
    var = w0 * (w0 * var0 + w1 * cov) + w1 * w1 * var1
    return mean.sum(-2), var.sum(-2)


def mean_field_terms(
    h: Float[Tensor, "n p"],
    loc: Float[Tensor, "f p m"],
    log_scale: Float[Tensor, "f p m"],
    log_sigma: Float[Tensor, " p"],
    mu: Float[Tensor, " f"],
    mu_log_scale: Float[Tensor, " f"],
    table_map: LinearMap,
    constants: IntervalConstants,
) -> tuple[Float[Tensor, "n f"], Float[Tensor, "n f"], Float[Tensor, ""]]:
    """Mean and variance of f for independent weights, and their KL from N(0, 1), as one operation.

    `interpolated_moments` of the table of z ~ N(loc, scale^2), plus mu and mu_scale^2. The gradient
    goes back through the table by the transpose of its map.
    """
    weights = (loc, log_scale, log_sigma, mu, mu_log_scale)
    return _MeanFieldTerms.apply(h, *weights, table_map, constants)
