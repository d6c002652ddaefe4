"""Dyadic inducing points U in level order, and who their neighbours are (paper, appendix A)."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pyro_dak.validation import check_bounds, check_integer

__all__ = ["DyadicGrid"]

_MAX_LEVEL = 20


@dataclass(frozen=True)
class DyadicGrid:
    """M = 2^level - 1 equally spaced points inside `bounds`, ordered by level.

    Level l adds the points `low + (high - low) i / 2^l` with odd i: 1/2 | 1/4 3/4 | 1/8 3/8 ...
    In this order the inverse Cholesky factor of a Markov kernel is sparse (paper, Algorithm 1):
    each point depends only on its nearest neighbours among the coarser points.

    Attributes are level-ordered unless their name says `sorted`; tensors are computed once,
    in float64 or int64 on the CPU. The bounds themselves are not points of the grid.

    Args:
        level: L, from 1 to 20.
        bounds: (low, high), finite, low < high.
    """

    level: int
    bounds: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        check_integer("level", self.level, minimum=1, maximum=_MAX_LEVEL)
        check_bounds("bounds", self.bounds)
        object.__setattr__(self, "level", int(self.level))
        object.__setattr__(self, "bounds", (float(self.bounds[0]), float(self.bounds[1])))

    @property
    def num_inducing(self) -> int:
        """M = 2^level - 1."""
        return 2**self.level - 1

    @property
    def spacing(self) -> float:
        """Distance of adjacent points, (high - low) / 2^level."""
        return (self.bounds[1] - self.bounds[0]) / 2**self.level

    @cached_property
    def position(self) -> Tensor:
        """Rank of each point among the sorted points, counted from 1, `(M,)`.

        Point m lies at `low + spacing * position[m]`.
        """
        steps = [2**k for k in range(self.level)]  # of the finest level to the coarsest
        return torch.cat([torch.arange(step, 2**self.level, 2 * step) for step in reversed(steps)])

    @cached_property
    def point_level(self) -> Tensor:
        """Level at which each point enters, `(M,)`, from 1 to `level`."""
        levels = torch.arange(1, self.level + 1)
        return torch.repeat_interleave(levels, 2 ** (levels - 1))

    @cached_property
    def inducing_points(self) -> Tensor:
        """U in level order, `(M,)`, float64."""
        return self.bounds[0] + self.spacing * self.position.double()

    @property
    def sorted_points(self) -> Tensor:
        """U in increasing order, `(M,)`, float64."""
        return self.inducing_points[self.sort_order]

    @cached_property
    def sort_order(self) -> Tensor:
        """Indices with `inducing_points[sort_order]` increasing, `(M,)`."""
        return torch.argsort(self.position)

    @cached_property
    def neighbours(self) -> tuple[Tensor, Tensor]:
        """Level-order indices of the nearest coarser points left and right, -1 where there is none.

        Two `(M,)` tensors. A point of level l has its neighbours at distance
        `(high - low) / 2^l` on each side, unless it is the first or last of its level.
        """
        step = 2 ** (self.level - self.point_level)
        none = torch.tensor([-1])
        rank_to_index = torch.cat([none, self.sort_order, none])  # ranks 0 .. M + 1
        return rank_to_index[self.position - step], rank_to_index[self.position + step]
