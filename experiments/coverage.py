"""How often intervals of `DAKRegressor()` cover new rows of simulated tables.

    python -m experiments.coverage
    python -m experiments.coverage --quick

Tables have 300, 600 or 1,500 rows and six columns, of which four matter. The noise is normal,
normal with a width that depends on a column, or has the heavy tails of a Student-t with three
degrees of freedom. Every seed is another table and another fit; 4,000 new rows of the same kind say
how many of them the 50 % and the 95 % intervals cover, and by which factor the variance of the
predictions should be larger. A run that is recorded already is not made again.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from experiments.report import announce_report, markdown_table
from experiments.runs import Job, Line, result_directory, run_all, start
from pyro_dak.tables.estimators import DAKRegressor
from pyro_dak.validation import check_choice

NUM_ROWS = (300, 600, 1500)
NOISES = ("gaussian", "heteroscedastic", "heavy-tailed")
HEADLINE = {"coverage_50": "50 % coverage", "coverage_95": "95 % coverage", "fit_seconds": "s"}
# The seed of the new rows, which no table has.
_FRESH = 10**6


def simulate(num_rows: int, noise: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A table, `(N, 6)`, and its targets, `(N,)`."""
    check_choice("noise", noise, NOISES)
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rows, 6))
    f = x[:, 0] + np.sin(2 * x[:, 1]) + 0.5 * x[:, 2] * x[:, 3]
    if noise == "gaussian":
        return x, f + rng.normal(size=num_rows)
    if noise == "heteroscedastic":
        return x, f + 0.6 * np.exp(0.7 * x[:, 4]) * rng.normal(size=num_rows)
    return x, f + 0.6 * rng.standard_t(3, size=num_rows)


def make_job(noise: str, num_rows: int, seed: int, epochs: int | None = None) -> Job:
    """The job of one table."""
    return Job("coverage", noise, "dak", seed, {"num_rows": num_rows, "epochs": epochs})


def run(job: Job, tell: Callable[[str], None]) -> dict[str, Any]:
    """Fit one table, and look at new rows."""
    torch.set_num_threads(1)
    model = DAKRegressor(random_state=job.seed, epochs=job.settings["epochs"], progress=False)
    start = time.perf_counter()
    model.fit(*simulate(job.settings["num_rows"], job.dataset, job.seed))
    metrics = {"fit_seconds": time.perf_counter() - start}
    x, y = simulate(4000, job.dataset, _FRESH)
    prediction = model.predict_dist(x)
    for level in (50, 95):
        lower, upper = prediction.interval(level / 100)
        metrics[f"coverage_{level}"] = float(np.mean((lower <= y) & (y <= upper)))
    errors = y - prediction.mean
    metrics["variance_needed"] = float(np.mean(errors**2 / prediction.variance))
    metrics["rmse"] = float(np.sqrt(np.mean(errors**2)))
    metrics["nlpd"] = float(-prediction.log_prob(y).mean())
    metrics["crps"] = float(prediction.crps(y).mean())
    fitted = {"calibration": model.calibration_, "df": model.tail_df_}
    fitted |= {"mixture_factor": model.mixture_factor_, "best_epoch": model.history_.best_epoch}
    return {"metrics": {job.model: metrics}, "fitted": fitted}


def table(runs: list[Line]) -> str:
    """Means over the seeds, and the least and the largest coverage, as Markdown."""
    groups: dict[tuple[str, int], list[dict[str, float]]] = {}
    for line in runs:
        key = line["config"]["dataset"], line["config"]["num_rows"]
        groups.setdefault(key, []).append(line["metrics"]["dak"])
    rows = []
    for (noise, num_rows), found in sorted(groups.items(), key=lambda item: item[0]):
        columns = {name: np.array([row[name] for row in found]) for name in found[0]}
        cells = [noise, str(num_rows), str(len(found))]
        for level in (50, 95):
            shares = columns[f"coverage_{level}"]
            cells += [f"{shares.mean():.3f}", f"{shares.min():.2f} to {shares.max():.2f}"]
        needed = columns["variance_needed"]
        cells += [f"{np.median(needed):.2f}", f"{needed.min():.2f} to {needed.max():.2f}"]
        rows.append([*cells, f"{columns['nlpd'].mean():.3f}", f"{columns['rmse'].mean():.3f}"])
    header = ["noise", "rows", "seeds", "50 %", "range", "95 %", "range"]
    header += ["variance needed", "range", "NLPD", "RMSE"]
    return markdown_table(header, rows) + "\n"


def main(
    noise: Annotated[list[str] | None, typer.Option(help="Kinds of noise; all.")] = None,
    num_rows: Annotated[list[int] | None, typer.Option(help="Rows; 300, 600, 1500.")] = None,
    seeds: Annotated[int, typer.Option(help="Tables of each kind.")] = 20,
    resume: Annotated[bool, typer.Option(help="Keep runs that are recorded.")] = True,
    out: Annotated[Path | None, typer.Option(help="Else results/coverage.")] = None,
    draft: Annotated[bool, typer.Option("--draft", help="Write below results/draft.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A draft: few rows, 2 epochs.")] = False,
) -> None:
    """Make the runs, then write the table."""
    jobs = [
        make_job(kind, number, seed, 2 if quick else None)
        for seed in range(1 if quick else seeds)
        for number in ((60,) if quick else num_rows or NUM_ROWS)
        for kind in noise or NOISES
    ]
    directory = result_directory("coverage", out, draft or quick)
    run_all(jobs, run, directory, HEADLINE, resume=resume)
    announce_report(directory)


if __name__ == "__main__":
    start(main)
