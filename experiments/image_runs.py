"""Runs of image classifiers: train, follow the learning curve, score, one json each."""

import itertools
import json
import shutil
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import models.images
from experiments.image_datasets import Images, load_images
from experiments.results import git_commit, read_json, write_json
from models.shared.baseline import Baseline
from models.shared.image_backbones import build_backbone
from models.shared.recipe import IMAGE_RECIPE, Recipe, seeded
from pyro_dak.diagnostics.scores import (
    accuracy,
    auroc,
    brier_score,
    expected_calibration_error,
)
from pyro_dak.prediction.predict import ClassPrediction
from pyro_dak.training.checkpoint import read_directory
from pyro_dak.training.plan import Checkpoints

__all__ = ["NUM_BINS", "Job", "run", "run_all", "score"]

NUM_BINS = 15
_NUM_HELD_OUT = 2000


@dataclass(frozen=True)
class Job:
    """One run: a model on a data set with a seed."""

    dataset: str
    model: str
    backbone: str
    recipe: Recipe
    options: dict[str, Any] = field(default_factory=dict)
    preset: str = "paper"
    held_out: bool = False
    full: bool = False
    data_root: str | None = None
    max_rows: int | None = None
    pretrained: str | None = None
    pretrained_epochs: int | None = None  # those of the network; else as many as here

    def path(self, results: Path) -> Path:
        """Where its result goes; those on held-out training images go apart."""
        recipe = self.recipe
        parts = [self.preset, self.model, f"b{recipe.batch_size}", f"e{recipe.epochs}"]
        parts += [f"seed{recipe.seed}"] + (["tuned"] if recipe.fixed_features else [])
        parts += [] if self.pretrained_epochs is None else [f"from-e{self.pretrained_epochs}"]
        parts += ["full"] if self.full else []
        parts += [] if self.max_rows is None else [f"n{self.max_rows}"]
        folder = results / self.dataset / ("held_out" if self.held_out else "")
        return folder / f"{'-'.join(parts)}.json"

    def checkpoints(self, results: Path) -> Path:
        """Where its checkpoints go."""
        path = self.path(results)
        return path.parent / "checkpoints" / path.stem

    def source(self) -> "Job | None":
        """The run whose features this one trains on, if it does."""
        if self.pretrained is None:
            return None
        epochs = self.pretrained_epochs or self.recipe.epochs
        recipe = replace(self.recipe, fixed_features=False, epochs=epochs)
        plain: dict[str, Any] = {"options": {}, "pretrained": None, "pretrained_epochs": None}
        return replace(self, model=self.pretrained, recipe=recipe, **plain)


def reliability(probs: Tensor, y: Tensor, num_bins: int = NUM_BINS) -> dict[str, list[float]]:
    """Rows, mean confidence and accuracy of each bin of the confidence; empty bins have zeros."""
    confidence, label = probs.max(-1)
    bins = (confidence * num_bins).ceil().long().sub(1).clamp(0, num_bins - 1)
    count = torch.bincount(bins, minlength=num_bins).double()
    sums = [
        torch.bincount(bins, weights=values.double(), minlength=num_bins) / count.clamp(min=1)
        for values in (confidence, label == y)
    ]
    return {
        "count": count.tolist(),
        "confidence": sums[0].tolist(),
        "accuracy": sums[1].tolist(),
    }


def score(prediction: ClassPrediction, y: Tensor, ood: ClassPrediction | None) -> dict[str, Any]:
    """Metrics of class probabilities, and of telling images of another kind apart."""
    probs = prediction.probs.double()
    metrics: dict[str, Any] = {
        "accuracy": float(accuracy(y, probs)),
        "nll": -float(prediction.log_prob(y).double().mean()),
        "ece": float(expected_calibration_error(y, probs, NUM_BINS)),
        "brier": float(brier_score(y, probs)),
        "reliability": reliability(probs, y),
    }
    if ood is not None:
        metrics["ood_entropy"] = float(auroc(prediction.entropy, ood.entropy))
        is_known = not bool(prediction.expected_entropy.isnan().all())
        # A plain network has no posterior: what is left of the difference is rounding.
        if is_known and float(prediction.mutual_information.abs().max()) > 1e-5:
            metrics["ood_mutual_information"] = float(
                auroc(prediction.mutual_information, ood.mutual_information)
            )
    return metrics


