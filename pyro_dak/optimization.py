"""Optimisers by name and learning-rate schedules as functions of the step, without state."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from pyro_dak.validation import check_choice

__all__ = ["OPTIMIZERS", "SCHEDULES", "Schedule", "build_optimizer", "schedule_fn"]

# Factor of the learning rate at a step, from (step, total_steps, steps_per_epoch).
Schedule = Callable[[int, int, int], float]

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


def build_optimizer(
    name: str,
    network: Iterable[Tensor],
    last_layer: Iterable[Tensor],
    learning_rate: float,
    last_layer_learning_rate: float,
    weight_decay: float,
    decay_last_layer: bool,
    fused: bool,
) -> torch.optim.Optimizer:
    """The optimiser called `name`, with a group for the network and one for the last layer.

    Weight decay acts on the network; the last layer has its prior instead, unless
    `decay_last_layer`. SGD has momentum 0.9.
    """
    check_choice("optimizer", name, OPTIMIZERS)
    groups = [
        {"params": list(network), "lr": learning_rate, "weight_decay": weight_decay},
        {
            "params": list(last_layer),
            "lr": last_layer_learning_rate,
            "weight_decay": weight_decay if decay_last_layer else 0.0,
        },
    ]
    options: dict[str, Any] = {"momentum": 0.9} if name == "sgd" else {}
    if fused and name in ("adam", "adamw", "sgd"):
        options["fused"] = True
    return OPTIMIZERS[name]([group for group in groups if group["params"]], **options)


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


def schedule_fn(schedule: str | Schedule) -> Schedule:
    """The schedule called so, or the function itself."""
    if callable(schedule):
        return schedule
    check_choice("schedule", schedule, SCHEDULES)
    return SCHEDULES[schedule]
