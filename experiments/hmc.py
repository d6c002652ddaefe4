"""Posteriors of the last layer side by side: every guide, NUTS, and the exact one where it exists.

    python -m experiments.hmc [--problem toy] [--quick]

Three problems: the toy function of one input, diabetes (regression), and digits with few units
(classification). A network is trained once, then held fixed, and every posterior is of the same
weights given the same features. Tables and figures go under results/hmc.
"""

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import typer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm.auto import tqdm

import guides
from experiments.datasets import load_regression
from experiments.results import git_commit, write_json
from experiments.toy import NOISE_SCALE, draw_toy
from pyro_dak import (
    DAK,
    CategoricalLikelihood,
    GaussianLikelihood,
    MeanFieldGuide,
    compare_posteriors,
    exact_posterior,
    fit,
    run_nuts,
)
from pyro_dak.diagnostics.checks import k_hat, loo, pit_values
from pyro_dak.diagnostics.comparison import PosteriorComparison
from pyro_dak.diagnostics.plots import (
    plot_comparison,
    plot_components,
    plot_coverage,
    plot_predictive_band,
    plot_reliability,
)
from pyro_dak.diagnostics.summary import summary
from pyro_dak.inference.densities import cached_inputs, checked_data, log_likelihood, response
from pyro_dak.inference.draws import Posterior, as_guide, draw_posterior

DRAWN = ("mean_field", "unit_block", "full_rank", "NUTS", "exact")


@dataclass(frozen=True)
class Effort:
    """How long everything runs."""

    network_epochs: int = 300
    guide_steps: int = 2000
    num_samples: int = 1000
    warmup_steps: int = 500
    num_chains: int = 2
    num_draws: int = 4000
    rows: int | None = None


QUICK = Effort(3, 5, 30, 30, 1, 60, 60)


@dataclass(frozen=True)
class Problem:
    """A trained model, whose features now stay as they are, with training and test rows."""

    model: DAK
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def _network(input_dim: int, feature_dim: int) -> nn.Module:
    return nn.Sequential(nn.Linear(input_dim, 64), nn.ReLU(), nn.Linear(64, feature_dim), nn.ReLU())


def _trained(model: DAK, x: Tensor, y: Tensor, effort: Effort, seed: int) -> DAK:
    guide = MeanFieldGuide(model)
    fit(model, guide, (x, y), epochs=effort.network_epochs, batch_size=256, seed=seed)
    return model.requires_grad_(False).eval()


def make_toy(effort: Effort, seed: int) -> Problem:
    """Twenty points of a function drawn from a GP; P = 2, M = 31: 63 weights."""
    toy = draw_toy(seed)
    model = DAK(
        _network(1, 32), 32, num_units=2, level=5, likelihood=GaussianLikelihood(NOISE_SCALE)
    )
    _trained(model, toy.x, toy.y, effort, seed)
    return Problem(model, toy.x, toy.y, toy.x_test, toy.f_test)


