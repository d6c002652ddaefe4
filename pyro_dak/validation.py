"""Checks at the public boundary: each returns nothing, or raises an error that says what to do."""

import math
from collections.abc import Iterable
from numbers import Integral, Real

import torch
from torch import Tensor

__all__ = [
    "check_bounds",
    "check_choice",
    "check_finite",
    "check_floating",
    "check_integer",
    "check_last_dim",
    "check_positive",
    "check_probability",
    "check_shape",
]


def check_integer(name: str, value: object, minimum: int, maximum: int | None = None) -> None:
    """Raise unless `value` is an integer in [minimum, maximum]."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` must be an integer; got {value!r} ({type(value).__name__}).")
    number = int(value)
    if number < minimum or (maximum is not None and number > maximum):
        limits = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
        raise ValueError(f"`{name}` must be {limits}; got {value}.")


def check_positive(name: str, value: object) -> None:
    """Raise unless `value` is a finite real number above zero."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{name}` must be a real number; got {value!r} ({type(value).__name__}).")
    if not (math.isfinite(value) and float(value) > 0):
        raise ValueError(f"`{name}` must be positive and finite; got {value}.")


def check_probability(name: str, value: float) -> None:
    """Raise unless `value` lies strictly between 0 and 1."""
    if not 0 < value < 1:
        raise ValueError(f"`{name}` must lie strictly between 0 and 1; got {value}.")


def check_bounds(name: str, bounds: object) -> None:
    """Raise unless `bounds` is a pair of finite numbers in increasing order."""
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        raise TypeError(f"`{name}` must be a pair (low, high); got {bounds!r}.")
    low, high = bounds
    for end in (low, high):
        if isinstance(end, bool) or not isinstance(end, Real):
            raise TypeError(f"`{name}` must hold two real numbers; got {bounds!r}.")
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"`{name}` must be finite with low < high; got ({low}, {high}).")


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise unless `value` is one of `choices`; the error lists them."""
    known = sorted(choices)
    if value not in known:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, known))}; got {value!r}.")


def check_floating(name: str, value: object) -> None:
    """Raise unless `value` is a tensor of a floating dtype."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"`{name}` must be a torch.Tensor; got {type(value).__name__}. "
            "Convert it with torch.as_tensor."
        )
    if not value.is_floating_point():
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
    if value.is_meta or bool(value.sum().isfinite()) or bool(value.isfinite().all()):
        return
    num_nan = int(torch.isnan(value).sum())
    num_inf = int(torch.isinf(value).sum())
    raise ValueError(
        f"`{name}` must be finite; got {num_nan} NaN and {num_inf} infinite of "
        f"{value.numel()} values. Remove or impute those rows, or look for a diverging network."
    )
