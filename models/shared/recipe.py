"""What every regressor of the board shares: recipe, interface, backbone, and one training loop."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_dak import TrainingError
from pyro_dak.prediction.predict import Prediction
from pyro_dak.training.data import ResidentData
from pyro_dak.training.optimizers import build_optimizer, schedule_fn
from pyro_dak.training.plan import History

# loss_fn(x, y, num_data): the loss per datum of a batch, a scalar.
LossFn = Callable[[Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class Recipe:
    """How a regressor is trained; the fields mean what they mean in `pyro_dak.fit`.

    Models whose loss needs all rows at once (the exact ones) ignore `batch_size`. `seed` is that
    of the initial weights, the batches and the draws, in training and in prediction.
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


DEFAULT_RECIPE = Recipe()


@runtime_checkable
class Regressor(Protocol):
    """A model of the board: x is `(N, D)`, y is `(N, C)`, both preprocessed by the caller.

    `fit` can be called once, so that no fold starts from weights that have seen another.
    """

    history: History

    @property
    def num_parameters(self) -> int:
        """Trained parameters, variational ones included."""

    @property
    def epoch_seconds(self) -> list[float]:
        """Seconds of each epoch of training."""

    def fit(self, x: Tensor, y: Tensor) -> None:
        """Train on these rows, and on nothing else."""

    def predict(self, x: Tensor) -> Prediction:
        """Mean, epistemic and aleatoric variance of y, `(N, C)` each."""


def backbone(
    input_dim: int,
    feature_dim: int,
    hidden: Sequence[int] = (64, 32),
    relu_output: bool = False,
) -> nn.Sequential:
    """The paper's network for tables: D -> 64 -> 32 -> D_w with ReLUs between the layers.

    Args:
        input_dim: D.
        feature_dim: D_w.
        hidden: widths of the layers between.
        relu_output: whether the features go through a ReLU too.
    """
    widths = [input_dim, *hidden, feature_dim]
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*(layers if relu_output else layers[:-1]))


@contextmanager
def seeded(seed: int, device: str | torch.device = "cpu") -> Iterator[None]:
    """Random numbers from `seed` on inside; the global state comes back after."""
    device = torch.device(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def count_parameters(*modules: nn.Module) -> int:
    """Trained numbers in the modules, shared ones once."""
    parameters = {id(p): p.numel() for m in modules for p in m.parameters() if p.requires_grad}
    return sum(parameters.values())


def train(
    modules: tuple[nn.Module, nn.Module], loss_fn: LossFn, x: Tensor, y: Tensor, recipe: Recipe
) -> History:
    """Minimise a loss per datum; the loop of `pyro_dak.fit` for models that are no DAK.

    Batches, order of the rows, schedule, optimiser and clipping are those of `fit` with the same
    recipe; a test holds the two together. The modules are left in eval mode.

    Args:
        modules: the network and the last layer; weight decay acts on the first, and on the second
            only with `decay_last_layer`. What is in both counts as network.
        loss_fn: (x, y, num_data) to a scalar.
        x: inputs, `(N, D)`.
        y: targets, `(N, C)`.
        recipe: the settings.

    Returns:
        Per epoch the mean loss over its batches and the seconds.
    """
    device = torch.device(recipe.device)
    for module in modules:
        module.to(device).train()
    data = ResidentData(x.to(device), y.to(device), recipe.batch_size)
    network, last_layer = _parameters(*modules)
    if not network and not last_layer:  # a model that is given, not learned
        for module in modules:
            module.eval()
        return History(status="finished")
    optimizer = build_optimizer(
        recipe.optimizer,
        network,
        last_layer,
        recipe.learning_rate,
        recipe.last_layer_learning_rate or recipe.learning_rate,
        recipe.weight_decay,
        recipe.decay_last_layer,
        fused=device.type in ("cpu", "cuda"),
        last_layer_name=recipe.last_layer_optimizer,
    )
    generator = torch.Generator().manual_seed(recipe.seed)
    step_fn = _step_fn(optimizer, [*network, *last_layer], loss_fn, data, recipe)
    history = History()
    bar = tqdm(total=recipe.epochs, desc="train", delay=2, disable=not recipe.progress, leave=False)
    with seeded(recipe.seed, device), bar:
        for _ in range(recipe.epochs):
            start = time.perf_counter()
            losses = [step_fn(*batch) for batch in data.epoch(generator, 0)]
            history.seconds.append(time.perf_counter() - start)
            history.rows.append({"loss": sum(losses) / len(losses)})
            bar.update()
    history.status = "finished"
    for module in modules:
        module.eval()
    return history


def _parameters(
    network: nn.Module, last_layer: nn.Module
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    first = [p for p in network.parameters() if p.requires_grad]
    known = {id(p) for p in first}
    return first, [p for p in last_layer.parameters() if p.requires_grad and id(p) not in known]


def _step_fn(
    optimizer: torch.optim.Optimizer,
    parameters: list[nn.Parameter],
    loss_fn: LossFn,
    data: ResidentData,
    recipe: Recipe,
) -> Callable[[Tensor, Tensor, float], float]:
    """A function that makes one step on a batch and returns its loss."""
    schedule = schedule_fn(recipe.schedule)
    rates = [group["lr"] for group in optimizer.param_groups]
    total_steps = recipe.epochs * data.batches_per_epoch
    steps = iter(range(total_steps))

    def step_fn(x: Tensor, y: Tensor, scale: float) -> float:
        step = next(steps)
        factor = schedule(step, total_steps, data.batches_per_epoch)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        optimizer.zero_grad()
        loss = loss_fn(x, y, data.num_data)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise TrainingError(
                f"The loss is {value} in step {step + 1}. Lower the learning rate, scale the "
                "inputs, or look for a layer that overflows."
            )
        loss.backward()
        if recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, recipe.clip_norm)
        optimizer.step()
        return value

    return step_fn
