"""Any posterior as draws: of the weights, of f, of y, and their log densities, in float64.

A posterior is a guide of this library or of Pyro, the exact posterior, an MCMC run of this library
or of Pyro, or a dictionary of samples. Beside the sites of the model, draws may have `noise_scale`
and `unit_scale`, where these were sampled too.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from pyro.infer import MCMC
from torch import Tensor, nn

from pyro_dak.guides import GaussianGuide
from pyro_dak.likelihoods import Likelihood
from pyro_dak.model import DAK, evaluating
from pyro_dak.posterior import ExactPosterior
from pyro_dak.prediction import trace_draws
from pyro_dak.validation import check_finite, check_integer

__all__ = [
    "EXTRA_SITES",
    "Draws",
    "Posterior",
    "as_guide",
    "cached_inputs",
    "checked_data",
    "draw_functions",
    "draw_posterior",
    "log_joint",
    "log_likelihood",
    "log_prior",
    "predictive_draws",
    "with_noise",
]

# Sites that are parameters of the model, and are sampled only if asked for.
EXTRA_SITES = ("noise_scale", "unit_scale")

_CHUNK_ELEMENTS = 4_000_000


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

    def flat(self) -> dict[str, Tensor]:
        """All chains in a row, each site `(S, *event)`."""
        return {name: value.flatten(0, 1) for name, value in self.sites.items()}


Posterior: TypeAlias = nn.Module | ExactPosterior | Draws | MCMC | Mapping[str, Tensor]


def as_guide(posterior: Posterior) -> nn.Module | None:
    """The guide that the posterior is, or None if it is a set of samples."""
    if isinstance(posterior, ExactPosterior):
        return posterior.guide
    return posterior if isinstance(posterior, nn.Module) else None


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
    guide = as_guide(posterior)
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
    if isinstance(guide, GaussianGuide):
        guide = copy.deepcopy(guide).double()
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
            raise ValueError(f"The guide has no site `{name}`; the model has {[*model.site_shapes]}.")
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


def checked_data(model: DAK, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x and targets as the likelihood wants them, or an error: same length, finite, in range."""
    y = model.likelihood.check_targets(y, model.num_outputs)
    check_finite("x", x)
    model.likelihood.check_values(y, model.num_outputs)
    if len(x) != len(y) or len(y) == 0:
        raise ValueError(
            f"`x` and `y` must have the same, positive length; got {len(x)}, {len(y)}."
        )
    return x, y.double() if y.is_floating_point() else y


@torch.no_grad()
def cached_inputs(model: DAK, x: Tensor, chunk_size: int = 4096) -> Tensor:
    """Unit inputs of x in eval mode, once, `(N, P)`, float64."""
    with evaluating(model):
        device = model.layer.log_unit_scale.device
        chunks = [model.unit_inputs(part.to(device)) for part in x.split(chunk_size)]
    return torch.cat(chunks).double()


@torch.no_grad()
def draw_functions(model: DAK, h: Tensor, sites: Mapping[str, Tensor]) -> Tensor:
    """f at unit inputs h for draws of the sites `(S, *event)`, `(S, N, F)`."""
    values = {name: sites[name].unsqueeze(1) for name in model.site_shapes}
    if "unit_scale" in sites:  # a factor of the scale that the model has
        ratio = (sites["unit_scale"] / model.unit_scale).unsqueeze(1)
        values["shrinkage"] = ratio * values.get("shrinkage", 1.0)
    return model.functions(h, values)


class _GivenNoise(nn.Module):
    """Stands for the noise of a likelihood; `log_scale` broadcasts against f."""

    def __init__(self, log_scale: Tensor):
        super().__init__()
        self.log_scale = log_scale

    def forward(self) -> Tensor:
        return self.log_scale.exp()


def with_noise(likelihood: Likelihood, noise_scale: Tensor | None = None) -> Likelihood:
    """A copy of the likelihood in float64, with `noise_scale` in the place of its own.

    Args:
        likelihood: with a noise scale, if one is given.
        noise_scale: a scalar or anything that broadcasts against f, `(..., N, C)`.
    """
    likelihood = copy.deepcopy(likelihood).double().requires_grad_(False)
    if noise_scale is not None:
        if not hasattr(likelihood, "noise"):
            raise ValueError(f"{type(likelihood).__name__} has no noise scale to be sampled.")
        likelihood.noise = _GivenNoise(noise_scale.log())
    return likelihood


def _chunked_distributions(model: DAK, h: Tensor, sites: Mapping[str, Tensor]) -> Iterator[Any]:
    """p(y | f) for some draws at a time, so that no more than a few million f are held."""
    size = max(1, _CHUNK_ELEMENTS // (len(h) * model.num_functions))
    S = len(sites["mu"])
    for start in range(0, S, size):
        part = {name: value[start : start + size] for name, value in sites.items()}
        noise = part.get("noise_scale")
        if noise is not None:
            noise = noise.reshape(len(noise), 1, -1)
        yield with_noise(model.likelihood, noise).distribution(draw_functions(model, h, part))


@torch.no_grad()
def log_likelihood(model: DAK, h: Tensor, y: Tensor, sites: Mapping[str, Tensor]) -> Tensor:
    """log p(y_n | w_s), `(S, N)`, summed over outputs, for draws of the sites `(S, *event)`."""
    return torch.cat([p.log_prob(y) for p in _chunked_distributions(model, h, sites)])


@torch.no_grad()
def predictive_draws(model: DAK, h: Tensor, sites: Mapping[str, Tensor]) -> Tensor:
    """One y for each draw of the sites, `(S, N, C)`, or `(S, N)` for labels."""
    return torch.cat([p.sample() for p in _chunked_distributions(model, h, sites)])


@torch.no_grad()
def log_prior(model: DAK, sites: Mapping[str, Tensor]) -> Tensor:
    """log p(w) of draws of the model's sites `(S, *event)`, `(S,)`."""
    like = sites["mu"]
    parts = [
        model.conditional_prior(name, sites, like).log_prob(sites[name])
        for name in model.site_shapes
    ]
    return torch.stack(parts).sum(0)


def log_joint(model: DAK, h: Tensor, y: Tensor, sites: Mapping[str, Tensor]) -> Tensor:
    """log p(y, w) of draws of the model's sites, `(S,)`, for the whole data set."""
    return log_prior(model, sites) + log_likelihood(model, h, y, sites).sum(-1)
