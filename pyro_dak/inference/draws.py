"""Draws of the weights from any posterior, in float64.

A posterior is a guide of this library or of Pyro, the exact posterior, an MCMC run of this library
or of Pyro, or a dictionary of samples. Besides the sites of the model, draws may hold `noise_scale`
and `unit_scale`, if these were sampled too.
"""

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeGuard

import pyro
import torch
from pyro import poutine
from pyro.infer import MCMC
from pyro.nn import PyroModule
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor, nn

from pyro_dak.inference.densities import seeded
from pyro_dak.inference.exact import ExactPosterior
from pyro_dak.inference.guides import GaussianGuide
from pyro_dak.inference.guides.base import check_guide
from pyro_dak.model.dak import DAK
from pyro_dak.model.explaining import explaining
from pyro_dak.model.modes import evaluating, pyro_lock
from pyro_dak.model.rows import Inputs, take
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
    "draw_posterior",
    "draw_sites",
    "has_closed_form",
    "site_labels",
]

# Parameters of the model that a sampler may sample too.
_EXTRA_SITES = ("noise_scale", "unit_scale")


def has_closed_form(guide: nn.Module | None) -> TypeGuard[GaussianGuide]:
    """Whether q(f) is known without draws."""
    return isinstance(guide, GaussianGuide) and guide.has_closed_form


def draw_sites(guide: nn.Module, num_samples: int, x: Inputs | None = None) -> dict[str, Tensor]:
    """Draws of all sites of a guide, each `(S, 1, *event)`; x is for guides that need arguments."""
    trace = _trace_draws(guide, num_samples, x)
    return {name: trace.nodes[name]["value"] for name in trace.stochastic_nodes}


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


@dataclass
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


Posterior: TypeAlias = nn.Module | ExactPosterior | Draws | MCMC | Mapping[str, Tensor]


def as_guide(posterior: Posterior, dtype: torch.dtype | None = None) -> nn.Module | None:
    """The guide of a posterior, or None if it is a set of samples.

    With a `dtype`, a guide of this library is copied to it; other guides stay as they are.
    """
    guide = posterior.guide if isinstance(posterior, ExactPosterior) else posterior
    if isinstance(guide, GaussianGuide) and dtype is not None:
        with pyro_lock:  # a guide that is running cannot be copied
            return copy.deepcopy(guide).to(dtype)
    return guide if isinstance(guide, nn.Module) else None


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
    if isinstance(posterior, Draws):
        return posterior
    guide = as_guide(posterior, torch.float64)
    if guide is not None:
        check_guide(model, guide, same_dtype=False)
        check_integer("num_samples", num_samples, minimum=1)
        check_integer("num_chains", num_chains, minimum=1)
        with explaining(model, guide=guide), evaluating(model, guide), seeded(seed):
            first_row = None if x is None else take(x, slice(1))
            trace = _trace_draws(guide, num_samples * num_chains, first_row)
            return _from_trace(model, trace, num_samples, num_chains)
    if isinstance(posterior, MCMC):
        posterior = posterior.get_samples(group_by_chain=True)
    if isinstance(posterior, Mapping):
        return Draws(_checked_samples(model, posterior))
    raise TypeError(
        "`posterior` must be a guide, an exact posterior, an MCMC run or a dictionary of samples; "
        f"got {type(posterior).__name__}."
    )


def _from_trace(model: DAK, trace: poutine.Trace, num_samples: int, num_chains: int) -> Draws:
    """The draws of a guide and their log densities."""
    S, batch = num_samples * num_chains, (num_chains, num_samples)
    check_draws(model, {n: trace.nodes[n]["value"] for n in trace.stochastic_nodes})
    trace.compute_log_prob()
    log_probs = [trace.nodes[name]["log_prob"].double() for name in trace.stochastic_nodes]
    log_q = torch.stack([log_prob.expand(S, 1) for log_prob in log_probs]).sum(0)
    sites = {
        name: trace.nodes[name]["value"].double().expand(S, 1, *shape).reshape(*batch, *shape)
        for name, shape in model.site_shapes.items()
    }
    for name, value in sites.items():  # squares of draws are finite too, or densities are not
        check_finite(f"draws of {name}", value.square())
    return Draws(sites, log_q.reshape(batch))


def _checked_samples(model: DAK, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Samples of all sites as `(chains, draws, *event)`, without a data dimension of size one."""
    shapes: dict[str, tuple[int, ...]] = {n: tuple(s) for n, s in model.site_shapes.items()}
    for name in samples:
        check_floating(f"samples[{name!r}]", samples[name])
        check_has_values(f"samples[{name!r}]", samples[name])
        check_finite(f"samples[{name!r}]", samples[name])
    missing = [name for name in shapes if name not in samples]
    if missing:
        raise ValueError(f"`samples` must hold every site of the model; {missing} are missing.")
    num_batch = samples["mu"].dim() - 1
    extra = {n: tuple(samples[n].shape[num_batch:]) for n in _EXTRA_SITES if n in samples}
    checked = {}
    for name, shape in {**shapes, **extra}.items():
        value = samples[name].detach().double()
        batch = value.shape[: value.dim() - len(shape)]
        if tuple(value.shape[len(batch) :]) != shape or len(batch) not in (1, 2):
            raise ValueError(
                f"`samples[{name!r}]` must have shape (draws, {', '.join(map(str, shape))}), or "
                f"with chains in front; got {tuple(value.shape)}."
            )
        if len(batch) == 2 and batch[1] == 1 and batch[0] > 1:  # (S, 1, *event), as guides give
            value = value.transpose(0, 1)
        checked[name] = value if len(batch) == 2 else value.unsqueeze(0)
    num_draws = {name: tuple(value.shape[:2]) for name, value in checked.items()}
    if len(set(num_draws.values())) > 1 or 0 in num_draws["mu"]:
        raise ValueError(
            "`samples` must hold as many draws of every site, at least one; got (chains, draws) "
            f"of {num_draws}."
        )
    return checked
