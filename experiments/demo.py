"""Three small experiments that need no data files, a table of their scores, and the report page.

    python -m experiments.demo
    python -m experiments.demo --quick

The paper's toy function (one draw), handwritten digits (one seed) and the diabetes table (two
random splits, with the estimators), each with a plain network beside it; under three minutes on two
cores. What has been run is run again: a demonstration shows something every time.
"""

import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from experiments import estimators, image_report, image_runs, mnist, prior, toy
from experiments.report import write_page
from experiments.results import git_commit, read_json, write_json
from pyro_dak.prediction import Prediction

# The panels of the toy figure that are quick to fit.
_TOY_MODELS = ("exact GP", "DAK", "DAK + residual", "NN")
_TOY_SEED = 100

# A line of the table: data, model, error, negative log predictive density, and a third score.
Line = tuple[str, str, str, str, str]


def run_toy(out: Path, quick: bool) -> tuple[list[Line], list[Path]]:
    """One draw of the toy function: figure, scores, lines of the table."""
    recipe = replace(toy.RECIPE, epochs=20 if quick else toy.RECIPE.epochs, seed=_TOY_SEED)
    draw = toy.draw_toy(_TOY_SEED)
    results: dict[str, tuple[Prediction, dict[str, float]]] = {}
    for name in _TOY_MODELS:
        print(f"toy: {name}", flush=True)
        model = toy.PANELS[name](recipe)
        model.fit(draw.x, draw.y)
        prediction = model.predict(draw.x_test)
        results[name] = prediction, toy.score(prediction, draw)
    figure = toy.draw_panels(out / "panels.png", _TOY_SEED, results)
    scores = {name: row for name, (_, row) in results.items()}
    config = {"seed": _TOY_SEED, "epochs": recipe.epochs}
    write_json(out / "scores.json", {"config": config, "metrics": scores, "commit": git_commit()})
    lines = [
        (
            "toy",
            name,
            f"RMSE {row['rmse_inside']:.3f}",
            f"{row['nlpd_inside']:.2f}",
            f"coverage inside {row['coverage_inside']:.2f}, outside {row['coverage_outside']:.2f}",
        )
        for name, row in scores.items()
    ]
    return lines, [figure]


def run_digits(out: Path, quick: bool) -> tuple[list[Line], list[Path]]:
    """DAK and a network on 8 x 8 digits: runs, figures, lines of the table."""
    recipe = mnist.RECIPES["digits"]
    jobs = [
        image_runs.Job(
            "digits",
            name,
            mnist.BACKBONES["digits"],
            replace(recipe, epochs=1 if quick else recipe.epochs, progress=not quick),
            {} if name == "nn" else {"num_units": 16, "init_scale": 0.1},
            max_rows=200 if quick else None,
        )
        for name in ("dak_mc", "nn")
    ]
    image_runs.run_all(jobs, out, resume=False)
    paths = image_report.write_report(out / "digits")
    lines = []
    for job in jobs:
        metrics = _metrics(job.path(out))
        error = f"{100 * (1 - metrics['accuracy']):.1f} % wrong"
        third = f"ECE {metrics['ece']:.3f}, unlike images: AUROC {metrics['ood_entropy']:.2f}"
        lines.append(("digits", job.model, error, f"{metrics['nll']:.3f}", third))
    return lines, [path for path in paths if path.suffix == ".png"]


def run_diabetes(out: Path, quick: bool) -> tuple[list[Line], list[Path]]:
    """`DAKRegressor` and a network on the diabetes table: runs, lines of the table."""
    lines = []
    for name in ("dak", "dak5", "nn"):
        rows = []
        for split in range(1 if quick else 2):
            print(f"diabetes: {name}, split {split}", flush=True)
            content = estimators.run("diabetes", name, split, None, 60 if quick else None)
            write_json(out / f"{name}-split{split}.json", content)
            rows.append(content["metrics"][name])
        mean = {key: statistics.fmean(row[key] for row in rows) for key in rows[0]}
        error, third = f"RMSE {mean['rmse']:.1f}", f"coverage {mean['coverage_95']:.2f}"
        lines.append(("diabetes", name, error, f"{mean['nlpd']:.2f}", third))
    return lines, []


def _metrics(path: Path) -> dict[str, Any]:
    content = read_json(path)
    if content is None:
        raise RuntimeError(f"{path}: was written a moment ago and cannot be read.")
    return content["metrics"]


def table(lines: list[Line]) -> str:
    """The lines in columns."""
    rows = [("data", "model", "error", "NLPD", ""), *lines]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in padded)


def main(
    out: Annotated[Path, typer.Option(help="Directory of the results.")] = Path("results/demo"),
    quick: Annotated[bool, typer.Option(help="A few rows and epochs.")] = False,
) -> None:
    """Run everything, print the table and where the figures and the report are."""
    torch.set_num_threads(1)
    shutil.rmtree(out / "digits" / "checkpoints", ignore_errors=True)
    picture = out / "prior" / "prior.png"
    prior.draw(picture, quick)
    lines: list[Line] = []
    paths = [picture]
    for run, folder in ((run_toy, "toy"), (run_digits, ""), (run_diabetes, "diabetes")):
        new_lines, new_paths = run(out / folder, quick)
        lines += new_lines
        paths += new_paths
    page = out / "report.html"
    write_page(out, page)
    print(f"\n{table(lines)}\n\nCoverage is that of 95 % intervals, of the function in the toy.\n")
    for path in paths:
        print(f"figure  {path}")
    print(f"report  {page}")


if __name__ == "__main__":
    typer.run(main)
