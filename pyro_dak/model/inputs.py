"""Checks of a model and of its inputs, for the functions that take them from a user."""

from torch import Tensor

from pyro_dak.model.dak import DAK
from pyro_dak.model.explaining import explaining
from pyro_dak.model.modes import evaluating
from pyro_dak.validation import check_finite, check_floating, check_has_values, check_kind

__all__ = ["check_inputs", "check_model", "check_network"]


def check_model(model: DAK) -> None:
    """Raise unless `model` is a DAK with values."""
    check_kind("model", model, DAK, "a DAK")
    check_has_values("model", model.layer.log_unit_scale)


def check_inputs(model: DAK, x: Tensor, name: str = "x") -> None:
    """Raise unless x `(N, ...)` are finite inputs in the dtype of the model, at least one row."""
    check_model(model)
    check_floating(name, x)
    check_has_values(name, x)
    if x.dim() < 2 or x.numel() == 0:
        raise ValueError(
            f"`{name}` must have at least one row and one feature, (N, ...); got {tuple(x.shape)}."
        )
    dtype = model.layer.log_unit_scale.dtype
    if x.dtype != dtype:
        raise TypeError(
            f"`{name}` must have the dtype of the model, {dtype}; got {x.dtype}. Convert it."
        )
    check_finite(name, x)


def check_network(model: DAK, x: Tensor) -> None:
    """Raise unless the network takes the first rows of x, which are checked already."""
    with explaining(model, x[:2]), evaluating(model):
        model.unit_inputs(x[:2].to(model.layer.log_unit_scale.device))
