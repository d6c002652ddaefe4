"""`DAKRegressor()` on nine tables, random 90/10 splits, beside what else people use.

    pip install -e '.[peers]'
    python -m experiments.estimators
    python -m experiments.estimators --quick

`dak5` is `DAKRegressor()`. Beside it stand `es5`, five networks of mean and noise with the same
widths and schedule, each of which stops early on another tenth of the rows (a deep ensemble), and
`es5_calibrated`, the same with the calibration that `DAKRegressor` has; `ple5`, five wider ones
with piecewise-linear embeddings of the columns; `nn`, one network with one learned noise, which
stops early; `lightgbm`, `catboost` and `ngboost`; and `gp`, an exact Gaussian process, up to 2,000
rows. `dak` is `DAKRegressor(ensemble_size=1)`, for `--model`.

`--missing 0.2` takes away a fifth of all cells, of training and of test rows. A run that is
recorded already is not made again. Seconds are those of the processor, with one thread.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer

from experiments import table_peers
from experiments.datasets import REGRESSION, load_regression
from experiments.report import announce_report, markdown_table
from experiments.runs import Job, Line, result_directory, run_all, start
from experiments.table_networks import NetworkRegressor
from pyro_dak.tables.estimators import DAKRegressor
from pyro_dak.tables.predictive import StudentPrediction
from pyro_dak.tables.rows import default_epochs
from pyro_dak.validation import check_choice

# Small sets first; the last three are large and get two splits.
SETS = (
    "yacht",
    "housing",
    "energy",
    "wine",
    "gas",
    "parkinsons",
    "kin40k",
    "protein",
    "keggdirected",
)
LARGE = SETS[-3:]
OURS = "dak5"
NEURAL = ("nn", "es5", "ple5")
MODELS = (OURS, *NEURAL, "lightgbm", "catboost", "ngboost", "gp")
COLUMNS = (OURS, "es5", "es5_calibrated", *MODELS[3:], "nn", "dak")
PEERS = MODELS[1:]
# Those that can do with missing cells, and the sets that show what these cost.
WITH_MISSING = (OURS, "catboost", "lightgbm")
MISSING_SETS = ("yacht", "housing", "energy", "wine", "parkinsons")
METRICS = (
    "rmse",
    "nlpd",
    "crps",
    "interval_score_95",
    "coverage_50",
    "coverage_95",
    "cpu_seconds",
    "fit_seconds",
)
_TIMES = METRICS[-2:]
HEADLINE = {"rmse": "RMSE", "nlpd": "NLPD", "coverage_95": "95 % coverage", "cpu_seconds": "s"}
# Seed of the splits. No default was chosen on these; all earlier runs had other seeds.
_SPLITS = 20261118
# The most training rows for the exact Gaussian process.
_MOST_EXACT = 2000


def score(prediction: StudentPrediction, y: np.ndarray) -> dict[str, float]:
    """Metrics in the units of the data."""
    lower, upper = prediction.interval(0.95)
    low, high = prediction.interval(0.5)
    outside = np.maximum(lower - y, 0) + np.maximum(y - upper, 0)
    return {
        "rmse": float(np.sqrt(np.mean((y - prediction.mean) ** 2))),
        "nlpd": float(-prediction.log_prob(y).mean()),
        "crps": float(prediction.crps(y).mean()),
        "coverage_50": float(np.mean((y >= low) & (y <= high))),
        "coverage_95": float(np.mean((y >= lower) & (y <= upper))),
        "width_95": float(np.mean(upper - lower)),
        "interval_score_95": float(np.mean(upper - lower + 2 / 0.05 * outside)),
    }


def build(name: str, seed: int, epochs: int | None) -> Any:
    """The model with this name."""
    wide = {"hidden": (128, 128), "is_embedded": True}
    makers: dict[str, Callable[[], Any]] = {
        "dak": lambda: DAKRegressor(1, random_state=seed, epochs=epochs, progress=False),
        "dak5": lambda: DAKRegressor(random_state=seed, epochs=epochs, progress=False),
        "nn": lambda: NetworkRegressor(1, "mean", seed, epochs),
        "es5": lambda: NetworkRegressor(5, "noise", seed, epochs, learning_rate=2e-2),
        "ple5": lambda: NetworkRegressor(5, "noise", seed, epochs, **wide),
    }
    steps = () if epochs is None else (epochs,)
    makers |= {peer: partial(kind, seed, *steps) for peer, kind in table_peers.PEERS.items()}
    check_choice("model", name, makers)
    return makers[name]()


def make_job(
    dataset: str,
    name: str,
    split: int,
    max_rows: int | None = None,
    missing: float | None = None,
) -> Job:
    """The job of a model on a split, which is also its seed; few rows get two epochs."""
    settings = {"split": split, "splits": _SPLITS, "max_rows": max_rows, "missing": missing}
    return Job("estimators", dataset, name, split, settings)


def run(job: Job, tell: Callable[[str], None], data_root: str | None = None) -> dict[str, Any]:
    """Train on nine tenths of the rows, test on the rest."""
    torch.set_num_threads(1)
    name, split, max_rows = job.model, job.settings["split"], job.settings["max_rows"]
    x, y = (part.numpy() for part in load_regression(job.dataset, data_root))
    if job.settings["missing"]:
        is_missing = np.random.default_rng((_SPLITS, split, 1)).uniform(size=x.shape)
        x = np.where(is_missing < job.settings["missing"], np.nan, x)
    order = np.random.default_rng((_SPLITS, split)).permutation(len(x))[:max_rows]
    test, rows = np.split(order, [round(0.1 * len(order))])
    model = build(name, split, 2 if max_rows else None)
    start = time.process_time()
    model.fit(x[rows], y[rows, 0])
    seconds = time.process_time() - start
    metrics: dict[str, Any] = {name: score(model.predict_dist(x[test]), y[test, 0])}
    metrics[name]["cpu_seconds"] = seconds
    fitted: dict[str, Any] = {}
    if isinstance(model, NetworkRegressor):
        fitted = {"calibration": model.calibration.scale, "df": model.calibration.df}
        if name == "es5":
            calibrated = model.predict_dist(x[test], is_calibrated=True)
            metrics["es5_calibrated"] = score(calibrated, y[test, 0])
    elif isinstance(model, DAKRegressor):
        fitted = {"calibration": model.calibration_, "df": model.tail_df_}
        fitted |= {"best_epoch": model.history_.best_epoch, "epochs": default_epochs(len(rows))}
    return {"metrics": metrics, "fitted": fitted}


Scores = dict[tuple[str, str], list[dict[str, float]]]
# Metrics by data set and model, and then by split.
Splits = dict[tuple[str, str], dict[int, dict[str, float]]]


def by_split(runs: list[Line]) -> Splits:
    """Metrics of each split, by data set and model; missing cells are part of a set's name."""
    found: Splits = {}
    for line in runs:
        config, missing = line["config"], line["config"].get("missing")
        dataset = config["dataset"] + (_with_missing(missing) if missing else "")
        for name, metrics in line["metrics"].items():
            found.setdefault((dataset, name), {})[config["split"]] = metrics
    return found


