"""Optimisers by name, their state as plain data, and schedules of the learning rate."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "Group",
    "Schedule",
    "build_optimizers",
    "load_optimizers",
    "optimizer_state",
]

# The factor of the learning rate at a step, from (step, total_steps, steps_per_epoch).
Schedule = Callable[[int, int, int], float]

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


class Group(NamedTuple):
    """Parameters that share an optimiser, a learning rate and a weight decay."""

    parameters: list[Tensor]
    optimizer: str
    learning_rate: float
    weight_decay: float


def build_optimizers(groups: Sequence[Group], fused: bool) -> list[Optimizer]:
    """The optimisers of the groups, in their order; neighbours of the same kind share one.

    SGD has momentum 0.9. Groups without parameters are left out.
    """
    filled = [group for group in groups if group.parameters]
    if not filled:
        raise ValueError("There is nothing to train: the optimizer got an empty parameter list.")
    return [_build(name, [*same], fused) for name, same in groupby(filled, lambda g: g.optimizer)]


def _build(name: str, groups: Sequence[Group], fused: bool) -> Optimizer:
    options: dict[str, Any] = {"momentum": 0.9} if name == "sgd" else {}
    if fused and name in ("adam", "adamw", "sgd"):
        options["fused"] = True
    parts = [
        {"params": g.parameters, "lr": g.learning_rate, "weight_decay": g.weight_decay}
        for g in groups
    ]
    return OPTIMIZERS[name](parts, **options)


def optimizer_state(optimizers: Sequence[Optimizer]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of the optimisers as named tensors and as plain numbers.

    A name is "index.key", where the index counts the parameters of all optimisers.
    """
    groups = [(o, group) for o in optimizers for group in o.param_groups]
    states = [o.state.get(p, {}) for o, group in groups for p in group["params"]]
    entries = {f"{i}.{key}": v for i, state in enumerate(states) for key, v in state.items()}
    tensors = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in entries.items() if name not in tensors}


def load_optimizers(
    optimizers: Sequence[Optimizer], tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]
) -> None:
    """Give the optimisers a state that `optimizer_state` returned."""
    states: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **numbers}.items():
        index, key = name.split(".", 1)
        states.setdefault(int(index), {})[key] = value
    offset = 0
    for optimizer in optimizers:
        content = optimizer.state_dict()
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        content["state"] = {i: states[i + offset] for i in range(count) if i + offset in states}
        optimizer.load_state_dict(content)
        _match_layout(optimizer)
        offset += count


def _match_layout(optimizer: Optimizer) -> None:
    """Lay out the state of each parameter in memory as the parameter is.

    A fused optimiser walks through memory: if a parameter has its channels last and its state does
    not, it would pair the wrong entries.
    """
    for parameter, entry in optimizer.state.items():
        for name, value in entry.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                entry[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _one_cycle(step: int, total_steps: int, steps_per_epoch: int) -> float:
    """Cosine from 1/25 up to 1 over the first 30 % of the steps, then down to 1e-4 / 25."""
    position = step / max(total_steps - 1, 1)
    if position < 0.3:
        return _cosine_between(1 / 25, 1.0, position / 0.3)
    return _cosine_between(1.0, 4e-6, (position - 0.3) / 0.7)


def _cosine(step: int, total_steps: int, steps_per_epoch: int) -> float:
    """Half a cosine from 1 to 0 over all steps."""
    return _cosine_between(1.0, 0.0, step / total_steps)


def _constant(step: int, total_steps: int, steps_per_epoch: int) -> float:
    return 1.0


def _step_decay(step: int, total_steps: int, steps_per_epoch: int) -> float:
    """0.7 to the power of the epoch."""
    return 0.7 ** (step // steps_per_epoch)


def _cosine_between(start: float, end: float, position: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * position)) / 2


SCHEDULES: dict[str, Schedule] = {
    "constant": _constant,
    "cosine": _cosine,
    "one_cycle": _one_cycle,
    "step": _step_decay,
}
