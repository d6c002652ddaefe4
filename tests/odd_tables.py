"""Odd tables for the command line: what people's files look like, and what must come of them.

`odd_tables(number, seed)` yields tables, and `problems(table, folder)` says what went wrong with
one of them: nothing, if it is refused with one clear line, or read as the plain table that means
the same. The tests run one of each kind, and `make attack` runs hundreds.
"""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
from typer.testing import CliRunner

from pyro_dak.tables.cli import app

__all__ = ["OddTable", "kinds", "odd_tables", "problems"]

Random = np.random.Generator


@dataclass(frozen=True)
class OddTable:
    """A table, what is done with it, and what must come of it.

    Attributes:
        name: the kind of oddity.
        content: the file to fit.
        arguments: further arguments of `fit`.
        error: what the error of `fit` says, or None if there must be no error.
        plain: a plain CSV file with the same meaning, which gives the same predictions.
        labels: the labels that predictions may have.
        new: the file to predict; by default the same file.
        new_arguments: further arguments of `predict`.
        new_error: what the error of `predict` says, or None if there must be no error.
        suffix: the ending of the name of both files; "-" sends them to standard input.
        is_known: whether it is known what must come of the table. If not, it may be refused, with
            one clear line, or be read.
    """

    name: str
    content: bytes
    arguments: tuple[str, ...] = ()
    error: str | None = None
    plain: bytes | None = None
    labels: frozenset[str] | None = None
    new: bytes | None = None
    new_arguments: tuple[str, ...] = ()
    new_error: str | None = None
    suffix: str = ".csv"
    is_known: bool = True


def odd_tables(number: int, seed: int = 0) -> Iterator[OddTable]:
    """So many tables, of all kinds in turn."""
    rng = np.random.default_rng(seed)
    for index in range(number):
        name, make = _KINDS[index % len(_KINDS)]
        yield OddTable(**({"name": name} | make(_plain_table(rng), rng)))


def kinds() -> list[str]:
    """The names of the kinds of tables, in the order of `odd_tables`."""
    return [name for name, _ in _KINDS]


def problems(table: OddTable, folder: Path) -> list[str]:
    """What is wrong with the way in which the command line treats a table."""
    model, file, new = (folder / name for name in ("model", "fit" + table.suffix, "new.csv"))
    new = new.with_suffix("" if table.suffix == "-" else table.suffix)
    file.write_bytes(table.content)
    new.write_bytes(table.content if table.new is None else table.new)
    found = _fit(table.suffix, file, model, *table.arguments)
    if not table.is_known:
        return _wrong("fit", found, "Error: " if found.exit_code == 1 else None)
    wrong = _wrong("fit", found, table.error)
    if table.error is not None or wrong:
        return wrong + (["fit left a model"] if model.exists() and table.error else [])
    found = _run(table.suffix, new, "predict", str(model), "FILE", *table.new_arguments)
    wrong = _wrong("predict", found, table.new_error)
    if table.new_error is not None or wrong:
        return wrong
    if table.plain is not None and found.stdout != _predictions(table.plain, *table.arguments):
        return ["predictions differ from those of the plain table"]
    if table.labels is not None:
        labels = pd.read_csv(io.StringIO(found.stdout), dtype=str, keep_default_na=False)["label"]
        if not set(labels) <= table.labels:
            return [f"labels {set(labels)} instead of {set(table.labels)}"]
    return []


def _wrong(command: str, found: Any, error: str | None) -> list[str]:
    """What is wrong with the exit code and the messages of a command."""
    wrong = []
    if found.exit_code != (0 if error is None else 1):
        wrong.append(f"{command} ended with {found.exit_code}: {found.stderr}")
    if error is not None and error not in found.stderr:
        wrong.append(f"{command} said {found.stderr!r} instead of {error!r}")
    if error is not None and (len(found.stderr.splitlines()) != 1 or found.stdout):
        wrong.append(f"{command} said more than one line: {found.stderr!r}")
    if "Traceback" in found.output or "--debug" in found.stderr:
        wrong.append(f"{command} did not expect this: {found.stderr!r}")
    if any(not c.isprintable() and c != "\n" for c in found.stderr):
        wrong.append(f"{command} sent control characters to the terminal: {found.stderr!r}")
    return wrong


def _run(suffix: str, file: Path, command: str, *arguments: str) -> Any:
    """The result of a command; FILE among its arguments is the file or the standard input."""
    is_piped = suffix == "-"
    named = [("-" if is_piped else str(file)) if a == "FILE" else a for a in arguments]
    data = file.read_bytes() if is_piped else None
    return CliRunner().invoke(app, [command, *named, "--quiet"], input=data)


