"""What the columns of a table are, and how they become numbers.

What is learned from a table is plain data (`Schema`), so that it can be stored as JSON. The
scikit-learn transformer that a schema stands for is built from it whenever it is needed, by fitting
it to two made-up rows that have exactly the medians and categories of the schema.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder

from pyro_dak.tables.files import TableError
from pyro_dak.validation import check_choice

__all__ = ["Schema", "find_task", "inputs", "learn_schema", "targets"]

Task = Literal["classification", "regression"]
_MISSING = "(missing)"
# A target of whole numbers with at most this many different values is taken for classes.
_MAX_CLASSES = 10
# Text columns with more different values than this are refused: they are names, not categories.
_MAX_CATEGORIES = 200


@dataclass(frozen=True)
class Schema:
    """What was learned of the columns of a table: everything needed to turn rows into numbers.

    Attributes:
        target: name of the target.
        task: "regression" or "classification".
        medians: by numeric column, what stands in for a missing value.
        with_missing: numeric columns that had missing values: they get an indicator.
        categories: by text column, the values seen.
    """

    target: str
    task: Task
    medians: dict[str, float] = field(default_factory=dict)
    with_missing: list[str] = field(default_factory=list)
    categories: dict[str, list[str]] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        """Columns of inputs."""
        return [*self.medians, *self.categories]

    def to_json(self) -> dict[str, Any]:
        """As plain data; columns as lists of pairs, which keep their order in any JSON."""
        content = asdict(self)
        return content | {name: list(content[name].items()) for name in ("medians", "categories")}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Schema":
        """From plain data, or ValueError."""
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
    """What the columns of a training table are.

    Args:
        table: the table.
        target: name of the target.
        task: what to learn; by default found from the target.
        drop: columns to leave out.
        categorical: columns to take as categories, also if they look like numbers.
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
            categories[name] = _categories(column, name)
            continue
        numbers = _numbers(column, name)
        medians[name] = float(np.nanmedian(numbers))
        if np.isnan(numbers).any():
            with_missing.append(name)
    task = find_task(table[target]) if task is None else task
    return Schema(target, task, medians, with_missing, categories)


def find_task(column: pd.Series) -> Task:
    """Classes for text, booleans and few different whole numbers; regression for other numbers."""
    numbers = pd.to_numeric(column, errors="coerce")
    if pd.api.types.is_bool_dtype(column) or (numbers.isna() & column.notna()).any():
        return "classification"
    values = numbers.dropna().unique()
    is_whole = np.isfinite(values).all() and (values == np.round(values)).all()
    return "classification" if is_whole and len(values) <= _MAX_CLASSES else "regression"


def targets(table: pd.DataFrame, schema: Schema) -> np.ndarray[Any, np.dtype[Any]]:
    """The target column: float64 for regression, labels (whole numbers or text) for classes."""
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
    numbers = pd.to_numeric(column, errors="coerce")
    if not pd.api.types.is_bool_dtype(column) and numbers.notna().all():
        if (numbers == np.round(numbers)).all():
            return numbers.to_numpy().astype(np.int64)
    return column.astype(str).to_numpy(dtype=object)


def inputs(table: pd.DataFrame, schema: Schema, ignore_unknown: bool = False) -> pd.DataFrame:
    """The columns of the schema as numbers: missing ones filled in, categories one-hot.

    Args:
        table: the table.
        schema: what was learned of its columns.
        ignore_unknown: whether a category that was not seen in training counts as none of the
            known ones; else it is an error.
    """
    lacking = [name for name in schema.columns if name not in table.columns]
    if lacking:
        raise TableError(
            f"lacks {len(lacking)} columns of the training table: {_list(lacking)}; its columns "
            f"are {_list(table.columns)}."
        )
    columns: dict[str, Any] = {name: _numbers(table[name], name) for name in schema.medians}
    for name, known in schema.categories.items():
        values = _texts(table[name])
        is_unknown = ~values.isin(known)
        if is_unknown.any() and not ignore_unknown:
            raise TableError(
                f"column `{name}` has values that were not there in training: "
                f"{_list(values[is_unknown].unique())}, the first in row {_first(is_unknown)}. "
                "Pass --ignore-unknown to take them as none of the known ones."
            )
        columns[name] = values.to_numpy(dtype=object)
    transformer = build_transformer(schema)
    numbers = transformer.transform(pd.DataFrame(columns))
    return pd.DataFrame(numbers, columns=transformer.get_feature_names_out())


def build_transformer(schema: Schema) -> ColumnTransformer:
    """The fitted scikit-learn transformer that a schema stands for."""
    transformer = ColumnTransformer(
        [
            (
                "number",
                SimpleImputer(strategy="median", add_indicator=True),
                list(schema.medians),
            ),
            (
                "category",
                OneHotEncoder(
                    categories=[list(known) for known in schema.categories.values()],
                    handle_unknown="ignore",
                    sparse_output=False,
                    dtype=np.float64,
                ),
                list(schema.categories),
            ),
        ],
        verbose_feature_names_out=False,
    )
    rows: dict[str, Any] = {}
    for name, median in schema.medians.items():
        rows[name] = [median, np.nan if name in schema.with_missing else median]
    for name, known in schema.categories.items():
        rows[name] = [known[0], known[0]]
    return transformer.fit(pd.DataFrame(rows))


def _looks_numeric(column: pd.Series, name: str) -> bool:
    """Whether a column holds numbers; an error if it mixes them with text, or holds dates."""
    if pd.api.types.is_numeric_dtype(column):
        return True
    if pd.api.types.is_datetime64_any_dtype(column):
        raise TableError(f"column `{name}` holds dates; turn it to numbers or --drop {name!r}.")
    if isinstance(column.dtype, pd.CategoricalDtype):
        return False
    is_text = pd.to_numeric(column, errors="coerce").isna() & column.notna()
    if is_text.any() and not is_text[column.notna()].all():
        raise TableError(
            f"column `{name}` mixes numbers and text, first {str(column[is_text].iloc[0])!r} in "
            f"row {_first(is_text)}. Clean it, or pass --categorical {name!r} or --drop {name!r}."
        )
    return not is_text.any()


def _numbers(column: pd.Series, name: str) -> np.ndarray[Any, np.dtype[Any]]:
    """A column as float64, with NaN where values are missing; an error for text and infinity."""
    numbers = pd.to_numeric(column, errors="coerce")
    is_text = numbers.isna() & column.notna()
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


def _texts(column: pd.Series) -> pd.Series:
    return column.astype(object).where(column.notna(), _MISSING).map(str)


def _categories(column: pd.Series, name: str) -> list[str]:
    known = sorted(_texts(column).unique())
    if len(known) > _MAX_CATEGORIES:
        raise TableError(
            f"column `{name}` has {len(known)} different texts, more than {_MAX_CATEGORIES}: it "
            f"looks like names, not categories. Leave it out with --drop {name!r}."
        )
    return known


def _first(is_row: pd.Series) -> int:
    """The number of the first such row, counted from 1 below the header."""
    return int(np.argmax(is_row.to_numpy())) + 1


def _list(names: Any, limit: int = 8) -> str:
    shown = ", ".join(f"`{name}`" for name in list(names)[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown
