"""`ParquetRows`: rows in Parquet files that may be larger than memory, read by row groups.

**An epoch.** N rows stand in G row groups. A seed puts the groups into a random order; one behind
the other they are a sequence of N rows. It is cut into V parts at N v / V, so that parts differ by
one row at most, and each part into T batches in the same way; batch t of the epoch is batch t of
all parts together. The batches of a part are cut into blocks of about as many, so that the rows of
a block fit into the buffer. There they are shuffled before they become batches. Where a cut goes
through a group, either side reads its own rows of it.

So every row comes once in an epoch, and every part has T batches, of sizes that differ by one row
at most. Of W processes, process r reads the parts r, r + W, ...: with the same V the batches are
the same for any W. To go on in the middle of an epoch, only the block of the next batch is read
again.

**Held-out rows** are chosen by a hash of the number of the row, counted over the sorted files, and
of a seed. So each row is held out with the same probability, wherever it stands.
"""

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dak.validation import (
    check_choice,
    check_finite,
    check_floating,
    check_has_values,
    check_integer,
    check_kind,
    check_last_dim,
    check_path,
    check_probability,
)

__all__ = [
    "ParquetRows",
    "RowGroup",
    "RowSample",
    "Scales",
    "check_alike",
    "mixed_bits",
    "row_groups",
]

Array = np.ndarray[Any, np.dtype[Any]]

# So many rows, or rows with so many numbers, are kept to look at; a hash by this seed chooses them.
_SAMPLE_ROWS, _SAMPLE_NUMBERS, _SAMPLE_SEED = 50_000, 2**24, 2**61 - 1
# More held-out rows than this hardly change a score, and they are kept in memory.
_MAX_HELD_OUT = 100_000
_CHUNK = 8192
_BUFFER = 2**28


