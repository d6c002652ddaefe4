"""How to train, and what came of it: `Plan`, `History` and `TrainingError`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import Tensor

from pyro_dak.drawing import MUTED, PALETTE, new_axes, style_axes
from pyro_dak.training.optimizers import OPTIMIZERS, SCHEDULES, Group, Schedule
from pyro_dak.validation import (
    check_choice,
    check_integer,
    check_not_negative,
    check_positive,
    check_real,
)

__all__ = ["History", "Plan", "TrainingError"]

# The columns that `History.plot` draws: the estimators score held-out rows in their own way.
_CURVES = {"loss": "training", "val_nlpd": "validation", "val_score": "held-out score"}


@dataclass(repr=False)
class History:
    """What training went through, with one row per epoch.

    The rows of `fit` hold loss, elbo, elbo_per_datum, kl, expected_log_lik, learning_rate and
    val_*. The loss is minus the ELBO per datum; `elbo`, `kl` and `expected_log_lik` are in nats for
    the whole data set (the last two are NaN for objectives of Pyro, which do not split the bound).

    In `rows` they are running means over the rows of an epoch: each batch is seen with the weights
    of its step, in train mode. `final` has the same five numbers evaluated: the bound of the model
    as `fit` leaves it, in eval mode, on all training rows. Objectives that draw estimate it with
    noise, and a loader that augments its rows has other ones in each pass.

    Attributes:
        rows: the epochs.
        status: "finished", "stopped early" or "interrupted".
        best_epoch: the epoch whose weights were kept, with `patience`.
        seconds: how long each epoch took.
        final: the bound of the final model; None if it was not evaluated, or after an interrupt.
    """

    rows: list[dict[str, float]] = field(default_factory=list)
    status: str = "running"
    best_epoch: int | None = None
    seconds: list[float] = field(default_factory=list, compare=False)
    final: dict[str, float] | None = None

    def __repr__(self) -> str:
        facts = [f"{len(self.rows)} epochs", self.status]
        facts += [] if self.best_epoch is None else [f"best epoch {self.best_epoch}"]
        last = self.final or (self.rows[-1] if self.rows else {})
        facts += [f"{name} {last[name]:.4g}" for name in ("loss", "elbo", "kl") if name in last]
        return f"History({', '.join([*facts, f'{sum(self.seconds):.1f} s'])})"

    def column(self, name: str) -> list[float]:
        """One column, by epoch."""
        if self.rows:
            check_choice("name", name, self.rows[-1])
        return [row[name] for row in self.rows]

    def plot(self, ax: Any = None) -> Any:
        """The axes `ax`, or new ones, with the loss per row in each epoch.

        Held-out rows have a line of their own, by the epochs that scored them, and a dotted line
        marks the epoch whose weights were kept.
        """
        ax = new_axes(ax)
        for (name, label), color in zip(_CURVES.items(), PALETTE, strict=False):
            epochs = [i for i, row in enumerate(self.rows, 1) if name in row]
            values = [row[name] for row in self.rows if name in row]
            if values:
                ax.plot(epochs, values, color=color, lw=1.6, label=label)
        if self.best_epoch is not None:
            ax.axvline(self.best_epoch, color=MUTED, lw=0.8, ls=":", label="best")
        return style_axes(ax, "epoch", "loss per row", has_legend=bool(self.rows))


class TrainingError(RuntimeError):
    """Training cannot go on. The message says why, and where the last good checkpoint is.

    Attributes:
        history: what training went through until then.
    """

    def __init__(self, message: str, history: History | None = None):
        super().__init__(message)
        self.history = history


@dataclass(frozen=True)
class Plan:
    """How to train. `fit`, the estimators for tables and the baselines all build one.

    The fields that `fit` has as arguments mean what they mean there. Unless it says otherwise, the
    last layer has the learning rate and the optimiser of the network here; `fit` gives it its own.

    Args:
        stop_after: number of epochs of the schedule after which training stops; by default all.
        num_scorings: how often held-out rows are scored in a run, at most once per epoch; by
            default after every epoch. `patience` counts scorings.
    """

    epochs: int = 100
    batch_size: int = 512
    learning_rate: float = 1e-2
    last_layer_learning_rate: float | None = None
    optimizer: str = "adam"
    last_layer_optimizer: str | None = None
    schedule: str | Schedule = "one_cycle"
    weight_decay: float = 0.0
    decay_last_layer: bool = False
    clip_norm: float | None = 10.0
    patience: int | None = None
    fixed_features: bool = False
    seed: int = 0
    stop_after: int | None = None
    num_scorings: int | None = None

    def __post_init__(self) -> None:
        required = ("epochs", "batch_size", "learning_rate")
        for name in ("epochs", "batch_size", "stop_after", "num_scorings", "patience"):
            if getattr(self, name) is not None or name in required:
                check_integer(name, getattr(self, name), minimum=0 if name == "patience" else 1)
        for name in ("learning_rate", "last_layer_learning_rate", "clip_norm"):
            if getattr(self, name) is not None or name in required:
                check_positive(name, getattr(self, name))
        check_not_negative("weight_decay", self.weight_decay)
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        if self.last_layer_optimizer is not None:
            check_choice("last_layer_optimizer", self.last_layer_optimizer, OPTIMIZERS)
        if not callable(self.schedule):
            check_choice("schedule", self.schedule, SCHEDULES)

    @property
    def num_epochs(self) -> int:
        """The number of epochs that are trained unless training stops early."""
        return self.epochs if self.stop_after is None else self.stop_after

    def is_scored(self, epoch: int) -> bool:
        """Whether held-out rows are scored after this epoch, counted from 1."""
        every = 1 if self.num_scorings is None else max(1, self.epochs // self.num_scorings)
        return epoch % every == 0 or epoch == self.num_epochs

    def factors(self, step: int, steps_per_epoch: int) -> Iterator[float]:
        """The factors of the learning rates from a step on; the last one stays."""
        schedule = self.schedule if callable(self.schedule) else SCHEDULES[self.schedule]
        total = self.epochs * steps_per_epoch
        check_real("schedule", schedule(min(step, total - 1), total, steps_per_epoch))
        for number in count(step):
            yield schedule(min(number, total - 1), total, steps_per_epoch)

    def groups(self, network: Sequence[Tensor], last_layer: Sequence[Tensor]) -> list[Group]:
        """The parameters that require a gradient, in the groups that the optimisers take."""
        settings, groups = self.settings(), []
        for prefix, parameters in (("", network), ("last_layer_", last_layer)):
            decay = 0.0 if prefix and not self.decay_last_layer else self.weight_decay
            learned = [p for p in parameters if p.requires_grad]
            name, rate = settings[f"{prefix}optimizer"], settings[f"{prefix}learning_rate"]
            group = {"params": learned, "lr": rate, "initial_lr": rate, "weight_decay": decay}
            groups.append(group | {"optimizer": name})
        return groups

    def settings(self) -> dict[str, Any]:
        """All fields as plain data, defaults filled in: a resumed run must have the same.

        A schedule of one's own is known by its name.
        """
        values = dict(vars(self))
        for name in ("learning_rate", "optimizer"):
            if values[f"last_layer_{name}"] is None:
                values[f"last_layer_{name}"] = values[name]
        if callable(self.schedule):
            name = getattr(self.schedule, "__qualname__", type(self.schedule).__qualname__)
            values["schedule"] = f"custom {name}"
        return values
