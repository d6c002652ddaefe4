"""Training steps side by side: forward, backward, optimiser, with the data in memory.

Case a: regression in the kin40k setting (D = 8, D_w = 64, P = 16, B = 512). Case b: classification,
the CNN for MNIST (P = 16, M = 63, C = 10) and the last layer of CIFAR-100 (P = 128, M = 63,
C = 100) on given features.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from pyro.infer import Trace_ELBO
from torch import Tensor, nn

import models
import models.images
from benchmarks.timing import Timing, time_side_by_side
from models.shared.dak import DAKRegressor
from models.shared.image_backbones import build_backbone
from models.shared.image_baseline import BaselineLoss
from models.shared.image_recipe import ImageRecipe
from pyro_dak.training.loss import Loss, use_compiled
from pyro_dak.training.optimizers import build_optimizer

Step = Callable[[], object]
BatchStep = Callable[[Tensor, Tensor], None]
Row = dict[str, Any]

NUM_DATA = 40_000
CLIP_NORM = 10.0


def rows(case: str, setting: str, timings: dict[str, Timing], base: str) -> list[Row]:
    """A row for each candidate: milliseconds, and the ratio to the candidate called `base`."""
    table = []
    for name, timing in timings.items():
        ratio, spread = timing.ratio_to(timings[base])
        table.append(
            {
                "case": case,
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


def step_fn(
    loss_fn: Callable[[Tensor, Tensor], Tensor], optimizer: torch.optim.Optimizer
) -> BatchStep:
    """One step of the optimiser on a batch, with clipping as in training."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss_fn(x, y).backward()
        nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()

    return step


def _adam(learning_rate: float, *modules: nn.Module) -> torch.optim.Optimizer:
    """Adam with a group for the first module and one for what the others have besides."""
    network = {id(p): p for p in modules[0].parameters() if p.requires_grad}
    last_layer = [p for m in modules[1:] for p in m.parameters() if p.requires_grad]
    last_layer = [p for p in last_layer if id(p) not in network]
    rates = (learning_rate, learning_rate)
    return build_optimizer("adam", [*network.values()], last_layer, *rates, 0.0, False, fused=True)


def dak_step(
    model: DAKRegressor, num_data: int, learning_rate: float = 1e-3, compiled: bool = False
) -> BatchStep:
    """A step of a DAK with its objective."""
    loss = Loss(model.model, model.guide, model.objective, from_features=False).train()
    if compiled:
        use_compiled(loss)
    optimizer = _adam(learning_rate, model.model.feature_extractor, loss)
    return step_fn(lambda x, y: loss(x, y, num_data / len(x), num_data)[0], optimizer)


def baseline_step(
    model: Any, num_data: int, learning_rate: float = 1e-3, compiled: bool = False
) -> BatchStep:
    """A step of a baseline of the board; `prepare` has been called."""
    model.network.train()
    model.last_layer.train()
    loss_fn = torch.compile(model.loss) if compiled else model.loss
    optimizer = _adam(learning_rate, model.network, model.last_layer)
    return step_fn(lambda x, y: loss_fn(x, y, num_data), optimizer)


def regression_steps(
    names: Iterable[str], level: int, batch_size: int, compiled: bool
) -> dict[str, Step]:
    """Steps by name; "dak_trace" is DAK-MC through Pyro's `Trace_ELBO` with 8 particles."""
    torch.manual_seed(0)
    x, y = torch.randn(batch_size, 8), torch.randn(batch_size, 1)
    steps: dict[str, Step] = {}
    for name in names:
        board_name = "dak_mc" if name == "dak_trace" else name
        options = {"level": level} if board_name.startswith("dak") else {}
        model = models.build(board_name, 8, feature_dim=64, **options)
        if name == "dak_trace":
            model.objective = Trace_ELBO(
                num_particles=8, vectorize_particles=True, max_plate_nesting=1
            )
        if isinstance(model, DAKRegressor):
            step = dak_step(model, NUM_DATA, compiled=compiled)
        else:
            model.prepare(x, y)
            step = baseline_step(model, NUM_DATA, compiled=compiled)
        steps[f"{name} compiled" if compiled else name] = partial(step, x, y)
    return steps


