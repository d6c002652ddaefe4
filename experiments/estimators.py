"""The estimators on nine tables, random 90/10 splits, against networks with the same backbone.

    python -m experiments.estimators
    python -m experiments.estimators --quick

`DAKRegressor(ensemble_size=1)` and `DAKRegressor()`, which has five members; a network with a
learned noise and five mean-variance networks (a deep ensemble) with the same widths, epochs,
batches and schedule, trained on all training rows. `*_calibrated` are the same networks with the
calibration on held-out rows that the estimators have. A run that is recorded already is not made
again. With `--model` come what others use: `lightgbm`, `catboost`, `ngboost` (extra `peers`), and
`es5`, five mean-variance networks that stop early.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor, nn

from experiments import table_peers
from experiments.datasets import load_regression
from experiments.report import announce_report, markdown_table
from experiments.runs import Job, Line, result_directory, run_all, start
from pyro_dak.tables.ensemble import Stack, ensemble_plan, train
from pyro_dak.tables.estimators import DAKRegressor
from pyro_dak.tables.predictive import StudentPrediction, calibrate
from pyro_dak.tables.rows import (
    FEW_ROWS,
    Rows,
    default_batch_size,
    default_epochs,
    held_out_rows,
    without,
)
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
MODELS = ("dak", "nn", "dak5", "mv5")
COLUMNS = ("dak", "nn", "nn_calibrated", "dak5", "mv5", "mv5_calibrated")
PEERS = ("lightgbm", "catboost", "ngboost", "es5")
METRICS = (
    "rmse",
    "nlpd",
    "crps",
    "interval_score_95",
    "coverage_50",
    "coverage_95",
    "fit_seconds",
)
HEADLINE = {"rmse": "RMSE", "nlpd": "NLPD", "coverage_95": "95 % coverage", "fit_seconds": "s"}
HIDDEN = (64, 32, 64)
# Seed of the splits; others were used while the defaults were chosen.
_SPLITS = 2026
# Added to the variance of the networks, a softplus, as in the paper on deep ensembles; else some
# diverge.
_LEAST_VAR = 1e-6


class StackedMLP(Stack):
    """E perceptrons in one pass: y ~ N(mean(x), noise^2), with noise(x) if `heteroscedastic`."""

    def __init__(self, input_dim: int, size: int, heteroscedastic: bool, seed: int):
        torch.manual_seed(seed)
        widths = (input_dim, *HIDDEN, 2 if heteroscedastic else 1)
        self.tensors: dict[str, Tensor] = {}
        for i in range(len(widths) - 1):
            layers = [nn.Linear(widths[i], widths[i + 1]) for _ in range(size)]
            self.tensors[f"weight{i}"] = torch.stack([layer.weight.detach() for layer in layers])
            self.tensors[f"bias{i}"] = torch.stack([layer.bias.detach() for layer in layers])
        self.tensors["raw_noise"] = torch.full((size, 1), math.log(0.5))
        for tensor in self.tensors.values():
            tensor.requires_grad_()
        self.num_layers = len(widths) - 1

    def parameter_groups(self) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and biases, and the level of the noise."""
        network = [t for name, t in self.tensors.items() if name != "raw_noise"]
        return network, [self.tensors["raw_noise"]]

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance of y, `(E, N)` each."""
        h = x.mT.expand(len(self), -1, -1)
        for i in range(self.num_layers):
            h = torch.baddbmm(self.tensors[f"bias{i}"].unsqueeze(-1), self.tensors[f"weight{i}"], h)
            h = h.relu() if i < self.num_layers - 1 else h
        # Twice, as for a log scale, which it is where the noise is small.
        raw = 2 * self.tensors["raw_noise"].expand(-1, h.shape[-1])
        raw = raw + h[:, 1] if h.shape[1] == 2 else raw
        return h[:, 0], nn.functional.softplus(raw).add(_LEAST_VAR).log()

    def loss(self, x: Tensor, y: Tensor, weights: Tensor, num_data: Tensor) -> Tensor:
        """Sum over members of the Gaussian negative log-likelihood per datum."""
        mean, log_var = self.moments(x)
        log_lik = -0.5 * (math.log(2 * math.pi) + log_var)
        log_lik = log_lik - 0.5 * (y[:, 0] - mean).square() * (-log_var).exp()
        return -((log_lik * weights).sum(-1) / num_data).sum()


class MLPRegressor:
    """A network, or a deep ensemble, behind the interface of `DAKRegressor`."""

    def __init__(self, size: int, heteroscedastic: bool, seed: int, epochs: int | None):
        self.size, self.heteroscedastic, self.seed, self.epochs = (
            size,
            heteroscedastic,
            seed,
            epochs,
        )
        self.calibration, self.df, self.factor = 1.0, math.inf, 1.0

    def fit(self, x: np.ndarray, y: np.ndarray) -> None:
        """Train on all rows."""
        self.scale = x.mean(0), np.where(x.std(0) > 0, x.std(0), 1), y.mean(), y.std()
        target = torch.from_numpy((y - self.scale[2]) / self.scale[3]).float().unsqueeze(-1)
        self.rows = Rows(self._inputs(x), target, torch.ones(len(x)))
        epochs = self.epochs or default_epochs(len(x))
        self.plan = ensemble_plan(epochs, default_batch_size(len(x)), seed=self.seed)
        self.network = StackedMLP(x.shape[1], self.size, self.heteroscedastic, self.seed)
        train(self.network, self.rows, self.plan)

    def calibrate(self) -> None:
        """Scale and tails from networks of the same kind that did not see the held-out rows."""
        is_small = len(self.rows.x) < FEW_ROWS
        size = max(self.size, 5) if is_small else self.size
        network = StackedMLP(self.rows.x.shape[1], size, self.heteroscedastic, self.seed)
        held_out = held_out_rows(len(self.rows.x), size, 0.1, self.seed, overlap=self.size > 1)
        train(network, without(self.rows, held_out), replace(self.plan, seed=self.seed + 1))
        with torch.no_grad():
            everywhere = network.moments(self.rows.x)  # (E, N)
        mean, log_var = (part.gather(1, held_out).double().numpy() for part in everywhere)
        y, var = self.rows.y[held_out, 0].double().numpy(), np.exp(log_var)
        self.calibration, self.df, self.factor, _ = calibrate(y, mean, var, self.size)

    def _inputs(self, x: np.ndarray) -> Tensor:
        return torch.from_numpy((x - self.scale[0]) / self.scale[1]).float()

    def predict_dist(self, x: np.ndarray) -> StudentPrediction:
        """The mixture by its moments."""
        with torch.no_grad():
            mean, log_var = self.network.moments(self._inputs(x))
        mean, var = mean.double().numpy(), log_var.double().exp().numpy()
        factor = self.factor * self.scale[3] ** 2 / (1 - 2 / self.df)
        return StudentPrediction(
            self.scale[2] + self.scale[3] * mean.mean(0),
            factor * mean.var(0),
            factor * self.calibration * var.mean(0),
            self.df,
        )


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
    makers: dict[str, Callable[[], Any]] = {
        "dak": lambda: DAKRegressor(1, random_state=seed, epochs=epochs, progress=False),
        "dak5": lambda: DAKRegressor(5, random_state=seed, epochs=epochs, progress=False),
        "nn": lambda: MLPRegressor(1, False, seed, epochs),
        "mv5": lambda: MLPRegressor(5, True, seed, epochs),
        "es5": lambda: table_peers.EarlyStoppedEnsemble(
            lambda input_dim, seed: StackedMLP(input_dim, 5, True, seed), seed, epochs
        ),
    }
    trees = {} if epochs is None else {"trees": epochs}
    makers |= {peer: partial(kind, seed, **trees) for peer, kind in table_peers.PEERS.items()}
    check_choice("model", name, makers)
    return makers[name]()


def make_job(dataset: str, name: str, split: int, max_rows: int | None = None) -> Job:
    """The job of a model on a split, which is also its seed; few rows get two epochs."""
    return Job("estimators", dataset, name, split, {"split": split, "max_rows": max_rows})


def run(job: Job, tell: Callable[[str], None], data_root: str | None = None) -> dict[str, Any]:
    """Train on nine tenths of the rows, test on the rest."""
    torch.set_num_threads(1)
    name, split, max_rows = job.model, job.settings["split"], job.settings["max_rows"]
    x, y = (part.numpy() for part in load_regression(job.dataset, data_root))
    order = np.random.default_rng((_SPLITS, split)).permutation(len(x))[:max_rows]
    test, rows = np.split(order, [round(0.1 * len(order))])
    model = build(name, split, 2 if max_rows else None)
    start = time.perf_counter()
    model.fit(x[rows], y[rows, 0])
    seconds = time.perf_counter() - start
    metrics: dict[str, Any] = {name: score(model.predict_dist(x[test]), y[test, 0])}
    metrics[name]["fit_seconds"] = seconds
    fitted: dict[str, Any] = {"epochs": default_epochs(len(rows))}
    if isinstance(model, MLPRegressor):
        model.calibrate()
        metrics[f"{name}_calibrated"] = score(model.predict_dist(x[test]), y[test, 0])
        fitted |= {"calibration": model.calibration, "df": model.df}
    elif isinstance(model, DAKRegressor):
        fitted |= {"calibration": model.calibration_, "df": model.tail_df_}
        fitted |= {"best_epoch": model.history_.best_epoch}
    return {"metrics": metrics, "fitted": fitted}


Scores = dict[tuple[str, str], list[dict[str, float]]]


def scores_of(runs: list[Line]) -> Scores:
    """Metrics by data set and model, over the splits that all models of the set have."""
    by_split: dict[str, dict[int, dict[str, dict[str, float]]]] = {}
    for content in runs:
        splits = by_split.setdefault(content["config"]["dataset"], {})
        splits.setdefault(content["config"]["split"], {}).update(content["metrics"])
    scores: Scores = {}
    for dataset, splits in by_split.items():
        names = set().union(*splits.values())
        for metrics in splits.values():
            for name in names if names == set(metrics) else ():
                scores.setdefault((dataset, name), []).append(metrics[name])
    return scores


def average(scores: Scores, dataset: str, name: str, metric: str) -> tuple[float, float]:
    """The mean over the splits and its standard error; for times the median."""
    values = [m[metric] for m in scores.get((dataset, name), []) if metric in m]
    if not values:
        return math.nan, math.nan
    if metric == "fit_seconds":
        return float(np.median(values)), math.nan
    error = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(np.mean(values)), float(error)


def summary(scores: Scores) -> list[str]:
    """What the estimators achieve on how many sets, among those that have runs of all models."""
    names = (*MODELS, "nn_calibrated", "mv5_calibrated")
    sets = [
        s for s in SETS if all(math.isfinite(average(scores, s, name, "nlpd")[0]) for name in names)
    ]
    if not sets:
        return []

    def of(name: str, metric: str) -> np.ndarray:
        return np.array([average(scores, s, name, metric)[0] for s in sets])

    coverage = of("dak", "coverage_95")
    counts = {
        "`dak` has a better NLPD than `nn`": of("dak", "nlpd") < of("nn", "nlpd"),
        "`dak` has a better NLPD than `nn_calibrated`": of("dak", "nlpd")
        < of("nn_calibrated", "nlpd"),
        "`dak` has an RMSE at most 3 % above that of `nn`": of("dak", "rmse")
        <= 1.03 * of("nn", "rmse"),
        "95 % intervals of `dak` cover 0.90 to 0.98": (coverage >= 0.9) & (coverage <= 0.98),
        "`dak5` has a better NLPD than `mv5`": of("dak5", "nlpd") < of("mv5", "nlpd"),
        "`dak5` has a better NLPD than `mv5_calibrated`": of("dak5", "nlpd")
        < of("mv5_calibrated", "nlpd"),
    }
    lines = []
    for claim, holds in counts.items():
        others = ", ".join(s for s, is_so in zip(sets, holds, strict=True) if not is_so)
        exceptions = f" (not {others})" if others else ""
        lines.append(f"- {claim} on {int(holds.sum())} of {len(sets)} sets{exceptions}.")
    ratios = of("dak5", "fit_seconds") / of("dak", "fit_seconds")
    lines.append(
        f"- Training `dak5` takes {np.median(ratios):.2f} times as long as `dak` (median over the "
        f"sets; {ratios.min():.2f} to {ratios.max():.2f})."
    )
    return lines


def table(runs: list[Line]) -> str:
    """Means over the splits, one line per data set and metric, and a summary, as Markdown."""
    scores = scores_of(runs)
    columns = [*COLUMNS, *(name for name in PEERS if any(key[1] == name for key in scores))]
    rows = []
    for dataset in [name for name in SETS if any(key[0] == name for key in scores)]:
        splits = max(len(scores.get((dataset, name), [])) for name in columns)
        for metric in METRICS:
            cells = []
            for name in columns:
                mean, error = average(scores, dataset, name, metric)
                cell = "" if math.isnan(mean) else f"{mean:.3f}"
                cells.append(cell if math.isnan(error) else f"{cell} ± {error:.3f}")
            if any(cells):  # earlier runs have fewer metrics
                rows.append([dataset, str(splits), metric, *cells])
    lines = [markdown_table(["set", "splits", "metric", *columns], rows), "", *summary(scores)]
    return "\n".join(lines).rstrip() + "\n"


def main(
    dataset: Annotated[list[str] | None, typer.Option(help="Data sets; all nine.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="dak, dak5, nn, mv5; peers.")] = None,
    splits: Annotated[int, typer.Option(help="Random splits; 2 on the large sets.")] = 5,
    resume: Annotated[bool, typer.Option(help="Keep runs that are recorded.")] = True,
    data_root: Annotated[str | None, typer.Option(help="Else $PYRO_DAK_DATA.")] = None,
    out: Annotated[Path | None, typer.Option(help="Else results/estimators.")] = None,
    draft: Annotated[bool, typer.Option("--draft", help="Write below results/draft.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A draft: few rows, 2 epochs.")] = False,
) -> None:
    """Make the runs, then write the table."""
    jobs = [
        make_job(name, model_name, split, 60 if quick else None)
        for name in dataset or (["diabetes"] if quick else SETS)
        for split in range(1 if quick else min(splits, 2) if name in LARGE else splits)
        for model_name in model or MODELS
    ]
    directory = result_directory("estimators", out, draft or quick)
    run_fn = partial(run, data_root=data_root)
    run_all(jobs, run_fn, directory, HEADLINE, resume=resume)
    announce_report(directory)


if __name__ == "__main__":
    start(main)
