"""What a training run keeps: its settings, its history, its checkpoints on disk."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from pyro_dak.checkpoint import CheckpointError

__all__ = ["Checkpoints", "History", "Settings", "TrainingError"]


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why and where the last good checkpoint is."""


@dataclass
class History:
    """One row per epoch: loss, elbo, elbo_per_datum, kl, expected_log_lik, learning_rate, val_*.

    The loss is minus the ELBO per datum, averaged over the epoch's batches; `elbo`, `kl` and
    `expected_log_lik` are in nats for the whole data set (the last two are NaN for objectives of
    Pyro, which do not split the bound). `status` is "finished", "stopped early" or "interrupted".
    """

    rows: list[dict[str, float]] = field(default_factory=list)
    status: str = "running"
    best_epoch: int | None = None
    seconds: list[float] = field(default_factory=list, compare=False)

    def column(self, name: str) -> list[float]:
        """One column, by epoch."""
        return [row[name] for row in self.rows]


@dataclass(frozen=True)
class Settings:
    """What must be the same for a resumed run to equal an uninterrupted one."""

    epochs: int
    batch_size: int
    learning_rate: float
    last_layer_learning_rate: float
    optimizer: str
    schedule: str
    weight_decay: float
    decay_last_layer: bool
    clip_norm: float | None
    patience: int | None
    fixed_features: bool
    seed: int


@dataclass(frozen=True)
class Checkpoints:
    """Where checkpoints go, how often, and how many are kept."""

    directory: Path
    every: int = 1
    keep_last: int = 2

    @staticmethod
    def newest(path: Path) -> Path:
        """The newest checkpoint in a directory of them, or the directory if it is one itself."""
        if (path / "config.json").exists():
            return path
        found = sorted(path.glob("step-*"))
        if not found:
            raise CheckpointError(f"{path}: holds no checkpoint.")
        return found[-1]

    def prune(self) -> None:
        """Remove all but the last ones, and what an interrupted write has left behind."""
        for old in sorted(self.directory.glob("step-*"))[: -self.keep_last]:
            shutil.rmtree(old)
        for stale in [*self.directory.glob(".step-*.tmp-*"), *self.directory.glob(".step-*.old-*")]:
            shutil.rmtree(stale, ignore_errors=True)
