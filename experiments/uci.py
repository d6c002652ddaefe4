"""Regression on the UCI sets, five-fold cross-validation: Table 1 of the paper.

    python -m experiments.uci --dataset wine --model dak_cf --preset best
    python -m experiments.uci --dataset wine --preset paper --carry-over
    python -m experiments.uci --quick

Every fold has a fresh model, optimiser and scaler, and sees its training rows only: statistics of
inputs and targets come from them. `--carry-over` keeps the model from fold to fold instead, as the
paper's published script does: from the second fold on it has been trained on the rows that it is
tested on, which shows what that leak is worth. `--held-out` tests on a fifth of the training rows,
to choose settings by. A run that is recorded already is not made again unless `--no-resume`.
"""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import typer
from torch import Tensor

import models
from experiments import paper
from experiments.datasets import load_regression
from experiments.report import add_spread, announce_report, markdown_table, newest, save_figure
from experiments.runs import Job, Line, result_directory, run_all, start
from models.shared.backbones import BACKBONES
from models.shared.baseline import Baseline
from models.shared.recipe import Recipe
from pyro_dak.diagnostics.calibration import coverage_curve, gaussian_pit
from pyro_dak.diagnostics.scores import (
    gaussian_crps,
    gaussian_nlpd,
    interval_coverage,
    interval_width,
    rmse,
)
from pyro_dak.prediction import Prediction
from pyro_dak.validation import check_choice

PAPER_SETS = ("wine", "gas", "parkinsons", "kin40k", "protein", "keggdirected")
BASELINES = ("nn", "nn_bn", "nn_mean_variance", "nn_svgp", "svdkl", "avdkl")
MODELS = ("dak_cf", "dak_mc", *BASELINES)
LEVELS = tuple(round(0.05 * i, 2) for i in range(1, 20))
# The noise variance of an untrained GPyTorch likelihood, through which the paper's NLPD is taken.
PAPER_NOISE_VAR = 0.6932
HEADLINE = {
    "rmse": "RMSE",
    "nlpd": "NLPD",
    "coverage_95": "95 % coverage",
    "epoch_seconds": "s/epoch",
}
_ORDER = ["nn", "nn_bn", "nn_mean_variance", *list(paper.MODELS.values())[1:]]
_COVERAGE = (0.90, 0.98)  # what a 95 % interval may cover


@dataclass(frozen=True)
class Preset:
    """How to prepare the data, how to train, and what else to tell each model.

    `recipes` has the settings of training in which a model differs from the others.
    """

    standardize: bool
    recipe: Recipe
    options: dict[str, dict[str, Any]]
    recipes: dict[str, dict[str, Any]] = field(default_factory=dict)


_PAPER_DAK = {"level": 3, "noise_scale": 0.1, "learn_noise": False, "scaling": "minmax"}
_BEST_DAK = {"level": 5, "init_scale": 0.3, "relu_output": True}
_LEARNED_LENGTHSCALE = _BEST_DAK | {"learn_lengthscale": True}
# Chosen on rows held out from the training part of fold 0. AV-DKL has a tanh on its features.
_BEST = Preset(
    standardize=True,
    recipe=Recipe(epochs=100, learning_rate=2e-2, optimizer="adamw", weight_decay=1e-2),
    options={
        "dak_cf": _BEST_DAK,
        "dak_mc": _BEST_DAK,
        "nn": {"relu_output": True},
        "nn_bn": {"relu_output": True},
        "nn_mean_variance": {"relu_output": True},
        "nn_svgp": {"relu_output": True},
        "svdkl": {"relu_output": True, "is_dense": True},
    },
)

PRESETS = {
    # The paper's text, with the ELBO as the paper writes it.
    "paper": Preset(
        standardize=False,
        recipe=Recipe(
            epochs=100,
            learning_rate=1e-3,
            weight_decay=5e-4,
            decay_last_layer=True,
            schedule="constant",
            clip_norm=None,
        ),
        options={
            "dak_cf": _PAPER_DAK,
            "dak_mc": _PAPER_DAK,
            "nn": {"noise_scale": 0.1, "learn_noise": False},
            "nn_bn": {"noise_scale": 0.1, "learn_noise": False},
            "svdkl": {"is_dense": True},
        },
    ),
    "best": _BEST,
    # The same, where every unit learns its lengthscale; nothing was chosen for it.
    "lengthscale": replace(
        _BEST, options=_BEST.options | dict.fromkeys(("dak_cf", "dak_mc"), _LEARNED_LENGTHSCALE)
    ),
}


