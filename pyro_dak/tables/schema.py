"""What the columns of a table are, and how they become numbers.

A `Schema` is what is learned from the columns of a training table. It is plain data, so that it can
be stored as JSON.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, Literal

import numpy as np
import pandas as pd

from pyro_dak.tables.files import TableError
from pyro_dak.tables.predictive import Array
from pyro_dak.validation import check_choice

__all__ = ["Schema", "inputs", "learn_schema", "numbers_of_classes", "raw_inputs", "targets"]

Task = Literal["classification", "regression"]
_MISSING = "(missing)"
# How text files write booleans, and their numbers.
_BOOLEANS = {"True": 1.0, "TRUE": 1.0, "true": 1.0, "False": 0.0, "FALSE": 0.0, "false": 0.0}
# The kinds of columns, by pandas's names for them, that can be used.
_KINDS = (
    "boolean categorical decimal empty floating integer mixed-integer mixed-integer-float string"
).split()
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
            texts = [schema.target, *schema.with_missing, *chain(*schema.categories.values())]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError("names of columns and categories must be texts")
            if not all(isinstance(median, int | float) for median in schema.medians.values()):
                raise TypeError("medians must be numbers")
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
            categories[name] = sorted(_texts(column, name).fillna(_MISSING).unique())
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
    task = task or _find_task(table[target], target)
    return Schema(target, task, medians, with_missing, categories)


def _find_task(column: pd.Series, name: str) -> Task:
    """Classification for text, booleans and few different whole numbers; else regression.

    It is an error if text stands among numbers, unless both look like names of classes.
    """
    if _is_boolean(column):
        return "classification"
    numbers, is_text = _parsed(column, name)
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


def targets(table: pd.DataFrame, schema: Schema) -> Array:
    """The target column: float64 for regression; labels for classes.

    Labels are whole numbers if all of them are written as Python writes these, so that they come
    back as they came in. Else they are text.
    """
    name = schema.target
    if name not in table.columns:
        raise TableError(f"has no target column `{name}`; its columns are {_list(table.columns)}.")
    column = table[name]
    if column.isna().any():
        raise TableError(
            f"target `{name}` has {int(column.isna().sum())} missing values, the first in "
            f"{_place(column, column.isna())}; remove those rows."
        )
    if schema.task == "regression":
        return _numbers(column, name)
    texts = _texts(column, name)
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
    return _codes(pd.Series(labels, dtype=object).map(str), [str(name) for name in classes])


def inputs(table: pd.DataFrame, schema: Schema, ignore_unknown: bool = False) -> pd.DataFrame:
    """The columns of the schema as numbers.

    First come the numeric columns, with the median in place of missing values; then an indicator of
    missing values for each column that had some in training; then a column of zeros and ones for
    each category of each text column. A category that was not seen in training is an error, or with
    `ignore_unknown` all zeros.
    """
    _check_columns(table, schema)
    numbers = {name: _numbers(table[name], name) for name in schema.medians}
    columns = [np.where(np.isnan(numbers[n]), m, numbers[n]) for n, m in schema.medians.items()]
    columns += [np.isnan(numbers[name]).astype(np.float64) for name in schema.with_missing]
    names = [*schema.medians, *(f"missingindicator_{name}" for name in schema.with_missing)]
    for name, known in schema.categories.items():
        values = _texts(table[name], name).fillna(_MISSING)
        codes = _codes(values, known)
        is_unknown = pd.Series(codes < 0, index=values.index)
        if is_unknown.any() and not ignore_unknown:
            raise TableError(
                f"column `{name}` has values that were not there in training: "
                f"{_list(values[is_unknown].unique())}, the first in {_place(values, is_unknown)}. "
                "Pass --ignore-unknown to take them as none of the known ones."
            )
        columns += [(codes == number).astype(np.float64) for number in range(len(known))]
        names += [f"{name}_{category}" for category in known]
    return pd.DataFrame(np.column_stack(columns), columns=names)


def _check_columns(table: pd.DataFrame, schema: Schema) -> None:
    """Raise if a table lacks columns of the schema."""
    lacking = [name for name in schema.columns if name not in table.columns]
    if lacking:
        raise TableError(
            f"lacks {len(lacking)} columns of the training table: {_list(lacking)}; its columns "
            f"are {_list(table.columns)}."
        )


def raw_inputs(table: pd.DataFrame, schema: Schema) -> pd.DataFrame:
    """The columns of the schema as they are: numbers, NaN where they are missing, and texts."""
    _check_columns(table, schema)
    numbers = {name: _numbers(table[name], name) for name in schema.medians}
    texts = {name: _texts(table[name], name).to_numpy() for name in schema.categories}
    return pd.DataFrame(numbers | texts)[schema.columns]


def _looks_numeric(column: pd.Series, name: str) -> bool:
    """Whether a column holds numbers. It is an error if it mixes them with text, or holds dates."""
    _check_kind(column, name)
    if isinstance(column.dtype, pd.CategoricalDtype):
        return False
    _, is_text = _parsed(column, name)
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
    numbers, is_text = _parsed(column, name)
    if is_text.any():
        raise TableError(f"column `{name}` must hold numbers; got {_cell(column, is_text)}.")
    values = numbers.to_numpy(dtype=np.float64, na_value=np.nan)
    is_infinite = pd.Series(np.isinf(values), index=column.index)
    if is_infinite.any():
        raise TableError(
            f"column `{name}` has {int(is_infinite.sum())} infinite values, the first in "
            f"{_place(column, is_infinite)}."
        )
    return values


def _parsed(column: pd.Series, name: str) -> tuple[pd.Series, pd.Series]:
    """A column as numbers, NaN where it has none, and whether a value is text."""
    _check_kind(column, name)
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


def _check_kind(column: pd.Series, name: str) -> None:
    """Raise if a column of a Parquet file holds something else than numbers, text or booleans."""
    kind = pd.api.types.infer_dtype(column, skipna=True)
    if kind.startswith(("date", "time", "period")):
        raise TableError(
            f"column `{name}` holds dates or times; turn them into numbers, or --drop {name!r}."
        )
    if kind not in _KINDS:
        raise TableError(
            f"column `{name}` holds neither numbers nor text but {kind!r}; --drop {name!r}."
        )


def _texts(column: pd.Series, name: str) -> pd.Series:
    """A column as text; numbers of a Parquet file as briefly as they can be written.

    Missing values stay missing.
    """
    _check_kind(column, name)
    return column.astype(object).map(_text, na_action="ignore")


def _text(value: Any) -> str:
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return str(int(value) if is_whole else value)


def _codes(values: pd.Series, known: Sequence[str]) -> Array:
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
