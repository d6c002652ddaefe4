"""Checks of a model and of its inputs, for the functions that take them from a user."""

from torch import Tensor

from pyro_dak.model.dak import DAK
from pyro_dak.model.explaining import explaining
from pyro_dak.model.modes import evaluating
from pyro_dak.model.rows import Inputs, check_parts, parts, take, to_device
from pyro_dak.validation import check_finite, check_has_values, check_kind

__all__ = ["check_inputs", "check_model", "check_network"]


def check_model(model: DAK) -> None:
    """Raise unless `model` is a DAK with values."""
    _checked_like(model)


def _checked_like(model: DAK) -> Tensor:
    """A tensor of a model that is one with values."""
    check_kind("model", model, DAK, "a DAK")
    like: Tensor = model.layer.log_unit_scale
    check_has_values("model", like)
    return like


def check_inputs(model: DAK, x: Inputs, name: str = "x") -> None:
    """Raise unless x `(N, ...)` are inputs that a model can be given, at least one row.

    Floating parts are finite and in the dtype of the model; others hold integers or truth values.
    """
    dtype = _checked_like(model).dtype
    check_parts(name, x)
    for label, part in parts(x, name).items():
        check_has_values(label, part)
        is_floating = part.is_floating_point()
        # A part may be a number for each row, and so may an integer, of which networks make more.
        if part.numel() == 0 or (part is x and is_floating and part.dim() < 2) or part.dim() < 1:
            raise ValueError(
                f"`{label}` must have shape (N, ...), with at least one row and one feature; got "
                f"{tuple(part.shape)}."
            )
        if part.is_complex() or (is_floating and part.dtype != dtype):
            raise TypeError(
                f"`{label}` must have the dtype of the model, {dtype}; got {part.dtype}. "
                "Convert it."
            )
        if is_floating:
            check_finite(label, part)


def check_network(model: DAK, x: Inputs) -> None:
    """Raise unless the network takes the first rows of x, which are checked already."""
    x = take(x, slice(2))
    with explaining(model, x), evaluating(model):
        model.unit_inputs(to_device(x, model.layer.log_unit_scale.device))
