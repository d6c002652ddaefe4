"""What the choices of the paper's last layer are worth: M, P, S, scaling and kernel, one at a time.

    python -m experiments.ablation --dataset wine
    python -m experiments.ablation --quick

The base is DAK-CF with the settings `best` of the regression experiment, on MNIST DAK-MC with its
settings there; every other row differs from it in one choice. All rows of a set have the same
folds, seeds and epochs. The number of draws S is that of DAK-MC in training. Nothing is chosen by
these runs: they are on the test rows.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import typer

from experiments import images, mnist, uci
from experiments.report import announce_report, markdown_table, newest, save_figure
from experiments.runs import Job, Line, result_directory, run_all, start
from pyro_dak.validation import check_choice

# The choices by axis, as options of the models; the number of draws is a setting of the recipe.
AXES: dict[str, tuple[Any, ...]] = {
    "M": (7, 15, 63, 255),
    "P": (4, 16, 64),
    "S": (1, 8, 32),
    "scaling": ("standardize", "minmax", "none"),
    "kernel": ("laplace", "matern32", "matern52"),
}
_OPTIONS = {"P": "num_units", "scaling": "scaling", "kernel": "kernel"}
IMAGE_SET = "mnist"
DATASETS = ("kin40k", "wine", IMAGE_SET)
# Folds or seeds, epochs and rows of each set, so that all of it takes minutes on one core.
BUDGETS: dict[str, dict[str, int | None]] = {
    "kin40k": {"runs": 2, "epochs": 20, "max_rows": None},
    "wine": {"runs": 5, "epochs": 100, "max_rows": None},
    IMAGE_SET: {"runs": 1, "epochs": 5, "max_rows": 4000},
}
HEADLINE = {"rmse": "RMSE", "nlpd": "NLPD", "accuracy": "accuracy", "nll": "NLL"}


def make_job(dataset: str, axis: str, value: Any, number: int, budget: dict[str, Any]) -> Job:
    """The job of one choice: the base, but for this axis; `number` is the fold or the seed."""
    name = "dak_mc" if axis == "S" or dataset == IMAGE_SET else "dak_cf"
    epochs, max_rows = budget["epochs"], budget["max_rows"]
    if dataset == IMAGE_SET:
        base = mnist.make_job(IMAGE_SET, name, number, epochs=epochs, max_rows=max_rows)
    else:
        base = uci.make_job(dataset, name, "best", number, 5, epochs=epochs, max_rows=max_rows)
    settings = base.settings | {"axis": axis, "value": value}
    if axis == "S":
        settings["recipe"] = settings["recipe"] | {"num_samples_train": value}
    elif axis == "M":
        settings["options"] = settings["options"] | {"level": (value + 1).bit_length() - 1}
    else:
        settings["options"] = settings["options"] | {_OPTIONS[axis]: value}
    return replace(base, experiment="ablation", settings=settings)


def run(
    job: Job, tell: Callable[[str], None], directory: Path, data_root: str | None = None
) -> dict[str, Any]:
    """Train and test with one choice."""
    if job.dataset != IMAGE_SET:
        return uci.run(job, tell, data_root)
    content = images.run(job, tell, directory, data_root)
    images.remove_checkpoints([job], directory)
    return content


Groups = dict[tuple[str, str, Any], list[Line]]


def _groups(runs: list[Line]) -> Groups:
    """The newest run of each fold or seed, by set, axis and value, in the order of the axes."""

    def place(run: Line) -> tuple[Any, ...]:
        config = run["config"]
        return config["dataset"], config["axis"], config["value"], config["recipe"]["seed"]

    found: Groups = {}
    for run in newest(runs, place):
        found.setdefault(place(run)[:-1], []).append(run)
    return {
        (dataset, axis, value): found[dataset, axis, value]
        for dataset in DATASETS
        for axis, values in AXES.items()
        for value in values
        if (dataset, axis, value) in found
    }


def _metric_names(dataset: str) -> tuple[str, str]:
    return ("accuracy", "nll") if dataset == IMAGE_SET else ("rmse", "nlpd")


def _mean_and_error(group: list[Line], name: str) -> tuple[float, float]:
    """The mean over runs and its standard error, 0 for a single run."""
    values = [run["metrics"][name] for run in group]
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return statistics.fmean(values), error


def table(runs: list[Line]) -> str:
    """A row for each choice, as Markdown."""
    text = (
        "One choice differs from the base in each row; the base has M = 31 (MNIST: 63), P = 16, "
        "S = 8, standardised unit inputs and the Laplace kernel. Mean ± standard error over folds, "
        "on MNIST the mean over seeds. RMSE and NLPD; on MNIST error in percent and NLL. Seconds "
        "per epoch are of the machine and its load."
    )
    rows = []
    for (dataset, axis, value), group in _groups(runs).items():
        config = group[0]["config"]
        first, second = _metric_names(dataset)
        cells = [dataset, axis, str(value), config["model"], str(len(group))]
        cells.append(str(config["recipe"]["epochs"]))
        mean, error = _mean_and_error(group, first)
        if dataset == IMAGE_SET:
            mean, error = 100 * (1 - mean), 100 * error
        cells.append(f"{mean:.4f} ± {error:.4f}" if len(group) > 1 else f"{mean:.4f}")
        mean, error = _mean_and_error(group, second)
        cells.append(f"{mean:.3f} ± {error:.3f}" if len(group) > 1 else f"{mean:.3f}")
        cells.append(f"{_mean_and_error(group, 'parameters')[0]:.0f}")
        cells.append(f"{_mean_and_error(group, 'epoch_seconds')[0]:.3f}")
        rows.append(cells)
    columns = ["set", "choice", "value", "model", "runs", "epochs", "RMSE or error, %"]
    columns += ["NLPD or NLL", "parameters", "s/epoch"]
    return f"{text}\n\n{markdown_table(columns, rows)}\n"


def draw(runs: list[Line], figures: Path) -> list[Path]:
    """RMSE, or error, by choice: a row for each set, a panel for each axis."""
    groups = _groups(runs)
    datasets = [name for name in DATASETS if any(name == key[0] for key in groups)]
    size = (2.3 * len(AXES), 2.4 * len(datasets))
    figure, axes = plt.subplots(len(datasets), len(AXES), figsize=size, squeeze=False, sharey="row")
    for row, dataset in zip(axes, datasets, strict=True):
        metric = _metric_names(dataset)[0]
        row[0].set_ylabel(f"{dataset}\n{'error' if dataset == IMAGE_SET else 'RMSE'}")
        for axis, (name, values) in zip(row, AXES.items(), strict=True):
            for place, value in enumerate(values):
                group = groups.get((dataset, name, value))
                if group:
                    mean, error = _mean_and_error(group, metric)
                    mean = 1 - mean if dataset == IMAGE_SET else mean
                    axis.errorbar(place, mean, error, fmt="o", color="C0", capsize=3)
            axis.set_xticks(range(len(values)), [str(value) for value in values], fontsize=7)
            axis.set_xlim(-0.5, len(values) - 0.5)
            axis.set_title(name, fontsize=9)
            axis.spines[["top", "right"]].set_visible(False)
    return [save_figure(figure, figures / "ablation.png")]


def _jobs(
    datasets: list[str], axes: list[str], num_runs: int | None, epochs: int | None, quick: bool
) -> Iterator[Job]:
    for dataset in datasets:
        budget: dict[str, Any] = dict(BUDGETS[dataset])
        budget["epochs"] = epochs or budget["epochs"]
        budget["runs"] = num_runs or budget["runs"]
        if quick:
            budget |= {"runs": 1, "epochs": 1, "max_rows": 100}
        for number in range(budget["runs"]):
            for axis in axes:
                for value in AXES[axis]:
                    yield make_job(dataset, axis, value, number, budget)


def label(job: Job) -> str:
    """What a job is called on the screen."""
    settings = job.settings
    number = job.recipe.seed
    return f"{job.dataset} {settings['axis']} = {settings['value']}, run {number}"


def main(
    dataset: Annotated[list[str] | None, typer.Option(help=", ".join(DATASETS))] = None,
    axis: Annotated[list[str] | None, typer.Option(help=", ".join(AXES))] = None,
    num_runs: Annotated[int | None, typer.Option("--runs", help="Folds or seeds.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Instead of the budget's.")] = None,
    resume: Annotated[bool, typer.Option(help="Keep runs that are recorded.")] = True,
    data_root: Annotated[str | None, typer.Option(help="Else $PYRO_DAK_DATA.")] = None,
    out: Annotated[Path | None, typer.Option(help="Else results/ablation.")] = None,
    draft: Annotated[bool, typer.Option("--draft", help="Write below results/draft.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A draft of 100 rows, 1 epoch.")] = False,
) -> None:
    """Make the runs, then write the table and the figure."""
    for name in dataset or ():
        check_choice("dataset", name, DATASETS)
    for name in axis or ():
        check_choice("axis", name, AXES)
    jobs = list(_jobs(dataset or list(DATASETS), axis or list(AXES), num_runs, epochs, quick))
    directory = result_directory("ablation", out, draft or quick)
    run_fn = partial(run, directory=directory, data_root=data_root)
    run_all(jobs, run_fn, directory, HEADLINE, resume=resume, label_fn=label, has_table=False)
    announce_report(directory)


if __name__ == "__main__":
    start(main)
