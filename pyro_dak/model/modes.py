"""Modes that a model can be in: evaluated, with parameters of its own, in mixed precision.

Threads may share a model: a mode begins with the first of them that asks for it, and ends with the
last. What goes through Pyro, whose handlers are global, is done by one thread at a time.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import pyro
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

__all__ = [
    "evaluating",
    "is_mixed",
    "local_parameters",
    "own_precision",
    "parts_of",
    "pyro_lock",
    "with_own_tensors",
]

_Module = TypeVar("_Module", bound=nn.Module)


def with_own_tensors(module: _Module, device: torch.device) -> _Module:
    """A copy of a module with parameters and buffers of its own, which later training leaves alone.

    All else is shared, which makes it several times faster than a deep copy.
    """
    # What `copy.copy` does, without asking the class how it would be pickled.
    own = object.__new__(type(module))
    vars(own).update(vars(module))
    parameters, buffers, modules = {}, {}, {}
    for name, p in module._parameters.items():
        parameters[name] = p
        if p is not None:
            value = p.detach().to(device, copy=True)
            parameters[name] = nn.Parameter(value, p.requires_grad)
    for name, buffer in module._buffers.items():
        buffers[name] = None if buffer is None else buffer.detach().to(device, copy=True)
    for name, part in module._modules.items():
        modules[name] = None if part is None else with_own_tensors(part, device)
    # Not by attributes, for which modules, and those of Pyro all the more, look in many places.
    vars(own).update(_parameters=parameters, _buffers=buffers, _modules=modules)
    return own


def parts_of(*modules: nn.Module) -> list[nn.Module]:
    """These modules and all inside them, some perhaps twice; faster than `Module.modules`."""
    parts = list(modules)
    for part in parts:  # which grows on the way
        if part._modules:
            parts += [inner for inner in part._modules.values() if inner is not None]
    return parts


# Held by whoever runs a Pyro program, or draws from torch's global generator after seeding it.
pyro_lock = threading.RLock()
_modes_lock = threading.Lock()
# Modules that are evaluated: by how many, and the mode that comes back after the last of them.
_evaluated: dict[nn.Module, tuple[int, bool]] = {}
# Who wants local parameters: how many, and Pyro's setting before the first of them.
_local: tuple[int, bool] = (0, False)


def _set_training(part: nn.Module, mode: bool) -> None:
    """Set `part.training` without what modules do when any attribute is set, which takes long."""
    if "training" in vars(part):
        vars(part)["training"] = mode
    else:  # those of TorchScript have it elsewhere
        part.training = mode


@contextmanager
def evaluating(*modules: nn.Module, runs_programs: bool = True) -> Iterator[None]:
    """Eval mode without gradients and with module-local parameters; the modes come back after.

    With `runs_programs` False the modules themselves are not called, only what is inside them, so
    that parameters are local only if there is a Pyro module among these.
    """
    parts = parts_of(*modules)
    with _modes_lock:
        # A part that is evaluated already, because it was so before, has no mode to come back to.
        changed = [part for part in parts if part.training or part in _evaluated]
        for part in changed:
            count, mode = _evaluated.get(part, (0, part.training))
            _evaluated[part] = (count + 1, mode)
            _set_training(part, False)
    is_program = runs_programs or any(isinstance(p, PyroModule) for p in parts[len(modules) :])
    try:
        with torch.no_grad(), _local_parameters(parts) if is_program else nullcontext():
            yield
    finally:
        # What was evaluated before is so after, also if it has been set to train inside.
        strayed = [part for part in parts if part.training]
        if changed or strayed:
            with _modes_lock:
                for part in strayed:
                    if part not in _evaluated:
                        _set_training(part, False)
                for part in changed:
                    count, mode = _evaluated.pop(part)
                    if count > 1:
                        _evaluated[part] = (count - 1, mode)
                    else:
                        _set_training(part, mode)


@contextmanager
def local_parameters(*modules: nn.Module) -> Iterator[None]:
    """Parameters inside their modules, not in Pyro's global store, for these Pyro modules.

    Pyro prepares a module for this only if it was made under the setting; autoguides made before
    are prepared here.
    """
    with _local_parameters(parts_of(*modules)):
        yield


@contextmanager
def _local_parameters(parts: Iterable[nn.Module]) -> Iterator[None]:
    """`local_parameters` of modules and of all inside them."""
    global _local
    for part in parts:
        if isinstance(part, PyroModule) and not hasattr(part._pyro_context, "param_state"):
            part._pyro_context.param_state = {"params": {}, "constraints": {}}
    with _modes_lock:
        count, before = _local
        before = before if count else pyro.settings.get("module_local_params")
        _local = (count + 1, before)
        pyro.settings.set(module_local_params=True)
    try:
        yield
    finally:
        with _modes_lock:
            count, before = _local
            _local = (count - 1, before)
            if count == 1:
                pyro.settings.set(module_local_params=before)


def is_mixed(like: Tensor) -> bool:
    """Whether autocast is on for the device of a tensor."""
    kind = like.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def own_precision(like: Tensor) -> AbstractContextManager[Any]:
    """A context in which autocast is off; it costs nothing where it is off already."""
    return torch.autocast(like.device.type, enabled=False) if is_mixed(like) else nullcontext()
