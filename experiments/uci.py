"""Regression on the UCI sets, five-fold cross-validation: Table 1 of the paper.

    python -m experiments.uci --dataset wine --model dak_cf --preset best
    python -m experiments.uci --quick

Every fold has a fresh model, optimiser and scaler, and sees its training rows only: statistics of
inputs and targets come from them. A run is one json under the results directory; a run that is
there already is not made again unless `--no-resume`.
"""

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from tqdm.auto import tqdm

import models
from experiments.datasets import load_regression
from experiments.results import git_commit, read_json, write_json
from models.shared.recipe import Recipe
from pyro_dak.diagnostics.scores import (
    gaussian_crps,
    gaussian_nlpd,
    interval_coverage,
    interval_width,
    rmse,
)
from pyro_dak.prediction.predict import Prediction
from pyro_dak.validation import check_choice

PAPER_SETS = ("wine", "gas", "parkinsons", "kin40k", "protein", "keggdirected")
BASELINES = ("nn", "nn_svgp", "svdkl", "avdkl")
MODELS = ("dak_cf", "dak_mc", *BASELINES)
LEVELS = tuple(round(0.05 * i, 2) for i in range(1, 20))
# The noise variance of an untrained GPyTorch likelihood, through which the paper's NLPD is taken.
PAPER_NOISE_VAR = 0.6932


@dataclass(frozen=True)
class Preset:
    """How to prepare the data, how to train, and what else to tell each model."""

    standardize: bool
    recipe: Recipe
    options: dict[str, dict[str, Any]]


_PAPER_DAK = {"level": 3, "noise_scale": 0.1, "learn_noise": False, "scaling": "minmax"}
_BEST_DAK = {"level": 5, "init_scale": 0.3, "relu_output": True}


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
        },
    ),
    # Chosen on rows held out from the training part of fold 0. AV-DKL has a tanh on its features.
    "best": Preset(
        standardize=True,
        recipe=Recipe(epochs=100, learning_rate=2e-2, optimizer="adamw", weight_decay=1e-2),
        options={
            "dak_cf": _BEST_DAK,
            "dak_mc": _BEST_DAK,
            "nn": {"relu_output": True},
            "nn_svgp": {"relu_output": True},
            "svdkl": {"relu_output": True, "is_dense": True},
        },
    ),
}


@dataclass(frozen=True)
class Job:
    """One run: a fold of a data set with a model."""

    dataset: str
    model: str
    feature_dim: int
    preset: str
    fold: int
    num_folds: int
    seed: int
    device: str
    data_root: str | None
    max_rows: int | None
    epochs: int | None

    def path(self, results: Path) -> Path:
        """Where its result goes."""
        name = f"{self.model}-{self.feature_dim}-fold{self.fold}of{self.num_folds}.json"
        return results / self.preset / self.dataset / name


def folds(num_rows: int, num_folds: int, seed: int = 0) -> list[Tensor]:
    """Test rows of each fold: a random permutation cut into nearly equal parts."""
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
    std = var.sqrt()
    normal = torch.distributions.Normal(mean, std)
    pit = normal.cdf(y)
    lower, upper = normal.icdf(torch.tensor(0.025)), normal.icdf(torch.tensor(0.975))
    return {
        "rmse": float(rmse(y, mean)),
        "nlpd": float(gaussian_nlpd(y, mean, var)),
        "nlpd_paper": float(gaussian_nlpd(y, mean, epistemic + PAPER_NOISE_VAR)),
        "crps": float(gaussian_crps(y, mean, var)),
        "coverage_95": float(interval_coverage(y, lower, upper)),
        "width_95": float(interval_width(lower, upper)),
        "coverage": [float(((pit - 0.5).abs() <= level / 2).double().mean()) for level in LEVELS],
    }


def has_twin(x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor) -> Tensor:
    """Which test rows have an exact copy, features and target, among the training rows."""
    seen = {row.numpy().tobytes() for row in torch.cat([x, y], -1)}
    rows = torch.cat([x_test, y_test], -1)
    return torch.tensor([row.numpy().tobytes() in seen for row in rows])


