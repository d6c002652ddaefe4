"""Batches of a loader: which part of one is x, and which is y.

A batch is a pair (x, y), or a dictionary one of whose entries is y. Of any other batch a function
says what it is.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyro_dak.model.rows import Inputs, check_parts
from pyro_dak.validation import check_kind

__all__ = ["Unpacking", "is_loader"]


def is_loader(x: object) -> bool:
    """Whether x are batches that come one after the other, and not inputs themselves.

    A list of tensors is an input with several parts, as a tuple is; one of pairs or dictionaries is
    a list of batches. What can be made a tensor, such as an array, is meant as one.
    """
    if isinstance(x, Tensor):
        return False
    if isinstance(x, list):
        return len(x) > 0 and all(isinstance(part, tuple | list | Mapping) for part in x)
    is_whole = isinstance(x, Mapping | tuple | str | bytes) or hasattr(x, "__array__")
    return isinstance(x, Iterable) and not is_whole


@dataclass(frozen=True)
class Unpacking:
    """How batches are read.

    Args:
        target: the entry of batches that are dictionaries which holds y; the others are x.
        unpack: a function from a batch of any other kind to (x, y).
    """

    target: str | None = None
    unpack: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if self.target is not None:
            check_kind("target", self.target, str, "the name of an entry of the batches")
        if self.unpack is not None:
            check_kind("unpack", self.unpack, Callable, "a function from a batch to (x, y)")
        if self.target is not None and self.unpack is not None:
            raise ValueError("Give `target` or `unpack`, not both: either says what y is.")

    def pair(self, batch: Any, name: str = "data") -> tuple[Inputs, Tensor]:
        """x and y of a batch, or of data that are a dictionary of tensors themselves."""
        if self.unpack is not None:
            x, y = self._unpacked(batch)
        elif isinstance(batch, Mapping):
            x, y = self._named(batch, name)
        else:
            x, y = self._two(batch, name)
        if not isinstance(y, Tensor) or y.dim() == 0:
            raise TypeError(
                f"every batch of `{name}` must be a pair (x, y), where y is a tensor with an entry "
                f"per row; got {_shown(y)} as y."
            )
        check_parts("batch x", x)
        return x, y

    def of_tensors(self, data: Any) -> tuple[Any, Any] | None:
        """x and y of data that are tensors themselves, or None if they are batches."""
        if isinstance(data, Mapping):
            return self._named(data, "data")
        if not isinstance(data, tuple | list) or len(data) != 2 or _is_batch(data[1]):
            return None
        if self.unpack is not None and isinstance(data, list):
            return None
        return data[0], data[1]

    def inputs(self, batch: Any, name: str = "x") -> Inputs:
        """x of a batch that may come without y, for predictions."""
        if self.unpack is not None:
            return self._unpacked(batch)[0]
        if isinstance(batch, Mapping):
            return {key: part for key, part in batch.items() if key != self.target}
        if isinstance(batch, tuple | list):
            return batch[0] if len(batch) == 1 else self._two(batch, name)[0]
        return batch

    def _unpacked(self, batch: Any) -> tuple[Any, Any]:
        assert self.unpack is not None
        result = self.unpack(batch)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise TypeError(f"`unpack` must return a pair (x, y); got {_shown(result)}.")
        return result[0], result[1]

    def _named(self, batch: Mapping[str, Any], name: str) -> tuple[Any, Any]:
        if self.target is None:
            raise TypeError(
                f"`{name}` has dictionaries with the entries {[*batch]}: say which of them holds "
                'y, as in `target="labels"`. The others are x.'
            )
        if self.target not in batch:
            raise ValueError(
                f"`target` must be an entry of the dictionaries of `{name}`, one of {[*batch]}; "
                f"got {self.target!r}."
            )
        return {key: part for key, part in batch.items() if key != self.target}, batch[self.target]

    def _two(self, batch: Any, name: str) -> tuple[Any, Any]:
        if self.target is not None:
            raise TypeError(
                f"`target` is for batches that are dictionaries; `{name}` has {_shown(batch)}. "
                "Leave it out, or say by `unpack` what a batch is."
            )
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise TypeError(
                f"every batch of `{name}` must be a pair (x, y); got {_shown(batch)}. Several "
                "inputs are a tuple or a dictionary x. For other batches pass `unpack`, a function "
                "from a batch to (x, y), as in `unpack=lambda batch: ((batch[0], batch[1]), "
                "batch[2])`."
            )
        return batch[0], batch[1]


def _is_batch(value: object) -> bool:
    """Whether a value holds tensors, as batches do, and targets do not."""
    if isinstance(value, tuple | list):
        return any(isinstance(part, Tensor | tuple | list | Mapping) for part in value)
    return isinstance(value, Mapping)


def _shown(value: object) -> str:
    """The kind of a value, and how many elements a tuple or list has."""
    number = f" of {len(value)} elements" if isinstance(value, tuple | list) else ""
    return f"a {type(value).__name__}{number}"
