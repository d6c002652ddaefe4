"""Tables as files: CSV and Parquet, read with clear errors and written completely or not at all."""

import io
from pathlib import Path

import pandas as pd

from pyro_dak.training.files import write_whole

__all__ = ["TableError", "check_writable", "read_table", "write_table"]

_PARQUET = (".parquet", ".pq")


class TableError(ValueError):
    """A table cannot be used. The message says which part of it is wrong and what to do."""


def read_table(path: Path, delimiter: str | None = None) -> pd.DataFrame:
    """The table in a CSV file, or in a Parquet file whose name ends in .parquet or .pq.

    `delimiter` stands between the columns of a CSV file; by default it is a comma.
    """
    if path.is_dir():
        raise TableError(f"{path}: is a directory, expected a CSV or Parquet file.")
    if not path.is_file():
        raise TableError(f"{path}: no such file.")
    is_parquet = path.suffix.lower() in _PARQUET
    table = _read_parquet(path) if is_parquet else _read_csv(path, delimiter or ",")
    table.columns = table.columns.map(str)
    if len(table) == 0:
        raise TableError(f"{path}: has no rows.")
    return table


def _read_csv(path: Path, delimiter: str) -> pd.DataFrame:
    data = path.read_bytes()
    if b"\0" in data[:65536]:
        raise TableError(f"{path}: is a binary file, expected CSV text or a .parquet file.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TableError(
            f"{path}: is not UTF-8 text ({error.reason} at byte {error.start}); convert it."
        ) from error
    if not text.strip():
        raise TableError(f"{path}: is empty.")
    try:
        table = pd.read_csv(io.StringIO(text), sep=delimiter, low_memory=False)
    except ValueError as error:  # also what pandas raises for lines of different lengths
        raise TableError(
            f"{path}: cannot be read as CSV with delimiter {delimiter!r}: {_first_line(error)}"
        ) from error
    header = text.splitlines()[0]
    other = max((";", "\t", "|", ","), key=header.count)
    if table.shape[1] == 1 and other != delimiter and header.count(other):
        raise TableError(
            f"{path}: has a single column with delimiter {delimiter!r}, and its header is full of "
            f"{other!r}. Pass --delimiter {other!r}."
        )
    return table


def _read_parquet(path: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(path)
    except ImportError as error:
        raise TableError(f"{path}: Parquet needs pyarrow; `pip install pyro_dak[cli]`.") from error
    except Exception as error:  # pyarrow's errors have no common class
        raise TableError(f"{path}: cannot be read as Parquet: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def write_table(table: pd.DataFrame, path: Path, force: bool) -> None:
    """Write a table as CSV or Parquet. An existing file is replaced only with `force`."""
    check_writable(path, force)
    write = table.to_parquet if path.suffix.lower() in _PARQUET else table.to_csv
    write_whole(path, lambda temporary: write(temporary, index=False))


def check_writable(path: Path, force: bool) -> None:
    """Raise unless a file may be written at `path`."""
    if path.is_dir():
        raise TableError(f"{path}: is a directory, expected a file to write to.")
    if path.exists() and not force:
        raise TableError(f"{path}: exists; pass --force to replace it.")
    if not path.parent.is_dir():
        raise TableError(f"{path}: its directory does not exist.")
