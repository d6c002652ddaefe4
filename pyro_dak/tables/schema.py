"""What the columns of a table are, and how they become numbers.

A `Schema` is what is learned from the columns of a training table. It is plain data, so that it can
be stored as JSON.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd

from pyro_dak.tables.files import TableError
from pyro_dak.tables.predictive import Array
from pyro_dak.validation import check_choice

__all__ = ["Schema", "inputs", "learn_schema", "targets"]

Task = Literal["classification", "regression"]
_MISSING = "(missing)"
# A target of whole numbers with at most this many different values is read as classes.
_MAX_CLASSES = 10
# Text columns with more different values than this hold names, not categories. They are refused.
_MAX_CATEGORIES = 200


@dataclass(frozen=True)
class Schema:
    """What was learned about the columns of a table: all that is needed to turn rows into numbers.

    Attributes:
        target: the name of the target.
        task: "regression" or "classification".
        medians: for each numeric column, the number that replaces a missing value.
        with_missing: the numeric columns that had missing values. Each gets an indicator column.
        categories: for each text column, the values that it had.
    """

    target: str
    task: Task
    medians: dict[str, float] = field(default_factory=dict)
    with_missing: list[str] = field(default_factory=list)
    categories: dict[str, list[str]] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        """The names of the input columns."""
        return [*self.medians, *self.categories]

    def to_json(self) -> dict[str, Any]:
        """The schema as plain data. Columns are lists of pairs, so that JSON keeps their order."""
        content = asdict(self)
        return content | {name: list(content[name].items()) for name in ("medians", "categories")}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Schema":
        """The schema that `to_json` described, or a ValueError."""
        try:
            pairs = {name: dict(content[name]) for name in ("medians", "categories")}
            schema = cls(**(content | pairs))
            check_choice("task", schema.task, ("regression", "classification"))
            return schema
        except (LookupError, TypeError) as error:
            raise ValueError(f"is not the description of a table: {error}") from error


def learn_schema(
    table: pd.DataFrame,
    target: str,
    task: Task | None = None,
    drop: Sequence[str] = (),
    categorical: Sequence[str] = (),
) -> Schema:
    """The schema of a training table without the columns to `drop`.

    The task is found from the target, unless it is given. Columns named in `categorical` are read
    as categories, even if they look like numbers.
    """
    for name in (target, *drop, *categorical):
        if name not in table.columns:
            raise TableError(f"has no column `{name}`; its columns are {_list(table.columns)}.")
    names = [name for name in table.columns if name != target and name not in drop]
    if not names:
        raise TableError(f"has no column beside the target `{target}`; there is nothing to learn.")
    medians, with_missing, categories = {}, [], {}
    for name in names:
        column = table[name]
        if column.isna().all():
            raise TableError(f"column `{name}` is empty; leave it out with --drop {name!r}.")
        if name in categorical or not _looks_numeric(column, name):
            categories[name] = sorted(_texts(column).unique())
            if len(categories[name]) > _MAX_CATEGORIES:
                raise TableError(
                    f"column `{name}` has {len(categories[name])} different texts, more than "
                    f"{_MAX_CATEGORIES}: it looks like names, not categories. Leave it out with "
                    f"--drop {name!r}."
                )
            continue
        numbers = _numbers(column, name)
        medians[name] = float(np.nanmedian(numbers))
        if np.isnan(numbers).any():
            with_missing.append(name)
    return Schema(target, task or _find_task(table[target]), medians, with_missing, categories)


def _find_task(column: pd.Series) -> Task:
    """Classification for text, booleans and few different whole numbers; else regression."""
    numbers, is_text = _parsed(column)
    if pd.api.types.is_bool_dtype(column) or is_text.any():
        return "classification"
    values = numbers.dropna().unique()
    is_whole = np.isfinite(values).all() and (values == np.round(values)).all()
    return "classification" if is_whole and len(values) <= _MAX_CLASSES else "regression"


def targets(table: pd.DataFrame, schema: Schema) -> Array:
    """The target column: float64 for regression; labels, whole numbers or text, for classes."""
    name = schema.target
    if name not in table.columns:
        raise TableError(f"has no target column `{name}`; its columns are {_list(table.columns)}.")
    column = table[name]
    if column.isna().any():
        raise TableError(
            f"target `{name}` has {int(column.isna().sum())} missing values, the first in row "
            f"{_first(column.isna())}; remove those rows."
        )
    if schema.task == "regression":
        return _numbers(column, name)
    numbers, is_text = _parsed(column)
    if not pd.api.types.is_bool_dtype(column) and not is_text.any():
        if (numbers == np.round(numbers)).all():
            return numbers.to_numpy().astype(np.int64)
    return column.astype(str).to_numpy(dtype=object)


def inputs(table: pd.DataFrame, schema: Schema, ignore_unknown: bool = False) -> pd.DataFrame:
    """The columns of the schema as numbers.

    First come the numeric columns, with the median in place of missing values; then an indicator of
    missing values for each column that had some in training; then a column of zeros and ones for
    each category of each text column. A category that was not seen in training is an error, or with
    `ignore_unknown` all zeros.
    """
    lacking = [name for name in schema.columns if name not in table.columns]
    if lacking:
        raise TableError(
            f"lacks {len(lacking)} columns of the training table: {_list(lacking)}; its columns "
            f"are {_list(table.columns)}."
        )
    numbers = {name: _numbers(table[name], name) for name in schema.medians}
    columns = [np.where(np.isnan(numbers[n]), m, numbers[n]) for n, m in schema.medians.items()]
    columns += [np.isnan(numbers[name]).astype(np.float64) for name in schema.with_missing]
    names = [*schema.medians, *(f"missingindicator_{name}" for name in schema.with_missing)]
    for name, known in schema.categories.items():
        values = _texts(table[name])
        is_unknown = ~values.isin(known)
        if is_unknown.any() and not ignore_unknown:
            raise TableError(
                f"column `{name}` has values that were not there in training: "
                f"{_list(values[is_unknown].unique())}, the first in row {_first(is_unknown)}. "
                "Pass --ignore-unknown to take them as none of the known ones."
            )
        columns += [(values == category).to_numpy(dtype=np.float64) for category in known]
        names += [f"{name}_{category}" for category in known]
    return pd.DataFrame(np.column_stack(columns), columns=names)


def _looks_numeric(column: pd.Series, name: str) -> bool:
    """Whether a column holds numbers. It is an error if it mixes them with text, or holds dates."""
    if pd.api.types.is_numeric_dtype(column):
        return True
    if pd.api.types.is_datetime64_any_dtype(column):
        raise TableError(
            f"column `{name}` holds dates; turn them into numbers, or --drop {name!r}."
        )
    if isinstance(column.dtype, pd.CategoricalDtype):
        return False
    _, is_text = _parsed(column)
    if is_text.any() and not is_text[column.notna()].all():
        raise TableError(
            f"column `{name}` mixes numbers and text, first {str(column[is_text].iloc[0])!r} in "
            f"row {_first(is_text)}. Clean it, or pass --categorical {name!r} or --drop {name!r}."
        )
    return not is_text.any()


def _numbers(column: pd.Series, name: str) -> Array:
    """A column as float64, NaN where values are missing. Text and infinity are errors."""
    numbers, is_text = _parsed(column)
    if is_text.any():
        raise TableError(
            f"column `{name}` must hold numbers; got {str(column[is_text].iloc[0])!r} in row "
            f"{_first(is_text)}."
        )
    values = numbers.to_numpy(dtype=np.float64, na_value=np.nan)
    is_infinite = np.isinf(values)
    if is_infinite.any():
        raise TableError(
            f"column `{name}` has {int(is_infinite.sum())} infinite values, the first in row "
            f"{_first(pd.Series(is_infinite))}."
        )
    return values


def _parsed(column: pd.Series) -> tuple[pd.Series, pd.Series]:
    """A column as numbers, NaN where it has none, and whether a value is text."""
    numbers = pd.to_numeric(column, errors="coerce")
    return numbers, numbers.isna() & column.notna()


def _texts(column: pd.Series) -> pd.Series:
    """A column as text, with a text of its own for missing values."""
    return column.astype(object).where(column.notna(), _MISSING).map(str)


def _first(is_row: pd.Series) -> int:
    """The number of the first row that is True; the row below the header is number 1."""
    return int(np.argmax(is_row.to_numpy())) + 1


def _list(names: Any, limit: int = 8) -> str:
    shown = ", ".join(f"`{name}`" for name in list(names)[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown
