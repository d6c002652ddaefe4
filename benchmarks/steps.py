"""Training steps of the models of the boards: forward, backward, optimiser, data in memory."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from benchmarks.timing import Timing
from models.shared.baseline import Baseline
from models.shared.dak import DAKBaseline
from pyro_dak.fast.compiling import Compiled
from pyro_dak.fast.optimizer import few_calls_class
from pyro_dak.training.optimizers import build_optimizers
from pyro_dak.training.plan import Plan

__all__ = ["NUM_DATA", "BatchStep", "Row", "Step", "loss_fn", "ratio_rows", "training_step"]

Step = Callable[[], object]
BatchStep = Callable[[Tensor, Tensor], None]
Row = dict[str, Any]

NUM_DATA = 40_000
CLIP_NORM = 10.0


def ratio_rows(setting: str, timings: dict[str, Timing], base: str) -> list[Row]:
    """A row for each candidate: milliseconds, and the ratio to the candidate called `base`."""
    table = []
    for name, timing in timings.items():
        ratio, spread = timing.ratio_to(timings[base])
        table.append(
            {
                "setting": setting,
                "name": name,
                "milliseconds": timing.milliseconds,
                "spread": timing.spread,
                "base": base,
                "ratio": ratio,
                "ratio_spread": spread,
            }
        )
    return table


def training_step(
    model: Baseline, num_data: int, learning_rate: float = 1e-3, is_compiled: bool = False
) -> BatchStep:
    """One step of Adam on a batch, with clipping as in training; `prepare` has been called."""
    loss: Any = model.training_loss()
    if is_compiled and isinstance(model, DAKBaseline):
        loss = model.training_loss(compile=True)
    elif is_compiled:
        loss.forward = Compiled(loss.forward)  # as `fit(compile=True)` does for DAK
    loss.train()
    groups = Plan(learning_rate=learning_rate).groups(*loss.parameter_groups())
    (optimizer,) = build_optimizers(groups, fused=True, class_fn=few_calls_class)
    parameters = [p for group in groups for p in group["params"]]

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss(x, y, num_data / len(x), num_data)[0].backward()
        nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()

    return step


def loss_fn(model: Baseline, x: Tensor, y: Tensor) -> Step:
    """The forward pass of a model's loss on one batch."""
    model.prepare(x, y)
    loss = model.training_loss().train()
    return partial(loss, x, y, NUM_DATA / len(x), NUM_DATA)
