"""Closed forms know the sites of `DAK.site_shapes`; models that sample others are refused.

Such sites come from priors of hyper-parameters, from `PyroSample`, or from sample statements in the
network or in the likelihood. (A prior that samples inside is refused where its density is asked
for, by `DAK.prior_distribution`.) A model is looked at once, and again when its modules change.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_dak.model.dak import DAK
from pyro_dak.model.modes import evaluating, parts_of, pyro_lock
from pyro_dak.model.rows import Inputs, take, to_device

__all__ = ["check_sites", "known_sites", "likelihood_sites"]

# What a model was made of when its network, or its likelihood, was found to sample nothing.
_CHECKED: WeakKeyDictionary[DAK, dict[str, list[Any]]] = WeakKeyDictionary()


@contextmanager
def known_sites(model: DAK, *, for_y: bool = True, given: Collection[str] = ()) -> Iterator[None]:
    """A context for a closed form: it raises if the model samples what the closed form ignores.

    The network is looked at by what runs inside. With `for_y` False, f alone is computed, and the
    likelihood may sample. Of the sites in `given`, values are known.
    """
    for name in model.scale_shapes:
        if name not in given:
            _refuse(name, "prior", model)
    parts = _shown_parts(model)
    checked = _CHECKED.setdefault(model, {})
    if for_y and checked.get("likelihood") != parts:
        with pyro_lock:
            _check_likelihood(model, given)
        if not given:
            checked["likelihood"] = parts
    if checked.get("network") == parts:
        yield
        return
    with pyro_lock, _Refuse(model, "network"):
        _check_attributes(model)
        yield
    checked["network"] = parts


def _shown_parts(model: DAK) -> list[Any]:
    """What a model is made of: its parts, and the names that those of Pyro sample."""
    parts = parts_of(model)
    names = [(*vars(part)["_pyro_samples"],) for part in parts if "_pyro_samples" in vars(part)]
    return [*map(id, parts), names]


def likelihood_sites(model: DAK) -> list[str]:
    """Names of the sites that the likelihood of a model samples as its parameters."""
    with pyro_lock, torch.random.fork_rng(devices=[]), poutine.block():
        with poutine.trace() as capture:
            model.likelihood.sample_parameters()
    return list(capture.trace.stochastic_nodes)


def check_sites(model: DAK, x: Inputs) -> None:
    """Raise if a model samples what closed forms ignore; a model that has passed costs nothing."""
    if torch.compiler.is_compiling():
        return
    if len(_CHECKED.get(model, ())) == 2 and not model.scale_shapes:
        return
    with evaluating(model), known_sites(model):
        if "network" not in _CHECKED[model]:
            model.unit_inputs(to_device(take(x, slice(1)), model.layer.log_unit_scale.device))


class _Refuse(Messenger):
    """Raises at sample statements, other than those of sites that are named here or observed."""

    def __init__(self, model: DAK, part: str, *names: str):
        super().__init__()
        self.model, self.part, self.names = model, part, names

    def _pyro_sample(self, msg: Any) -> None:
        is_latent = not msg["is_observed"] and not site_is_subsample(msg)
        if is_latent and msg["name"] not in self.names:
            _refuse(msg["name"], self.part, self.model)


class _Fill(Messenger):
    """Gives the site `y` a value of the right shape, so that nothing is asked to draw it."""

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] == "y":
            msg["value"], msg["done"] = torch.zeros(msg["fn"].shape()), True


def _check_attributes(model: DAK) -> None:
    """Raise at a `PyroSample` that stands for a distribution, and not for a tensor."""
    for name, part in model.named_modules():
        for attribute, prior in getattr(part, "_pyro_samples", {}).items():
            value = prior if hasattr(prior, "sample") else prior(part)
            if not isinstance(value, Tensor):
                _refuse(f"{name}.{attribute}" if name else attribute, name or "model", model)


@torch.no_grad()
def _check_likelihood(model: DAK, given: Collection[str]) -> None:
    """Raise if the likelihood samples sites that are not given; the program tells without data."""
    like = model.layer.log_unit_scale
    known = (
        *given,
        *model.site_shapes,
        *model.scale_shapes,
        *(name for names in model.sites_in_priors.values() for name in names),
    )
    devices = [like.device] if like.device.type == "cuda" else []
    refuse = _Refuse(model, "likelihood", "y", *known)
    with (
        torch.random.fork_rng(devices=devices),
        pyro.validation_enabled(False),  # the values do not matter
        poutine.block(),
        refuse,
        _Fill(),
    ):
        model.observe(like.new_zeros(1, model.num_units))


def _refuse(site: str, part: str, model: DAK) -> None:
    raise NotImplementedError(
        f"The model samples `{site}` in its {part}, and closed forms know the latent sites "
        f"{', '.join(f'`{name}`' for name in model.site_shapes)} only: they would take one random "
        f"draw of `{site}` as given. Train it by Trace_ELBO of Pyro with an autoguide, or by NUTS "
        "of Pyro, and predict from that, or by `Predictive`."
    )
