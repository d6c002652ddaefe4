"""Training steps of classification, side by side.

The CNN for MNIST (P = 16, M = 63, C = 10), and the last layer of CIFAR-100 (P = 128, M = 63,
C = 100) on given features.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

import models.images
from benchmarks.steps import NUM_DATA, Row, Step, ratio_rows, training_step
from benchmarks.timing import time_side_by_side
from models.shared.image_backbones import build_backbone
from models.shared.recipe import IMAGE_RECIPE

__all__ = ["run"]

RECIPE = replace(IMAGE_RECIPE, num_samples_train=8)


def classifier_steps(
    names: Iterable[str],
    features: Callable[[], tuple[nn.Module, int]],
    x: Tensor,
    num_classes: int,
    num_units: int,
) -> dict[str, Step]:
    """Steps by name, each with a feature extractor of its own."""
    y = torch.randint(num_classes, (len(x),))
    steps: dict[str, Step] = {}
    for name in names:
        extractor, feature_dim = features()
        options = {} if name == "nn" else {"num_units": num_units}
        model = models.images.build(
            name, extractor, feature_dim, num_classes, recipe=RECIPE, **options
        )
        model.prepare(x, y)
        steps[name] = partial(training_step(model, NUM_DATA), x, y)
    return steps


def run(repetitions: int, quick: bool) -> list[Row]:
    """Ratios to the plain network."""
    torch.manual_seed(0)
    names = ["nn", "dak_jensen", "dak_mc"]
    table = []
    if not quick:
        steps = classifier_steps(
            [*names, "svdkl", "nn_svgp"],
            lambda: build_backbone("cnn", (0.1307,), (0.3081,)),
            torch.rand(128, 1, 28, 28),
            num_classes=10,
            num_units=16,
        )
        table += ratio_rows("MNIST, B=128", time_side_by_side(steps, repetitions), "nn")
    width, num_units, num_classes = (8, 4, 3) if quick else (128, 128, 100)
    for batch_size in (16,) if quick else (128, 1024):
        steps = classifier_steps(
            names,
            lambda: (nn.Identity(), width),
            torch.randn(batch_size, width),
            num_classes,
            num_units,
        )
        timings = time_side_by_side(steps, repetitions)
        table += ratio_rows(f"last layer of CIFAR-100, B={batch_size}", timings, "nn")
    return table
