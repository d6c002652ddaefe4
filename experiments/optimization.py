"""Bayesian optimisation: how close a surrogate comes to the optimum in few evaluations.

    python -m experiments.optimization
    python -m experiments.optimization --problem branin --model DAK --seeds 3
    python -m experiments.optimization --quick

Every surrogate starts from the same points, a Sobol sequence of the seed, and chooses one point at
a time by log expected improvement, optimised from the same number of starts. Regret is the best
value so far minus the optimum. The peers are BoTorch's `SingleTaskGP`, the community's VBLL model
with its own settings but for at most 1,000 epochs a round, an ensemble of five networks, and random
points.

The defaults of `DAKModel` were chosen on other functions, with three to five seeds: six-hump camel,
Levy in 4 dimensions, Rosenbrock in 3, Griewank in 5 on a shifted box, and Michalewicz in 5. That
scales are shared was chosen, after the function in 20 dimensions had shown that something is wrong
there, on Levy in 4 to 20 dimensions, Rosenbrock and Rastrigin in 20, Griewank, Michalewicz, and
sums over dimensions of sines and of quartic functions of our own. Of
the four here Ackley's optimum is in the middle of its box, and the function in 20 dimensions,
Styblinski-Tang's, is a sum over dimensions, which suits an additive prior.
"""

import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from botorch import test_functions
from botorch.acquisition import LogExpectedImprovement
from botorch.exceptions.warnings import BotorchWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.model import Model
from botorch.optim import optimize_acqf
from botorch.posteriors import GPyTorchPosterior
from botorch.utils.sampling import draw_sobol_samples
from botorch_community.models.vblls import VBLLModel
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from experiments.curves import by_place, draw_panels, quartile_band
from experiments.peers import NetworkEnsemble
from experiments.report import announce_report, markdown_table
from experiments.runs import Job, Line, result_directory, run_all, start
from pyro_dak.botorch import DAKModel

HEADLINE = {"regret": "final regret", "seconds": "CPU seconds a round"}
# The function, points at the start, and evaluations in all.
PROBLEMS: dict[str, tuple[Callable[[], Any], int, int]] = {
    "branin": (test_functions.Branin, 6, 30),
    "hartmann6": (test_functions.Hartmann, 14, 60),
    "ackley5": (lambda: test_functions.Ackley(5), 12, 100),
    "styblinski_tang20": (lambda: test_functions.StyblinskiTang(20), 20, 150),
}
_VBLL_EPOCHS = 1000


class _Standardized(Model):
    """A model of standardised outcomes, with a posterior in their own units."""

    num_outputs, batch_shape = 1, torch.Size()

    def __init__(self, moments_fn: Callable[[Tensor], tuple[Tensor, Tensor]], y: Tensor):
        super().__init__()
        self.moments_fn, self.mean, self.std = moments_fn, y.mean(), y.std()

    def posterior(self, X: Tensor, *arguments: Any, **options: Any) -> GPyTorchPosterior:
        """Independent normals at X `(b, 1, d)`."""
        mean, var = self.moments_fn(X)
        covariance = torch.diag_embed(var * self.std.square())
        return GPyTorchPosterior(MultivariateNormal(self.mean + self.std * mean, covariance))


def _standardized(y: Tensor) -> Tensor:
    return (y - y.mean()) / y.std()


def build_dak(x: Tensor, y: Tensor, before: Any) -> DAKModel:
    """`DAKModel` with its defaults."""
    return DAKModel(x, y)


