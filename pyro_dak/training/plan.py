"""What a training run keeps: its settings, its history, its checkpoints on disk."""

import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from pyro_dak.training.checkpoint import CheckpointError, is_ours

__all__ = ["Checkpoints", "History", "Settings", "TrainingError"]


_NAME = re.compile(r"step-\d{9}")
_TEMPORARY = re.compile(r"\.step-\d{9}\.(tmp|old)-[0-9a-f]{8}")


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
    last_layer_optimizer: str
    schedule: str
    weight_decay: float
    decay_last_layer: bool
    clip_norm: float | None
    patience: int | None
    fixed_features: bool
    objective: str
    has_validation: bool
    world_size: int
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
        found = Checkpoints.found(path)
        if not found:
            raise CheckpointError(f"{path}: holds no checkpoint.")
        return found[-1]

    @staticmethod
    def found(directory: Path) -> list[Path]:
        """The checkpoints in a directory, oldest first; other things in it do not count."""
        return sorted(
            path
            for path in directory.glob("step-*")
            if _NAME.fullmatch(path.name) and is_ours(path)
        )

    def prune(self) -> None:
        """Remove all but the last ones, and what an interrupted write has left behind."""
        for old in self.found(self.directory)[: -self.keep_last]:
            shutil.rmtree(old)
        for stale in self.directory.glob(".step-*"):
            if _TEMPORARY.fullmatch(stale.name):
                shutil.rmtree(stale, ignore_errors=True)
