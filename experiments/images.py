"""Image classifiers: train, follow the learning curve, score; then tables and figures."""

import json
import math
import shutil
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from torch import Tensor, nn

import models.images
from experiments import paper
from experiments.image_datasets import Images, load_images
from experiments.report import add_spread, announce_report, markdown_table, newest, save_figure
from experiments.runs import Job, Line, run_all, write_text
from models.shared.baseline import Baseline
from models.shared.image_backbones import build_backbone
from models.shared.recipe import Recipe, seeded
from pyro_dak.diagnostics.calibration import reliability_curve
from pyro_dak.diagnostics.scores import (
    accuracy,
    auroc,
    brier_score,
    expected_calibration_error,
)
from pyro_dak.prediction import ClassPrediction
from pyro_dak.training.checkpoint import Checkpoints

__all__ = [
    "HEADLINE",
    "NUM_BINS",
    "PLAIN",
    "draw",
    "make_job",
    "remove_checkpoints",
    "run",
    "run_jobs",
    "score",
    "table",
]

NUM_BINS = 15
# Networks without a posterior.
PLAIN = ("nn", "nn_bn")
HEADLINE = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "epoch_seconds": "s/epoch"}
_NUM_HELD_OUT = 2000
_MISSING = "—"


def make_job(
    dataset: str,
    model: str,
    backbone: str,
    recipe: Recipe,
    options: dict[str, Any] | None = None,
    *,
    preset: str = "paper",
    held_out: bool = False,
    full: bool = False,
    max_rows: int | None = None,
    pretrained: str | None = None,
    pretrained_epochs: int | None = None,
) -> Job:
    """The job of a model on a data set.

    Args:
        dataset: the data set.
        model: the model of the board.
        backbone: its feature extractor.
        recipe: the training.
        options: what the model is told besides.
        preset: the name of these settings.
        held_out: whether it is tested on training images that are held out, to choose settings.
        full: for CIFAR: all images instead of the subset.
        max_rows: use only so many images.
        pretrained: the model whose trained features it uses, if any.
        pretrained_epochs: the epochs of that model; by default as many as here.
    """
    settings = {
        "backbone": backbone,
        "recipe": asdict(recipe),
        "options": options or {},
        "preset": preset,
        "held_out": held_out,
        "full": full,
        "max_rows": max_rows,
        "pretrained": pretrained,
        "pretrained_epochs": pretrained_epochs,
    }
    return Job("images", dataset, model, recipe.seed, settings)


def source(job: Job) -> Job | None:
    """The run whose features a job trains on, if it does."""
    settings = job.settings
    if settings["pretrained"] is None:
        return None
    epochs = settings["pretrained_epochs"] or job.recipe.epochs
    same = {"last_layer_learning_rate": None, "last_layer_optimizer": None}  # as in the network
    recipe = asdict(replace(job.recipe, fixed_features=False, epochs=epochs, **same))
    plain = {"options": {}, "pretrained": None, "pretrained_epochs": None, "recipe": recipe}
    return replace(job, model=settings["pretrained"], settings=settings | plain)


def checkpoints(job: Job, directory: Path) -> Path:
    """Where the checkpoints of a job go; other settings have other checkpoints."""
    return directory / "checkpoints" / job.name