def _fit(suffix: str, file: Path, model: Path, *arguments: str) -> Any:
    target = () if "--target" in arguments else ("--target", "y")
    options = ("FILE", *target, *arguments, "--out", str(model), "--epochs", "1")
    return _run(suffix, file, "fit", *options)


@lru_cache(maxsize=64)
def _predictions(plain: bytes, *arguments: str) -> str:
    """The predictions of a plain table for its own rows."""
    if "--delimiter" in arguments:  # which is not for the plain file
        place = arguments.index("--delimiter")
        arguments = arguments[:place] + arguments[place + 2 :]
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plain.csv").write_bytes(plain)
        found = _fit(".csv", folder / "plain.csv", folder / "model", *arguments)
        assert found.exit_code == 0, found.output
        return _run(".csv", folder / "plain.csv", "predict", str(folder / "model"), "FILE").stdout


# What follows makes the tables. A maker gets a plain table and random numbers, and returns the
# fields of an `OddTable`.

Fields = dict[str, Any]


def _plain_table(rng: Random) -> pd.DataFrame:
    """Numbers, categories and a target, all as text; no cell holds a delimiter."""
    num_rows = int(rng.integers(12, 19))
    numbers = {f"x{i}": rng.normal(size=num_rows).round(6) for i in range(rng.integers(1, 4))}
    table = pd.DataFrame(numbers).map(repr)
    table["k"] = rng.choice(["red", "green", "blue"], num_rows)
    table["y"] = [repr(float(v)) for v in rng.normal(size=num_rows).round(6)]
    return table.map(lambda cell: cell.removeprefix("np.float64(").removesuffix(")")).astype(object)


def _csv(table: pd.DataFrame, **options: Any) -> bytes:
    return table.to_csv(index=False, **options).encode()


def _lines(table: pd.DataFrame, delimiter: str = ",") -> list[str]:
    return [delimiter.join(row) for row in [list(table.columns), *table.to_numpy().tolist()]]


def _joined(lines: list[str], end: str = "\n") -> bytes:
    return (end.join(lines) + end).encode()


def _same(write: Callable[[pd.DataFrame, Random], bytes], *arguments: str, **more: Any) -> Any:
    """A maker of files that mean the same as the plain table."""

    def make(table: pd.DataFrame, rng: Random) -> Fields:
        content = write(table, rng)
        return {"content": content, "plain": _csv(table), "arguments": arguments} | more

    return make


def _refused(write: Callable[[pd.DataFrame, Random], Any], error: str = "", *arguments: str) -> Any:
    """A maker of files that are refused; the writer may say what the message must name."""

    def make(table: pd.DataFrame, rng: Random) -> Fields:
        written = write(table, rng)
        content, named = written if isinstance(written, tuple) else (written, error)
        return {"content": content, "error": named, "arguments": arguments}

    return make


def _with_line(change: Callable[[str], str], message: str) -> Any:
    """A maker of files in which one line is changed; the message names that line."""

    def write(table: pd.DataFrame, rng: Random) -> tuple[bytes, str]:
        lines = _lines(table)
        number = int(rng.integers(1, len(lines)))
        lines[number] = change(lines[number])
        return _joined(lines), message.format(line=number + 1, width=table.shape[1])

    return _refused(write)


# Older versions of pandas take 1e400 for text, newer ones for infinity.
_TOO_LARGE = (
    "`y` has 1 infinite values, the first in line {line}"
    if np.isinf(pd.to_numeric("1e400", errors="coerce"))
    else "target `y` mixes numbers and text, first '1e400' in line {line}"
)


def _with_cell(column: str, text: str, message: str, *arguments: str) -> Any:
    """A maker of files in which one cell of a column is changed; the message names its line."""

    def write(table: pd.DataFrame, rng: Random) -> tuple[bytes, str]:
        number = int(rng.integers(len(table)))
        table = table.copy()
        table.loc[number, column] = text
        return _csv(table), message.format(line=number + 2, column=column, text=text)

    return _refused(write, "", *arguments)


def _labels(*labels: str) -> Any:
    """A maker of tables with these classes, each of which occurs."""

    def make(table: pd.DataFrame, rng: Random) -> Fields:
        y = [labels[i % len(labels)] for i in rng.permutation(len(table))]
        return {"content": _csv(table.assign(y=y)), "labels": frozenset(labels)}

    return make


