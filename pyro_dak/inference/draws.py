"""Any posterior: a guide that knows q(f) in closed form, or draws of all sites.

A posterior is a guide of this library or of Pyro, the exact posterior, a run of `run_nuts` or of
Pyro's `MCMC`, or a dictionary of draws by site. Such a dictionary holds tensors or arrays
`(S, *event)`, or `(chains, S, *event)`. Besides the weights, draws may hold the other sites of the
model, and `noise_scale` and `unit_scale`, if these were sampled too. Draws are kept in float64;
what computes with them at the precision of the model casts them to it.
"""

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeGuard

import numpy
import pyro
import torch
from pyro import poutine
from pyro.infer import MCMC
from pyro.nn import PyroModule
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor, nn

from pyro_dak.inference.densities import checked_data, noise_scale, seeded, unit_data
from pyro_dak.inference.exact import ExactPosterior
from pyro_dak.inference.guides import GaussianGuide
from pyro_dak.inference.guides.base import check_guide
from pyro_dak.model.dak import DAK
from pyro_dak.model.explaining import explaining
from pyro_dak.model.latent_sites import likelihood_sites
from pyro_dak.model.modes import evaluating, pyro_lock
from pyro_dak.model.rows import Inputs, take, to_device
from pyro_dak.validation import (
    check_finite,
    check_floating,
    check_has_values,
    check_integer,
    check_seed,
)

__all__ = [
    "Draws",
    "Posterior",
    "as_guide",
    "check_draws",
    "check_posterior",
    "draw_posterior",
    "draw_sites",
    "draws_and_data",
    "has_closed_form",
    "resolve_posterior",
    "site_labels",
]


def has_closed_form(guide: nn.Module | None) -> TypeGuard[GaussianGuide]:
    """Whether q(f) is known without draws."""
    return isinstance(guide, GaussianGuide) and guide.has_closed_form


def draw_sites(guide: nn.Module, num_samples: int, x: Inputs | None = None) -> dict[str, Tensor]:
    """Draws of all sites of a guide, each `(S, 1, *event)`; x is for guides that need arguments."""
    trace = _trace_draws(guide, num_samples, x)
    return {name: trace.nodes[name]["value"] for name in _sites_of(trace)}


def _sites_of(trace: poutine.Trace) -> list[str]:
    """The latent sites of a guide that the model has too, without those that are its own.

    A guide that was set up without targets samples `y` too, which is not looked at.
    """
    nodes, names = trace.nodes, trace.stochastic_nodes
    return [n for n in names if n != "y" and not nodes[n]["infer"].get("is_auxiliary")]


def _trace_draws(guide: nn.Module, num_samples: int, x: Inputs | None) -> poutine.Trace:
    """A trace of the guide in a plate of draws, the second dimension from the right."""
    arguments = () if isinstance(guide, GaussianGuide) or x is None else (x, None)
    try:
        with pyro_lock, pyro.plate("draws", num_samples, dim=-2):
            return prune_subsample_sites(poutine.trace(guide).get_trace(*arguments))
    except Exception as error:
        if isinstance(guide, PyroModule):
            raise
        raise TypeError(
            f"`guide` must be a guide of pyro_dak or of Pyro, called with the arguments of the "
            f"model; {type(guide).__name__} cannot be called so."
        ) from error


def check_draws(model: DAK, sites: Mapping[str, Tensor]) -> None:
    """Raise unless a guide has drawn every site of the model, in its shape."""
    for name, shape in model.site_shapes.items():
        if name not in sites:
            raise ValueError(
                f"The guide has no site `{name}`; the model has {[*model.site_shapes]}."
            )
        got = sites[name].shape
        if got[len(got) - len(shape) :] != shape:
            raise ValueError(
                f"`guide` must sample `{name}` in its shape {tuple(shape)}; got {tuple(got)}. Make "
                "a guide for this model."
            )


@dataclass(repr=False)
class Draws:
    """Draws of the sites, each `(chains, draws, *event)`, in float64.

    `log_q` is the log density of the guide at each of its draws, `(chains, draws)`. `stats` holds
    what a sampler says about each draw, with the same shape.
    """

    sites: dict[str, Tensor]
    log_q: Tensor | None = None
    stats: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_chains(self) -> int:
        """Number of chains."""
        return self.sites["mu"].shape[0]

    @property
    def num_samples(self) -> int:
        """Number of draws per chain."""
        return self.sites["mu"].shape[1]

    @property
    def is_point(self) -> bool:
        """Whether all draws are the same, as those of a point estimate are."""
        return all(bool((v == v[:1, :1]).all()) for v in self.sites.values())

    def flat(self) -> dict[str, Tensor]:
        """The draws of all chains, one chain after the other, each site `(S, *event)`."""
        return {name: value.flatten(0, 1) for name, value in self.sites.items()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._facts()})"

    def _facts(self) -> str:
        """Numbers of chains and draws, and the event shapes of the sites."""
        events = ", ".join(f"{name} {tuple(v.shape[2:])}" for name, v in self.sites.items())
        return f"{self.num_chains} x {self.num_samples} draws of {events}"


Posterior: TypeAlias = nn.Module | ExactPosterior | Draws | MCMC | Mapping[str, Any]


def as_guide(posterior: Posterior, dtype: torch.dtype | None = None) -> nn.Module | None:
    """The guide of a posterior, or None if it is a set of samples.

    With a `dtype`, a guide of this library is copied to it; other guides stay as they are.
    """
    guide = posterior.guide if isinstance(posterior, ExactPosterior) else posterior
    if isinstance(guide, GaussianGuide) and dtype is not None:
        with pyro_lock:  # a guide that is running cannot be copied
            return copy.deepcopy(guide).to(dtype)
    return guide if isinstance(guide, nn.Module) else None


def resolve_posterior(
    model: DAK,
    posterior: Posterior,
    *,
    num_samples: int = 100,
    x: Inputs | None = None,
    seed: int | None = None,
) -> GaussianGuide | dict[str, Tensor]:
    """What f is known by: a guide with q(f) in closed form, or draws of all sites, `(S, *event)`.

    Draws are cast to the dtype of the model and moved to its device. Samples are taken as they are,
    chain after chain; a guide without a closed form is sampled.

    Args:
        num_samples: number of draws from a guide without a closed form.
        x: inputs, of which such a guide sees the first row.
        seed: seed of its draws; by default torch's global state is used.
    """
    check_posterior(model, posterior)
    guide = as_guide(posterior)
    if has_closed_form(guide):
        return guide
    like = model.layer.log_unit_scale
    x = None if x is None else to_device(take(x, slice(1)), like.device)
    draws = draw_posterior(model, posterior, num_samples=num_samples, x=x, seed=seed)
    return {name: value.to(like) for name, value in draws.flat().items()}


def site_labels(model: DAK) -> list[str]:
    """A label such as "z[0,1,2]" for every element of every site, in the order of the sites."""
    labels = []
    for name, shape in model.site_shapes.items():
        indices = itertools.product(*(range(n) for n in shape))
        labels += [f"{name}[{','.join(map(str, i))}]" if i else name for i in indices]
    return labels


@torch.no_grad()
def draw_posterior(
    model: DAK,
    posterior: Posterior,
    *,
    num_samples: int = 1000,
    num_chains: int = 1,
    x: Inputs | None = None,
    seed: int | None = None,
) -> Draws:
    """Draws from a posterior. Samples are returned as they are, a guide is sampled.

    Args:
        num_samples: draws per chain from a guide.
        num_chains: number of chains that the draws from a guide, which are independent, are
            arranged in.
        x: inputs, for guides that need arguments.
        seed: seed of the draws from a guide; by default torch's global state is used.
    """
    check_seed("seed", seed)
    check_posterior(model, posterior, same_dtype=False)
    if isinstance(posterior, Draws):
        return posterior
    guide = as_guide(posterior, torch.float64)
    if guide is not None:
        check_integer("num_samples", num_samples, minimum=1)
        check_integer("num_chains", num_chains, minimum=1)
        with explaining(model, guide=guide), evaluating(model, guide), seeded(seed):
            first_row = None if x is None else take(x, slice(1))
            trace = _trace_draws(guide, num_samples * num_chains, first_row)
            return _from_trace(model, trace, num_samples, num_chains)
    if isinstance(posterior, MCMC):
        sites = _checked_samples(model, posterior.get_samples(group_by_chain=True))
        return Draws(sites, stats=_stats_of(posterior, Draws(sites)))
    assert isinstance(posterior, Mapping)
    return Draws(_checked_samples(model, posterior))


def draws_and_data(
    model: DAK, posterior: Posterior, x: Inputs, y: Tensor, **options: Any
) -> tuple[Draws, Tensor, Tensor]:
    """Draws from a posterior, and the unit inputs and targets of its data, in float64.

    Sites of the model that have draws are known. The options are those of `draw_posterior`.
    """
    checked_data(model, x, y)
    draws = draw_posterior(model, posterior, x=x, **options)
    return draws, *unit_data(model, x, y, given=draws.sites)


def check_posterior(model: DAK, posterior: Posterior, same_dtype: bool = True) -> None:
    """Raise unless this is a posterior, and made for this model if it is one of our guides."""
    guide = as_guide(posterior)
    if guide is not None:
        check_guide(model, guide, same_dtype)
    elif not isinstance(posterior, Draws | MCMC | Mapping):
        raise TypeError(
            "`posterior` must be a guide, an exact posterior, an MCMC run or a dictionary of "
            f"draws; got {type(posterior).__name__}."
        )


def _stats_of(mcmc: MCMC, draws: Draws) -> dict[str, Tensor]:
    """What a run of Pyro says about each draw, `(chains, draws)`: whether it diverged."""
    if draws.num_samples < 4:  # for which Pyro has no diagnostics
        return {}
    found = mcmc.diagnostics()
    if "divergences" not in found:
        return {}
    diverging = torch.zeros(draws.num_chains, draws.num_samples, dtype=torch.bool)
    for chain, indices in enumerate(found["divergences"].values()):
        diverging[chain, list(indices)] = True
    return {"diverging": diverging}


def _from_trace(model: DAK, trace: poutine.Trace, num_samples: int, num_chains: int) -> Draws:
    """The draws of a guide and their log densities, which are unknown if it samples `y` too."""
    S, batch = num_samples * num_chains, (num_chains, num_samples)
    values = {name: trace.nodes[name]["value"] for name in _sites_of(trace)}
    check_draws(model, values)
    log_q = None
    if "y" not in trace.nodes:
        trace.compute_log_prob()
        log_probs = [trace.nodes[name]["log_prob"].double() for name in trace.stochastic_nodes]
        log_q = torch.stack([log_prob.expand(S, 1) for log_prob in log_probs]).sum(0)
        log_q = log_q.reshape(batch)
    events = {n: trace.nodes[n]["fn"].event_shape for n in values} | model.site_shapes
    sites = {
        name: value.double().expand(S, 1, *events[name]).reshape(*batch, *events[name])
        for name, value in values.items()
    }
    for name, value in sites.items():  # squares of draws are finite too, or densities are not
        check_finite(f"draws of {name}", value.square())
    return Draws(sites, log_q)


def _checked_samples(model: DAK, samples: Mapping[str, Any]) -> dict[str, Tensor]:
    """Samples of all sites as `(chains, draws, *event)`, without a data dimension of size one."""
    shapes = _known_shapes(model)
    missing = [name for name in model.site_shapes if name not in samples]
    if missing:
        raise ValueError(f"`samples` must hold every site of the model; {missing} are missing.")
    unknown = [name for name in samples if name not in shapes]
    if unknown:
        raise ValueError(
            f"`samples` must hold sites of the model, {[*shapes]}; it does not know {unknown}. "
            "Leave them out if f and the likelihood do not depend on them."
        )
    checked: dict[str, Tensor] = {}
    for name, value in samples.items():
        value = torch.as_tensor(value) if isinstance(value, numpy.ndarray) else value
        label = f"samples[{name!r}]"
        check_floating(label, value)
        check_has_values(label, value)
        check_finite(label, value)
        value = value.detach().to(model.layer.log_unit_scale.device, torch.float64)
        checked[name] = _with_chains(label, value, shapes[name], samples["mu"].ndim - 1)
    num_draws = {name: tuple(value.shape[:2]) for name, value in checked.items()}
    if len(set(num_draws.values())) > 1 or 0 in num_draws["mu"]:
        raise ValueError(
            "`samples` must hold as many draws of every site, at least one; got (chains, draws) "
            f"of {num_draws}."
        )
    return checked


def _known_shapes(model: DAK) -> dict[str, tuple[int, ...] | None]:
    """Event shapes of all sites that draws may hold; None where only a prior knows its shape."""
    shapes: dict[str, tuple[int, ...] | None] = {"unit_scale": (model.num_units,)}
    noise = noise_scale(model.likelihood)
    if noise is not None:
        shapes["noise_scale"] = tuple(noise.shape)
    inside = (site for sites in model.sites_in_priors.values() for site in sites)
    others = dict.fromkeys((*inside, *likelihood_sites(model)))
    known = {**model.site_shapes, **model.scale_shapes}
    return {**{name: tuple(shape) for name, shape in known.items()}, **others, **shapes}


def _with_chains(
    label: str, value: Tensor, shape: tuple[int, ...] | None, num_batch: int
) -> Tensor:
    """`(draws, *event)` or `(chains, draws, *event)` as the latter, or an error."""
    shape = tuple(value.shape[num_batch:]) if shape is None else shape
    batch = value.shape[: value.dim() - len(shape)]
    has_shape = tuple(value.shape[len(batch) :]) == shape and len(batch) == num_batch
    if not has_shape or num_batch not in (1, 2):
        raise ValueError(
            f"`{label}` must have shape (draws{''.join(f', {n}' for n in shape)}), or with chains "
            f"in front; got {tuple(value.shape)}."
        )
    if len(batch) == 2 and batch[1] == 1 and batch[0] > 1:  # (S, 1, *event), as guides give
        value = value.transpose(0, 1)
    return value if len(batch) == 2 else value.unsqueeze(0)
