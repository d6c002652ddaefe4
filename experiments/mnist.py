"""Image classification on MNIST: Tables 2 and 3 of the paper.

    python -m experiments.mnist --model dak_mc --model nn
    python -m experiments.mnist --dataset digits

The recipe is the paper's: a CNN with 128 features, P = 16 units, M = 63 inducing points on
[-1, 1], Adadelta with rate 1 that falls by 0.7 each epoch, weight decay 1e-4, 20 epochs. `digits`
is a small set that needs no file. Ours are the start of DAK's units on MNIST (`DAK_OPTIONS`) and
Adam for the variational last layers there (`LAST_LAYER`): the KL moves the scales of q by gradients
of order 1 / N, whose squares are far below the eps of Adadelta, so that they would hardly move.
`dak_features` is ours as well: a unit for each feature instead of an embedding.
A run is one json under the results directory, with its learning curve; a run that is there already
is not made again, and one that was stopped goes on.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import models.images
from experiments.image_report import write_report
from experiments.image_runs import Job, run_all
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
    "digits": replace(IMAGE_RECIPE, epochs=20, batch_size=64, learning_rate=1e-2),
}
BACKBONES = {"mnist": "cnn", "digits": "digits_cnn"}
MODELS = ("dak_mc", "dak_jensen", "dak_features", "nn")
# Chosen on held-out training images: the units start as straight lines, not as rough functions.
DAK_OPTIONS = {"mnist": {"linear_start": 8.0, "init_scale": 0.05}, "digits": {}}
# Models that are trained by the recipe's optimiser alone; the bound of NN+SVGP falls as well.
PLAIN = ("nn", "nn_svgp")
LAST_LAYER: dict[str, dict[str, Any]] = {
    "mnist": {"last_layer_optimizer": "adam", "last_layer_learning_rate": 1e-2},
    "digits": {},
}


def options(dataset: str, name: str) -> dict[str, Any]:
    """What a model is told beside the recipe."""
    units = {} if name in ("nn", "dak_features") else {"num_units": 16}
    return units | (DAK_OPTIONS[dataset] if name.startswith("dak") else {})


def recipe(dataset: str, name: str) -> Recipe:
    """The training of a model."""
    return replace(RECIPES[dataset], **({} if name in PLAIN else LAST_LAYER[dataset]))


def main(
    dataset: Annotated[str, typer.Option(help="mnist or digits.")] = "mnist",
    model: Annotated[list[str] | None, typer.Option(help="Models of the board.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Seeds; 0.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Instead of the recipe's.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="128, or the paper's 1024.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    precision: Annotated[str | None, typer.Option(help="As in Lightning Fabric.")] = None,
    progress: Annotated[bool, typer.Option(help="Show bars.")] = True,
    resume: Annotated[bool, typer.Option(help="Keep runs that are there.")] = True,
    data_root: Annotated[str | None, typer.Option(help="Else $PYRO_DAK_DATA.")] = None,
    out: Annotated[Path, typer.Option(help="Directory of the results.")] = Path("results"),
    held_out: Annotated[bool, typer.Option(help="Test on 2,000 training images.")] = False,
    max_rows: Annotated[int | None, typer.Option(help="Use the first so many.")] = None,
    quick: Annotated[bool, typer.Option(help="A few images, one epoch, two models.")] = False,
) -> None:
    """Run the experiment, then write its tables and figures."""
    check_choice("dataset", dataset, RECIPES)
    names = model or (["dak_mc", "nn"] if quick else list(MODELS))
    for name in names:
        check_choice("model", name, models.images.names())
    base = RECIPES[dataset]
    jobs = [
        Job(
            dataset,
            name,
            BACKBONES[dataset],
            replace(
                recipe(dataset, name),
                seed=number,
                epochs=epochs or (1 if quick else base.epochs),
                batch_size=batch_size or base.batch_size,
                device=device,
                precision=precision,
                progress=progress,
            ),
            options(dataset, name),
            held_out=held_out,
            max_rows=200 if quick else max_rows,
            data_root=data_root,
        )
        for number in seed or [0]
        for name in names
    ]
    run_all(jobs, out, resume)
    for path in write_report(out / dataset):
        print(path)


if __name__ == "__main__":
    typer.run(main)
