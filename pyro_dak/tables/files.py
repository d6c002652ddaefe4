"""Tables as files: CSV and Parquet, read with clear errors and written completely or not at all."""

import csv
import io
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd

from pyro_dak.training.files import check_place, write_whole
from pyro_dak.training.parquet import check_alike, row_groups

__all__ = [
    "STANDARD",
    "TableError",
    "as_pandas",
    "check_writable",
    "is_parquet",
    "read_table",
    "shown_name",
    "write_table",
]

# The path that stands for standard input and output.
STANDARD = Path("-")
_PARQUET = (".parquet", ".pq")
# Delimiters that a command line cannot easily hold.
_WHITE_SPACE = r"\s+"
_DELIMITERS = {r"\t": "\t", "tab": "\t"}
# What pandas writes and reads for missing values.
_MISSING = frozenset(
    "#N/A,#N/A N/A,#NA,-1.#IND,-1.#QNAN,-NaN,-nan,1.#IND,1.#QNAN,<NA>,N/A,NA,NULL,NaN,None,n/a,nan,"
    "null,".split(",")
)
_WHOLE_NUMBERS = ("Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64")


class TableError(ValueError):
    """A table cannot be used. The message says which part of it is wrong and what to do."""


def shown_name(path: Path) -> str:
    """The name of a table in messages."""
    return "standard input" if path == STANDARD else str(path)


def read_table(path: Path, delimiter: str | None = None) -> pd.DataFrame:
    """The table in a CSV file, or in a Parquet file whose name ends in .parquet or .pq.

    A folder of Parquet files is one table, with the rows of its files in the order of their names.
    `delimiter` stands between the columns of a CSV file; by default it is a comma. The path `-` is
    the standard input. The cells of a CSV file are text as it stands there, and None where they are
    empty or say that a value is missing; the index, called "line", holds the numbers of the lines.
    The columns of a Parquet file have its types.
    """
    name = shown_name(path)
    if path.is_dir():
        return _read_folder(path)
    if path != STANDARD and not (path.is_file() or path.is_fifo()):
        what = "is not a file" if path.exists() else "no such file"
        raise TableError(f"{name}: {what}.")
    data = sys.stdin.buffer.read() if path == STANDARD else path.read_bytes()
    if path.suffix.lower() in _PARQUET or data.startswith(b"PAR1"):
        table = _read_parquet(data, name)
    else:
        table = _read_csv(data, name, _DELIMITERS.get(delimiter or ",", delimiter or ","))
    if len(table) == 0:
        raise TableError(f"{name}: has no rows.")
    return table


def is_parquet(path: Path) -> bool:
    """Whether a path is a folder, or a file whose name says that it holds Parquet."""
    return path.is_dir() or (path.suffix.lower() in _PARQUET and path.is_file())


def _read_csv(data: bytes, name: str, delimiter: str) -> pd.DataFrame:
    if b"\0" in data:
        raise TableError(f"{name}: is a binary file, expected CSV text or a .parquet file.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TableError(
            f"{name}: is not UTF-8 text ({error.reason} at byte {error.start}); convert it."
        ) from error
    if not text.strip():
        raise TableError(f"{name}: is empty.")
    records = _records(text, delimiter)
    try:
        _, header = next(records)
        names = [cell or f"Unnamed: {number}" for number, cell in enumerate(header)]
        _check_names(names)
        columns, lines = _columns(header, records)
    except ValueError as error:
        reason = f"cannot be read as CSV with delimiter {delimiter!r}: {error}"
        raise TableError(f"{name}: {reason}") from error
    table = dict(zip(names, columns, strict=False))
    return pd.DataFrame(table, index=pd.Index(lines, name="line"), dtype=object)


