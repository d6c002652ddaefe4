"""Seconds per training epoch of the models, side by side: on every UCI set, and on images.

    python -m experiments.cost --data-root DIR [--rows 4096] [--repetitions 5]
    python -m experiments.cost --dataset mnist --dataset cifar10 --rows 1024 --repetitions 3

Each model in turn trains one epoch to warm up and one that counts, in the same loop, with one
thread; the medians over the rounds are compared. Long sets are cut to `--rows` rows, because an
epoch is a number of equal steps. Tables: SV-DKL is timed as GPyTorch computes it, and through
matrices. Images: the models of Table 3 with the settings of their experiments, beside the
parameters that each adds to its feature extractor, and the paper's numbers.
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
from experiments import cifar, images, mnist, paper, screen
from experiments.datasets import load_regression
from experiments.image_datasets import IMAGE_SETS, load_images
from experiments.report import announce_report, markdown_table, newest
from experiments.runs import Job, Line, result_directory, run_all, start
from experiments.uci import PAPER_SETS, PRESETS
from pyro_dak.validation import check_choice

CANDIDATES: dict[str, tuple[str, dict[str, Any]]] = {
    "nn": ("nn", {}),
    "dak_cf": ("dak_cf", {}),
    "dak_mc": ("dak_mc", {}),
    "nn_svgp": ("nn_svgp", {}),
    "svdkl": ("svdkl", {"is_dense": False}),
    "svdkl, dense": ("svdkl", {"is_dense": True}),
    "avdkl": ("avdkl", {}),
}

# The models of the paper's Table 3 and of its AV-DKL table, and ours.
CLASSIFIERS = ("nn", "nn_bn", "nn_svgp", "svdkl", "avdkl", "dak_mc", "dak_natural")


def _standardized(values: Tensor) -> Tensor:
    """Zero mean and unit variance; a column that is constant in these rows becomes zero."""
    std = values.std(0)
    scaled = (values - values.mean(0)) / torch.where(std > 0, std, 1)
    return scaled.to(torch.get_default_dtype())


def run(job: Job, tell: Callable[[str], None], data_root: str | None = None) -> dict[str, Any]:
    """Median seconds of a warm epoch of each candidate."""
    torch.set_num_threads(1)
    if job.dataset in IMAGE_SETS:
        return _run_images(job, tell, data_root)
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


def _classifier_job(dataset: str, name: str) -> Job:
    """Two epochs of a classifier with the settings of its experiment."""
    if dataset in cifar.DATASETS:
        recipe = replace(cifar.PRESETS["small"].recipe, epochs=2)
        return cifar.make_job("small", dataset, name, recipe)
    return mnist.make_job(dataset, name, epochs=2)


def _run_images(job: Job, tell: Callable[[str], None], data_root: str | None) -> dict[str, Any]:
    """Median seconds of a warm epoch of each classifier, and the parameters that it adds."""
    rounds, names = job.settings["repetitions"], job.settings["models"]
    data = load_images(job.dataset, data_root)
    x, y = data.x_train[: job.settings["rows"]], data.y_train[: job.settings["rows"]]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    added, total = {}, {}
    for number in range(rounds):
        for name in names:
            tell(f"round {number + 1} of {rounds}, {name}")
            model = images.build(_classifier_job(job.dataset, name), data)
            model.fit(x, y)
            seconds[name].append(model.epoch_seconds[-1])
            added[name], total[name] = model.num_added, model.num_parameters
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {"seconds": medians, "added": added, "parameters": total}


def _image_rows(runs: list[Line]) -> list[list[str]]:
    """A row for each set and classifier: added parameters and the epoch, beside the paper's."""
    rows = []
    for run in newest(runs, lambda run: run["config"]["dataset"]):
        dataset, network = run["config"]["dataset"], run["seconds"].get("nn")
        base = paper.COST.get((dataset, "nn"))
        for name, seconds in run["seconds"].items():
            cost = paper.COST.get((dataset, name))
            cells = [dataset, name, f"{run['parameters'][name] / 1e6:.3f}"]
            cells.append(f"+{run['added'][name] / 1e6:.3f}")
            cells.append("" if cost is None or name == "nn" else f"+{cost['parameters']}")
            cells.append("" if network is None else f"{seconds / network:.2f}")
            if cost is None or base is None:
                cells.append("")
            else:  # the paper prints what a model adds to the network's seconds
                more = 0.0 if name == "nn" else cost["epoch_seconds"] / base["epoch_seconds"]
                cells.append(f"{1 + more:.2f}")
            rows.append(cells)
    return rows


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
    on_images = [run for run in runs if run["config"]["dataset"] in IMAGE_SETS]
    on_tables = [run for run in runs if run not in on_images]
    parts = []
    if on_tables:
        rounds = max(run["config"]["repetitions"] for run in on_tables)
        parts.append(f"Seconds per epoch as multiples of DAK-CF's, median of {rounds} rounds.")
        parts.append(markdown_table(["set", *CANDIDATES], _ratios(on_tables)))
    if on_images:
        parts.append(
            "Images: parameters, those added to the feature extractor, and seconds per epoch as "
            "multiples of NN's. *paper*: its Table 3, for its networks on a GPU; there NN's linear "
            "output counts as network, here as added."
        )
        columns = ["set", "model", "parameters, M", "added, M", "*paper*", "times NN", "*paper*"]
        parts.append(markdown_table(columns, _image_rows(on_images)))
    return "\n\n".join(parts) + "\n"


def main(
    dataset: Annotated[list[str] | None, typer.Option(help="Data sets; the paper's six.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Classifiers, for images; all.")] = None,
    rows: Annotated[int, typer.Option(help="At most so many rows of a set.")] = 4096,
    repetitions: Annotated[int, typer.Option(help="Rounds.")] = 5,
    resume: Annotated[bool, typer.Option(help="Keep runs that are recorded.")] = True,
    data_root: Annotated[str | None, typer.Option(help="Else $PYRO_DAK_DATA.")] = None,
    out: Annotated[Path | None, typer.Option(help="Else results/cost.")] = None,
    draft: Annotated[bool, typer.Option("--draft", help="Write to results/draft/cost.")] = False,
) -> None:
    """Time the epochs, print the multiples, and write the table."""
    for name in model or ():
        check_choice("model", name, CLASSIFIERS)
    settings: dict[str, Any] = {"rows": rows, "repetitions": repetitions}
    classifiers = {"models": model or list(CLASSIFIERS)}
    jobs = [
        Job("cost", name, "all", 0, settings | (classifiers if name in IMAGE_SETS else {}))
        for name in dataset or PAPER_SETS
    ]
    directory = result_directory("cost", out, draft)
    lines = run_all(jobs, partial(run, data_root=data_root), directory, {}, resume=resume)
    on_tables = [line for line in lines if line["config"]["dataset"] not in IMAGE_SETS]
    if on_tables:
        columns = ["set", *CANDIDATES]
        screen.show_table("Epochs as multiples of DAK-CF's", columns, _ratios(on_tables))
    announce_report(directory)


if __name__ == "__main__":
    start(main)
