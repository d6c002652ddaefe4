"""Optimisers by name, their state as plain data, and schedules of the learning rate."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

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

# A group of parameters in the form of torch, with the name of its "optimizer".
Group = dict[str, Any]
# A class with the steps of an optimiser for these parameters.
ClassFn = Callable[[type[Optimizer], Sequence[Tensor]], type[Optimizer]]
# The factor of the learning rate at a step, from (step, total_steps, steps_per_epoch).
Schedule = Callable[[int, int, int], float]

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}
# The names of the tensors that an optimiser keeps for a parameter.
_STATE_KEYS: dict[type[Optimizer], tuple[str, ...]] = {
    torch.optim.Adadelta: ("step", "square_avg", "acc_delta"),
    torch.optim.Adam: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.SGD: ("momentum_buffer",),
}


def build_optimizers(
    groups: Sequence[Group], fused: bool, class_fn: ClassFn | None = None
) -> list[Optimizer]:
    """The optimisers of the groups, in their order; neighbours of the same kind share one.

    SGD has momentum 0.9. Groups without parameters are left out. Fused ones are of the class that
    `class_fn` finds for their class and parameters; by default it is their own.
    """
    filled = [group for group in groups if group["params"]]
    if not filled:
        raise ValueError("There is nothing to train: the optimizer got an empty parameter list.")
    optimizers = []
    for name, same in groupby(filled, lambda group: group["optimizer"]):
        options: dict[str, Any] = {"momentum": 0.9} if name == "sgd" else {}
        own, kind = [*same], OPTIMIZERS[name]
        if fused and name in ("adam", "adamw", "sgd"):
            options["fused"] = True
            if class_fn is not None:
                kind = class_fn(kind, [p for group in own for p in group["params"]])
        optimizers.append(kind(own, **options))
    return optimizers


def optimizer_state(optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """The state of the optimisers as named tensors.

    A name is "index.key", where the index counts the parameters of all optimisers.
    """
    states = [o.state.get(parameter, {}) for o, parameter in _parameters(optimizers)]
    return {f"{i}.{key}": value for i, state in enumerate(states) for key, value in state.items()}


def load_optimizers(optimizers: Sequence[Optimizer], tensors: Mapping[str, Tensor]) -> None:
    """Give the optimisers a state that `optimizer_state` returned; all of it or nothing.

    The state of a parameter is laid out in memory as the parameter is. A fused optimiser walks
    through memory: if only one of them had its channels last, it would pair the wrong entries, if
    one were shorter, it would walk beyond its end, and it takes the bytes of another dtype for its
    own.

    Raises:
        ValueError: if the state does not fit the parameters, naming the tensor.
    """
    left = dict(tensors)
    states: list[tuple[Optimizer, Tensor, dict[str, Tensor]]] = []
    for index, (optimizer, parameter) in enumerate(_parameters(optimizers)):
        keys, state = _state_keys(optimizer), dict[str, Tensor]()
        if not any(f"{index}.{key}" in left for key in keys):  # it has had no gradient yet
            if tensors and isinstance(optimizer, torch.optim.SGD):  # takes all buffers or none
                states.append(
                    (optimizer, parameter, {"momentum_buffer": torch.zeros_like(parameter)})
                )
            continue
        for key in keys:
            value = left.pop(f"{index}.{key}", None)
            shape = torch.Size() if key == "step" else parameter.shape
            if value is None or value.shape != shape or not value.is_floating_point():
                found = "none" if value is None else f"{tuple(value.shape)} of {value.dtype}"
                raise ValueError(
                    f"`optimizer.{index}.{key}` must have the shape {tuple(shape)} of its "
                    f"parameter, in a floating dtype; got {found}."
                )
            if key != "step" and value.dtype != parameter.dtype:
                raise ValueError(
                    f"`optimizer.{index}.{key}` must have the dtype of its parameter, "
                    f"{parameter.dtype}; got {value.dtype}."
                )
            if bool(value.isnan().any()):
                raise ValueError(f"`optimizer.{index}.{key}` holds NaN.")
            if key != "step":
                value = torch.empty_like(parameter).copy_(value)
            elif optimizer.defaults.get("fused"):
                value = value.to(parameter.device, torch.float32)
            state[key] = value
        states.append((optimizer, parameter, state))
    if left:
        raise ValueError(f"`optimizer.{next(iter(left))}` belongs to no parameter.")
    for optimizer, parameter, state in states:
        optimizer.state[parameter] = state


def _state_keys(optimizer: Optimizer) -> tuple[str, ...]:
    """The names of the tensors that an optimiser keeps for a parameter."""
    return next(keys for kind, keys in _STATE_KEYS.items() if isinstance(optimizer, kind))


def _parameters(optimizers: Sequence[Optimizer]) -> list[tuple[Optimizer, Tensor]]:
    return [(o, p) for o in optimizers for group in o.param_groups for p in group["params"]]


def _one_cycle(step: int, total_steps: int, steps_per_epoch: int) -> float:
    """Cosine from 1/25 up to 1 over the first 30 % of the steps, then down to 1e-4 / 25."""
    position = step / max(total_steps - 1, 1)
    if position < 0.3:
        return _cosine_between(1 / 25, 1.0, position / 0.3)
    return _cosine_between(1.0, 4e-6, (position - 0.3) / 0.7)


def _cosine_between(start: float, end: float, position: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * position)) / 2


SCHEDULES: dict[str, Schedule] = {
    "constant": lambda *_: 1.0,
    "cosine": lambda step, total_steps, _: _cosine_between(1.0, 0.0, step / total_steps),
    "one_cycle": _one_cycle,
    "step": lambda step, _, steps_per_epoch: 0.7 ** (step // steps_per_epoch),
}
