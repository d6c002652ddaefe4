"""Mean and variance of f at many inputs, for weights that do not change any more.

What `pyro_dak.interpolation` computes in training, from the same table, with fewer operations and
nothing kept for a gradient.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_dak.interpolation import IntervalConstants, sinh_ratio

__all__ = ["FixedMoments"]


class FixedMoments:
    """h -> mean and variance of sum_p g_p(h_p), from moments of the g_p at the nodes.

    In the interval after node j, at a spacings from it (see `interpolation.interpolated_moments`),

        mean = w0 mean_j + w1 mean_{j+1},
        variance = w0 (w0 var_j + 2 w1 cov_j) + w1^2 var_{j+1},
        w0 = r sinh((1 - a) delta) / sinh(delta),   w1 = r sinh(a delta) / sinh(delta):

    five numbers an interval. Before the first and after the last node a = 0 and r is
    exp(-distance / lengthscale); else r = 1. No term of the variance is negative. Without gradient.

    Args:
        table: of `interpolation.interpolated_moments`, `(F, 5, M + 1, P)`.
        constants: of the grid, in the dtype and on the device of the inputs.
    """

    @torch.no_grad()
    def __init__(self, table: Tensor, constants: IntervalConstants):
        P = table.shape[-1]
        # Nothing is before the first node: at it the interval after it serves as well.
        self.table = table[:, :, 1:].to(constants.low).flatten(2).contiguous()  # (F, 5, M P)
        self.intervals = self.table.mT.contiguous()  # (F, M P, 5), for the compiler
        self.constants, self.num_units = constants, P
        self.first = torch.arange(-P, 0, dtype=torch.int32, device=table.device).unsqueeze(-1)

    @torch.no_grad()
    def __call__(
        self, h: Float[Tensor, "n p"]
    ) -> tuple[Float[Tensor, "n f"], Float[Tensor, "n f"]]:
        """Mean and variance. A NaN shows in its own row."""
        if torch.compiler.is_compiling():
            return self.for_compiler(h)
        num_functions, five, num_places = self.table.shape
        N, P = h.shape
        constants = self.constants
        x = h.new_empty(P, N)
        torch.sub(h.mT, constants.low, out=x).div_(constants.spacing)
        nearest = x.clamp(1, constants.num_nodes)
        r = x.sub_(nearest).abs_().mul_(-constants.delta).exp_()
        j = nearest.to(torch.int32)
        a = nearest.frac_()
        w1 = sinh_ratio(a, constants)  # 0 where r is not 1
        w0 = sinh_ratio(1 - a, constants).mul_(r)
        places = torch.add(self.first, j, alpha=P).clamp_(0, num_places - 1).view(-1)
        picked = self.table.view(-1, num_places).index_select(1, places)
        mean0, mean1, var0, var1, cov = picked.view(num_functions, five, P, N).unbind(1)
        mean = mean0.mul_(w0).addcmul_(w1, mean1).sum(1)
        var = var0.mul_(w0).addcmul_(w1, cov).mul_(w0).addcmul_(w1.square_(), var1).sum(1)
        return mean.mT, var.mT

    def for_compiler(
        self, h: Float[Tensor, "n p"]
    ) -> tuple[Float[Tensor, "n f"], Float[Tensor, "n f"]]:
        """The same in plain operations, of which the compiler makes one loop over h.

        What that loop reads of an interval lies together.
        """
        constants = self.constants
        x = (h.mT - constants.low) / constants.spacing
        nearest = x.clamp(1, constants.num_nodes)
        r = (-constants.delta * (x - nearest).abs()).exp()
        j = nearest.to(torch.int32)
        a = nearest - j
        w1, w0 = sinh_ratio(a, constants), sinh_ratio(1 - a, constants) * r
        places = (self.first + self.num_units * j).clamp(0, self.intervals.shape[1] - 1)
        mean0, mean1, var0, var1, cov = (self.intervals[:, places, i] for i in range(5))
        mean = w0 * mean0 + w1 * mean1
        var = w0 * (w0 * var0 + w1 * cov) + w1 * w1 * var1
        return mean.sum(1).mT, var.sum(1).mT
