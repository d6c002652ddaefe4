"""Seconds per training epoch of the regression models, side by side on every UCI set.

    python -m experiments.cost --data-root DIR [--rows 4096] [--repetitions 5]

Each model in turn trains one epoch to warm up and one that counts, in the same loop, one thread;
the medians over the rounds are compared. Long sets are cut to `--rows` rows, because an epoch is
so many equal steps. SV-DKL is timed as GPyTorch computes it and through dense matrices.
"""

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from tqdm.auto import tqdm

import models
from experiments.datasets import load_regression
from experiments.results import git_commit, write_json
from experiments.uci import PAPER_SETS, PRESETS

CANDIDATES: dict[str, tuple[str, dict[str, Any]]] = {
    "nn": ("nn", {}),
    "dak_cf": ("dak_cf", {}),
    "dak_mc": ("dak_mc", {}),
    "nn_svgp": ("nn_svgp", {}),
    "svdkl": ("svdkl", {"is_dense": False}),
    "svdkl, dense": ("svdkl", {"is_dense": True}),
    "avdkl": ("avdkl", {}),
}


def _standardized(values: Tensor) -> Tensor:
    """Zero mean and unit variance; a column that is constant in these rows becomes zero."""
    std = values.std(0)
    scaled = (values - values.mean(0)) / torch.where(std > 0, std, 1)
    return scaled.to(torch.get_default_dtype())


def epoch_seconds(dataset: str, data_root: str | None, rows: int, rounds: int) -> dict[str, float]:
    """Median seconds of a warm epoch of each candidate."""
    preset = PRESETS["best"]
    recipe = replace(preset.recipe, epochs=2)
    x, y = (part[:rows] for part in load_regression(dataset, data_root))
    x, y = (_standardized(part) for part in (x, y))
    seconds: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    for _ in tqdm(range(rounds), desc=dataset, unit="round", leave=False):
        for name, (board_name, extra) in CANDIDATES.items():
            options = preset.options.get(board_name, {}) | extra
            model = models.build(board_name, x.shape[1], feature_dim=64, recipe=recipe, **options)
            model.fit(x, y)
            seconds[name].append(model.epoch_seconds[-1])
    return {name: statistics.median(times) for name, times in seconds.items()}


def table(results: dict[str, dict[str, float]]) -> str:
    """Multiples of DAK-CF's epoch, one row per set."""
    lines = ["| set | " + " | ".join(CANDIDATES) + " |", "|---" * (len(CANDIDATES) + 1) + "|"]
    for dataset, times in results.items():
        ratios = (f"{times[name] / times['dak_cf']:.2f}" for name in CANDIDATES)
        lines.append(f"| {dataset} | " + " | ".join(ratios) + " |")
    return "\n".join(lines)


def main(
    dataset: Annotated[list[str] | None, typer.Option(help="Data sets; the paper's six.")] = None,
    rows: Annotated[int, typer.Option(help="At most so many rows of a set.")] = 4096,
    repetitions: Annotated[int, typer.Option(help="Rounds.")] = 5,
    data_root: Annotated[str | None, typer.Option(help="Else $PYRO_DAK_DATA.")] = None,
    out: Annotated[Path, typer.Option(help="Result.")] = Path("results/cost.json"),
) -> None:
    """Time the epochs, print the table, write the seconds."""
    torch.set_num_threads(1)
    results = {}
    for name in dataset or PAPER_SETS:
        results[name] = epoch_seconds(name, data_root, rows, repetitions)
        write_json(out, {"seconds": results, "rows": rows, "commit": git_commit()})
    print(f"Seconds per epoch as multiples of DAK-CF's, median of {repetitions} rounds.\n")
    print(table(results))


if __name__ == "__main__":
    typer.run(main)
