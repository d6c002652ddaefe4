"""Checks at the public boundary: each returns nothing, or raises an error that says what to do."""

import cmath
import importlib
import math
import os
import warnings
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "check_bounds",
    "check_choice",
    "check_device",
    "check_finite",
    "check_floating",
    "check_has_values",
    "check_integer",
    "check_kind",
    "check_last_dim",
    "check_not_negative",
    "check_path",
    "check_positive",
    "check_probability",
    "check_real",
    "check_seed",
    "check_shape",
    "check_tensor",
    "import_optional",
]

_MAX_INTEGER = 2**63 - 1


def check_kind(name: str, value: object, kind: Any, expected: str) -> None:
    """Raise unless `value` is an instance of `kind`; `expected` says what that is, and a remedy."""
    if not isinstance(value, kind):
        raise TypeError(f"`{name}` must be {expected}; got {_shown(value)}.")


def check_integer(name: str, value: object, minimum: int, maximum: int | None = None) -> None:
    """Raise unless `value` is an integer in [minimum, maximum], and one of 64 bits."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` must be an integer; got {_shown(value)}.")
    number = int(value)
    if not minimum <= number <= (_MAX_INTEGER if maximum is None else maximum):
        limits = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
        if maximum is None and number > minimum:
            limits = "below 2^63"
        raise ValueError(f"`{name}` must be {limits}; got {value}.")


def check_seed(name: str, value: object) -> None:
    """Raise unless `value` is None or an integer that torch takes as a seed."""
    if value is not None:
        check_integer(name, value, minimum=-(2**63))


def check_positive(name: str, value: object) -> None:
    """Raise unless `value` is a finite real number above zero."""
    if not 0 < _real(name, value) < math.inf:
        raise ValueError(f"`{name}` must be positive and finite; got {value}.")


def check_not_negative(name: str, value: object) -> None:
    """Raise unless `value` is a finite real number, zero or above."""
    if not 0 <= _real(name, value) < math.inf:
        raise ValueError(f"`{name}` must not be negative, and be finite; got {value}.")


def check_real(name: str, value: object) -> None:
    """Raise unless `value` is a finite real number."""
    if not math.isfinite(_real(name, value)):
        raise ValueError(f"`{name}` must be finite; got {value}.")


def check_probability(name: str, value: object) -> None:
    """Raise unless `value` lies strictly between 0 and 1."""
    if not 0 < _real(name, value) < 1:
        raise ValueError(f"`{name}` must lie strictly between 0 and 1; got {value}.")


def _real(name: str, value: object) -> float:
    """A real number as a float; one that is too large for a float is infinite."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{name}` must be a real number; got {_shown(value)}.")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _shown(value: object) -> str:
    """A value and its type, in a line of an error message."""
    text = repr(value)
    is_short = len(text) <= 80 and "\n" not in text
    return f"{text} ({type(value).__name__})" if is_short else f"a {type(value).__name__}"


def check_bounds(name: str, bounds: object) -> None:
    """Raise unless `bounds` is a pair of finite numbers in increasing order."""
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        raise TypeError(f"`{name}` must be a pair (low, high); got {bounds!r}.")
    low, high = bounds
    for end in (low, high):
        if isinstance(end, bool) or not isinstance(end, Real):
            raise TypeError(f"`{name}` must hold two real numbers; got {bounds!r}.")
    low, high = (_real(name, end) for end in bounds)
    if not (low < high and math.isfinite(high - low)):
        raise ValueError(
            f"`{name}` must be finite with low < high; got ({bounds[0]}, {bounds[1]})."
        )


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise unless `value` is one of `choices`; the error lists them."""
    known = list(choices)
    if not isinstance(value, str) or value not in known:
        listed = ", ".join(sorted(map(repr, known)))
        shown = repr(value) if isinstance(value, str) else _shown(value)
        raise ValueError(f"`{name}` must be one of {listed}; got {shown}.")


def check_device(name: str, value: Any) -> None:
    """Raise unless `value` is a device that torch has on this machine."""
    try:
        torch.empty(0, device=torch.device(value))
    except (AssertionError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"`{name}` must be a device that torch has here, such as 'cpu'; got {_shown(value)}."
        ) from error


def check_path(name: str, value: object) -> None:
    """Raise unless `value` is a path that a file system can have."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(
            f"`{name}` must be a path: a string or a pathlib.Path; got {_shown(value)}."
        )
    if "\0" in str(value):
        raise ValueError(f"`{name}` must not have a null character; got {str(value)!r}.")


def check_tensor(name: str, value: object) -> None:
    """Raise unless `value` is a dense tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"`{name}` must be a torch.Tensor; got {type(value).__name__}. "
            "Convert it with torch.as_tensor."
        )
    if value.layout != torch.strided:
        raise TypeError(f"`{name}` must be dense; got {value.layout}. Use `{name}.to_dense()`.")


def check_has_values(name: str, value: Tensor) -> None:
    """Raise if `value` is on the meta device, where tensors have shapes and no values."""
    if value.is_meta:
        raise ValueError(
            f"`{name}` must hold values; got a tensor on the meta device. Move what it stands for "
            "to a device of its own first."
        )


def check_floating(name: str, value: object) -> None:
    """Raise unless `value` is a dense tensor of a floating dtype."""
    check_tensor(name, value)
    if isinstance(value, Tensor) and not value.is_floating_point():
        raise TypeError(
            f"`{name}` must have a floating dtype; got {value.dtype}. "
            f"Convert it with `{name}.float()` or `{name}.double()`."
        )


def check_shape(name: str, value: Tensor, shape: tuple[int | str, ...], meaning: str) -> None:
    """Raise unless the trailing dimensions of `value` are `shape`; those with a name are free."""
    sizes = value.shape[-len(shape) :]
    fits = [isinstance(want, str) or want == size for want, size in zip(shape, sizes, strict=False)]
    if len(fits) < len(shape) or not all(fits):
        wanted = ", ".join(["...", *map(str, shape)])
        raise ValueError(
            f"`{name}` must have shape ({wanted}), {meaning}; got {tuple(value.shape)}."
        )


def check_last_dim(name: str, value: Tensor, size: int, meaning: str, remedy: str) -> None:
    """Raise unless the last dimension of `value` is `size`."""
    if value.dim() == 0 or value.shape[-1] != size:
        raise ValueError(
            f"`{name}` must have {size} columns, {meaning}; "
            f"got shape {tuple(value.shape)}. {remedy}"
        )


def check_finite(name: str, value: Tensor) -> None:
    """Raise if `value` holds a NaN or an infinity; the error counts them.

    Tensors on the meta device hold no values and pass.
    """
    # A sum that is finite has no such term; one that is not may have overflowed.
    if value.is_meta or cmath.isfinite(value.sum().item()) or bool(value.isfinite().all()):
        return
    num_nan = int(torch.isnan(value).sum())
    num_inf = int(torch.isinf(value).sum())
    raise ValueError(
        f"`{name}` must be finite; got {num_nan} NaN and {num_inf} infinite of "
        f"{value.numel()} values. Remove or impute those rows, or look for a diverging network."
    )


def import_optional(name: str) -> Any:
    """A module of the extra "diagnostics", or an error that says how to install it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces 1.0 at import
            return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"This needs {name.split('.')[0]}, which is not installed. "
            "Run `pip install 'pyro_dak[diagnostics]'`."
        ) from error
