"""Numbers picked from tables, with any batches in front of inputs and tables."""

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_dak.validation import second_derivative_error

__all__ = ["gather", "gather_sum", "pick", "stack_batches"]


class _GatherSum(torch.autograd.Function):
    """out[n, c] = sum_k weights[n, k] table[index[n, k], c], with a scatter for its gradient."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, index: Tensor, table: Tensor) -> Tensor:
        N, K = index.shape
        C = table.shape[1]
        if C == 1:
            rows = table.flatten().index_select(0, index.flatten()).view(N, K)
            out = torch.linalg.vecdot(weights, rows).unsqueeze(-1)
        else:
            rows = table.index_select(0, index.flatten()).view(N, K, C)
            out = torch.bmm(weights.unsqueeze(-2), rows).squeeze(-2)
        ctx.save_for_backward(weights, index, rows)
        ctx.table_shape = table.shape
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        if torch.is_grad_enabled():
            raise second_derivative_error()
        weights, index, rows = ctx.saved_tensors
        R, C = ctx.table_shape
        grad_weights = grad_table = None
        if ctx.needs_input_grad[0]:
            grad_weights = rows * grad if C == 1 else (rows * grad.unsqueeze(-2)).sum(-1)
        if ctx.needs_input_grad[2]:
            flat = index.flatten()
            if C == 1:
                source = (weights * grad).flatten()
                grad_table = grad.new_zeros(R).scatter_add_(0, flat, source).unsqueeze(-1)
            else:
                source = (weights.unsqueeze(-1) * grad.unsqueeze(-2)).view(-1, C)
                grad_table = grad.new_zeros(R, C).index_add_(0, flat, source)
        return grad_weights, None, grad_table


def gather_sum(
    weights: Float[Tensor, "n k"], index: Int[Tensor, "n k"], table: Float[Tensor, "r c"]
) -> Float[Tensor, "n c"]:
    """sum_k weights[n, k] table[index[n, k], :], `(N, C)`; differentiable once in both."""
    return _GatherSum.apply(weights, index, table)


def pick(table: Tensor, index: Tensor) -> Tensor:
    """table[c, p, index[n, p]], `(N, C, P)`, for a table `(C, P, R)` and an index `(N, P)`."""
    C = table.shape[0]
    return table.gather(-1, index.mT.expand(C, -1, -1)).permute(2, 0, 1)


def stack_batches(h: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Arguments of `interpolated_moments`, and how to arrange its results as `(..., N, C)`.

    If either batch is trivial, it is not copied: the batch of the table joins its functions, the
    batch of the inputs joins their rows. Else the batch is one of members.

    Args:
        h: `(*b1, N, P)`.
        table: `(*b2, C, 5, R, P)`; b1 and b2 broadcast.
    """
    N, P = h.shape[-2:]
    C, five, R, _ = table.shape[-4:]
    batch = torch.broadcast_shapes(h.shape[:-2], table.shape[:-4])
    if math.prod(h.shape[:-2]) == 1:
        table = table.reshape(-1, five, R, P)
        return h.reshape(1, N, P), table, lambda out: out.view(*batch, C, N).mT
    if math.prod(table.shape[:-4]) == 1:
        h, table = h.reshape(1, -1, P), table.reshape(C, five, R, P)
        return h, table, lambda out: out.view(C, *batch, N).movedim(0, -1)
    E = math.prod(batch)
    table = table.expand(*batch, C, five, R, P).reshape(E, C, five, R, P)
    table = table.movedim(0, 3).flatten(3)
    h = h.expand(*batch, N, P).reshape(E, N, P)
    return h, table, lambda out: out.permute(1, 2, 0).reshape(*batch, N, C)


def gather(weights: Tensor, index: Tensor, table: Tensor) -> Tensor:
    """sum over p, k of weights[n, p, k] table[c, p, index[n, p, k]], `(..., N, C)`.

    Args:
        weights: `(*b1, N, P, K)`.
        index: like `weights`, entries in [0, R).
        table: `(*b2, C, P, R)`; b1 and b2 broadcast. If either batch is trivial, it is not copied:
            the batch of the table joins its outputs, the batch of the inputs joins their rows.
    """
    N, P, K = weights.shape[-3:]
    C, _, R = table.shape[-3:]
    batch = torch.broadcast_shapes(weights.shape[:-3], table.shape[:-3])
    num_batch = math.prod(batch)
    if math.prod(weights.shape[:-3]) == 1:
        groups, rows, outputs = 1, N, num_batch * C
    elif math.prod(table.shape[:-3]) == 1:
        groups, rows, outputs = 1, num_batch * N, C
    else:
        groups, rows, outputs = num_batch, N, C
        weights = weights.expand(*batch, N, P, K)
        index = index.expand(*batch, N, P, K)
        table = table.expand(*batch, C, P, R)
    offset = R * torch.arange(groups * P, device=index.device).view(groups, 1, P, 1)
    flat_index = (index.reshape(groups, rows, P, K) + offset).view(groups * rows, P * K)
    flat_weights = weights.reshape(groups * rows, P * K)
    flat_table = table.reshape(groups, outputs, P * R).mT.reshape(-1, outputs).contiguous()
    out = gather_sum(flat_weights, flat_index, flat_table)  # (groups * rows, outputs)
    if outputs == C:
        return out.view(*batch, N, C)
    return out.view(N, num_batch, C).transpose(0, 1).reshape(*batch, N, C)
