"""Mean and variance between the nodes in one operation, with the gradient written out.

The local route of `pyro_dak.local` for q(f). What bounds it is the number of operations, not their
size: here the two nodes of an input share an axis, their weights carry sigma, and the backward pass
is a scatter for each of means, variances and covariances.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_dak.local import LinearMap

__all__ = [
    "IntervalConstants",
    "interpolated_moments",
    "interval_constants",
    "mean_field_moments",
]


class IntervalConstants(NamedTuple):
    """Constants of a grid with M nodes, as tensors, which spares torch the conversion of numbers.

    Node j is at low + j spacing, and delta is the spacing over the lengthscale, slope = delta /
    spacing. `signs` is (-delta, delta), `(2, 1, 1)`. `table` is `(3, M + 1)`, by interval: 0 and
    -delta, or -infinity where the left and the right node do not exist, and -n, where n is
    1 / (1 - exp(-2 delta)), or 1 in the two unbounded intervals.
    """

    low: Tensor
    spacing: Tensor
    slope: Tensor
    signs: Tensor
    table: Tensor


def interval_constants(
    num_nodes: int,
    low: float,
    spacing: float,
    delta: float,
    dtype: torch.dtype,
    device: torch.device,
) -> IntervalConstants:
    """The constants of a grid, computed in float64 and then cast."""
    table = torch.zeros(3, num_nodes + 1, dtype=torch.float64)
    table[1] = -delta
    table[0, 0] = table[1, -1] = -math.inf
    table[2] = 1 / math.expm1(-2 * delta)
    table[2, [0, -1]] = -1.0
    signs = torch.tensor([-delta, delta], dtype=torch.float64).view(2, 1, 1)
    numbers = (torch.tensor(v, dtype=torch.float64) for v in (low, spacing, delta / spacing))
    return IntervalConstants(*(part.to(device, dtype) for part in (*numbers, signs, table)))


def _interpolate(
    h: Tensor, table: Tensor, sigma: Tensor | None, constants: IntervalConstants
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """`interpolated_moments`, and what its gradient needs."""
    E, P, N = h.shape
    F, _, U = table.shape
    j, minus_e, w = _two_nodes(h, sigma, constants)
    # Five rows of U from row 3 j on: mean, variance, covariance; mean, variance.
    rows = torch.arange(5 * U, device=h.device).view(5, E, P, 1).transpose(0, 1)
    places = torch.add(rows, j.unsqueeze(1), alpha=3 * U).reshape(-1)
    picked = table.flatten(1).index_select(1, places).view(F, E, 5, P, N)
    mean = picked[:, :, ::3]
    s = picked[:, :, 1::3] * w
    s.addcmul_(w.flip(1), picked[:, :, 2:3], value=0.5)
    saved = (places, minus_e, w, mean, s, constants.slope)
    return (mean * w).sum((-3, -2)), (s * w).sum((-3, -2)), saved


def _grad_table(
    grad_mean: Tensor, grad_var: Tensor, saved: Sequence[Tensor], num_rows: int
) -> Tensor:
    """Gradient of the table, `(F, R, U)`, from those of mean and variance, `(F, E, 1, 1, N)`.

    A node gets w_k g_m for its mean and w_k^2 g_v for its variance, an interval w0 w1 g_v for twice
    its covariance.
    """
    places, _, w, *_ = saved
    w_g = w * grad_var
    mean0, mean1 = (w * grad_mean).split(1, 2)
    cov = w_g[:, :, :1] * w[:, 1:]
    var0, var1 = w_g.mul_(w).split(1, 2)
    F, U = len(grad_mean), w.shape[0] * w.shape[2]
    values = torch.cat([mean0, var0, cov, mean1, var1], 2).view(F, -1)
    table = values.new_zeros(F, num_rows * U)
    return table.scatter_add_(1, places.expand_as(values), values).view(F, num_rows, U)


def _grad_inputs(
    grad_mean: Tensor, grad_var: Tensor, saved: Sequence[Tensor], sigma: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of h and sigma.

    With s_k = w_k var_k + w_{1-k} cov over the two nodes k, so that the variance is sum w_k s_k,

        grad w_k = sum_f g_m mean_k + 2 g_v s_k,   grad sigma = sum_n,k w_k grad w_k / sigma,
        grad h = (grad w0 (w0 - 2 e0) - grad w1 (w1 - 2 e1)) delta / spacing.
    """
    _, minus_e, w, mean, s, slope = saved
    grad_w = (mean * grad_mean).add_(s * grad_var, alpha=2)
    grad_w = grad_w[0] if len(grad_w) == 1 else grad_w.sum(0)  # (E, 2, P, N)
    grad_sigma = None
    if sigma is not None:
        grad_sigma = (grad_w * w).sum((1, 3)).sum_to_size(sigma.shape).div_(sigma)
    grad_w.mul_(torch.add(w, minus_e, alpha=2))
    return (grad_w[:, 0] - grad_w[:, 1]).mul_(slope), grad_sigma


