"""Nodes of units that have a lengthscale each, with the gradient by it written out.

Everything depends on delta = spacing / lengthscale, one for each unit. Where L_U is not zero does
not depend on it: row j has one column for each level (`additive.bridge.node_features`, the plain
twin). With the distance r of the node from the level's point, whose column reaches up to the
distance d, an entry is a product of powers,

    V = exp(-r delta) (1 - exp(-2 (d - r) delta))^k (1 - exp(-2 d delta))^a (1 + exp(-2 d delta))^b

where (k, a, b) is (1, -1/2, -1/2) between two neighbours, (1, -1/2, 0) on the inner side of the
first and of the last point, (0, 1/2, 0) on their outer side, and (0, 0, 0) on level 1. So V comes
with its logarithmic slope from a fixed number of operations, whatever the number of levels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["NodePattern", "UnitMap", "node_pattern"]


class NodePattern(NamedTuple):
    """Where the entries of L_U are and which powers they have, in one dtype on one device.

    The J = M L entries are those of node 1 on all levels, then of node 2, and so on. `distance` is
    r, `(J, 1)`; `steps` is -2 (d - r) and -2 d, `(2, J, 1)`; `powers` is (k, a, b), `(3, J, 1)`.
    `is_entry`, `(J, 1)`, is 0 where the column ends at the node; `is_shared`, `(J - L, 1)`, is 2
    where a node has its column in common with the next node and else 0.

    `columns` says which of the means and variances of z, `(2 M,)`, a product takes: J of them for
    means, J for variances, J - L for covariances of neighbours. `rows`, `(5 M + 5,)`, says which of
    the resulting 3 M - 1 numbers, and of the 0 after them, make the table of
    `fused.interpolated_moments`. `is_inside`, `(M + 1, 1)`, is 0 for the two unbounded intervals.
    """

    level: int
    distance: Tensor
    steps: Tensor
    powers: Tensor
    is_entry: Tensor
    is_shared: Tensor
    columns: Tensor
    rows: Tensor
    is_inside: Tensor


def node_pattern(level: int, dtype: torch.dtype, device: torch.device) -> NodePattern:
    """The pattern of a grid with M = 2^level - 1 nodes."""
    M, num_points = 2**level - 1, 2 ** torch.arange(level)
    d, last = num_points.flip(0), num_points - 1
    nodes = torch.arange(1, M + 1).unsqueeze(-1)
    k = nodes // (2 * d)  # (M, L)
    shift = nodes - (2 * k + 1) * d
    distance = shift.abs()
    is_edge = (k == 0) | (k == last)
    is_open = torch.where(shift >= 0, k == last, k == 0)
    is_inner, is_coarsest = ~is_open, last == 0
    exponent_d = torch.where(is_open, 0.5, -0.5).masked_fill(is_coarsest, 0.0)
    powers = torch.stack([is_inner.double(), exponent_d, torch.where(is_edge, 0.0, -0.5)])
    is_entry = is_open | (distance < d)
    rest = torch.where(is_inner & is_entry, d - distance, 1)
    column = last + k
    is_shared = 2 * (column[:-1] == column[1:])
    columns = torch.cat([column.flatten(), M + column.flatten(), M + column[:-1].flatten()])
    zero, mean, covariance = torch.tensor([3 * M - 1]), torch.arange(M), torch.arange(M - 1)
    var, covariance = M + mean, 2 * M + covariance
    parts = [(zero, mean), (mean, zero), (zero, var), (var, zero), (zero, covariance, zero)]
    rows = torch.cat([part for block in parts for part in block])
    is_inside = torch.ones(M + 1)
    is_inside[[0, -1]] = 0
    steps = -2 * torch.stack([rest, d.expand_as(rest)])
    floats = (distance, steps, powers, is_entry, is_shared)
    cast = [part.flatten(-2).unsqueeze(-1).to(device, dtype) for part in floats]
    cast += [columns.to(device), rows.to(device), is_inside.unsqueeze(-1).to(device, dtype)]
    return NodePattern(level, *cast)


class UnitMap:
    """From means and variances of z to the table of intervals, for delta `(P,)`.

    The twin of `fused.LinearMap` of `fused.interval_matrix`, with a matrix for each unit. A node
    has the mean sum_l V m and the variance sum_l V^2 v, and with the next node the covariance of
    the columns that they share. `entries` are V, V^2 and twice the products of neighbours, with
    units last, `(3 J - L, P)`.
    """

    def __init__(self, delta: Tensor, pattern: NodePattern):
        self.pattern = pattern
        p, L = pattern, pattern.level
        self.expm1 = torch.expm1(p.steps * delta)  # (2, J, P)
        logs = torch.cat([-self.expm1, 2 + self.expm1[1:]]).log()  # (3, J, P)
        V = ((p.powers * logs).sum(0) - p.distance * delta).exp() * p.is_entry
        self.V = V
        self.entries = torch.cat([V, V * V, V[:-L] * V[L:] * p.is_shared])

    def factor(self) -> Tensor:
        """The entries of L_U of each unit, `(P, M, L)`."""
        return self.V.mT.unflatten(-1, (-1, self.pattern.level))

    def units_last(self, z: Tensor) -> Tensor:
        """`(..., P, 2 M)` to `(..., 5 M + 5, P)`."""
        products = self._picked(z) * self.entries
        nodes = products.unflatten(-2, (-1, self.pattern.level)).sum(-2)  # (..., 3 M - 1, P)
        return torch.nn.functional.pad(nodes, (0, 0, 0, 1)).index_select(-2, self.pattern.rows)

    def backward(self, z: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of z `(F, P, 2 M)` and of delta `(P,)`, from that of the table `(F, R, P)`."""
        p, L = self.pattern, self.pattern.level
        m0, m1, v0, v1, c = grad.unflatten(1, (5, -1)).unbind(1)
        nodes = torch.cat([m0[:, 1:] + m1[:, :-1], v0[:, 1:] + v1[:, :-1], c[:, 1:-1]], 1)
        by_entry = nodes.unsqueeze(2) * self.entries.unflatten(0, (-1, L))
        by_entry = by_entry.flatten(1, 2)  # (F, 3 J - L, P)
        grad_z = torch.zeros_like(z.mT, memory_format=torch.contiguous_format)
        grad_z.scatter_add_(1, p.columns.unsqueeze(-1).expand_as(by_entry), by_entry)
        slope = self._log_slope()
        slopes = torch.cat([slope, 2 * slope, slope[:-L] + slope[L:]])
        by_slope = by_entry.mul_(self._picked(z))
        by_slope = by_slope[0] if len(by_slope) == 1 else by_slope.sum(0)
        return grad_z.mT, (by_slope * slopes).sum(0)

    def _picked(self, z: Tensor) -> Tensor:
        return z.mT.index_select(-2, self.pattern.columns)  # (..., 3 J - L, P)

    def _log_slope(self) -> Tensor:
        """The derivative of log V by delta, `(J, P)`, in which steps (m + 1) is that of m."""
        p, m = self.pattern, self.expm1
        by_delta = p.steps * (m + 1)
        parts = torch.cat([by_delta / m, by_delta[1:] / (2 + m[1:])])
        return (p.powers * parts).sum(0) - p.distance
