"""Training of the baselines that are no DAK, in the loop of `pyro_dak.fit`."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from models.shared.recipe import Recipe, fit_options, seeded
from pyro_dak.training.data import ResidentData
from pyro_dak.training.loop import Run
from pyro_dak.training.optimizers import build_optimizer, schedule_fn
from pyro_dak.training.plan import Checkpoints, History, Settings

__all__ = ["Callback", "Terms", "TrainingLoss", "resume_options", "train", "two_groups"]

# callback(epoch, row): called after each epoch with its row of the history.
Callback = Callable[[int, dict[str, float]], None]


class Terms(NamedTuple):
    """The loss of one batch, per row, and its two parts; they are NaN where it is not split."""

    loss: Tensor
    expected_log_lik: Tensor
    kl: Tensor


class TrainingLoss(nn.Module):
    """The loss of a baseline in the form that the loop of `fit` asks for.

    Args:
        network: what weight decay acts on; kept in checkpoints.
        last_layer: everything else that is trained; kept in checkpoints.
        terms_fn: (x, y, num_data) to the `Terms` of a batch.
        fixed: a part of the network that stays in eval mode.
    """

    def __init__(
        self,
        network: nn.Module,
        last_layer: nn.Module,
        terms_fn: Callable[[Tensor, Tensor, int], Terms],
        fixed: nn.Module | None = None,
    ):
        super().__init__()
        self.model, self.guide, self.terms_fn = network, last_layer, terms_fn
        self._fixed = (fixed,)  # in a tuple, so that it is no submodule of its own

    def train(self, mode: bool = True) -> "TrainingLoss":
        """Set the mode of every module but the fixed one."""
        super().train(mode)
        if self._fixed[0] is not None:
            self._fixed[0].eval()
        return self

    def forward(self, x: Tensor, y: Tensor, scale: float, num_data: int) -> tuple[Tensor, Tensor]:
        """The loss of a batch, per row, and without gradient its three terms, `(3,)`."""
        terms = self.terms_fn(x, y, num_data)
        return terms.loss, torch.stack([term.detach() for term in terms])


class _BaselineRun(Run):
    """The run of `fit` for a model that is no DAK: its checkpoints describe no model."""

    def _description(self) -> dict[str, Any]:
        return {"model": None}


def two_groups(
    network: nn.Module, last_layer: nn.Module
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Trained parameters of the network, and those that only the last layer has."""
    first = [p for p in network.parameters() if p.requires_grad]
    known = {id(p) for p in first}
    return first, [p for p in last_layer.parameters() if p.requires_grad and id(p) not in known]


def train(
    loss: TrainingLoss,
    data: ResidentData,
    recipe: Recipe,
    name: str,
    callbacks: Sequence[Callback] = (),
    checkpoint_dir: Path | None = None,
) -> History:
    """Minimise the loss, with the batches, schedule, optimiser and clipping of `pyro_dak.fit`.

    The modules are left in eval mode. A run goes on from the newest checkpoint in
    `checkpoint_dir` if there is one.

    Args:
        loss: the loss with its modules.
        data: the batches.
        recipe: the settings.
        name: what a checkpoint calls the objective.
        callbacks: called after each epoch.
        checkpoint_dir: where checkpoints go; none are written without it.
    """
    groups = two_groups(loss.model, loss.guide)
    if not any(groups):  # a model that is given, not learned
        loss.eval()
        return History(status="finished")
    with seeded(recipe.seed, recipe.device):
        run = _build_run(loss, groups, data, recipe, name, checkpoint_dir)
        history = run.run(callbacks, recipe.progress)
    loss.eval()
    return history


def _build_run(
    loss: TrainingLoss,
    groups: tuple[Iterable[nn.Parameter], Iterable[nn.Parameter]],
    data: ResidentData,
    recipe: Recipe,
    name: str,
    checkpoint_dir: Path | None,
) -> Run:
    from lightning_fabric import Fabric

    options = fit_options(recipe)
    options["last_layer_learning_rate"] = recipe.last_layer_learning_rate or recipe.learning_rate
    options["last_layer_optimizer"] = recipe.last_layer_optimizer or recipe.optimizer
    places = {key: options.pop(key) for key in ("accelerator", "devices", "precision")}
    del options["progress"]
    fabric: Any = Fabric(**places)
    fabric.launch()
    optimizer = build_optimizer(
        recipe.optimizer,
        *groups,
        recipe.learning_rate,
        options["last_layer_learning_rate"],
        recipe.weight_decay,
        recipe.decay_last_layer,
        fused="16" not in str(recipe.precision),
        last_layer_name=options["last_layer_optimizer"],
    )
    settings = Settings(
        **options, patience=None, objective=name, has_validation=False, world_size=1
    )
    checkpoints = None if checkpoint_dir is None else Checkpoints(checkpoint_dir)
    schedule = schedule_fn(recipe.schedule)
    steps = data.batches_per_epoch
    run = _BaselineRun(fabric, loss, optimizer, data, None, schedule, steps, settings, checkpoints)
    resume_from = resume_options(checkpoint_dir).get("resume_from")
    if resume_from is not None:
        run.resume(resume_from)
    return run


def resume_options(directory: Path | None) -> dict[str, Path]:
    """`checkpoint_dir` and, where it holds a checkpoint already, `resume_from` for `fit`."""
    if directory is None:
        return {}
    options = {"checkpoint_dir": directory}
    return options | ({"resume_from": directory} if Checkpoints.found(directory) else {})
