"""Training: a plan, data, one loop, and files that it can go on from."""

from pyro_dak.training.checkpoint import CheckpointError, load, save
from pyro_dak.training.fit import build_objective, fit
from pyro_dak.training.plan import History, TrainingError

__all__ = ["CheckpointError", "History", "TrainingError", "build_objective", "fit", "load", "save"]
