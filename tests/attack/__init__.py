"""Attacks on what `docs/reliability.md` promises, in larger numbers than the tests: `make attack`.

Each module has a function that takes how many attempts to make, a seed and an empty folder, and
returns an `Outcome`.
"""

from typing import NamedTuple

__all__ = ["Outcome"]


class Outcome(NamedTuple):
    """How many attempts were made, and what went wrong in each that failed."""

    tried: int
    failures: list[str]
