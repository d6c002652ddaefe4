"""Training steps of natural guides, side by side with the plain network as a user writes it.

The base is a network with a linear output, fused Adam and a bare loop without clipping; the others
take the steps of `fit`. The settings are that of kin40k (D = 8, D_w = 64, P = 16, M = 7, B = 512),
the CNN for MNIST (B = 128), and 1,000 classes on 512 features (P = 64, M = 7, B = 128) against a
linear layer alone. A step of q comes every eight steps or so, so that a timed call is eight steps.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.steps import Row, Step, ratio_rows
from benchmarks.timing import time_side_by_side
from models.shared.backbones import backbone
from models.shared.image_backbones import build_backbone
from pyro_dak import (
    DAK,
    CategoricalLikelihood,
    JensenELBO,
    LocalReparamELBO,
    MeanFieldGuide,
    NaturalGuide,
)
from pyro_dak.fast.compiling import Compiled
from pyro_dak.training.data import ResidentData
from pyro_dak.training.fit import build_objective
from pyro_dak.training.loop import Run
from pyro_dak.training.natural import build_learner
from pyro_dak.training.plan import Plan

__all__ = ["run"]

NUM_STEPS = 8
NUM_WARM_UP = 30 * NUM_STEPS  # in its first steps q learns from each batch at once


def network_step(
    network: nn.Module,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    compile: bool = False,
) -> Step:
    """Eight steps of a bare loop."""
    optimizer = torch.optim.Adam(network.parameters(), fused=True)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return loss_fn(network.train()(x), y)

    compute_loss = Compiled(loss) if compile else loss

    def step() -> None:
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            compute_loss(x, y).backward()
            optimizer.step()

    return step


def fit_step(
    model: DAK,
    guide: Any,
    x: Tensor,
    y: Tensor,
    objective: Any = "auto",
    compile: bool = False,
    num_warm_up: int = NUM_WARM_UP,
) -> Step:
    """Eight steps of the loop of `fit`, on a batch of a data set of 80 such batches."""
    learner = build_learner(model, guide, build_objective(objective, model, guide), compile=compile)
    data = ResidentData(
        x.repeat(80, *[1] * (x.dim() - 1)), y.repeat(80, *[1] * (y.dim() - 1)), len(x)
    )
    loop = Run(learner, data, Plan())
    learner.train()

    def step(num_steps: int = NUM_STEPS) -> None:
        for _ in range(num_steps):
            loop.train_step((x, y, 80.0), 1e-6)

    step(num_warm_up)
    return step


def _regression(batch_size: int, compile: bool, num_warm_up: int) -> dict[str, Step]:
    torch.manual_seed(0)
    x, y = torch.randn(batch_size, 8), torch.randn(batch_size, 1)
    network = nn.Sequential(backbone(8, 64), nn.Linear(64, 1))
    steps = {"nn": network_step(network, nn.functional.mse_loss, x, y, compile)}
    for name in ("joint",) if compile else ("mean field", "joint", "shared", "diagonal"):
        model = DAK(backbone(8, 64), 64)
        guide = MeanFieldGuide(model) if name == "mean field" else NaturalGuide(model, name)
        steps[name] = fit_step(model, guide, x, y, compile=compile, num_warm_up=num_warm_up)
    return steps


def _images(batch_size: int, num_warm_up: int) -> dict[str, Step]:
    torch.manual_seed(0)
    x, y = torch.rand(batch_size, 1, 28, 28), torch.randint(10, (batch_size,))
    mnist = ("cnn", (0.1307,), (0.3081,))
    features, feature_dim = build_backbone(*mnist)
    network = nn.Sequential(features, nn.Linear(feature_dim, 10))
    steps = {"nn": network_step(network, nn.functional.cross_entropy, x, y)}
    for name, num_units in (("joint", 16), ("shared", feature_dim)):
        options = {"likelihood": CategoricalLikelihood(), "embedding": num_units < feature_dim}
        model = DAK(build_backbone(*mnist)[0], feature_dim, num_units, 10, level=2, **options)
        guide = NaturalGuide(model, name)
        steps[f"{name}, P={num_units}"] = fit_step(model, guide, x, y, num_warm_up=num_warm_up)
    return steps


def _many_classes(num_classes: int, batch_size: int, num_warm_up: int) -> dict[str, Step]:
    torch.manual_seed(0)
    x, y = torch.randn(batch_size, 512), torch.randint(num_classes, (batch_size,))
    linear = nn.Linear(512, num_classes)
    steps = {"linear": network_step(linear, nn.functional.cross_entropy, x, y)}
    for name, objective in (("jensen", JensenELBO()), ("eight draws", LocalReparamELBO(8))):
        likelihood = CategoricalLikelihood()
        model = DAK(nn.Identity(), 512, 64, num_classes, level=3, likelihood=likelihood)
        guide = NaturalGuide(model, "shared")
        steps[f"shared, {name}"] = fit_step(model, guide, x, y, objective, num_warm_up=num_warm_up)
    return steps


def run(repetitions: int, quick: bool) -> list[Row]:
    """Ratios to the plain network; compiled steps are compared with the compiled network."""
    num_warm_up = 1 if quick else NUM_WARM_UP
    batch_size, num_classes = (16, 10) if quick else (128, 1000)
    classes = _many_classes(num_classes, batch_size, num_warm_up)
    settings = [
        ("kin40k, eight steps", "nn", _regression(4 * batch_size, False, num_warm_up)),
        (f"{num_classes} classes on 512 features, eight steps", "linear", classes),
    ]
    if not quick:
        compiled = _regression(4 * batch_size, True, num_warm_up)
        settings.insert(1, ("kin40k, compiled, eight steps", "nn", compiled))
        settings.append(("MNIST, eight steps", "nn", _images(batch_size, NUM_STEPS)))
    table = []
    for setting, base, steps in settings:
        table += ratio_rows(setting, time_side_by_side(steps, repetitions), base)
    return table
