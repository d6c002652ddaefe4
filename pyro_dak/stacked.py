"""Moments of f for a stack of members at once: rows last, one gather forward, one scatter back.

The local route of `pyro_dak.local` in another memory layout. A stack of E members has unit inputs
`(E, P, N)`, so that every step is one operation on long contiguous rows, and the gradient is
written by hand. Inputs outside the nodes are treated as being at the outermost node and damped by
exp(-distance / lengthscale), which is what the Ornstein-Uhlenbeck process does there.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from pyro_dak.activation import KernelActivation
from pyro_dak.local import NodeMoments

__all__ = ["stacked_moments"]


class _Moments(torch.autograd.Function):
    """(mean, variance), each `(F, E, N)`, from grid coordinates and a table of the intervals.

    The table `(5, F, E, P, I)` holds for each interval between neighbouring nodes l and r: mean at
    l, mean at r, variance at l, variance at r, covariance of l and r.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, table: Tensor, delta: float, num_nodes: int
    ) -> tuple[Tensor, Tensor]:
        E, P, N = x.shape
        num_functions, num_intervals = table.shape[1], table.shape[-1]
        inside = x.clamp(1, num_nodes)
        j = inside.floor().clamp_(max=num_intervals)
        offset = num_intervals * torch.arange(E * P, device=x.device, dtype=torch.long) - 1
        index = (j.long().view(E * P, N) + offset.unsqueeze(-1)).view(-1)
        w0, w1, slope0, slope1 = _weights_and_slopes(x, inside, inside - j, delta)
        picked = table.view(5 * num_functions, -1).index_select(1, index)
        picked = picked.view(5, num_functions, E, P, N)
        mean = (picked[0] * w0).addcmul_(picked[1], w1).sum(-2)
        w00, w11, w01 = w0.square(), w1.square(), 2 * w0 * w1
        var = (picked[2] * w00).addcmul_(picked[3], w11).addcmul_(picked[4], w01).sum(-2)
        ctx.save_for_backward(index, picked, w0, w1, w00, w11, w01, slope0, slope1)
        ctx.table_shape = table.shape
        return mean, var

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_mean: Tensor, grad_var: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None]:
        index, picked, w0, w1, w00, w11, w01, slope0, slope1 = ctx.saved_tensors
        grad_mean, grad_var = grad_mean.unsqueeze(-2), grad_var.unsqueeze(-2)  # (F, E, 1, N)
        parts = [_dot(grad_mean, picked[k]) for k in (0, 1)]
        parts += [_dot(grad_var, picked[k]) for k in (2, 3, 4)]
        to_w0 = parts[0].addcmul_(2 * w0, parts[2]).addcmul_(2 * w1, parts[4])
        to_w1 = parts[1].addcmul_(2 * w1, parts[3]).addcmul_(2 * w0, parts[4])
        grad_x = (to_w0 * slope0).addcmul_(to_w1, slope1)
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None, None
        source = torch.empty_like(picked)
        for k, w in enumerate((w0, w1, w00, w11, w01)):
            torch.mul(grad_mean if k < 2 else grad_var, w, out=source[k])
        shape = ctx.table_shape
        grad_table = source.new_zeros(5 * shape[1], math.prod(shape[2:]))
        rows = index.expand(len(grad_table), -1)
        grad_table.scatter_add_(1, rows, source.view(len(grad_table), -1))
        return grad_x, grad_table.view(shape), None, None


def _dot(grad: Tensor, values: Tensor) -> Tensor:
    """Sum over the functions of grad `(F, E, 1, N)` times values `(F, E, P, N)`."""
    total = grad[0] * values[0]
    for function in range(1, len(values)):
        total.addcmul_(grad[function], values[function])
    return total


def _weights_and_slopes(
    x: Tensor, inside: Tensor, a: Tensor, delta: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights of the left and right node and their derivatives in x.

    Between the nodes w0 = sinh((1 - a) delta) / sinh(delta), w1 = sinh(a delta) / sinh(delta).
    With u = 1 - exp(-a delta) and v = 1 - exp(-(1 - a) delta) these are
    (1 - u) v (2 - v) / (1 - exp(-2 delta)) and (1 - v) u (2 - u) / (1 - exp(-2 delta)): one
    exponential for both, and no cancellation on fine grids.
    """
    norm = -1 / math.expm1(-2 * delta)
    u = torch.expm1(-delta * a).neg_()
    e = 1 - u
    v = (-math.expm1(-delta) - u).div_(e)
    distance = x - inside  # negative left of the nodes, positive right of them
    damping = (-delta * distance.abs()).exp_()
    w0 = (2 - v).mul_(v).mul_(e).mul_(norm).mul_(damping)
    w1 = (2 - u).mul_(u).mul_(1 - v).mul_(norm).mul_(damping)
    # cosh from the same exponentials, and the damping's own slope outside.
    gain = delta * norm * math.exp(-delta)
    slope0 = (math.exp(-delta) / e).add_(e, alpha=math.exp(delta)).mul_(-gain)
    slope1 = e.reciprocal().add_(e).mul_(gain)
    is_inside = distance == 0
    outward = -delta * distance.sign()
    slope0 = torch.where(is_inside, slope0, outward * w0)
    slope1 = torch.where(is_inside, slope1, outward * w1)
    return w0, w1, slope0, slope1


def stacked_moments(
    activation: KernelActivation,
    h: Float[Tensor, "e p n"],
    loc: Float[Tensor, "f e p m"],
    var: Float[Tensor, "f e p m"],
) -> tuple[Float[Tensor, "f e n"], Float[Tensor, "f e n"]]:
    """Mean and variance of sum_p phi(h_p) . z[f, p] for independent z, member by member.

    What `KernelActivation.combine_moments` gives for each of the E members, for a Markov kernel.

    Args:
        activation: phi, the same for all members.
        h: inputs of the units.
        loc: means of the weights in level order, scaled by sigma.
        var: their variances.
    """
    low, spacing = activation.grid.bounds[0], activation.grid.spacing
    table = _interval_table(activation.node_moments(loc, var))
    return _Moments.apply((h - low) / spacing, table, activation.delta, activation.num_inducing)


def _interval_table(nodes: NodeMoments) -> Tensor:
    mean, var, cov = nodes
    if mean.shape[-1] == 1:  # a single node: a second one that is never reached
        mean, var, cov = F.pad(mean, (0, 1)), F.pad(var, (0, 1)), F.pad(cov, (0, 1))
    return torch.stack([mean[..., :-1], mean[..., 1:], var[..., :-1], var[..., 1:], cov])