def _records(text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The lines of a CSV text that are not blank: their numbers and their cells."""
    lines: Iterable[str] = io.StringIO(text, newline="")
    if is_white := delimiter == _WHITE_SPACE:
        lines = (line.strip().replace("\t", " ") + "\n" for line in lines)
    elif len(delimiter) != 1 or delimiter in '"\r\n':
        raise ValueError(r"it must be one character, \t for a tab or \s+ for white space.")
    reader = csv.reader(
        lines, delimiter=" " if is_white else delimiter, skipinitialspace=is_white, strict=True
    )
    line = 1
    try:
        for cells in reader:
            if len(cells) > 1 or (cells and cells[0].strip()):
                yield line, cells
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"line {line}: {error}.") from error


def _columns(
    header: list[str], records: Iterable[tuple[int, list[str]]]
) -> tuple[list[list[str | None]], list[int]]:
    """The cells column by column, None where a value is missing, and the numbers of their lines.

    Every line must have as many cells as the header. An empty cell more is left out if all lines
    have it, and so is one whose place in the header is empty too.
    """
    width, lines = len(header), list[int]()
    rows: list[list[str]] = []
    has_more = False
    for line, cells in records:
        if not lines:
            has_more = len(cells) == width + 1 and not cells[-1].strip()
        if len(cells) != width + has_more or (has_more and cells[-1].strip()):
            before = " and the lines before one more" if has_more else ""
            raise ValueError(
                f"line {line} has {len(cells)} columns, the header has {width}{before}. Cells that "
                "hold a delimiter need quotes."
            )
        lines.append(line)
        rows.append(cells)
    columns = [
        [None if cell in _MISSING or cell.isspace() else cell for cell in column]
        for column in islice(zip(*rows, strict=True), width)
    ] or [[] for _ in header]
    if width > 1 and not header[-1].strip() and not any(columns[-1]):
        del columns[-1]
    return columns, lines


def _check_names(names: list[str]) -> None:
    """Raise if two columns have the same name, or if a single one looks like several."""
    other = max((";", "\t", "|", ","), key=names[0].count)
    if len(names) == 1 and other in names[0]:
        raise ValueError(
            f"it has a single column, and its header is full of {other!r}. Pass --delimiter "
            f"{other!r}."
        )
    repeated = [f"`{name}`" for name, number in Counter(names).items() if number > 1]
    if repeated:
        raise ValueError(f"it has several columns called {', '.join(repeated)}. Rename them.")


def _read_parquet(data: bytes, name: str) -> pd.DataFrame:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise TableError(f"{name}: Parquet needs pyarrow; `pip install pyro_dak[cli]`.") from error
    try:
        file = parquet.ParquetFile(io.BytesIO(data))
        names = file.schema_arrow.names
        if len(set(names)) < len(names):
            raise ValueError("it has several columns of the same name.")
        table = as_pandas(file.read())
    except Exception as error:  # pyarrow's errors have no common class
        raise TableError(f"{name}: cannot be read as Parquet: {_first_line(error)}") from error
    return table


def _read_folder(path: Path) -> pd.DataFrame:
    """All rows of a folder of Parquet files; the values in names such as year=2020 are columns."""
    try:
        groups, schema = row_groups(path)
    except (ImportError, ValueError) as error:
        raise TableError(
            f"{path}: is a directory, and it can be read only if it holds Parquet files: "
            f"{_first_line(error)}"
        ) from error
    try:
        check_alike(groups, schema)
        tables = [group.fragment.to_table(schema=schema) for group in groups]
    except ValueError as error:
        raise TableError(_first_line(error)) from error
    return pd.concat([as_pandas(table) for table in tables], ignore_index=True)


def as_pandas(table: Any) -> pd.DataFrame:
    """An Arrow table, in which whole numbers and booleans with gaps stay what they are."""
    import pyarrow

    kinds = {kind: getattr(pyarrow, kind.lower())() for kind in _WHOLE_NUMBERS}
    types = {kinds[kind]: pd.api.types.pandas_dtype(kind) for kind in kinds}
    types[pyarrow.bool_()] = pd.BooleanDtype()
    frame = table.to_pandas(types_mapper=types.get)
    frame.columns = frame.columns.map(str)
    return frame.reset_index(drop=True)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def write_table(table: pd.DataFrame, path: Path, force: bool) -> None:
    """Write a table as CSV or Parquet. An existing file is replaced only with `force`."""
    write = table.to_parquet if path.suffix.lower() in _PARQUET else table.to_csv
    write_whole(
        path, lambda temporary: write(temporary, index=False), lambda: check_writable(path, force)
    )


def check_writable(path: Path, force: bool) -> None:
    """Raise unless a file may be written at `path`. Ask before the work that makes its content."""
    if path.is_dir():
        raise TableError(f"{path}: is a directory, expected a file to write to.")
    if path.exists() and not force:
        raise TableError(f"{path}: exists; pass --force to replace it.")
    check_place(path)
