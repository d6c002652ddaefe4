"""Training of an ensemble in one pass: batches, schedule, clipping, held-out scores."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dak.training.optimizers import build_optimizer, schedule_fn
from pyro_dak.training.plan import History, TrainingError

__all__ = ["Rows", "Stack", "TrainingPlan", "clip_members", "train"]


@runtime_checkable
class Stack(Protocol):
    """Members with stacked parameters, such as `Ensemble`: what can be trained in one pass."""

    tensors: dict[str, Tensor]

    def __len__(self) -> int: ...

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""

    def network_parameters(self) -> list[Tensor]:
        """Parameters with weight decay, `(E, ...)` each."""

    def last_layer_parameters(self) -> list[Tensor]:
        """Parameters without."""

    def loss(self, x: Tensor, y: Tensor, weights: Tensor, num_data: Tensor) -> Tensor:
        """Sum of the members' losses per datum, a scalar."""


class Rows(NamedTuple):
    """Inputs `(N, D)`, targets, and how much each row counts: `(N,)`, or `(E, N)` by member."""

    x: Tensor
    y: Tensor
    weights: Tensor


@dataclass(frozen=True)
class TrainingPlan:
    """How an ensemble is trained; the fields mean what they mean in `pyro_dak.fit`.

    Args:
        epochs: length of the schedule.
        batch_size: rows per step.
        stop_after: stop after so many epochs of the schedule; by default at its end.
        num_scorings: how often held-out rows are looked at in a run, at most once per epoch.
    """

    epochs: int
    batch_size: int
    learning_rate: float = 2e-2
    weight_decay: float = 0.0
    schedule: str = "one_cycle"
    clip_norm: float = 10.0
    seed: int = 0
    stop_after: int | None = None
    num_scorings: int = 20
    patience: int = 8
    progress: bool = False
    description: str = "fit"


