"""Three small experiments that need no data files, a table of their scores, and the report page.

    python -m experiments.demo
    python -m experiments.demo --quick

The experiments are the paper's toy function (one draw), handwritten digits (one seed) and the
diabetes table (two random splits, with the estimators), each with a plain network beside it. They
take under three minutes on two cores. What has been run is run again, because a demonstration shows
something every time.
"""

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from experiments import estimators, images, mnist, prior, screen, toy
from experiments.report import write_page, write_report
from experiments.runs import RESULTS, Job, Line, RunFn, run_all, scores_by_model

# The panels of the toy figure that are quick to fit.
_TOY_MODELS = ("exact GP", "DAK + residual", "DAK, input units, joint posterior", "NN")
_TOY_SEED = 100


def run_toy(directory: Path, quick: bool) -> list[list[str]]:
    """One draw of the toy function; the rows of the table."""
    recipe = replace(toy.RECIPE, epochs=20 if quick else toy.RECIPE.epochs)
    jobs = [toy.make_job(name, _TOY_SEED, recipe) for name in _TOY_MODELS]
    run_fn = partial(toy.run, figure_seed=_TOY_SEED)
    rows = []
    for line in _run(jobs, run_fn, directory, toy.HEADLINE, toy.label):
        s = line["metrics"]
        third = f"{s['coverage_inside']:.2f} inside, {s['coverage_outside']:.2f} outside"
        error = f"RMSE {s['rmse_inside']:.3f}"
        rows.append(["toy", line["config"]["model"], error, f"{s['nlpd_inside']:.2f}", third])
    return rows


def run_digits(directory: Path, quick: bool) -> list[list[str]]:
    """DAK and two networks on 8 x 8 digits; the rows of the table."""
    base = mnist.RECIPES["digits"]
    jobs = [
        images.make_job(
            "digits",
            name,
            mnist.BACKBONES["digits"],
            replace(base, epochs=1 if quick else base.epochs),
            mnist.options("digits", name),
            max_rows=200 if quick else None,
        )
        for name in ("dak_natural", "nn", "nn_bn")
    ]
    images.remove_checkpoints(jobs, directory)
    rows = []
    run_fn = partial(images.run, directory=directory)
    for line in _run(jobs, run_fn, directory, images.HEADLINE, images.label):
        s = line["metrics"]
        strange = s.get("ood_combined", s["ood_entropy"])
        third = f"ECE {s['ece']:.3f}, AUROC {strange:.2f}"
        error = f"{100 * (1 - s['accuracy']):.1f} % wrong"
        rows.append(["digits", line["config"]["model"], error, f"{s['nll']:.3f}", third])
    return rows


def run_diabetes(directory: Path, quick: bool) -> list[list[str]]:
    """`DAKRegressor` and a network on the diabetes table; the rows of the table."""
    max_rows = 60 if quick else None
    names, splits = ("dak", "dak5", "nn"), range(1 if quick else 2)
    jobs = [estimators.make_job("diabetes", n, split, max_rows) for n in names for split in splits]
    lines = _run(jobs, estimators.run, directory, estimators.HEADLINE, None)
    rows = []
    for name in names:
        scores = [scores_by_model(line)[name] for line in lines if line["config"]["model"] == name]
        mean = {key: statistics.fmean(row[key] for row in scores) for key in scores[0]}
        error, third = f"RMSE {mean['rmse']:.1f}", f"{mean['coverage_95']:.2f}"
        rows.append(["diabetes", name, error, f"{mean['nlpd']:.2f}", third])
    return rows


def _run(
    jobs: list[Job],
    run_fn: RunFn,
    directory: Path,
    headline: dict[str, str],
    label_fn: Callable[[Job], str] | None,
) -> list[Line]:
    """Make all runs, whether they are recorded or not, and write their table and figures."""
    options: dict[str, Any] = {"resume": False, "label_fn": label_fn, "has_table": False}
    lines = run_all(jobs, run_fn, directory, headline, **options)
    write_report(directory)
    return lines


def main(
    out: Annotated[Path, typer.Option(help="Directory of the results.")] = RESULTS / "demo",
    quick: Annotated[bool, typer.Option("--quick", help="A few rows and epochs.")] = False,
) -> None:
    """Run everything, print the table and where the figures and the report are."""
    torch.set_num_threads(1)
    prior.draw(out / "prior" / "figures" / "prior.png", quick)
    rows = run_toy(out / "toy", quick)
    rows += run_digits(out / "digits", quick)
    rows += run_diabetes(out / "diabetes", quick)
    page = out / "report.html"
    write_page(out, page)
    screen.show_table("Scores on test data", ["data", "model", "error", "NLPD", "coverage"], rows)
    screen.say("Coverage is that of 95 % intervals; in the toy it is that of the function itself.")
    screen.say("Digits have ECE instead, and AUROC for telling unlike images apart.")
    for path in sorted(out.glob("*/figures/*.png")):
        screen.say(f"figure  {path}")
    screen.say(f"report  {page}")


if __name__ == "__main__":
    typer.run(main)
