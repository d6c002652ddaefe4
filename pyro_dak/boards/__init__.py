"""Boards of options: a package in which each file is one choice, with a `build` function in it.

In the repository the boards of guides and of models stand beside this package. An installed wheel
has them in here: `from pyro_dak.boards import guides, models`. Other packages add choices to both
(see `pyro_dak.registry`).
"""

from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from pyro_dak import registry
from pyro_dak.validation import check_choice

__all__ = ["Board"]


class Board:
    """Finds the choices of a package by the file names in its path; a new file is a new choice.

    What other packages offer under the name of the board, "guides" or "models", comes after them.
    """

    def __init__(self, package: str, path: Iterable[str]):
        self.package = package
        self.path = list(path)
        self.name = package.removeprefix(f"{__name__}.")

    def names(self) -> list[str]:
        """The sorted names of the choices: all files but those that start with an underscore."""
        return sorted({*self._files(), *self._offered()})

    def build(self, name: str, *args: Any, **options: Any) -> Any:
        """What `build(*args, **options)` in the file `name` returns; an unknown name lists all."""
        check_choice(self.name.rstrip("s"), name, self.names())
        if name in self._files():
            return import_module(f"{self.package}.{name}").build(*args, **options)
        return registry.find(self.name, name)(*args, **options)

    def _files(self) -> list[str]:
        files = [m.name for m in iter_modules(self.path) if not m.ispkg]
        return [name for name in files if not name.startswith("_")]

    def _offered(self) -> list[str]:
        return registry.names(self.name) if self.name in registry.KINDS else []
