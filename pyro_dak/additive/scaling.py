"""Bringing the unit inputs into the bounds of the grid.

A scaling is an affine map per unit. In a training step its statistics are those of the batch, with
their gradient, as in batch normalisation, and running averages of them are kept in buffers; in
eval mode the running statistics are used, so that a prediction depends on its own row alone. A
training step is a call in training mode with gradients on: without gradients the running statistics
are used and stay as they are (before the first step there are none, and a batch has its own).
(Detached running statistics in training were tried: the scale of the features then drifts, and the
test error doubles.) Where several processes train together, they are those of the global batch.
Statistics that are frozen serve in training steps too: then a batch in parts is the whole batch.
"""

import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed
from torch import Tensor, nn

from pyro_dak.fast.transforms import needs_plain_operations
from pyro_dak.validation import check_bounds, check_choice, check_integer, check_positive

__all__ = [
    "SCALINGS",
    "MinMax",
    "NoScaling",
    "PartStatistics",
    "Scaling",
    "Standardize",
    "build_scaling",
    "num_processes",
    "update_running",
]

# How many rows a part has, and the two statistics of these, `(P,)` each.
PartStatistics: TypeAlias = tuple[int, Tensor, Tensor]


class Scaling(nn.Module):
    """An affine map per unit, `(..., N, P)` to `(..., N, P)`, from two statistics `(P,)` each.

    Subclasses say how the statistics come from a batch and how the map comes from them. Here the
    map is the identity. `momentum` is the weight of a new batch in the running statistics; the
    first batches are averaged with weight 1/t instead, so that the start leaves no trace.

    Attributes:
        is_synchronized: whether a training step takes the statistics over all processes, which then
            must take it together. None is for all processes of `torch.distributed`, if it was
            initialised with more than one.
        is_frozen: whether training steps use the running statistics and leave them as they are.
    """

    first: Tensor
    second: Tensor
    num_batches: Tensor

    def __init__(self, num_units: int, bounds: tuple[float, float], momentum: float = 0.1):
        super().__init__()
        check_integer("num_units", num_units, minimum=1)
        check_bounds("bounds", bounds)
        check_positive("momentum", momentum)
        self.num_units, self.bounds, self.momentum = num_units, bounds, momentum
        self.is_synchronized: bool | None = None
        self.is_frozen = False
        self.register_buffer("first", torch.zeros(num_units))
        self.register_buffer("second", torch.ones(num_units))
        self.register_buffer("num_batches", torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        rows = h if h.dim() == 2 else h.flatten(0, -2)
        if rows.dtype != self.first.dtype:
            rows = rows.to(self.first.dtype)  # statistics keep their precision
        is_fixed = not self.training or self.is_frozen
        # A single row has no spread: it is mapped by what earlier batches showed.
        if is_fixed or (len(rows) < 2 and not self.spans_processes()):
            return self.apply_map(h, self.first, self.second)
        if not torch.is_grad_enabled():  # an evaluation, in training mode
            if self.num_batches > 0:
                return self.apply_map(h, self.first, self.second)
            return self.map_batch(rows)[0].view(h.shape)
        scaled, first, second = self.map_batch(rows)
        running, batch = (self.first, self.second), (first.detach(), second.detach())
        update_running(running, batch, self.num_batches, self.momentum)
        return scaled if h.dim() == 2 else scaled.view(h.shape)

    def spans_processes(self) -> bool:
        """Whether the statistics of a batch are taken over all processes."""
        if self.is_synchronized is not None:
            return self.is_synchronized
        return self.training and num_processes() > 1

    def map_batch(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A batch `(N, P)` mapped by its own statistics, and these."""
        first, second = self.batch_statistics(rows)
        return self.apply_map(rows, first, second), first, second

    @torch.no_grad()
    def take_statistics(self, parts: Sequence[PartStatistics]) -> None:
        """Let the running statistics be those of all rows, over all processes if they share them.

        The rows come in parts, and of each its `part_statistics`.
        """
        counts, firsts, seconds = zip(*parts, strict=True)
        count = torch.tensor(counts, dtype=torch.float64, device=self.first.device).unsqueeze(-1)
        first, second = self.pooled(count, *(torch.stack(p).double() for p in (firsts, seconds)))
        self.first.copy_(first)
        self.second.copy_(second)
        self.num_batches.clamp_(min=1)

    def batch_statistics(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The two statistics of a batch `(N, P)`, each `(P,)`."""
        raise NotImplementedError

    @torch.no_grad()
    def part_statistics(self, rows: Tensor) -> PartStatistics:
        """How many rows `(N, P)` these are, and their statistics, in this process alone."""
        rows = rows.to(self.first.dtype)
        return (len(rows), *self.own_statistics(rows))

    def own_statistics(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The two statistics of rows `(N, P)` of this process, `(P,)` each."""
        raise NotImplementedError

    def pooled(self, count: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """The statistics of all rows from those of K parts, `(K, 1)` and `(K, P)`."""
        raise NotImplementedError

    @property
    def options(self) -> tuple[float, ...]:
        """The numbers that `affine` depends on beside the statistics."""
        return (*self.bounds,)

    def affine(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Gain and shift, `(P,)` each, of the map that these statistics define."""
        return torch.ones_like(first), torch.zeros_like(first)

    def apply_map(self, h: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """The map that these statistics define, applied to h."""
        gain, shift = self.affine(first, second)
        return torch.addcmul(shift, h, gain)

    def spread(self) -> Tensor:
        """Width of each unit's inputs as seen in training, `(P,)`."""
        return torch.ones_like(self.first)

    def warn_if_dead(self, num_input_units: int = 0) -> None:
        """Warn about units whose inputs did not vary in training: their function is a constant.

        Units are compared with the widest one. The last `num_input_units`, which are columns of a
        table, each in units of measurement of its own, are compared with their own size instead.
        """
        P = self.num_units - num_input_units
        spread, size = self.spread(), 0.1 * self.first.abs()
        size[:P] = spread[:P].max()
        is_dead = spread <= 1e-6 * size.clamp(min=1e-6)
        dead = [] if spread.is_meta else is_dead.nonzero().flatten().tolist()
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
    """The mean goes to the middle of the bounds, `num_std` standard deviations to either bound.

    `eps` is added to the variance, so that a constant unit maps to the middle.
    """

    def __init__(
        self,
        num_units: int,
        bounds: tuple[float, float],
        momentum: float = 0.1,
        num_std: float = 3.0,
        eps: float = 1e-10,
    ):
        super().__init__(num_units, bounds, momentum)
        check_positive("num_std", num_std)
        self.num_std, self.eps = num_std, eps

    def map_batch(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A batch mapped by its own statistics; in one process by torch's batch normalisation."""
        return super().map_batch(rows) if self.spans_processes() else self._normalized(rows)

    def map_members(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Batches of E members, `(E, P, N)`, mapped by their own statistics, and these, `(E, P)`.

        It is `map_batch` for all members in one operation.
        """
        if self.spans_processes():
            first, second = self.batch_statistics(h.movedim(-1, 0))
            return self.apply_map(h, first.unsqueeze(-1), second.unsqueeze(-1)), first, second
        scaled, mean, var = self._normalized(h.reshape(1, -1, h.shape[-1]))
        return scaled.view(h.shape), mean.view(h.shape[:2]), var.view(h.shape[:2])

    def _normalized(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Units `(N, P)` or `(1, P, N)` mapped by batch normalisation; mean and variance `(P,)`."""
        low, high = self.bounds
        gain = h.new_full((h.shape[1],), (high - low) / (2 * self.num_std))
        middle = h.new_full((h.shape[1],), (low + high) / 2)
        scaled, mean, inverse_std = torch.native_batch_norm(
            h, gain, middle, None, None, True, 0.0, self.eps
        )
        return scaled, mean, inverse_std.detach().pow(-2).sub_(self.eps).clamp_(min=0)

    def batch_statistics(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance, over all processes if there are several."""
        if not self.spans_processes():
            return self.own_statistics(rows)
        count = rows.new_full((1,), len(rows))
        totals = _Sum.apply(torch.cat([rows.sum(0), count]))
        mean = totals[:-1] / totals[-1]
        squares = _Sum.apply((rows - mean).square().sum(0))
        return mean, squares / totals[-1]

    def own_statistics(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        var, mean = torch.var_mean(rows, 0, correction=0)
        return mean, var

    def pooled(self, count: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """The mean m, and the mean of v_k + (m_k - m)^2, from means m_k and variances v_k."""
        sum_fn = _Sum.apply if self.spans_processes() else torch.clone
        total = sum_fn(count.sum(0))
        mean = sum_fn((count * first).sum(0)) / total
        return mean, sum_fn((count * (second + (first - mean).square())).sum(0)) / total

    @property
    def options(self) -> tuple[float, ...]:
        return (*self.bounds, self.num_std, self.eps)

    def affine(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        low, high = self.bounds
        gain = (high - low) / (2 * self.num_std) * (second + self.eps).rsqrt()
        return gain, (low + high) / 2 - first * gain

    def spread(self) -> Tensor:
        return self.second.sqrt()


class MinMax(Scaling):
    """The minimum of each unit goes to the lower bound, its maximum to the upper.

    The paper takes one minimum and maximum of all units, and at test time those of the last batch;
    here each unit has its own, and running ones serve in eval mode. `eps` is the least width
    between minimum and maximum.
    """

    def __init__(
        self, num_units: int, bounds: tuple[float, float], momentum: float = 0.1, eps: float = 1e-6
    ):
        super().__init__(num_units, bounds, momentum)
        self.eps = eps

    def batch_statistics(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Minimum and maximum; over all processes, and without gradient, if there are several."""
        low, high = self.own_statistics(rows)
        return self._over_processes(low, high) if self.spans_processes() else (low, high)

    def own_statistics(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows.amin(0), rows.amax(0)  # `aminmax` has no gradient in torch 2.6

    def pooled(self, count: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        low, high = first.amin(0), second.amax(0)
        return self._over_processes(low, high) if self.spans_processes() else (low, high)

    def _over_processes(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        extremes = torch.cat([-low, high]).detach()
        torch.distributed.all_reduce(extremes, torch.distributed.ReduceOp.MAX)
        return -extremes[: self.num_units], extremes[self.num_units :]

    @property
    def options(self) -> tuple[float, ...]:
        return (*self.bounds, self.eps)

    def affine(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        gain = (self.bounds[1] - self.bounds[0]) / (second - first).clamp(min=self.eps)
        return gain, self.bounds[0] - first * gain

    def spread(self) -> Tensor:
        return self.second - self.first


class NoScaling(Scaling):
    """The identity: the inputs are already in the coordinates of the grid."""

    def forward(self, h: Tensor) -> Tensor:
        return h


SCALINGS: dict[str, type[Scaling]] = {
    "minmax": MinMax,
    "none": NoScaling,
    "standardize": Standardize,
}


def build_scaling(name: str, num_units: int, bounds: tuple[float, float]) -> Scaling:
    """The scaling called `name`: "standardize", "minmax" or "none"."""
    check_choice("scaling", name, SCALINGS)
    return SCALINGS[name](num_units, bounds)


def num_processes() -> int:
    """The number of processes of `torch.distributed`, 1 unless it was initialised."""
    is_there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_there else 1


@torch.no_grad()
def update_running(
    running: Sequence[Tensor], batch: Sequence[Tensor], num_batches: Tensor, momentum: float
) -> None:
    """Move running statistics `(..., P)` towards those of a batch, and count the batch, in place.

    Batch t, after the `num_batches`, `(...,)`, before it, has weight 1/t, or `momentum` if that is
    more.
    """
    num_batches.add_(1)
    if num_batches.is_cpu and num_batches.dim() == 0 and not needs_plain_operations():
        number = max(1 / float(num_batches), momentum)
        for average, value in zip(running, batch, strict=True):
            average.lerp_(value, number)
        return
    weight = num_batches.reciprocal().clamp_(min=momentum).unsqueeze(-1)
    for average, value in zip(running, batch, strict=True):
        average.lerp_(value, weight.to(value.dtype))


class _Sum(torch.autograd.Function):
    """The sum over the processes, which all get, so that its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.clone()
        torch.distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _Sum.apply(grad)
