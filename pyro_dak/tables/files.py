"""Tables as files: CSV and Parquet, read with clear errors, written whole or not at all."""

import io
import os
import uuid
from pathlib import Path

import pandas as pd

__all__ = ["TableError", "check_writable", "read_table", "write_table"]

_PARQUET = (".parquet", ".pq")


class TableError(ValueError):
    """A table that cannot be used; the message says which part of it and what to do."""


def read_table(path: str | Path, delimiter: str | None = None) -> pd.DataFrame:
    """The table in a CSV or Parquet file (by its ending: .parquet or .pq), all columns as they are.

    Args:
        path: the file.
        delimiter: of a CSV file; a comma by default.
    """
    path = Path(path)
    if path.is_dir():
        raise TableError(f"{path}: is a directory, expected a CSV or Parquet file.")
    if not path.is_file():
        raise TableError(f"{path}: no such file.")
    table = (
        _read_parquet(path)
        if path.suffix.lower() in _PARQUET
        else _read_csv(path, delimiter or ",")
    )
    names = [str(name) for name in table.columns]
    if len(set(names)) < len(names):
        repeated = pd.Index(names)[pd.Index(names).duplicated()][0]
        raise TableError(f"{path}: has several columns called `{repeated}`; rename them.")
    table.columns = pd.Index(names)
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
    except (ValueError, pd.errors.ParserError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TableError(
            f"{path}: cannot be read as CSV with delimiter {delimiter!r}: {reason}"
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
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise TableError(f"{path}: cannot be read as Parquet: {reason}") from error


def write_table(table: pd.DataFrame, path: Path, force: bool) -> None:
    """Write a table as CSV or Parquet, whole or not at all; an existing file only with `force`."""
    check_writable(path, force)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        if path.suffix.lower() in _PARQUET:
            table.to_parquet(temporary, index=False)
        else:
            table.to_csv(temporary, index=False)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(path: Path, force: bool) -> None:
    """Raise unless a file may be written at `path`."""
    if path.is_dir():
        raise TableError(f"{path}: is a directory, expected a file to write to.")
    if path.exists() and not force:
        raise TableError(f"{path}: exists; pass --force to replace it.")
    if not path.parent.is_dir():
        raise TableError(f"{path}: its directory does not exist.")
