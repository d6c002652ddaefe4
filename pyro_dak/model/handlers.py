"""What the handlers of Pyro around a program say about its use, and mistakes that this shows."""

import warnings
from collections.abc import Iterable

import pyro
from pyro.nn import PyroModule
from pyro.params.param_store import param_with_module_name
from pyro.poutine import runtime
from pyro.poutine.condition_messenger import ConditionMessenger
from pyro.poutine.trace_messenger import TraceMessenger

__all__ = ["check_store", "refuse_store", "warn_if_weights_are_given"]


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
