"""The timings of `benchmarks`, recorded: the same cases as `python -m benchmarks`.

    python -m experiments.bench --case training --threads 1

Timings are measured anew at every call; the newest line of a case and a number of threads counts.
"""

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from matplotlib import pyplot as plt

from benchmarks.suite import CASES, format_rows, measure
from experiments import screen
from experiments.report import announce_report, newest, save_figure
from experiments.runs import Job, Line, result_directory, run_all, start
from pyro_dak.validation import check_choice

# Settings of the complexity table that are drawn, and what is on their axes.
_PANELS = {
    "M, training step": "M, inducing points (step)",
    "C, training step for classes": "C, classes (step)",
    "B, training step": "B, rows of a batch (step)",
    "N, prediction": "N, rows (prediction)",
}


def make_job(case: str, threads: int, repetitions: int, quick: bool = False) -> Job:
    """The job of one case with a number of threads."""
    settings = {"threads": threads, "repetitions": repetitions, "quick": quick}
    return Job("bench", case, "all", 0, settings)


def run(job: Job, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure one case, in a process of its own."""
    settings = job.settings
    rows = measure(job.dataset, settings["threads"], settings["repetitions"], settings["quick"])
    return {"rows": rows, "torch": torch.__version__, "machine": platform.machine()}


def _newest(runs: list[Line]) -> list[Line]:
    return newest(runs, lambda run: (run["config"]["dataset"], run["config"]["threads"]))


def table(runs: list[Line]) -> str:
    """Times and ratios, then slopes, as Markdown."""
    shown = _newest(runs)
    order = list(CASES)
    shown.sort(key=lambda run: (run["config"]["threads"], order.index(run["config"]["dataset"])))
    text = "Medians over the rounds, with half their range; candidates take turns in one process."
    return f"{text}\n\n{format_rows([row for run in shown for row in run['rows']])}\n"


def draw(runs: list[Line], figures: Path) -> list[Path]:
    """The complexity table as curves: milliseconds by size, a panel for each axis."""
    rows = [
        row
        for run in _newest(runs)
        for row in run["rows"]
        if run["config"]["dataset"] == "complexity" and run["config"]["threads"] == 1
    ]
    if not rows:
        return []
    models = list(dict.fromkeys(row["name"] for row in rows))
    figure, axes = plt.subplots(1, len(_PANELS), figsize=(3.2 * len(_PANELS), 3.2))
    for axis, (setting, title) in zip(axes, _PANELS.items(), strict=True):
        for row in (row for row in rows if row["setting"] == f"growth with {setting}"):
            color = f"C{models.index(row['name'])}"
            axis.loglog(row["sizes"], row["milliseconds_by_size"], "o-", color=color, ms=3)
        axis.set_xlabel(title)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("milliseconds of the processor")
    for place, name in enumerate(models):
        axes[-1].plot([], [], "o-", color=f"C{place}", ms=3, label=name)
    axes[-1].legend(frameon=False, fontsize=7)
    return [save_figure(figure, figures / "growth.png")]


def main(
    case: Annotated[list[str] | None, typer.Option(help=f"{', '.join(CASES)}; all.")] = None,
    threads: Annotated[list[int] | None, typer.Option(help="Numbers of threads; 1 and 2.")] = None,
    repetitions: Annotated[int, typer.Option(help="Rounds.")] = 7,
    out: Annotated[Path | None, typer.Option(help="Else results/bench.")] = None,
    draft: Annotated[bool, typer.Option("--draft", help="Write to results/draft/bench.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A draft of small sizes.")] = False,
) -> None:
    """Measure the cases and record them."""
    for name in case or []:
        check_choice("case", name, CASES)
    jobs = [
        make_job(name, number, 1 if quick else repetitions, quick)
        for number in threads or [1, 2]
        for name in case or list(CASES)
    ]
    directory = result_directory("bench", out, draft or quick)
    lines = run_all(jobs, run, directory, {}, resume=False, label_fn=label)
    rows = [row for line in lines for row in line["rows"] if "ratio" in row]
    cells = [[row["case"], row["setting"], row["name"], _ratio(row), row["base"]] for row in rows]
    screen.show_table("Ratios of times", ["case", "setting", "name", "ratio", "of"], cells)
    announce_report(directory)


def label(job: Job) -> str:
    """What a job is called on the screen."""
    return f"{job.dataset}, threads {job.settings['threads']}"


def _ratio(row: dict[str, Any]) -> str:
    return "" if row["ratio"] is None else f"{row['ratio']:.2f}"


if __name__ == "__main__":
    start(main)
