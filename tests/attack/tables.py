"""Give the command line tables as people really have them, and worse."""

import tempfile
from pathlib import Path

from tqdm import tqdm

from tests.attack import Outcome
from tests.odd_tables import odd_tables, problems

__all__ = ["attack"]


def attack(count: int, seed: int, folder: Path) -> Outcome:
    """So many odd tables: a right answer, or one clear line, and never a traceback."""
    failures = []
    for table in tqdm(odd_tables(count, seed), total=count, desc="tables"):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            failures += [f"{table.name}: {problem}" for problem in problems(table, Path(place))]
    return Outcome(count, failures)
