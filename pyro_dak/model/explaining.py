"""Errors in the use of data: what is wrong with weights, inputs or targets, said in our words."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pyro_dak.model.missing import check_observed_values
from pyro_dak.model.modes import evaluating
from pyro_dak.model.rows import Inputs, call, parts, row_shape, shown, shown_shape, split, to_device

if TYPE_CHECKING:
    from pyro_dak.model.additive_gp import AdditiveGP
    from pyro_dak.model.dak import DAK

__all__ = ["explaining"]

# What wrong arguments end in; Pyro uses exceptions of its own to run a program several times.
_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@contextmanager
def explaining(
    model: "DAK | AdditiveGP",
    x: Inputs | None = None,
    y: Tensor | None = None,
    **modules: nn.Module,
) -> Iterator[None]:
    """A context for the use of data: if it fails because of them or of weights, it says so.

    Nothing is tried out before an error comes. `modules` are looked at besides the model.
    """
    try:
        yield
    except _ERRORS as error:
        reason = _reason(model, x, y, modules)
        if reason is None:
            raise
        raise reason from error


def _reason(
    model: Any, x: Inputs | None, y: Tensor | None, modules: dict[str, nn.Module]
) -> Exception | None:
    """An error that says what is wrong with weights, inputs or targets, or None."""
    named: dict[str, nn.Module] = {"model": model, **modules}
    for label, module in named.items():
        for name, value in module.state_dict().items():
            if value.is_floating_point() and not bool(value.square().isfinite().all()):
                return ValueError(
                    f"`{label}` must have weights whose squares are finite; `{name}` has others. "
                    "Training has diverged, or a file is damaged."
                )
    if y is not None:
        try:
            y = model.likelihood.check_targets(y, model.num_outputs)
            check_observed_values(model.likelihood, y, model.num_outputs)
        except (TypeError, ValueError) as error:
            return error
    return None if x is None else _reason_of_inputs(model, x)


@torch.no_grad()
def _reason_of_inputs(model: "AdditiveGP", x: Inputs) -> ValueError | None:
    """An error that says why the network cannot take x, or None."""
    with evaluating(model):
        try:
            device = model.layer.log_unit_scale.device
            has_rows = all(isinstance(p, Tensor) and p.dim() > 0 for p in parts(x).values())
            chunks = [to_device(chunk, device) for chunk in split(x, 8192)] if has_rows else [x]
            for chunk in chunks:
                call(model.feature_extractor, chunk)
        except Exception as error:
            return ValueError(_mismatch(model, x, error))
        if not all(bool(model.unit_inputs(chunk).isfinite().all()) for chunk in chunks):
            return ValueError(
                "`x` gives features that are not finite: scale the inputs, or look for a layer "
                "that overflows."
            )
    return None


def _mismatch(model: "AdditiveGP", x: Inputs, error: Exception) -> str:
    seen, message = (
        getattr(model, "input_shape", None),
        str(error).strip().splitlines() or [repr(error)],
    )
    is_whole = all(isinstance(part, Tensor) and part.dim() > 0 for part in parts(x).values())
    if seen is None or not is_whole or row_shape(x) == seen:
        return f"`x` must fit `feature_extractor`; got {shown(x)}, of which it says: {message[0]}"
    if isinstance(x, Tensor) and x.is_floating_point() and isinstance(seen, tuple):
        rows = f"{seen[0]} columns" if len(seen) == 1 else f"rows of shape {seen}"
        return f"`x` must have {rows}, as the inputs had before; got shape {tuple(x.shape)}."
    return f"`x` must have rows as before, {shown_shape(seen)}; got {shown(x)}."
