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

__all__ = ["DesignMoments", "node_pairs"]


def node_pairs(node_map: LinearMap) -> Tensor:
    """The rows of L_U at the two nodes of each interval, `(M + 1, 2, M)`; zero outside the grid."""
    L = node_map.matrix if node_map.is_dense else node_map.matrix.to_dense()
    outside = torch.zeros_like(L[:1])
    return torch.stack([torch.cat([outside, L]), torch.cat([L, outside])], 1)


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
        w = w.squeeze(1).permute(2, 1, 0).reshape(N * P, 2)
        picked = pairs.index_select(0, rows)  # (N P, 2, M)
        design = h.new_empty(N, 1 + (P if linear else 0) + P * M)
        design[:, 0] = 1
        if linear:
            torch.mul(h - linear[1], sigma * linear[0], out=design[:, 1 : 1 + P])
        phi = (w.unsqueeze(-1) * picked).sum(1)
        design[:, -P * M :] = phi.view(N, P * M)
        mean = design @ loc.mT
        products = design @ covariance  # (F, N, K)
        var = (products * design).sum(-1).mT.clamp(min=0)
        ctx.save_for_backward(design, sigma, loc, products, rows, w, picked)
        ctx.intervals, ctx.linear = intervals, linear
        ctx.mark_non_differentiable(design)
        return mean, var.expand_as(mean), design

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise second_derivative_error()
        design, sigma, loc, products, rows, w, picked = ctx.saved_tensors
        intervals, linear = ctx.intervals, ctx.linear
        grad_mean, grad_var, _ = grads
        P, M = len(sigma), picked.shape[-1]
        N, F = grad_mean.shape
        by_mean = grad_mean @ loc
        by_var = grad_var.sum(-1, keepdim=True) if len(products) < F else grad_var
        weighted = products * (2 * by_var.mT).unsqueeze(-1)
        grad = by_mean + (weighted[0] if len(weighted) == 1 else weighted.sum(0))  # (N, K)
        phi = grad[:, -P * M :].reshape(N * P, 1, M)
        grad_w = (picked * phi).sum(-1)  # (N P, 2)
        squares = intervals.squares.index_select(0, rows).view(N, P) * sigma.square()
        slopes = torch.addcmul(squares.view(-1, 1), w, w).sqrt_().mul_(grad_w)
        grad_h = (slopes[:, 1] - slopes[:, 0]).mul_(intervals.slope).view(N, P)
        grad_log_sigma = (w * grad_w).sum(-1).view(N, P).sum(0)
        if linear:
            columns = grad[:, 1 : 1 + P]
            grad_h = grad_h + columns * (sigma * linear[0])
            grad_log_sigma = grad_log_sigma + (columns * design[:, 1 : 1 + P]).sum(0)
        return grad_h, grad_log_sigma, None, None, None, None, None
