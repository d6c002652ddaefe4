"""Mean and variance between the nodes in one operation, with the gradient written out.

The local route of `pyro_dak.local` for q(f). What bounds it is the number of operations, not their
size: here the two nodes of an input share an axis, their weights carry sigma, and the backward pass
is one scatter for means, variances and covariances.
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
    "sinh_ratio",
]


class IntervalConstants(NamedTuple):
    """Constants of a grid whose nodes 1 to M are at low + j spacing; delta is in lengthscales.

    Tensors spare torch the conversion of numbers. `slope` = delta / spacing; `square_at_ends` =
    1 / sinh(delta)^2; `ends` = (1, 0) and `signs` = (-1, 1), `(2, 1, 1, 1)`; `coefficients` are
    those of `_sinh_coefficients`; `last` is the largest number below M.
    """

    low: Tensor
    spacing: Tensor
    slope: Tensor
    square_at_ends: Tensor
    ends: Tensor
    signs: Tensor
    coefficients: tuple[Tensor, ...]
    delta: float
    num_nodes: int
    last: float


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

    M = torch.tensor(float(num_nodes), dtype=dtype, device="cpu")
    return IntervalConstants(
        low=constant(low),
        spacing=constant(spacing),
        slope=constant(delta / spacing),
        square_at_ends=constant(4 * math.exp(-2 * delta) / math.expm1(-2 * delta) ** 2),
        ends=constant([1.0, 0.0]).view(2, 1, 1, 1),
        signs=constant([-1.0, 1.0]).view(2, 1, 1, 1),
        coefficients=constant(_sinh_coefficients(delta, torch.finfo(dtype).eps)).unbind(),
        delta=delta,
        num_nodes=num_nodes,
        last=float(torch.nextafter(M, torch.zeros_like(M))),
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the two nodes of each input: weights and places in a table `(2, E, P, N)`; is it outside.

    Outside the nodes, and at the last one, the third is 1 or -1, else 0, `(E, P, N)`. A NaN lands
    in interval 0 and shows in the weights.
    """
    low, spacing, _, _, ends, signs, _, delta, M, last = constants
    E, P, _ = h.shape
    x = torch.sub(h, low, out=h.new_empty(h.shape)).div_(spacing)
    j = x.clamp(0, M).long().clamp_(0, M)
    outside = (x - x.clamp(1, last)).sign_()
    nearest = x.clamp(1, M)
    decay = x.sub_(nearest).abs_().mul_(-delta).exp_()
    a = torch.addcmul(ends, signs, nearest.sub_(j))  # 1 - a of the left node, a of the right
    w = sinh_ratio(a, constants)
    w.mul_(decay if sigma is None else decay.mul_(sigma.unsqueeze(-1)))
    nodes = torch.arange(2 * E * P, device=h.device).view(2, E, P, 1)
    return w, torch.add(nodes, j, alpha=E * P), outside


def sinh_ratio(a: Tensor, constants: IntervalConstants) -> Tensor:
    """sinh(a delta) / sinh(delta) for a in [0, 1]: by its series, on coarse grids by exp."""
    coefficients, delta = constants.coefficients, constants.delta
    if not coefficients:
        left = ((a - 1) * delta).exp()
        return (a * (-2 * delta)).expm1() * left / math.expm1(-2 * delta)
    squares = a * a
    w = coefficients[-1]
    for c in coefficients[-2::-1]:
        w = torch.addcmul(c, w, squares)
    return a * w


