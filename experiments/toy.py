"""The toy example: twenty noisy points of a function drawn from a GP (the paper's Figure 2 and 3).

    python -m experiments.toy
    python -m experiments.toy --quick

The data are twenty points in [-7, 7] of a draw from a zero-mean GP with kernel exp(-(x - x')^2),
and a hundred test points in [-12, 12]. One figure shows five models with two standard deviations,
DAK without and with residual variance, and with an input unit and a joint posterior too; "DAK, S =
4" is trained with four draws of f as in the paper, the others by the closed form. Another figure
shows the effect of the learning rate of the last layer. The tables are over many draws, because one
picture can be lucky.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import typer
from torch import Tensor

import models
from experiments.report import announce_report, markdown_table, newest, save_figure
from experiments.runs import Job, Line, result_directory, run_all, start
from models.shared.recipe import Recipe
from pyro_dak.diagnostics.scores import gaussian_nlpd, rmse
from pyro_dak.prediction import Prediction
from pyro_dak.validation import check_choice

NOISE_SCALE = 0.1
TRAIN_RANGE, TEST_RANGE = 7.0, 12.0
# The paper's settings: full batch, learning rate 0.01, 1000 steps, MLP [64, 32], P = 2, S = 4.
RECIPE = Recipe(
    epochs=1000,
    batch_size=20,
    learning_rate=1e-2,
    schedule="constant",
    clip_norm=None,
    num_samples_train=4,
)
# The learning rates of the last layer in the second figure. Those of the first and the last model
# are the paper's.
RATES = {
    "exact DKL": (1e-2, 1e-3, 1e-4),
    "DAK": (1e-1, 1e-2, 1e-3),
    "DAK, S = 4": (1e-1, 1e-2, 1e-3),
}
_LAST = 20  # steps over which the final loss is a mean
HEADLINE = {
    "rmse_inside": "RMSE inside",
    "nlpd_inside": "NLPD inside",
    "coverage_inside": "coverage inside",
    "coverage_outside": "coverage outside",
}
# Every Gaussian process is told the noise. DAK's lengthscale is in units of the grid, of which the
# training points take up about six tenths. The scales are fixed, so that no unit switches off; they
# were chosen on the draws 0 to 5, which are not in the table.
NOISE: dict[str, Any] = {"noise_scale": NOISE_SCALE, "learn_noise": False}
DAK_OPTIONS: dict[str, Any] = {
    "num_units": 2,
    "level": 7,
    "lengthscale": 0.05,
    "unit_scale": 0.8,
    **NOISE,
}


@dataclass(frozen=True)
class Toy:
    """One draw: noisy training points, and the function at the test points; columns `(N, 1)`."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    f_test: Tensor


def draw_toy(seed: int) -> Toy:
    """A function from the GP, seen at twenty points with noise."""
    generator = torch.Generator().manual_seed(seed)
    x = TRAIN_RANGE * (2 * torch.rand(20, 1, generator=generator, dtype=torch.float64) - 1)
    x = x.sort(0).values
    x_test = torch.linspace(-TEST_RANGE, TEST_RANGE, 100, dtype=torch.float64).unsqueeze(-1)
    inputs = torch.cat([x, x_test])
    K = (-(inputs - inputs.mT).square()).exp() + 1e-8 * torch.eye(len(inputs), dtype=x.dtype)
    normal = torch.randn(len(inputs), 1, generator=generator, dtype=x.dtype)
    f = torch.linalg.cholesky(K) @ normal
    noise = NOISE_SCALE * torch.randn(20, 1, generator=generator, dtype=x.dtype)
    return Toy(x.float(), (f[:20] + noise).float(), x_test.float(), f[20:].float())


# With the input as a third unit, and the exact posterior of the last layer at the trained features.
# Its scales were chosen on the same draws, by the sum of the NLPDs inside and outside: of 0.4, 0.5,
# 0.6, 0.65 and 0.8 the second.
JOINT_OPTIONS: dict[str, Any] = {
    "residual_variance": True,
    "input_units": True,
    "joint_posterior": True,
    "unit_scale": 0.5,
}


