"""`DAKClassifier()` on five tables beside what else people use for classes.

    pip install -e '.[peers]'
    python -m experiments.classifiers
    python -m experiments.classifiers --quick

`dak5` is `DAKClassifier()`. Beside it stand `lightgbm` and `catboost`, which stop early on a tenth
of the rows; `es5`, five networks of the same widths, each of which stops early on another tenth (a
deep ensemble); and `logistic`, logistic regression with its penalty from cross-validation.

Breast cancer, wine and digits come with scikit-learn. `quality` is the quality of the wines in the
set of that name, which has six values. `mnist` are the first 64 principal components of 5,000
images, tested on the 10,000 test images. The others are tested on random fifths with the shares of
all classes. A run that is recorded already is not made again.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from sklearn import datasets as sklearn_datasets
from sklearn.decomposition import PCA
from sklearn.model_selection import train_test_split

from experiments import table_peers
from experiments.datasets import load_regression
from experiments.estimators import OURS, by_split, differences_table, metric_rows, points_of
from experiments.image_datasets import load_images
from experiments.report import announce_report, markdown_table
from experiments.runs import Job, Line, result_directory, run_all, start
from experiments.table_networks import NetworkClassifier
from pyro_dak.diagnostics.scores import accuracy, expected_calibration_error
from pyro_dak.tables.estimators import DAKClassifier
from pyro_dak.validation import check_choice

SETS = ("breast_cancer", "wine_cultivars", "digits", "quality", "mnist")
MODELS = (OURS, "es5", "lightgbm", "catboost", "logistic")
METRICS = ("accuracy", "nll", "ece", "cpu_seconds")
HEADLINE = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "cpu_seconds": "s"}
# Seed of the splits, on which no default was chosen.
_SPLITS = 20261118
_NUM_IMAGES, _NUM_COMPONENTS = 5000, 64

Parts = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def load(dataset: str, split: int, data_root: str | None = None) -> Parts:
    """Inputs of training and test rows, then their labels, 0 to K - 1."""
    check_choice("dataset", dataset, SETS)
    if dataset == "mnist":
        return _mnist(split, data_root)
    if dataset == "quality":
        columns, alcohol = (part.numpy() for part in load_regression("wine", data_root))
        x = np.concatenate([columns[:, :10], alcohol], 1)
        labels = np.unique(columns[:, 10].round(3), return_inverse=True)[1]
    else:
        name = "wine" if dataset == "wine_cultivars" else dataset
        x, labels = getattr(sklearn_datasets, f"load_{name}")(return_X_y=True)
    seed = int(np.random.default_rng((_SPLITS, split)).integers(2**31))
    return tuple(train_test_split(x, labels, test_size=0.2, random_state=seed, stratify=labels))


def _mnist(split: int, data_root: str | None) -> Parts:
    """Principal components of images, learned from those to train on."""
    images = load_images("mnist", data_root)
    rows = np.random.default_rng((_SPLITS, split)).permutation(len(images.x_train))[:_NUM_IMAGES]
    x, x_test = (part.flatten(1).numpy() for part in (images.x_train[rows], images.x_test))
    components = PCA(_NUM_COMPONENTS, random_state=split).fit(x)
    x, x_test = components.transform(x), components.transform(x_test)
    return x, x_test, images.y_train[rows].numpy(), images.y_test.numpy()


def build(name: str, seed: int, epochs: int | None) -> Any:
    """The model with this name."""
    steps = () if epochs is None else (epochs,)
    makers: dict[str, Callable[[], Any]] = {
        OURS: lambda: DAKClassifier(random_state=seed, epochs=epochs, progress=False),
        "es5": lambda: NetworkClassifier(5, seed, epochs),
    }
    makers |= {peer: partial(kind, seed, *steps) for peer, kind in table_peers.CLASSIFIERS.items()}
    check_choice("model", name, makers)
    return makers[name]()


def make_job(dataset: str, name: str, split: int, max_rows: int | None = None) -> Job:
    """The job of a model on a split, which is also its seed; few rows get ten epochs."""
    settings = {"split": split, "splits": _SPLITS, "max_rows": max_rows}
    return Job("classifiers", dataset, name, split, settings)


def run(job: Job, tell: Callable[[str], None], data_root: str | None = None) -> dict[str, Any]:
    """Train, and score the probabilities of the test rows."""
    torch.set_num_threads(1)
    split, max_rows = job.settings["split"], job.settings["max_rows"]
    x, x_test, labels, labels_test = load(job.dataset, split, data_root)
    x, labels = x[:max_rows], labels[:max_rows]
    model = build(job.model, split, 10 if max_rows else None)
    start = time.process_time()
    model.fit(x, labels)
    seconds = time.process_time() - start
    scores = score(model.predict_proba(x_test), labels_test)
    return {"metrics": {job.model: scores | {"cpu_seconds": seconds}}}


def score(probs: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Accuracy, mean of -log probability in nats, and expected calibration error in 15 bins.

    No probability counts as less than 1e-7, for models that are certain.
    """
    p, y = torch.from_numpy(probs).double(), torch.from_numpy(labels)
    chosen = p.gather(1, y.unsqueeze(1)).clamp(min=1e-7)
    scores = {"accuracy": accuracy(y, p), "nll": -chosen.log().mean()}
    scores["ece"] = expected_calibration_error(y, p)
    return {name: float(value) for name, value in scores.items()}


def table(runs: list[Line]) -> str:
    """Means over the splits, paired differences and how many sets are won, as Markdown."""
    splits = by_split(runs)
    scores = {key: [found[k] for k in sorted(found)] for key, found in splits.items()}
    rows = metric_rows(scores, SETS, MODELS, METRICS)
    parts = [markdown_table(["set", "splits", "metric", *MODELS], rows)]
    parts.append(differences_table(splits, "nll", SETS, MODELS[1:]))
    parts.append("\n".join(points_of(splits, SETS, MODELS[1:], ("nll",))))
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def main(
    dataset: Annotated[list[str] | None, typer.Option(help="Data sets; all five.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Models; all five.")] = None,
    splits: Annotated[int, typer.Option(help="Random splits; at most 2 of mnist.")] = 5,
    resume: Annotated[bool, typer.Option(help="Keep runs that are recorded.")] = True,
    data_root: Annotated[str | None, typer.Option(help="Else $PYRO_DAK_DATA.")] = None,
    out: Annotated[Path | None, typer.Option(help="Else results/classifiers.")] = None,
    draft: Annotated[bool, typer.Option("--draft", help="Write below results/draft.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A draft: few rows, 10 epochs.")] = False,
) -> None:
    """Make the runs, then write the table."""
    jobs = [
        make_job(name, model_name, split, 100 if quick else None)
        for name in dataset or (["breast_cancer"] if quick else SETS)
        for split in range(1 if quick else min(splits, 2) if name == "mnist" else splits)
        for model_name in model or ([OURS, "es5", "logistic"] if quick else MODELS)
    ]
    directory = result_directory("classifiers", out, draft or quick)
    run_all(jobs, partial(run, data_root=data_root), directory, HEADLINE, resume=resume)
    announce_report(directory)


if __name__ == "__main__":
    start(main)
