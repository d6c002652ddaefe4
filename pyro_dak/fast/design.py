"""Moments of f for jointly Gaussian values at the nodes as one operation, with the design too.

The plain twin is `AdditiveLayer.design` with `inference.guides.joint.design_moments`. A unit that
has the values g at its nodes has w0 g_j + w1 g_{j+1} between two of them, with the weights of
`fused.two_nodes`. So a row W of the design of node values has two entries for each unit, which are
cheap to make and to differentiate. The variance of f is W S W^T; with G = W S, which the forward
pass has anyway, its gradient by W is 2 G, and only the entries of G at the two nodes are needed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_dak.fast.fused import Intervals, second_derivative_error, two_nodes
from pyro_dak.fast.transforms import needs_plain_operations

__all__ = ["DesignMoments", "design_moments"]


def design_moments(
    h: Tensor,
    log_sigma: Tensor,
    loc: Tensor,
    covariance: Tensor,
    intervals: Intervals,
    linear: tuple[float, float] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of `DesignMoments`, in plain operations where they are compiled."""
    if not needs_plain_operations():
        return DesignMoments.apply(h, log_sigma, loc, covariance, intervals, linear)
    sigma = log_sigma.exp()
    j, (w0, w1) = two_nodes(h.mT.unsqueeze(0), sigma.unsqueeze(0), intervals)
    j, w0, w1 = (part.squeeze(0).mT.unsqueeze(-1) for part in (j, w0, w1))  # (N, P, 1)
    nodes = torch.arange(intervals.num_nodes, device=h.device, dtype=j.dtype)
    values = torch.where(nodes == j - 1, w0, 0) + torch.where(nodes == j, w1, 0)
    lines = [(h - linear[1]) * (sigma * linear[0])] if linear else []
    design = torch.cat([torch.ones_like(h[:, :1]), *lines, values.flatten(1)], -1)
    mean = design @ loc.mT
    left = right = design
    if torch.compiler.is_compiling():
        # The gradient of W S W^T by W is 2 W S, which is there: the compiler would multiply again.
        left = design.detach()
        right = 2 * design - left
    if len(covariance) == 1:
        var = ((left @ covariance[0]) * right).sum(-1, keepdim=True)
    else:
        var = ((left @ covariance) * right).sum(-1).mT
    return mean, var.clamp(min=0).expand_as(mean), design.detach()


class DesignMoments(torch.autograd.Function):
    """Mean and variance of f `(N, F)` and the design `(N, K)`, from unit inputs h `(N, P)`.

    Differentiable once in h and log_sigma `(P,)`. The means `(F, K)` of bias, linear weights and
    values at the nodes, and their covariances `(F, K, K)`, or `(1, K, K)` if functions share it,
    are constants here, and so is the design. `linear` has slope and middle of the linear term
    r(h) = slope (h - middle), or is None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        log_sigma: Tensor,
        loc: Tensor,
        covariance: Tensor,
        intervals: Intervals,
        linear: tuple[float, float] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        (N, P), M = h.shape, intervals.num_nodes
        sigma = log_sigma.exp()
        j, w = two_nodes(h.mT.unsqueeze(0), sigma.unsqueeze(0), intervals)
        j, w = j.squeeze(0), w.squeeze(1)  # (P, N), (2, P, N)
        first = 1 + (P if linear else 0)
        # Where the grid ends, the outer one of the two nodes has the weight 0.
        both = torch.stack([j - 1, j]).clamp_(0, M - 1)
        starts = torch.arange(first, first + P * M, M, dtype=both.dtype, device=h.device)
        columns = both.add_(starts.unsqueeze(-1)).view(2 * P, N).mT.long()  # (N, 2 P)
        design = h.new_zeros(N, first + P * M)
        design[:, 0] = 1
        if linear:
            torch.mul(h - linear[1], sigma * linear[0], out=design[:, 1:first])
        w = w.reshape(2 * P, N).mT.contiguous()
        design.scatter_add_(1, columns, w)
        mean = design @ loc.mT
        products = (
            (design @ covariance[0]).unsqueeze(0) if len(covariance) == 1 else design @ covariance
        )
        var = (products * design).sum(-1).mT.clamp(min=0)
        squares = intervals.squares.index_select(0, j.view(-1)).view(P, N).mT
        ctx.save_for_backward(design, sigma, loc, products, columns, w, squares)
        ctx.slope, ctx.linear = intervals.slope, linear
        ctx.mark_non_differentiable(design)
        return mean, var.expand_as(mean), design

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise second_derivative_error()
        design, sigma, loc, products, columns, w, squares = ctx.saved_tensors
        grad_mean, grad_var, _ = grads
        (N, F), P, linear = grad_mean.shape, len(sigma), ctx.linear
        by_var = 2 * (grad_var.sum(-1, keepdim=True) if len(products) < F else grad_var)
        by_mean = grad_mean @ loc

        def gradient(take_fn: Callable[[Tensor], Tensor]) -> Tensor:
            """The gradient by those entries of the design that `take_fn` takes."""
            parts = zip(products, by_var.unbind(-1), strict=True)
            return sum((take_fn(G) * g.unsqueeze(-1) for G, g in parts), take_fn(by_mean))

        by_weight = gradient(lambda rows: rows.gather(1, columns)).view(N, 2, P)
        w = w.view(N, 2, P)
        # |w'| but for the slope of the grid; the left weight falls.
        slopes = torch.addcmul((squares * sigma.square()).unsqueeze(1), w, w).sqrt_()
        by_h = slopes.mul_(by_weight)
        grad_h = (by_h[:, 1] - by_h[:, 0]) * ctx.slope
        grad_log_sigma = (by_weight * w).sum((0, 1))
        if linear:
            grad = gradient(lambda rows: rows[:, 1 : 1 + P])
            grad_h = grad_h + grad * (sigma * linear[0])
            grad_log_sigma = grad_log_sigma + (grad * design[:, 1 : 1 + P]).sum(0)
        return grad_h, grad_log_sigma, None, None, None, None
