"""A look at some rows before training: do numbers of such a scale make sense to the model?"""

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from pyro_dak.model.dak import DAK
from pyro_dak.model.missing import is_observed
from pyro_dak.model.priors import Prior
from pyro_dak.model.rows import Inputs, like_model, parts
from pyro_dak.training.loop import DAKLoss
from pyro_dak.training.plan import TrainingError

__all__ = ["check_start"]

# How many times the targets may exceed what the model expects, or fall short of it.
_UNUSUAL, _ABSURD = 1e3, 1e12
# The least share of the grid that unit inputs fill, if they come from small inputs.
_NARROW, _EMPTY = 1e-2, 1e-6
_REMEDY = "Bring inputs and targets to about unit scale"


def check_start(loss: DAKLoss, x: Inputs, y: Tensor, num_data: int, is_sample: bool = True) -> None:
    """Raise TrainingError, or warn, if rows have a scale that the model cannot be trained on.

    The loss of the rows and its gradient are computed as a step would do it, and must be finite.
    Inputs and targets that are too small or too large for the model, though not for the arithmetic,
    are refused if they are absurd and if the rows are a sample of all rows, and else warned about.
    Running statistics and random state are as before after it.
    """
    model, seen = loss.model, list[Tensor]()
    like = model.layer.log_unit_scale
    dtype, device = like.dtype, like.device
    x, y = like_model(x, like), like_model(y, like)
    observed = is_observed(model.likelihood, y)
    known = y if observed is None else y[observed]
    size = max(map(_largest, parts(x).values()))
    largest = f"the largest |x| is {size:.3g} and the largest |y| {_largest(known):.3g}"
    parameters = [p for p in loss.parameters() if p.requires_grad]
    if not parameters:  # the loop says so
        return
    buffers = [(buffer, buffer.clone()) for buffer in loss.buffers()]
    hook = model.scaling.register_forward_hook(lambda *call: seen.append(call[2].detach()))
    loss.train()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            # The class's own: a compiled one would be compiled for another number of rows.
            value, _ = DAKLoss.forward(loss, x, y, num_data / len(y), num_data)
            gradients = torch.autograd.grad(value, parameters, allow_unused=True)
        norm = nn.utils.get_total_norm([g for g in gradients if g is not None])
        numbers = {"loss": value.detach(), "norm of the gradient": norm}
        numbers |= {name: buffer.sum() for name, buffer in loss.named_buffers()}
        for name, number in numbers.items():
            if not bool(number.isfinite()):
                raise TrainingError(
                    f"The {name} of some rows is {float(number)} before the first step; "
                    f"{largest}, in {dtype}. {_REMEDY}, or look for a layer that overflows."
                )
    finally:
        hook.remove()
        for buffer, before in buffers:
            buffer.copy_(before)
    differ = any(bool((part != part[:1]).any()) for part in parts(x).values())
    if seen and 0 < size < 1e-3 and differ:
        _check_units(model, seen[0], largest, is_sample)
    if hasattr(model.likelihood, "noise_scale") and not model.has_shrinkage:
        _check_targets(model, known, largest, is_sample)


def _check_units(model: DAK, h: Tensor, largest: str, is_sample: bool) -> None:
    """Tell if units see next to nothing of small inputs; h are unit inputs, `(N, P)`."""
    low, high = model.layer.activation.grid.bounds
    share = float((h.amax(0) - h.amin(0)).max()) / (high - low)
    if share < _NARROW:
        what = f"The unit inputs of some rows fill a share of {share:.1g} of the grid"
        _tell(what, largest, is_sample and share < _EMPTY)


def _check_targets(model: DAK, y: Tensor, largest: str, is_sample: bool) -> None:
    """Tell if targets are far from what y = f + noise expects under the prior."""
    likelihood: Any = model.likelihood
    like = model.layer.log_unit_scale.detach()
    if not all(isinstance(model.prior[name], Prior) for name in ("z", "mu")):
        return  # one's own may sample
    with torch.no_grad():
        z, mu = (model.prior_distribution(name, like).variance.mean() for name in ("z", "mu"))
        var = model.unit_scale.square().sum() * z + mu + likelihood.noise_scale.square().max()
    size, expected = _root_mean_square(y), float(var.sqrt())
    ratio = size / expected if size > 0 and 0 < expected < math.inf else 1.0
    if not 1 / _UNUSUAL < ratio < _UNUSUAL:
        what = f"Some targets are about {size:.3g}, where the model expects {expected:.3g}"
        _tell(what, largest, is_sample and not 1 / _ABSURD < ratio < _ABSURD)


def _tell(what: str, largest: str, is_refused: bool) -> None:
    message = f"{what}; {largest}. {_REMEDY}, or choose priors and noise of their scale."
    if is_refused:
        raise TrainingError(message)
    warnings.warn(message, stacklevel=4)


def _largest(values: Tensor) -> float:
    return float(values.double().abs().max()) if values.numel() else 0.0


def _root_mean_square(values: Tensor) -> float:
    """Without overflow, whatever the scale."""
    largest = _largest(values)
    return largest * float((values / largest).square().mean().sqrt()) if largest > 0 else 0.0
