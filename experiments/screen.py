"""What a person sees of an experiment: one line per fit, one table at the end, nothing else."""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from rich.console import Console
from rich.table import Table

__all__ = ["quiet", "say", "show_table", "working"]

_CONSOLE = Console(highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """Print a line."""
    _CONSOLE.print(text, markup=False)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings and messages of libraries off the screen."""
    logger = logging.getLogger("lightning_fabric")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def working(title: str) -> Iterator[Callable[[str], None]]:
    """On a terminal, show `title` until the work is done; the function given adds how far it is."""
    with quiet(), _CONSOLE.status(title) as status:
        yield lambda text: status.update(f"{title}: {text}")


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; columns of numbers are aligned to the right."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for number, column in enumerate(columns):
        is_numeric = all(_is_number(row[number]) for row in rows)
        justify: Literal["left", "right"] = "right" if is_numeric else "left"
        table.add_column(column, justify=justify, no_wrap=number == 0)
    for row in rows:
        table.add_row(*row)
    _CONSOLE.print(table, soft_wrap=False)


def _is_number(cell: str) -> bool:
    try:
        float(cell or "0")
    except ValueError:
        return False
    return True