def mixed_bits(code: Array) -> Array:
    """Numbers of 64 bits in which every bit depends on all bits of the given ones.

    This is the finaliser of the generator SplitMix64.
    """
    code = code + np.uint64(0x9E3779B97F4A7C15)
    code = (code ^ (code >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    code = (code ^ (code >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return code ^ (code >> np.uint64(31))


class Scales(NamedTuple):
    """Means and standard deviations of inputs, `(D,)`, and of targets, `(C,)`.

    Those of class labels are 0 and 1.
    """

    x_mean: Array
    x_scale: Array
    y_mean: Array
    y_scale: Array


@dataclass(frozen=True)
class RowGroup:
    """A row group of a file: what reads it, its rows, and the number of the first of them."""

    fragment: Any
    num_rows: int
    first: int
    path: str
    name: str


@dataclass(frozen=True)
class _Choice:
    """Rows whose uniform number, by this seed, lies from `low` up to `high`.

    A part of a part has another `depth`, so that the same seed gives other numbers.
    """

    seed: int
    low: float
    high: float
    depth: int = 0

    def of(self, numbers: Array) -> Array:
        """Which of the rows with these numbers are chosen."""
        seed, depth = np.array([[self.seed], [self.depth]], dtype=np.uint64)
        key = mixed_bits(mixed_bits(seed) ^ depth)
        uniform = mixed_bits(numbers.astype(np.uint64) ^ key) / 2.0**64
        return (self.low <= uniform) & (uniform < self.high)


@dataclass(frozen=True)
class RowSample:
    """Which rows are looked at beforehand: about 50,000 from all over, or all of fewer."""

    choice: _Choice

    @classmethod
    def of(cls, groups: Sequence[RowGroup], width: int) -> "RowSample":
        """The sample of these groups, of rows with so many numbers."""
        total = sum(group.num_rows for group in groups)
        limit = min(_SAMPLE_ROWS, _SAMPLE_NUMBERS // width)
        return RowSample(_Choice(_SAMPLE_SEED, 0.0, limit / total if total > limit else 2.0))

    def of_group(self, group: RowGroup) -> Array:
        """Which rows of a group are in the sample."""
        return self.choice.of(np.arange(group.first, group.first + group.num_rows))


class ParquetRows:
    """Rows of a folder of Parquet files, which `fit` reads group by group in constant memory.

        rows = ParquetRows("folder/", target="y")
        fit(model, guide, rows, validation=0.1)
        prediction = predict(model, guide, rows.inputs(frame))  # of standardised targets

    Columns hold numbers without gaps, of the same types in all files. They are standardised, and so
    are targets, unless these are class labels. The number of rows comes from the metadata, and the
    scales from one pass over the files. A row group is read as a whole, so that memory is that of
    the buffer and of one group.

    Args:
        path: a folder, whose files are read in the order of their names, with those of folders in
            it; a file; or a list of files.
        target: the column of y, or a list of such columns.
        columns: the columns of x, in this order; by default all others.
        labels: whether y are class labels or counts, which stay whole numbers. By default they are
            if the column has an integer type.
        shards: V, the number of parts that an epoch is read in, a multiple of the number of
            processes; by default that number. The same V gives the same batches for any number of
            processes.
        buffer_bytes: the memory of a process for rows that are shuffled together, which `shards`
            divide; by default 256 MiB, or that of two row groups for each if they are larger. The
            more groups it holds, the less a batch shows in which order the rows were written.
        progress: whether to show a bar for a pass that takes more than two seconds.

    Attributes:
        columns: the columns of x.
        targets: those of y.
        groups: the row groups.
    """

    def __init__(
        self,
        path: Any,
        target: str | Sequence[str],
        columns: Sequence[str] | None = None,
        *,
        labels: bool | None = None,
        shards: int | None = None,
        buffer_bytes: int | None = None,
        progress: bool = True,
    ):
        for name, value in (("buffer_bytes", buffer_bytes), ("shards", shards)):
            if value is not None:
                check_integer(name, value, minimum=1)
        for name, names in (("target", target), ("columns", columns)):
            if not isinstance(names, str if name == "target" else type(None)):
                check_kind(name, names, list | tuple, "a list of names of columns")
        if labels is not None:
            check_kind("labels", labels, bool, "True, False or None")
        self.shards, self.progress = shards, progress
        self.groups, self._schema = row_groups(path)
        self.targets = [target] if isinstance(target, str) else [*target]
        schema = self._schema
        rest = [name for name in schema.names if name not in self.targets]
        self.columns = rest if columns is None else [*columns]
        self._check_columns()
        self._check_files(None if columns is None else [*self.columns, *self.targets])
        is_whole = all(_is_integer(schema.field(name).type) for name in self.targets)
        self.has_labels = is_whole if labels is None else labels
        if self.has_labels and len(self.targets) > 1:
            raise ValueError(f"`target` must be one column of labels; got {self.targets}.")
        self.buffer_bytes = self._buffer(buffer_bytes)
        self._choices: list[_Choice] = []
        self._parent: ParquetRows | None = None

    def _buffer(self, num_bytes: int | None) -> int:
        """The size of the buffer, or an error if it does not hold two row groups of each shard."""
        least = sum(sorted(group.num_rows for group in self.groups)[-2:]) * self.row_bytes
        least *= self.shards or 1
        if num_bytes is not None and num_bytes < least:
            raise ValueError(
                f"`buffer_bytes` must hold the two largest row groups, for each of `shards`, "
                f"{least} bytes; got {num_bytes}. Raise it, or write smaller row groups."
            )
        return max(_BUFFER, least) if num_bytes is None else num_bytes

    @property
    def width(self) -> int:
        """D, the numbers in a row of x."""
        return len(self.columns)

    @property
    def row_bytes(self) -> int:
        """The bytes of a row in the buffer, in single precision."""
        return 4 * self.width + (8 if self.has_labels else 4 * len(self.targets))

    def _check_columns(self) -> None:
        """Raise unless the columns are there, once each, and can be read as numbers."""
        for name in [*self.targets, *self.columns]:
            check_kind("columns", name, str, "names of columns")
            check_choice("columns" if name in self.columns else "target", name, self._schema.names)
        repeated = {name for name in self.columns if self.columns.count(name) > 1}
        if repeated or {*self.columns} & {*self.targets} or not self.columns or not self.targets:
            raise ValueError(
                "`target` and `columns` must be different columns, at least one each; got "
                f"{self.targets} and {self.columns}."
            )
        self._check_types()

    def _check_files(self, names: Sequence[str] | None) -> None:
        """Raise unless these columns, by default all, are the same in all files."""
        check_alike(self.groups, self._schema, names)

    def _check_types(self) -> None:
        for name in [*self.targets, *self.columns]:
            kind = self._schema.field(name).type
            if not _is_number(kind):
                raise TypeError(
                    f"column `{name}` must hold numbers; it holds {kind}. Leave it out by "
                    "`columns`, or turn it into numbers; `pyro-dak fit` takes text, dates and "
                    "missing values."
                )

    def __repr__(self) -> str:
        return (
            f"ParquetRows({self.num_rows} rows in {len(self.groups)} row groups, "
            f"{len(self.columns)} columns, target {', '.join(self.targets)})"
        )

    @cached_property
    def sizes(self) -> list[int]:
        """The number of rows of each group that count."""
        if not self._choices:
            return [group.num_rows for group in self.groups]
        return [len(self._chosen(group)) for group in self.groups]

    @property
    def num_rows(self) -> int:
        """N."""
        return sum(self.sizes)

    def split(self, share: float, seed: int = 0) -> "tuple[ParquetRows, ParquetRows]":
        """The rows without a share of them, and that share, chosen by a hash of their numbers.

        Both have the scales of all rows.
        """
        check_probability("share", share)
        check_integer("seed", seed, minimum=0, maximum=2**63 - 1)
        depth = len(self._choices)
        parts = [_Choice(seed, share, 1.0, depth), _Choice(seed, 0.0, share, depth)]
        rest, held_out = (self._with(choice) for choice in parts)
        for part in (rest, held_out):
            if part.num_rows == 0:
                raise ValueError(
                    f"`share`={share} of {self.num_rows} rows leaves none on one side."
                )
        return rest, held_out

    def held_out_share(self, share: float) -> float:
        """The share, or less of many rows, so that about 100,000 rows are held out at most."""
        return min(share, _MAX_HELD_OUT / self.num_rows)

    def _with(self, choice: _Choice) -> "ParquetRows":
        other = object.__new__(type(self))
        own = {name: value for name, value in vars(self).items() if name not in _CACHED}
        other.__dict__.update(own)
        other._choices, other._parent = [*self._choices, choice], self._parent or self
        return other

    @property
    def scales(self) -> Scales:
        """Means and standard deviations; the first call makes a pass over the files."""
        return self._scan[0] if self._parent is None else self._parent.scales

    def inputs(self, table: Any) -> Tensor:
        """x of a data frame, a dictionary or an Arrow table with these columns, standardised."""
        if isinstance(table, type):
            raise TypeError(f"`table` must be a data frame or the like; got {table!r}.")
        try:
            columns = [np.asarray(table[name], dtype=np.float64) for name in self.columns]
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"`table` must be a data frame, a dictionary or an Arrow table with the columns "
                f"{self.columns} of numbers; got a {type(table).__name__}: {error}"
            ) from error
        shapes = {column.shape for column in columns}
        if len(shapes) > 1 or any(column.ndim != 1 for column in columns):
            raise ValueError(f"`table` must have columns of one length; got {sorted(shapes)}.")
        values = (np.stack(columns, -1) - self.scales.x_mean) / self.scales.x_scale
        x = torch.from_numpy(values).to(torch.get_default_dtype())
        check_finite("table", x)
        return x

    def original(self, y: Tensor) -> Tensor:
        """Targets, or means of them, in the units of the files."""
        check_floating("y", y)
        check_has_values("y", y)
        check_finite("y", y)
        check_last_dim("y", y, len(self.targets), "one for each target", "Give y of a model.")
        mean, scale = (torch.as_tensor(part).to(y) for part in self.scales[2:])
        return y * scale + mean

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All rows (x, y) in the order of the files, some thousand at a time."""
        for number in range(len(self.groups)):
            x, y = self.tensors(number, torch.get_default_dtype())
            yield from zip(x.split(_CHUNK), y.split(_CHUNK), strict=True)

    def read_all(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """All rows (x, y) in memory, in the order of the files."""
        pairs = [self.tensors(number, dtype) for number in self._passing("read")]
        return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])

    def sample(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """About 50,000 rows (x, y) from all over the files, or all of fewer, in a random order."""
        numbers, x, y = (self._parent or self)._scan[1:]
        keep = np.logical_and.reduce([c.of(numbers) for c in self._choices] or [numbers >= 0])
        order = torch.randperm(int(keep.sum()), generator=torch.Generator().manual_seed(0))
        tensors = self._scaled(x[keep], y[keep], dtype)
        return tensors[0][order], tensors[1][order]

    def table(self, group: RowGroup) -> Any:
        """The columns of a group as an Arrow table, with the types of the first file."""
        names = [*self.columns, *self.targets]
        return group.fragment.to_table(schema=self._schema, columns=names)

    def values(self, group: RowGroup) -> tuple[Array, Array]:
        """All rows of a group as they are in the file: x `(n, D)` in float64, and y `(n, C)`."""
        table = self.table(group)
        own = [_numbers(table.column(name), name, group) for name in self.columns]
        return np.stack(own, -1), self._targets(table, group)

    def _targets(self, table: Any, group: RowGroup) -> Array:
        is_missing = not self.has_labels  # numbers may be; `fit(missing="nan")` knows them
        own = [_numbers(table.column(n), n, group, is_missing) for n in self.targets]
        y = np.stack(own, -1)
        if self.has_labels and (y != np.round(y)).any():
            raise ValueError(
                f"column `{self.targets[0]}` must hold whole numbers, the labels of classes; it "
                f"has others in {group.name}. Leave `labels=True` out."
            )
        return y

    def tensors(self, number: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The rows of a group that count, standardised, x `(n, D)` and y."""
        group = self.groups[number]
        x, y = self.values(group)
        if self._choices:
            chosen = self._chosen(group)
            x, y = x[chosen], y[chosen]
        return self._scaled(x, y, dtype)

    def _scaled(self, x: Array, y: Array, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        scales = self.scales
        x_scaled = torch.from_numpy((x - scales.x_mean) / scales.x_scale).to(dtype)
        if self.has_labels:
            return x_scaled, torch.from_numpy(y[:, 0].astype(np.int64))
        return x_scaled, torch.from_numpy((y - scales.y_mean) / scales.y_scale).to(dtype)

    def _chosen(self, group: RowGroup) -> Array:
        """The rows of a group that count, by their place in it."""
        numbers = np.arange(group.first, group.first + group.num_rows)
        return np.flatnonzero(np.logical_and.reduce([c.of(numbers) for c in self._choices]))

    def _passing(self, what: str) -> Iterator[int]:
        """The numbers of all groups, with a bar."""
        numbers = range(len(self.groups))
        yield from tqdm(numbers, what, delay=2, leave=False, disable=not self.progress)

    @cached_property
    def _scan(self) -> tuple[Scales, Array, Array, Array]:
        """Scales, and a sample of rows: their numbers and what stands there, from one pass."""
        sample = RowSample.of(self.groups, self.width)
        moments = _Moments(), _Moments()
        numbers, xs, ys = list[Array](), list[Array](), list[Array]()
        for index in self._passing("statistics"):
            group = self.groups[index]
            parts = self.values(group)
            for own, values in zip(moments, parts, strict=True):
                own.add(values)
            chosen = sample.of_group(group)
            numbers.append(group.first + np.flatnonzero(chosen))
            xs.append(parts[0][chosen])
            ys.append(parts[1][chosen])
        (x_mean, x_scale), (y_mean, y_scale) = (own.scales() for own in moments)
        if self.has_labels:
            y_mean, y_scale = np.zeros_like(y_mean), np.ones_like(y_scale)
        scales = Scales(x_mean, x_scale, y_mean, y_scale)
        return scales, np.concatenate(numbers), np.concatenate(xs), np.concatenate(ys)

    def part(
        self, seed: int, number: int, num_parts: int, num_batches: int, start: int, dtype: Any
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches from number `start` on of one part of an epoch (see the top of the module).

        Args:
            seed: what the order of the rows comes from.
            number: which part.
            num_parts: V.
            num_batches: T.
            start: the first batch.
            dtype: that of floating rows.
        """
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.groups), generator=generator).tolist()
        own = int(torch.randint(2**62, (num_parts,), generator=generator)[number])
        generator = torch.Generator().manual_seed(own)
        N, T = self.num_rows, num_batches
        low, high = N * number // num_parts, N * (number + 1) // num_parts
        edges = [low + (high - low) * t // T for t in range(T + 1)]
        num_bytes = self.buffer_bytes // (self.shards or 1)
        K = min(T, math.ceil((high - low) * self.row_bytes / num_bytes))
        for block in range(K):
            first, last = T * block // K, T * (block + 1) // K
            shuffled = torch.randperm(edges[last] - edges[first], generator=generator)
            if last <= start:
                continue
            x, y = self._loaded(order, edges[first], edges[last], dtype)
            for t in range(max(first, start), last):
                rows = shuffled[edges[t] - edges[first] : edges[t + 1] - edges[first]]
                yield x[rows], y[rows]
            del x, y  # before the next block is read

    def _loaded(
        self, order: Sequence[int], low: int, high: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The rows from `low` up to `high` of the groups in this order, one behind the other."""
        x = torch.empty(high - low, self.width, dtype=dtype)
        y = torch.empty(0)
        first_rows = [*accumulate((self.sizes[group] for group in order), initial=0)]
        for place in range(bisect_right(first_rows, low) - 1, len(order)):
            first = first_rows[place]
            if first >= high:
                break
            own_x, own_y = self.tensors(order[place], dtype)
            own = slice(max(low - first, 0), high - first)
            target = slice(max(first - low, 0), first - low + len(own_x[: high - first]))
            if len(y) == 0:
                y = torch.empty(high - low, *own_y.shape[1:], dtype=own_y.dtype)
            x[target], y[target] = own_x[own], own_y[own]
        return x, y


# What is computed once, and not taken over by a part of the rows.
_CACHED = ("sizes", "_scan")


class _Moments:
    """Means and variances of columns, from one part of the rows after the other; NaN is left out.

    Two parts with n and m rows, means a and b and sums of squares A and B around them together have
    the mean a + (b - a) m / (n + m) and the sum A + B + (b - a)^2 n m / (n + m).
    """

    def __init__(self) -> None:
        self.count: Any = 0.0
        self.mean: Any = 0.0
        self.squares: Any = 0.0

    def add(self, values: Array) -> None:
        """Add rows `(n, D)`."""
        is_known = ~np.isnan(values)
        count = is_known.sum(0)
        mean = np.where(is_known, values, 0.0).sum(0) / np.maximum(count, 1)
        squares = (np.where(is_known, values - mean, 0.0) ** 2).sum(0)
        total = np.maximum(self.count + count, 1)
        distance = mean - self.mean
        self.squares = self.squares + squares + distance**2 * (self.count * count / total)
        self.mean = self.mean + distance * (count / total)
        self.count = self.count + count

    def scales(self) -> tuple[Array, Array]:
        """Means and standard deviations; that of a constant is its size, or 1 for zero."""
        scale = np.sqrt(self.squares / np.maximum(self.count, 1))
        size = np.abs(self.mean)
        scale = np.where(scale <= 1e-12 * size, size, scale)
        if not np.isfinite(scale).all():
            raise ValueError("The columns must have finite standard deviations. Rescale them.")
        return self.mean, np.where(scale > 0, scale, 1.0)


def row_groups(path: Any) -> tuple[list[RowGroup], Any]:
    """The row groups of all files in the order of their names, and the columns of the first.

    What a data frame was indexed by when it was written is no column.
    """
    try:
        from pyarrow import dataset
    except ImportError as error:
        raise ImportError(
            "Parquet files need pyarrow, which is not installed. Install it with "
            "`pip install pyro_dak[parquet]`."
        ) from error
    paths = [*path] if isinstance(path, list | tuple) else path
    for one in paths if isinstance(paths, list) else [paths]:
        check_path("path", one)
    source = sorted(map(str, paths)) if isinstance(paths, list) else str(paths)
    if not source or not all(source):
        raise ValueError(f"`path` must name a folder or files; got {path!r}.")
    try:
        found = dataset.dataset(source, format="parquet", partitioning="hive")
        fragments = sorted(found.get_fragments(), key=lambda fragment: fragment.path)
        split = [(part.path, part) for file in fragments for part in file.split_by_row_group()]
        schema = _without_index(found.schema)
    except (ValueError, OSError) as error:  # among them those of Arrow
        reason = str(error).splitlines()[0]
        raise ValueError(f"`path` must hold Parquet files; got {path}: {reason}") from error
    sizes = [part.row_groups[0].num_rows for _, part in split]
    firsts = accumulate(sizes, initial=0)
    groups = [
        RowGroup(part, size, first, name, f"{name}, row group {part.row_groups[0].id}")
        for (name, part), size, first in zip(split, sizes, firsts, strict=False)
        if size > 0
    ]
    if not groups:
        raise ValueError(f"`path` must hold Parquet files with rows; there are none in {path}.")
    return groups, schema


def check_alike(
    groups: Sequence[RowGroup],
    schema: Any,
    names: Sequence[str] | None = None,
    left_out: Collection[str] = (),
) -> None:
    """Raise unless all files have the columns of the first, with the same types.

    What the rows of a file lack would be missing values, and a column that only later files have
    would be lost, without a word.

    Args:
        groups: the row groups of the files.
        schema: the columns of the first file.
        names: those that count; by default all, and then no file may have others.
        left_out: of all, those that do not count.
    """
    from pyarrow import dataset, types

    wanted = schema.names if names is None else names
    wanted = [name for name in wanted if name not in left_out]
    for path, fragment in {group.path: group.fragment for group in groups}.items():
        own, of_folder = _without_index(fragment.physical_schema), {}
        if fragment.partition_expression is not None:  # names of folders, such as year=2020
            of_folder = dataset.get_partition_keys(fragment.partition_expression)
        for name in wanted:
            if name in of_folder:
                continue
            if name not in own.names:
                reason = f"lacks the column `{name}`, which the files before it have"
                raise _differing(path, reason)
            kind, first = own.field(name).type, schema.field(name).type
            if not types.is_null(kind) and _stored(kind) != _stored(first):
                reason = f"column `{name}` holds {kind}, and {first} in the files before it"
                raise _differing(path, reason)
        known = {*schema.names, *left_out, *(own.names if names is not None else ())}
        if more := [name for name in own.names if name not in known]:
            raise _differing(path, f"has the column `{more[0]}`, which the files before it lack")


def _without_index(schema: Any) -> Any:
    """The columns without those that pandas says to hold the index of a data frame."""
    for name in (schema.pandas_metadata or {}).get("index_columns", ()):
        if name in schema.names:  # the numbers 0, 1, ... are told by their range and not stored
            schema = schema.remove(schema.get_field_index(name))
    return schema


def _differing(path: str, reason: str) -> ValueError:
    return ValueError(f"{path}: {reason}. Write all files with the same columns and types.")


def _stored(kind: Any) -> Any:
    """The type of the values of a column, however they are stored."""
    import pyarrow

    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    return pyarrow.string() if pyarrow.types.is_large_string(kind) else kind


def _is_integer(kind: Any) -> bool:
    from pyarrow import types

    return types.is_integer(kind) or types.is_boolean(kind)


def _is_number(kind: Any) -> bool:
    from pyarrow import types

    return _is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)


def _numbers(column: Any, name: str, group: RowGroup, may_miss: bool = False) -> Array:
    """A column of a row group in float64; missing and infinite numbers are errors."""
    import pyarrow

    values = column.cast(pyarrow.float64()).to_numpy()
    is_wrong = np.isinf(values) if may_miss else ~np.isfinite(values)
    if is_wrong.any():
        what = "infinite" if np.isinf(values).any() else "missing"
        raise ValueError(
            f"column `{name}` has {int(is_wrong.sum())} {what} values in {group.name}, the first "
            f"in row {int(np.argmax(is_wrong))} of it, counted from 0. Fill them in, or leave the "
            "column out by `columns`; `pyro-dak fit` takes missing values of inputs."
        )
    return values