class _InterpolatedMoments(torch.autograd.Function):
    """See `interpolated_moments`; differentiable once in h, table and sigma."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, table: Tensor, sigma: Tensor | None, constants: IntervalConstants
    ) -> tuple[Tensor, Tensor]:
        mean, var, saved = _interpolate(h, table, sigma, constants)
        ctx.save_for_backward(sigma, *saved)
        ctx.num_rows = table.shape[1]
        return mean, var

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_mean: Tensor, grad_var: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        sigma, *saved = ctx.saved_tensors
        F, E, N = grad_mean.shape
        grad_mean, grad_var = (g.reshape(F, E, 1, 1, N) for g in (grad_mean, grad_var))
        grad_h = grad_table = grad_sigma = None
        if ctx.needs_input_grad[1]:
            grad_table = _grad_table(grad_mean, grad_var, saved, ctx.num_rows)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[2]:
            grad_h, grad_sigma = _grad_inputs(grad_mean, grad_var, saved, sigma)
        return grad_h, grad_table, grad_sigma, None


class _MeanFieldMoments(torch.autograd.Function):
    """See `mean_field_moments`; differentiable once in all tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        loc: Tensor,
        scale: Tensor,
        sigma: Tensor,
        mu: Tensor,
        mu_scale: Tensor,
        table_map: LinearMap,
        constants: IntervalConstants,
    ) -> tuple[Tensor, Tensor]:
        table = table_map.units_last(torch.cat([loc, scale * scale], -1))
        mean, var, saved = _interpolate(
            h.mT.contiguous().unsqueeze(0), table, sigma.unsqueeze(0), constants
        )
        mean, var = mean.squeeze(1).add_(mu.unsqueeze(-1)), var.squeeze(1)
        var.add_((mu_scale * mu_scale).unsqueeze(-1))
        ctx.save_for_backward(scale, sigma, mu_scale, *saved)
        ctx.table_map, ctx.num_rows = table_map, table.shape[1]
        return mean.mT, var.mT

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_mean: Tensor, grad_var: Tensor) -> tuple[Tensor | None, ...]:
        scale, sigma, mu_scale, *saved = ctx.saved_tensors
        N, F = grad_mean.shape
        grad_m, grad_v = (g.mT.reshape(F, 1, 1, 1, N) for g in (grad_mean, grad_var))
        grad_h, grad_sigma = _grad_inputs(grad_m, grad_v, saved, sigma.unsqueeze(0))
        table = _grad_table(grad_m, grad_v, saved, ctx.num_rows)
        grad_loc, grad_z_var = ctx.table_map.transpose(table).chunk(2, -1)
        grad_scale = torch.addcmul(grad_z_var * scale, grad_z_var, scale)
        grad_mu, grad_mu_var = grad_mean.sum(0), grad_var.sum(0)
        grad_mu_scale = torch.addcmul(grad_mu_var * mu_scale, grad_mu_var, mu_scale)
        assert grad_sigma is not None
        grad_inputs = (grad_h.squeeze(0).mT, grad_loc, grad_scale, grad_sigma.squeeze(0))
        return *grad_inputs, grad_mu, grad_mu_scale, None, None


