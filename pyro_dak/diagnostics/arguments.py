"""Checks of predictions and observations that are to be compared."""

import torch
from torch import Tensor

from pyro_dak.validation import check_finite, check_floating, check_has_values, check_tensor

__all__ = ["check_classes", "check_pit", "check_same", "check_variances"]

_LABEL_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_same(**tensors: Tensor) -> None:
    """Raise unless these are floating, finite tensors of one shape with at least one value."""
    first = next(iter(tensors))
    for name, value in tensors.items():
        check_floating(name, value)
        check_has_values(name, value)
        if value.shape != tensors[first].shape or value.numel() == 0:
            others = "" if name == first else f", as `{first}` has {tuple(tensors[first].shape)}"
            raise ValueError(
                f"`{name}` must have at least one value and the same shape as the others{others}; "
                f"got {tuple(value.shape)}."
            )
        check_finite(name, value)


def check_variances(var: Tensor) -> None:
    """Raise unless all variances are positive."""
    if not bool((var > 0).all()):
        raise ValueError(f"`var` must be positive; got values down to {float(var.min()):.3g}.")


def check_pit(pit: Tensor) -> None:
    """Raise unless PIT values lie between 0 and 1."""
    check_same(pit=pit)
    if not bool(((pit >= 0) & (pit <= 1)).all()):
        raise ValueError(
            f"`pit` must lie between 0 and 1; got values from {float(pit.min()):.3g} to "
            f"{float(pit.max()):.3g}."
        )


def check_classes(y: Tensor, probs: Tensor, is_probability: bool = True) -> None:
    """Raise unless probs are `(N, C)`, finite and, if asked for, in [0, 1], and y are labels."""
    check_floating("probs", probs)
    check_has_values("probs", probs)
    if probs.dim() != 2 or probs.numel() == 0:
        raise ValueError(
            f"`probs` must have shape (N, C), rows x classes; got {tuple(probs.shape)}."
        )
    check_finite("probs", probs)
    if is_probability and not bool(((probs >= 0) & (probs <= 1 + 1e-3)).all()):
        raise ValueError(
            f"`probs` must lie between 0 and 1; got values from {float(probs.min()):.3g} to "
            f"{float(probs.max()):.3g}. Give probabilities, not logits."
        )
    check_tensor("y", y)
    check_has_values("y", y)
    if y.dtype not in _LABEL_DTYPES:
        raise TypeError(
            f"`y` must hold class labels of an integer dtype; got {y.dtype}. Use `y.long()`."
        )
    if y.shape != probs.shape[:1]:
        raise ValueError(
            f"`y` must have one label for each of the {len(probs)} rows of `probs`; got shape "
            f"{tuple(y.shape)}."
        )
    if not bool(((y >= 0) & (y < probs.shape[1])).all()):
        raise ValueError(
            f"`y` must hold labels from 0 to {probs.shape[1] - 1}, one per column of `probs`; got "
            f"values from {int(y.min())} to {int(y.max())}."
        )
