"""Mean and variance of f at many inputs, for weights that do not change any more.

What `pyro_dak.interpolation` computes in training, from a table with one entry an interval instead
of one a node: half the work, and nothing is kept for a gradient.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_dak.interpolation import IntervalConstants, sinh_ratio
from pyro_dak.local import NodeMoments

__all__ = ["FixedMoments"]


class FixedMoments:
    """h -> mean and variance of sum_p g_p(h_p), from moments of the g_p at the nodes.

    In the interval after node j, at a spacings from it, with S = sinh(a delta) / sinh(delta) and
    C = cosh(a delta), the two weights are w1 = S and w0 = sinh((1 - a) delta) / sinh(delta)
    = C - cosh(delta) S. Hence

        mean = C mean_j + S d_j,       variance = C^2 var_j + C S c_j + S^2 v_j,
        d_j = mean_{j+1} - cosh(delta) mean_j,
        c_j = 2 (cov_j - cosh(delta) var_j),
        v_j = var_{j+1} - 2 cosh(delta) cov_j + cosh(delta)^2 var_j,

    five numbers an interval, computed in float64. Before the first and after the last node C = r
    and S = 0 with r = exp(-distance / lengthscale). For delta <= 1 rounding is that of a few
    operations; on coarser grids C and cosh(delta) S would cancel.

    Args:
        nodes: moments at the sorted nodes, `(F, P, M)`.
        constants: of the grid, with delta <= 1, in the dtype and on the device of the inputs.
    """

    def __init__(self, nodes: NodeMoments, constants: IntervalConstants):
        delta = constants.delta
        if delta > 1:
            raise ValueError(f"`delta` must be at most 1; got {delta}. Use interpolated_moments.")
        mean, var, cov = (part.double() for part in nodes)
        cosh, last = math.cosh(delta), (0, 1)  # nothing after the last node
        d = mean[..., 1:] - cosh * mean[..., :-1]
        c = 2 * (cov - cosh * var[..., :-1])
        v = var[..., 1:] - 2 * cosh * cov + cosh**2 * var[..., :-1]
        d, c, v = (torch.nn.functional.pad(part, last) for part in (d, c, v))
        like = constants.low
        self.table = torch.stack([mean, d, var, c, v], 1).to(like).flatten(2)  # (F, 5, P M)
        self.constants = constants
        P, M = mean.shape[-2:]
        self.first = torch.arange(-1, P * M - 1, M, dtype=torch.int32, device=like.device)
        self.sinh_squared = like.new_tensor(math.sinh(delta) ** 2)
        self.one = like.new_ones(())

    def __call__(
        self, h: Float[Tensor, "n p"]
    ) -> tuple[Float[Tensor, "n f"], Float[Tensor, "n f"]]:
        """Mean and variance. A NaN shows in its own row."""
        F, five, num_places = self.table.shape
        N, P = h.shape
        constants = self.constants
        x = torch.sub(h.mT, constants.low, out=h.new_empty(P, N)).div_(constants.spacing)
        nearest = x.clamp(1, constants.num_nodes)
        r = x.sub_(nearest).abs_().mul_(-constants.delta).exp_()
        j = nearest.to(torch.int32)
        S = sinh_ratio(nearest.sub_(j), constants)
        C = torch.addcmul(self.one, S * S, self.sinh_squared).sqrt_().mul_(r)
        S.mul_(r)
        places = j.add_(self.first.unsqueeze(-1)).clamp_(0, num_places - 1).flatten()
        picked = self.table.flatten(0, 1).index_select(1, places).view(F, five, P, N)
        mean_j, d, var_j, c, v = picked.unbind(1)
        mean = torch.addcmul(C * mean_j, S, d).sum(1)
        var = (C * var_j).addcmul_(S, c).mul_(C).addcmul_(S.square_(), v).sum(1)
        return mean.mT, var.mT