def _dak(board_name: str = "dak_cf", **options: Any) -> Callable[[Recipe], Any]:
    options = DAK_OPTIONS | options
    return lambda recipe: models.build(board_name, 1, feature_dim=32, recipe=recipe, **options)


# Each makes a model from a recipe. The exact GP is given the kernel that drew the function.
PANELS: dict[str, Callable[[Recipe], Any]] = {
    "exact GP": lambda recipe: models.build(
        "exact_gp",
        1,
        recipe=recipe,
        lengthscale=math.sqrt(0.5),
        learn_kernel=False,
        **NOISE,
    ),
    "DGP": lambda recipe: models.build("dgp", 1, recipe=recipe, **NOISE),
    "exact DKL": lambda recipe: models.build("exact_dkl", 1, feature_dim=2, recipe=recipe, **NOISE),
    "DAK": _dak(),
    "DAK, S = 4": _dak("dak_mc", closed_form_prediction=True),
    "DAK + residual": _dak(residual_variance=True),
    "DAK, input units, joint posterior": _dak(**JOINT_OPTIONS),
    "NN": lambda recipe: models.build("nn", 1, feature_dim=32, recipe=recipe),
}


def score(prediction: Prediction, toy: Toy) -> dict[str, float]:
    """RMSE, NLPD and 95 % coverage of the true function, inside and outside the training range."""
    inside = toy.x_test.abs() <= TRAIN_RANGE
    half = 1.959964 * prediction.epistemic.sqrt()
    covered = (toy.f_test - prediction.mean).abs() <= half
    scores = {}
    for name, rows in (("inside", inside), ("outside", ~inside)):
        f, mean = toy.f_test[rows].double(), prediction.mean[rows].double()
        scores[f"rmse_{name}"] = float(rmse(f, mean))
        scores[f"nlpd_{name}"] = float(gaussian_nlpd(f, mean, prediction.variance[rows].double()))
        scores[f"coverage_{name}"] = float(covered[rows].double().mean())
    return scores


def make_job(model: str, seed: int, recipe: Recipe, rate: float | None = None) -> Job:
    """The job of a model on one draw; with a `rate`, that of its last layer in the figure."""
    recipe = replace(recipe, seed=seed, last_layer_learning_rate=rate)
    dataset = "toy" if rate is None else "learning rates"
    return Job("toy", dataset, model, seed, {"recipe": asdict(recipe)})


