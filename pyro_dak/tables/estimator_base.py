"""What `DAKRegressor` and `DAKClassifier` share: parameters, scaling, training, prediction."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import (
    _check_sample_weight,
    check_consistent_length,
    check_is_fitted,
    validate_data,
)
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.inference.guides.base import MeanFieldGuide
from pyro_dak.model.dak import DAK
from pyro_dak.model.likelihoods import Likelihood
from pyro_dak.tables.ensemble import Ensemble, Member, ensemble_plan, train
from pyro_dak.tables.rows import (
    FEW_ROWS,
    Array,
    Rows,
    chunks,
    default_batch_size,
    default_epochs,
    held_out_rows,
    scales,
    without,
)
from pyro_dak.tables.saving import read_estimator, write_estimator
from pyro_dak.training.plan import Plan
from pyro_dak.validation import check_integer, check_positive

__all__ = ["TableEstimator"]

_NUM_FOLDS = 5
# With fewer rows than this none are held out.
_LEAST_ROWS = 20


class TableEstimator(BaseEstimator):
    """Base of the estimators; subclasses say what targets, likelihood and calibration are."""

    # Whether `_calibrate` looks at rows that two members have not seen.
    _shares_held_out_rows = False

    def __init__(
        self,
        ensemble_size: int = 1,
        hidden_layer_sizes: tuple[int, ...] = (64, 32, 64),
        num_units: int = 16,
        level: int = 5,
        epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float = 2e-2,
        weight_decay: float = 0.0,
        early_stopping: bool = True,
        validation_fraction: float = 0.1,
        refit: bool | None = None,
        warm_start: bool = False,
        random_state: Any = None,
        device: str = "auto",
        progress: bool = True,
    ):
        self.ensemble_size = ensemble_size
        self.hidden_layer_sizes = hidden_layer_sizes
        self.num_units = num_units
        self.level = level
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.refit = refit
        self.warm_start = warm_start
        self.random_state = random_state
        self.device = device
        self.progress = progress

    def _validated_targets(self, y: Any) -> Array:
        """y as an array, or an error."""
        raise NotImplementedError

    def _set_targets(self, y: Array, weights: Array) -> None:
        """Learn what there is to learn of the targets before training: scales, or classes."""
        raise NotImplementedError

    def _targets(self, y: Array) -> Tensor:
        """What the likelihood sees."""
        raise NotImplementedError

    def _likelihood(self) -> Likelihood:
        raise NotImplementedError

    def _num_outputs(self) -> int:
        raise NotImplementedError

    def _scores(self, y: Tensor, ensemble: Ensemble, moments: FunctionMoments) -> Tensor:
        """Scores of held-out rows, `(E, n)`, smaller is better, insensitive to calibration."""
        raise NotImplementedError

    def _calibrate(self, y: Tensor, ensemble: Ensemble, moments: FunctionMoments) -> None:
        """Set what makes predictions of held-out rows as wide as their errors."""
        raise NotImplementedError

    def _reset_calibration(self) -> None:
        """Take predictions as the model makes them."""
        raise NotImplementedError

    def _check_parameters(self) -> None:
        for name in ("ensemble_size", "num_units", "level"):
            check_integer(name, getattr(self, name), minimum=1)
        for name in ("epochs", "batch_size"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), minimum=1)
        check_positive("learning_rate", self.learning_rate)
        if not self.weight_decay >= 0:
            raise ValueError(f"`weight_decay` must not be negative; got {self.weight_decay}.")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(
                f"`validation_fraction` must lie between 0 and 1; got {self.validation_fraction}."
            )
        if len(self.hidden_layer_sizes) == 0:
            raise ValueError("`hidden_layer_sizes` must hold at least one width.")
        for width in self.hidden_layer_sizes:
            check_integer("hidden_layer_sizes", width, minimum=1)

    def _device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    def _plan(self, num_rows: int, seed: int) -> Plan:
        """Batch size and epochs by the number of rows, unless given."""
        batch_size = self.batch_size or default_batch_size(num_rows)
        return ensemble_plan(
            epochs=self.epochs or default_epochs(num_rows),
            batch_size=batch_size,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            seed=seed,
        )

    def _build(self, size: int, seed: int) -> Ensemble:
        """Fresh members, each from a seed of its own, on the device."""
        with torch.random.fork_rng(devices=[]):
            members = [self._build_member(seed + index) for index in range(size)]
        return Ensemble(members).to(self._device(), torch.float32)

    def _build_member(self, seed: int) -> Member:
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        width_in = self.n_features_in_
        for width in self.hidden_layer_sizes:
            layers += [nn.Linear(width_in, width), nn.ReLU()]
            width_in = width
        model = DAK(
            nn.Sequential(*layers),
            feature_dim=width_in,
            num_units=self.num_units,
            num_outputs=self._num_outputs(),
            level=self.level,
            likelihood=self._likelihood(),
        )
        model.input_shape = (self.n_features_in_,)
        return model, MeanFieldGuide(model, init_scale=0.1)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Train on a table.

        Args:
            X: `(N, D)`, an array or a data frame of numbers.
            y: targets.
            sample_weight: how often each row counts, `(N,)`; by default once.
        """
        self._check_parameters()
        is_warm = self.warm_start and hasattr(self, "ensemble_")
        X, y, weights = self._validated(X, y, sample_weight, reset=not is_warm)
        if not is_warm:
            self._set_targets(y, weights)
            self.x_mean_, self.x_scale_ = scales(X, weights)
        self.num_rows_seen_ = float(weights.sum())
        start = self.ensemble_ if is_warm and len(self.ensemble_) == self.ensemble_size else None
        self._fit_rows(self._rows(X, y, weights), start)
        return self

    def save(self, path: str | os.PathLike[str], overwrite: bool = False) -> Path:
        """Write the fitted estimator to a directory of safetensors and JSON; returns its path.

        Args:
            path: a new directory; an existing one is replaced only with `overwrite`, and only if
                it holds a saved model.
            overwrite: whether an existing model may be replaced.
        """
        check_is_fitted(self)
        return write_estimator(self, path, overwrite, None)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Any:
        """The estimator that `save` wrote; reading it runs no code of its author.

        Raises:
            CheckpointError: naming the file and what is wrong with it.
        """
        return read_estimator(path, {cls.__name__: cls})[0]

    def _partial_fit(self, X: Any, y: Any, sample_weight: Any) -> Any:
        """One pass over these rows, counted as a sample of all rows seen so far."""
        self._check_parameters()
        is_first = not hasattr(self, "ensemble_")
        X, y, weights = self._validated(X, y, sample_weight, reset=is_first)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        if is_first:
            self._set_targets(y, weights)
            self.x_mean_, self.x_scale_ = scales(X, weights)
            self.num_rows_seen_ = 0.0
            self._reset_calibration()
            self.ensemble_ = self._build(self.ensemble_size, seed)
        self.num_rows_seen_ += float(weights.sum())
        rows = self._rows(X, y, weights * (self.num_rows_seen_ / weights.sum()))
        plan = replace(self._plan(len(X), seed), epochs=1, schedule="constant")
        plan = replace(plan, learning_rate=0.1 * plan.learning_rate)
        self.history_ = train(self.ensemble_, rows, plan, progress=self.progress)
        return self

    def _validated(
        self, X: Any, y: Any, sample_weight: Any, reset: bool
    ) -> tuple[Array, Array, Array]:
        if y is None:
            raise ValueError(
                f"This {type(self).__name__} estimator requires y to be passed, but the target y "
                "is None."
            )
        X = validate_data(
            self, X, reset=reset, dtype=[np.float64, np.float32], ensure_min_samples=2
        )
        y = self._validated_targets(y)
        check_consistent_length(X, y)
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        if not weights.sum() > 0:
            raise ValueError("Sample weights must contain at least one non-zero number.")
        is_used = weights > 0
        return (X, y, weights) if is_used.all() else (X[is_used], y[is_used], weights[is_used])

    def _rows(self, X: Array, y: Array, weights: Array) -> Rows:
        device = self._device()
        tensors = (self._inputs(X), self._targets(y), torch.from_numpy(weights).float())
        return Rows(*(tensor.to(device) for tensor in tensors))

    def _fit_rows(self, rows: Rows, start: Ensemble | None) -> None:
        """Train on the rows: hold some out, calibrate on them, and then use them too.

        First pass: every member trains without a held-out part, which says when to stop and how
        wide predictions must be. With few rows, or one member, a second pass trains on all
        rows for as long as the first one found best.
        """
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        N, E = len(rows.x), self.ensemble_size
        plan = self._plan(N, seed)
        self._reset_calibration()
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
            self._refit(rows, plan)

    def _refit(self, rows: Rows, plan: Plan) -> None:
        self.ensemble_ = self._build(self.ensemble_size, plan.seed + 1000)
        plan = replace(plan, stop_after=self.history_.best_epoch)
        history = train(self.ensemble_, rows, plan, None, self.progress, "refit")
        self.history_.rows += history.rows
        self.history_.seconds += history.seconds

    def _inputs(self, X: Array) -> Tensor:
        """Standardised inputs in float32, chunk by chunk."""
        out = np.empty(X.shape, dtype=np.float32)
        for rows in chunks(len(X)):
            out[rows] = (X[rows] - self.x_mean_) / self.x_scale_
        return torch.from_numpy(out)

    def _moments(self, X: Any) -> Iterator[tuple[Ensemble, FunctionMoments]]:
        """q(f) of every member, chunk by chunk of the rows, in float64.

        In double precision a row's prediction does not depend on the rows beside it.
        """
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=[np.float64, np.float32])
        ensemble = self.ensemble_.to(self._device(), torch.float64)
        slices = chunks(len(X), len(ensemble) * ensemble.model.num_functions)
        bar = tqdm(slices, desc="predict", delay=2, disable=not self.progress, leave=False)
        for rows in bar:
            x = (X[rows].astype(np.float64) - self.x_mean_) / self.x_scale_
            with torch.no_grad():
                yield ensemble, ensemble.moments(torch.from_numpy(x).to(ensemble.device))
