"""What the columns of a table are, and how they become numbers.

The estimators and the command line share this. `Columns` is what is learned from the input columns
of a training table, and `Target` from its target. Both are plain data, so that they can be stored
as JSON. The columns of text files have no types; `typed` gives them some.
"""

import re
import warnings
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, pairwise
from numbers import Number
from typing import Any, Literal

import numpy as np
import pandas as pd

from pyro_dak.tables.files import TableError
from pyro_dak.tables.filling import Filling, learn_filling, tells_of_target
from pyro_dak.tables.predictive import Array
from pyro_dak.validation import check_choice

__all__ = [
    "CYCLES",
    "MISSING",
    "Columns",
    "Target",
    "as_frame",
    "check_columns",
    "check_table",
    "days_of_dates",
    "encode",
    "learn_columns",
    "learn_target",
    "merged",
    "numbers_of_classes",
    "places_of_texts",
    "raw_columns",
    "targets",
    "text_of",
    "typed",
    "with_telling_gaps",
]

Task = Literal["classification", "regression"]
MISSING = "(missing)"
# How text files write booleans, and their numbers.
_BOOLEANS = {"True": 1.0, "TRUE": 1.0, "true": 1.0, "False": 0.0, "FALSE": 0.0, "false": 0.0}
# The kinds of columns, by pandas's names for them, that can be used.
_KINDS = (
    "boolean categorical decimal empty floating integer mixed-integer mixed-integer-float string"
).split()
_DATES = ("datetime64", "datetime", "date")
# A date, perhaps with a time, as ISO 8601 and most programs write it.
_DATE = (
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?)?(Z|[+-][0-9:]{2,6})?)?"
)
# The cycles that dates may follow, in days, and the least span of the training rows to learn them.
CYCLES = {"year": (365.2425, 366.0), "week": (7.0, 14.0), "day": (1.0, 2.0)}
# A whole number as Python writes it, and numbers with a decimal comma or separated thousands.
_WHOLE_NUMBER = r"0|-?[1-9][0-9]{0,18}"
_SEPARATED = (
    r"\s*[+-]?([0-9]+,[0-9]+([eE][+-]?[0-9]+)?"
    r"|[0-9]{1,3}([.,'\u2019_ \u00a0\u202f])[0-9]{3}(\3[0-9]{3})*([.,][0-9]+)?)\s*"
)
# Text that is no name of a class among numbers: one of these, or without any letter or digit.
_STRAY = rf"{_SEPARATED}|\W*"
# A target of whole numbers with at most this many different values is read as classes.
_MAX_CLASSES = 10
# Text columns with more different values than this hold names, not categories. They are refused.
_MAX_CATEGORIES = 200


@dataclass(frozen=True)
class Columns:
    """What was learned about the input columns: all that is needed to turn rows into numbers.

    Attributes:
        names: the names of the columns, in their order.
        medians: for each column of numbers or dates, the median. It replaces a missing value where
            there is no `filling`.
        with_missing: those of them that had missing values, and where it tells of the target that
            they did (`with_telling_gaps`). Each gets an indicator column.
        categories: for each column of categories, the values that it had.
        dates: for each column of dates, the cycles that the training rows span.
        bins: for each column of numbers or dates that is embedded, the edges of its bins.
        filling: how missing numbers and dates are predicted from the other ones of their row.
    """

    names: list[str] = field(default_factory=list)
    medians: dict[str, float] = field(default_factory=dict)
    with_missing: list[str] = field(default_factory=list)
    categories: dict[str, list[str]] = field(default_factory=dict)
    dates: dict[str, list[str]] = field(default_factory=dict)
    bins: dict[str, list[float]] = field(default_factory=dict)
    filling: Filling | None = None

    @property
    def are_numbers(self) -> bool:
        """Whether all columns hold numbers."""
        return not self.categories and not self.dates

    @property
    def encoded_names(self) -> list[str]:
        """The names of the columns that `encode` gives, in their order."""
        names = [*self.medians, *(f"missingindicator_{name}" for name in self.with_missing)]
        for name, edges in self.bins.items():
            names += [f"{name}_bin{number}" for number in range(1, len(edges))]
        for name, cycles in self.dates.items():
            names += [f"{name}_{wave}_{cycle}" for cycle in cycles for wave in ("sin", "cos")]
        return names + [f"{name}_{value}" for name, own in self.categories.items() for value in own]

    def to_json(self) -> dict[str, Any]:
        """The columns as plain data: lists of pairs, so that JSON keeps their order."""
        content = asdict(self)
        pairs = ("medians", "categories", "dates", "bins")
        return content | {name: list(content[name].items()) for name in pairs}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Columns":
        """The columns that `to_json` described, or a ValueError. Older files lack some of it."""
        try:
            pairs = {name: dict(content[name]) for name in ("medians", "categories")}
            pairs |= {name: dict(content.get(name, ())) for name in ("dates", "bins")}
            names = content.get("names", [*pairs["medians"], *pairs["categories"]])
            filling = content.get("filling")
            columns = cls(
                names=list(names),
                with_missing=list(content["with_missing"]),
                **pairs,
                filling=None if filling is None else Filling(**filling),
            )
            columns._check()
            return columns
        except (LookupError, TypeError) as error:
            raise ValueError(f"is not the description of a table: {error}") from error

    def _check(self) -> None:
        texts = [*self.names, *self.with_missing, *chain(*self.categories.values())]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("names of columns and categories must be texts")
        numbers = [*self.medians.values(), *chain(*self.bins.values())]
        if not all(isinstance(number, int | float) and np.isfinite(number) for number in numbers):
            raise TypeError("medians and edges of bins must be finite numbers")
        if sorted(self.names) != sorted([*self.medians, *self.categories]):
            raise TypeError("every column must hold either numbers or categories")
        if not {*self.with_missing, *self.dates, *self.bins} <= self.medians.keys():
            raise TypeError("columns of dates, with missing values and with bins must have medians")
        if not all(len(edges) > 1 and np.all(np.diff(edges) > 0) for edges in self.bins.values()):
            raise TypeError("edges of bins must be two or more increasing numbers")
        if not set(chain(*self.dates.values())) <= CYCLES.keys():
            raise TypeError(f"cycles must be among {list(CYCLES)}")
        if self.filling is not None:
            self.filling.check(len(self.medians))


@dataclass(frozen=True)
class Target:
    """The name of the target of a table, and whether it is a number or a class."""

    name: str
    task: Task

    def to_json(self) -> dict[str, Any]:
        """The target as plain data."""
        return {"target": self.name, "task": self.task}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Target":
        """The target that `to_json` described, or a ValueError."""
        try:
            if not isinstance(content["target"], str):
                raise TypeError("the name of the target must be a text")
            check_choice("task", content["task"], ("regression", "classification"))
            return cls(content["target"], content["task"])
        except (LookupError, TypeError) as error:
            raise ValueError(f"is not the description of a table: {error}") from error


def as_frame(X: Any) -> pd.DataFrame | None:
    """X as a data frame of pandas, or None if it is none of any library.

    Frames of other libraries, such as polars, come through an interchange protocol.
    """
    if isinstance(X, pd.DataFrame) or X is None:
        return X
    is_frame = hasattr(X, "columns") and hasattr(X, "__arrow_c_stream__")
    if not (is_frame or hasattr(X, "__dataframe__")):
        return None
    return pd.api.interchange.from_dataframe(X)


def learn_target(table: pd.DataFrame, name: str, task: Task | None = None) -> Target:
    """The target of a training table. The task is found from its values, unless it is given."""
    check_columns(table, [name])
    return Target(name, task or _find_task(table[name], name))


def typed(
    table: pd.DataFrame, drop: Sequence[str] = (), categorical: Sequence[str] = ()
) -> pd.DataFrame:
    """The columns of a file, without those to `drop`, with the types that their texts have.

    A column is one of numbers, of dates or of categories. Those named in `categorical` are
    categories, even if they look like numbers. What is not certain is an error of the command line.
    """
    check_columns(table, [*drop, *categorical])
    columns = {}
    for name in [name for name in table.columns if name not in drop]:
        column = table[name]
        _check_kind(column, name, f"; leave it out with --drop {name!r}")
        if column.isna().all():
            raise TableError(f"column `{name}` is empty; leave it out with --drop {name!r}.")
        if name not in categorical and _is_date(column):
            columns[name] = column
        elif name in categorical or not _looks_numeric(column, name):
            texts = _texts(column)
            _check_number_of_texts(texts.nunique(), name, f"Leave it out with --drop {name!r}.")
            columns[name] = texts.astype("category")
        else:
            columns[name] = pd.Series(_numbers(column, name), index=table.index)
    return pd.DataFrame(columns)


def learn_columns(
    table: pd.DataFrame,
    categorical: Collection[str] | None = None,
    num_bins: int = 0,
    is_filled: bool = True,
    weights: Array | None = None,
) -> Columns:
    """What the columns of a training table are, by their types.

    Categories are the columns named in `categorical`; by default those that hold text or are of
    pandas's type for categories. Dates are known by their types; texts are dates if all of them are
    written as in ISO 8601. Booleans are numbers. With `num_bins`, numbers with more than two values
    are embedded in so many bins, whose edges are quantiles of the rows with their weights, or in
    fewer if quantiles are equal.
    With `is_filled`, missing numbers will be predicted from the other numbers of their row.
    """
    repeated = table.columns[table.columns.duplicated()]
    if len(repeated):
        raise TableError(f"has several columns called {_list(repeated.unique())}.")
    medians, with_missing, categories, dates = {}, [], {}, {}
    bins: dict[str, list[float]] = {}
    all_numbers: list[Array] = []
    for name in table.columns:
        column = table[name]
        _check_kind(column, name)
        if name in categorical if categorical is not None else _is_category(column):
            categories[name] = sorted(_texts(column).fillna(MISSING).unique())
            _check_number_of_texts(len(categories[name]), name, "Leave it out, or encode it.")
            continue
        numbers = _days(column, name) if _is_date(column) else _numbers(column, name)
        all_numbers.append(numbers)
        known = numbers[~np.isnan(numbers)]
        medians[name] = float(np.median(known)) if len(known) else 0.0
        if len(known) < len(numbers):
            with_missing.append(name)
        if _is_date(column):
            dates[name] = _cycles(known)
        if num_bins > 0 and len(known):
            own = np.ones(len(known)) if weights is None else weights[~np.isnan(numbers)]
            edges = np.unique(_quantiles(known, own, np.linspace(0, 1, num_bins + 1))).tolist()
            bins |= {name: edges} if len(edges) > 2 else {}
    filling = learn_filling(np.column_stack(all_numbers)) if is_filled and with_missing else None
    return Columns([*table.columns], medians, with_missing, categories, dates, bins, filling)


def merged(parts: Sequence[Columns], sample: Columns) -> Columns:
    """The columns of a table from those of its parts, and those of a sample of all its rows.

    Categories, and which columns have missing values, come from all parts; medians, edges of bins,
    the cycles that dates span and how missing numbers are filled come from the sample.
    """
    has_gap = {name for part in parts for name in part.with_missing}
    categories = {
        name: sorted({value for part in parts for value in part.categories[name]})
        for name in sample.categories
    }
    for name, values in categories.items():
        _check_number_of_texts(len(values), name, f"Leave it out with --drop {name!r}.")
    with_missing = [name for name in sample.medians if name in has_gap]
    return replace(sample, with_missing=with_missing, categories=categories)


def with_telling_gaps(columns: Columns, table: pd.DataFrame, y: Array, labels: bool) -> Columns:
    """The columns of a training table, where some of those with missing values get no indicator.

    An indicator is left out if it is not correlated with the target: numbers, or labels of classes.
    """
    if not columns.with_missing:
        return columns
    if labels:
        y = np.unique(y, return_inverse=True)[1].reshape(-1, 1) == np.arange(len(np.unique(y)))
    numbers = _all_numbers(table, columns)
    gaps = np.column_stack([np.isnan(numbers[name]) for name in columns.with_missing])
    tells = tells_of_target(gaps, y.reshape(len(y), -1))
    kept = [name for name, own in zip(columns.with_missing, tells, strict=True) if own]
    return replace(columns, with_missing=kept)


def encode(table: pd.DataFrame, columns: Columns) -> Array:
    """The columns as numbers, `(N, D)`.

    First come numbers and dates, in days, with what the filling, or the median, has in place of
    missing values; then an indicator of missing values for each column that had some in training;
    then for each bin from a to b of an embedded column (x - a) / (b - a), between 0 and 1, except
    that it goes on below the first bin and above the last; then sine and cosine of the cycles of
    dates, zero where the date is missing; then a column of zeros and ones for each category. A
    category that was not there in training is none of these, with a warning.
    """
    numbers = _all_numbers(table, columns)
    if columns.filling is not None:
        parts = [*columns.filling(np.column_stack([*numbers.values()])).T]
    else:
        parts = [np.where(np.isnan(numbers[n]), m, numbers[n]) for n, m in columns.medians.items()]
    parts += [np.isnan(numbers[name]).astype(np.float64) for name in columns.with_missing]
    for name, edges in columns.bins.items():
        parts += _in_bins(parts[[*columns.medians].index(name)], edges)
    for name, cycles in columns.dates.items():
        for angle in (2 * np.pi * numbers[name] / CYCLES[cycle][0] for cycle in cycles):
            parts += [np.nan_to_num(np.sin(angle)), np.nan_to_num(np.cos(angle))]
    for name, known in columns.categories.items():
        codes = places_of_texts(_texts(table[name]).fillna(MISSING), known)
        if (codes < 0).any():
            warnings.warn(f"{_unknown(table[name], name, codes)}.", stacklevel=2)
        parts += [(codes == number).astype(np.float64) for number in range(len(known))]
    return np.column_stack(parts)


def raw_columns(table: pd.DataFrame, columns: Columns) -> list[Array]:
    """The columns in their order, `(N,)` each, in float64.

    Numbers and dates, in days, are NaN where they are missing. Categories are their places among
    those of training, and -1 if they were not there.
    """
    values = _all_numbers(table, columns)
    for name, known in columns.categories.items():
        codes = places_of_texts(_texts(table[name]).fillna(MISSING), known)
        values[name] = codes.astype(np.float64)
    return [values[name] for name in columns.names]


def _all_numbers(table: pd.DataFrame, columns: Columns) -> dict[str, Array]:
    """The columns of numbers, and those of dates in days, by name."""
    return {
        name: (_days if name in columns.dates else _numbers)(table[name], name)
        for name in columns.medians
    }


def check_columns(table: pd.DataFrame, names: Sequence[str]) -> None:
    """Raise unless a table has these columns."""
    lacking = [name for name in names if name not in table.columns]
    if lacking:
        raise TableError(f"has no column {_list(lacking)}; its columns are {_list(table.columns)}.")


def check_table(table: pd.DataFrame, columns: Columns, ignore_unknown: bool) -> None:
    """Raise if a table lacks columns, or has categories that were not there in training."""
    lacking = [name for name in columns.names if name not in table.columns]
    if lacking:
        raise TableError(
            f"lacks {len(lacking)} columns of the training table: {_list(lacking)}; its columns "
            f"are {_list(table.columns)}."
        )
    for name, known in () if ignore_unknown else columns.categories.items():
        codes = places_of_texts(_texts(table[name]).fillna(MISSING), known)
        if (codes < 0).any():
            raise TableError(
                f"{_unknown(table[name], name, codes)}. Pass --ignore-unknown to take them as none "
                "of the known ones."
            )