def build_gp(x: Tensor, y: Tensor, before: Any) -> SingleTaskGP:
    """`SingleTaskGP` with its defaults, fitted by BoTorch."""
    model = SingleTaskGP(x, y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def build_vbll(x: Tensor, y: Tensor, before: Any) -> Model:
    """The VBLL model of `botorch_community`, with its defaults, but for fewer epochs."""
    model = VBLLModel(in_features=x.shape[-1], out_features=1, hidden_features=64, num_layers=3)
    settings = {"num_epochs": _VBLL_EPOCHS}
    model.fit(x, _standardized(y), optimization_settings=settings)

    def moments(X: Tensor) -> tuple[Tensor, Tensor]:
        distribution = model.posterior(X).distribution
        return distribution.mean, distribution.variance

    return _Standardized(moments, y)


def build_ensemble(x: Tensor, y: Tensor, before: Any) -> Model:
    """The moments of five networks."""
    ensemble = NetworkEnsemble(x.shape[-1], 1)
    ensemble.fit(x, _standardized(y))

    def moments(X: Tensor) -> tuple[Tensor, Tensor]:
        f = ensemble(X)[..., 0]  # (5, b, q)
        return f.mean(0), f.var(0)

    return _Standardized(moments, y)


MODELS: dict[str, Callable[[Tensor, Tensor, Any], Any] | None] = {
    "DAK": build_dak,
    "SingleTaskGP": build_gp,
    "VBLL": build_vbll,
    "ensemble": build_ensemble,
    "random": None,
}


def optimize(
    problem: Any,
    build_fn: Callable[[Tensor, Tensor, Any], Any] | None,
    num_initial: int,
    num_evaluations: int,
    seed: int,
    tell: Callable[[str], None] = str,
) -> tuple[list[float], list[float]]:
    """The regret after each evaluation, and the CPU seconds of each round."""
    d = problem.dim
    low, high = problem.bounds.double()
    cube = torch.stack([torch.zeros(d), torch.ones(d)]).double()
    number = num_evaluations if build_fn is None else num_initial
    x = draw_sobol_samples(cube, num_initial, 1, seed=seed).squeeze(1)
    if build_fn is None:
        generator = torch.Generator().manual_seed(seed)
        more = torch.rand(number - num_initial, d, generator=generator, dtype=torch.float64)
        x = torch.cat([x, more])

    def value(x: Tensor) -> Tensor:
        return -problem(low + (high - low) * x).double().unsqueeze(-1)

    torch.manual_seed(seed)
    y, seconds, model = value(x), [], None
    while len(x) < num_evaluations and build_fn is not None:
        began = time.process_time()
        model = build_fn(x, y, model)
        function = LogExpectedImprovement(model, y.max())
        point, _ = optimize_acqf(
            function, cube, 1, num_restarts=4, raw_samples=128, options={"maxiter": 50}
        )
        seconds.append(time.process_time() - began)
        x, y = torch.cat([x, point]), torch.cat([y, value(point)])
        tell(f"evaluation {len(x)}, best {float(-y.max()):.4g}")
    best = (-y[:, 0]).cummin(0).values - problem.optimal_value
    return best.tolist(), seconds


def run(job: Job, tell: Callable[[str], None]) -> dict[str, Any]:
    """One optimisation with one surrogate from one seed."""
    torch.set_num_threads(1)
    problem = PROBLEMS[job.dataset][0]()
    sizes = (job.settings["num_initial"], job.settings["num_evaluations"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BotorchWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        regrets, seconds = optimize(problem, MODELS[job.model], *sizes, job.seed, tell)
    metrics = {"regret": regrets[-1]}
    if seconds:
        metrics["seconds"] = statistics.median(seconds)
    return {"metrics": metrics, "regrets": [float(f"{value:.6g}") for value in regrets]}


def make_job(problem: str, model: str, seed: int, num_evaluations: int | None = None) -> Job:
    """The job of one run; fewer evaluations for a quick one."""
    _, num_initial, default = PROBLEMS[problem]
    settings = {"num_initial": num_initial, "num_evaluations": num_evaluations or default}
    if model == "VBLL":
        settings["epochs"] = _VBLL_EPOCHS
    return Job("optimization", problem, model, seed, settings)


def table(runs: list[Line]) -> str:
    """Quartiles of the final regret over seeds, as Markdown."""
    rows = []
    for (problem, model), group in by_place(runs, PROBLEMS, MODELS).items():
        regrets = torch.tensor([run["metrics"]["regret"] for run in group], dtype=torch.float64)
        low, middle, high = (float(value) for value in quartile_band(regrets))
        seconds = [run["metrics"]["seconds"] for run in group if "seconds" in run["metrics"]]
        cells = [f"{middle:.3g}", f"{low:.3g} to {high:.3g}", str(len(group))]
        cells.append(f"{statistics.median(seconds):.2f}" if seconds else "")
        rows.append([problem, str(group[0]["config"]["num_evaluations"]), model, *cells])
    columns = ["problem", "evaluations", "surrogate", "median regret", "quartiles", "seeds"]
    text = "Regret after all evaluations, over seeds; every seed has its own initial points."
    return f"{text}\n\n{markdown_table([*columns, 'CPU seconds a round'], rows)}\n"


def draw(runs: list[Line], figures: Path) -> list[Path]:
    """The median regret by evaluation with its quartiles, a panel for each problem."""
    groups = by_place(runs, PROBLEMS, MODELS)
    path = figures / "regret.png"
    options: dict[str, Any] = {"labels": ("evaluations", "regret"), "is_log": True, "floor": 1e-6}

    def steps(run: Line) -> range:
        return range(1, len(run["regrets"]) + 1)

    return [draw_panels(groups, path, steps, key="regrets", band=quartile_band, **options)]


def main(
    problem: Annotated[list[str] | None, typer.Option(help="Of the four; all by default.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Surrogates; all by default.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each, from seed 0.")] = 10,
    resume: Annotated[bool, typer.Option(help="Keep runs that are recorded.")] = True,
    out: Annotated[Path | None, typer.Option(help="Else results/optimization.")] = None,
    draft: Annotated[bool, typer.Option("--draft", help="Write to results/draft.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A draft: two rounds of one.")] = False,
) -> None:
    """Optimise all functions with all surrogates, then write the table and the figure."""
    problems = ["branin"] if quick else problem or list(PROBLEMS)
    numbers = range(1 if quick else seeds)
    extra = PROBLEMS["branin"][1] + 2 if quick else None
    jobs = [
        make_job(name, surrogate, number, extra)
        for name in problems
        for number in numbers
        for surrogate in model or MODELS
    ]
    directory = result_directory("optimization", out, draft or quick)
    run_all(jobs, run, directory, HEADLINE, resume=resume)
    announce_report(directory)


if __name__ == "__main__":
    start(main)
