"""Functions that are compiled where that works, and run as they are where it does not."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

__all__ = ["Compiled"]

# What the compiler may keep for one piece of code. Its own limit of eight would send the ninth
# model of a process, whose functions are the same code, back to Python.
_MAX_VERSIONS = 1024


class Compiled:
    """A function of a tensor, or of several in a tuple or dictionary, and of other arguments.

    It is compiled at its first call.

    Where the compiler fails and the function itself does not, a warning says so once, and all
    further calls run the function itself. The options are those of `torch.compile`.
    """

    def __init__(self, function: Callable[..., Any], **options: Any):
        self.function = function
        settings: dict[str, Any] = {}
        if options.get("backend", "inductor") == "inductor":
            # Random numbers are those of torch itself: the same as without a compiler, and faster.
            settings["fallback_random"] = True
        if hasattr(torch.compiler, "skip_guard_on_globals_unsafe"):  # torch 2.8 or newer
            settings["guard_filter_fn"] = _keep_guards
        if settings:
            options["options"] = settings
        self.compiled: Callable[..., Any] | None = torch.compile(function, **options)
        self.seen: set[tuple[Any, ...]] = set()  # shapes of inputs; a new one may be compiled anew

    def __call__(self, x: Any, *args: Any) -> Any:
        """The result of the function."""
        if self.compiled is None:
            return self.function(x, *args)
        try:
            shape = _shape(x)
            if shape in self.seen:
                return self.compiled(x, *args)
            with _compiling():
                result = self.compiled(x, *args)
            self.seen.add(shape)
            return result
        except Exception as error:
            result = self.function(x, *args)  # raises if the arguments are at fault
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            warnings.warn(f"compile=True failed, going on without it: {reason}", stacklevel=2)
            self.compiled = None
            return result


def _shape(x: Any) -> tuple[Any, ...]:
    if isinstance(x, Tensor):
        return x.shape
    return tuple(part.shape for part in (x.values() if isinstance(x, Mapping) else x))


def _keep_guards(entries: Sequence[Any]) -> list[bool]:
    """Which conditions the compiler checks at each call: not that global code is still the same.

    Global data are checked as ever. To check that no function, class or module has been replaced
    would take as long as a twentieth of a training step.
    """
    code = (BuiltinFunctionType, FunctionType, ModuleType, type)
    return [not (entry.is_global and isinstance(entry.value, code)) for entry in entries]


@contextmanager
def _compiling() -> Iterator[None]:
    """Settings of the compiler for a call that may compile.

    The backward pass is compiled with the forward pass, so that a failure can be caught here;
    versions of torch that cannot do this compile predictions only. Many models may share their
    code, where torch has a setting for it.
    """
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch

    at_once = "force_non_lazy_backward_lowering"
    if torch.is_grad_enabled() and not hasattr(functorch, at_once):
        raise RuntimeError(f"torch {torch.__version__} is too old to compile a training step.")
    settings = (
        (functorch, at_once, True),
        (dynamo, "recompile_limit", _MAX_VERSIONS),
        (dynamo, "accumulated_recompile_limit", _MAX_VERSIONS),
    )
    with ExitStack() as stack:
        for config, name, value in settings:
            if hasattr(config, name):
                stack.enter_context(config.patch({name: value}))
        yield