def _unknown(column: pd.Series, name: str, codes: Array) -> str:
    """What is said about categories that were not there in training."""
    values, is_unknown = _texts(column).fillna(MISSING), pd.Series(codes < 0, index=column.index)
    return (
        f"column `{name}` has values that were not there in training: "
        f"{_list(values[is_unknown].unique())}, the first in {_place(column, is_unknown)}"
    )


def _is_category(column: pd.Series) -> bool:
    """Whether a column holds categories by its type: text, or pandas's own type for them."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        return True
    kind = pd.api.types.infer_dtype(column, skipna=True)
    return kind == "string" and not _is_date(column)


def _is_date(column: pd.Series) -> bool:
    """Whether a column holds dates, perhaps with times, or texts that are all written as such."""
    kind = pd.api.types.infer_dtype(column, skipna=True)
    if kind != "string" or isinstance(column.dtype, pd.CategoricalDtype):
        return kind in _DATES
    values = column.dropna()
    return bool(_are(_DATE, values.iloc[:1]).all() and _are(_DATE, values).all())


def _days(column: pd.Series, name: str) -> Array:
    """Dates as days since 1970, in float64, NaN where they are missing."""
    days, is_wrong = days_of_dates(column)
    if is_wrong.any():
        raise TableError(f"column `{name}` must hold dates; got {_cell(column, is_wrong)}.")
    return days


def days_of_dates(column: pd.Series) -> tuple[Array, pd.Series]:
    """Dates as days since 1970, in float64, NaN where they are missing, and which are no dates."""
    is_text = pd.api.types.infer_dtype(column, skipna=True) == "string"
    options: dict[str, Any] = {"format": "ISO8601"} if is_text else {}
    times = pd.to_datetime(column, utc=True, errors="coerce", **options)
    is_wrong = times.isna() & column.notna()
    if not (is_wrong.any() or is_text or _is_date(column)):
        is_wrong = column.notna()
    # In the unit of the column: nanoseconds since 1970 end in 2262.
    start = pd.Timestamp(0, tz="UTC").as_unit(times.dt.unit)
    days = (times - start) / pd.Timedelta(days=1)
    return days.to_numpy(dtype=np.float64, na_value=np.nan), is_wrong


def _cycles(days: Array) -> list[str]:
    """The cycles that these days span; that of a day only if there are times."""
    span = np.ptp(days) if len(days) else 0.0
    cycles = [name for name, (_, least) in CYCLES.items() if span >= least]
    has_times = bool((days != np.floor(days)).any())
    return [name for name in cycles if name != "day" or has_times]


def _quantiles(values: Array, weights: Array, shares: Array) -> Array:
    """Quantiles of values that have weights.

    The k-th value in their order is the quantile of the share of the weight below it, half of its
    own included, where the first is that of 0 and the last that of 1; between them the quantiles
    are linear. With equal weights these are `numpy.quantile`.
    """
    order = np.argsort(values, kind="stable")
    below = np.cumsum(weights[order]) - 0.5 * weights[order]
    span = below[-1] - below[0]
    places = (below - below[0]) / span if span > 0 else np.linspace(0, 1, len(values))
    return np.interp(shares, places, values[order])


def _in_bins(x: Array, edges: Sequence[float]) -> list[Array]:
    """The share of each bin that lies below x."""
    last = len(edges) - 2
    return [
        np.clip((x - low) / (high - low), -np.inf if n == 0 else 0, np.inf if n == last else 1)
        for n, (low, high) in enumerate(pairwise(edges))
    ]


def _check_number_of_texts(number: int, name: str, remedy: str) -> None:
    if number > _MAX_CATEGORIES:
        raise TableError(
            f"column `{name}` has {number} different texts, more than {_MAX_CATEGORIES}: it looks "
            f"like names, not categories. {remedy}"
        )


def _find_task(column: pd.Series, name: str) -> Task:
    """Classification for text, booleans and few different whole numbers; else regression.

    It is an error if text stands among numbers, unless both look like names of classes.
    """
    _check_kind(column, name)
    if _is_boolean(column):
        return "classification"
    numbers, is_text = _parsed(column)
    values = numbers.dropna().unique()
    is_whole = np.isfinite(values).all() and (values == np.round(values)).all()
    are_classes = is_whole and len(values) <= _MAX_CLASSES
    if not is_text.any():
        return "classification" if are_classes else "regression"
    remedy = "Clean it, or pass --task classification if these are names of classes."
    if len(values):
        is_stray = is_text & (_are(_STRAY, column) if are_classes else True)
        if is_stray.any():
            raise TableError(
                f"target `{name}` mixes numbers and text, first {_cell(column, is_stray)}. {remedy}"
            )
    elif _are(_SEPARATED, column[is_text]).all():
        raise TableError(f"target `{name}` {_separators(column, is_text)}. {remedy}")
    num_different = column.nunique()
    if num_different > max(_MAX_CLASSES, 0.5 * len(column)):
        raise TableError(
            f"target `{name}` has {num_different} different texts in {len(column)} rows: it looks "
            f"like names, not classes. {remedy}"
        )
    return "classification"


def targets(table: pd.DataFrame, target: Target) -> Array:
    """The target column: float64 for regression; labels for classes.

    Labels are whole numbers if all of them are written as Python writes these, so that they come
    back as they came in. Else they are text.
    """
    name = target.name
    if name not in table.columns:
        raise TableError(f"has no target column `{name}`; its columns are {_list(table.columns)}.")
    column = table[name]
    if column.isna().any():
        raise TableError(
            f"target `{name}` has {int(column.isna().sum())} missing values, the first in "
            f"{_place(column, column.isna())}; remove those rows."
        )
    _check_kind(column, name)
    if target.task == "regression":
        return _numbers(column, name)
    texts = _texts(column)
    labels = texts.to_numpy(dtype=object)
    if _are(_WHOLE_NUMBER, texts).all():
        whole = [int(text) for text in labels]
        if all(abs(number) < 2**63 for number in whole):
            return np.array(whole, dtype=np.int64)
    return labels


def numbers_of_classes(labels: Any, classes: Any) -> Array:
    """The place of each label among the classes, -1 for labels that are none of them.

    Labels that are written otherwise, such as 1.0 for 1, are the class with the same number, if
    there is one such class only.
    """
    return places_of_texts(
        pd.Series(labels, dtype=object).map(str), [str(name) for name in classes]
    )


def _looks_numeric(column: pd.Series, name: str) -> bool:
    """Whether a column holds numbers. It is an error if it mixes them with text."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        return False
    _, is_text = _parsed(column)
    is_all_text = is_text[column.notna()].all()
    remedy = f"Clean it, or pass --categorical {name!r} or --drop {name!r}."
    if is_text.any() and not is_all_text:
        raise TableError(
            f"column `{name}` mixes numbers and text, first {_cell(column, is_text)}. {remedy}"
        )
    if is_text.any() and _are(_SEPARATED, column[is_text]).all():
        raise TableError(f"column `{name}` {_separators(column, is_text)}. {remedy}")
    return not is_text.any()