def _later(
    change: Callable[[pd.DataFrame], pd.DataFrame], *arguments: str, error: str | None = None
) -> Any:
    """A maker of tables with a category of numbers, whose rows to predict are changed."""

    def make(table: pd.DataFrame, rng: Random) -> Fields:
        table = table.assign(k=rng.choice(["1", "2", "3"], len(table)))
        table.loc[:2, "k"] = ["1", "2", "3"]
        fields = {"content": _csv(table), "new": _csv(change(table)), "new_error": error}
        fields |= {"arguments": ("--categorical", "k"), "new_arguments": arguments}
        return fields if error or arguments else fields | {"plain": _csv(table)}

    return make


def _parquet(table: pd.DataFrame, rng: Random | None = None) -> bytes:
    typed = {n: float for n in table if n != "k" and table[n].map(type).eq(str).all()}
    buffer = io.BytesIO()
    table.astype(typed).to_parquet(buffer)
    return buffer.getvalue()


def _typed(column: str, make_values: Callable[[int], Any], **fields: Any) -> Any:
    """A maker of Parquet files in which a column has these values."""

    def make(table: pd.DataFrame, rng: Random) -> Fields:
        table = table.assign(**{column: make_values(len(table))})
        return {"content": _parquet(table), "suffix": ".parquet"} | fields

    return make


def _whole_numbers_with_missing_later(table: pd.DataFrame, rng: Random) -> Fields:
    table = table.assign(k=pd.array(rng.integers(1, 4, len(table)), dtype="Int64"))
    table.loc[:2, "k"] = [1, 2, 3]
    new = table.copy()
    new.loc[0, "k"] = pd.NA
    fields = {"content": _parquet(table), "new": _parquet(new), "suffix": ".parquet"}
    return fields | {"arguments": ("--categorical", "k"), "new_error": "`(missing)`, the first in"}


def _damaged(table: pd.DataFrame, rng: Random) -> Fields:
    """A file with a few bytes changed, lost or put in."""
    content = bytearray(_csv(table))
    for _ in range(rng.integers(1, 6)):
        place, letter = (
            int(rng.integers(len(content))),
            int(rng.choice(list(b',;"\n\r\t 0e-.?\xff\x1b'))),
        )
        change = rng.integers(3)
        content[place : place + (change > 0)] = bytes([letter]) if change < 2 else b""
    return {"content": bytes(content), "is_known": False}


def _blank_lines(table: pd.DataFrame, rng: Random) -> bytes:
    lines = _lines(table)
    for place in sorted(rng.integers(1, len(lines), 3), reverse=True):
        lines.insert(place, str(rng.choice(["", "  ", "\t"])))
    return _joined(lines)


def _with_missing(text: str) -> Any:
    def make(table: pd.DataFrame, rng: Random) -> Fields:
        table, odd = table.copy(), table.copy()
        for column in ("x0", "k"):
            table.loc[3, column], odd.loc[3, column] = "", text
        return {"content": _csv(odd), "plain": _csv(table)}

    return make


def _with_delimiter_inside(table: pd.DataFrame, rng: Random) -> Fields:
    odd = table.assign(k=table["k"].replace("red", 'dark, "deep"\nred'))
    return {"content": _csv(odd), "plain": _csv(table.assign(k=table["k"].replace("red", "dark")))}


def _names(table: pd.DataFrame, rng: Random) -> bytes:
    return _csv(table.assign(y=[f"name {i}" for i in range(len(table))]))


def _decimal_commas(column: str) -> Callable[[pd.DataFrame, Random], bytes]:
    def write(table: pd.DataFrame, rng: Random) -> bytes:
        cells = [f"{v:.4f}".replace(".", ",") for v in rng.normal(size=len(table))]
        return _csv(table.assign(**{column: cells}), sep=";")

    return write


def _thousands(separator: str) -> Callable[[pd.DataFrame, Random], bytes]:
    def write(table: pd.DataFrame, rng: Random) -> bytes:
        cells = [f"{v:,}".replace(",", separator) for v in rng.integers(1000, 10**7, len(table))]
        return _csv(table.assign(y=cells))

    return write


def _cells_with_spaces(table: pd.DataFrame, rng: Random) -> bytes:
    odd = table.copy()
    for column in odd.columns.drop("k"):
        odd[column] = [f"  {cell} " for cell in odd[column]]
    return _csv(odd)