def score(prediction: ClassPrediction, y: Tensor, ood: ClassPrediction | None) -> dict[str, Any]:
    """Metrics of class probabilities, and of telling images of another kind apart."""
    probs = prediction.probs.double()
    curve = reliability_curve(y, probs, NUM_BINS)
    metrics: dict[str, Any] = {
        "accuracy": float(accuracy(y, probs)),
        "nll": -float(prediction.log_prob(y).double().mean()),
        "ece": float(expected_calibration_error(y, probs, NUM_BINS)),
        "brier": float(brier_score(y, probs)),
        "reliability": {
            "count": curve.num_rows.tolist(),
            "confidence": curve.confidence.tolist(),
            "accuracy": curve.accuracy.tolist(),
        },
    }
    if ood is not None:
        metrics["ood_entropy"] = float(auroc(prediction.entropy, ood.entropy))
        is_known = not bool(prediction.expected_entropy.isnan().all())
        # A plain network has no posterior: what is left of the difference is rounding.
        if is_known and float(prediction.mutual_information.abs().max()) > 1e-5:
            metrics["ood_mutual_information"] = float(
                auroc(prediction.mutual_information, ood.mutual_information)
            )
        if prediction.novelty_scores is not None:
            for name in ("leverage", "combined"):
                known, strange = (part.strangeness(name) for part in (prediction, ood))
                metrics[f"ood_{name}"] = float(auroc(known, strange))
    return metrics


class Curve:
    """Scores on the test images after each epoch, kept beside the checkpoints.

    Args:
        path: the file of a run that may be stopped and go on.
        model: the classifier in training.
        images: the data.
        tell: shows how far the run is.
    """

    def __init__(self, path: Path, model: Baseline, images: Images, tell: Callable[[str], None]):
        self.path, self.model, self.images, self.tell = path, model, images, tell
        self.rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []

    def __call__(self, epoch: int, row: dict[str, float]) -> None:
        """Called by `fit` after each epoch; rows of a stopped run that come again are replaced."""
        prediction = self.model.predict(self.images.x_test)
        assert isinstance(prediction, ClassPrediction)
        y = self.images.y_test
        error = 1 - float(accuracy(y, prediction.probs))
        new = {"epoch": epoch, "error": error, "nll": -float(prediction.log_prob(y).mean())}
        new |= {k: row[k] for k in ("elbo_per_datum", "expected_log_lik", "kl")}
        self.rows = [*(old for old in self.rows if old["epoch"] < epoch), new]
        write_text(self.path, json.dumps(self.rows))
        self.tell(f"epoch {epoch} of {self.model.recipe.epochs}, test error {100 * error:.2f} %")


def build(job: Job, images: Images) -> Baseline:
    """The classifier of a job, untrained."""
    with seeded(job.recipe.seed):
        features, feature_dim = build_backbone(job.settings["backbone"], images.mean, images.std)
    options = job.settings["options"]
    return models.images.build(
        job.model, features, feature_dim, images.num_classes, recipe=job.recipe, **options
    )