def _numbers(column: pd.Series, name: str) -> Array:
    """A column as float64, NaN where values are missing. Text and infinity are errors."""
    if isinstance(column.dtype, np.dtype) and column.dtype.kind in "fiu":
        values = column.to_numpy(dtype=np.float64)
    else:
        numbers, is_text = _parsed(column)
        if is_text.any():
            raise TableError(f"column `{name}` must hold numbers; got {_cell(column, is_text)}.")
        values = numbers.to_numpy(dtype=np.float64, na_value=np.nan)
    if np.isinf(values).any():
        is_infinite = pd.Series(np.isinf(values), index=column.index)
        raise TableError(
            f"column `{name}` has {int(is_infinite.sum())} infinite values, the first in "
            f"{_place(column, is_infinite)}."
        )
    return values


def _parsed(column: pd.Series) -> tuple[pd.Series, pd.Series]:
    """A column as numbers, NaN where it has none, and whether a value is text."""
    if _is_boolean(column):
        column = column.astype(object).map(lambda value: _BOOLEANS.get(str(value)))
    elif isinstance(column.dtype, pd.CategoricalDtype):
        column = column.astype(object)
    numbers = pd.to_numeric(column, errors="coerce")
    return numbers, (numbers.isna() & column.notna()).astype(bool)


