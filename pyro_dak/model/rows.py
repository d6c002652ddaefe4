"""Rows of inputs of any kind: counted, taken, split, moved, joined, and given to a network.

An x is a tensor, a tuple or list of tensors, or a dictionary of tensors, such as token ids with
their mask, or images with a table. The tensors are its parts, and each has one entry per row along
its first axis. A network gets a tensor as its argument, a tuple as positional arguments, and a
dictionary as keyword arguments, as the models of Hugging Face take them. Floating parts have the
dtype of the model; integers, bytes and truth values go to the network as they are.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pyro_dak.validation import check_integer, check_tensor

__all__ = [
    "Inputs",
    "RowShape",
    "blank_rows",
    "call",
    "check_parts",
    "checked_row_shape",
    "concatenate",
    "device_of",
    "like_model",
    "num_bytes",
    "num_numbers",
    "num_rows",
    "parts",
    "row_shape",
    "shown",
    "shown_shape",
    "split",
    "take",
    "to_device",
]

# A tensor, or several; `check_parts` tells whether they are.
Inputs: TypeAlias = Tensor | tuple[Any, ...] | list[Any] | Mapping[Any, Any]
# The shape of a row of each part, as plain data: of a tensor its sizes, behind the name of its
# dtype unless it is floating, such as (3,) or ("int64", 8); a list of them for a tuple, and a
# dictionary for a dictionary.
RowShape: TypeAlias = tuple[Any, ...] | list[tuple[Any, ...]] | dict[str, tuple[Any, ...]]

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
}


def _mapped(fn: Callable[[Tensor], Any], x: Inputs) -> Any:
    """The results of a function of each part, as a tuple or a dictionary if x is one."""
    if isinstance(x, Tensor):
        return fn(x)
    if isinstance(x, Mapping):
        return {name: fn(part) for name, part in x.items()}
    return tuple(fn(part) for part in x)


def parts(x: Inputs, name: str = "x") -> dict[str, Tensor]:
    """The tensors of x by the names that a reader gives them: `x`, `x[0]`, `x['mask']`."""
    if isinstance(x, Tensor):
        return {name: x}
    if isinstance(x, Mapping):
        return {f"{name}[{key!r}]": part for key, part in x.items()}
    return {f"{name}[{i}]": part for i, part in enumerate(x)}


def check_parts(name: str, x: object) -> None:
    """Raise unless x is a dense tensor, or a tuple, list or dictionary of such with equal rows."""
    if isinstance(x, Tensor):
        check_tensor(name, x)
        return
    if not isinstance(x, tuple | list | Mapping):
        raise TypeError(
            f"`{name}` must be a torch.Tensor, or a tuple or dictionary of tensors; got "
            f"{type(x).__name__}. Convert it with torch.as_tensor."
        )
    if len(x) == 0:
        raise ValueError(f"`{name}` must hold at least one tensor; got an empty {_kind(x)}.")
    if isinstance(x, Mapping) and not all(isinstance(key, str) for key in x):
        raise TypeError(
            f"`{name}` must have strings as keys, the names of the arguments of the network; got "
            f"{[*x]}."
        )
    for label, part in parts(x, name).items():
        if isinstance(part, tuple | list | Mapping):
            raise TypeError(
                f"`{label}` must be a tensor, because inputs are not nested; got a {_kind(part)}. "
                f"Put its tensors into `{name}` itself, or leave it out; of a loader, by `unpack`."
            )
        check_tensor(label, part)
        if part.dim() == 0:
            raise ValueError(f"`{label}` must have an entry per row, (N, ...); got a single one.")
    lengths = {label: len(part) for label, part in parts(x, name).items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{number} in `{label}`" for label, number in lengths.items())
        raise ValueError(f"`{name}` must have as many rows in each of its parts; got {listed}.")


def _kind(x: object) -> str:
    return "dictionary" if isinstance(x, Mapping) else type(x).__name__


def num_rows(x: Inputs) -> int:
    """N, and 0 for a single number."""
    first = x if isinstance(x, Tensor) else next(iter(parts(x).values()))
    return len(first) if first.dim() else 0


def num_numbers(x: Inputs) -> int:
    """How many numbers a row has, in all parts together."""
    return sum(part[:1].numel() for part in parts(x).values())


def device_of(x: Inputs) -> torch.device:
    """Where the first part is."""
    return x.device if isinstance(x, Tensor) else next(iter(parts(x).values())).device


def take(x: Inputs, index: Any) -> Any:
    """The rows of an index: a slice, or a tensor of numbers of rows on the device of x."""
    return x[index] if isinstance(x, Tensor) else _mapped(lambda part: part[index], x)


def split(x: Inputs, size: int) -> Sequence[Any]:
    """The rows in chunks of `size`, the last of which may be shorter."""
    if num_rows(x) <= size:
        return [x]
    if isinstance(x, Tensor):
        return x.split(size)
    return [take(x, slice(start, start + size)) for start in range(0, num_rows(x), size)]


def to_device(x: Inputs, device: torch.device) -> Any:
    """All parts on a device."""
    return x.to(device) if isinstance(x, Tensor) else _mapped(lambda part: part.to(device), x)


def like_model(x: Inputs, like: Tensor) -> Any:
    """All parts on the device of a parameter of the model, floating ones in its dtype."""

    def moved(part: Tensor) -> Tensor:
        return part.to(like.device, like.dtype if part.is_floating_point() else part.dtype)

    return _mapped(moved, x)


def concatenate(pieces: Sequence[Any]) -> Any:
    """The rows of all pieces, which have the same parts, one after the other; always a copy."""
    first = pieces[0]
    if isinstance(first, Tensor):
        return torch.cat([*pieces])
    if isinstance(first, Mapping):
        return {name: torch.cat([piece[name] for piece in pieces]) for name in first}
    return tuple(torch.cat(column) for column in zip(*pieces, strict=True))


def call(module: nn.Module, x: Inputs) -> Any:
    """What a network says of x: a tuple holds its arguments, a dictionary those with names."""
    if isinstance(x, Tensor):
        return module(x)
    return module(**x) if isinstance(x, Mapping) else module(*x)


def row_shape(x: Inputs) -> RowShape:
    """The shape and kind of a row, as plain data from which `blank_rows` makes others."""

    def of_part(part: Tensor) -> tuple[Any, ...]:
        sizes = tuple(part.shape[1:])
        return sizes if part.is_floating_point() else (str(part.dtype)[6:], *sizes)

    shape = _mapped(of_part, x)
    return [*shape] if isinstance(x, tuple | list) else shape


def checked_row_shape(name: str, value: Any) -> RowShape:
    """What `row_shape` returned, read from a file."""
    if isinstance(value, Mapping):
        return {str(key): _checked_part(name, part) for key, part in value.items()}
    if any(isinstance(part, list | tuple) for part in value):
        return [_checked_part(name, part) for part in value]
    return _checked_part(name, value)


def num_bytes(shape: RowShape) -> int:
    """How many bytes a row of this shape takes at most."""
    if isinstance(shape, tuple):
        return 8 * math.prod(size for size in shape if not isinstance(size, str))
    return sum(map(num_bytes, shape.values() if isinstance(shape, dict) else shape))


def _checked_part(name: str, value: Any) -> tuple[Any, ...]:
    sizes = [*value]
    if sizes and isinstance(sizes[0], str):
        if sizes[0] not in _DTYPES:
            raise ValueError(f"`{name}` has a part of the unknown dtype {sizes[0]!r}")
        del sizes[0]
    for size in sizes:
        check_integer(name, size, minimum=0)
    return tuple(value)


def blank_rows(shape: RowShape, number: int, like: Tensor) -> Any:
    """Rows of this shape for a dry run, on the device of `like` and floating parts in its dtype.

    Floating parts are zeros. The others are ones: a mask of zeros would leave no token to look at.
    """

    def of_part(part: tuple[Any, ...]) -> Tensor:
        if part and isinstance(part[0], str):
            return torch.ones(number, *part[1:], dtype=_DTYPES[part[0]], device=like.device)
        return torch.zeros(number, *part, dtype=like.dtype, device=like.device)

    if isinstance(shape, tuple):
        return of_part(shape)
    if isinstance(shape, dict):
        return {name: of_part(part) for name, part in shape.items()}
    return tuple(of_part(part) for part in shape)


def shown_shape(shape: RowShape) -> str:
    """The shape of a row in words, for an error message, such as "floating (3,)"."""
    if isinstance(shape, dict):
        return f"{{{', '.join(f'{name!r}: {shown_shape(part)}' for name, part in shape.items())}}}"
    if isinstance(shape, list):
        return f"[{', '.join(map(shown_shape, shape))}]"
    if shape and isinstance(shape[0], str):
        return f"{shape[0]} {shape[1:]}"
    return f"floating {shape}"


def shown(x: object) -> str:
    """Shapes and dtypes of the parts, for an error message."""
    if isinstance(x, Tensor):
        return f"shape {tuple(x.shape)} and {x.dtype} on {x.device}"
    if not isinstance(x, tuple | list | Mapping):
        return f"a {type(x).__name__}"
    listed = ", ".join(
        f"{label} of shape {tuple(part.shape)} and {part.dtype} on {part.device}"
        if isinstance(part, Tensor)
        else f"{label}, a {type(part).__name__}"
        for label, part in parts(x).items()
    )
    return f"a {_kind(x)} with {listed}"
