"""Boards of options: a package in which each file is one choice, with a `build` function in it."""

from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from pyro_dak.validation import check_choice

__all__ = ["Board"]


class Board:
    """Finds the choices of a package by the file names in its path; a new file is a new choice."""

    def __init__(self, package: str, path: Iterable[str]):
        self.package = package
        self.path = list(path)

    def names(self) -> list[str]:
        """The sorted names of the choices: all files but those that start with an underscore."""
        files = [m.name for m in iter_modules(self.path) if not m.ispkg]
        return sorted(name for name in files if not name.startswith("_"))

    def build(self, name: str, *args: Any, **options: Any) -> Any:
        """What `build(*args, **options)` in the file `name` returns; an unknown name lists all."""
        check_choice(self.package.rstrip("s"), name, self.names())
        return import_module(f"{self.package}.{name}").build(*args, **options)
