"""Prediction of mean and variance, side by side: many rows at once, and a single row.

Case c: all regression models in the kin40k setting, untrained, against the forward pass of the
plain network.
"""

from functools import partial
from typing import Any

import torch

import models
from benchmarks.steps import Row, rows
from benchmarks.timing import time_side_by_side
from models._recipe import Recipe
from pyro_dak.prediction import Prediction


def _moments(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    prediction: Prediction = model.predict(x)
    return prediction.mean, prediction.variance


def _fitted(name: str, level: int) -> Any:
    """A model that has seen one batch, so that all that prediction needs is there."""
    torch.manual_seed(0)
    x, y = torch.randn(256, 8), torch.randn(256, 1)
    options = {"level": level} if name.startswith("dak") else {}
    recipe = Recipe(epochs=1, batch_size=256)
    model = models.build(name, 8, feature_dim=64, recipe=recipe, **options)
    model.fit(x, y)
    return model


def case_c(repetitions: int, quick: bool) -> list[Row]:
    """Rows per second of `predict`, and ratios to the network's forward pass and `predict`."""
    candidates = {f"dak_cf M={2**level - 1}": _fitted("dak_cf", level) for level in (3, 6, 10)}
    names = ["nn"] if quick else ["nn", "dak_mc", "nn_svgp", "svdkl", "avdkl"]
    candidates = {name: _fitted(name, 3) for name in names} | candidates
    table = []
    for num_rows in (64, 1) if quick else (16_384, 1):
        x = torch.randn(num_rows, 8)
        calls: dict[str, Any] = {name: partial(_moments, m, x) for name, m in candidates.items()}
        network = candidates["nn"].network
        calls["network forward"] = torch.no_grad()(partial(network, x))
        timings = time_side_by_side(calls, repetitions)
        part = rows("c", f"{num_rows} rows", timings, "network forward")
        table += [row | {"rows_per_second": 1e3 * num_rows / row["milliseconds"]} for row in part]
        predicting = {k: v for k, v in timings.items() if k != "network forward"}
        table += rows("c", f"{num_rows} rows, of `predict` of the network", predicting, "nn")
        growth = {k: v for k, v in timings.items() if k.startswith("dak_cf")}
        table += rows("c", f"{num_rows} rows, growth with M", growth, "dak_cf M=7")
    return table
