"""Which columns of a table are numbers and which are categories, for estimators that take both."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from pyro_dak.tables.predictive import Array
from pyro_dak.tables.terms import Column

__all__ = ["MISSING", "as_frame", "learn_columns", "read_columns"]

MISSING = "(missing)"
# Columns with more different texts than this hold names, not categories.
_MAX_CATEGORIES = 500
# Larger numbers have no squares.
_LARGEST = 1e150
_SECONDS_OF_A_DAY = 86_400


def as_frame(X: Any) -> pd.DataFrame | None:
    """X as a data frame of pandas if it is a data frame of any kind, else None."""
    if isinstance(X, pd.DataFrame):
        return X
    if hasattr(X, "__dataframe__"):
        return pd.api.interchange.from_dataframe(X)
    return None


def learn_columns(table: pd.DataFrame | Array, categorical: Sequence[int]) -> list[Column]:
    """The columns of a training table, with the categories that they have.

    Those with the numbers `categorical` are categories, and so are those that hold text or have a
    categorical type.
    """
    result = []
    for index, (name, column) in enumerate(_named(table)):
        if index in categorical or _is_categorical(column):
            texts = _texts(column)
            known = sorted(set(texts))
            if len(known) > _MAX_CATEGORIES:
                raise ValueError(
                    f"Column {name!r} has {len(known)} different texts, more than "
                    f"{_MAX_CATEGORIES}: it looks like names, not categories. Leave it out."
                )
            result.append(Column(_codes(texts, known), known))
        else:
            result.append(Column(_numbers(column, name)))
    return result


def read_columns(
    table: pd.DataFrame | Array, categories: Sequence[list[str] | None]
) -> list[Array]:
    """The columns of another table as numbers, or as codes of the known categories."""
    pairs = zip(_named(table), categories, strict=True)
    return [
        _numbers(column, name) if known is None else _codes(_texts(column), known)
        for (name, column), known in pairs
    ]


def _named(table: pd.DataFrame | Array) -> list[tuple[Any, Any]]:
    """The columns of a table with their names or numbers."""
    if isinstance(table, pd.DataFrame):
        return [(name, table.iloc[:, j]) for j, name in enumerate(table.columns)]
    return list(enumerate(table.T))


def _is_categorical(column: Any) -> bool:
    """Whether a column has a categorical type, or holds something that is not a number."""
    if isinstance(column, np.ndarray):
        return False
    kind = column.dtype
    if isinstance(kind, pd.CategoricalDtype):
        return True
    if not (pd.api.types.is_object_dtype(kind) or pd.api.types.is_string_dtype(kind)):
        return False
    return not column.dropna().map(lambda value: isinstance(value, int | float | np.number)).all()


def _numbers(column: Any, name: Any) -> Array:
    """A column as float64 with NaN for missing values; days for dates and times."""
    if not isinstance(column, np.ndarray):
        if pd.api.types.is_datetime64_any_dtype(column.dtype):
            if column.dt.tz is not None:
                column = column.dt.tz_convert(None)
            column = column - pd.Timestamp(0)
        if pd.api.types.is_timedelta64_dtype(column.dtype):
            column = column.dt.total_seconds() / _SECONDS_OF_A_DAY
        try:
            if pd.api.types.is_object_dtype(column.dtype):
                column = column.astype("Float64")
            column = column.to_numpy(dtype=np.float64, na_value=np.nan)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"Column {name!r} must hold numbers, as in training; got {column.dtype}: {error}"
            ) from error
    values = np.asarray(column, dtype=np.float64)
    if np.isinf(values).any():
        raise ValueError(f"Column {name!r} has infinite values; X must be finite, or missing.")
    if np.nanmax(np.abs(values), initial=0.0) > _LARGEST:
        raise ValueError(f"Column {name!r} has values above {_LARGEST:g}. Rescale it.")
    return values


def _texts(column: Any) -> list[str]:
    """A column as texts; whole numbers without a decimal point."""
    return [_text(value) for value in np.asarray(column, dtype=object)]


def _text(value: Any) -> str:
    if pd.isna(value):
        return MISSING
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return str(int(value) if is_whole else value)


def _codes(texts: Sequence[str], known: Sequence[str]) -> Array:
    """The place of each text among the known ones, or -1."""
    places = {text: place for place, text in enumerate(known)}
    return np.array([places.get(text, -1) for text in texts], dtype=np.float64)
