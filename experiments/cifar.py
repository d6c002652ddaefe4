"""Image classification on CIFAR-10 and CIFAR-100: Tables 2 and 3 and the AV-DKL table.

    python -m experiments.cifar --dataset cifar10 --model dak_mc --model nn --seed 0 --seed 1
    python -m experiments.cifar --dataset cifar100 --preset paper --full --device cuda \
        --precision bf16-mixed

Preset `paper` is the paper's recipe: ResNet-18 (CIFAR-10, P = 64) or ResNet-34 (CIFAR-100,
P = 128), SGD with rate 0.1 and a cosine, weight decay 1e-4, 200 epochs, random crops and flips.
Adam for variational last layers is ours: SGD hardly follows gradients of order 1 / N like the KL's.
Preset `small` is for two cores and the subsets of 10,000 images: a ResNet of 64 features, Adam
with one cycle. `--fine-tune` trains the network with a linear output first and then, for the other
models, the last layer alone on its features, for `--tune-epochs`.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

import models.images
from experiments import images
from experiments.runs import Job, result_directory, start
from models.shared.image_backbones import BACKBONES
from models.shared.recipe import IMAGE_RECIPE, Recipe
from pyro_dak.validation import check_choice

DATASETS = ("cifar10", "cifar100")
MODELS = ("nn", "nn_bn", "svdkl", "dak_mc", "dak_natural")


@dataclass(frozen=True)
class Preset:
    """Settings of all models, with those that differ by data set.

    `last_layer` is for the variational last layers, which all models but NN have; the settings with
    "dak" in their names are for DAK alone, and `tuned_dak_options` for its fine-tuning.
    """

    backbones: dict[str, str]
    num_units: dict[str, int]
    recipe: Recipe
    last_layer: dict[str, Any] = field(default_factory=dict)
    dak_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    dak_recipe: dict[str, dict[str, Any]] = field(default_factory=dict)
    tuned_dak_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    natural_options: dict[str, dict[str, Any]] = field(default_factory=dict)


PRESETS = {
    "paper": Preset(
        backbones={"cifar10": "resnet18", "cifar100": "resnet34"},
        num_units={"cifar10": 64, "cifar100": 128},
        recipe=replace(
            IMAGE_RECIPE,
            epochs=200,
            batch_size=128,
            optimizer="sgd",
            learning_rate=0.1,
            weight_decay=1e-4,
            schedule="cosine",
            augment=True,
        ),
        last_layer={"last_layer_optimizer": "adam", "last_layer_learning_rate": 1e-2},
    ),
    "small": Preset(
        backbones={"cifar10": "small_resnet", "cifar100": "small_resnet"},
        num_units={"cifar10": 64, "cifar100": 64},
        recipe=replace(IMAGE_RECIPE, epochs=12, batch_size=128, learning_rate=1e-2, augment=True),
        # Chosen on held-out training images: with random weights at the start the functions of the
        # units are rough, with wide ones noisy, and the network learns slowly. With 100 classes
        # it takes a coarse grid for that (nodes two standard deviations apart), wide for the long
        # tails of the features, and no embedding.
        dak_options={
            "cifar10": {"linear_start": 16.0, "init_scale": 0.005},
            "cifar100": {
                "embedding": False,
                "level": 3,
                "num_std": 8.0,
                "unit_scale": 2.0,
                "linear_start": 2.0,
                "init_scale": 0.005,
            },
        },
        dak_recipe={
            "cifar10": {"last_layer_learning_rate": 5e-3},
            "cifar100": {"last_layer_learning_rate": 4e-3},
        },
        # Likewise, for `dak_natural`: a hundred classes ask for straight lines besides.
        natural_options={
            "cifar10": {"prior_scale": 1.0},
            "cifar100": {"linear_term": True, "prior_scale": 1.0},
        },
        # On given features the noise of wide weights disturbs no network, and an embedding helps.
        tuned_dak_options={
            "cifar10": {"init_scale": 0.05},
            "cifar100": {"embedding": True, "init_scale": 0.02},
        },
    ),
}


def make_job(
    preset: str,
    dataset: str,
    model: str,
    recipe: Recipe,
    backbone: str | None = None,
    **others: Any,
) -> Job:
    """The job of a model on a data set, with the backbone of the preset or another."""
    chosen = PRESETS[preset]
    has_units = model not in (*images.PLAIN, "dak_features", "dak_natural")
    options: dict[str, Any] = {"num_units": chosen.num_units[dataset]} if has_units else {}
    if model != "nn":
        recipe = replace(recipe, **chosen.last_layer)
    if model == "dak_natural":
        options |= chosen.natural_options.get(dataset, {})
    elif model.startswith("dak"):
        options |= chosen.dak_options.get(dataset, {})
        options |= chosen.tuned_dak_options.get(dataset, {}) if recipe.fixed_features else {}
        recipe = replace(recipe, **chosen.dak_recipe.get(dataset, {}))
    if model == "dak_features":
        options.pop("embedding", None)  # it never has one
    backbone = backbone or chosen.backbones[dataset]
    return images.make_job(dataset, model, backbone, recipe, options, preset=preset, **others)


def main(
    dataset: Annotated[list[str] | None, typer.Option(help="cifar10, cifar100; both.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Models of the board.")] = None,
    preset: Annotated[str, typer.Option(help="small or paper.")] = "small",
    backbone: Annotated[str | None, typer.Option(help="Instead of the preset's.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Seeds; 0.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Instead of the preset's.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="128, or the paper's 1024.")] = None,
    fine_tune: Annotated[bool, typer.Option(help="Last layers on features of the NN.")] = False,
    tune_epochs: Annotated[int | None, typer.Option(min=1, help="Of these; else as many.")] = None,
    full: Annotated[bool, typer.Option(help="All images instead of the subset.")] = False,
    held_out: Annotated[bool, typer.Option(help="Test on 2,000 training images.")] = False,
    max_rows: Annotated[int | None, typer.Option(help="Use only so many images.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    precision: Annotated[str | None, typer.Option(help="As in Lightning Fabric.")] = None,
    resume: Annotated[bool, typer.Option(help="Keep runs that are recorded.")] = True,
    data_root: Annotated[str | None, typer.Option(help="Else $PYRO_DAK_DATA.")] = None,
    out: Annotated[Path | None, typer.Option(help="Else results; a folder for each set.")] = None,
    draft: Annotated[bool, typer.Option("--draft", help="Write below results/draft.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A draft of 200 images.")] = False,
) -> None:
    """Make the runs, then write the tables and the figures."""
    check_choice("preset", preset, PRESETS)
    if backbone is not None:
        check_choice("backbone", backbone, BACKBONES)
    recipe = PRESETS[preset].recipe
    datasets = dataset or (["cifar10"] if quick else list(DATASETS))
    names = model or (["nn", "dak_mc"] if quick else list(MODELS))
    for name in datasets:
        check_choice("dataset", name, DATASETS)
    for name in names:
        check_choice("model", name, models.images.names())
    if fine_tune and "nn" not in names:
        names = ["nn", *names]
    base = replace(
        recipe,
        epochs=epochs or (1 if quick else recipe.epochs),
        batch_size=batch_size or recipe.batch_size,
        device=device,
        precision=precision,
    )
    for set_name in datasets:
        jobs = []
        for number in seed or [0]:
            for name in names:
                is_tuned = fine_tune and name != "nn"
                own_epochs = (tune_epochs if is_tuned else None) or base.epochs
                is_other = own_epochs != base.epochs
                jobs.append(
                    make_job(
                        preset,
                        set_name,
                        name,
                        replace(base, seed=number, epochs=own_epochs, fixed_features=is_tuned),
                        backbone,
                        pretrained="nn" if is_tuned else None,
                        pretrained_epochs=base.epochs if is_other else None,
                        full=full,
                        held_out=held_out,
                        max_rows=200 if quick else max_rows,
                    )
                )
        directory = result_directory(set_name, out and out / set_name, draft or quick)
        images.run_jobs(jobs, directory, data_root, resume)


if __name__ == "__main__":
    start(main)
