"""What every image classifier of the board shares: recipe, interface, and checks of images."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from models.shared.recipe import Recipe
from pyro_dak.prediction.predict import ClassPrediction
from pyro_dak.training.plan import Checkpoints, History
from pyro_dak.validation import check_finite, check_floating

# callback(epoch, row): called after each epoch with its row of the history.
Callback = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class ImageRecipe(Recipe):
    """A `Recipe`, and what images ask for besides.

    Args:
        augment: random crops (padding 4) and horizontal flips of the training images.
        fixed_features: train on features computed once; the network stays as it is.
        precision: as in Lightning Fabric, for the network; the last layer keeps float32.
    """

    epochs: int = 20
    batch_size: int = 128
    clip_norm: float | None = None
    num_samples_test: int = 100
    augment: bool = False
    fixed_features: bool = False
    precision: str | None = None


DEFAULT_RECIPE = ImageRecipe()


@runtime_checkable
class Classifier(Protocol):
    """A classifier of the board: x is `(N, channels, height, width)` in [0, 1], y `(N,)` labels.

    `fit` can be called once; it goes on from the newest checkpoint in `checkpoint_dir` if there is
    one.
    """

    history: History
    features: nn.Module

    @property
    def num_parameters(self) -> int:
        """Trained parameters, variational ones included."""

    @property
    def num_added(self) -> int:
        """Those that are not of the feature extractor."""

    @property
    def epoch_seconds(self) -> list[float]:
        """Seconds of each epoch of training."""

    def fit(
        self,
        x: Tensor,
        y: Tensor,
        callbacks: Sequence[Callback] = (),
        checkpoint_dir: Path | None = None,
    ) -> None:
        """Train on these rows, and on nothing else."""

    def predict(self, x: Tensor) -> ClassPrediction:
        """Class probabilities, averaged after the softmax, `(N, C)`."""


def check_images(x: Tensor, y: Tensor, num_classes: int) -> None:
    """Raise unless x is `(N, channels, height, width)`, finite, and y `(N,)` labels below C."""
    check_floating("x", x)
    if x.dim() != 4 or len(x) == 0:
        raise ValueError(f"`x` must have shape (N, channels, height, width); got {tuple(x.shape)}.")
    check_finite("x", x)
    if y.is_floating_point() or y.shape != x.shape[:1]:
        raise ValueError(
            f"`y` must hold {len(x)} integer labels, one per image; got {tuple(y.shape)} {y.dtype}."
        )
    if int(y.min()) < 0 or int(y.max()) >= num_classes:
        raise ValueError(
            f"`y` must hold labels from 0 to {num_classes - 1}; got {int(y.min())} to "
            f"{int(y.max())}. Build the model for this number of classes."
        )


def resume_options(directory: Path | None) -> Mapping[str, Path]:
    """`checkpoint_dir` and, where it holds a checkpoint already, `resume_from` for `fit`."""
    if directory is None:
        return {}
    options = {"checkpoint_dir": directory}
    return options | ({"resume_from": directory} if Checkpoints.found(directory) else {})


def training_options(recipe: ImageRecipe) -> dict[str, Any]:
    """What `fit` and the training loop of the baselines are told alike."""
    return {
        "epochs": recipe.epochs,
        "batch_size": recipe.batch_size,
        "learning_rate": recipe.learning_rate,
        "last_layer_learning_rate": recipe.last_layer_learning_rate or recipe.learning_rate,
        "optimizer": recipe.optimizer,
        "last_layer_optimizer": recipe.last_layer_optimizer or recipe.optimizer,
        "schedule": recipe.schedule,
        "weight_decay": recipe.weight_decay,
        "decay_last_layer": recipe.decay_last_layer,
        "clip_norm": recipe.clip_norm,
        "fixed_features": recipe.fixed_features,
        "seed": recipe.seed,
    }


def fabric_options(recipe: ImageRecipe) -> dict[str, Any]:
    """Device and precision of a recipe in the words of Lightning Fabric."""
    device = torch.device(recipe.device)
    return {
        "accelerator": device.type,
        "devices": 1 if device.index is None else f"{device.index},",
        "precision": recipe.precision,
    }