def _other_numerals(table: pd.DataFrame, rng: Random) -> bytes:
    odd = table.copy()
    for column in odd.columns.drop("k"):
        forms = [repr(float(c)) if "e" in c else f"{c}e0" for c in odd[column]]
        odd[column] = [form if form.startswith("-") else f"+{form}" for form in forms]
    return _csv(odd)


def _each(change: Callable[[str], str], skip_header: bool = False) -> Any:
    """A writer of files in which every line is changed."""
    return lambda t, rng: _joined(
        [line if skip_header and not i else change(line) for i, line in enumerate(_lines(t))]
    )


def _separated(delimiter: str, option: str, between: str | None = None) -> Any:
    """A maker of files with another delimiter, which an option names."""
    options = ("--delimiter", option)
    return _same(
        lambda t, rng: _joined(_lines(t, between or delimiter)), *options, new_arguments=options
    )


_ESCAPES = "\x1b]0;owned\x07\x1b[31m"
_MIXED = "`{column}` mixes numbers and text, first {text!r} in line {line}"
_SEPARATORS = "has numbers with a decimal comma or with separated thousands, first"

Maker = Callable[[pd.DataFrame, Random], Fields]

# Files that mean what a plain one means.
_SAME: dict[str, Maker] = {
    "plain": _same(lambda t, rng: _csv(t)),
    "byte order mark": _same(lambda t, rng: b"\xef\xbb\xbf" + _csv(t)),
    "CRLF": _same(lambda t, rng: _joined(_lines(t), "\r\n")),
    "CR": _same(lambda t, rng: _joined(_lines(t), "\r")),
    "no last line end": _same(lambda t, rng: _joined(_lines(t)).rstrip()),
    "blank lines": _same(_blank_lines),
    "quotes everywhere": _same(lambda t, rng: _csv(t, quoting=1)),
    "trailing commas": _same(_each(lambda line: f"{line},", skip_header=True)),
    "trailing commas and header": _same(_each(lambda line: f"{line},")),
    "semicolons": _separated(";", ";"),
    "tabs": _separated("\t", r"\t"),
    "bars": _separated("|", "|"),
    "white space": _separated(" ", r"\s+", between="  \t"),
    "spaces around numbers": _same(_cells_with_spaces),
    "plus signs and exponents": _same(_other_numerals),
    "standard input": _same(lambda t, rng: _csv(t), suffix="-"),
    "Parquet": _same(_parquet, suffix=".parquet"),
    "Parquet on standard input": _same(_parquet, suffix="-"),
    "delimiters in quotes": _with_delimiter_inside,
} | {
    f"missing as {text!r}": _with_missing(text)
    for text in ("NA", "nan", "None", " ", "null", "#N/A")
}

# Labels, which come back as they came in.
_CLASSES: dict[str, Maker] = {
    "labels with zeros": _labels("001", "002", "010"),
    "labels beyond 64 bits": _labels("18446744073709551615", "18446744073709551614"),
    "whole numbers as labels": _labels("-3", "0", "12"),
    "labels with a point": _labels("1.0", "2.0"),
    "labels true and false": _labels("true", "false"),
    "signs as labels": _labels("+", "-"),
    "numbers and names as labels": _labels("0", "1", "2", "3+"),
    "labels with spaces": _labels(" left", "right ", "ünï"),
    "large labels in Parquet": _typed(
        "y",
        lambda n: pd.array([2**64 - 1 - i % 2 for i in range(n)], dtype="UInt64"),
        labels=frozenset({"18446744073709551615", "18446744073709551614"}),
    ),
    "dates in Parquet": _typed("x0", lambda n: pd.date_range("2020-01-01", periods=n)),
    "booleans in Parquet": _typed(
        "y", lambda n: [i % 2 == 0 for i in range(n)], labels=frozenset({"True", "False"})
    ),
}

# Rows to predict that are not written as those of training were.
_LATER: dict[str, Maker] = {
    "categories with a point": _later(lambda t: t.assign(k=t["k"] + ".0")),
    "a missing category": _later(
        lambda t: t.assign(k=["", *t["k"][1:]]), error="`(missing)`, the first in line 2"
    ),
    "a missing category, ignored": _later(
        lambda t: t.assign(k=["", *t["k"][1:]]), "--ignore-unknown"
    ),
    "a missing category in Parquet": _whole_numbers_with_missing_later,
    "columns in another order": _later(lambda t: t[list(t.columns[::-1])]),
    "further columns": _later(lambda t: t.assign(more="?")),
    "a decimal comma": _later(
        lambda t: t.assign(x0=["1,5", *t["x0"][1:]]),
        error="column `x0` must hold numbers; got '1,5' in line 2",
    ),
}