def load_job_images(job: Job, data_root: str | None = None) -> Images:
    """The images that a job trains and tests on."""
    images = load_images(job.dataset, data_root, job.settings["full"], split=job.seed)
    if job.settings["held_out"]:
        images = images.hold_out(min(_NUM_HELD_OUT, len(images.x_train) // 5))
    max_rows = job.settings["max_rows"]
    return images if max_rows is None else images.first(max_rows)


def load_features(features: nn.Module, directory: Path) -> None:
    """Give a feature extractor the weights it has in the checkpoints of an `ImageBaseline`."""
    prefix = "model.0."  # features are the first of the modules that such a run keeps
    tensors = Checkpoints.read_newest(directory).contents.tensors
    features.load_state_dict(
        {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    )


def run(
    job: Job, tell: Callable[[str], None], directory: Path, data_root: str | None = None
) -> dict[str, Any]:
    """Train and test; the run goes on from checkpoints of the same job."""
    images = load_job_images(job, data_root)
    model = build(job, images)
    before = source(job)
    if before is not None:
        kept = checkpoints(before, directory)
        # Done already, unless the run of the network was recorded elsewhere, without checkpoints.
        build(before, images).fit(images.x_train, images.y_train, [], kept)
        load_features(model.features, kept)
    folder = checkpoints(job, directory)
    curve = Curve(folder / "curve.json", model, images, tell)
    model.fit(images.x_train, images.y_train, [curve], folder)
    ood = None if images.x_ood is None else model.predict(images.x_ood)
    metrics = score(model.predict(images.x_test), images.y_test, ood)
    metrics |= {
        "elbo": None if job.model in PLAIN else curve.rows[-1]["elbo_per_datum"],
        "epoch_seconds": statistics.median(model.epoch_seconds) if model.epoch_seconds else None,
        "parameters": model.num_parameters,
        "parameters_added": model.num_added,
    }
    return {"metrics": metrics, "curve": curve.rows}


def remove_checkpoints(jobs: Iterable[Job], directory: Path) -> None:
    """Let these jobs start anew."""
    for job in jobs:
        shutil.rmtree(checkpoints(job, directory), ignore_errors=True)


def run_jobs(
    jobs: Iterable[Job], directory: Path, data_root: str | None = None, resume: bool = True
) -> list[Line]:
    """Make the runs of one data set that are not recorded yet, and write the report."""
    jobs = list(jobs)
    if not resume:
        remove_checkpoints(jobs, directory)
    run_fn = partial(run, directory=directory, data_root=data_root)
    lines = run_all(jobs, run_fn, directory, HEADLINE, resume=resume, label_fn=label)
    announce_report(directory)
    return lines


def label(job: Job) -> str:
    """What a job is called on the screen."""
    tuned = " fine-tuned" if job.recipe.fixed_features else ""
    return f"{job.dataset} {job.model}{tuned}, seed {job.seed}"


class Key(NamedTuple):
    """What the runs have in common that are averaged over seeds."""

    preset: str
    model: str
    batch_size: int
    epochs: int
    fixed_features: bool
    pretrained_epochs: int | None
    max_rows: int | None = None
    full: bool = False

    @classmethod
    def of(cls, run: Line) -> "Key":
        """The key of a run."""
        config, recipe = run["config"], run["config"]["recipe"]
        sizes = (recipe["batch_size"], recipe["epochs"], recipe["fixed_features"])
        rows = (config.get("max_rows"), config.get("full", False))
        pretrained = config.get("pretrained_epochs")
        return cls(config["preset"], config["model"], *sizes, pretrained, *rows)

    @property
    def all_epochs(self) -> str:
        """Epochs, after those of the network on whose features the last layer was trained."""
        if self.pretrained_epochs is None:
            return str(self.epochs)
        return f"{self.pretrained_epochs} + {self.epochs}"

    @property
    def images(self) -> str:
        """Which images of the set there are, of those for training and of those for testing."""
        if self.max_rows is not None:
            return f"first {self.max_rows}"
        return "full" if self.full else "all"

    @property
    def label(self) -> str:
        """A short name in figures."""
        tuned = " fine-tuned" if self.fixed_features else ""
        images = "" if self.images == "all" else f", {self.images} images"
        return f"{self.model}{tuned}, batch {self.batch_size}, {self.all_epochs} epochs{images}"

    @property
    def place(self) -> tuple[Any, ...]:
        """Where the rows stand in the table."""
        others = ["dak_jensen", "dak_features", "dak_natural"]
        order = ["nn", "nn_bn", *paper.MODELS.values(), *others]
        position = order.index(self.model) if self.model in order else len(order)
        rows = (self.full, self.max_rows or 0)
        budget = (self.epochs, self.pretrained_epochs or 0, self.fixed_features)
        return self.preset, rows, self.batch_size, position, budget


Summaries = dict[Key, dict[str, Any]]
_METRICS = (
    "accuracy",
    "nll",
    "ece",
    "elbo",
    "brier",
    "ood_entropy",
    "ood_mutual_information",
    "ood_leverage",
    "ood_combined",
    "parameters",
    "parameters_added",
    "epoch_seconds",
)


def aggregate(runs: list[Line]) -> Summaries:
    """Mean and standard deviation over seeds of every metric, and mean curves, for each `Key`.

    Runs on held-out training images are for choosing settings, and left out.
    """
    groups: dict[Key, list[Line]] = defaultdict(list)
    tested = [run for run in runs if not run["config"].get("held_out")]
    for run in newest(tested, _place_of_run):
        groups[Key.of(run)].append(run)
    return {key: _summary(groups[key]) for key in sorted(groups, key=lambda key: key.place)}


def _place_of_run(run: Line) -> tuple[Any, ...]:
    return *Key.of(run), run["config"]["seed"]


def _summary(group: list[Line]) -> dict[str, Any]:
    summary: dict[str, Any] = {"runs": len(group)}
    for name in _METRICS:
        values = [run["metrics"].get(name) for run in group]
        if None not in values:
            add_spread(summary, name, values)
    kls = [_kl_per_datum(run["curve"][-1]) for run in group if run["curve"]]
    if len(kls) == len(group) and None not in kls:
        add_spread(summary, "kl", kls)
    for name in ("error", "nll", "elbo_per_datum"):
        columns = [[row[name] for row in run["curve"]] for run in group]
        summary[f"curve_{name}"] = [statistics.fmean(v) for v in zip(*columns, strict=False)]
    summary["bins"] = _pooled_bins([run["metrics"]["reliability"] for run in group])
    return summary


def _kl_per_datum(row: dict[str, Any]) -> float | None:
    """The KL of an epoch per datum; its row has the total, and the ELBO per datum."""
    kl, expected = row.get("kl"), row.get("expected_log_lik")
    if not kl or kl != kl or expected is None:
        return None
    return float(kl * row["elbo_per_datum"] / (expected - kl))


def _pooled_bins(curves: list[dict[str, list[float]]]) -> list[tuple[float, float, float]]:
    """Rows, mean confidence and accuracy of each bin that is not empty, over all runs."""
    sums: dict[int, list[float]] = {}
    for curve in curves:
        columns = (curve[name] for name in ("count", "confidence", "accuracy"))
        for count, confidence, share in zip(*columns, strict=True):
            if count > 0:
                total = sums.setdefault(math.ceil(confidence * NUM_BINS), [0.0, 0.0, 0.0])
                for place, value in enumerate((count, count * confidence, count * share)):
                    total[place] += value
    return [(n, confidence / n, share / n) for n, confidence, share in sums.values()]


def _cell(s: dict[str, Any], name: str, digits: int, factor: float = 1.0) -> str:
    if name not in s:
        return _MISSING
    spread = f" ± {factor * s[f'{name}_std']:.{digits}f}" if s["runs"] > 1 else ""
    return f"{factor * s[name]:.{digits}f}{spread}"


def table(runs: list[Line]) -> str:
    """Means over seeds beside the paper's numbers, as Markdown."""
    text = (
        "Mean ± standard deviation over seeds, on the test images; probabilities are averaged "
        "after the softmax. ELBO and KL: per datum in nats, means over the last epoch of training; "
        "a posterior whose bound is below that of guessing has not converged. AUROC: telling "
        "images of another data set apart by entropy, by mutual information, by the leverage of "
        "the features, and by entropy and leverage combined; no such image has chosen anything. "
        "*paper*: printed in its Tables 2 and 3 or its AV-DKL table, for the full data and its "
        "networks, with 20 (MNIST) or 200 (CIFAR) epochs; it averages logits before the softmax "
        "and weighs the KL otherwise, so its ELBO is not comparable. Seconds per epoch are of the "
        "machine and the load of each run: `python -m benchmarks --case images` compares side by "
        "side."
    )
    columns = (
        "preset | model | images | batch | epochs | runs | accuracy, % | *paper* | NLL | *paper* "
        "| ECE | *paper* | ELBO | *paper* | KL | Brier | AUROC entropy | AUROC MI | AUROC leverage "
        "| AUROC combined | parameters, M | added, M "
        "| *paper* | s/epoch"
    ).split(" | ")
    dataset = runs[-1]["config"]["dataset"]
    rows = [_row(dataset, key, s) for key, s in aggregate(runs).items()]
    return f"{text}\n\n{markdown_table(columns, rows)}\n"


def _row(dataset: str, key: Key, s: dict[str, Any]) -> list[str]:
    def printed(metric: str) -> str:
        value = paper.SCORES.get((dataset, key.model, key.batch_size, metric))
        if value is None or key.max_rows is not None:
            return _MISSING
        return f"{100 * value:.2f}" if metric == "accuracy" else f"{value:.3f}"

    cost = paper.COST.get((dataset, key.model))
    model = key.model + (" (fine-tuned)" if key.fixed_features else "")
    guessing = -math.log(100 if dataset == "cifar100" else 10)
    if s.get("elbo", 0.0) < guessing:
        model += " (not converged)"
    is_subset = dataset.startswith("cifar") and key.images == "all"
    cells = [key.preset, model, "subset" if is_subset else key.images]
    cells += [str(key.batch_size), key.all_epochs, str(s["runs"])]
    for name, digits, factor in (("accuracy", 2, 100), ("nll", 4, 1), ("ece", 4, 1)):
        cells += [_cell(s, name, digits, factor), printed(name)]
    cells += [_cell(s, "elbo", 3), printed("elbo"), _cell(s, "kl", 3), _cell(s, "brier", 4)]
    for score in ("entropy", "mutual_information", "leverage", "combined"):
        cells.append(_cell(s, f"ood_{score}", 4))
    cells += [f"{s['parameters'] / 1e6:.3f}", f"{s['parameters_added'] / 1e6:.3f}"]
    added = _MISSING if cost is None else f"{'' if key.model == 'nn' else '+'}{cost['parameters']}"
    return [*cells, added, f"{s['epoch_seconds']:.1f}" if "epoch_seconds" in s else _MISSING]


def draw(runs: list[Line], figures: Path) -> list[Path]:
    """Learning curves, and accuracy against confidence."""
    dataset, summaries = runs[-1]["config"]["dataset"], aggregate(runs)
    if not summaries:
        return []
    return [
        _draw_curves(figures / "curves.png", dataset, summaries),
        _draw_reliability(figures / "reliability.png", dataset, summaries),
    ]


def _draw_curves(path: Path, dataset: str, summaries: Summaries) -> Path:
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2))
    panels = (("error", "test error, %", 100), ("nll", "test NLL", 1))
    for color, (key, s) in enumerate(summaries.items()):
        for axis, (name, title, factor) in zip(axes, panels, strict=False):
            values = [factor * value for value in s[f"curve_{name}"]]
            axis.semilogy(range(1, len(values) + 1), values, color=f"C{color}", label=key.label)
            axis.set_ylabel(title)
        if key.model not in PLAIN:
            loss = [-value for value in s["curve_elbo_per_datum"]]
            axes[2].semilogy(range(1, len(loss) + 1), loss, color=f"C{color}")
    axes[2].set_ylabel("-ELBO per datum")
    for axis in axes:
        axis.set_xlabel("epoch")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_title(dataset)
    axes[1].legend(fontsize=6)
    return save_figure(figure, path)


def _draw_reliability(path: Path, dataset: str, summaries: Summaries) -> Path:
    num = len(summaries)
    figure, axes = plt.subplots(1, num, figsize=(2.4 * num, 2.8), squeeze=False, sharey=True)
    for axis, (key, s) in zip(axes[0], summaries.items(), strict=True):
        counts, confidences, shares = zip(*s["bins"], strict=True)
        axis.plot([0, 1], [0, 1], color="0.7", lw=1)
        sizes = [4 + 60 * count / sum(counts) for count in counts]
        axis.scatter(confidences, shares, s=sizes, color="C0")
        axis.set_title(key.label.replace(", ", "\n", 1), fontsize=7)
        axis.set_xlabel("confidence")
        axis.text(0.05, 0.9, f"ECE {s['ece']:.4f}", fontsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel(f"accuracy, {dataset}")
    return save_figure(figure, path)
