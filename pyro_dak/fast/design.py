"""Moments of f for jointly Gaussian weights as one operation, which gives the design as well.

The plain twin is `AdditiveLayer.design` with `inference.guides.joint.design_moments`. A row of the
design has two nodes for each unit: phi(h_p) = w0 T_j + w1 T_{j+1} with the rows T of L_U, and the
weights of `fused.two_nodes`. The variance of f is Phi S Phi^T; with G = Phi S, which the forward
pass has anyway, its gradient by Phi is 2 G, so that the backward pass has no product of its own.
"""

from typing import Any

import torch
from torch import Tensor

from pyro_dak.fast.fused import Intervals, LinearMap, second_derivative_error, two_nodes
from pyro_dak.fast.transforms import needs_plain_operations

__all__ = ["DesignMoments", "design_moments", "node_pairs"]


def node_pairs(node_map: LinearMap) -> Tensor:
    """The rows of L_U at the two nodes of each interval, `(M + 1, 2, M)`; zero outside the grid."""
    L = node_map.matrix if node_map.is_dense else node_map.matrix.to_dense()
    outside = torch.zeros_like(L[:1])
    return torch.stack([torch.cat([outside, L]), torch.cat([L, outside])], 1)


def design_moments(
    h: Tensor,
    log_sigma: Tensor,
    loc: Tensor,
    covariance: Tensor,
    pairs: Tensor,
    intervals: Intervals,
    linear: tuple[float, float] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of `DesignMoments`, in plain operations where they are compiled."""
    if not needs_plain_operations():
        return DesignMoments.apply(h, log_sigma, loc, covariance, pairs, intervals, linear)
    sigma = log_sigma.exp()
    j, (w0, w1) = two_nodes(h.mT.unsqueeze(0), sigma.unsqueeze(0), intervals)
    nodes = pairs[j.squeeze(0).mT.long()]  # (N, P, 2, M)
    w0, w1 = (w.squeeze(0).mT.unsqueeze(-1) for w in (w0, w1))
    phi = (w0 * nodes[:, :, 0] + w1 * nodes[:, :, 1]).flatten(1)
    lines = [(h - linear[1]) * (sigma * linear[0])] if linear else []
    design = torch.cat([torch.ones_like(h[:, :1]), *lines, phi], -1)
    mean = design @ loc.mT
    if len(covariance) == 1:
        var = ((design @ covariance[0]) * design).sum(-1, keepdim=True)
    else:
        var = ((design @ covariance) * design).sum(-1).mT
    return mean, var.clamp(min=0).expand_as(mean), design.detach()


class DesignMoments(torch.autograd.Function):
    """Mean and variance of f `(N, F)` and the design `(N, K)`, from unit inputs h `(N, P)`.

    Differentiable once in h and log_sigma `(P,)`. The means of the weights `(F, K)` and their
    covariances `(F, K, K)`, or `(1, K, K)` if functions share it, are constants here, and so is the
    design. `slope` and `middle` are those of the linear term r(h) = slope (h - middle), or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        log_sigma: Tensor,
        loc: Tensor,
        covariance: Tensor,
        pairs: Tensor,
        intervals: Intervals,
        linear: tuple[float, float] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        (N, P), M = h.shape, pairs.shape[-1]
        sigma = log_sigma.exp()
        j, w = two_nodes(h.mT.unsqueeze(0), sigma.unsqueeze(0), intervals)
        rows = j.squeeze(0).mT.reshape(-1)
        w = w.squeeze(1).permute(0, 2, 1).reshape(2, N, P, 1)
        nodes = pairs.index_select(0, rows).view(N, P, 2, M)
        design = h.new_empty(N, 1 + (P if linear else 0) + P * M)
        design[:, 0] = 1
        if linear:
            torch.mul(h - linear[1], sigma * linear[0], out=design[:, 1 : 1 + P])
        phi = design[:, -P * M :].unflatten(-1, (P, M))
        torch.mul(nodes[:, :, 0], w[0], out=phi)
        phi.addcmul_(nodes[:, :, 1], w[1])
        mean = design @ loc.mT
        products = (
            (design @ covariance[0]).unsqueeze(0) if len(covariance) == 1 else design @ covariance
        )
        var = (products * design).sum(-1).mT.clamp(min=0)
        ctx.save_for_backward(design, sigma, loc, products, rows, w, nodes)
        ctx.intervals, ctx.linear = intervals, linear
        ctx.mark_non_differentiable(design)
        return mean, var.expand_as(mean), design

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise second_derivative_error()
        design, sigma, loc, products, rows, w, nodes = ctx.saved_tensors
        intervals, linear = ctx.intervals, ctx.linear
        grad_mean, grad_var, _ = grads
        (N, F), (P, M) = grad_mean.shape, nodes.shape[1::2]
        by_var = grad_var.sum(-1, keepdim=True) if len(products) < F else grad_var
        weighted = products * (2 * by_var.mT).unsqueeze(-1)
        grad = torch.addmm(weighted[0] if len(weighted) == 1 else weighted.sum(0), grad_mean, loc)
        squares = intervals.squares.index_select(0, rows).view(N, P, 1) * sigma.square().unsqueeze(
            -1
        )
        slopes = torch.addcmul(squares, w, w).sqrt_()  # |w'| but for the slope of the grid
        by_h = torch.mul(nodes[:, :, 1], slopes[1]).addcmul_(nodes[:, :, 0], slopes[0], value=-1)
        by_phi = grad[:, -P * M :]
        # Sums over the nodes of each unit, as a product, which is faster than so many short sums.
        units = torch.eye(P, dtype=grad.dtype, device=grad.device).repeat_interleave(M, 0)
        grad_h = (by_phi * by_h.view(N, P * M)) @ (units * intervals.slope)
        by_weight = (grad * design).sum(0)
        grad_log_sigma = by_weight[-P * M :].view(P, M).sum(-1)
        if linear:
            grad_h = grad_h + grad[:, 1 : 1 + P] * (sigma * linear[0])
            grad_log_sigma = grad_log_sigma + by_weight[1 : 1 + P]
        return grad_h, grad_log_sigma, None, None, None, None, None
