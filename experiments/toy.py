"""The toy example: twenty noisy points of a function drawn from a GP (the paper's Figure 2 and 3).

    python -m experiments.toy
    python -m experiments.toy --quick

Twenty points in [-7, 7] of a draw from a zero-mean GP with kernel exp(-(x - x')^2), a hundred test
points in [-12, 12]. Five models with two standard deviations, DAK with and without residual
variance; the learning-rate figure; and a table over many draws, because one picture can be lucky.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import typer
from torch import Tensor
from tqdm.auto import tqdm

import models
from experiments.results import git_commit, write_json
from models.shared.recipe import Recipe
from pyro_dak.diagnostics.scores import gaussian_nlpd, rmse
from pyro_dak.prediction.predict import Prediction

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
# Every Gaussian process is told the noise. DAK's lengthscale is in units of the grid, of which the
# training points take up about six tenths; the scales are fixed, so that no unit switches off
# (chosen on the draws 0 to 5, which are not in the table).
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


def _dak(residual_variance: bool) -> Callable[[Recipe], Any]:
    options = DAK_OPTIONS | {"residual_variance": residual_variance}
    return lambda recipe: models.build("dak_cf", 1, feature_dim=32, recipe=recipe, **options)


# Each from a recipe to a regressor. The exact GP is given the kernel that drew the function.
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
    "DAK": _dak(residual_variance=False),
    "DAK + residual": _dak(residual_variance=True),
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


def run_panels(seed: int, recipe: Recipe) -> dict[str, tuple[Prediction, dict[str, float]]]:
    """Every model on one draw."""
    toy = draw_toy(seed)
    results = {}
    for name, build in PANELS.items():
        model = build(replace(recipe, seed=seed))
        model.fit(toy.x, toy.y)
        prediction = model.predict(toy.x_test)
        results[name] = (prediction, score(prediction, toy))
    return results


def draw_panels(path: Path, seed: int, results: dict[str, Any]) -> Path:
    """Mean and two standard deviations of f for each model, with the points and the function."""
    toy = draw_toy(seed)
    columns = -(-len(results) // 2)
    figure, axes = plt.subplots(2, columns, figsize=(3.6 * columns, 5), sharex=True, sharey=True)
    x = toy.x_test.flatten()
    for axis, (name, (prediction, _)) in zip(axes.flat, results.items(), strict=False):
        mean, std = prediction.mean.flatten(), prediction.epistemic.sqrt().flatten()
        axis.axvspan(-TRAIN_RANGE, TRAIN_RANGE, color="0.96")
        axis.fill_between(x, mean - 2 * std, mean + 2 * std, color="C0", alpha=0.25, lw=0)
        axis.plot(x, mean, color="C0", label="mean ± 2 std of f")
        axis.plot(x, toy.f_test.flatten(), color="0.4", lw=1, ls="--", label="function")
        axis.plot(toy.x.flatten(), toy.y.flatten(), "k.", ms=5, label="data")
        axis.set_title(name)
        axis.set_ylim(-4, 4)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(fontsize=7, loc="lower center")
    return _save(figure, path)


def draw_learning_rates(path: Path, seed: int, recipe: Recipe) -> tuple[Path, dict[str, Any]]:
    """Exact DKL and DAK at three learning rates of the last layer: fit above, loss below."""
    toy = draw_toy(seed)
    rates = (1e-3, 1e-2, 1e-1)
    figure, axes = plt.subplots(2, 6, figsize=(18, 5.5))
    losses: dict[str, Any] = {}
    x = toy.x_test.flatten()
    for column, (name, rate) in enumerate((n, r) for n in ("exact DKL", "DAK") for r in rates):
        model = PANELS[name](replace(recipe, seed=seed, last_layer_learning_rate=rate))
        model.fit(toy.x, toy.y)
        prediction = model.predict(toy.x_test)
        mean, std = prediction.mean.flatten(), prediction.epistemic.sqrt().flatten()
        top, bottom = axes[0][column], axes[1][column]
        top.fill_between(x, mean - 2 * std, mean + 2 * std, color="C0", alpha=0.25, lw=0)
        top.plot(x, mean, color="C0")
        top.plot(toy.x.flatten(), toy.y.flatten(), "k.", ms=4)
        top.set_ylim(-4, 4)
        top.set_title(f"{name}, rate {rate:g}")
        values = model.history.column("loss")
        losses[f"{name} {rate:g}"] = values[:: max(1, len(values) // 100)]
        bottom.plot(values, color="C3", lw=1)
        bottom.set_xlabel("step")
        for axis in (top, bottom):
            axis.spines[["top", "right"]].set_visible(False)
    axes[1][0].set_ylabel("loss per datum")
    return _save(figure, path), losses


def table(scores: dict[str, list[dict[str, float]]]) -> str:
    """Mean of each score over the draws, a row per model."""
    names = list(next(iter(scores.values()))[0])
    lines = [
        "| model | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for model, rows in scores.items():
        means = [statistics.fmean(row[name] for row in rows) for name in names]
        lines.append(f"| {model} | " + " | ".join(f"{value:.3f}" for value in means) + " |")
    return "\n".join(lines)


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def main(
    draws: Annotated[int, typer.Option(help="Toy functions in the table.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the first draw, the one drawn in figures.")] = 100,
    out: Annotated[Path, typer.Option(help="Directory of the results.")] = Path("results/toy"),
    quick: Annotated[bool, typer.Option(help="One draw, 20 steps.")] = False,
) -> None:
    """Fit all models to all draws; write the table, the scores and the figures."""
    torch.set_num_threads(1)
    recipe = replace(RECIPE, epochs=20) if quick else RECIPE
    scores: dict[str, list[dict[str, float]]] = {name: [] for name in PANELS}
    paths = []
    for number in tqdm(range(1 if quick else draws), unit="draw"):
        results = run_panels(seed + number, recipe)
        if number == 0:
            paths.append(draw_panels(out / "panels.png", seed, results))
        for name, (_, row) in results.items():
            scores[name].append(row)
    path, losses = draw_learning_rates(out / "learning_rates.png", seed, recipe)
    text = table(scores)
    write_json(
        out / "scores.json",
        {"scores": scores, "losses": losses, "seed": seed, "commit": git_commit()},
    )
    (out / "table.md").write_text(
        f"Means over {len(scores['DAK'])} draws; coverage is of the true function.\n\n{text}\n"
    )
    print(text)
    for written in (*paths, path, out / "scores.json", out / "table.md"):
        print(written)


if __name__ == "__main__":
    typer.run(main)