def run(job: Job, tell: Callable[[str], None], figure_seed: int) -> dict[str, Any]:
    """Fit a model to a draw and score it; for the figures keep its prediction and its losses."""
    torch.set_num_threads(1)
    toy = draw_toy(job.seed)
    model = PANELS[job.model](job.recipe)
    model.fit(toy.x, toy.y)
    prediction = model.predict(toy.x_test)
    content: dict[str, Any] = {"metrics": score(prediction, toy)}
    losses = model.history.column("loss") if model.history.rows else []
    if losses:
        content["metrics"]["final_loss"] = statistics.fmean(losses[-_LAST:])
    if job.seed == figure_seed:
        content["losses"] = losses[:: max(1, len(losses) // 100)]
        parts = {"mean": prediction.mean, "std": prediction.epistemic.sqrt()}
        content["prediction"] = {
            name: [round(value, 5) for value in part.flatten().tolist()]
            for name, part in parts.items()
        }
    return content


def table(runs: list[Line]) -> str:
    """The mean of each score over the draws, a row per model, and the learning rates."""
    scores: dict[str, list[dict[str, float]]] = {}
    panels = [run for run in runs if run["config"]["dataset"] == "toy"]
    for run in newest(panels, lambda run: (run["config"]["model"], run["config"]["seed"])):
        scores.setdefault(run["config"]["model"], []).append(run["metrics"])
    names = [name for name in next(iter(scores.values()))[0] if name != "final_loss"]
    rows = []
    for model in [name for name in PANELS if name in scores]:
        means = (statistics.fmean(row[name] for row in scores[model]) for name in names)
        rows.append([model, *(f"{value:.3f}" for value in means)])
    num_draws = max(len(values) for values in scores.values())
    text = f"Means over {num_draws} draws; coverage is of the true function."
    return "\n\n".join([text, markdown_table(["model", *names], rows), *_rate_table(runs)]) + "\n"


def _rate_runs(runs: list[Line]) -> dict[tuple[str, float], dict[int, Line]]:
    """The newest run of each draw, by model and rate."""
    found: dict[tuple[str, float], dict[int, Line]] = {}
    for run in runs:
        config = run["config"]
        rate = config["recipe"]["last_layer_learning_rate"]
        if config["dataset"] == "learning rates" and rate in RATES.get(config["model"], ()):
            found.setdefault((config["model"], rate), {})[config["seed"]] = run
    return {
        (model, rate): found[model, rate]
        for model, rates in RATES.items()
        for rate in rates
        if (model, rate) in found
    }


def _final_loss(run: Line) -> float:
    """The mean loss of the last steps; older lines have but every tenth loss."""
    return run["metrics"].get("final_loss", run["losses"][-1] if "losses" in run else math.nan)


def _rate_table(runs: list[Line]) -> list[str]:
    """Final losses and fits by learning rate, and how often the lowest loss has the best fit."""
    groups, rows = _rate_runs(runs), []
    for (model, rate), by_draw in groups.items():
        cells = [model, f"{rate:g}", str(len(by_draw))]
        losses = [_final_loss(run) for run in by_draw.values()]
        cells.append(f"{statistics.fmean(losses):.3f}")
        for name in ("rmse_inside", "nlpd_inside", "coverage_inside"):
            cells.append(f"{statistics.fmean(r['metrics'][name] for r in by_draw.values()):.3f}")
        rows.append([*cells, _share_of_best(groups, model, rate)])
    if not rows:
        return []
    text = (
        "Learning rates of the last layer, means over draws. In the last column: in how many draws "
        "the rate has the lowest loss, and in how many of these also the lowest NLPD inside."
    )
    columns = ["model", "rate", "draws", "final loss", "RMSE inside", "NLPD inside"]
    columns += ["coverage inside", "lowest loss, also best"]
    return [text, markdown_table(columns, rows)]


def _share_of_best(
    groups: dict[tuple[str, float], dict[int, Line]], model: str, rate: float
) -> str:
    """In how many draws this rate has the model's lowest loss, and then its lowest NLPD."""
    own = {other: runs for (name, other), runs in groups.items() if name == model}
    draws = set.intersection(*(set(by_draw) for by_draw in own.values()))
    lowest = [s for s in draws if rate == min(own, key=lambda other: _final_loss(own[other][s]))]
    best = [
        s
        for s in lowest
        if rate == min(own, key=lambda other: own[other][s]["metrics"]["nlpd_inside"])
    ]
    return f"{len(lowest)}, {len(best)}"


def draw(runs: list[Line], figures: Path) -> list[Path]:
    """The panels of one draw, and the learning rates, from the runs that kept their predictions."""
    kept = [run for run in runs if "prediction" in run]
    panels = {run["config"]["model"]: run for run in kept if run["config"]["dataset"] == "toy"}
    rates = _rate_runs([run for run in kept if run["config"]["dataset"] == "learning rates"])
    paths = [_draw_panels(figures / "panels.png", panels)] if panels else []
    return paths + ([_draw_rates(figures / "learning_rates.png", rates)] if rates else [])


def _draw_fit(axis: Any, run: Line, toy: Toy) -> None:
    """Mean and two standard deviations of f, with the points."""
    x = toy.x_test.flatten()
    mean, std = (torch.tensor(run["prediction"][name]) for name in ("mean", "std"))
    axis.fill_between(x, mean - 2 * std, mean + 2 * std, color="C0", alpha=0.25, lw=0)
    axis.plot(x, mean, color="C0", label="mean ± 2 std of f")
    axis.plot(toy.x.flatten(), toy.y.flatten(), "k.", ms=5, label="data")
    axis.set_ylim(-4, 4)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_panels(path: Path, runs: dict[str, Line]) -> Path:
    columns = -(-len(runs) // 2)
    size = (3.6 * columns, 5)
    figure, axes = plt.subplots(2, columns, figsize=size, sharex=True, sharey=True, squeeze=False)
    names = [name for name in PANELS if name in runs]
    for axis, name in zip(axes.flat, names, strict=False):
        toy = draw_toy(runs[name]["config"]["seed"])
        axis.axvspan(-TRAIN_RANGE, TRAIN_RANGE, color="0.96")
        _draw_fit(axis, runs[name], toy)
        x, f = toy.x_test.flatten(), toy.f_test.flatten()
        axis.plot(x, f, color="0.4", lw=1, ls="--", label="function")
        axis.set_title(name)
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    axes[0][0].legend(fontsize=7, loc="lower center")
    return save_figure(figure, path)


def _draw_rates(path: Path, groups: dict[tuple[str, float], dict[int, Line]]) -> Path:
    """A row for each model: the fits with their final losses by falling rate, then the losses."""
    names = list(dict.fromkeys(model for model, _ in groups))
    columns = 1 + max(len(RATES[name]) for name in names)
    size = (3 * columns, 2.7 * len(names))
    figure, axes = plt.subplots(len(names), columns, figsize=size, squeeze=False)
    for (model, rate), by_draw in groups.items():
        row, place = axes[names.index(model)], RATES[model].index(rate)
        run = list(by_draw.values())[-1]
        _draw_fit(row[place], run, draw_toy(run["config"]["seed"]))
        row[place].set_title(f"{model}, rate {rate:g}: loss {_final_loss(run):.2f}", fontsize=9)
        stride = run["config"]["recipe"]["epochs"] / len(run["losses"])
        steps = [stride * i for i in range(len(run["losses"]))]
        row[-1].plot(steps, run["losses"], lw=1, color=f"C{place}", label=f"{rate:g}")
    for row in axes:
        row[-1].set_xlabel("step")
        row[-1].set_title("loss per datum", fontsize=9)
        row[-1].legend(fontsize=7)
        row[-1].spines[["top", "right"]].set_visible(False)
    return save_figure(figure, path)


def label(job: Job) -> str:
    """What a job is called on the screen."""
    rate = job.recipe.last_layer_learning_rate
    return f"toy {job.model}, draw {job.seed}" + ("" if rate is None else f", rate {rate:g}")


def main(
    model: Annotated[list[str] | None, typer.Option(help="Of the panels; all.")] = None,
    draws: Annotated[int, typer.Option(help="Toy functions in the table.")] = 20,
    rate_draws: Annotated[int, typer.Option(help="Toy functions for the learning rates.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the first draw, the one in the figures.")] = 100,
    resume: Annotated[bool, typer.Option(help="Keep runs that are recorded.")] = True,
    out: Annotated[Path | None, typer.Option(help="Else results/toy.")] = None,
    draft: Annotated[bool, typer.Option("--draft", help="Write to results/draft/toy.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A draft: one draw, 20 steps.")] = False,
) -> None:
    """Fit all models to all draws, then write the table and the figures."""
    recipe = replace(RECIPE, epochs=20) if quick else RECIPE
    seeds = range(seed, seed + (1 if quick else draws))
    for name in model or ():
        check_choice("model", name, PANELS)
    jobs = [make_job(name, number, recipe) for number in seeds for name in model or PANELS]
    jobs += [
        make_job(name, number, recipe, rate)
        for number in range(seed, seed + rate_draws)
        for name, rates in RATES.items()
        if not model or name in model
        for rate in rates
    ]
    directory = result_directory("toy", out, draft or quick)
    run_fn = partial(run, figure_seed=seed)
    run_all(jobs, run_fn, directory, HEADLINE, resume=resume, label_fn=label)
    announce_report(directory)


if __name__ == "__main__":
    start(main)