def train(
    ensemble: Stack,
    rows: Rows,
    plan: TrainingPlan,
    score_fn: Callable[[], Tensor] | None = None,
) -> History:
    """Maximise the ELBO of every member; the ensemble is changed in place.

    Args:
        ensemble: the members.
        rows: the training data, on the device of the ensemble.
        plan: the settings.
        score_fn: scores of every member on held-out rows, `(E, n)`, smaller is better. A member
            whose last scores are worse than its best by more than two standard errors of the
            difference goes back to its best; the run ends early if that has been so for all
            members in `plan.patience` scorings in a row.

    Raises:
        TrainingError: if the gradient becomes NaN or infinite.
    """
    num_epochs = plan.epochs if plan.stop_after is None else plan.stop_after
    every = max(1, plan.epochs // plan.num_scorings)
    steps = _Steps(ensemble, rows, plan)
    best = _Best(ensemble)
    history = History()
    cuda = [ensemble.device] if ensemble.device.type == "cuda" else []
    total = num_epochs * steps.batches_per_epoch
    bar = tqdm(total=total, desc=plan.description, delay=2, disable=not plan.progress, leave=False)
    with torch.random.fork_rng(devices=cuda), bar:
        torch.manual_seed(plan.seed)
        for epoch in range(1, num_epochs + 1):
            start = time.perf_counter()
            row = {"loss": steps.epoch(bar)}
            if score_fn is not None and (epoch % every == 0 or epoch == num_epochs):
                best.update(score_fn(), epoch)
                row["val_score"] = float(best.last.mean())
            history.rows.append(row)
            history.seconds.append(time.perf_counter() - start)
            if best.num_worse >= plan.patience:
                history.status = "stopped early"
                break
        else:
            history.status = "finished"
    if score_fn is not None:
        history.best_epoch = int(best.restore().median())
    return history


class _Steps:
    """The steps of a run, an epoch at a time."""

    def __init__(self, ensemble: Stack, rows: Rows, plan: TrainingPlan):
        self.ensemble, self.rows, self.plan = ensemble, rows, plan
        self.batches_per_epoch = -(-len(rows.x) // plan.batch_size)
        network, last_layer = ensemble.network_parameters(), ensemble.last_layer_parameters()
        self.parameters = [*network, *last_layer]
        self.optimizer = build_optimizer(
            "adamw",
            network,
            last_layer,
            plan.learning_rate,
            plan.learning_rate,
            plan.weight_decay,
            False,
            fused=ensemble.device.type in ("cpu", "cuda"),
        )
        self.schedule = schedule_fn(plan.schedule)
        self.num_data = rows.weights.sum(-1).expand(len(ensemble))
        self.generator = torch.Generator().manual_seed(plan.seed)
        self.step = 0

    def epoch(self, bar: Any) -> float:
        """One pass over the rows; returns the mean loss per datum and member."""
        N = len(self.rows.x)
        total = torch.zeros((), device=self.ensemble.device)
        order = torch.randperm(N, generator=self.generator).to(self.ensemble.device)
        for batch in order.tensor_split(self.batches_per_epoch):
            x, y, weights = self.rows.x[batch], self.rows.y[batch], self.rows.weights[..., batch]
            total += self._train_step(x, y, weights * (N / len(batch)))
            bar.update()
        return float(total) / (self.batches_per_epoch * len(self.ensemble))

    def _train_step(self, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        total_steps = self.plan.epochs * self.batches_per_epoch
        factor = self.schedule(self.step, total_steps, self.batches_per_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.learning_rate * factor
        self.optimizer.zero_grad()
        loss = self.ensemble.loss(x, y, weights, self.num_data)
        loss.backward()
        norms = clip_members(self.parameters, self.plan.clip_norm)
        if not bool(torch.isfinite(norms).all()):
            raise TrainingError(
                f"The gradient is not finite in step {self.step + 1} (loss {float(loss.detach())})."
                " Lower `learning_rate`, or look for columns with extreme values."
            )
        self.optimizer.step()
        self.step += 1
        return loss.detach()


class _Best:
    """Every member's weights at its best scoring so far, and whether its last is much worse."""

    def __init__(self, ensemble: Stack):
        self.ensemble = ensemble
        self.epochs = torch.zeros(len(ensemble), dtype=torch.long, device=ensemble.device)
        self.last_epoch = 0
        self.scores = self.last = torch.empty(0)
        self.num_worse = 0
        self.kept: dict[str, Tensor] = {}

    def update(self, scores: Tensor, epoch: int) -> None:
        """Take note of scores `(E, n)` of the held-out rows; keep the members that are better."""
        self.last, self.last_epoch = scores, epoch
        if not self.kept:
            self.scores = torch.full_like(scores, math.inf)
            self.kept = {name: t.detach().clone() for name, t in self.ensemble.tensors.items()}
        is_better = scores.mean(-1) < self.scores.mean(-1)
        self.scores = torch.where(is_better.unsqueeze(-1), scores, self.scores)
        self.epochs[is_better] = epoch
        for name, tensor in self.ensemble.tensors.items():
            self.kept[name][is_better] = tensor.detach()[is_better]
        self.num_worse = self.num_worse + 1 if bool(self.is_worse().all()) else 0

    def is_worse(self) -> Tensor:
        """Members whose last scoring is worse than their best by more than two standard errors."""
        difference = self.last - self.scores
        standard_error = difference.std(-1) / math.sqrt(difference.shape[-1])
        return difference.mean(-1) > 2 * standard_error.nan_to_num()

    @torch.no_grad()
    def restore(self) -> Tensor:
        """Put the kept weights back where the last are worse; returns the epochs of the result."""
        is_worse = self.is_worse()
        for name, tensor in self.ensemble.tensors.items():
            tensor[is_worse] = self.kept[name][is_worse]
        return torch.where(is_worse, self.epochs, self.last_epoch)


def clip_members(parameters: list[Tensor], clip_norm: float) -> Tensor:
    """Scale each member's gradient down to norm `clip_norm`; returns the norms before, `(E,)`."""
    gradients = [p.grad.reshape(len(p), -1) for p in parameters if p.grad is not None]
    norms = torch.cat(gradients, 1).norm(dim=1)
    if bool((norms > clip_norm).any()):
        factor = (clip_norm / norms).clamp(max=1).unsqueeze(-1)
        for gradient in gradients:
            gradient *= factor
    return norms
