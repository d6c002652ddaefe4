"""Exported models that predict tables: from data frames or records of JSON to predictions."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pyro_dak.prediction.results import NoveltyScores
from pyro_dak.tables.exporting import NUMBERS, raw_rows, split_inputs
from pyro_dak.tables.files import TableError
from pyro_dak.tables.portable import raw_names
from pyro_dak.tables.predictive import Array, ClassMixture, StudentPrediction
from pyro_dak.tables.saving import labels_from_json
from pyro_dak.tables.schema import (
    MISSING,
    Columns,
    days_of_dates,
    places_of_texts,
    raw_columns,
    text_of,
)
from pyro_dak.training.checkpoint import MAX_BYTES, blaming
from pyro_dak.training.exported import ExportedFunction, read_exported

__all__ = ["ExportedTable", "prediction_columns", "read_table_model"]

# With these the prediction of a model that is no estimator is a normal distribution.
_NORMAL = ("GaussianLikelihood", "HeteroscedasticLikelihood")


class ExportedTable:
    """An exported model of tables.

    Attributes:
        facts: what the file says about itself.
        columns_: what the columns are.
        classes_: the classes, or None for regression.
        allows_missing: whether values may be missing.
    """

    def __init__(self, function: ExportedFunction, max_bytes: int = MAX_BYTES):
        self._function, self.facts = function, function.facts
        self.allows_missing = self.facts["kind"] != "DAK"
        self.classes_: Array | None = None
        classes = self.facts["classes"]
        if self.allows_missing:
            self.columns_ = Columns.from_json(self.facts["columns"])
            if classes is not None:
                self.classes_ = labels_from_json(classes, max_bytes)
        else:
            self.columns_ = _plain_columns(function)
            self.classes_ = None if classes is None else np.array(classes, dtype=object)
        self._names = raw_names(self.columns_)
        self._known = {
            name: {text: place for place, text in enumerate(known)}
            for name, known in self.columns_.categories.items()
        }
        widths = {name: width for name, (width, _) in function.inputs.items()}
        wanted = {name: part.shape[1] for name, part in self._inputs(self._blank()).items()}
        if widths != wanted:
            raise ValueError(f"has inputs {widths}, and its columns need {wanted}.")
        self._check_outputs(self._run(self._blank()))

    def _blank(self) -> Array:
        return np.zeros((1, len(self._names)))

    def _check_outputs(self, found: Mapping[str, Array]) -> None:
        wanted = {"mean", "epistemic", "aleatoric"} if self.classes_ is None else {"probs"}
        if not wanted <= found.keys():
            raise ValueError(f"has outputs {[*found]}, expected {sorted(wanted)} among them.")
        if self.classes_ is not None and found["probs"].shape != (1, len(self.classes_)):
            raise ValueError(
                f"has {found['probs'].shape[-1]} probabilities, not one for each class"
            )

    def _inputs(self, raw: Array) -> dict[str, Array]:
        if not self.allows_missing:
            dtype = np.dtype(self._function.inputs[NUMBERS][1])
            if (np.abs(raw) > np.finfo(dtype).max).any():
                raise TableError(f"has values that are too large for {dtype}.")
            return {NUMBERS: raw.astype(dtype)}
        return split_inputs(raw, self.columns_)

    def _run(self, raw: Array) -> dict[str, Array]:
        return self._function(self._inputs(raw))

    def raw_of_frame(self, table: pd.DataFrame) -> Array:
        """Raw rows `(N, D)` of a data frame with the columns of the training table."""
        raw = raw_rows(raw_columns(table, self.columns_), self.columns_)
        if not self.allows_missing and np.isnan(raw).any():
            raise TableError("has missing values, which this model cannot take; fill them in.")
        return raw

    def raw_of_records(self, records: Sequence[Any], allow_unknown: bool = False) -> Array:
        """Raw rows `(N, D)` of records of JSON, each a dictionary by column or a list.

        Raises:
            TableError: naming the record, counted from 0, and what is wrong with it.
        """
        raw = np.empty((len(records), len(self._names)))
        dates = {name: list[Any]() for name in self.columns_.dates}
        for number, record in enumerate(records):
            with _naming_row(number):
                row = self._by_column(record)
                raw[number] = [self._raw_value(n, row[n], allow_unknown) for n in self._names]
            for name, values in dates.items():
                values.append(row[name])
        for name, values in dates.items():
            raw[:, self._names.index(name)] = _days(name, values)
        return raw

    def _by_column(self, record: Any) -> dict[str, Any]:
        """A record as a dictionary with all columns, and no others."""
        names = self.columns_.names
        if isinstance(record, list):
            if len(record) != len(names):
                raise TableError(f"has {len(record)} values, expected {len(names)}: {names[:8]}")
            record = dict(zip(names, record, strict=True))
        if not isinstance(record, dict):
            raise TableError(f"must be an object or a list; got {type(record).__name__}")
        if record.keys() != set(names):
            lacking = [name for name in names if name not in record][:8]
            unknown = [name for name in record if name not in names][:8]
            raise TableError(f"lacks the columns {lacking} and has the unknown ones {unknown}")
        return record

    def _raw_value(self, name: str, value: Any, allow_unknown: bool) -> float:
        """What stands in a raw row for a value; NaN for dates, which are read column by column."""
        if value is None and not self.allows_missing:
            raise TableError(f"`{name}` is missing, and this model takes no missing values")
        if name in self._known:
            return self._place(name, value, allow_unknown)
        if value is None or name in self.columns_.dates:
            return math.nan
        if not isinstance(value, int | float):
            raise TableError(f"`{name}` must be a number; got {_shown(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise TableError(f"`{name}` must be a finite number")
        return number

    def _place(self, name: str, value: Any, allow_unknown: bool) -> float:
        if value is not None and not isinstance(value, str | int | float):
            raise TableError(f"`{name}` must be a text or a number; got {_shown(value)}")
        text, known = MISSING if value is None else text_of(value), self._known[name]
        place = known.get(text)
        if place is None:
            place = int(places_of_texts(pd.Series([text], dtype=object), [*known])[0])
        if place < 0 and not allow_unknown:
            raise TableError(f"`{name}` has no category {_shown(value)}; it has {[*known][:8]}")
        return float(place)

    def predict_raw(self, raw: Array) -> StudentPrediction | ClassMixture:
        """The predictions of raw rows, in the units of the target."""
        found = self._run(raw)
        finite = [found[name] for name in ("mean", "epistemic", "probs") if name in found]
        # The variance of noise may be infinite, that of Student's t.
        known = [found[name] for name in ("aleatoric", "scale") if name in found]
        if not all(np.isfinite(part).all() for part in finite) or any(
            np.isnan(part).any() for part in known
        ):
            raise TableError("has values that are too large to compute with.")
        novelty = None
        if "novelty" in found:
            novelty = NoveltyScores(found["novelty"], None, None, None)
        if self.classes_ is not None:
            expected = found.get("expected_entropy", np.full(len(raw), np.nan))
            return ClassMixture(found["probs"], expected, novelty)
        keep = slice(None) if found["mean"].shape[1] > 1 else 0
        if self.facts.get("is_multi_output"):
            keep = slice(None)
        names = ("mean", "epistemic", "aleatoric")
        mean, epistemic, aleatoric = (found[name][:, keep] for name in names)
        df = self.facts.get("df") if self.allows_missing else None
        df = math.inf if df is None else df
        return StudentPrediction(mean, epistemic, aleatoric, df, novelty)

    @property
    def has_intervals(self) -> bool:
        """Whether quantiles are known: not where noise is added that is not normal."""
        return self.allows_missing or self.facts.get("likelihood") in _NORMAL

    def predict_dist(self, table: pd.DataFrame) -> StudentPrediction | ClassMixture:
        """The predictions of a data frame, as those of the estimator."""
        return self.predict_raw(self.raw_of_frame(table))


def _plain_columns(function: ExportedFunction) -> Columns:
    """The columns of a model that is no estimator: numbers, called x0, x1, ... without names."""
    if len(function.inputs) != 1 or function.inputs.get(NUMBERS, (None,))[0] is None:
        raise ValueError("takes other inputs than rows of numbers, so that no table fits it.")
    names = function.facts["columns"]
    if names is None:
        names = [f"x{index}" for index in range(function.inputs[NUMBERS][0] or 0)]
    return Columns([*names], dict.fromkeys(names, 0.0))


@contextmanager
def _naming_row(number: int) -> Iterator[None]:
    """Say in which record something is wrong."""
    try:
        yield
    except TableError as error:
        raise TableError(f"row {number}: {error}") from None


def _days(name: str, values: list[Any]) -> Array:
    """Days since 1970 of texts as in ISO 8601, read as in a table; NaN for None."""
    is_text = [value is None or isinstance(value, str) for value in values]
    column = pd.Series(values if all(is_text) else [None] * len(values), dtype=object)
    days, is_wrong = days_of_dates(column)
    is_date = np.array(is_text) & ~is_wrong.to_numpy()
    if not is_date.all():
        number = int(is_date.argmin())
        raise TableError(
            f"row {number}: `{name}` must be a date, as 2026-01-31; got {_shown(values[number])}"
        )
    return days


def _shown(value: Any) -> str:
    """The beginning of a text or a number; what holds others may be nested too deeply to show."""
    is_plain = value is None or isinstance(value, str | int | float)
    return f"{value!r:.40}" if is_plain else f"a {type(value).__name__}"


def prediction_columns(
    prediction: Any, classes: Array | None, level: float, has_intervals: bool = True
) -> dict[str, Array]:
    """Predictions as columns of a table: mean, std and interval, or label and probabilities."""
    columns: dict[str, Array]
    if classes is not None:
        columns = {"label": classes[prediction.probs.argmax(-1)]}
        columns |= {f"p_{name}": prediction.probs[:, k] for k, name in enumerate(classes)}
    else:
        columns = {"mean": prediction.mean, "std": prediction.std}
        if has_intervals:
            columns["lower"], columns["upper"] = prediction.interval(level)
    if classes is None and prediction.mean.ndim > 1:
        numbered = [(name, *pair) for name, part in columns.items() for pair in enumerate(part.T)]
        columns = {f"{name}_{index}": values for name, index, values in numbered}
    if prediction.novelty_scores is not None:  # models of earlier versions have none
        columns["novelty"] = prediction.novelty
    return columns


def read_table_model(
    path: str | os.PathLike[str], max_bytes: int = MAX_BYTES, num_threads: int | None = None
) -> ExportedTable:
    """The model of tables in an exported ONNX file.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
    """
    function = read_exported(path, max_bytes, num_threads)
    with blaming(Path(path)):
        return ExportedTable(function, max_bytes)