def _split(x: Tensor, y: Tensor, effort: Effort, seed: int) -> list[Tensor]:
    """Standardised training and test inputs, and their targets; a quarter of the rows is test."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    order = order[: effort.rows]
    test, train = order[: len(order) // 4], order[len(order) // 4 :]
    mean, std = x[train].mean(0), x[train].std(0).clamp(min=1e-6)
    x = (x - mean) / std
    return [
        part.float() if part.is_floating_point() else part
        for part in (x[train], y[train], x[test], y[test])
    ]


def make_diabetes(effort: Effort, seed: int) -> Problem:
    """442 patients; P = 8, M = 7: 57 weights."""
    x, y = load_regression("diabetes")
    x, y, x_test, y_test = _split(x, y, effort, seed)
    mean, std = y.mean(0), y.std(0)
    y, y_test = (y - mean) / std, (y_test - mean) / std
    model = DAK(_network(10, 32), 32, num_units=8, level=3, likelihood=GaussianLikelihood(0.5))
    _trained(model, x, y, effort, seed)
    return Problem(model, x, y, x_test, y_test)


def make_digits(effort: Effort, seed: int) -> Problem:
    """1797 images of digits; P = 4, M = 3, ten classes: 130 weights."""
    x, y = load_digits(return_X_y=True)
    x, y, x_test, y_test = _split(torch.as_tensor(x), torch.as_tensor(y).long(), effort, seed)
    model = DAK(
        _network(64, 16),
        16,
        num_units=4,
        num_outputs=10,
        level=2,
        likelihood=CategoricalLikelihood(),
    )
    _trained(model, x, y, effort, seed)
    return Problem(model, x, y, x_test, y_test)


PROBLEMS: dict[str, Callable[[Effort, int], Problem]] = {
    "toy": make_toy,
    "diabetes": make_diabetes,
    "digits": make_digits,
}


def last_layer(model: DAK) -> DAK:
    """A model of the unit inputs with the same last layer, in float64, that trains nothing."""
    P, grid = model.num_units, model.layer.activation.grid
    head = DAK(
        nn.Identity(),
        P,
        num_units=P,
        num_outputs=model.num_outputs,
        level=grid.level,
        bounds=grid.bounds,
        kernel=model.layer.activation.kernel,
        likelihood=copy.deepcopy(model.likelihood),
        scaling="none",
        embedding=False,
    )
    head.layer.load_state_dict(model.layer.state_dict())
    return head.double().requires_grad_(False).eval()


def fit_guides(
    problem: Problem, effort: Effort, seed: int
) -> tuple[dict[str, Any], dict[str, float]]:
    """Every guide of the board, trained on the cached unit inputs, and its seconds."""
    head = last_layer(problem.model)
    num_weights = head.num_functions * head.layer.num_weights
    h = cached_inputs(problem.model, problem.x)
    y = problem.y.double() if problem.y.is_floating_point() else problem.y
    fitted, seconds = {}, {}
    bar = tqdm(guides.names(), desc="guides")
    for name in bar:
        bar.set_postfix_str(name)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            # The network of the flow must be at least as wide as its input.
            options = {"hidden_dim": num_weights} if name == "flow" else {}
            guide = guides.build(name, head, **options).double()
            start = time.perf_counter()
            fit(
                head,
                guide,
                (h, y),
                epochs=effort.guide_steps,
                batch_size=len(h),
                learning_rate=0.05,
                clip_norm=None,
                seed=seed,
                progress=False,
            )
        fitted[name], seconds[name] = guide, time.perf_counter() - start
    return fitted, seconds


def score(problem: Problem, posterior: Posterior, effort: Effort) -> dict[str, float]:
    """k-hat, leave-one-out, and the negative log predictive density of the test rows."""
    model, x, y = problem.model, problem.x, problem.y
    options: dict[str, Any] = {"num_samples": effort.num_draws, "seed": 0}
    left_out = loo(model, posterior, x, y, **options)
    x_test, y_test = checked_data(model, problem.x_test, problem.y_test)
    draws = draw_posterior(model, posterior, x=x, **options)
    log_lik = log_likelihood(model, cached_inputs(model, x_test), y_test, draws.flat())
    nlpd = math.log(len(log_lik)) - log_lik.logsumexp(0)
    scores = {"test_nlpd": float(nlpd.mean()), "elpd_loo": left_out.elpd}
    scores["loo_rows_above_0.7"] = float(left_out.num_bad)
    if as_guide(posterior) is not None:
        scores["k_hat"] = k_hat(model, posterior, x, y, **options)
    return scores


def draw_figures(
    name: str,
    problem: Problem,
    posteriors: Mapping[str, Posterior],
    comparison: PosteriorComparison,
    out: Path,
) -> list[Path]:
    """Weights against the reference, calibration on test rows, and for the toy its bands."""
    drawn = {key: posteriors[key] for key in DRAWN if key in posteriors}
    fits = {key: comparison.fits[key] for key in drawn}
    shown = PosteriorComparison(**{**vars(comparison), "fits": fits})
    paths = [_save(plot_comparison(shown)[0], out / f"{name}-weights.png")]
    if name == "digits":
        x, y = checked_data(problem.model, problem.x_test, problem.y_test)
        h = cached_inputs(problem.model, x)
        probs = {
            key: response(problem.model, p, h, draw_posterior(problem.model, p, x=x, seed=0)).mean
            for key, p in drawn.items()
        }
        return [*paths, _save(plot_reliability(y, probs), out / f"{name}-reliability.png")]
    if name == "diabetes":
        pits = {
            key: pit_values(problem.model, p, problem.x_test, problem.y_test)
            for key, p in drawn.items()
        }
        paths.append(_save(plot_coverage(pits), out / f"{name}-coverage.png"))
    else:
        paths.append(draw_bands(problem, drawn, out / f"{name}-bands.png"))
    axes = plot_components(problem.model, posteriors["exact"], problem.x)
    return [*paths, _save(axes[0], out / f"{name}-components.png")]


def draw_bands(problem: Problem, posteriors: Mapping[str, Posterior], path: Path) -> Path:
    """Mean field, NUTS and the exact posterior of the toy: each with its band, on one axis."""
    chosen = {key: posteriors[key] for key in ("mean_field", "NUTS", "exact") if key in posteriors}
    x = torch.linspace(-9, 9, 400).unsqueeze(-1)
    ax = plot_predictive_band(problem.model, chosen, x, data=(problem.x, problem.y), noise=False)
    ax.set_xlim(-9, 9)
    return _save(ax, path)


def _save(ax: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    ax.figure.savefig(path, dpi=110)
    plt.close(ax.figure)
    return path


COLUMNS = {
    "posterior": "posterior",
    "mean_difference": "Δmean / sd",
    "sd_ratio": "sd ratio",
    "min_sd_ratio": "least",
    "predictive_mean_difference": "Δf / sd",
    "predictive_sd_ratio": "f sd ratio",
    "wasserstein_2": "W2",
    "evidence_gap": "evidence gap",
    "elbo": "ELBO",
    "k_hat": "k-hat",
    "elpd_loo": "elpd LOO",
    "test_nlpd": "test NLPD",
    "seconds": "seconds",
}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, with the columns that any of them has."""
    columns = {key: title for key, title in COLUMNS.items() if any(key in row for row in rows)}
    lines = ["| " + " | ".join(columns.values()) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        cells = [row.get(key, "") for key in columns]
        shown = [f"{c:.2f}" if isinstance(c, float) else str(c) for c in cells]
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _plain(value: Any) -> Any:
    """JSON has no infinities."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def run_problem(name: str, effort: Effort, seed: int, out: Path) -> str:
    """All posteriors of one problem; writes its json and figures, returns its part of the table."""
    torch.manual_seed(seed)
    problem = PROBLEMS[name](effort, seed)
    model, x, y = problem.model, problem.x, problem.y
    posteriors: dict[str, Any]
    posteriors, seconds = fit_guides(problem, effort, seed)
    start = time.perf_counter()
    posteriors["NUTS"] = run = run_nuts(
        model, x, y, effort.num_samples, effort.warmup_steps, effort.num_chains, seed=seed
    )
    seconds["NUTS"] = time.perf_counter() - start
    if isinstance(model.likelihood, GaussianLikelihood):
        start = time.perf_counter()
        posteriors["exact"] = exact_posterior(model, x, y)
        seconds["exact"] = time.perf_counter() - start
    comparison = compare_posteriors(
        model, posteriors, x, y, x_new=problem.x_test, num_samples=effort.num_draws
    )
    rows: list[dict[str, Any]] = []
    for row in comparison.summary():
        key = str(row["posterior"])
        rows.append(row | score(problem, posteriors[key], effort) | {"seconds": seconds[key]})
    words = {key: str(summary(model, p, x, y)) for key, p in posteriors.items() if key in DRAWN}
    write_json(
        out / f"{name}.json",
        {
            "rows": [{key: _plain(value) for key, value in row.items()} for row in rows],
            "reference": comparison.reference,
            "log_evidence": comparison.log_evidence,
            "nuts": run.report().splitlines(),
            "summary": words,
            "config": {
                **vars(effort),
                "seed": seed,
                "weights": len(comparison.labels),
                "data": len(x),
            },
            "commit": git_commit(),
        },
    )
    draw_figures(name, problem, posteriors, comparison, out)
    size = f"{len(comparison.labels)} weights, {len(x)} rows"
    title = f"## {name}: {size}, against {comparison.reference}"
    return f"{title}\n\n{table(rows)}\n\n```\n{run.report()}\n```\n"


def main(
    problem: Annotated[list[str] | None, typer.Option(help="toy, diabetes, digits; all.")] = None,
    seed: Annotated[int, typer.Option(help="Of data, networks, guides and chains.")] = 0,
    out: Annotated[Path, typer.Option(help="Directory of the results.")] = Path("results/hmc"),
    quick: Annotated[bool, typer.Option(help="A few rows and steps.")] = False,
) -> None:
    """Fit all posteriors to all problems; write tables, scores and figures."""
    torch.set_num_threads(1)
    effort = QUICK if quick else Effort()
    parts = []
    for name in problem or list(PROBLEMS):
        if name not in PROBLEMS:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(PROBLEMS)}.")
        parts.append(run_problem(name, effort, seed, out))
        print(parts[-1])
        (out / "table.md").write_text(f"{__doc__.splitlines()[0]}\n\n" + "\n".join(parts))
    print(out / "table.md")


if __name__ == "__main__":
    typer.run(main)