def _with_missing(share: float) -> str:
    return f", {100 * share:.0f} % missing"


def scores_of(runs: list[Line]) -> Scores:
    """Metrics by data set and model, over the splits that all models of the set have."""
    found = by_split(runs)
    common = {
        dataset: set.intersection(*(set(found[key]) for key in found if key[0] == dataset))
        for dataset, _ in found
    }
    return {
        key: [splits[split] for split in sorted(common[key[0]])]
        for key, splits in found.items()
        if common[key[0]]
    }


def average(scores: Scores, dataset: str, name: str, metric: str) -> tuple[float, float]:
    """The mean over the splits and its standard error; for times the median."""
    values = [m[metric] for m in scores.get((dataset, name), []) if metric in m]
    if not values:
        return math.nan, math.nan
    if metric in _TIMES:
        return float(np.median(values)), math.nan
    error = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(np.mean(values)), float(error)


class Difference(NamedTuple):
    """By how much a peer's mean score is above ours, over the splits of both."""

    mean: float
    error: float  # the standard error over the splits, which are paired
    num_splits: int

    @property
    def points(self) -> float:
        """1 if ours is better by more than a standard error, 1/2 if neither is, else 0."""
        if not self.mean > self.error:
            return 0.0 if self.mean < -self.error else 0.5
        return 1.0