class Curve:
    """Scores on the test images after each epoch, written as they come.

    Args:
        path: of the result.
        head: what the json says besides.
        model: the classifier in training.
        images: the data.
    """

    def __init__(self, path: Path, head: dict[str, Any], model: Baseline, images: Images):
        self.path, self.head, self.model, self.images = path, head, model, images
        before = read_json(path) or {}
        self.rows: list[dict[str, Any]] = before.get("curve", [])

    def __call__(self, epoch: int, row: dict[str, float]) -> None:
        """Called by `fit` after each epoch; rows of a stopped run that come again are replaced."""
        prediction = self.model.predict(self.images.x_test)
        y = self.images.y_test
        self.rows = [old for old in self.rows if old["epoch"] < epoch]
        self.rows.append(
            {
                "epoch": epoch,
                "error": 1 - float(accuracy(y, prediction.probs)),
                "nll": -float(prediction.log_prob(y).mean()),
                **{k: row[k] for k in ("elbo_per_datum", "expected_log_lik", "kl")},
            }
        )
        write_json(self.path, self.head | {"status": "running", "curve": self.rows})
        print(f"{self.path.stem} epoch {epoch}: {self.rows[-1]}", flush=True)


def build(job: Job, images: Images) -> Baseline:
    """The classifier of a job, untrained."""
    with seeded(job.recipe.seed):
        features, feature_dim = build_backbone(job.backbone, images.mean, images.std)
    return models.images.build(
        job.model, features, feature_dim, images.num_classes, recipe=job.recipe, **job.options
    )


def load_job_images(job: Job) -> Images:
    """The images that a job trains and tests on."""
    images = load_images(job.dataset, job.data_root, job.full)
    if job.held_out:
        images = images.hold_out(min(_NUM_HELD_OUT, len(images.x_train) // 5))
    return images if job.max_rows is None else images.first(job.max_rows)


def load_features(features: nn.Module, directory: Path) -> None:
    """Give a feature extractor the weights it has in the checkpoints of an `ImageBaseline`."""
    prefix = "model.0."  # features are the first of the modules that such a run keeps
    tensors = read_directory(Checkpoints.newest(directory)).tensors
    features.load_state_dict(
        {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    )


def run(job: Job, results: Path) -> dict[str, Any]:
    """Train and test; goes on from checkpoints of the same job."""
    images = load_job_images(job)
    model = build(job, images)
    source = job.source()
    if source is not None:
        load_features(model.features, source.checkpoints(results))
    head = {"config": _description(job), "commit": git_commit()}
    curve = Curve(job.path(results), head, model, images)
    model.fit(images.x_train, images.y_train, [curve], job.checkpoints(results))
    ood = None if images.x_ood is None else model.predict(images.x_ood)
    metrics = score(model.predict(images.x_test), images.y_test, ood)
    metrics |= {
        "elbo": None if job.model == "nn" else curve.rows[-1]["elbo_per_datum"],
        "epoch_seconds": statistics.median(model.epoch_seconds) if model.epoch_seconds else None,
        "parameters": model.num_parameters,
        "parameters_added": model.num_added,
    }
    return head | {"status": "finished", "metrics": metrics, "curve": curve.rows}


def is_finished(job: Job, results: Path) -> bool:
    """Whether a job's result is there, complete, and made with the same settings."""
    found = read_json(job.path(results)) or {}
    return found.get("status") == "finished" and has_same_settings(job, found)


def has_same_settings(job: Job, found: dict[str, Any]) -> bool:
    """Whether a result, complete or not, is of a job with these settings."""
    now, then = _description(job), {"pretrained_epochs": None} | found["config"]
    then["recipe"] = asdict(IMAGE_RECIPE) | then["recipe"]  # older files lack newer settings
    for setting in ("progress", "device"):  # these change no result
        then["recipe"][setting] = now["recipe"][setting]
    return bool(then == json.loads(json.dumps(now)))


def _description(job: Job) -> dict[str, Any]:
    """A job as its result tells it: all but where the data are."""
    config = asdict(job)
    config.pop("data_root")
    return config


def set_aside(path: Path) -> None:
    """Give a file or folder, if it is there, a free name that ends with .replaced1 or so."""
    names = (path.with_name(f"{path.name}.replaced{number}") for number in itertools.count(1))
    if path.exists():
        path.rename(next(name for name in names if not name.exists()))


def run_all(jobs: Iterable[Job], results: Path, resume: bool) -> None:
    """Run the jobs that have no result yet, one after the other; checkpoints go beside them."""
    jobs = list(jobs)
    left = [job for job in jobs if not (resume and is_finished(job, results))]
    print(f"{len(jobs) - len(left)} of {len(jobs)} runs are there already; {len(left)} to make.")
    for job in left:
        path, checkpoints = job.path(results), job.checkpoints(results)
        found = read_json(path)
        if not resume:
            path.unlink(missing_ok=True)
            shutil.rmtree(checkpoints, ignore_errors=True)
        elif found is not None and not has_same_settings(job, found):
            # Checkpoints of other settings are no state to go on from.
            print(f"{path} is of other settings; it is set aside, and the run starts anew.")
            set_aside(path)
            set_aside(checkpoints)
        result = run(job, results)
        write_json(path, result)
        metrics = result["metrics"]
        print(
            f"{job.dataset} {path.stem}: accuracy {metrics['accuracy']:.4f} nll "
            f"{metrics['nll']:.4f} ece {metrics['ece']:.4f}",
            flush=True,
        )