def _is_boolean(column: pd.Series) -> bool:
    """Whether a column holds true and false, or their names as a text file has them."""
    if pd.api.types.is_bool_dtype(column.dtype):
        return True
    if pd.api.types.is_numeric_dtype(column.dtype):
        return False
    values = column.dropna()
    return (
        len(values) > 0
        and str(values.iloc[0]) in _BOOLEANS
        and bool(values.astype(str).isin(_BOOLEANS).all())
    )


def _check_kind(column: pd.Series, name: str, remedy: str = "") -> None:
    """Raise if a column holds something else than numbers, dates, text or booleans."""
    kind = pd.api.types.infer_dtype(column, skipna=True)
    if kind.startswith(("time", "period")):
        raise TableError(
            f"column `{name}` holds times or periods, not dates; turn them into numbers{remedy}."
        )
    is_mixed = kind.startswith("mixed") and not all(
        isinstance(value, str | Number) for value in column.dropna()
    )
    if kind not in (*_KINDS, *_DATES) or is_mixed:
        raise TableError(f"column `{name}` holds neither numbers nor text but {kind!r}{remedy}.")


def _texts(column: pd.Series) -> pd.Series:
    """A column as text; numbers as briefly as they can be written. Missing values stay missing."""
    return column.astype(object).map(text_of, na_action="ignore")


def text_of(value: Any) -> str:
    """A value as text; a whole number as briefly as it can be written."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return str(int(value) if is_whole else value)


def places_of_texts(values: pd.Series, known: Sequence[str]) -> Array:
    """The place of each text among the known ones, or -1.

    A text that is not there is the known one with the same number, if there is one only: programs
    write 1 as 1.0 if another value of its column is missing.
    """
    codes = pd.Index(known, dtype=object).get_indexer(values.astype(object))
    is_unknown = codes < 0
    if is_unknown.any():
        numbers = pd.to_numeric(pd.Series(known, dtype=object), errors="coerce")
        numbers = numbers[np.isfinite(numbers) & ~numbers.duplicated(keep=False)]
        places = dict(zip(numbers, numbers.index, strict=True))
        new = pd.to_numeric(values[is_unknown], errors="coerce")
        codes[is_unknown] = [places.get(number, -1) for number in new]
    return codes


def _are(pattern: str, values: pd.Series) -> pd.Series:
    """Whether the text of each value is of a pattern."""
    matches = re.compile(pattern).fullmatch
    return values.map(lambda value: matches(str(value)) is not None).astype(bool)


def _separators(column: pd.Series, is_row: pd.Series) -> str:
    """What is wrong with numbers that have decimal commas or separated thousands."""
    return (
        f"has numbers with a decimal comma or with separated thousands, first "
        f"{_cell(column, is_row)}; write them as 1.5 and 1234"
    )


def _cell(column: pd.Series, is_row: pd.Series) -> str:
    """The first value in which something is so, and its place."""
    return f"{str(column[is_row].iloc[0])!r} in {_place(column, is_row)}"


def _place(column: pd.Series, is_row: pd.Series) -> str:
    """The line of a text file, or the row of another table, in which something is so first.

    The row below the header is number 1.
    """
    first = int(np.argmax(is_row.to_numpy()))
    if column.index.name == "line":
        return f"line {column.index[first]}"
    return f"row {first + 1}"


def _list(names: Any, limit: int = 8) -> str:
    shown = ", ".join(f"`{name}`" for name in list(names)[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown
