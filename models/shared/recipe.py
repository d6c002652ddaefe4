"""How a model of the boards is trained: the recipe, its seed, and what `pyro_dak.fit` is told."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = [
    "DEFAULT_RECIPE",
    "IMAGE_RECIPE",
    "Recipe",
    "count_parameters",
    "fit_options",
    "seeded",
]


@dataclass(frozen=True)
class Recipe:
    """The settings of a training run. They mean what they mean in `pyro_dak.fit`.

    Models whose loss needs all rows at once (the exact ones) ignore `batch_size`. The seed decides
    the initial weights, the batches and the draws, in training and in prediction.

    Args:
        epochs: passes over the data.
        batch_size: rows per step.
        learning_rate: of the network, at the peak of the schedule.
        weight_decay: on the network.
        schedule: of the learning rate.
        optimizer: of the network.
        clip_norm: bound of the norm of the gradient, or None.
        seed: of everything that is random.
        device: "cpu", "cuda" or "cuda:1".
        num_samples_train: draws per row in training, for models that draw.
        num_samples_test: draws in prediction, for models that draw.
        decay_last_layer: whether weight decay acts on the last layer too.
        last_layer_learning_rate: of the last layer; by default that of the network.
        last_layer_optimizer: of the last layer; by default that of the network.
        progress: whether training shows a bar.
        augment: for images: random crops (padding 4) and horizontal flips of the training images.
        fixed_features: for images: train on features that are computed once; the network stays.
        precision: for images: precision of the network, as in Lightning Fabric. The last layer
            keeps float32.
    """

    epochs: int = 100
    batch_size: int = 512
    learning_rate: float = 1e-2
    weight_decay: float = 0.0
    schedule: str = "one_cycle"
    optimizer: str = "adam"
    clip_norm: float | None = 10.0
    seed: int = 0
    device: str = "cpu"
    num_samples_train: int = 8
    num_samples_test: int = 20
    decay_last_layer: bool = False
    last_layer_learning_rate: float | None = None
    last_layer_optimizer: str | None = None
    progress: bool = False
    augment: bool = False
    fixed_features: bool = False
    precision: str | None = None


DEFAULT_RECIPE = Recipe()
IMAGE_RECIPE = Recipe(epochs=20, batch_size=128, clip_norm=None, num_samples_test=100)


def fit_options(recipe: Recipe) -> dict[str, Any]:
    """The settings of a recipe as keyword arguments of `pyro_dak.fit`."""
    device = torch.device(recipe.device)
    same = (
        "epochs",
        "batch_size",
        "learning_rate",
        "last_layer_learning_rate",
        "optimizer",
        "last_layer_optimizer",
        "schedule",
        "weight_decay",
        "decay_last_layer",
        "clip_norm",
        "fixed_features",
        "seed",
        "precision",
        "progress",
    )
    return {name: getattr(recipe, name) for name in same} | {
        "accelerator": device.type,
        "devices": 1 if device.index is None else f"{device.index},",
    }


@contextmanager
def seeded(seed: int, device: str | torch.device = "cpu") -> Iterator[None]:
    """Random numbers start from `seed` inside; the global state comes back afterwards."""
    device = torch.device(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def count_parameters(*modules: nn.Module) -> int:
    """The number of trained parameters in the modules. Shared ones count once."""
    parameters = {id(p): p.numel() for m in modules for p in m.parameters() if p.requires_grad}
    return sum(parameters.values())
