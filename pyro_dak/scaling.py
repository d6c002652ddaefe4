"""Bringing the unit inputs into the bounds of the grid, independently of the batch at hand.

A scaling is an affine map per unit whose statistics are buffers: updated by each training batch,
fixed in eval mode, saved with the model. In training mode the statistics are updated first and then
used, without gradient, so that what the network is trained through is what predicts later.
"""

import warnings

import torch
from torch import Tensor, nn

from pyro_dak.validation import check_bounds, check_choice, check_integer, check_positive

__all__ = ["SCALINGS", "MinMax", "NoScaling", "Scaling", "Standardize", "build_scaling"]


class Scaling(nn.Module):
    """Affine map `h -> h * gain + shift` per unit, `(..., N, P)` to `(..., N, P)`."""

    def __init__(self, num_units: int, bounds: tuple[float, float]):
        super().__init__()
        check_integer("num_units", num_units, minimum=1)
        check_bounds("bounds", bounds)
        self.num_units = num_units
        self.bounds = bounds
        self.is_frozen = False

    def forward(self, h: Tensor) -> Tensor:
        if self.training and not self.is_frozen:
            self.update(h.detach())
        gain, shift = self.gain_and_shift()
        return torch.addcmul(shift, h, gain)

    def update(self, h: Tensor) -> None:
        """Take the statistics of a batch `(..., N, P)` into the running ones."""

    def gain_and_shift(self) -> tuple[Tensor, Tensor]:
        """Gain and shift of the map, each `(P,)`."""
        raise NotImplementedError

    def spread(self) -> Tensor:
        """Width of each unit's inputs as seen in training, `(P,)`."""
        raise NotImplementedError

    def dead_units(self) -> list[int]:
        """Units whose inputs did not vary in training: their function is a constant."""
        spread = self.spread()
        if spread.is_meta:
            return []
        return torch.nonzero(spread <= 1e-6 * spread.max().clamp(min=1e-6)).flatten().tolist()

    def warn_if_dead(self) -> None:
        """Warn once about units that do not vary."""
        dead = self.dead_units()
        if dead:
            warnings.warn(
                f"{len(dead)} of {self.num_units} units are dead: their inputs do not vary over "
                f"the data (units {dead[:8]}{' ...' if len(dead) > 8 else ''}). Look for constant "
                "features or ReLUs that are always off, or lower `num_units`.",
                stacklevel=2,
            )

    def extra_repr(self) -> str:
        return f"num_units={self.num_units}, bounds={self.bounds}"


class Standardize(Scaling):
    """Mean to the middle of the bounds, `num_std` running standard deviations to either bound.

    Args:
        num_units: P.
        bounds: bounds of the grid.
        momentum: weight of a new batch in the running statistics. The first batches are averaged
            with weight 1/t instead, so that the start leaves no trace.
        num_std: standard deviations between the middle and a bound.
        eps: added to the variance, so that a constant unit maps to the middle.
    """

    loc: Tensor
    var: Tensor
    num_batches: Tensor

    def __init__(
        self,
        num_units: int,
        bounds: tuple[float, float],
        momentum: float = 0.1,
        num_std: float = 2.0,
        eps: float = 1e-6,
    ):
        super().__init__(num_units, bounds)
        check_positive("momentum", momentum)
        check_positive("num_std", num_std)
        self.momentum, self.num_std, self.eps = momentum, num_std, eps
        self.register_buffer("loc", torch.zeros(num_units))
        self.register_buffer("var", torch.ones(num_units))
        self.register_buffer("num_batches", torch.zeros(()))

    @torch.no_grad()
    def update(self, h: Tensor) -> None:
        rows = h.reshape(-1, self.num_units)
        var, loc = torch.var_mean(rows, 0, correction=0)
        self.num_batches += 1
        weight = (1 / self.num_batches).clamp(min=self.momentum)
        # Law of total variance: between the batch and what came before there is a spread of means.
        between = weight * (1 - weight) * (loc - self.loc).square()
        self.var.lerp_(var, weight).add_(between)
        self.loc.lerp_(loc, weight)

    def gain_and_shift(self) -> tuple[Tensor, Tensor]:
        low, high = self.bounds
        gain = (high - low) / (2 * self.num_std) * (self.var + self.eps).rsqrt()
        return gain, (low + high) / 2 - self.loc * gain

    def spread(self) -> Tensor:
        return self.var.sqrt()


class MinMax(Scaling):
    """Running minimum to the lower bound, running maximum to the upper (the paper's, mended).

    Args:
        num_units: P.
        bounds: bounds of the grid.
        momentum: weight of a new batch's extremes in the running ones.
        eps: least width between minimum and maximum.
    """

    low: Tensor
    high: Tensor
    num_batches: Tensor

    def __init__(
        self,
        num_units: int,
        bounds: tuple[float, float],
        momentum: float = 0.1,
        eps: float = 1e-6,
    ):
        super().__init__(num_units, bounds)
        check_positive("momentum", momentum)
        self.momentum, self.eps = momentum, eps
        self.register_buffer("low", torch.zeros(num_units))
        self.register_buffer("high", torch.ones(num_units))
        self.register_buffer("num_batches", torch.zeros(()))

    @torch.no_grad()
    def update(self, h: Tensor) -> None:
        low, high = torch.aminmax(h.reshape(-1, self.num_units), dim=0)
        self.num_batches += 1
        weight = (1 / self.num_batches).clamp(min=self.momentum)
        self.low.lerp_(low, weight)
        self.high.lerp_(high, weight)

    def gain_and_shift(self) -> tuple[Tensor, Tensor]:
        gain = (self.bounds[1] - self.bounds[0]) / (self.high - self.low).clamp(min=self.eps)
        return gain, self.bounds[0] - self.low * gain

    def spread(self) -> Tensor:
        return self.high - self.low


class NoScaling(Scaling):
    """The identity: the inputs are already in the coordinates of the grid."""

    def forward(self, h: Tensor) -> Tensor:
        return h

    def gain_and_shift(self) -> tuple[Tensor, Tensor]:
        return torch.ones(self.num_units), torch.zeros(self.num_units)

    def spread(self) -> Tensor:
        return torch.ones(self.num_units)


SCALINGS: dict[str, type[Scaling]] = {
    "minmax": MinMax,
    "none": NoScaling,
    "standardize": Standardize,
}


def build_scaling(name: str, num_units: int, bounds: tuple[float, float]) -> Scaling:
    """The scaling called `name`: "standardize", "minmax" or "none"."""
    check_choice("scaling", name, SCALINGS)
    return SCALINGS[name](num_units, bounds)
