"""The additive estimators beside explainable boosting machines and pyGAM, and their bands.

    pip install -e '.[peers]'
    pip install --no-deps pygam progressbar2 python-utils
    python -m experiments.additive
    python -m experiments.additive --quick

`DAKAdditiveRegressor()` and `DAKAdditiveRegressor(pairs="auto")` with their defaults; EBM of the
package interpret without and with pairs, and `LinearGAM` of pyGAM with its smoothness from a grid
search, on random 90/10 splits. (pyGAM asks for an older scipy, and works with newer ones.)
`simulated` draws tables of six independent columns, whose functions are known, and counts where the
95 % bands of the shape functions hold them. In `simulated classes` the functions add up to the log
odds of two classes. A run that is recorded already is not made again.
"""

import math
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from experiments.datasets import load_regression
from experiments.estimators import average, metric_rows, score, scores_of
from experiments.report import announce_report, markdown_table
from experiments.runs import Job, Line, result_directory, run_all, start
from pyro_dak.tables.additive import DAKAdditiveClassifier, DAKAdditiveRegressor
from pyro_dak.validation import check_choice

SETS = ("housing", "energy", "yacht")
SIMULATED, CLASSES = "simulated", "simulated classes"
MODELS = ("dak", "dak_pairs", "ebm", "ebm_pairs", "pygam")
HEADLINE = {"rmse": "RMSE", "coverage_95": "95 % coverage", "fit_seconds": "s"}
# The functions of the simulated columns, and the numbers of rows and the noise of its tables.
FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "sine": lambda x: np.sin(2 * x),
    "step": lambda x: np.where(x > 0.3, 1.0, 0.0),
    "line": lambda x: 0.5 * x,
    "kink": np.abs,
    "bump": lambda x: 1.5 * np.exp(-4 * x**2),
    "nothing": np.zeros_like,
}
ROWS, NOISE, ROWS_OF_CLASSES = (300, 1000), (0.3, 1.0), (300, 1000, 3000)
_REAL = (*SETS, "diabetes")
# Seed of the splits; others were used while the settings were chosen.
_SPLITS = 2026


def build(name: str, seed: int) -> Any:
    """The model with this name. The peers are imported when they are asked for."""
    check_choice("model", name, MODELS)
    if name == "dak":
        return DAKAdditiveRegressor()
    if name == "dak_pairs":
        return DAKAdditiveRegressor(pairs="auto")
    if name == "pygam":
        return PyGAM()
    from interpret.glassbox import ExplainableBoostingRegressor

    options = {"interactions": 0} if name == "ebm" else {}
    return ExplainableBoostingRegressor(random_state=seed, n_jobs=1, **options)


class PyGAM:
    """`LinearGAM` of pyGAM with a spline for each column, whose smoothness a grid search finds."""

    def fit(self, x: np.ndarray, y: np.ndarray) -> None:
        """Fit all rows. A column with few different values has fewer splines."""
        from pygam import LinearGAM, s
        from pygam.terms import TermList

        counts = [len(np.unique(column)) for column in x.T]
        terms = [s(j, n_splines=min(20, max(4, n))) for j, n in enumerate(counts)]
        self.model = LinearGAM(TermList(*terms)).gridsearch(x, y, progress=False)

    def predict(self, x: np.ndarray) -> np.ndarray:
        """The mean of y."""
        return self.model.predict(x)

    def coverage(self, x: np.ndarray, y: np.ndarray) -> float:
        """The share of y within 95 % prediction intervals."""
        lower, upper = self.model.prediction_intervals(x, width=0.95).T
        return float(np.mean((lower <= y) & (y <= upper)))


def make_job(dataset: str, name: str, split: int, max_rows: int | None = None) -> Job:
    """The job of a model on a split, which is also its seed."""
    return Job("additive", dataset, name, split, {"split": split, "max_rows": max_rows})


def run(job: Job, tell: Callable[[str], None], data_root: str | None = None) -> dict[str, Any]:
    """Train on nine tenths of the rows, test on the rest; or simulate."""
    torch.set_num_threads(1)
    if job.dataset in (SIMULATED, CLASSES):
        simulate_fn = simulate if job.dataset == SIMULATED else simulate_classes
        return {"metrics": simulate_fn(job.settings["split"], job.settings["max_rows"])}
    split, max_rows = job.settings["split"], job.settings["max_rows"]
    x, y = (part.double().numpy() for part in load_regression(job.dataset, data_root))
    order = np.random.default_rng((_SPLITS, split)).permutation(len(x))[:max_rows]
    test, rows = np.split(order, [round(0.1 * len(order))])
    model = build(job.model, split)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the peers, about their own dependencies
        begin = time.perf_counter()
        model.fit(x[rows], y[rows, 0])
        seconds = time.perf_counter() - begin
        if isinstance(model, DAKAdditiveRegressor):
            metrics = score(model.predict_dist(x[test]), y[test, 0])
            fitted = {"pairs": [list(t) for t in model.term_names_ if isinstance(t, tuple)]}
        else:
            errors = model.predict(x[test]) - y[test, 0]
            metrics, fitted = {"rmse": float(np.sqrt(np.mean(errors**2)))}, {}
            if isinstance(model, PyGAM):
                metrics["coverage_95"] = model.coverage(x[test], y[test, 0])
    return {"metrics": {job.model: metrics | {"fit_seconds": seconds}}, "fitted": fitted}