def make_job(
    dataset: str,
    model: str,
    preset: str,
    fold: int,
    num_folds: int,
    *,
    feature_dim: int = 64,
    seed: int = 0,
    epochs: int | None = None,
    max_rows: int | None = None,
    device: str = "cpu",
    backbone: str = "mlp",
    carry_over: bool = False,
    held_out: bool = False,
    head_rate: float | None = None,
) -> Job:
    """The job of one fold of a data set with a model.

    Args:
        dataset: the data set.
        model: the model of the board.
        preset: the settings.
        fold: the number of the fold.
        num_folds: how many there are.
        feature_dim: D_w.
        seed: the seed; that of a recipe is `seed + fold`.
        epochs: instead of the preset's.
        max_rows: use only so many rows.
        device: where it is trained.
        backbone: the paper's, or another of `models.shared.backbones`.
        carry_over: whether the model goes on from the fold before.
        held_out: whether it is tested on rows held out from the training rows of the fold.
        head_rate: the learning rate of the last layer, instead of the preset's.
    """
    chosen = PRESETS[preset]
    epochs = epochs or chosen.recipe.epochs
    own = chosen.recipes.get(model, {})
    if head_rate is not None:
        own = own | {"last_layer_learning_rate": head_rate}
    recipe = replace(chosen.recipe, seed=seed + fold, device=device, epochs=epochs, **own)
    settings = {
        "feature_dim": feature_dim,
        "preset": preset,
        "fold": fold,
        "num_folds": num_folds,
        "max_rows": max_rows,
        "recipe": asdict(recipe),
        "options": chosen.options.get(model, {}),
        "carry_over": carry_over,
        "held_out": held_out,
    }
    if backbone != "mlp":
        settings["options"] = settings["options"] | {"backbone": backbone}
    return Job("uci", dataset, model, seed, settings)


def folds(num_rows: int, num_folds: int, seed: int = 0) -> list[Tensor]:
    """The test rows of each fold: a random permutation cut into nearly equal parts."""
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
    return list(order.tensor_split(num_folds))


def prepare(
    x: Tensor, y: Tensor, test_rows: Tensor, standardize: bool
) -> tuple[dict[str, Tensor], float]:
    """Training and test rows in float32, and the scale that takes targets back to their units.

    The statistics are those of the training rows; a constant column stays as it is.
    """
    is_test = torch.zeros(len(x), dtype=torch.bool)
    is_test[test_rows] = True
    scale = 1.0
    if standardize:
        x_std, x_mean = torch.std_mean(x[~is_test], 0)
        y_std, y_mean = torch.std_mean(y[~is_test], 0)
        x = (x - x_mean) / torch.where(x_std > 0, x_std, 1)
        y = (y - y_mean) / y_std
        scale = float(y_std)
    x, y = x.float(), y.float()
    rows = {"x": x[~is_test], "y": y[~is_test], "x_test": x[is_test], "y_test": y[is_test]}
    return rows, scale


def score(prediction: Prediction, y: Tensor, scale: float) -> dict[str, Any]:
    """Metrics in the units of the data set."""
    mean, y = scale * prediction.mean.double(), scale * y.double()
    var = scale**2 * prediction.variance.double()
    epistemic = scale**2 * prediction.epistemic.double()
    normal = torch.distributions.Normal(mean, var.sqrt())
    lower, upper = normal.icdf(torch.tensor(0.025)), normal.icdf(torch.tensor(0.975))
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    return {
        "rmse": float(rmse(y, mean)),
        "nlpd": float(gaussian_nlpd(y, mean, var)),
        "nlpd_paper": float(gaussian_nlpd(y, mean, epistemic + PAPER_NOISE_VAR)),
        "nlpd_paper_twice": float(gaussian_nlpd(y, mean, var + PAPER_NOISE_VAR)),
        "crps": float(gaussian_crps(y, mean, var)),
        "coverage_95": float(interval_coverage(y, lower, upper)),
        "width_95": float(interval_width(lower, upper)),
        "coverage": coverage_curve(gaussian_pit(y, mean, var), levels).tolist(),
    }


