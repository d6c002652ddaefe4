"""What the last layer adds to a training step of the CNN for MNIST, side by side.

    python -m benchmarks.images [--quick]

One thread, batches of 128 images, the paper's CNN, S = 8 draws. The models take turns, step by
step, in one process; the median step of each is divided by that of the NN.
"""

import argparse
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

import models.images
from benchmarks.timing import time_side_by_side
from models.shared.image_backbones import build_backbone
from models.shared.image_baseline import BaselineLoss
from models.shared.image_recipe import Classifier, ImageRecipe
from pyro_dak.training.loss import Loss

NAMES = ("nn", "dak_mc", "dak_jensen", "svdkl", "nn_svgp")
NUM_DATA = 60_000
BATCH_SIZE = 128


def _build(name: str) -> Classifier:
    features, feature_dim = build_backbone("cnn", (0.1307,), (0.3081,))
    recipe = ImageRecipe(num_samples_train=8)
    options = {} if name == "nn" else {"num_units": 16}
    return models.images.build(name, features, feature_dim, 10, recipe=recipe, **options)


def _step_fn(model: Classifier, x: Tensor, y: Tensor) -> Callable[[], None]:
    """One step of Adadelta, as in training."""
    loss: torch.nn.Module
    if hasattr(model, "guide"):
        loss = Loss(model.model, model.guide, model.objective, from_features=False)
    else:
        loss = BaselineLoss(model)
    loss.train()
    optimizer = torch.optim.Adadelta(loss.parameters())

    def step_fn() -> None:
        optimizer.zero_grad()
        loss(x, y, NUM_DATA / len(x), NUM_DATA)[0].backward()
        optimizer.step()

    return step_fn


def main() -> None:
    """Print the median step of each model and its ratio to the NN's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three rounds, without NN+SVGP")
    quick = parser.parse_args().quick
    warnings.simplefilter("ignore")  # GPyTorch, of jitter
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = torch.rand(BATCH_SIZE, 1, 28, 28), torch.randint(10, (BATCH_SIZE,))
    built = {name: _build(name) for name in (NAMES[:-1] if quick else NAMES)}
    steps = {name: _step_fn(model, x, y) for name, model in built.items()}
    timings = time_side_by_side(steps, repetitions=3 if quick else 25)
    print("model      | ms a step (median ± half range) | over NN | parameters added")
    for name, timing in timings.items():
        ratio = timing.milliseconds / timings["nn"].milliseconds
        cell = f"{timing.milliseconds:.1f} ± {timing.spread:.1f}"
        print(f"{name:10s} | {cell:>31s} | {ratio:7.3f} | {built[name].num_added:16d}")


if __name__ == "__main__":
    main()
