"""Training of the baselines that are no DAK, in the loop of `pyro_dak.fit`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyro_dak.training.checkpoint import Checkpoints
from pyro_dak.training.data import ResidentData
from pyro_dak.training.loop import Callback, DAKLoss, Learner, Run
from pyro_dak.training.plan import History, Plan

from .recipe import Recipe, fit_options, seeded

__all__ = ["Callback", "Terms", "TrainingLoss", "resume_options", "train"]


class Terms(NamedTuple):
    """The loss of one batch, per row, and its two parts; they are NaN where it is not split."""

    loss: Tensor
    expected_log_lik: Tensor
    kl: Tensor


class TrainingLoss(nn.Module, Learner):
    """The loss of a baseline in the form that the training loop asks for.

    Args:
        network: what weight decay acts on; kept in checkpoints.
        last_layer: everything else that is trained; kept in checkpoints.
        terms_fn: (x, y, num_data) to the `Terms` of a batch.
        objective: what a checkpoint calls the loss.
        fixed: a part of the network that stays in eval mode.
    """

    num_terms = 3
    history_row = DAKLoss.history_row

    def __init__(
        self,
        network: nn.Module,
        last_layer: nn.Module,
        terms_fn: Callable[[Tensor, Tensor, int], Terms],
        objective: str = "loss",
        fixed: nn.Module | None = None,
    ):
        super().__init__()
        self.model, self.guide, self.terms_fn = network, last_layer, terms_fn
        self.objective = objective
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

    def parameter_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The parameters of the network, and those that only the last layer has."""
        first = list(self.model.parameters())
        known = {id(p) for p in first}
        return first, [p for p in self.guide.parameters() if id(p) not in known]


def train(
    loss: TrainingLoss,
    data: ResidentData,
    recipe: Recipe,
    callbacks: Sequence[Callback] = (),
    checkpoint_dir: Path | None = None,
) -> History:
    """Minimise the loss, with the batches, schedule, optimiser and clipping of `pyro_dak.fit`.

    The modules are left in eval mode. A run goes on from the newest checkpoint in
    `checkpoint_dir` if there is one. Ctrl-C and SIGTERM stop it after a whole step, with a
    checkpoint, and raise a KeyboardInterrupt, so that no half-trained model is recorded.

    Args:
        loss: the loss with its modules.
        data: the batches.
        recipe: the settings.
        callbacks: called after each epoch.
        checkpoint_dir: where checkpoints go; none are written without it.
    """
    if not any(p.requires_grad for p in loss.parameters()):  # a model that is given, not learned
        loss.eval()
        return History(status="finished")
    options = fit_options(recipe)
    places = {name: options.pop(name) for name in ("accelerator", "devices", "precision")}
    progress = options.pop("progress")
    checkpoints = None if checkpoint_dir is None else Checkpoints(checkpoint_dir)
    with seeded(recipe.seed, recipe.device):
        run = Run(loss, data, Plan(**options), None, checkpoints, _fabric(places))
        if checkpoint_dir is not None and Checkpoints.named(checkpoint_dir):
            run.resume(checkpoint_dir)
        history = run.run(callbacks, progress, on_interrupt="raise")
    loss.eval()
    return history


def _fabric(places: dict[str, Any]) -> Any:
    """A launched Fabric for mixed precision; else None, the plain run on the loss's own device."""
    if places["precision"] is None:
        return None
    from lightning_fabric import Fabric

    fabric: Any = Fabric(**places)
    fabric.launch()
    return fabric


def resume_options(directory: Path | None) -> dict[str, Path]:
    """The options with which `fit` keeps checkpoints in a directory and goes on from them."""
    return {} if directory is None else {"checkpoint_dir": directory, "resume_from": directory}
