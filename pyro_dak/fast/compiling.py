"""Functions that are compiled where that works, and go on as they are where it does not."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

__all__ = ["Compiled"]


class Compiled:
    """A function of a tensor and other arguments, compiled at its first call.

    Where the compiler fails and the function itself does not, that is told once, and all further
    calls run the function itself.

    Args:
        function: the function.
        options: of `torch.compile`.
    """

    def __init__(self, function: Callable[..., Any], **options: Any):
        self.function = function
        self.compiled: Callable[..., Any] | None = torch.compile(_own_code(function), **options)
        self.seen: set[torch.Size] = set()  # shapes of inputs: a new one may be compiled anew

    def __call__(self, x: Tensor, *args: Any) -> Any:
        """The function's result."""
        if self.compiled is None:
            return self.function(x, *args)
        try:
            if x.shape in self.seen:
                return self.compiled(x, *args)
            with _backward_at_once():
                result = self.compiled(x, *args)
            self.seen.add(x.shape)
            return result
        except Exception as error:
            result = self.function(x, *args)  # raises if the arguments are at fault
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            warnings.warn(f"compile=True failed, going on without it: {reason}", stacklevel=2)
            self.compiled = None
            return result


def _own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with code of its own: what is compiled, at most eight times, is kept with it."""
    if isinstance(function, MethodType):
        return MethodType(_own_code(function.__func__), function.__self__)
    if not isinstance(function, FunctionType):
        return function
    own = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def _backward_at_once() -> AbstractContextManager[object]:
    """Inside, the backward pass is compiled with the forward pass, so that failures can be caught.

    Older versions of torch have no such setting, and compile it when it is first run.
    """
    from torch._functorch import config

    name = "force_non_lazy_backward_lowering"
    return config.patch({name: True}) if hasattr(config, name) else nullcontext()
