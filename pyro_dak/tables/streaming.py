"""Estimators trained on Parquet files that are larger than memory.

The columns have the types of the files: numbers and booleans, dates, and text, which is taken for
categories. One pass learns what the columns are, a second one their scales, and then each epoch is
a pass (see `pyro_dak.training.parquet`). Some rows are held out from all networks. They say when to
stop and how wide predictions are, as in `fit`; no network is trained a second time.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from pyro_dak.tables.base import TableEstimator
from pyro_dak.tables.files import TableError, as_pandas
from pyro_dak.tables.novelty import learn_novelty, reference_of
from pyro_dak.tables.predictive import Array
from pyro_dak.tables.rows import Rows, default_fraction
from pyro_dak.tables.schema import (
    Columns,
    Target,
    check_columns,
    encode,
    learn_columns,
    learn_target,
    merged,
    numbers_of_classes,
    targets,
    with_telling_gaps,
)
from pyro_dak.training.data import ParquetData
from pyro_dak.training.parquet import ParquetRows, RowGroup, RowSample, check_alike, row_groups

__all__ = ["LARGE_TABLE", "TableRows", "fit_files", "is_large"]

# Tables with more numbers than this, a million rows of ten columns, are read from their files.
LARGE_TABLE = 10_000_000
# As many rows are held out as of a table in memory.
_MAX_HELD_OUT = 5000
# A target with more different values than this is no class.
_MAX_CLASSES = 1000


class TableRows(ParquetRows):
    """Rows of Parquet files with the columns of a table: also text, dates and missing values.

    Attributes:
        schema: what was learned about the columns.
        aim: the target, and whether it is a number or a class.
        classes: the labels, if it is a class.
    """

    def __init__(
        self,
        path: Path,
        target: str,
        task: Any = None,
        drop: Sequence[str] = (),
        categorical: Collection[str] = (),
        progress: bool = True,
    ):
        self.schema, self.aim = Columns(), Target(target, "regression")
        self.classes: Array | None = None
        self._drop, self._categorical = drop, categorical
        super().__init__(path, target, labels=False, progress=progress)
        self._learn(task)

    def _check_columns(self) -> None:
        names = self._schema.names
        with self._naming():
            check_columns(pd.DataFrame(columns=names), [*self.targets, *self._drop])
            check_columns(pd.DataFrame(columns=names), [*self._categorical])
            self.columns = [name for name in self.columns if name not in self._drop]
            if not self.columns:
                raise TableError(
                    f"has no column beside the target `{self.targets[0]}`; there is nothing to "
                    "learn."
                )

    def _check_files(self, names: Sequence[str] | None) -> None:
        try:
            check_alike(self.groups, self._schema, names, self._drop)
        except ValueError as error:
            raise TableError(str(error)) from error

    @contextmanager
    def _naming(self, group: RowGroup | None = None) -> Iterator[None]:
        """Say in which row group something is wrong with the table."""
        try:
            yield
        except TableError as error:
            raise TableError(f"{group.name}: {error}" if group else str(error)) from error

    @property
    def _texts(self) -> list[str]:
        """The columns of categories: those of text, and those that are said to be."""
        from pyarrow import types

        def is_text(kind: Any) -> bool:
            kind = kind.value_type if types.is_dictionary(kind) else kind
            return types.is_string(kind) or types.is_large_string(kind)

        fields = {name: self._schema.field(name).type for name in self.columns}
        return [n for n, kind in fields.items() if n in self._categorical or is_text(kind)]

    def _learn(self, task: Any) -> None:
        """What the columns and the target are, from one pass over the files."""
        chosen, texts = RowSample.of(self.groups, len(self.columns)), self._texts
        parts, samples, values = list[Columns](), list[pd.DataFrame](), set[Any]()
        for number in self._passing("columns"):
            group = self.groups[number]
            frame = as_pandas(self.table(group))
            with self._naming(group):
                parts.append(learn_columns(frame[self.columns], texts, is_filled=False))
                if frame[self.targets[0]].isna().any():
                    targets(frame, self.aim)  # which raises
            if len(values) <= _MAX_CLASSES:
                values |= {*frame[self.targets[0]].unique()}
            samples.append(frame[chosen.of_group(group)])
        sample = pd.concat(samples, ignore_index=True)
        self.schema = merged(parts, learn_columns(sample[self.columns], texts))
        seen = pd.DataFrame({self.targets[0]: pd.Series([*values])})
        shown = sample if isinstance(seen.iloc[0, 0], str) else seen  # of text, few are classes
        self.aim = learn_target(shown, self.targets[0], task)
        if self.aim.task == "classification":
            if len(values) > _MAX_CLASSES:
                raise TableError(
                    f"target `{self.targets[0]}` has more than {_MAX_CLASSES} different values; "
                    "pass --task regression if they are numbers."
                )
            self.classes = np.unique(targets(seen, self.aim))
            self.has_labels = True
            if len(self.classes) < 2:
                raise TableError(
                    f"target `{self.targets[0]}` has one class only; there is nothing to learn."
                )

        y, labels = targets(sample, self.aim), self.has_labels
        self.schema = with_telling_gaps(self.schema, sample, y, labels)

    @property
    def width(self) -> int:
        """D, the number of columns once they are numbers."""
        return len(self.schema.encoded_names or self.columns)

    def values(self, group: RowGroup) -> tuple[Array, Array]:
        frame = as_pandas(self.table(group))
        with self._naming(group):
            x, y = encode(frame[self.columns], self.schema), targets(frame, self.aim)
        if self.classes is not None:
            y = numbers_of_classes(y, self.classes)
        return x, y.reshape(-1, 1)


def is_large(path: Path) -> bool:
    """Whether Parquet files have more numbers than are read into memory at once."""
    try:
        groups, schema = row_groups(path)
    except (ImportError, ValueError):
        return False  # whoever reads them says what is wrong
    return sum(group.num_rows for group in groups) * len(schema.names) > LARGE_TABLE


def fit_files(estimator: TableEstimator, rows: TableRows) -> TableEstimator:
    """Train a `DAKRegressor` or a `DAKClassifier` on rows of files, and return it."""
    is_embedded = estimator.numeric_embedding == "piecewise"
    if estimator.warm_start or not estimator.early_stopping or is_embedded:
        raise NotImplementedError(
            "Rows of files are for estimators without `warm_start` and with `early_stopping`, "
            'whose `numeric_embedding` is not "piecewise".'
        )
    estimator._check_parameters()
    with estimator._unchanged_by_failure():
        _set_columns(estimator, rows)
        _train(estimator, rows)
    return estimator


def _set_columns(estimator: Any, rows: TableRows) -> None:
    """Let the estimator know the columns, their scales, and the target."""
    scales = rows.scales
    estimator.columns_, estimator.n_features_in_ = rows.schema, len(rows.columns)
    estimator.feature_names_in_ = np.array(rows.columns, dtype=object)
    estimator.x_mean_, estimator.x_scale_ = scales.x_mean, scales.x_scale
    if rows.classes is None:
        estimator.y_mean_, estimator.y_scale_ = scales.y_mean, scales.y_scale
        estimator.is_multi_output_ = False
    else:
        estimator.classes_ = rows.classes
    estimator.num_rows_seen_, estimator.kept_apart_ = float(rows.num_rows), None
    estimator.conditioned_ = None
    estimator.__dict__.update(estimator._uncalibrated)


def _train(estimator: Any, rows: TableRows) -> None:
    """Train on all rows but a few, which say when to stop, and calibrate on these."""
    seed, E, N = estimator._seed(), estimator.ensemble_size, rows.num_rows
    fraction = estimator.validation_fraction or default_fraction(N)
    rest, apart = rows.split(min(fraction, _MAX_HELD_OUT / N), seed)
    device, plan = estimator._device(), estimator._plan(rest.num_rows, seed)
    x, y = (part.to(device) for part in apart.read_all(torch.float32))
    n = len(x)
    held_out = Rows(x.expand(E, *x.shape), y.expand(E, *y.shape), x.new_ones(E, n))
    estimator.ensemble_ = estimator._build(E, seed)
    data = ParquetData(rest, estimator.ensemble_.model, plan.batch_size, device)
    estimator._stop_and_calibrate(held_out, data, n, plan, False)
    # What is strange: compared with rows from all over the files, and these.
    seen = torch.cat([rest.sample(torch.float32)[0].to(device), x])
    numbers = torch.arange(len(seen) - n, len(seen), device=device).expand(E, -1)
    arguments = estimator.ensemble_, seen, numbers
    overlap = n if E > 1 else 0
    reference = reference_of(*arguments, estimator._entropies, overlap, E)
    estimator.novelty_ = learn_novelty(*arguments, reference, estimator._entropies)
