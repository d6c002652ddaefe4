"""Posteriors of the last layer side by side: every guide, NUTS, and the exact one where it exists.

    python -m experiments.hmc [--problem toy] [--quick]

Three problems: the toy function of one input, diabetes (regression), and digits with few units
(classification). A network is trained once, then held fixed, and every posterior is of the same
weights given the same features.
"""

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import matplotlib

matplotlib.use("Agg")
import torch
import typer
from sklearn.datasets import load_digits
from torch import Tensor, nn

import guides
from experiments import screen
from experiments.datasets import load_regression
from experiments.report import announce_report, markdown_table, newest, save_figure
from experiments.runs import Job, Line, result_directory, run_all, start
from experiments.toy import NOISE_SCALE, draw_toy
from pyro_dak import (
    DAK,
    CategoricalLikelihood,
    GaussianLikelihood,
    MeanFieldGuide,
    NaturalVI,
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
from pyro_dak.diagnostics.posterior_moments import response
from pyro_dak.diagnostics.summary import summary
from pyro_dak.inference.densities import cached_inputs, checked_data, log_likelihood
from pyro_dak.inference.draws import Posterior, as_guide, draw_posterior
from pyro_dak.validation import check_choice

TITLE = (
    "Posteriors of the last layer side by side: every guide, NUTS, and the exact one where it "
    "exists."
)
DRAWN = ("mean_field", "unit_block", "full_rank", "NUTS", "exact")


@dataclass(frozen=True)
class Effort:
    """How long everything runs."""

    network_epochs: int = 300
    guide_steps: int = 2000
    natural_steps: int = 100
    num_samples: int = 1000
    warmup_steps: int = 500
    num_chains: int = 2
    num_draws: int = 4000
    rows: int | None = None


QUICK = Effort(3, 5, 3, 30, 30, 1, 60, 60)


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
    """The model with a network that is stopped by a fifth of the rows, where there are enough.

    A network that has fitted its rows leaves a posterior that is sure of what it should not be.
    """
    stopping: dict[str, Any] = {"validation": 0.2, "patience": 20} if len(x) > 50 else {}
    options: dict[str, Any] = {"epochs": effort.network_epochs, "batch_size": 256, **stopping}
    fit(model, MeanFieldGuide(model), (x, y), seed=seed, progress=False, **options)
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
    problem: Problem, effort: Effort, seed: int, tell: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, float]]:
    """Every guide of the board, on the cached unit inputs, and its seconds.

    Natural guides, which no optimiser trains, take steps on all rows.
    """
    head = last_layer(problem.model)
    num_weights = head.num_functions * head.layer.num_weights
    h = cached_inputs(problem.model, problem.x)
    y = problem.y.double() if problem.y.is_floating_point() else problem.y
    fitted, seconds = {}, {}
    for name in guides.names():
        if name == "natural":
            continue
        tell(f"guide {name}")
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
                last_layer_learning_rate=None,  # that of the network
                clip_norm=None,
                seed=seed,
                progress=False,
            )
        fitted[name], seconds[name] = guide, time.perf_counter() - start
    for covariance in ("joint", "shared", "diagonal"):
        tell(f"guide natural, {covariance}")
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            natural = guides.build("natural", head, covariance=covariance)
            start = time.perf_counter()
            vi = NaturalVI(head, natural)
            for _ in range(effort.natural_steps):
                vi.step(h, y)
        name = f"natural, {covariance}"
        fitted[name], seconds[name] = natural, time.perf_counter() - start
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
    return save_figure(ax.figure, path, is_tight=False)


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


SHOWN = ("posterior", "sd_ratio", "predictive_sd_ratio", "elbo", "k_hat", "test_nlpd", "seconds")


def _cells(rows: list[dict[str, Any]], keys: Sequence[str]) -> list[list[str]]:
    """What a table shows of these columns: numbers with two digits."""
    values = [[row.get(key, "") for key in keys] for row in rows]
    return [[f"{v:.2f}" if isinstance(v, float) else str(v) for v in row] for row in values]


