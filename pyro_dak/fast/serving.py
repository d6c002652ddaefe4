"""Mean and variance of f at many inputs, for weights that do not change any more.

What `pyro_dak.fast.moments` computes in training, with fewer operations and nothing kept for a
gradient.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_dak.fast.moments import IntervalConstants, sinh_ratio

__all__ = ["FixedMoments", "ServingConstants", "serving_constants"]

# Nodes are added for this many rows, and this many for each node of a unit: fewer are done sooner.
_MANY_ROWS, _MANY_ROWS_PER_NODE = 2048, 8


class ServingConstants(NamedTuple):
    """Constants of `FixedMoments` for a grid of M nodes.

    Means decay by exp(-k delta) over k spacings, variances and covariances of neighbours by the
    square of this: `decay`, `(3, 1, 1, M + 1)`, for k = 1 .. M + 1.
    """

    intervals: IntervalConstants
    decay: Tensor


def serving_constants(intervals: IntervalConstants) -> ServingConstants:
    """The constants of a grid, computed in float64 and then cast."""
    steps = torch.arange(1, intervals.num_nodes + 2, dtype=torch.float64)
    decay = (-intervals.delta * steps).exp()
    decay = torch.stack([decay, decay.square(), decay.square()]).view(3, 1, 1, -1)
    return ServingConstants(intervals, decay.to(intervals.low))


class _Nodes:
    """Moments of each unit at adjacent nodes, from node `low` to the one after node `high`.

    Args:
        table: mean, variance and twice the covariance with the next node, `(3, F, P, T)`, where
            T = high - low + 2.
        low: the first node.
    """

    def __init__(self, table: Tensor, low: int):
        P, T = table.shape[-2:]
        self.low, self.high = low, low + T - 2
        self.table = table.flatten(2)  # (3, F, P T)
        self.last_place = P * T - 2
        starts = torch.arange(-low, P * T - low, T, dtype=torch.int32, device=table.device)
        self.origin = starts.unsqueeze(-1)  # where node 0 of each unit is, or would be
        self._pairs: Tensor | None = None

    def pairs(self) -> Tensor:
        """The table with mean and variance of the next node beside it, `(5 F, P T - 1)`.

        Made when first asked for: one gather for all five is worth the copy.
        """
        if self._pairs is None:
            self._pairs = torch.cat([self.table[..., :-1], self.table[:2, :, 1:]]).flatten(0, 1)
        return self._pairs


class FixedMoments:
    """h -> mean and variance of sum_p g_p(h_p), from moments of the g_p at the nodes.

    Nodes 1 to M lie in the grid, at low + j spacing. In the interval after node j, at a spacings
    from it (see `interpolation.interpolated_moments`),

        mean = w0 mean_j + w1 mean_{j+1},
        variance = w0 (w0 var_j + 2 w1 cov_j) + w1^2 var_{j+1},
        w0 = sinh((1 - a) delta) / sinh(delta),   w1 = sinh(a delta) / sinh(delta).

    No term of the variance is negative. Outside the nodes g decays by exp(-delta) a spacing, so
    that the outermost node has the weight r = exp(-distance / lengthscale). Since

        sinh((1 - a) delta) + exp(-delta) sinh(a delta) = exp(-a delta) sinh(delta),

    interpolation gives the same between further nodes, each exp(-delta) times the one before it.
    Where there are many inputs, M such nodes are added on either side; unless an input is beyond
    even these, there is no exponential to compute. Without gradient.

    Args:
        table: mean, variance and twice the covariance with the next node, of nodes 0 to M + 1,
            `(3, F, P, M + 2)`, of which the first and the last continue g as above.
        constants: of the grid, in the dtype and on the device of the inputs.
    """

    @torch.no_grad()
    def __init__(self, table: Tensor, constants: ServingConstants):
        self.grid = _Nodes(table.to(constants.decay), 0)
        self.constants, self.intervals = constants, constants.intervals
        self.num_functions = table.shape[1]
        self._extended: _Nodes | None = None

    @torch.no_grad()
    def __call__(
        self, h: Float[Tensor, "n p"]
    ) -> tuple[Float[Tensor, "n f"], Float[Tensor, "n f"]]:
        """Mean and variance. A NaN shows in its own row."""
        if torch.compiler.is_compiling():
            return self.for_compiler(h)
        N, P = h.shape
        x = h.new_empty(P, N)  # rows last in memory, whatever the strides of h
        torch.sub(h.mT, self.intervals.low, out=x).div_(self.intervals.spacing)
        x, nodes, r = self._bring_near(x)
        j = x.floor()
        places = torch.add(nodes.origin, j.to(torch.int32))
        a = x.sub_(j)
        w1, w0 = sinh_ratio(a, self.intervals), sinh_ratio(1 - a, self.intervals)
        if r is not None:
            w0.mul_(r)  # w1 is 0 where r is not 1
            places.clamp_(0, nodes.last_place)  # of a NaN
        picked = nodes.pairs().index_select(1, places.view(-1))
        mean, var, cov, next_mean, next_var = picked.view(5, self.num_functions, P, N)
        mean = mean.mul_(w0).addcmul_(w1, next_mean).sum(1)
        var = var.mul_(w0).addcmul_(w1, cov).mul_(w0).addcmul_(w1.square_(), next_var).sum(1)
        return mean.mT, var.mT

    def _bring_near(self, x: Tensor) -> tuple[Tensor, _Nodes, Tensor | None]:
        """x, nodes with all of it between them, and r, or None for 1 everywhere.

        What is beyond the nodes is brought to the outermost one.
        """
        num_rows, num_nodes = x.shape[-1], self.intervals.num_nodes
        if x.device.type == "cpu" and num_rows >= max(_MANY_ROWS, _MANY_ROWS_PER_NODE * num_nodes):
            nodes = self.extended()
            low, high = (end.item() for end in x.aminmax())
            if nodes.low <= low and high <= nodes.high:
                return x, nodes, None
        nearest = x.clamp(self.grid.low, self.grid.high)
        r = x.sub_(nearest).abs_().mul_(-self.intervals.delta).exp_()
        return nearest, self.grid, r

    def extended(self) -> _Nodes:
        """The nodes with M more on either side, made when first asked for."""
        if self._extended is None:
            own, decay = self.grid, self.constants.decay
            table = own.table.view(*own.table.shape[:2], -1, own.high + 2)
            before = table[..., :1] * decay[..., :-1].flip(-1)
            after = table[..., -1:] * decay
            self._extended = _Nodes(torch.cat([before, table, after], -1), -before.shape[-1])
        return self._extended

    def for_compiler(
        self, h: Float[Tensor, "n p"]
    ) -> tuple[Float[Tensor, "n f"], Float[Tensor, "n f"]]:
        """The same in plain operations, of which the compiler makes one loop over h."""
        nodes, intervals = self.grid, self.intervals
        x = (h.mT - intervals.low) / intervals.spacing
        nearest = x.clamp(nodes.low, nodes.high)
        r = (-intervals.delta * (x - nearest).abs()).exp()
        j = nearest.floor()
        a = nearest - j
        w1, w0 = sinh_ratio(a, intervals), sinh_ratio(1 - a, intervals) * r
        places = (nodes.origin + j.to(torch.int32)).clamp(0, nodes.last_place)
        mean, var, cov = (part[:, places] for part in nodes.table.unbind())
        next_mean, next_var = (part[:, places + 1] for part in nodes.table[:2].unbind())
        mean = w0 * mean + w1 * next_mean
        var = w0 * (w0 * var + w1 * cov) + w1 * w1 * next_var
        return mean.sum(1).mT, var.sum(1).mT
