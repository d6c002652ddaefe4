"""Seconds per training epoch of the regression models, side by side on every UCI set.

    python -m experiments.cost --data-root DIR [--rows 4096] [--repetitions 5]

Each model in turn trains one epoch to warm up and one that counts, in the same loop, with one
thread; the medians over the rounds are compared. Long sets are cut to `--rows` rows, because an
epoch is a number of equal steps. SV-DKL is timed as GPyTorch computes it, and through matrices.
"""

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import models
from experiments import screen
from experiments.datasets import load_regression
from experiments.report import announce_report, markdown_table, newest
from experiments.runs import Job, Line, result_directory, run_all, start
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


def run(job: Job, tell: Callable[[str], None], data_root: str | None = None) -> dict[str, Any]:
    """Median seconds of a warm epoch of each candidate."""
    torch.set_num_threads(1)
    preset, rounds = PRESETS["best"], job.settings["repetitions"]
    recipe = replace(preset.recipe, epochs=2)
    x, y = load_regression(job.dataset, data_root)
    x, y = (_standardized(part[: job.settings["rows"]]) for part in (x, y))
    seconds: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    for number in range(rounds):
        for name, (board_name, extra) in CANDIDATES.items():
            tell(f"round {number + 1} of {rounds}, {name}")
            options = preset.options.get(board_name, {}) | extra
            model = models.build(board_name, x.shape[1], feature_dim=64, recipe=recipe, **options)
            model.fit(x, y)
            seconds[name].append(model.epoch_seconds[-1])
    return {"seconds": {name: statistics.median(times) for name, times in seconds.items()}}


def _ratios(runs: list[Line]) -> list[list[str]]:
    """Multiples of DAK-CF's epoch, one row per set."""
    rows = []
    for run in newest(runs, lambda run: run["config"]["dataset"]):
        times = run["seconds"]
        ratios = (f"{times[name] / times['dak_cf']:.2f}" for name in CANDIDATES)
        rows.append([run["config"]["dataset"], *ratios])
    return rows


def table(runs: list[Line]) -> str:
    """The multiples as Markdown."""
    rounds = max(run["config"]["repetitions"] for run in runs)
    text = f"Seconds per epoch as multiples of DAK-CF's, median of {rounds} rounds."
    return f"{text}\n\n{markdown_table(['set', *CANDIDATES], _ratios(runs))}\n"


def main(
    dataset: Annotated[list[str] | None, typer.Option(help="Data sets; the paper's six.")] = None,
    rows: Annotated[int, typer.Option(help="At most so many rows of a set.")] = 4096,
    repetitions: Annotated[int, typer.Option(help="Rounds.")] = 5,
    resume: Annotated[bool, typer.Option(help="Keep runs that are recorded.")] = True,
    data_root: Annotated[str | None, typer.Option(help="Else $PYRO_DAK_DATA.")] = None,
    out: Annotated[Path | None, typer.Option(help="Else results/cost.")] = None,
    draft: Annotated[bool, typer.Option("--draft", help="Write to results/draft/cost.")] = False,
) -> None:
    """Time the epochs, print the multiples, and write the table."""
    settings = {"rows": rows, "repetitions": repetitions}
    jobs = [Job("cost", name, "all", 0, settings) for name in dataset or PAPER_SETS]
    directory = result_directory("cost", out, draft)
    lines = run_all(jobs, partial(run, data_root=data_root), directory, {}, resume=resume)
    screen.show_table("Epochs as multiples of DAK-CF's", ["set", *CANDIDATES], _ratios(lines))
    announce_report(directory)


if __name__ == "__main__":
    start(main)
