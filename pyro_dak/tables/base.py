"""What `DAKRegressor` and `DAKClassifier` share: parameters, scaling, training, prediction."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.inference.guides import MeanFieldGuide
from pyro_dak.model.dak import DAK
from pyro_dak.model.likelihoods import Likelihood
from pyro_dak.tables.ensemble import Ensemble, ensemble_plan, train
from pyro_dak.tables.predictive import Array
from pyro_dak.tables.rows import (
    FEW_ROWS,
    Rows,
    default_batch_size,
    default_epochs,
    held_out_rows,
    without,
)
from pyro_dak.tables.saving import read_estimator, write_estimator
from pyro_dak.training.loop import seeded
from pyro_dak.training.plan import Plan
from pyro_dak.validation import check_integer, check_probability

__all__ = ["Parameters", "TableEstimator", "scales"]

# With fewer rows than this, no rows are held out.
_LEAST_ROWS = 20
_NUM_FOLDS = 5
# The number of rows that are computed at a time, and how many numbers of q(f) they may have.
_CHUNK, _CHUNK_NUMBERS = 8192, 1_000_000
# Inputs of these types are taken as they are; others become the first.
_DTYPES = [np.float64, np.float32]


@dataclass(eq=False, repr=False)
class Parameters:
    """The arguments of the estimators. `DAKRegressor` explains them."""

    ensemble_size: int = 1
    hidden_layer_sizes: tuple[int, ...] = (64, 32, 64)
    num_units: int = 16
    level: int = 5
    # Only the regressor takes this argument. It stands here to keep its place among the others.
    heteroscedastic: bool = field(default=False, init=False)
    epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float = 2e-2
    weight_decay: float = 0.0
    early_stopping: bool = True
    validation_fraction: float = 0.1
    refit: bool | None = None
    warm_start: bool = False
    random_state: Any = None
    device: str = "auto"
    progress: bool = True


class TableEstimator(Parameters, BaseEstimator):
    """The base of both estimators. A subclass defines targets, likelihood and calibration."""

    # Whether `_calibrate` needs rows that two members have not seen.
    _shares_held_out_rows = False
    # The factors that leave predictions as the model makes them.
    _uncalibrated: ClassVar[dict[str, float]]

    def _validated_targets(self, y: Any) -> Array:
        """y as an array, or an error."""
        raise NotImplementedError

    def _set_targets(self, y: Array, weights: Array) -> None:
        """Learn the scales of the targets, or the classes, before training."""
        raise NotImplementedError

    def _targets(self, y: Array) -> Tensor:
        """The targets as the likelihood expects them."""
        raise NotImplementedError

    def _likelihood(self) -> tuple[Likelihood, int]:
        """The likelihood, and the number of outputs."""
        raise NotImplementedError

    def _scores(self, y: Tensor, ensemble: Ensemble, moments: FunctionMoments) -> Tensor:
        """Scores of held-out rows, `(E, n)`; smaller is better, and calibration changes nothing."""
        raise NotImplementedError

    def _calibrate(self, y: Tensor, ensemble: Ensemble, moments: FunctionMoments) -> None:
        """Set the factors that make predictions of held-out rows as wide as their errors."""
        raise NotImplementedError

    def _check_parameters(self) -> None:
        for name in ("ensemble_size", "num_units", "level"):
            check_integer(name, getattr(self, name), minimum=1)
        if len(self.hidden_layer_sizes) == 0:
            raise ValueError("`hidden_layer_sizes` must hold at least one width.")
        for width in self.hidden_layer_sizes:
            check_integer("hidden_layer_sizes", width, minimum=1)
        check_probability("validation_fraction", self.validation_fraction)
        self._plan(num_rows=1, seed=0)  # a plan checks its settings

    def _device(self) -> torch.device:
        automatic = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.device(automatic if self.device == "auto" else self.device)

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _plan(self, num_rows: int, seed: int) -> Plan:
        """The settings of a run. Batch size and epochs follow the number of rows, unless given."""
        epochs, batch_size = self.epochs, self.batch_size
        return ensemble_plan(
            default_epochs(num_rows) if epochs is None else epochs,
            default_batch_size(num_rows) if batch_size is None else batch_size,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            seed=seed,
        )

    def _build(self, size: int, seed: int) -> Ensemble:
        """New members on the device, each with its own seed."""
        widths, members = [self.n_features_in_, *self.hidden_layer_sizes], []
        for index in range(size):
            with seeded(seed + index, torch.device("cpu")):
                layers = [part for w in pairwise(widths) for part in (nn.Linear(*w), nn.ReLU())]
                likelihood, num_outputs = self._likelihood()
                network, sizes = nn.Sequential(*layers), (widths[-1], self.num_units, num_outputs)
                model = DAK(network, *sizes, level=self.level, likelihood=likelihood)
                model.input_shape = (self.n_features_in_,)
                members.append((model, MeanFieldGuide(model, init_scale=0.1)))
        return Ensemble(members).to(self._device(), torch.float32)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Train on a table of numbers, `(N, D)`, and return the estimator.

        A row counts as often as `sample_weight` says, `(N,)`; by default once.
        """
        is_warm = self.warm_start and hasattr(self, "ensemble_")
        X, y, weights = self._validated(X, y, sample_weight, is_first=not is_warm)
        self.num_rows_seen_ = float(weights.sum())
        start = self.ensemble_ if is_warm and len(self.ensemble_) == self.ensemble_size else None
        self._fit_rows(self._rows(X, y, weights), start)
        return self

    def _partial_fit(self, X: Any, y: Any, sample_weight: Any, classes: Any = None) -> Any:
        """Make one pass over these rows, which count as a sample of all rows seen so far."""
        is_first = not hasattr(self, "ensemble_")
        X, y, weights = self._validated(X, y, sample_weight, is_first, classes)
        seed = self._seed()
        if is_first:
            self.num_rows_seen_ = 0.0
            self.__dict__.update(self._uncalibrated)
            self.ensemble_ = self._build(self.ensemble_size, seed)
        self.num_rows_seen_ += float(weights.sum())
        rows = self._rows(X, y, weights * (self.num_rows_seen_ / weights.sum()))
        plan = replace(self._plan(len(X), seed), epochs=1, schedule="constant")
        plan = replace(plan, learning_rate=0.1 * plan.learning_rate)
        self.history_ = train(self.ensemble_, rows, plan, progress=self.progress)
        return self

    def save(self, path: str | os.PathLike[str], overwrite: bool = False) -> Path:
        """Write the fitted estimator to a directory of safetensors and JSON, and return its path.

        An existing directory is replaced only with `overwrite`, and only if it is a saved model.
        """
        check_is_fitted(self)
        return write_estimator(self, path, overwrite, None)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Any:
        """The estimator that `save` wrote. Loading it runs no code from the files.

        Raises:
            CheckpointError: the message names the file and says what is wrong with it.
        """
        return read_estimator(path, {cls.__name__: cls})[0]

    def _validated(
        self, X: Any, y: Any, sample_weight: Any, is_first: bool, classes: Any = None
    ) -> tuple[Array, Array, Array]:
        """Inputs, targets and weights of the rows whose weight is not zero.

        At the first call the scales of the columns are learned too, and those of the targets, or
        their classes.
        """
        self._check_parameters()
        if y is None:
            raise ValueError(
                f"This {type(self).__name__} estimator requires y to be passed, but the target y "
                "is None."
            )
        X = validate_data(self, X, reset=is_first, dtype=_DTYPES, ensure_min_samples=2)
        y = self._validated_targets(y)
        check_consistent_length(X, y)
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        if not weights.sum() > 0:
            raise ValueError("Sample weights must contain at least one non-zero number.")
        is_used = weights > 0
        if not is_used.all():
            X, y, weights = X[is_used], y[is_used], weights[is_used]
        if is_first:
            self._set_targets(y if classes is None else np.asarray(classes), weights)
            self.x_mean_, self.x_scale_ = scales(X, weights)
        return X, y, weights

    def _rows(self, X: Array, y: Array, weights: Array) -> Rows:
        """The rows as tensors on the device: standardised inputs, targets and weights."""
        x = np.empty(X.shape, dtype=np.float32)
        for part in _chunks(len(X)):
            x[part] = (X[part] - self.x_mean_) / self.x_scale_
        tensors = (torch.from_numpy(x), self._targets(y), torch.from_numpy(weights).float())
        device = self._device()
        return Rows(*(tensor.to(device) for tensor in tensors))

    def _fit_rows(self, rows: Rows, start: Ensemble | None) -> None:
        """Train on the rows in one or two passes, and calibrate on rows that are held out.

        In the first pass every member trains without its held-out part. That part decides when to
        stop and how wide predictions must be. With few rows, or with one member, a second pass
        trains on all rows for as many epochs as the first pass found best.
        """
        seed = self._seed()
        N, E = len(rows.x), self.ensemble_size
        plan = self._plan(N, seed)
        self.__dict__.update(self._uncalibrated)
        if not self.early_stopping or N < _LEAST_ROWS:
            self.ensemble_ = start or self._build(E, seed)
            self.history_ = train(self.ensemble_, rows, plan, progress=self.progress)
            return
        is_small = N < FEW_ROWS
        refit = (E == 1 or is_small) if self.refit is None else self.refit
        refit = refit and start is None
        first = start or self._build(max(E, _NUM_FOLDS) if is_small and refit else E, seed)
        overlap = E > 1 and self._shares_held_out_rows
        held_out = held_out_rows(N, len(first), self.validation_fraction, seed, overlap)
        held_out = held_out.to(rows.x.device)
        x, y = rows.x[held_out], rows.y[held_out]  # (E, n, ...)

        @torch.no_grad()
        def score_fn() -> Tensor:
            return self._scores(y, first, first.moments(x))

        self.history_ = train(first, without(rows, held_out), plan, score_fn, self.progress)
        with torch.no_grad():
            self._calibrate(y, first, first.moments(x))
        self.ensemble_ = first
        if refit:
            self.ensemble_ = self._build(E, seed + 1000)
            plan = replace(plan, stop_after=self.history_.best_epoch)
            second = train(self.ensemble_, rows, plan, None, self.progress, "refit")
            self.history_.rows += second.rows
            self.history_.seconds += second.seconds

    def _moments(self, X: Any) -> Iterator[tuple[Ensemble, FunctionMoments]]:
        """q(f) of every member, one chunk of rows after the other, in float64.

        In double precision the prediction of a row does not depend on the rows beside it.
        """
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=_DTYPES)
        ensemble = self.ensemble_.to(self._device(), torch.float64)
        slices = _chunks(len(X), ensemble.tensors["guide.mu_loc"].numel())  # (E, F)
        for rows in tqdm(slices, "predict", delay=2, disable=not self.progress, leave=False):
            x = (X[rows].astype(np.float64) - self.x_mean_) / self.x_scale_
            with torch.no_grad():
                yield ensemble, ensemble.moments(torch.from_numpy(x).to(ensemble.device))


def scales(values: Array, weights: Array) -> tuple[Array, Array]:
    """Weighted mean and standard deviation of every column; 1 for the deviation of a constant."""
    total = weights.sum()
    mean = np.einsum("n,nd->d", weights, values, dtype=np.float64) / total
    var = np.zeros(values.shape[1])
    for rows in _chunks(len(values)):
        var += np.einsum("n,nd->d", weights[rows], (values[rows] - mean) ** 2)
    scale = np.sqrt(var / total)
    is_constant = scale <= 1e-12 * np.maximum(np.abs(mean), 1e-300)
    return mean, np.where(is_constant, 1.0, scale)


def _chunks(num_rows: int, numbers_per_row: int = 1) -> list[slice]:
    """Slices that cover all rows. They are shorter where a row has many numbers."""
    size = max(64, min(_CHUNK, _CHUNK_NUMBERS // numbers_per_row))
    return [slice(start, start + size) for start in range(0, num_rows, size)]