# Files that are refused.
_WRONG: dict[str, Maker] = {
    "one trailing comma": _with_line(lambda line: f"{line},", "line {line} has"),
    "a row too long": _with_line(lambda line: f"{line},5,6", "line {line} has"),
    "a row too short": _with_line(lambda line: line.rpartition(",")[0], "line {line} has"),
    "a comma without quotes": _with_line(lambda line: f"1,{line}", "line {line} has"),
    "an open quote": _with_line(lambda line: f'"{line}', "line {line}"),
    "text after a quote": _with_line(lambda line: f'"a"b{line}', "line {line}"),
    "a name twice": _refused(
        lambda t, rng: _csv(t).replace(b"x0", b"k", 1), "several columns called `k`"
    ),
    "the target twice": _refused(
        lambda t, rng: _csv(t.assign(z="1")).replace(b"z", b"y", 1), "several columns called `y`"
    ),
    "'?' with --task regression": _with_cell(
        "y", "?", "column `y` must hold numbers; got '?' in line {line}", "--task", "regression"
    ),
    "missing targets": _with_cell(
        "y", "", "target `y` has 1 missing values, the first in line {line}"
    ),
    "infinity": _with_cell("x0", "inf", "`x0` has 1 infinite values, the first in line {line}"),
    "too large": _with_cell("y", "1e400", _TOO_LARGE),
    "decimal commas in the target": _refused(
        _decimal_commas("y"), f"target `y` {_SEPARATORS}", "--delimiter", ";"
    ),
    "decimal commas in a column": _refused(
        _decimal_commas("x0"), f"column `x0` {_SEPARATORS}", "--delimiter", ";"
    ),
    "names as target": _refused(_names, "looks like names, not classes"),
    "one class": _refused(lambda t, rng: _csv(t.assign(y="a")), "one class only"),
    "a wrong delimiter": _refused(lambda t, rng: _csv(t, sep=";"), "--delimiter ';'"),
    "a delimiter of two": _refused(
        lambda t, rng: _csv(t), "must be one character", "--delimiter", "::"
    ),
    "few rows": _refused(lambda t, rng: _csv(t[:9]), "has 9 rows"),
    "header only": _refused(lambda t, rng: _csv(t[:0]), "has no rows"),
    "nothing": _refused(lambda t, rng: b"", "is empty"),
    "zeros at the end": _refused(lambda t, rng: _csv(t) + b"\0" * 9, "is a binary file"),
    "Latin-1": _refused(
        lambda t, rng: _csv(t.assign(k="gr\xfcn")).decode().encode("latin-1"), "is not UTF-8"
    ),
    "UTF-16": _refused(lambda t, rng: _csv(t).decode().encode("utf-16"), "is a binary file"),
    "cut Parquet": lambda t, rng: {
        "content": _parquet(t)[:-9],
        "error": "cannot be read as Parquet",
        "suffix": ".parquet",
    },
    "lists in Parquet": _typed("x0", lambda n: [[1, 2]] * n, error="neither numbers nor text"),
    "durations in Parquet": _typed(
        "x0", lambda n: pd.to_timedelta(range(n), unit="h"), error="holds times or periods"
    ),
    "escapes in a name": lambda t, rng: {
        "content": _csv(t.assign(**{_ESCAPES: "1,5"})),
        "error": r"\x1b[31m` has numbers with a decimal comma",
    },
    "escapes in a cell": lambda t, rng: {
        "content": _csv(t.assign(y=[_ESCAPES, *t["y"][1:]])),
        "error": r"\x1b[31m' in line 2",
    },
    "missing values only": _refused(lambda t, rng: _csv(t.assign(x0="NA")), "column `x0` is empty"),
}
_WRONG |= {
    f"{text!r} in the target": _with_cell("y", text, f"target {_MIXED}")
    for text in ("?", "-", "1,5", "1,234", "n.d.", "1.234.567")
}
_WRONG |= {
    f"{text!r} in a column": _with_cell("x0", text, f"column {_MIXED}")
    for text in ("?", "1,5", "1 234", "12abc")
}
_WRONG |= {
    f"thousands with {separator!r}": _refused(_thousands(separator), f"target `y` {_SEPARATORS}")
    for separator in (",", " ", "'")
}

_KINDS = [*(_SAME | _CLASSES | _LATER | _WRONG | {"damaged": _damaged}).items()]