def _interpolate(
    h: Tensor, table: Tensor, sigma: Tensor | None, constants: IntervalConstants
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """`interpolated_moments`, and what its gradient needs."""
    F, three, R, U = table.shape
    w, places, outside = _two_nodes(h, sigma, constants)
    picked = table.reshape(F * three, R * U).index_select(1, places.reshape(-1))
    mean, node_var, cov = picked.view(F, three, *w.shape).unbind(1)  # (F, 2, E, P, N)
    s = node_var.mul_(w)  # in the memory of what was picked, which the gradient needs anyway
    s.addcmul_(w.flip(0), cov[:, :1], value=0.5)
    return (mean * w).sum((1, 3)), (s * w).sum((1, 3)), (places, outside, w, mean, s)


def _grad_table(
    grad_mean: Tensor, grad_var: Tensor, saved: Sequence[Tensor], shape: torch.Size
) -> Tensor:
    """Gradient of the table, `(F, 3, R, U)`, from those of mean and variance, `(F, 1, E, 1, N)`.

    A node gets w_k g_m for its mean and w_k^2 g_v for its variance, an interval w0 w1 g_v for twice
    its covariance.
    """
    places, _, w, *_ = saved
    F, three, R, U = shape
    w_g = w * grad_var
    values = w.new_empty(F, three, *w.shape)
    torch.mul(w, grad_mean, out=values[:, 0])
    torch.mul(w_g, w, out=values[:, 1])
    torch.mul(w_g[:, 0], w[1], out=values[:, 2, 0])
    values[:, 2, 1].zero_()
    values = values.view(F * three, -1)
    table = values.new_zeros(F * three, R * U)
    return table.scatter_add_(1, places.reshape(-1).expand_as(values), values).view(shape)


def _grad_inputs(
    grad_mean: Tensor,
    grad_var: Tensor,
    saved: Sequence[Tensor],
    sigma: Tensor | None,
    constants: IntervalConstants,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of h and sigma.

    With s_k = w_k var_k + w_{1-k} cov over the two nodes k, so that the variance is sum w_k s_k,

        grad w_k = sum_f g_m mean_k + 2 g_v s_k,   grad sigma = sum_n,k w_k grad w_k / sigma,
        grad h = (grad w1 |w1'| - grad w0 |w0'|) delta / spacing,

    where |w'|^2 = w^2 + (sigma / sinh(delta))^2 between the nodes, since cosh^2 = 1 + sinh^2, and
    w^2 outside, where w decays.
    """
    _, outside, w, mean, s = saved
    grad_w = (mean * grad_mean).add_(s * grad_var, alpha=2)
    grad_w = grad_w[0] if len(grad_w) == 1 else grad_w.sum(0)  # (2, E, P, N)
    square = constants.square_at_ends
    grad_sigma = None
    if sigma is not None:
        grad_sigma = (grad_w * w).sum((0, 3)).sum_to_size(sigma.shape).div_(sigma)
        square = (sigma * sigma).mul_(square).unsqueeze(-1)
    between = torch.addcmul(square, outside * outside, square, value=-1)
    slopes = torch.addcmul(between, w, w).sqrt_().mul_(grad_w)
    return (slopes[1] - slopes[0]).mul_(constants.slope), grad_sigma


class _InterpolatedMoments(torch.autograd.Function):
    """See `interpolated_moments`; differentiable once in h, table and sigma."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, table: Tensor, sigma: Tensor | None, constants: IntervalConstants
    ) -> tuple[Tensor, Tensor]:
        mean, var, saved = _interpolate(h, table, sigma, constants)
        ctx.save_for_backward(sigma, *saved)
        ctx.constants, ctx.shape = constants, table.shape
        return mean, var

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_mean: Tensor, grad_var: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        sigma, *saved = ctx.saved_tensors
        F, E, N = grad_mean.shape
        grad_mean, grad_var = (g.reshape(F, 1, E, 1, N) for g in (grad_mean, grad_var))
        grad_h = grad_table = grad_sigma = None
        if ctx.needs_input_grad[1]:
            grad_table = _grad_table(grad_mean, grad_var, saved, ctx.shape)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[2]:
            grad_h, grad_sigma = _grad_inputs(grad_mean, grad_var, saved, sigma, ctx.constants)
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
        table = table_map.units_last(torch.cat([loc, scale * scale], -1)).unflatten(1, (3, -1))
        mean, var, saved = _interpolate(h.mT.unsqueeze(0), table, sigma.unsqueeze(0), constants)
        mean, var = mean.squeeze(1).add_(mu.unsqueeze(-1)), var.squeeze(1)
        var.add_((mu_scale * mu_scale).unsqueeze(-1))
        ctx.save_for_backward(scale, sigma, mu_scale, *saved)
        ctx.table_map, ctx.constants, ctx.shape = table_map, constants, table.shape
        return mean.mT, var.mT

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_mean: Tensor, grad_var: Tensor) -> tuple[Tensor | None, ...]:
        scale, sigma, mu_scale, *saved = ctx.saved_tensors
        N, F = grad_mean.shape
        grad_m, grad_v = (g.mT.reshape(F, 1, 1, 1, N) for g in (grad_mean, grad_var))
        grad_h, grad_sigma = _grad_inputs(grad_m, grad_v, saved, sigma.unsqueeze(0), ctx.constants)
        table = _grad_table(grad_m, grad_v, saved, ctx.shape).flatten(1, 2)
        grad_loc, grad_z_var = ctx.table_map.transpose(table).chunk(2, -1)
        grad_scale = torch.addcmul(grad_z_var * scale, grad_z_var, scale)
        grad_mu, grad_mu_var = grad_mean.sum(0), grad_var.sum(0)
        grad_mu_scale = torch.addcmul(grad_mu_var * mu_scale, grad_mu_var, mu_scale)
        assert grad_sigma is not None
        grad_inputs = (grad_h.squeeze(0).mT, grad_loc, grad_scale, grad_sigma.squeeze(0))
        return *grad_inputs, grad_mu, grad_mu_scale, None, None


def interpolated_moments(
    h: Float[Tensor, "e p n"],
    table: Float[Tensor, "f 3 r u"],
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
        table: for each node 0 to M + 1 its mean, its variance, and twice its covariance with the
            next node; nodes 0 and M + 1 do not exist and have zeros. For U = E P units.
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
    left = (j * (E * P) + units).long()
    right = left + E * P
    node_mean, node_var, node_cov = table.flatten(2).unbind(1)  # (F, R U)
    mean = w0 * node_mean[:, left] + w1 * node_mean[:, right]
    var = w0 * (w0 * node_var[:, left] + w1 * node_cov[:, left]) + w1 * w1 * node_var[:, right]
    return mean.sum(-2), var.sum(-2)


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
