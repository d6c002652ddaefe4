"""Image classification on MNIST: Tables 2 and 3 of the paper.

    python -m experiments.mnist --model dak_mc --model nn
    python -m experiments.mnist --dataset fashion
    python -m experiments.mnist --dataset digits
    python -m experiments.mnist --dataset digits --fine-tune --tune-epochs 10 --model dak_mc

The recipe is the paper's: a CNN with 128 features, P = 16 units, M = 63 inducing points on [-1, 1],
Adadelta with rate 1 that falls by 0.7 each epoch, weight decay 1e-4, 20 epochs. `digits` is a small
set that needs no file, with another random split for each seed; `fashion` has 8,000 images for the
same CNN and Adam. Two things are ours on MNIST: the start of DAK's units (`DAK_OPTIONS`), and Adam
for the variational last layers (`LAST_LAYER`). The KL moves the scales of q by gradients of order
1 / N, whose squares are far below the eps of Adadelta, so that they would hardly move.
`dak_features` is ours as well: it has a unit for each feature instead of an embedding. So is
`dak_natural`, whose joint posterior starts at the prior and is trained by natural gradients.
`nn_bn` is the network with batch normalisation of its features, the fair opponent. `--fine-tune`
trains the network with a linear output first and then, for the other models, the last layer alone
on its features, for `--tune-epochs`. A run that is recorded already is not made again, and one that
was stopped goes on.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import models.images
from experiments import images
from experiments.images import PLAIN, run_jobs
from experiments.runs import Job, result_directory, start
from models.shared.recipe import IMAGE_RECIPE, Recipe
from pyro_dak.validation import check_choice

RECIPES = {
    "mnist": replace(
        IMAGE_RECIPE,
        epochs=20,
        batch_size=128,
        optimizer="adadelta",
        learning_rate=1.0,
        weight_decay=1e-4,
        schedule="step",
    ),
    "digits": replace(IMAGE_RECIPE, batch_size=64),
    # Chosen for NN + BatchNorm on 1,600 held-out training images, among rates of 1e-3 and 3e-3, 6
    # and 12 epochs, and an output at the rate of the network or at ten times that.
    "fashion": replace(IMAGE_RECIPE, epochs=12, batch_size=128, learning_rate=3e-3),
}
BACKBONES = {"mnist": "cnn", "digits": "digits_cnn", "fashion": "cnn"}
MODELS = ("dak_natural", "dak_mc", "dak_jensen", "dak_features", "nn", "nn_bn")
# Chosen on held-out training images: the units start as straight lines, not as rough functions.
DAK_OPTIONS = {
    "mnist": {"linear_start": 8.0, "init_scale": 0.05},
    "digits": {},
    "fashion": {"linear_start": 8.0, "init_scale": 0.05},
}
# Chosen on held-out training images: an embedding into 16 units with a precision for each class on
# digits, a unit for each feature with one precision for all on clothes.
NATURAL_OPTIONS: dict[str, dict[str, Any]] = {
    "mnist": {"num_units": 16, "covariance": "joint", "prior_scale": 10.0},
    "digits": {"num_units": 16, "covariance": "joint", "prior_scale": 10.0},
    "fashion": {},
}
# Likewise, among 1.5e-3, 3e-3, 6e-3 and 1e-2 (NN + BatchNorm: among 1e-3, 3e-3 and 6e-3).
NATURAL_RECIPE: dict[str, dict[str, Any]] = {"fashion": {"learning_rate": 6e-3}}
# Models that are trained by the recipe's optimiser alone; the bound of NN+SVGP falls as well.
ONE_RATE = ("nn", "nn_svgp")
LAST_LAYER: dict[str, dict[str, Any]] = {
    "mnist": {"last_layer_optimizer": "adam", "last_layer_learning_rate": 1e-2},
    "digits": {},
    "fashion": {},
}


def options(dataset: str, name: str) -> dict[str, Any]:
    """What a model is told besides the recipe."""
    if name == "dak_natural":
        return NATURAL_OPTIONS[dataset]
    units = {} if name in (*PLAIN, "dak_features") else {"num_units": 16}
    return units | (DAK_OPTIONS[dataset] if name.startswith("dak") else {})


def recipe(dataset: str, name: str, is_tuned: bool = False) -> Recipe:
    """The training of a model; if `is_tuned`, of its last layer on given features."""
    own = NATURAL_RECIPE.get(dataset, {}) if name == "dak_natural" and not is_tuned else {}
    rates = {} if name in ONE_RATE else LAST_LAYER[dataset]
    return replace(RECIPES[dataset], fixed_features=is_tuned, **rates, **own)


def make_job(
    dataset: str,
    name: str,
    seed: int = 0,
    *,
    epochs: int | None = None,
    batch_size: int | None = None,
    tune_epochs: int | None = None,
    is_tuned: bool = False,
    settings: dict[str, Any] | None = None,
    **others: Any,
) -> Job:
    """The job of a model on a data set.

    Args:
        dataset: the data set.
        name: the model of the board.
        seed: the seed.
        epochs: instead of the recipe's.
        batch_size: instead of the recipe's.
        tune_epochs: those of the last layer on given features; by default as many.
        is_tuned: whether it has the features of the network with a linear output.
        settings: of the recipe, such as the device.
        others: those of `experiments.images.make_job`.
    """
    base = recipe(dataset, name, is_tuned)
    epochs = epochs or base.epochs
    own_epochs = (tune_epochs if is_tuned else None) or epochs
    own = replace(
        base,
        seed=seed,
        epochs=own_epochs,
        batch_size=batch_size or base.batch_size,
        **settings or {},
    )
    return images.make_job(
        dataset,
        name,
        BACKBONES[dataset],
        own,
        options(dataset, name),
        pretrained="nn" if is_tuned else None,
        pretrained_epochs=epochs if own_epochs != epochs else None,
        **others,
    )


def main(
    dataset: Annotated[str, typer.Option(help="mnist, fashion or digits.")] = "mnist",
    model: Annotated[list[str] | None, typer.Option(help="Models of the board.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Seeds; 0.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Instead of the recipe's.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="128, or the paper's 1024.")] = None,
    fine_tune: Annotated[bool, typer.Option(help="Last layers on features of the NN.")] = False,
    tune_epochs: Annotated[int | None, typer.Option(min=1, help="Of these; else as many.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    precision: Annotated[str | None, typer.Option(help="As in Lightning Fabric.")] = None,
    resume: Annotated[bool, typer.Option(help="Keep runs that are recorded.")] = True,
    data_root: Annotated[str | None, typer.Option(help="Else $PYRO_DAK_DATA.")] = None,
    out: Annotated[Path | None, typer.Option(help="Else results/<dataset>.")] = None,
    held_out: Annotated[bool, typer.Option(help="Test on 2,000 training images.")] = False,
    max_rows: Annotated[int | None, typer.Option(help="Use only so many images.")] = None,
    draft: Annotated[bool, typer.Option("--draft", help="Write below results/draft.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A draft of 200 images.")] = False,
) -> None:
    """Make the runs, then write the table and the figures."""
    check_choice("dataset", dataset, RECIPES)
    names = model or (["dak_mc", "nn"] if quick else list(MODELS))
    for name in names:
        check_choice("model", name, models.images.names())
    if fine_tune and "nn" not in names:
        names = ["nn", *names]
    jobs = [
        make_job(
            dataset,
            name,
            number,
            epochs=epochs or (1 if quick else None),
            batch_size=batch_size,
            tune_epochs=tune_epochs,
            is_tuned=fine_tune and name != "nn",
            settings={"device": device, "precision": precision},
            held_out=held_out,
            max_rows=200 if quick else max_rows,
        )
        for number in seed or [0]
        for name in names
    ]
    directory = result_directory(dataset, out, draft or quick)
    run_jobs(jobs, directory, data_root, resume)


if __name__ == "__main__":
    start(main)
