"""Prediction of mean and variance, side by side: many rows at once, and a single row.

All regression models in the kin40k setting, after one step, are compared with the forward pass of
the plain network, and a compiled DAK with the compiled forward pass. Then come NN and
DAK-CF on features with a ReLU, where the network ends in no linear layer that could be folded into
the embedding.
"""

from functools import partial
from typing import Any

import torch

import models
import pyro_dak
from benchmarks.steps import Row, ratio_rows
from benchmarks.timing import time_side_by_side
from models.shared.recipe import Recipe
from pyro_dak.prediction import Prediction

__all__ = ["run"]


def _moments(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    prediction: Prediction = model.predict(x)
    return prediction.mean, prediction.variance


def _compiled_moments(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    prediction = pyro_dak.predict(
        model.model, model.guide, x, compile=True, novelty=False, progress=False
    )
    assert isinstance(prediction, Prediction)
    return prediction.mean, prediction.variance


def _fitted(name: str, level: int, relu_output: bool = False) -> Any:
    """A model that has seen one batch, so that all that prediction needs is there."""
    torch.manual_seed(0)
    x, y = torch.randn(256, 8), torch.randn(256, 1)
    options: dict[str, Any] = {"level": level} if name.startswith("dak") else {}
    options |= {"relu_output": True} if relu_output else {}
    recipe = Recipe(epochs=1, batch_size=256)
    model = models.build(name, 8, feature_dim=64, recipe=recipe, **options)
    model.fit(x, y)
    return model


def run(repetitions: int, quick: bool) -> list[Row]:
    """Rows per second of `predict`, and ratios to the forward pass and `predict` of the network."""
    names = ["nn"] if quick else ["nn", "dak_mc", "nn_svgp", "svdkl", "avdkl"]
    table = _compare(names, repetitions, quick, relu_output=False)
    return table + ([] if quick else _compare(["nn"], repetitions, quick, relu_output=True))


def _compare(names: list[str], repetitions: int, quick: bool, relu_output: bool) -> list[Row]:
    candidates = {name: _fitted(name, 3, relu_output) for name in names}
    dak = {
        f"dak_cf M={2**level - 1}": _fitted("dak_cf", level, relu_output) for level in (3, 6, 10)
    }
    candidates |= dak
    forward = torch.no_grad()(candidates["nn"].network.forward)
    compiled_forward = torch.no_grad()(torch.compile(candidates["nn"].network, dynamic=True))
    table = []
    for num_rows in (64, 1) if quick else (16_384, 1):
        setting = f"{num_rows} rows{', ReLU on the features' if relu_output else ''}"
        x = torch.randn(num_rows, 8)
        calls: dict[str, Any] = {name: partial(_moments, m, x) for name, m in candidates.items()}
        calls["network forward"] = partial(forward, x)
        compiled = {}
        if not quick:
            compiled = {f"{k} compiled": partial(_compiled_moments, v, x) for k, v in dak.items()}
            compiled["network forward compiled"] = partial(compiled_forward, x)
        timings = time_side_by_side(calls | compiled, repetitions)
        part = ratio_rows(setting, timings, "network forward")
        table += [row | {"rows_per_second": 1e3 * num_rows / row["milliseconds"]} for row in part]
        if compiled:
            own = {name: timings[name] for name in compiled}
            table += ratio_rows(f"{setting}, compiled", own, "network forward compiled")
        predicting = {k: v for k, v in timings.items() if not k.startswith("network forward")}
        table += ratio_rows(f"{setting}, of `predict` of the network", predicting, "nn")
        for ending in ("", " compiled") if compiled else ("",):
            growth = {
                f"dak_cf M={M}{ending}": timings[f"dak_cf M={M}{ending}"] for M in (7, 63, 1023)
            }
            table += ratio_rows(f"{setting}, growth with M", growth, f"dak_cf M=7{ending}")
    return table