def case_a(repetitions: int, quick: bool) -> list[Row]:
    """Regression steps: ratios to the plain network, compiled ones to the compiled network."""
    batch_size = 32 if quick else 512
    table = []
    for level in (3,) if quick else (3, 6, 10):
        names = ["nn", "dak_cf", "dak_mc", "dak_trace"]
        if level == 3:
            names += ["nn_svgp"] if quick else ["nn_svgp", "svdkl", "avdkl"]
        setting = f"M={2**level - 1}"
        timings = time_side_by_side(regression_steps(names, level, batch_size, False), repetitions)
        table += rows("a", setting, timings, "nn")
        if not quick:
            steps = regression_steps(["nn", "dak_cf"], level, batch_size, True)
            timings = time_side_by_side(steps, repetitions)
            table += rows("a", f"{setting}, compiled", timings, "nn compiled")
    if not quick:
        growth = {}
        for level in (3, 6, 10):
            for name in ("dak_cf", "dak_mc"):
                steps = regression_steps([name], level, batch_size, False)
                growth[f"{name} M={2**level - 1}"] = steps[name]
        timings = time_side_by_side(growth, repetitions)
        for name in ("dak_cf", "dak_mc"):
            own = {key: value for key, value in timings.items() if key.startswith(name)}
            table += rows("a", "growth with M", own, f"{name} M=7")
    return table


class _GivenFeatures(nn.Module):
    """Features that are there already."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def _classifier_steps(
    names: Iterable[str],
    features: Callable[[], tuple[nn.Module, int]],
    x: Tensor,
    num_classes: int,
    num_units: int,
) -> dict[str, Step]:
    y = torch.randint(num_classes, (len(x),))
    steps: dict[str, Step] = {}
    for name in names:
        extractor, feature_dim = features()
        options = {} if name == "nn" else {"num_units": num_units}
        recipe = ImageRecipe(num_samples_train=8)
        model = models.images.build(
            name, extractor, feature_dim, num_classes, recipe=recipe, **options
        )
        loss: nn.Module
        if hasattr(model, "guide"):
            loss = Loss(model.model, model.guide, model.objective, from_features=False)
        else:
            loss = BaselineLoss(model)
        optimizer = build_optimizer(
            "adam", loss.train().parameters(), [], 1e-3, 1e-3, 0.0, False, fused=True
        )
        scale = NUM_DATA / len(x)
        step = step_fn(
            lambda x, y, loss=loss, scale=scale: loss(x, y, scale, NUM_DATA)[0], optimizer
        )
        steps[name] = partial(step, x, y)
    return steps


def case_b(repetitions: int, quick: bool) -> list[Row]:
    """Classification steps: ratios to the plain network."""
    torch.manual_seed(0)
    names = ["nn", "dak_jensen", "dak_mc"]
    table = []
    if not quick:
        images = torch.rand(128, 1, 28, 28)
        steps = _classifier_steps(
            [*names, "svdkl", "nn_svgp"],
            lambda: build_backbone("cnn", (0.1307,), (0.3081,)),
            images,
            num_classes=10,
            num_units=16,
        )
        table += rows("b", "MNIST, B=128", time_side_by_side(steps, repetitions), "nn")
    width, num_units, num_classes = (8, 4, 3) if quick else (128, 128, 100)
    for batch_size in (16,) if quick else (128, 1024):
        steps = _classifier_steps(
            names,
            lambda: (_GivenFeatures(), width),
            torch.randn(batch_size, width),
            num_classes,
            num_units,
        )
        timings = time_side_by_side(steps, repetitions)
        table += rows("b", f"last layer of CIFAR-100, B={batch_size}", timings, "nn")
    return table