def simulate(seed: int, max_rows: int | None = None) -> dict[str, dict[str, float]]:
    """Where 95 % bands hold the functions of simulated tables, by table and by function.

    Columns are normal for even seeds, and uniform for odd ones. Coverage is counted at 99 quantiles
    of each column; functions and bands are centred over the training rows.
    """
    tables = {}
    for N in ROWS if max_rows is None else (max_rows,):
        for noise in NOISE:
            rng = np.random.default_rng((_SPLITS, seed, N, int(10 * noise)))
            x, f = _simulated_columns(rng, N, seed)
            y = f.sum(1) + noise * rng.standard_normal(N)
            tables[f"N={N}, noise {noise}"] = _covered(DAKAdditiveRegressor().fit(x, y), x, f)
    return _coverage(tables)


def simulate_classes(seed: int, max_rows: int | None = None) -> dict[str, dict[str, float]]:
    """The same for two classes, where the functions are those of the log odds of the second."""
    tables = {}
    for N in ROWS_OF_CLASSES if max_rows is None else (max_rows,):
        rng = np.random.default_rng((_SPLITS, seed, N))
        x, f = _simulated_columns(rng, N, seed)
        labels = rng.uniform(size=N) < 1 / (1 + np.exp(-f.sum(1)))
        tables[f"classes, N={N}"] = _covered(DAKAdditiveClassifier().fit(x, labels), x, f)
    return _coverage(tables)


def _simulated_columns(
    rng: np.random.Generator, num_rows: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Columns, `(N, 6)`, and the values of their functions."""
    shape = (num_rows, len(FUNCTIONS))
    x = rng.uniform(-2, 2, shape) if seed % 2 else rng.standard_normal(shape)
    return x, np.stack([fn(x[:, j]) for j, fn in enumerate(FUNCTIONS.values())], 1)


def _covered(model: Any, x: np.ndarray, f: np.ndarray) -> dict[str, float]:
    """The share of quantiles of each column at which the band of its function holds the truth."""
    shares = {}
    for j, (name, fn) in enumerate(FUNCTIONS.items()):
        grid = np.quantile(x[:, j], np.linspace(0.01, 0.99, 99))
        band = model.shape_function(j, grid)
        truth = fn(grid) - f[:, j].mean()
        shares[name] = float(np.mean((band.lower <= truth) & (truth <= band.upper)))
    return shares


def _coverage(tables: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Means over the functions of each table, and over the tables for each function."""
    means = {name: float(np.mean([*shares.values()])) for name, shares in tables.items()}
    for name in FUNCTIONS:
        means[name] = float(np.mean([shares[name] for shares in tables.values()]))
    return {name: {"coverage_95": mean} for name, mean in means.items()}


def summary(runs: list[Line]) -> list[str]:
    """The ratios that matter, as a list in Markdown."""
    scores, lines = scores_of([r for r in runs if r["config"]["dataset"] in _REAL]), []
    for ours, theirs, most in (("dak", "ebm", 1.02), ("dak_pairs", "ebm_pairs", 1.05)):
        for dataset in SETS:
            mine, other = (average(scores, dataset, name, "rmse")[0] for name in (ours, theirs))
            if math.isfinite(mine) and math.isfinite(other):
                verdict = "at most" if mine <= most * other else "**above**"
                lines.append(
                    f"- {dataset}: the RMSE of `{ours}` is {mine / other:.3f} times that of "
                    f"`{theirs}`, {verdict} {most}."
                )
    return lines


def table(runs: list[Line]) -> str:
    """Means over the splits, the ratios, and the coverage of bands, as Markdown."""
    real = [line for line in runs if line["config"]["dataset"] in _REAL]
    rows = metric_rows(scores_of(real), _REAL, MODELS)
    lines = [markdown_table(["set", "splits", "metric", *MODELS], rows), "", *summary(runs)]
    for dataset in (SIMULATED, CLASSES):
        bands = [line["metrics"] for line in runs if line["config"]["dataset"] == dataset]
        if bands:
            lines += ["", _table_of_bands(dataset, bands)]
    return "\n".join(lines).rstrip() + "\n"


def _table_of_bands(title: str, bands: list[dict[str, dict[str, float]]]) -> str:
    """Means over the seeds of the coverage of bands, and the least of each."""
    cells = []
    for name in bands[0]:
        values = [band[name]["coverage_95"] for band in bands if name in band]
        error = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        cells.append([name, f"{np.mean(values):.3f} ± {error:.3f}", f"{min(values):.3f}"])
    return markdown_table([title, f"coverage of 95 % bands, {len(bands)} seeds", "least"], cells)


def main(
    dataset: Annotated[list[str] | None, typer.Option(help="Data sets; all and simulated.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Models; all five.")] = None,
    splits: Annotated[int, typer.Option(help="Random splits of each set.")] = 5,
    seeds: Annotated[int, typer.Option(help="Simulated tables of each kind.")] = 20,
    resume: Annotated[bool, typer.Option(help="Keep runs that are recorded.")] = True,
    data_root: Annotated[str | None, typer.Option(help="Else $PYRO_DAK_DATA.")] = None,
    out: Annotated[Path | None, typer.Option(help="Else results/additive.")] = None,
    draft: Annotated[bool, typer.Option("--draft", help="Write below results/draft.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A draft: few rows, no peers.")] = False,
) -> None:
    """Make the runs, then write the table."""
    max_rows = 80 if quick else None
    jobs = []
    every = ["diabetes", SIMULATED, CLASSES] if quick else [SIMULATED, CLASSES, *SETS]
    for name in dataset or every:
        if name in (SIMULATED, CLASSES):
            number, models = 1 if quick else seeds, ["dak"]
        else:
            number, models = 1 if quick else splits, model or (MODELS[:2] if quick else MODELS)
        jobs += [make_job(name, m, k, max_rows) for k in range(number) for m in models]
    directory = result_directory("additive", out, draft or quick)
    run_fn = partial(run, data_root=data_root)
    run_all(jobs, run_fn, directory, HEADLINE, resume=resume)
    announce_report(directory)


if __name__ == "__main__":
    start(main)