def table(runs: list[Line]) -> str:
    """A part for each problem: its posteriors, and the report of NUTS, as Markdown."""
    by_problem = {run["config"]["dataset"]: run for run in newest(runs, _problem)}
    parts = [_part(name, by_problem[name]) for name in PROBLEMS if name in by_problem]
    return f"{TITLE}\n\n" + "\n".join(parts)


def _problem(run: Line) -> str:
    return str(run["config"]["dataset"])


def _part(name: str, run: Line) -> str:
    rows, sizes = run["rows"], run["sizes"]
    columns = {key: title for key, title in COLUMNS.items() if any(key in row for row in rows)}
    size = f"{sizes['weights']} weights, {sizes['data']} rows"
    title = f"## {name}: {size}, against {run['reference']}"
    posteriors = markdown_table(list(columns.values()), _cells(rows, list(columns)))
    report = "\n".join(run["nuts"])
    return f"{title}\n\n{posteriors}\n\n```\n{report}\n```\n"


def _plain(value: Any) -> Any:
    """JSON has no infinities."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def run(job: Job, tell: Callable[[str], None], figures: Path) -> dict[str, Any]:
    """All posteriors of one problem: their scores; the figures are drawn on the way."""
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    effort = Effort(**job.settings)
    tell("network")
    problem = PROBLEMS[job.dataset](effort, job.seed)
    model, x, y = problem.model, problem.x, problem.y
    posteriors: dict[str, Any]
    posteriors, seconds = fit_guides(problem, effort, job.seed, tell)
    tell("NUTS")
    start = time.perf_counter()
    posteriors["NUTS"] = nuts = run_nuts(
        model,
        x,
        y,
        effort.num_samples,
        effort.warmup_steps,
        effort.num_chains,
        seed=job.seed,
        progress=False,
    )
    seconds["NUTS"] = time.perf_counter() - start
    if isinstance(model.likelihood, GaussianLikelihood):
        start = time.perf_counter()
        posteriors["exact"] = exact_posterior(model, x, y)
        seconds["exact"] = time.perf_counter() - start
    tell("comparison")
    comparison = compare_posteriors(
        model, posteriors, x, y, x_new=problem.x_test, num_samples=effort.num_draws
    )
    rows: list[dict[str, Any]] = []
    for row in comparison.summary():
        key = str(row["posterior"])
        rows.append(row | score(problem, posteriors[key], effort) | {"seconds": seconds[key]})
    draw_figures(job.dataset, problem, posteriors, comparison, figures)
    return {
        "rows": [{key: _plain(value) for key, value in row.items()} for row in rows],
        "reference": comparison.reference,
        "log_evidence": comparison.log_evidence,
        "nuts": nuts.report().splitlines(),
        "summary": {k: str(summary(model, p, x, y)) for k, p in posteriors.items() if k in DRAWN},
        "sizes": {"weights": len(comparison.labels), "data": len(x)},
    }


def main(
    problem: Annotated[list[str] | None, typer.Option(help="toy, diabetes, digits; all.")] = None,
    seed: Annotated[int, typer.Option(help="Of data, networks, guides and chains.")] = 0,
    resume: Annotated[bool, typer.Option(help="Keep runs that are recorded.")] = True,
    out: Annotated[Path | None, typer.Option(help="Else results/hmc.")] = None,
    draft: Annotated[bool, typer.Option("--draft", help="Write to results/draft/hmc.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A draft: few rows and steps.")] = False,
) -> None:
    """Fit all posteriors to all problems; write the table, the scores and the figures."""
    effort = QUICK if quick else Effort()
    directory = result_directory("hmc", out, draft or quick)
    jobs = []
    for name in problem or list(PROBLEMS):
        check_choice("problem", name, PROBLEMS)
        jobs.append(Job("hmc", name, "all", seed, asdict(effort)))
    run_fn = partial(run, figures=directory / "figures")
    for line in run_all(jobs, run_fn, directory, {}, resume=resume):
        title = f"{line['config']['dataset']}, against {line['reference']}"
        titles = [COLUMNS[key] for key in SHOWN]
        screen.show_table(title, titles, _cells(line["rows"], SHOWN))
    announce_report(directory)


if __name__ == "__main__":
    start(main)
