"""What a batch says under a q that is held fixed, with Gaussian noise, as one operation.

Its plain twin is `gaussian.expected_log_normal`, summed over rows, of `AdditiveLayer.moments` for
independent weights and of `inference.guides.joint.design_moments` for others. Natural gradients
need the design of the rows besides, and the gradient by the inputs and scales of the units alone.
As in `fast.bound`, the noise is the same for all rows, so that only the sum of the variances is
needed, and gradients are computed in the forward pass, up to factors.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_dak.annotations import Float
from pyro_dak.fast.bound import (
    by_inputs_of_weights,
    by_picked_moments,
    places_of,
    two_nodes,
)
from pyro_dak.fast.fused import Intervals, LinearMap, second_derivative_error

__all__ = ["FixedNodes", "GaussianRows", "fixed_nodes"]

_LOG_2PI = math.log(2 * math.pi)


class FixedNodes(NamedTuple):
    """A Gaussian q of bias, linear weights and values at the nodes, in the form that rows need.

    Attributes:
        loc: means, `(F, K)`.
        covariance: covariances summed over functions, `(K, K)`; None for independent weights.
        table: for independent weights, the numbers of `fused.interval_matrix` at `(R P)` places: of
            the means those of each function, of the variances their sums, `(2 F + 3, R P)`; and
            below them those of their slopes, `(2 (2 F + 3), R P)` together.
        other_var: for these, variances of bias and linear weights, summed over functions.
    """

    loc: Tensor
    covariance: Tensor | None
    table: Tensor | None = None
    other_var: Tensor | None = None


def fixed_nodes(
    loc: Tensor, mean: Tensor, var: Tensor, shape: torch.Size, table_map: LinearMap, slopes: Tensor
) -> FixedNodes:
    """Those of independent weights with moments `(F, K)` each, of which z has `shape`, `(F, P, M)`.

    The means `loc` of node values are there already; `slopes` are those of the intervals.
    """
    F, first = len(loc), loc.shape[-1] - shape[1:].numel()
    z = torch.cat([part[:, first:].view(shape) for part in (mean, var)], -1)
    numbers = table_map.units_last(z).unflatten(1, (5, -1)).flatten(2)  # (F, 5, R P)
    table = torch.cat([numbers[:, :2].flatten(0, 1), numbers[:, 2:].sum(0)])
    of_slopes = torch.block_diag(*[slopes[:2, :2]] * F, slopes[2:, 2:])
    return FixedNodes(loc, None, torch.cat([table, of_slopes @ table]), var[:, :first].sum(0))


class GaussianRows(torch.autograd.Function):
    """sum_n E_q log N(y_n | f(h_n), s^2), a scalar, then residuals, squares and design of the rows.

    With r = y - E f `(N, F)`, Q = sum r^2 + Var f and p = s^-2, the first is
    -(p Q + N F log(2 pi s^2)) / 2, differentiable once in h `(N, P)`, log_sigma `(P,)` and the
    logarithm of s, `()` or `(1,)`. r, Q and the design of node values W `(N, K)` are constants.
    With G = W S, for the covariance S of the node values summed over functions, the gradient by W
    is p (r m - G); between two nodes, only the entries of these are needed. For independent weights
    it comes from the five numbers of an interval, as in `bound.GaussianBound`. `linear` is as in
    `design.DesignMoments`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Float[Tensor, "n p"],
        y: Float[Tensor, "n f"],
        log_sigma: Float[Tensor, " p"],
        log_noise: Float[Tensor, "..."],
        q: FixedNodes,
        intervals: Intervals,
        linear: tuple[float, float] | None,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "n f"], Float[Tensor, ""], Float[Tensor, "n k"]]:
        (N, F), P, M = y.shape, len(log_sigma), intervals.num_nodes
        sigma, first = log_sigma.exp(), 1 + (P if linear else 0)
        j, w = two_nodes(h, log_sigma, intervals)
        # Where the grid ends, the outer one of the two nodes has the weight 0.
        starts = torch.arange(first, first + P * M, M, device=h.device)
        left, right = (j - 1).clamp_(min=0) + starts, j.clamp(max=M - 1) + starts
        design = h.new_zeros(N, first + P * M)
        design[:, 0] = 1
        if linear:
            torch.mul(h - linear[1], sigma * linear[0], out=design[:, 1:first])
        design.scatter_add_(1, left, w[0]).scatter_add_(1, right, w[1])
        r = torch.addmm(y, design, q.loc.mT, alpha=-1)
        lines = design[:, 1:first]
        if q.covariance is None:
            assert q.table is not None
            assert q.other_var is not None
            picked = q.table.index_select(1, places_of(j)).view(2, 2 * F + 3, N, P)
            terms = picked.mul_(by_picked_moments(r.mT, w))
            by_h, by_moment = terms[1].sum(0), terms[0].sum(1)
            by_mean, by_var = by_moment[: 2 * F].sum(0), by_moment[2 * F :].sum(0)
            var = by_var.sum().mul_(-2).add_(q.other_var[0], alpha=N)
            # Means of f grow with sigma, variances with its square.
            by_log_sigma = by_mean.add_(by_var, alpha=2)
            if linear:
                lines_var = lines * q.other_var[1:]
                var.add_((lines_var * lines).sum())
                by_lines = torch.addmm(lines_var, r, q.loc[:, 1:first], beta=-1)
        else:
            G = design @ q.covariance
            var = torch.dot(G.view(-1), design.view(-1))
            by_design = torch.addmm(G, r, q.loc, beta=-1)
            by_weight = torch.stack([by_design.gather(1, left), by_design.gather(1, right)])
            by_h = by_inputs_of_weights(by_weight, j, w, sigma, intervals)
            by_log_sigma = (by_weight * w).sum((0, 1))
            by_lines = by_design[:, 1:first]
        if linear:
            by_h.addcmul_(by_lines, sigma, value=linear[0])
            by_log_sigma = by_log_sigma + (by_lines * lines).sum(0)
        Q = torch.linalg.vector_norm(r).square().add_(var)
        p, log_s = (-2 * log_noise).exp_().view(()), log_noise.view(())
        expected = (Q * p).add_(log_s, alpha=2 * N * F).add_(N * F * _LOG_2PI).mul_(-0.5)
        ctx.save_for_backward(by_h.mul_(p), by_log_sigma.mul_(p), (Q * p).sub_(N * F))
        ctx.noise_shape = log_noise.shape
        ctx.mark_non_differentiable(r, Q, design)
        return expected, r, Q, design

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise second_derivative_error()
        by_h, by_log_sigma, by_noise = ctx.saved_tensors
        by_noise = (by_noise * grad).view(ctx.noise_shape) if ctx.needs_input_grad[3] else None
        return by_h * grad, None, by_log_sigma * grad, by_noise, None, None, None
