"""Choices by name that installed packages offer: kernels, likelihoods, guides, models.

A package offers them in its metadata, as entry points. In its `pyproject.toml`:

    [project.entry-points."pyro_dak.kernels"]
    periodic = "my_package.kernels:PeriodicKernel"

The groups are `pyro_dak.guides`, `.kernels`, `.likelihoods` and `.models`. An entry is a class, or
on the boards of guides and models a function `build`. Classes can be saved and loaded by name (see
`pyro_dak.training.describe`). Nothing is imported before its name is asked for.
"""

import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pyro_dak.validation import check_choice

__all__ = ["KINDS", "find", "name_of", "names"]

KINDS = ("guides", "kernels", "likelihoods", "models")


def names(kind: str) -> list[str]:
    """The sorted names of one of the `KINDS` that installed packages offer."""
    return sorted({entry.name for entry in _entries(kind)})


def find(kind: str, name: str) -> Any:
    """What a name of one of the `KINDS` stands for; its module is imported.

    Raises:
        ValueError: if no package, or more than one, offers it.
        ImportError: naming the entry point, if it cannot be imported.
    """
    found = {entry.value: entry for entry in _entries(kind) if entry.name == name}
    if not found:
        raise ValueError(
            f"no installed package offers {name!r:.80} in `pyro_dak.{kind}`; known are "
            f"{', '.join(names(kind)) or 'none'}. Install the package that does."
        )
    if len(found) > 1:
        offers = " and ".join(f"{_package(entry)} ({value})" for value, entry in found.items())
        raise ValueError(
            f"{name!r:.80} in `pyro_dak.{kind}` is ambiguous: {offers} offer it. Uninstall all but "
            "one of them."
        )
    (entry,) = found.values()
    try:
        return entry.load()
    except Exception as error:
        raise ImportError(
            f"{name!r:.80} in `pyro_dak.{kind}` of {_package(entry)} cannot be imported from "
            f"{entry.value}: {error}"
        ) from error


def name_of(kind: str, cls: type) -> str | None:
    """The name under which a class is offered, or None.

    Only the package that the class is from is asked, and only modules that are imported already.
    """
    root = cls.__module__.split(".")[0]
    for entry in _entries(kind):
        module, _, attributes = entry.value.partition(":")
        if module.split(".")[0] == root and _imported(module, attributes) is cls:
            return entry.name
    return None


def _entries(kind: str) -> list[EntryPoint]:
    check_choice("kind", kind, KINDS)
    return list(entry_points(group=f"pyro_dak.{kind}"))


def _imported(module: str, attributes: str) -> Any:
    """What `module:attributes` stands for, if the module is imported already."""
    value: Any = sys.modules.get(module)
    for name in attributes.split("."):
        value = getattr(value, name, None)
    return value


def _package(entry: EntryPoint) -> str:
    return "a package" if entry.dist is None else entry.dist.name