def _two_nodes(
    h: Tensor, sigma: Tensor | None, constants: IntervalConstants
) -> tuple[Tensor, Tensor, Tensor]:
    """The interval j `(E, P, N)`; -e and w of its two nodes `(E, 2, P, N)`.

    A NaN lands in interval 0 and shows in the weights; it never becomes an index out of range.
    """
    low, spacing, _, signs, table = constants
    last = table.shape[-1] - 1
    largest = torch.finfo(h.dtype).max ** 0.5  # infinity minus infinity would be NaN below
    x = (h - low).div_(spacing).clamp_(-largest, largest)
    j = x.clamp(0, last).long().clamp_(0, last)
    a = x.sub_(j).unsqueeze(1)
    picked = table.index_select(1, j.flatten()).view(3, *h.shape).transpose(0, 1)  # (E, 3, P, N)
    m = torch.addcmul(picked[:, :2], signs, a).expm1_()  # exp(-delta (a, b)) - 1
    minus_norm = picked[:, 2:] if sigma is None else picked[:, 2:] * sigma[:, None, :, None]
    minus_e = torch.addcmul(minus_norm, minus_norm, m)
    minus_q = torch.addcmul(m, m, m).add_(m)  # exp(-2 delta (a, b)) - 1
    return j, minus_e, minus_q.flip(1).mul_(minus_e)


def interpolated_moments(
    h: Float[Tensor, "e p n"],
    table: Float[Tensor, "f r u"],
    sigma: Float[Tensor, "#e p"] | None,
    constants: IntervalConstants,
) -> tuple[Float[Tensor, "f e n"], Float[Tensor, "f e n"]]:
    """Mean and variance of sum_p sigma_p g_p(h_p) for F functions of E members, from their nodes.

    With h in interval j, at distances a and b = 1 - a (in spacings) from its nodes,

        mean = sum_p w0 mean_j + w1 mean_{j+1},
        variance = sum_p w0^2 var_j + w1^2 var_{j+1} + 2 w0 w1 cov_j,
        w0 = e0 (1 - exp(-2 b delta)),   e0 = sigma n exp(-a delta),
        w1 = e1 (1 - exp(-2 a delta)),   e1 = sigma n exp(-b delta),

    and n = 1 / (1 - exp(-2 delta)). In the unbounded intervals n = 1 and the distance to the node
    that does not exist is infinite.

    Args:
        h: inputs of the units; contiguous rows make the operations fast.
        table: for each node 0 to M + 1 three rows, its mean, its variance, and twice its covariance
            with the next node; nodes 0 and M + 1 do not exist and have zeros. For U = E P units.
        sigma: scales of the units, not zero, or None for 1.
        constants: of the grid.
    """
    return _InterpolatedMoments.apply(h, table, sigma, constants)


def mean_field_moments(
    h: Float[Tensor, "n p"],
    loc: Float[Tensor, "f p m"],
    scale: Float[Tensor, "f p m"],
    sigma: Float[Tensor, " p"],
    mu: Float[Tensor, " f"],
    mu_scale: Float[Tensor, " f"],
    table_map: LinearMap,
    constants: IntervalConstants,
) -> tuple[Float[Tensor, "n f"], Float[Tensor, "n f"]]:
    """Mean and variance of f for independent weights, from the weights on, as one operation.

    `interpolated_moments` of the table of z ~ N(loc, scale^2), plus mu and mu_scale^2. The gradient
    goes back through the table by the transpose of its map.
    """
    return _MeanFieldMoments.apply(h, loc, scale, sigma, mu, mu_scale, table_map, constants)