def has_twin(x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor) -> Tensor:
    """Which test rows have an exact copy, features and target, among the training rows."""
    seen = {row.numpy().tobytes() for row in torch.cat([x, y], -1)}
    rows = torch.cat([x_test, y_test], -1)
    return torch.tensor([row.numpy().tobytes() in seen for row in rows])


def _twin_scores(prediction: Prediction, rows: dict[str, Tensor], scale: float) -> dict[str, float]:
    """The share of test rows with a twin, and the scores of those without where both exist."""
    twin = has_twin(rows["x"], rows["y"], rows["x_test"], rows["y_test"])
    scores = {"twins": float(twin.double().mean())}
    if 0 < twin.sum() < len(twin):
        own = ~twin
        mean, var = prediction.mean[own].double(), prediction.variance[own].double()
        target = rows["y_test"][own].double()
        scores["rmse_distinct"] = scale * float(rmse(target, mean))
        scores["nlpd_distinct"] = float(gaussian_nlpd(scale * target, scale * mean, scale**2 * var))
    return scores


def rows_of(job: Job, data_root: str | None = None) -> tuple[dict[str, Tensor], float]:
    """What a job trains and tests on, and the scale of its targets."""
    settings = job.settings
    x, y = load_regression(job.dataset, data_root)
    x, y = x[: settings["max_rows"]], y[: settings["max_rows"]]
    test_rows = folds(len(x), settings["num_folds"])[settings["fold"]]
    if settings.get("held_out"):
        is_kept = torch.ones(len(x), dtype=torch.bool)
        is_kept[test_rows] = False
        x, y = x[is_kept], y[is_kept]
        test_rows = folds(len(x), 5, seed=1)[0]
    return prepare(x, y, test_rows, PRESETS[settings["preset"]].standardize)


class Trainer:
    """Trains the model of a job; where jobs carry over, on the one of the fold before.

    It remembers one model. If that is not the one of the fold before, the folds before are trained
    again, so that a job has the same result in whatever order jobs come.
    """

    def __init__(self, data_root: str | None = None):
        self.data_root = data_root
        self.last: tuple[Job, Baseline] | None = None

    def __call__(self, job: Job, rows: dict[str, Tensor]) -> Baseline:
        """The trained model of a job."""
        model = self._before(job) or models.build(
            job.model,
            rows["x"].shape[1],
            feature_dim=job.settings["feature_dim"],
            recipe=job.recipe,
            **job.settings["options"],
        )
        if job.settings.get("carry_over"):
            model.recipe = job.recipe
            model.fit(rows["x"], rows["y"], keep_weights=True)
            self.last = (job, model)
        else:
            model.fit(rows["x"], rows["y"])
        return model

    def _before(self, job: Job) -> Baseline | None:
        """The model of a job as it stands after the fold before, if there is such a fold."""
        fold = job.settings["fold"]
        if not job.settings.get("carry_over") or fold == 0:
            return None
        recipe = job.settings["recipe"] | {"seed": job.settings["recipe"]["seed"] - 1}
        before = replace(job, settings=job.settings | {"fold": fold - 1, "recipe": recipe})
        if self.last is not None and self.last[0].key == before.key:
            return self.last[1]
        return self(before, rows_of(before, self.data_root)[0])