def run(job: Job) -> dict[str, Any]:
    """Train and test one fold."""
    torch.set_num_threads(1)
    preset = PRESETS[job.preset]
    x, y = load_regression(job.dataset, job.data_root)
    if job.max_rows is not None:
        x, y = x[: job.max_rows], y[: job.max_rows]
    rows, scale = prepare(x, y, folds(len(x), job.num_folds)[job.fold], preset.standardize)
    recipe = replace(preset.recipe, seed=job.seed + job.fold, device=job.device)
    if job.epochs is not None:
        recipe = replace(recipe, epochs=job.epochs)
    options = preset.options.get(job.model, {})
    model = models.build(
        job.model, x.shape[1], feature_dim=job.feature_dim, recipe=recipe, **options
    )
    start = time.perf_counter()
    model.fit(rows["x"], rows["y"])
    train_seconds = time.perf_counter() - start
    start = time.perf_counter()
    prediction = model.predict(rows["x_test"])
    predict_seconds = time.perf_counter() - start
    metrics = score(prediction, rows["y_test"], scale)
    twin = has_twin(rows["x"], rows["y"], rows["x_test"], rows["y_test"])
    metrics["twins"] = float(twin.double().mean())
    if 0 < twin.sum() < len(twin):
        own = ~twin
        mean, var = prediction.mean[own].double(), prediction.variance[own].double()
        target = rows["y_test"][own].double()
        metrics["rmse_distinct"] = scale * float(rmse(target, mean))
        metrics["nlpd_distinct"] = float(
            gaussian_nlpd(scale * target, scale * mean, scale**2 * var)
        )
    seconds = sorted(model.epoch_seconds)
    metrics |= {
        "epoch_seconds": seconds[len(seconds) // 2],
        "train_seconds": train_seconds,
        "predict_seconds": predict_seconds,
        "parameters": model.num_parameters,
    }
    config = asdict(job) | {"recipe": asdict(recipe), "options": options}
    config.pop("data_root")
    return {"config": config, "metrics": metrics, "commit": git_commit()}


def run_all(jobs: list[Job], results: Path, resume: bool, num_workers: int) -> None:
    """Run the jobs that have no result yet; each result is written as it comes."""
    left = [job for job in jobs if not (resume and read_json(job.path(results)))]
    print(f"{len(jobs) - len(left)} of {len(jobs)} runs are there already; {len(left)} to make.")
    with tqdm(total=len(left), unit="run") as bar:
        for job, result in _results(left, num_workers):
            write_json(job.path(results), result)
            metrics = result["metrics"]
            bar.write(
                f"{job.dataset:13s} {job.model:8s} {job.feature_dim:4d} fold {job.fold}: rmse "
                f"{metrics['rmse']:.4f} nlpd {metrics['nlpd']:.3f} coverage "
                f"{metrics['coverage_95']:.3f} {metrics['train_seconds']:.0f} s"
            )
            bar.update()


def _results(jobs: list[Job], num_workers: int) -> Any:
    if num_workers == 1:
        yield from ((job, run(job)) for job in jobs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context) as pool:
        futures = {pool.submit(run, job): job for job in jobs}
        for future in as_completed(futures):
            yield futures[future], future.result()


def main(
    dataset: Annotated[list[str] | None, typer.Option(help="Data sets; the paper's six.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Models of the board.")] = None,
    feature_dim: Annotated[list[int] | None, typer.Option(help="D_w; 64.")] = None,
    num_folds: Annotated[int, typer.Option("--folds", help="Folds of the data.")] = 5,
    only_folds: Annotated[int | None, typer.Option(help="Run the first so many only.")] = None,
    preset: Annotated[str, typer.Option(help="paper or best.")] = "best",
    epochs: Annotated[int | None, typer.Option(help="Instead of the preset's.")] = None,
    seed: Annotated[int, typer.Option(help="Of models and batches.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    jobs: Annotated[int, typer.Option(help="Processes, one thread each.")] = 1,
    resume: Annotated[bool, typer.Option(help="Keep runs that are there.")] = True,
    data_root: Annotated[str | None, typer.Option(help="Else $PYRO_DAK_DATA.")] = None,
    out: Annotated[Path, typer.Option(help="Directory of the results.")] = Path("results/uci"),
    quick: Annotated[bool, typer.Option(help="A few rows, one epoch, two models.")] = False,
) -> None:
    """Run the experiment, then write its tables and figures."""
    from experiments.uci_report import write_report

    check_choice("preset", preset, PRESETS)
    datasets = dataset or (["diabetes"] if quick else list(PAPER_SETS))
    names = model or (["dak_cf", "nn"] if quick else list(MODELS))
    for name in names:
        check_choice("model", name, models.names())
    todo = [
        Job(
            dataset=set_name,
            model=name,
            feature_dim=dim,
            preset=preset,
            fold=fold,
            num_folds=2 if quick else num_folds,
            seed=seed,
            device=device,
            data_root=data_root,
            max_rows=100 if quick else None,
            epochs=2 if quick and epochs is None else epochs,
        )
        for set_name in datasets
        for name in names
        for dim in (feature_dim or [64])
        for fold in range(2 if quick else min(only_folds or num_folds, num_folds))
    ]
    run_all(todo, out, resume, jobs)
    for path in write_report(out):
        print(path)


if __name__ == "__main__":
    typer.run(main)