def difference(splits: Splits, dataset: str, name: str, metric: str) -> Difference | None:
    """The peer's scores minus ours; None without two splits that both have."""
    ours, theirs = (splits.get((dataset, model), {}) for model in (OURS, name))
    shared = sorted(ours.keys() & theirs.keys())
    if len(shared) < 2:
        return None
    values = [theirs[split][metric] - ours[split][metric] for split in shared]
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Difference(float(np.mean(values)), error, len(values))


def differences_table(
    splits: Splits, metric: str, sets: Sequence[str] = SETS, columns: Sequence[str] = COLUMNS[1:]
) -> str:
    """Paired differences of a metric to ours, where above zero ours is better."""
    names = [name for name in columns if any(key[1] == name for key in splits)]
    rows = []
    for dataset in sets:
        found = [difference(splits, dataset, name, metric) for name in names]
        if any(found):
            cells = [f"{d.mean:+.3f} ± {d.error:.3f}" if d else "" for d in found]
            rows.append([dataset, *cells])
    return markdown_table([f"{metric} minus that of {OURS}", *names], rows) if rows else ""


def points_of(
    splits: Splits, sets: Sequence[str], columns: Sequence[str], metrics: Sequence[str]
) -> list[str]:
    """On how many sets ours is better than each other model, where ties count half."""
    lines = []
    for name in columns:
        parts = []
        for metric in metrics:
            found = {s: difference(splits, s, name, metric) for s in sets}
            points = {s: d.points for s, d in found.items() if d}
            if points:
                ties = [s for s, p in points.items() if p == 0.5]
                lost = [s for s, p in points.items() if p == 0]
                notes = [
                    f"{kind} {', '.join(s)}" for kind, s in (("tie", ties), ("lost", lost)) if s
                ]
                note = f" ({'; '.join(notes)})" if notes else ""
                parts.append(f"{sum(points.values()):g} of {len(points)} in {metric.upper()}{note}")
        if parts:
            lines.append(f"- Against `{name}`: {'; '.join(parts)}.")
    return lines


def summary(splits: Splits) -> list[str]:
    """How `DAKRegressor()` stands to each peer, on how many sets."""
    points = points_of(splits, SETS, COLUMNS[1:], ("nlpd", "crps"))
    return points + _rmse_and_coverage(splits)


def _rmse_and_coverage(splits: Splits) -> list[str]:
    """Where the RMSE is near that of the best network, and where 95 % intervals cover enough."""
    ratios, coverages = {}, {}
    for dataset in SETS:
        ours = splits.get((dataset, OURS), {})
        if not ours:
            continue
        coverages[dataset] = float(np.mean([m.get("coverage_95", math.nan) for m in ours.values()]))
        shared = [
            (theirs, sorted(ours.keys() & theirs.keys()))
            for theirs in (splits.get((dataset, name), {}) for name in NEURAL)
        ]
        found = [
            np.mean([ours[k]["rmse"] for k in common])
            / np.mean([theirs[k]["rmse"] for k in common])
            for theirs, common in shared
            if common
        ]
        if found:
            ratios[dataset] = float(max(found))
    claims = {
        f"The RMSE of `{OURS}` is at most 1.03 times that of the best of {', '.join(NEURAL)}": {
            s: (ratio <= 1.03, f"{ratio:.2f}") for s, ratio in ratios.items()
        },
        f"95 % intervals of `{OURS}` cover 0.92 to 0.97": {
            s: (0.92 <= share <= 0.97, f"{share:.3f}") for s, share in coverages.items()
        },
    }
    lines = []
    for claim, sets in claims.items():
        if sets:
            others = ", ".join(f"{s}: {value}" for s, (is_so, value) in sets.items() if not is_so)
            number = sum(is_so for is_so, _ in sets.values())
            lines.append(
                f"- {claim} on {number} of {len(sets)} sets{f' ({others})' * bool(others)}."
            )
    return lines


def missing_rows(splits: Splits, share: float = 0.2) -> list[list[str]]:
    """What missing cells cost in NLPD, and by how much more it costs a peer than us."""
    rows = []
    for dataset in MISSING_SETS:
        gaps, costs = dataset + _with_missing(share), {}
        for name in WITH_MISSING:
            whole, holed = splits.get((dataset, name), {}), splits.get((gaps, name), {})
            shared = whole.keys() & holed.keys()
            costs[name] = {k: holed[k]["nlpd"] - whole[k]["nlpd"] for k in shared}
        if not costs[OURS]:
            continue
        cells = [dataset, str(len(costs[OURS]))]
        cells += [_mean_and_error([*costs[name].values()]) for name in WITH_MISSING]
        for name in WITH_MISSING[1:]:
            shared = costs[OURS].keys() & costs[name].keys()
            cells.append(_mean_and_error([costs[name][k] - costs[OURS][k] for k in shared]))
        rows.append(cells)
    return rows