def run(
    job: Job,
    tell: Callable[[str], None],
    data_root: str | None = None,
    trainer: Trainer | None = None,
) -> dict[str, Any]:
    """Train and test one fold."""
    torch.set_num_threads(1)
    rows, scale = rows_of(job, data_root)
    start = time.perf_counter()
    model = (trainer or Trainer(data_root))(job, rows)
    train_seconds = time.perf_counter() - start
    start = time.perf_counter()
    prediction = model.predict(rows["x_test"])
    predict_seconds = time.perf_counter() - start
    assert isinstance(prediction, Prediction)
    seconds = sorted(model.epoch_seconds)
    metrics = score(prediction, rows["y_test"], scale) | _twin_scores(prediction, rows, scale)
    metrics |= {
        "epoch_seconds": seconds[len(seconds) // 2],
        "train_seconds": train_seconds,
        "predict_seconds": predict_seconds,
        "parameters": model.num_parameters,
    }
    return {"metrics": metrics}


class Key(NamedTuple):
    """What the runs have in common that are averaged over folds.

    The protocol is part of the preset: "paper, carried over" keeps the model from fold to fold.
    """

    preset: str
    dataset: str
    model: str
    feature_dim: int
    epochs: int = 100

    @classmethod
    def of(cls, run: Line) -> "Key":
        """The key of a run."""
        config = run["config"]
        preset = config["preset"] + (", carried over" if config.get("carry_over") else "")
        names = ("dataset", "model", "feature_dim")
        return cls(preset, *(config[name] for name in names), config["recipe"]["epochs"])

    @property
    def printed(self) -> dict[str, float]:
        """The paper's RMSE and NLPD of this set, model and width, if it has them."""
        return paper.REGRESSION.get((self.dataset, self.model, self.feature_dim), {})


Summaries = dict[Key, dict[str, Any]]
_METRICS = (
    "rmse",
    "nlpd",
    "nlpd_paper",
    "nlpd_paper_twice",
    "crps",
    "coverage_95",
    "epoch_seconds",
    "train_seconds",
    "parameters",
    "rmse_distinct",
)


def aggregate(runs: list[Line]) -> Summaries:
    """Mean and standard deviation over folds of every metric, for each `Key`.

    Runs on rows that are held out from the training rows choose settings, and are left out.
    """
    groups: dict[Key, list[Line]] = defaultdict(list)
    tested = [run for run in runs if not run["config"].get("held_out")]
    for run in newest(tested, _fold):
        groups[Key.of(run)].append(run)
    return {key: _summary(groups[key]) for key in sorted(groups, key=_place)}


def _fold(run: Line) -> tuple[Any, ...]:
    return *Key.of(run), run["config"]["fold"], run["config"]["num_folds"]


def _place(key: Key) -> tuple[Any, ...]:
    place = _ORDER.index(key.model) if key.model in _ORDER else len(_ORDER)
    return key.preset, key.dataset, key.feature_dim, key.epochs, place


def _summary(group: list[Line]) -> dict[str, Any]:
    summary: dict[str, Any] = {"folds": len(group)}
    for name in _METRICS:
        values = [run["metrics"][name] for run in group if name in run["metrics"]]
        if len(values) == len(group) or (values and name == "rmse_distinct"):
            add_spread(summary, name, values)
    levels = zip(*(run["metrics"]["coverage"] for run in group), strict=True)
    summary["coverage"] = [statistics.fmean(values) for values in levels]
    return summary


def misses(key: Key, summaries: Summaries) -> list[str]:
    """What a DAK falls short of: the paper's RMSE, calibration, and the baselines run beside it.

    A baseline that had fewer epochs and is better all the same counts as well.
    """
    if not key.model.startswith("dak"):
        return []
    own, found = summaries[key], []
    if own["rmse"] > key.printed.get("rmse", math.inf):
        found.append("RMSE above the paper's")
    if not _COVERAGE[0] <= own["coverage_95"] <= _COVERAGE[1]:
        found.append(f"coverage not in {_COVERAGE[0]:.2f}-{_COVERAGE[1]:.2f}")
    others = {
        other.model: s
        for other, s in summaries.items()
        if other._replace(model=key.model, epochs=key.epochs) == key
        and other.epochs <= key.epochs
        and not other.model.startswith("dak")
    }
    for metric in ("rmse", "nlpd"):
        better = [name for name, s in others.items() if s[metric] < own[metric]]
        if better:
            found.append(f"{metric.upper()} of {', '.join(better)} is lower")
    return found


def table(runs: list[Line]) -> str:
    """Means over folds beside the paper's numbers, and what the leak is worth, as Markdown."""
    text = (
        "Mean ± standard deviation over folds. *paper*: printed in the paper's Table 1. NLPD is "
        "that of the full predictive distribution. The paper's formula has a noise variance fixed "
        "at 0.693: in *NLPD once* it takes the place of the model's own noise, as for the paper's "
        "DAK, in *NLPD twice* it comes on top of it, as for the paper's baselines. "
        "*carried over*: the model is kept from fold to fold, as in the paper's script, so that it "
        "has seen its test rows."
    )
    columns = (
        "preset | set | D_w | model | folds | epochs | RMSE | *paper* | NLPD | NLPD once "
        "| NLPD twice | *paper* | CRPS "
        "| 95 % coverage | s/epoch | parameters | RMSE, distinct rows | misses"
    ).split(" | ")
    summaries = aggregate(runs)
    rows = []
    for key, s in summaries.items():
        printed = key.printed
        row = [key.preset, key.dataset, str(key.feature_dim), key.model, str(s["folds"])]
        row += [str(key.epochs), f"{s['rmse']:.4f} ± {s['rmse_std']:.4f}"]
        row += [str(printed.get("rmse", "")), f"{s['nlpd']:.3f} ± {s['nlpd_std']:.3f}"]
        row += [_cell(s, "nlpd_paper", 3), _cell(s, "nlpd_paper_twice", 3)]
        row += [str(printed.get("nlpd", "")), _cell(s, "crps", 4), _cell(s, "coverage_95", 3)]
        row += [f"{s['epoch_seconds']:.3f}", f"{s['parameters']:.0f}"]
        row += [_cell(s, "rmse_distinct", 4)]
        rows.append([*row, "; ".join(misses(key, summaries))])
    parts = [text, markdown_table(columns, rows)]
    return "\n\n".join([*parts, *_leak_table(summaries)]) + "\n"


def _cell(s: dict[str, Any], name: str, digits: int) -> str:
    return f"{s[name]:.{digits}f}" if name in s else ""


def _leak_table(summaries: Summaries) -> list[str]:
    """RMSE with a fresh model for each fold, and with one that is kept, where there are both."""
    rows = []
    for key, s in summaries.items():
        kept = summaries.get(key._replace(preset=f"{key.preset}, carried over"))
        if kept is not None:
            row = [key.dataset, str(key.feature_dim), key.model, str(key.epochs)]
            row += [f"{part['rmse']:.3f} ± {part['rmse_std']:.3f}" for part in (s, kept)]
            rows.append([*row, str(key.printed.get("rmse", ""))])
    if not rows:
        return []
    columns = ["set", "D_w", "model", "epochs", "RMSE, fresh", "carried over", "*paper*"]
    text = "What it is worth to keep the model from fold to fold:"
    return [text, markdown_table(columns, rows)]


def draw(runs: list[Line], figures: Path) -> list[Path]:
    """For each preset: scores, scores against time, and calibration."""
    summaries, paths = aggregate(runs), []
    for preset in sorted({key.preset for key in summaries}):
        chosen = {key: s for key, s in summaries.items() if key.preset == preset}
        name = preset.replace(", ", "-").replace(" ", "-")
        paths.append(_draw_scores(figures / f"scores-{name}.png", chosen))
        paths.append(_draw_time(figures / f"time-{name}.png", chosen))
        paths.append(_draw_calibration(figures / f"calibration-{name}.png", chosen))
    return paths


def _panels(
    summaries: Summaries, num_rows: int, width: float, height: float
) -> tuple[Any, Any, dict[str, dict[str, dict[str, Any]]], list[str]]:
    """A column of axes for each set, and the summaries by set and model, of the usual D_w.

    Of several budgets of a model the largest is shown.
    """
    dims = [key.feature_dim for key in summaries]
    dim = max(set(dims), key=dims.count)
    by_set: dict[str, dict[str, dict[str, Any]]] = {key.dataset: {} for key in summaries}
    for key, s in summaries.items():
        if key.feature_dim == dim:
            by_set[key.dataset][key.model] = s
    present = {key.model for key in summaries}
    names = [m for m in _ORDER if m in present] + sorted(present - set(_ORDER))
    size = (width * len(by_set), height)
    figure, axes = plt.subplots(num_rows, len(by_set), figsize=size, squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    for axis, dataset in zip(axes[0], by_set, strict=True):
        axis.set_title(dataset)
    return figure, axes, by_set, names


def _draw_scores(path: Path, summaries: Summaries) -> Path:
    figure, axes, by_set, names = _panels(summaries, 2, 2.4, 5)
    for row, metric in enumerate(("rmse", "nlpd")):
        axes[row][0].set_ylabel(metric.upper())
        for axis, found in zip(axes[row], by_set.values(), strict=True):
            for x, name in enumerate(names):
                if name in found:
                    std = found[name][f"{metric}_std"]
                    error = 0 if math.isnan(std) else std
                    axis.errorbar(x, found[name][metric], error, fmt="o", color=f"C{x}", capsize=3)
            axis.set_xticks(range(len(names)), names if row else [], rotation=60, ha="right")
            axis.set_xlim(-0.5, len(names) - 0.5)
    return save_figure(figure, path)


def _draw_time(path: Path, summaries: Summaries) -> Path:
    figure, axes, by_set, names = _panels(summaries, 1, 2.6, 2.8)
    for axis, found in zip(axes[0], by_set.values(), strict=True):
        for x, name in enumerate(names):
            if name in found:
                s = found[name]
                axis.loglog(s["train_seconds"], s["rmse"], "o", color=f"C{x}", label=name)
        axis.set_xlabel("training, s")
    axes[0][0].set_ylabel("RMSE")
    axes[0][-1].legend(fontsize=7)
    return save_figure(figure, path)


def _draw_calibration(path: Path, summaries: Summaries) -> Path:
    figure, axes, by_set, names = _panels(summaries, 1, 2.6, 2.8)
    for axis, found in zip(axes[0], by_set.values(), strict=True):
        axis.plot([0, 1], [0, 1], color="0.7", lw=1)
        for x, name in enumerate(names):
            if name in found:
                axis.plot(LEVELS, found[name]["coverage"], color=f"C{x}", lw=1.2, label=name)
        axis.set_xlabel("nominal")
    axes[0][0].set_ylabel("coverage")
    axes[0][-1].legend(fontsize=7)
    return save_figure(figure, path)


def main(
    dataset: Annotated[list[str] | None, typer.Option(help="Data sets; the paper's six.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Models of the board.")] = None,
    feature_dim: Annotated[list[int] | None, typer.Option(help="D_w; 64.")] = None,
    num_folds: Annotated[int, typer.Option("--folds", help="Folds of the data.")] = 5,
    only_folds: Annotated[int | None, typer.Option(help="Run only so many of them.")] = None,
    preset: Annotated[str, typer.Option(help=", ".join(PRESETS))] = "best",
    backbone: Annotated[str, typer.Option(help="mlp; residual_mlp for dak and nn.")] = "mlp",
    carry_over: Annotated[bool, typer.Option(help="Keep the model from fold to fold.")] = False,
    held_out: Annotated[bool, typer.Option(help="Test on a fifth of the training rows.")] = False,
    head_rate: Annotated[list[float] | None, typer.Option(help="Of the last layer.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Instead of the preset's.")] = None,
    seed: Annotated[int, typer.Option(help="Of models and batches.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    jobs: Annotated[int, typer.Option(help="Processes, one thread each.")] = 1,
    resume: Annotated[bool, typer.Option(help="Keep runs that are recorded.")] = True,
    data_root: Annotated[str | None, typer.Option(help="Else $PYRO_DAK_DATA.")] = None,
    out: Annotated[Path | None, typer.Option(help="Else results/uci.")] = None,
    draft: Annotated[bool, typer.Option("--draft", help="Write to results/draft/uci.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A draft of 100 rows, 2 epochs.")] = False,
) -> None:
    """Make the runs, then write the table and the figures."""
    check_choice("preset", preset, PRESETS)
    check_choice("backbone", backbone, BACKBONES)
    names = model or (["dak_cf", "nn"] if quick else list(MODELS))
    for name in names:
        check_choice("model", name, models.names())
    num_folds = 2 if quick else num_folds
    todo = [
        make_job(
            set_name,
            name,
            preset,
            fold,
            num_folds,
            feature_dim=dim,
            seed=seed,
            epochs=epochs or (2 if quick else None),
            max_rows=100 if quick else None,
            device=device,
            backbone=backbone,
            carry_over=carry_over,
            held_out=held_out,
            head_rate=rate,
        )
        for set_name in dataset or (["diabetes"] if quick else PAPER_SETS)
        for name in names
        for dim in feature_dim or [64]
        for rate in head_rate or [None]
        for fold in range(min(only_folds or num_folds, num_folds))
    ]
    directory = result_directory("uci", out, draft or quick)
    run_all(
        todo,
        partial(run, data_root=data_root, trainer=Trainer(data_root)),
        directory,
        HEADLINE,
        resume=resume,
        num_workers=jobs,
        label_fn=label,
    )
    announce_report(directory)


def label(job: Job) -> str:
    """What a job is called on the screen."""
    rate = job.recipe.last_layer_learning_rate
    own = "" if rate is None else f", rate of the last layer {rate:g}"
    kept = " (carried over)" if job.settings["carry_over"] else ""
    return f"{job.dataset} {job.model}, fold {job.settings['fold']}{kept}{own}"


if __name__ == "__main__":
    start(main)
