"""Adam and AdamW whose steps, on the CPU, take few operations for many small parameters.

The arithmetic is that of torch's fused step, which a test holds this to. For a small network torch
spends most of a step on its way there: it sorts tensors by device and dtype, and counts the steps
of every parameter in a tensor of its own. Here parameters with the same count share its tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.optim import Adam, AdamW, Optimizer

__all__ = ["FewCallsAdam", "FewCallsAdamW", "few_calls_class", "total_norm"]

# Up to this many numbers, to copy them together takes less than a norm of each tensor.
_FEW_NUMBERS = 65_536
_Lists = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of all numbers of these tensors, a scalar, in few operations if they are alike.

    It is `torch.nn.utils.get_total_norm`.
    """
    if not _are_alike(tensors):
        return nn.utils.get_total_norm(tensors)
    if sum(map(Tensor.numel, tensors)) <= _FEW_NUMBERS:
        return torch.linalg.vector_norm(_flatten_dense_tensors(tensors))
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm([*tensors])))


def few_calls_class(kind: type[Optimizer], parameters: Sequence[Tensor]) -> type[Optimizer]:
    """The class whose steps take few operations if there is one for these parameters, else `kind`.

    It is for `fused=True`.
    """
    is_known = kind in _CLASSES and parameters[0].is_cpu and _are_alike(parameters)
    return _CLASSES[kind] if is_known else kind


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether there are tensors, all in one dtype on one device, and dense."""
    return len({(t.dtype, t.device, t.layout) for t in tensors}) == 1


class _FewCalls:
    """The step of an Adam with `fused=True`, for parameters on the CPU in one dtype.

    Steps of another kind are torch's own: the first one, those with a closure, and those in which
    some parameters have no gradient. There are no hooks of steps, and no label for the profiler.
    """

    param_groups: list[dict[str, Any]]
    state: Any  # by parameter
    _fused: Callable[..., None]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, as the class of torch does."""
        lists = None if closure is not None else self._lists()
        if lists is None:
            self._separate_counts()
            result = super().step(closure)  # type: ignore[misc]
            self._share_counts()
            return result
        with torch.no_grad():
            for count in {id(count): count for _, own in lists for count in own[-1]}.values():
                count.add_(1)
            for group, (parameters, gradients, means, squares, counts) in lists:
                beta1, beta2 = group["betas"]
                type(self)._fused(
                    parameters,
                    gradients,
                    means,
                    squares,
                    [],
                    counts,
                    lr=group["lr"],
                    beta1=beta1,
                    beta2=beta2,
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    amsgrad=False,
                    maximize=group["maximize"],
                )
        return None

    def _lists(self) -> list[tuple[dict[str, Any], _Lists]] | None:
        """What a step takes, by group; None if the step is for torch."""
        if getattr(self, "grad_scale", None) is not None:
            return None
        found, states = [], self.state
        for group in self.param_groups:
            if group["amsgrad"] or not group["fused"]:
                return None
            lists: _Lists = ([], [], [], [], [])
            parameters, gradients, means, squares, counts = lists
            for parameter in group["params"]:
                gradient, state = parameter.grad, states.get(parameter)
                if gradient is None or not state:
                    return None
                parameters.append(parameter)
                gradients.append(gradient)
                means.append(state["exp_avg"])
                squares.append(state["exp_avg_sq"])
                counts.append(state["step"])
            found.append((group, lists))
        return found

    def _share_counts(self) -> None:
        """Let parameters with the same count have it in the same tensor."""
        shared: dict[float, Tensor] = {}
        for state in self.state.values():
            if "step" in state:
                state["step"] = shared.setdefault(float(state["step"]), state["step"])

    def _separate_counts(self) -> None:
        """Give every parameter a count of its own, which torch raises one by one."""
        for state in self.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()


# Else torch would wrap the step for hooks and its profiler, which takes as long as the step.
_FewCalls.step.hooked = True  # type: ignore[attr-defined]


class FewCallsAdam(_FewCalls, Adam):
    """`torch.optim.Adam` with `fused=True`."""

    _fused = staticmethod(torch._fused_adam_)


class FewCallsAdamW(_FewCalls, AdamW):
    """`torch.optim.AdamW` with `fused=True`."""

    _fused = staticmethod(torch._fused_adamw_)


_CLASSES: dict[type[Optimizer], type[Optimizer]] = {Adam: FewCallsAdam, AdamW: FewCallsAdamW}
