"""What `DAKRegressor` and `DAKClassifier` share: parameters, scaling, training, prediction."""

import os
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator, is_classifier
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.inference.guides import MeanFieldGuide
from pyro_dak.model.dak import DAK
from pyro_dak.model.likelihoods import Likelihood
from pyro_dak.model.modes import with_own_tensors
from pyro_dak.prediction.results import NoveltyScores
from pyro_dak.tables.conditioning import ConditionedMembers
from pyro_dak.tables.ensemble import Ensemble, FixedEnsemble, ensemble_plan, train
from pyro_dak.tables.exporting import export_estimator, made_up_rows, raw_rows
from pyro_dak.tables.filling import learn_filling
from pyro_dak.tables.novelty import EnsembleNovelty, learn_novelty, reference_of
from pyro_dak.tables.predictive import Array
from pyro_dak.tables.rows import (
    FEW_ROWS,
    Rows,
    default_batch_size,
    default_epochs,
    default_fraction,
    effective_number,
    held_out_rows,
    rows_kept_apart,
    share_kept_apart,
    without,
)
from pyro_dak.tables.saving import read_estimator, write_estimator
from pyro_dak.tables.schema import (
    Columns,
    as_frame,
    encode,
    learn_columns,
    raw_columns,
    with_telling_gaps,
)
from pyro_dak.training.checkpoint import MAX_BYTES
from pyro_dak.training.data import Data
from pyro_dak.training.export import Exported, Format
from pyro_dak.training.loop import seeded
from pyro_dak.training.plan import Plan
from pyro_dak.validation import check_choice, check_integer, check_positive, check_probability

__all__ = ["Parameters", "TableEstimator", "scales", "standardized"]

# With fewer rows than this, no rows are held out.
_LEAST_ROWS = 20
_NUM_FOLDS = 5
# The number of rows that are computed at a time, and the features or numbers of q(f) they may have.
_CHUNK, _CHUNK_NUMBERS = 8192, 1_000_000
# So many chunks of an array are encoded at a time.
_ENCODED_CHUNKS = 8
# Layers draw their first weights from torch's global generator, which all threads share.
_BUILDING = threading.Lock()
# The number of bins of an embedded column, and in how large tables columns are embedded unasked.
_NUM_BINS = 8
_MOST_EMBEDDED_COLUMNS, _MOST_EMBEDDED_ROWS = 128, 100_000
# Inputs of these types are taken as they are; others become the first.
_DTYPES = [np.float64, np.float32]


@dataclass(eq=False, repr=False)
class Parameters:
    """The arguments of the estimators. `DAKRegressor` explains them."""

    ensemble_size: int = 5
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
    validation_fraction: float | None = None
    refit: bool | None = None
    warm_start: bool = False
    random_state: Any = None
    device: str = "auto"
    progress: bool = True
    input_units: bool = False
    categorical_features: Any = "from_dtype"
    numeric_embedding: str | None = "auto"