def _mean_and_error(values: Sequence[float]) -> str:
    if len(values) < 2:
        return ""
    return f"{np.mean(values):+.3f} ± {np.std(values, ddof=1) / math.sqrt(len(values)):.3f}"


def metric_rows(
    scores: Scores,
    sets: Sequence[str],
    columns: Sequence[str],
    metrics: Sequence[str] = METRICS,
) -> list[list[str]]:
    """Means and standard errors over the splits, one row per data set and metric.

    A mean over fewer splits than others of its row says so.
    """
    rows = []
    for dataset in [name for name in sets if any(key[0] == name for key in scores)]:
        splits = max(len(scores.get((dataset, name), [])) for name in columns)
        for metric in metrics:
            cells = []
            for name in columns:
                mean, error = average(scores, dataset, name, metric)
                cell = "" if math.isnan(mean) else f"{mean:.3f}"
                cell = cell if math.isnan(error) else f"{cell} ± {error:.3f}"
                number = len(scores.get((dataset, name), []))
                cells.append(f"{cell} ({number})" if cell and number < splits else cell)
            if any(cells):  # earlier runs have fewer metrics
                rows.append([dataset, str(splits), metric, *cells])
    return rows


def table(runs: list[Line]) -> str:
    """Means over the splits, paired differences, a summary, and missing cells, as Markdown."""
    splits = by_split(runs)
    scores = {key: [found[k] for k in sorted(found)] for key, found in splits.items()}
    columns = [name for name in COLUMNS if any(key[1] == name for key in scores)]
    sets = [*SETS, "diabetes", *(name + _with_missing(0.2) for name in MISSING_SETS)]
    rows = metric_rows(scores, sets, columns)
    parts = [markdown_table(["set", "splits", "metric", *columns], rows)]
    parts += [differences_table(splits, metric) for metric in ("nlpd", "crps")]
    parts.append("\n".join(summary(splits)))
    costs = missing_rows(splits)
    if costs:
        more = [f"{name} minus {OURS}" for name in WITH_MISSING[1:]]
        head = ["NLPD that 20 % missing cells cost", "splits", *WITH_MISSING, *more]
        parts.append(markdown_table(head, costs))
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _fits(dataset: str, name: str) -> bool:
    """Whether a model can do with the number of rows."""
    return name != "gp" or dataset == "diabetes" or 0.9 * REGRESSION[dataset].rows <= _MOST_EXACT


def main(
    dataset: Annotated[list[str] | None, typer.Option(help="Data sets; all nine.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Models; all but `dak`.")] = None,
    splits: Annotated[int, typer.Option(help="Random splits; 2 on the large sets.")] = 5,
    missing: Annotated[float | None, typer.Option(help="Share of cells to take away.")] = None,
    resume: Annotated[bool, typer.Option(help="Keep runs that are recorded.")] = True,
    data_root: Annotated[str | None, typer.Option(help="Else $PYRO_DAK_DATA.")] = None,
    out: Annotated[Path | None, typer.Option(help="Else results/estimators.")] = None,
    draft: Annotated[bool, typer.Option("--draft", help="Write below results/draft.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A draft: few rows, 2 epochs.")] = False,
) -> None:
    """Make the runs, then write the table."""
    sets = dataset or (["diabetes"] if quick else MISSING_SETS if missing else SETS)
    models = model or (["dak", OURS, "nn", "es5"] if quick else WITH_MISSING if missing else MODELS)
    jobs = [
        make_job(name, model_name, split, 60 if quick else None, missing)
        for name in sets
        for split in range(1 if quick else min(splits, 2) if name in LARGE else splits)
        for model_name in models
        if _fits(name, model_name)
    ]
    directory = result_directory("estimators", out, draft or quick)
    run_fn = partial(run, data_root=data_root)
    run_all(jobs, run_fn, directory, HEADLINE, resume=resume)
    announce_report(directory)


if __name__ == "__main__":
    start(main)
