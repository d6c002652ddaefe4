"""Prediction by an exported ONNX file in onnxruntime, side by side with `predict`.

The model is that of the kin40k setting: 8 inputs, 64-32-64, 16 units, level 5. Beside it stand an
ensemble of five such networks and an additive model, both as estimators for tables.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.steps import Row, ratio_rows
from benchmarks.timing import time_side_by_side
from pyro_dak import DAK, DAKAdditiveRegressor, DAKRegressor, MeanFieldGuide, export, predict
from pyro_dak.training.exported import read_exported

__all__ = ["run"]

_NUM_INPUTS = 8


def _candidates(folder: Path) -> dict[str, tuple[Path, type, Callable[[Any], Any]]]:
    """An exported file by name, the type of its numbers, and what predicts without it."""
    torch.manual_seed(0)
    widths = (_NUM_INPUTS, 64, 32, 64)
    layers = [part for k in range(3) for part in (nn.Linear(widths[k], widths[k + 1]), nn.ReLU())]
    x = torch.randn(4096, _NUM_INPUTS)
    model = DAK(nn.Sequential(*layers), 64, num_units=16, level=5)
    model.unit_inputs(x)  # takes the statistics of x
    guide = MeanFieldGuide(model.eval())
    export(model, guide, folder / "dak.onnx", x=x)
    table = x[:500].numpy().astype(np.float64)
    y = np.sin(table).sum(1)
    options: dict[str, Any] = {"epochs": 2, "progress": False, "random_state": 0}
    ensemble, additive = DAKRegressor(**options).fit(table, y), DAKAdditiveRegressor().fit(table, y)
    for name, estimator in (("ensemble", ensemble), ("additive", additive)):
        estimator.export(folder / f"{name}.onnx", x=table)

    def by_predict(rows: Any) -> Any:
        return predict(model, guide, torch.from_numpy(rows), progress=False)

    return {
        "DAK": (folder / "dak.onnx", np.float32, by_predict),
        "ensemble of 5": (folder / "ensemble.onnx", np.float64, ensemble.predict_dist),
        "additive": (folder / "additive.onnx", np.float64, additive.predict_dist),
    }


def run(repetitions: int, quick: bool) -> list[Row]:
    """Times of `predict` and of onnxruntime for many rows and for one; `predict` is the base."""
    table: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (path, kind, predict_fn) in _candidates(Path(folder)).items():
            function = read_exported(path, num_threads=torch.get_num_threads())
            for num_rows in (64, 1) if quick else (16_384, 1):
                rows = np.random.default_rng(0).normal(size=(num_rows, _NUM_INPUTS)).astype(kind)
                calls: dict[str, Callable[[], Any]] = {
                    "predict": partial(predict_fn, rows),
                    "onnxruntime": partial(function, {"x": rows}),
                }
                part = ratio_rows(
                    f"{name}, {num_rows} rows", time_side_by_side(calls, repetitions), "predict"
                )
                table += [
                    row | {"rows_per_second": 1e3 * num_rows / row["milliseconds"]} for row in part
                ]
    return table
