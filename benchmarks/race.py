"""Seconds of training to a given test RMSE on kin40k and protein, side by side.

Models take turns, epoch by epoch, on the same batches, with Adam at a constant rate. The time of a
model is that of its epochs until the standardised test RMSE is at the target for the first time.
The race needs `uci/kin40k.csv.gz` and `uci/protein.csv.gz` under $PYRO_DAK_DATA.
"""

import gzip
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

import models
from benchmarks.steps import Row, training_step
from models.shared.recipe import Recipe
from pyro_dak.diagnostics.scores import rmse
from pyro_dak.training.data import ResidentData

# The test RMSE as a share of the standard deviation of y. The plain network gets there too.
TARGETS = {"kin40k": 0.25, "protein": 0.65}
NAMES = ("nn", "dak_cf", "dak_mc", "nn_svgp")
LEARNING_RATE = 5e-3


def load(name: str, max_rows: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """x and y of training and test rows, four to one, standardised; None without the file."""
    path = Path(os.environ.get("PYRO_DAK_DATA", ".")) / "uci" / f"{name}.csv.gz"
    if not path.is_file():
        return None
    with gzip.open(path, "rt") as text:
        table = torch.as_tensor(numpy.loadtxt(text, delimiter=",", max_rows=max_rows))
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    test, train = table.split([len(table) // 5, len(table) - len(table) // 5])
    mean, std = train.mean(0), train.std(0)
    test, train = ((part - mean).div(std).to(torch.get_default_dtype()) for part in (test, train))
    return train[:, :-1], train[:, -1:], test[:, :-1], test[:, -1:]


class _Runner:
    """A model in training, with the seconds it has had."""

    def __init__(self, name: str, seed: int, x: Tensor, y: Tensor):
        recipe = Recipe(seed=seed)
        self.model: Any = models.build(name, x.shape[1], recipe=recipe, relu_output=True)
        self.seconds, self.is_there = 0.0, False
        self.model.prepare(x, y)
        self.step = training_step(self.model, len(x), LEARNING_RATE)

    def epoch(self, data: ResidentData, seed: int) -> None:
        batches = list(data.epoch(torch.Generator().manual_seed(seed), 0))
        start = time.perf_counter()
        for x, y, _ in batches:
            self.step(x, y)
        self.seconds += time.perf_counter() - start

    def error(self, x: Tensor, y: Tensor) -> float:
        return float(rmse(y, self.model.predict(x).mean))


def _race(
    rows: tuple[Tensor, Tensor, Tensor, Tensor], target: float, seed: int, max_epochs: int
) -> dict[str, float]:
    """Seconds of each model to the target, infinite if it is not reached."""
    x, y, x_test, y_test = rows
    data = ResidentData(x, y, 512)
    runners = {name: _Runner(name, seed, x, y) for name in NAMES}
    for epoch in range(max_epochs):
        for runner in runners.values():
            if not runner.is_there:
                runner.epoch(data, seed + epoch)
                runner.is_there = runner.error(x_test, y_test) <= target
    return {n: r.seconds if r.is_there else math.inf for n, r in runners.items()}


def run(repetitions: int, quick: bool) -> list[Row]:
    """Seconds to the target: ratios to the plain network."""
    table: list[Row] = []
    for name, target in TARGETS.items():
        rows = load(name, 500 if quick else None)
        if rows is None:
            print(f"race: uci/{name}.csv.gz is not under $PYRO_DAK_DATA, so this set is left out.")
            continue
        races = [
            _race(rows, target, seed, max_epochs=2 if quick else 60)
            for seed in range(1 if quick else repetitions)
        ]
        for model in NAMES:
            seconds = [race[model] for race in races]
            median = statistics.median(seconds)
            both = [race for race in races if math.isfinite(race[model] + race["nn"])]
            ratios = [race[model] / race["nn"] for race in both]
            table.append(
                {
                    "setting": f"{name}, RMSE {target}",
                    "name": model,
                    "milliseconds": 1e3 * median if math.isfinite(median) else None,
                    "reached": sum(math.isfinite(value) for value in seconds),
                    "runs": len(races),
                    "base": "nn",
                    "ratio": statistics.median(ratios) if ratios else None,
                    "ratio_spread": (max(ratios) - min(ratios)) / 2 if ratios else None,
                }
            )
    return table
