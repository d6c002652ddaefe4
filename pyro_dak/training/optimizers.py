"""Optimisers by name and learning-rate schedules as functions of the step, without state."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from pyro_dak.validation import check_choice

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "Schedule",
    "TwoOptimizers",
    "build_optimizer",
    "schedule_fn",
]

# Factor of the learning rate at a step, from (step, total_steps, steps_per_epoch).
Schedule = Callable[[int, int, int], float]

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


class TwoOptimizers(torch.optim.Optimizer):
    """One optimiser for the network and another for the last layer, as one.

    Groups and state are theirs: a change of a rate reaches them, and so does `load_state_dict`.

    Args:
        first: steps first; its groups come first.
        second: steps second.
    """

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer):
        self.parts = (first, second)
        super().__init__([*first.param_groups, *second.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let the parts have the groups and the state of the whole."""
        first, second = self.parts
        count = len(first.param_groups)
        first.param_groups, second.param_groups = (
            self.param_groups[:count],
            self.param_groups[count:],
        )
        first.state = second.state = self.state

    def __getstate__(self) -> dict[str, Any]:
        """For copies: with the parts, which share what the copy has."""
        return {**super().__getstate__(), "parts": self.parts}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """For construction only: a later group would belong to neither part."""
        if hasattr(self, "param_groups") and len(self.param_groups) == sum(
            len(part.param_groups) for part in self.parts
        ):
            raise NotImplementedError(
                "Two optimisers take no further groups; build them with all their parameters."
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As every optimiser's."""
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """A step of each; a closure would be called twice, and is not taken."""
        if closure is not None:
            raise NotImplementedError(
                "Two optimisers cannot share a closure; compute the loss first."
            )
        for part in self.parts:
            part.step()


def build_optimizer(
    name: str,
    network: Iterable[Tensor],
    last_layer: Iterable[Tensor],
    learning_rate: float,
    last_layer_learning_rate: float,
    weight_decay: float,
    decay_last_layer: bool,
    fused: bool,
    last_layer_name: str | None = None,
) -> torch.optim.Optimizer:
    """The optimiser called `name`, with a group for the network and one for the last layer.

    Weight decay acts on the network; the last layer has its prior instead, unless
    `decay_last_layer`. SGD has momentum 0.9. The last layer may have another optimiser, called
    `last_layer_name`.
    """
    last_layer_name = name if last_layer_name is None else last_layer_name
    check_choice("optimizer", name, OPTIMIZERS)
    check_choice("last_layer_optimizer", last_layer_name, OPTIMIZERS)
    of_network = {"params": list(network), "lr": learning_rate, "weight_decay": weight_decay}
    of_last_layer = {
        "params": list(last_layer),
        "lr": last_layer_learning_rate,
        "weight_decay": weight_decay if decay_last_layer else 0.0,
    }
    if of_network["params"] and of_last_layer["params"] and last_layer_name != name:
        first = _build(name, [of_network], fused)
        return TwoOptimizers(first, _build(last_layer_name, [of_last_layer], fused))
    groups = [group for group in (of_network, of_last_layer) if group["params"]]
    return _build(name if of_network["params"] else last_layer_name, groups, fused)


def _build(name: str, groups: list[dict[str, Any]], fused: bool) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"momentum": 0.9} if name == "sgd" else {}
    if fused and name in ("adam", "adamw", "sgd"):
        options["fused"] = True
    return OPTIMIZERS[name](groups, **options)


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
