"""Any posterior as draws of the weights, in float64.

A posterior is a guide of this library or of Pyro, the exact posterior, an MCMC run of this library
or of Pyro, or a dictionary of samples. Beside the sites of the model, draws may have `noise_scale`
and `unit_scale`, where these were sampled too.
"""

import copy
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeGuard

import pyro
import torch
from pyro import poutine
from pyro.infer import MCMC
from torch import Tensor, nn

from pyro_dak.inference.exact import ExactPosterior
from pyro_dak.inference.guides import GaussianGuide
from pyro_dak.model.dak import DAK
from pyro_dak.model.modes import evaluating
from pyro_dak.validation import check_integer

__all__ = [
    "EXTRA_SITES",
    "Draws",
    "Posterior",
    "as_guide",
    "draw_posterior",
    "draw_sites",
    "has_closed_form",
    "site_labels",
    "trace_draws",
]

# Sites that are parameters of the model, and are sampled only if asked for.
EXTRA_SITES = ("noise_scale", "unit_scale")


def has_closed_form(guide: nn.Module | None, model: DAK) -> TypeGuard[GaussianGuide]:
    """Whether q(f) is known without draws."""
    return isinstance(guide, GaussianGuide) and guide.has_closed_form


def draw_sites(guide: nn.Module, num_samples: int, x: Tensor | None = None) -> dict[str, Tensor]:
    """Draws of all sites from a guide, each `(S, 1, *event)`.

    Args:
        guide: any guide whose sites do not depend on the inputs.
        num_samples: S.
        x: inputs, for guides that ask for arguments.
    """
    trace = trace_draws(guide, num_samples, x)
    sites = {
        name: site["value"]
        for name, site in trace.nodes.items()
        if site["type"] == "sample" and not site["is_observed"]
    }
    return {name: value for name, value in sites.items() if value.dim() and name != "draws"}


def trace_draws(guide: nn.Module, num_samples: int, x: Tensor | None = None) -> poutine.Trace:
    """A trace of the guide in a plate of draws, the second dimension from the right."""
    arguments = () if isinstance(guide, GaussianGuide) or x is None else (x, None)
    with pyro.plate("draws", num_samples, dim=-2):
        return poutine.trace(guide).get_trace(*arguments)


@dataclass
class Draws:
    """Draws of the sites, each `(chains, draws, *event)`, in float64.

    `log_q` is the log density of a guide at its draws, `(chains, draws)`; `stats` holds what a
    sampler says about each draw, likewise.
    """

    sites: dict[str, Tensor]
    log_q: Tensor | None = None
    stats: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_chains(self) -> int:
        """Number of chains."""
        return next(iter(self.sites.values())).shape[0]

    @property
    def num_samples(self) -> int:
        """Draws per chain."""
        return next(iter(self.sites.values())).shape[1]

    @property
    def is_point(self) -> bool:
        """Whether all draws are the same, as those of a point estimate are."""
        return all(bool((v == v[:1, :1]).all()) for v in self.sites.values())

    def flat(self) -> dict[str, Tensor]:
        """All chains in a row, each site `(S, *event)`."""
        return {name: value.flatten(0, 1) for name, value in self.sites.items()}


Posterior: TypeAlias = nn.Module | ExactPosterior | Draws | MCMC | Mapping[str, Tensor]


def as_guide(posterior: Posterior, dtype: torch.dtype | None = None) -> nn.Module | None:
    """The guide that the posterior is, or None if it is a set of samples.

    With a `dtype`, a guide of this library is copied to it; others stay as they are.
    """
    guide = posterior.guide if isinstance(posterior, ExactPosterior) else posterior
    if isinstance(guide, GaussianGuide) and dtype is not None:
        return copy.deepcopy(guide).to(dtype)
    return guide if isinstance(guide, nn.Module) else None


def site_labels(model: DAK, names: Iterable[str] | None = None) -> list[str]:
    """A label for every element of every site, "z[0,1,2]", in the order of the sites."""
    labels = []
    for name in model.site_shapes if names is None else names:
        ranges = [range(n) for n in model.site_shapes[name]]
        indices = [",".join(map(str, index)) for index in itertools.product(*ranges)]
        labels += [f"{name}[{index}]" if index else name for index in indices]
    return labels


@torch.no_grad()
def draw_posterior(
    model: DAK,
    posterior: Posterior,
    *,
    num_samples: int = 1000,
    num_chains: int = 1,
    x: Tensor | None = None,
    seed: int | None = None,
) -> Draws:
    """Draws of a posterior.

    Args:
        model: the model.
        posterior: see the module.
        num_samples: draws per chain from a guide; samples are returned as they are.
        num_chains: draws of a guide are independent and may be laid out as several chains.
        x: inputs, for guides that ask for arguments.
        seed: of the draws from a guide; by default from torch's global state.
    """
    if isinstance(posterior, Draws):
        return posterior
    guide = as_guide(posterior, torch.float64)
    if guide is not None:
        check_integer("num_samples", num_samples, minimum=1)
        check_integer("num_chains", num_chains, minimum=1)
        return _draw_guide(model, guide, num_samples, num_chains, x, seed)
    if isinstance(posterior, MCMC):
        posterior = posterior.get_samples(group_by_chain=True)
    if isinstance(posterior, Mapping):
        return Draws(_checked_samples(model, posterior))
    raise TypeError(
        "`posterior` must be a guide, an exact posterior, an MCMC run or a dictionary of samples; "
        f"got {type(posterior).__name__}."
    )


def _draw_guide(
    model: DAK,
    guide: nn.Module,
    num_samples: int,
    num_chains: int,
    x: Tensor | None,
    seed: int | None,
) -> Draws:
    """Independent draws and their log densities; those of our own guides in float64."""
    S = num_samples * num_chains
    with evaluating(model, guide), torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        trace = trace_draws(guide, S, None if x is None else x[:1])
        trace.compute_log_prob()
    log_q = torch.zeros(S, dtype=torch.float64)
    for site in trace.nodes.values():
        if site["type"] == "sample" and not site["is_observed"] and site["log_prob"].dim() >= 2:
            log_q = log_q.to(site["log_prob"].device)
            log_q = log_q + site["log_prob"].double().expand(S, 1).sum(-1)
    sites = {}
    for name, shape in model.site_shapes.items():
        if name not in trace.nodes:
            raise ValueError(
                f"The guide has no site `{name}`; the model has {[*model.site_shapes]}."
            )
        value = trace.nodes[name]["value"].double().expand(S, 1, *shape)
        sites[name] = value.reshape(num_chains, num_samples, *shape)
    return Draws(sites, log_q.reshape(num_chains, num_samples))


def _checked_samples(model: DAK, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Samples of all sites as `(chains, draws, *event)`; a data dimension of size one goes."""
    shapes: dict[str, tuple[int, ...]] = {n: tuple(s) for n, s in model.site_shapes.items()}
    missing = [name for name in shapes if name not in samples]
    if missing:
        raise ValueError(f"`samples` must hold every site of the model; {missing} are missing.")
    num_batch = samples["mu"].dim() - 1
    extra = {n: tuple(samples[n].shape[num_batch:]) for n in EXTRA_SITES if n in samples}
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
    return checked
