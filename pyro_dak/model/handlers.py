"""What the handlers of Pyro around a program say about its use, and mistakes that this shows."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import pyro
import torch
from pyro import poutine
from pyro.nn import PyroModule
from pyro.params.param_store import param_with_module_name
from pyro.poutine import runtime
from pyro.poutine.condition_messenger import ConditionMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_messenger import TraceMessenger

from pyro_dak.model.additive_gp import AdditiveGP
from pyro_dak.model.modes import evaluating, pyro_lock

__all__ = [
    "GuidedModel",
    "check_store",
    "latent_sites_of",
    "refuse_store",
    "warn_if_weights_are_given",
]

# A model that a guide is for: the module itself, or what a handler of Pyro made of it.
GuidedModel: TypeAlias = AdditiveGP | Callable[..., Any]


def latent_sites_of(model: GuidedModel) -> tuple[AdditiveGP, list[str]]:
    """The module inside of handlers of Pyro, and those of its sites that are still to be sampled.

    The handlers, such as those of `poutine.block` and `pyro.condition`, are asked by sampling the
    weights inside of them.
    """
    handlers: list[Messenger] = []
    inner: Any = model
    while not isinstance(inner, AdditiveGP):
        # What `Messenger.__call__` makes: a partial of the handler and what it is around.
        arguments: Sequence[Any] = getattr(getattr(inner, "func", None), "args", ())
        if len(arguments) != 2 or not isinstance(arguments[0], Messenger):
            raise TypeError(
                "`model` must be an AdditiveGP or a DAK, whose sites the guide has, or one inside "
                f"of handlers such as poutine.block; got {type(inner).__name__}."
            )
        handlers.append(arguments[0])
        inner = arguments[1]
    if not handlers:
        return inner, [*inner.site_shapes]
    program: Callable[[torch.Tensor], Any] = inner.sample_weights
    for handler in reversed(handlers):
        program = handler(program)
    with pyro_lock, evaluating(inner), torch.random.fork_rng(devices=[]), poutine.block():
        with poutine.trace() as capture:
            program(inner.layer.log_unit_scale)
    sampled = capture.trace.stochastic_nodes
    return inner, [name for name in inner.site_shapes if inner.site_name(name) in sampled]


def check_store(module: PyroModule) -> None:
    """Raise if a step of `SVI` would train other tensors than the parameters of this module.

    It looks at the first of them whose name Pyro's store knows.
    """
    if not _is_svi_step() or pyro.settings.get("module_local_params"):
        return
    store = pyro.get_param_store()
    for name, parameter in module.named_parameters():
        part, dot, rest = name.partition(".")
        full_name = module._pyro_get_fullname(part)
        key = param_with_module_name(full_name, rest) if dot else full_name
        if key in store:
            if store[key].unconstrained() is not parameter:
                refuse_store(name)
            return


def refuse_store(name: str) -> None:
    """Raise because Pyro's store holds another tensor under the name of a parameter."""
    raise RuntimeError(
        f"Pyro's parameter store holds another tensor under the name of `{name}`, from an earlier "
        "model or from a file; SVI would train that one, and this model would stay as it is. Call "
        "pyro.clear_param_store() first. To restore a model, use `load`, or its `load_state_dict`."
    )


def warn_if_weights_are_given(sites: Iterable[str]) -> None:
    """Warn about training mode if all sites are conditioned on and nothing is trained."""
    given = [handler.data for handler in _handlers(ConditionMessenger)]
    if given and not _is_svi_step() and all(any(s in data for data in given) for s in sites):
        warnings.warn(
            "The weights are given, as NUTS of Pyro does, and the model is in training mode: each "
            "evaluation moves the running statistics of its scaling. Call `model.eval()` first.",
            stacklevel=2,
        )


def _is_svi_step() -> bool:
    """Whether `SVI.step` collects the parameters of what runs now."""
    return any(handler.param_only for handler in _handlers(TraceMessenger))


def _handlers(kind: type) -> list:
    return [handler for handler in runtime._PYRO_STACK if isinstance(handler, kind)]