class TableEstimator(Parameters, BaseEstimator):
    """The base of both estimators. A subclass defines targets, likelihood and calibration."""

    # The factors that leave predictions as the model makes them.
    _uncalibrated: ClassVar[dict[str, Any]]
    ensemble_: Ensemble
    columns_: Columns | None
    conditioned_: ConditionedMembers | None
    novelty_: EnsembleNovelty | None
    kept_apart_: list[Any] | None

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

    def _scores(self, held_out: Rows, ensemble: Ensemble) -> Tensor:
        """Scores of held-out rows, `(E, n)`; smaller is better, and calibration changes nothing."""
        raise NotImplementedError

    def _calibrate(self, held_out: Rows, ensemble: Ensemble, overlap: int, is_refit: bool) -> None:
        """Set the factors that make predictions of new rows as wide as their errors.

        The last `overlap` rows of a member are the first rows of the next member. With `is_refit`
        other members will predict, which are trained in the same way.
        """
        raise NotImplementedError

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def _check_parameters(self) -> None:
        for name in ("ensemble_size", "num_units", "level"):
            check_integer(name, getattr(self, name), minimum=1)
        if not isinstance(self.hidden_layer_sizes, Collection):
            raise TypeError(
                "`hidden_layer_sizes` must be a tuple of widths, one for each layer; got "
                f"{self.hidden_layer_sizes!r}."
            )
        if len(self.hidden_layer_sizes) == 0:
            raise ValueError("`hidden_layer_sizes` must hold at least one width.")
        for width in self.hidden_layer_sizes:
            check_integer("hidden_layer_sizes", width, minimum=1)
        if self.validation_fraction is not None:
            check_probability("validation_fraction", self.validation_fraction)
        check_positive("learning_rate", self.learning_rate)
        if self.numeric_embedding is not None:
            check_choice("numeric_embedding", self.numeric_embedding, ("auto", "piecewise"))
        for name in ("heteroscedastic", "early_stopping", "warm_start", "refit", "input_units"):
            value = getattr(self, name)
            if value not in (True, False) and not (name == "refit" and value is None):
                raise TypeError(f"`{name}` must be True or False; got {value!r}.")
        self._device()
        self._plan(num_rows=1, seed=0)  # a plan checks its settings

    def _device(self) -> torch.device:
        automatic = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(automatic if self.device == "auto" else self.device)
            torch.empty(0, device=device)  # is it here?
            return device
        except (AssertionError, RuntimeError, TypeError) as error:
            raise ValueError(
                f"`device` must be 'auto', 'cpu', 'cuda' or another device of torch; got "
                f"{self.device!r}."
            ) from error

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
        widths, members = [len(self.x_mean_), *self.hidden_layer_sizes], []
        for index in range(size):
            with _BUILDING, seeded(seed + index, torch.device("cpu")):
                layers = [part for w in pairwise(widths) for part in (nn.Linear(*w), nn.ReLU())]
                likelihood, num_outputs = self._likelihood()
                network, sizes = nn.Sequential(*layers), (widths[-1], self.num_units, num_outputs)
                model = DAK(
                    network,
                    *sizes,
                    level=self.level,
                    likelihood=likelihood,
                    input_units=bool(self.input_units),
                    prior_scale=1.0,
                )
                model.input_shape = (widths[0],)
                members.append((model, MeanFieldGuide(model, init_scale=0.1)))
        return self._copy(Ensemble(members))

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Train on a table, `(N, D)`, and return the estimator.

        X is an array of numbers, or a data frame with columns of numbers, booleans, dates, texts
        and categories, and values may be missing. A row counts as often as `sample_weight` says,
        `(N,)`; by default once. That holds for training, for stopping and for the calibration. If
        `fit` fails or is interrupted, the estimator stays as it was.
        """
        is_warm = self.warm_start and hasattr(self, "ensemble_")
        with self._unchanged_by_failure():
            X, y, weights = self._validated(X, y, sample_weight, is_first=not is_warm)
            self.num_rows_seen_ = float(weights.sum())
            is_start = is_warm and len(self.ensemble_) == self.ensemble_size
            start = self._copy(self.ensemble_) if is_start else None
            self.conditioned_ = None
            self._fit_rows(self._rows(X, y, weights), start)
        return self

    def _partial_fit(self, X: Any, y: Any, sample_weight: Any, classes: Any = None) -> Any:
        """Make one pass over these rows, which count as a sample of all rows seen so far."""
        is_first = not hasattr(self, "ensemble_")
        with self._unchanged_by_failure():
            X, y, weights = self._validated(X, y, sample_weight, is_first, classes, is_part=True)
            seed = self._seed()
            if is_first:
                self.num_rows_seen_ = 0.0
                self.__dict__.update(self._uncalibrated)
            self.ensemble_ = (
                self._build(self.ensemble_size, seed) if is_first else self._copy(self.ensemble_)
            )
            self.kept_apart_ = self.novelty_ = self.conditioned_ = None
            self.num_rows_seen_ += float(weights.sum())
            rows = self._rows(X, y, weights * (self.num_rows_seen_ / weights.sum()))
            plan = replace(self._plan(len(X), seed), epochs=1, schedule="constant")
            plan = replace(plan, learning_rate=0.1 * plan.learning_rate)
            self.history_ = train(self.ensemble_, rows, plan, progress=self.progress)
        return self

    def _condition(self, X: Any, y: Any, sample_weight: Any, forget: float) -> Any:
        """Condition the last layers on these rows; the networks stay as they are."""
        with self._unchanged_by_failure():
            X, y, weights = self._validated(X, y, sample_weight, is_first=False, min_rows=1)
            if not (weights == 1).all():
                raise ValueError(
                    "`sample_weight` must be left out, because rows that condition the last layer "
                    "count once each. Pass `update_network=True` for rows with weights."
                )
            rows = self._rows(X, y, weights)
            known = self.__dict__.get("conditioned_")  # old files have none
            known = ConditionedMembers(self._copy(self.ensemble_)) if known is None else known
            self.conditioned_ = known.updated(rows.x, rows.y, forget)
            self.num_rows_seen_ = forget * self.num_rows_seen_ + len(X)
        return self

    @contextmanager
    def _unchanged_by_failure(self) -> Iterator[None]:
        """After an error or an interrupt inside, the estimator is what it was before."""
        before = dict(self.__dict__)
        try:
            yield
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    def _copy(self, ensemble: Ensemble) -> Ensemble:
        """A copy for training, on the device."""
        return ensemble.to(self._device(), torch.float32)

    def save(self, path: str | os.PathLike[str], overwrite: bool = False) -> Path:
        """Write the fitted estimator to a directory of safetensors and JSON, and return its path.

        An existing directory is replaced only with `overwrite`, and only if it is a saved model.
        """
        check_is_fitted(self)
        return write_estimator(self, path, overwrite, None)

    def export(
        self,
        path: str | os.PathLike[str],
        format: Format = "onnx",
        *,
        x: Any = None,
        novelty: bool = True,
        tolerance: float = 1e-5,
        overwrite: bool = False,
        target: str | None = None,
    ) -> Exported:
        """Write the fitted estimator to one file that predicts without pyro_dak.

        The file maps rows of the table to what `predict_dist` says, in double precision: `mean`,
        `epistemic` and `aleatoric`, variances, and `scale`, `(N, C)`; for classes `probs` `(N, K)`,
        `entropy` and `expected_entropy`; and `novelty`. Standardisation, missing values, dates and
        categories are in it. Its inputs are `x`, the columns of numbers and of dates, in days since
        1970, with NaN for missing ones; and in ONNX `categories`, texts, with "(missing)" for
        missing ones. A program of torch has no texts: there the categories follow in `x` as their
        places, which the file lists under "codes", or -1. The file says all this about itself.

        Args:
            path: the file.
            format: "onnx", which needs `pip install pyro_dak[onnx]`, or "torch".
            x: rows of a table to compare the file with `predict_dist` at; by default made-up rows.
            novelty: whether novelty is in it.
            tolerance: the largest difference that is allowed (see `pyro_dak.export`).
            overwrite: whether a file that exists may be replaced.
            target: the name of the target, which the file keeps.
        """
        check_is_fitted(self)
        columns = self.__dict__.get("columns_")
        if columns is None:  # a model of an earlier version
            names = _names(self.n_features_in_)
            columns = Columns(names, dict.fromkeys(names, 0.0))
        if x is None:
            D = len(columns.medians)
            scales_of_x = self.x_mean_[:D], self.x_scale_[:D]
            x = made_up_rows(columns, *scales_of_x, hasattr(self, "feature_names_in_"))
        X = self._validated_inputs(x, is_first=False)
        is_frame = isinstance(X, pd.DataFrame)
        raw = raw_rows(raw_columns(X, columns) if is_frame else [*X.T.astype(np.float64)], columns)
        module = self._portable(novelty)
        places = (path, format, tolerance, overwrite, target)
        return export_estimator(self, module, x, raw, columns, *places)

    def _portable(self, novelty: bool) -> nn.Module:
        """The module from raw rows to predictions."""
        raise NotImplementedError

    @classmethod
    def load(cls, path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> Any:
        """The estimator that `save` wrote. Loading it runs no code from the files.

        `max_bytes` is the most bytes that the files may have, and the most memory that they may ask
        for beyond the weights. By default each is 4 GiB.

        Raises:
            CheckpointError: the message names the file and says what is wrong with it.
        """
        return read_estimator(path, {cls.__name__: cls}, max_bytes)[0]

    def _validated(
        self,
        X: Any,
        y: Any,
        sample_weight: Any,
        is_first: bool,
        classes: Any = None,
        min_rows: int = 2,
        is_part: bool = False,
    ) -> tuple[Array, Array, Array]:
        """Inputs, targets and weights of the rows whose weight is not zero.

        At the first call the scales of the columns are learned too, and those of the targets, or
        their classes. More rows will follow those of a part.
        """
        self._check_parameters()
        if y is None:
            raise ValueError(
                f"This {type(self).__name__} estimator requires y to be passed, but the target y "
                "is None."
            )
        X = self._validated_inputs(X, is_first, min_rows)
        y = self._validated_targets(y)
        check_consistent_length(X, y)
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        if not weights.sum() > 0:
            raise ValueError("Sample weights must contain at least one non-zero number.")
        if not 1e-12 < weights.sum() < 1e15:
            raise ValueError(
                "Sample weights say how often a row counts, so their sum is a number of rows; got "
                f"{weights.sum():.3g}. Divide them by their mean."
            )
        is_used = weights.astype(np.float32) > 0
        if not is_used.all():
            X, y, weights = X[is_used], y[is_used], weights[is_used]
        if is_first:
            self._set_targets(y if classes is None else np.asarray(classes), weights)
            columns = _learn(X, self._categorical_names(X), self._num_bins(X, is_part), weights)
            table = X
            if not isinstance(X, pd.DataFrame):
                table = pd.DataFrame(X, columns=columns.names, copy=False)
            self.columns_ = with_telling_gaps(columns, table, y, is_classifier(self))
        X = _encoded(X, self.columns_)
        if is_first:
            self.x_mean_, self.x_scale_ = scales("X", X, weights, smallest=1e-305, largest=1e305)
        return X, y, weights

    def _num_bins(self, X: Any, is_part: bool) -> int:
        """In how many bins columns of numbers are embedded, zero if they are not.

        Unless asked for, they are not where they would become very many numbers, nor by quantiles
        of the first few rows, nor where each number is a unit.
        """
        if self.numeric_embedding == "auto":
            is_small = len(X) <= _MOST_EMBEDDED_ROWS and X.shape[1] <= _MOST_EMBEDDED_COLUMNS
            return _NUM_BINS if is_small and not is_part and not self.input_units else 0
        return 0 if self.numeric_embedding is None else _NUM_BINS

    def _validated_inputs(self, X: Any, is_first: bool, least_rows: int = 1) -> Any:
        """X as an array of numbers, or as a data frame whose columns are called by text.

        Arrays become data frames if some of their columns are categories.
        """
        checks: dict[str, Any] = {"reset": is_first, "ensure_min_samples": least_rows}
        columns = None if is_first else self.__dict__.get("columns_")
        if columns is None and not is_first:  # a model of an earlier version
            return validate_data(self, X, dtype=_DTYPES, **checks)
        chosen = self.categorical_features
        has_numbers = chosen is None or _is_from_dtype(chosen)
        has_numbers = has_numbers if columns is None else columns.are_numbers
        frame = as_frame(X)
        if frame is None and has_numbers:
            return validate_data(self, X, dtype=_DTYPES, ensure_all_finite="allow-nan", **checks)
        if frame is None:
            X = validate_data(self, X, dtype=None, ensure_all_finite=False, **checks)
            frame = pd.DataFrame(X)
        else:
            validate_data(self, frame, reset=is_first, skip_check_array=True)
            _check_shape(frame, least_rows)
        if columns is not None:
            return frame.set_axis(columns.names, axis=1)
        has_names = hasattr(self, "feature_names_in_")
        names = [*self.feature_names_in_] if has_names else _names(frame.shape[1])
        return frame.set_axis(names, axis=1)

    def _categorical_names(self, X: Any) -> list[str] | None:
        """The names of the columns of categories; None if their types say which they are."""
        chosen = self.categorical_features
        if _is_from_dtype(chosen):
            return None
        names = list(X.columns) if isinstance(X, pd.DataFrame) else _names(X.shape[1])
        if chosen is None:
            return []
        chosen = np.atleast_1d(np.asarray(chosen))
        if chosen.dtype == bool and chosen.shape == (len(names),):
            return [name for name, is_chosen in zip(names, chosen, strict=True) if is_chosen]
        if chosen.dtype.kind in "iu" and (np.abs(chosen + 0.5) < len(names)).all():
            return [names[index] for index in chosen]
        if chosen.size == 0:
            return []
        if chosen.dtype.kind in "OU" and set(chosen) <= set(names):
            return [str(name) for name in chosen]
        raise ValueError(
            "`categorical_features` must be 'from_dtype', None, or names, numbers or a mask of "
            f"some of the {len(names)} columns; got {self.categorical_features!r}."
        )

    def _rows(self, X: Array, y: Array, weights: Array) -> Rows:
        """The rows as tensors on the device: standardised inputs, targets and weights."""
        x = np.empty(X.shape, dtype=np.float32)
        for part in _chunks(len(X)):
            x[part] = self._standardized(X[part], limit=1e15)
        tensors = (torch.from_numpy(x), self._targets(y), torch.from_numpy(weights).float())
        device = self._device()
        return Rows(*(tensor.to(device) for tensor in tensors))

    def _standardized(self, X: Array, limit: float) -> Array:
        """Inputs in standard deviations from the mean of the training rows, in float64."""
        return standardized("X", X.astype(np.float64), self.x_mean_, self.x_scale_, limit)

    def _fit_rows(self, rows: Rows, start: Ensemble | None) -> None:
        """Train on the rows, and calibrate on rows that are held out.

        Every member trains without its held-out part. All parts together decide when the members
        stop, and how wide predictions must be. Several members are done after this one pass. A
        single one is trained again, on all rows, for as many epochs; so the errors of the held-out
        rows are those of networks that were trained just as long as the one that predicts.
        """
        seed, E = self._seed(), self.ensemble_size
        plan = self._plan(len(rows.x), seed)
        is_small = effective_number(rows.weights) < FEW_ROWS
        by_default = E == 1 and not self.warm_start
        refit = bool(by_default if self.refit is None else self.refit) and start is None
        if start is None or not self.early_stopping:
            self.__dict__.update(self._uncalibrated)
        num_parts = max(E, _NUM_FOLDS) if refit and is_small else E
        held_out, overlap = self._hold_out(rows, num_parts, seed, start is not None)
        if len(held_out.unique()) < 2:  # too few to say anything
            self.ensemble_ = start or self._build(E, seed)
            kept = without(rows, held_out[:E])
            self.history_ = train(self.ensemble_, kept, plan, progress=self.progress)
            self.novelty_ = learn_novelty(
                self.ensemble_, rows.x, held_out[:E], None, self._entropies
            )
            return
        self.ensemble_ = start or self._build(num_parts, seed)
        part = Rows(*(tensor[held_out] for tensor in rows))  # (E, n, ...)
        self._stop_and_calibrate(part, without(rows, held_out), overlap, plan, refit)
        reference = reference_of(
            self.ensemble_, rows.x, held_out, self._entropies, overlap if E > 1 else 0, E
        )
        if refit:
            self.ensemble_ = self._build(E, seed + 1000)
            plan = replace(plan, stop_after=self.history_.best_epoch)
            second = train(self.ensemble_, rows, plan, None, self.progress, "refit")
            self.history_.rows += second.rows
            self.history_.seconds += second.seconds
        self.novelty_ = learn_novelty(
            self.ensemble_, rows.x, held_out[:E], reference, self._entropies, refit
        )

    def _entropies(self, moments: FunctionMoments) -> tuple[Tensor, Tensor] | None:
        """The entropies of the members, `(E, N)`, and of the mixture, `(N,)`, if it has classes."""
        return None

    def _novelty_scores(
        self, leverages: list[Tensor], entropy: Array | None = None
    ) -> NoveltyScores | None:
        """How strange rows with these scores are, as arrays; None if that was not learned."""
        if not leverages or self.novelty_ is None:
            return None
        by_leverage = torch.cat(leverages).cpu()
        by_entropy = None if entropy is None else torch.from_numpy(entropy)
        tails = with_own_tensors(self.novelty_.tails, by_leverage.device)
        scores = tails.scores(by_leverage, by_entropy)
        return NoveltyScores(*(None if part is None else part.numpy() for part in scores))

    def _hold_out(self, rows: Rows, num_parts: int, seed: int, is_warm: bool) -> tuple[Tensor, int]:
        """The numbers of the held-out rows, `(E, n)`, and how many a part shares with the next.

        `kept_apart_` becomes the share of rows that no call of `fit` trains on and the seed that
        chooses them, or None if there are no such rows.
        """
        N, device, fraction = len(rows.x), rows.x.device, self.validation_fraction
        if fraction is None:
            fraction = default_fraction(effective_number(rows.weights))
        if not self.early_stopping or effective_number(rows.weights) < _LEAST_ROWS:
            self.kept_apart_ = None
            return torch.empty(num_parts, 0, dtype=torch.long, device=device), 0
        if not is_warm:
            keeps_apart = self.warm_start and not self.refit
            self.kept_apart_ = [share_kept_apart(N, fraction), seed] if keeps_apart else None
            if not keeps_apart:
                overlap = self.ensemble_size > 1
                held_out = held_out_rows(N, num_parts, fraction, seed, overlap)
                return held_out.to(device), held_out.shape[1] // 2 if overlap else 0
        elif self.__dict__.get("kept_apart_") is None:  # as in files of earlier versions
            raise ValueError(
                "`warm_start=True` finds no rows to calibrate on: the networks were trained on all "
                f"rows, by a `fit` without `warm_start` or of fewer than {_LEAST_ROWS} rows, by "
                "`refit=True` or by `partial_fit`. Set `warm_start=True` before the first `fit`, "
                "or `early_stopping=False` to train on without calibration."
            )
        assert self.kept_apart_ is not None
        held_out = rows_kept_apart(rows, *self.kept_apart_).to(device)
        if len(held_out) > N - 2:
            raise ValueError(f"`validation_fraction`={fraction:g} leaves no rows to train on.")
        return held_out.expand(num_parts, -1), len(held_out)

    def _stop_and_calibrate(
        self, held_out: Rows, rest: Rows | Data, overlap: int, plan: Plan, is_refit: bool
    ) -> None:
        """Train on the rest for as long as the held-out rows say, and calibrate on them.

        A row counts as much as its weight says, here as in training.
        """
        ensemble = self.ensemble_
        relative = held_out.weights / held_out.weights.mean()

        @torch.no_grad()
        def score_fn() -> Tensor:
            return (self._scores(held_out, ensemble) * relative).reshape(1, -1)

        self.history_ = train(ensemble, rest, plan, score_fn, self.progress)
        with torch.no_grad():
            self._calibrate(held_out, ensemble, overlap, is_refit)

    def _moments(
        self, X: Any, novelty: bool = False
    ) -> Iterator[tuple[Ensemble, FunctionMoments, list[Tensor]]]:
        """q(f) of every member, one chunk of rows after the other, in float64.

        With `novelty`, leverages `(N,)` come with each chunk, in a list, which is empty without.
        """
        conditioned = self.__dict__.get("conditioned_")  # old files have none, nor
        learned = self.__dict__.get("novelty_") if novelty else None
        least = 1
        if learned is not None:
            learned = with_own_tensors(learned, self._device()).double()
            least = len(learned.members[0].root)
        for fixed, features in self._features(X, least):
            with torch.no_grad():
                leverages = [] if learned is None else [learned.leverage(features)]
                ensemble = fixed.ensemble
                if conditioned is None:
                    yield ensemble, fixed.moments_from(features), leverages
                else:
                    yield ensemble, conditioned.moments(ensemble, features), leverages

    def _features(self, X: Any, numbers: int = 1) -> Iterator[tuple[FixedEnsemble, Tensor]]:
        """The features of every member, one chunk of rows after the other, in float64.

        In double precision the prediction of a row does not depend on the rows beside it. `numbers`
        says how many a row has at least; there are fewer rows in a chunk where they have many.
        """
        check_is_fitted(self)
        X = self._validated_inputs(X, is_first=False)
        device = self._device()
        ensemble = self.ensemble_.to(device, torch.float64)
        numbers = max(numbers, ensemble.tensors["guide.mu_loc"].numel())  # E F
        numbers = max(numbers, len(ensemble) * ensemble.model.feature_dim)
        with torch.no_grad():
            fixed = FixedEnsemble(ensemble)
        chunks, options = _chunks(len(X), numbers), {"delay": 2, "leave": False}
        encoded = _encoded_chunks(X, self.__dict__.get("columns_"), chunks)
        for rows in tqdm(encoded, "predict", len(chunks), disable=not self.progress, **options):
            x = self._standardized(rows, limit=1e100)
            with torch.no_grad():
                yield fixed, ensemble.features(torch.from_numpy(x).to(device))


def _check_shape(frame: pd.DataFrame, least_rows: int) -> None:
    """Raise if a data frame has too few rows or no columns, in the words of scikit-learn."""
    least = {"sample": least_rows, "feature": 1}
    for number, (what, minimum) in zip(frame.shape, least.items(), strict=True):
        if number < minimum:
            raise ValueError(
                f"Found array with {number} {what}(s) (shape={frame.shape}) while a minimum of "
                f"{minimum} is required."
            )


def _is_from_dtype(chosen: Any) -> bool:
    """Whether the types of columns say which of them are categories."""
    return isinstance(chosen, str) and chosen == "from_dtype"


def _names(number: int) -> list[str]:
    """The names of columns without any."""
    return [f"x{index}" for index in range(number)]


def _learn(X: Any, categorical: list[str] | None, num_bins: int, weights: Array) -> Columns:
    """What the columns of an array or of a data frame are."""
    if isinstance(X, pd.DataFrame) or num_bins > 0:
        names = None if isinstance(X, pd.DataFrame) else _names(X.shape[1])
        frame = pd.DataFrame(X, columns=names, copy=False)
        return learn_columns(frame, categorical, num_bins, weights=weights)
    medians, with_missing = {}, []
    for name, column in zip(_names(X.shape[1]), X.T, strict=True):
        known = column[~np.isnan(column)]
        medians[name] = float(np.median(known)) if len(known) else 0.0
        if len(known) < len(column):
            with_missing.append(name)
    filling = learn_filling(X) if with_missing else None
    return Columns([*medians], medians, with_missing, filling=filling)


def _encoded(X: Any, columns: Columns | None) -> Array:
    """An array or a data frame as numbers, `(N, D)`; arrays without gaps are returned as such."""
    if columns is None:
        return X
    if isinstance(X, pd.DataFrame):
        return encode(X, columns)
    if columns.with_missing or columns.bins or columns.filling:
        return encode(pd.DataFrame(X, columns=columns.names, copy=False), columns)
    is_missing = np.isnan(X)
    return np.where(is_missing, [*columns.medians.values()], X) if is_missing.any() else X


def _encoded_chunks(X: Any, columns: Columns | None, chunks: list[slice]) -> Iterator[Array]:
    """The rows of each chunk as numbers; of arrays, no more at a time than memory is kept for.

    A data frame is encoded at once, so that a category that is not known is told of once.
    """
    number = len(chunks) if isinstance(X, pd.DataFrame) else _ENCODED_CHUNKS
    for first in range(0, len(chunks), number):
        own = chunks[first : first + number]
        start = own[0].start
        encoded = _encoded(X[start : own[-1].stop], columns)
        yield from (encoded[rows.start - start : rows.stop - start] for rows in own)


def scales(
    name: str, values: Array, weights: Array, smallest: float, largest: float
) -> tuple[Array, Array]:
    """Weighted mean and standard deviation of every column.

    The deviation of a constant is the size of the constant, or 1 for zero. It is an error if a
    deviation is smaller or larger than it may be.
    """
    chunks = _chunks(len(values))
    sizes = np.max([np.abs(values[rows]).max(0) for rows in chunks], 0).astype(np.float64)
    # Powers of two, by which division is exact, so that squares neither overflow nor vanish.
    unit = np.ldexp(1.0, np.frexp(sizes)[1] - 1)
    shares = weights / weights.sum()
    mean, var = np.zeros(values.shape[1]), np.zeros(values.shape[1])
    for rows in chunks:
        mean += np.einsum("n,nd->d", shares[rows], values[rows] / unit)
    for rows in chunks:
        var += np.einsum("n,nd->d", shares[rows], (values[rows] / unit - mean) ** 2)
    scale = np.sqrt(var)
    scale = np.where(scale <= 1e-12 * np.abs(mean), np.abs(mean), scale)
    scale = np.where(scale > 0, scale * unit, 1.0)
    is_wrong = ~((smallest <= scale) & (scale <= largest) & (sizes <= 1e305))
    if is_wrong.any():
        column = int(np.argmax(is_wrong))
        raise ValueError(
            f"`{name}` must have a standard deviation between {smallest:g} and {largest:g} in each "
            f"column; column {column} has {scale[column]:.3g}, and values up to "
            f"{sizes[column]:.3g}. Rescale it."
        )
    return mean * unit, scale


def standardized(name: str, values: Array, mean: Array, scale: Array, limit: float) -> Array:
    """(values - mean) / scale, or an error if a result lies beyond the limit."""
    with np.errstate(over="ignore"):
        result = (values - mean) / scale
    is_far = ~(np.abs(result) <= limit)
    if is_far.any():
        row, column = np.argwhere(is_far)[0]
        raise ValueError(
            f"`{name}` has a value that is too far from the others to compute with: "
            f"{values[row, column]:.3g} in column {column}, where the training rows have mean "
            f"{mean[column]:.3g} and standard deviation {scale[column]:.3g}."
        )
    return result


def _chunks(num_rows: int, numbers_per_row: int = 1) -> list[slice]:
    """Slices that cover all rows. They are shorter where a row has many numbers."""
    size = max(64, min(_CHUNK, _CHUNK_NUMBERS // numbers_per_row))
    return [slice(start, start + size) for start in range(0, num_rows, size)]
