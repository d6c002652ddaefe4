"""The paper's complexity table, measured: how steps and predictions of each model grow.

A training step grows with the batch B, the inducing points M, the units P (for models without
units: the features D_w), the draws S and the classes C; a prediction with the rows N, with M and,
if it draws, with S. Growth is the slope of a straight line through the logarithms of the processor
times of one thread, which neighbours on the machine disturb little. Classes are measured on given
features, so that only the last layer counts; an epoch is N / B steps for every model.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import models
import models.images
from benchmarks.growth import slope
from benchmarks.steps import NUM_DATA, Row, Step, training_step
from benchmarks.timing import time_side_by_side
from models.shared.baseline import Baseline
from models.shared.recipe import DEFAULT_RECIPE, IMAGE_RECIPE

__all__ = ["CASES", "Case", "run"]

INPUT_DIM, FEATURE_DIM = 8, 64
_LEVELS = (3, 4, 6, 8, 10)


@dataclass(frozen=True)
class Case:
    """How the cost of a model grows with one size.

    Args:
        axis: the letter of the paper.
        name: the model of the board.
        option: what the size is called: an option of the model, "rows", "classes" or a setting of
            the recipe.
        values: of the option.
        is_prediction: whether a prediction is measured instead of a training step.
        is_classifier: whether it is a classifier on given features.
        options: other options of the model.
    """

    axis: str
    name: str
    option: str
    values: tuple[int, ...]
    is_prediction: bool = False
    is_classifier: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes themselves: a grid of level L has 2^L - 1 points."""
        return tuple(2**v - 1 for v in self.values) if self.option == "level" else self.values


_DENSE = (("is_dense", True),)
_CLASSES = (10, 20, 40, 80)
CASES = (
    *(Case("B", name, "rows", (256, 512, 1024, 2048)) for name in ("nn", "dak_cf", "dak_mc")),
    Case("B", "nn_svgp", "rows", (256, 512, 1024, 2048)),
    Case("B", "svdkl", "rows", (256, 512, 1024, 2048), options=_DENSE),
    Case("B", "avdkl", "rows", (64, 128, 256)),
    *(Case("M", name, "level", _LEVELS) for name in ("dak_cf", "dak_mc")),
    Case("M", "nn_svgp", "num_inducing", (64, 128, 256, 512, 1024)),
    Case("M", "svdkl", "grid_size", (64, 128, 256, 512), options=_DENSE),
    Case("M", "avdkl", "num_inducing", (16, 32, 64, 128)),
    *(Case("P", name, "num_units", (16, 32, 64, 128)) for name in ("dak_cf", "dak_mc")),
    Case("P", "svdkl", "num_units", (16, 32, 64, 128), options=_DENSE),
    *(Case("D_w", name, "feature_dim", (16, 64, 256)) for name in ("nn", "nn_svgp", "dak_cf")),
    Case("D_w", "avdkl", "feature_dim", (16, 64)),
    Case("S", "dak_mc", "num_samples_train", (8, 32, 128, 512)),
    *(
        Case("C", name, "classes", _CLASSES, is_classifier=True)
        for name in ("nn", "svdkl", "dak_mc")
    ),
    Case("C", "nn_svgp", "classes", (10, 20, 40), False, True, (("num_inducing", 128),)),
    *(
        Case("N", name, "rows", (1024, 4096, 16384), is_prediction=True)
        for name in ("nn", "dak_cf", "dak_mc", "nn_svgp")
    ),
    *(Case("M", name, "level", _LEVELS, is_prediction=True) for name in ("dak_cf", "dak_mc")),
    Case("M", "nn_svgp", "num_inducing", (64, 128, 256, 512), is_prediction=True),
    Case("S", "dak_mc", "num_samples_test", (20, 80, 320), is_prediction=True),
)
# Rows of a batch where the axis is another one.
_NUM_ROWS = {"avdkl": 64}
_USUAL_ROWS = 256


def _build(case: Case, value: int) -> Baseline:
    """The model of one size."""
    options: dict[str, Any] = dict(case.options)
    recipe = IMAGE_RECIPE if case.is_classifier else DEFAULT_RECIPE
    if case.option.startswith("num_samples"):
        recipe = replace(recipe, **{case.option: value})
    elif case.option not in ("rows", "classes"):
        options[case.option] = value
    if case.is_classifier:
        features = (nn.Identity(), FEATURE_DIM, value)
        return models.images.build(case.name, *features, recipe=recipe, **options)
    options = {"feature_dim": FEATURE_DIM} | options
    return models.build(case.name, INPUT_DIM, recipe=recipe, **options)


def _batch(case: Case, value: int) -> tuple[Tensor, Tensor]:
    num_rows = value if case.option == "rows" else _NUM_ROWS.get(case.name, _USUAL_ROWS)
    torch.manual_seed(0)
    if case.is_classifier:
        return torch.randn(num_rows, FEATURE_DIM), torch.randint(value, (num_rows,))
    return torch.randn(num_rows, INPUT_DIM), torch.randn(num_rows, 1)


def _call(case: Case, value: int) -> Step:
    """One training step, or one prediction after a step."""
    model, (x, y) = _build(case, value), _batch(case, value)
    model.prepare(x, y)
    step: Callable[[Tensor, Tensor], None] = training_step(model, NUM_DATA)
    if not case.is_prediction:
        return partial(step, x, y)
    step(x[:_USUAL_ROWS], y[:_USUAL_ROWS])
    return partial(model.predict, x)


def measure(case: Case, repetitions: int) -> Row:
    """Processor times by size, their slope, and that between the last two sizes."""
    places = (case.sizes, case.values)
    steps = {str(size): _call(case, value) for size, value in zip(*places, strict=True)}
    timings = time_side_by_side(steps, repetitions, clock=time.process_time)
    times = [timing.milliseconds for timing in timings.values()]
    kind = "prediction" if case.is_prediction else "training step"
    return {
        "setting": f"growth with {case.axis}, {kind}{' for classes' * case.is_classifier}",
        "name": case.name,
        "sizes": list(case.sizes),
        "milliseconds_by_size": times,
        "slope_of_time": slope(case.sizes, times),
        "slope_at_the_end": slope(case.sizes[-2:], times[-2:]),
    }


def run(repetitions: int, quick: bool) -> list[Row]:
    """A row for each model and size."""
    cases = (replace(c, values=_few(c)) for c in CASES) if quick else CASES
    return [measure(case, repetitions) for case in cases]


def _few(case: Case) -> tuple[int, ...]:
    """Two small sizes: does it run?"""
    return (2, 3) if case.option in ("level", "num_samples_train") else (8, 16)
