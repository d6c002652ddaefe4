"""Log densities of draws of the weights, and draws of y given them.

All functions work in float64, on unit inputs h `(N, P)` that are computed once. Draws of the sites
are dictionaries with values `(S, *event)`.
"""

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from pyro_dak.model.dak import DAK
from pyro_dak.model.explaining import explaining
from pyro_dak.model.inputs import check_inputs, check_model
from pyro_dak.model.latent_sites import known_sites, likelihood_sites
from pyro_dak.model.likelihoods import Likelihood
from pyro_dak.model.missing import is_observed
from pyro_dak.model.modes import evaluating, local_parameters, pyro_lock
from pyro_dak.model.rows import Inputs, check_parts, num_rows, split, to_device
from pyro_dak.validation import check_finite, check_seed

__all__ = [
    "cached_inputs",
    "checked_data",
    "draw_functions",
    "likelihood_parameters",
    "likelihoods_of_draws",
    "log_joint",
    "log_likelihood",
    "log_prior",
    "noise_scale",
    "predictive_draws",
    "seeded",
    "unit_data",
    "with_noise",
]

_CHUNK_ELEMENTS = 4_000_000


def checked_data(model: DAK, x: Inputs, y: Tensor) -> tuple[Inputs, Tensor]:
    """x, and the targets in the form of the likelihood, in float64 unless they are labels."""
    check_model(model)
    check_parts("x", x)
    y = model.likelihood.check_targets(y, model.num_outputs)
    if num_rows(x) != len(y) or len(y) == 0:
        raise ValueError(
            f"`x` and `y` must have the same, positive length; got {num_rows(x)}, {len(y)}."
        )
    check_inputs(model, x)
    observed = is_observed(model.likelihood, y)
    if observed is not None and not bool(observed.all()):
        raise NotImplementedError(
            "Missing targets are for `fit` and the objectives. Leave out the rows that have some."
        )
    model.likelihood.check_values(y, model.num_outputs)
    return x, y.double() if y.is_floating_point() else y


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """A context in which torch draws from the seed, if one is given; its state comes back after.

    Threads that seed wait for each other.
    """
    check_seed("seed", seed)
    if seed is None:
        yield
        return
    with pyro_lock, torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@torch.no_grad()
def cached_inputs(
    model: DAK, x: Inputs, chunk_size: int = 4096, given: Collection[str] = ()
) -> Tensor:
    """The unit inputs of x in eval mode, `(N, P)`, float64.

    A model that samples other sites than its weights is refused, unless they are `given`.
    """
    check_inputs(model, x)
    with explaining(model, x), evaluating(model), known_sites(model, given=given):
        device = model.layer.log_unit_scale.device
        chunks = [model.unit_inputs(to_device(part, device)) for part in split(x, chunk_size)]
        h = torch.cat(chunks).double()
        check_finite("unit_inputs", h)
    return h


def unit_data(
    model: DAK, x: Inputs, y: Tensor, given: Collection[str] = ()
) -> tuple[Tensor, Tensor]:
    """Unit inputs and targets, checked by `checked_data`, in float64 on the model's device.

    Draws of the sites in `given` are known.
    """
    x, y = checked_data(model, x, y)
    h = cached_inputs(model, x, given=given)
    return h, y.to(h.device)


def draw_functions(model: DAK, h: Tensor, sites: Mapping[str, Tensor]) -> Tensor:
    """f at unit inputs h for each draw of the sites, `(S, N, F)`.

    Draws are `(S, *event)`, or with a data dimension of size one `(S, 1, *event)`.
    """
    return model.functions(h, _with_data_dim(sites))


def _with_data_dim(sites: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Draws `(S, 1, *event)`, as a program has them, from those or from `(S, *event)`."""
    has_data_dim = sites["mu"].dim() > 2
    return {n: value if has_data_dim else value.unsqueeze(1) for n, value in sites.items()}


def likelihood_parameters(model: DAK, sites: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `distribution` of the likelihood takes beside f, from draws of all sites `(S, *event)`.

    These are the sites that the likelihood gives to `distribution`, without those that only their
    priors know, and a noise scale that was sampled without being one. They broadcast against f
    `(S, N, F)`: numbers are `(S, 1, 1)`, vectors `(S, 1, C)`.
    """
    known = getattr(model.likelihood, "parameter_priors", None)
    own = likelihood_sites(model) if known is None else known
    names = dict.fromkeys(("noise_scale", *own))
    return {n: sites[n].reshape(len(sites[n]), 1, -1) for n in names if n in sites}


def noise_scale(likelihood: Likelihood) -> Tensor | None:
    """The noise scale of a likelihood in float64, a scalar or `(C,)`, or None if it has none."""
    noise: Any = getattr(likelihood, "noise", None)
    return None if noise is None else noise.log_scale.detach().double().exp()


def with_noise(likelihood: Likelihood, noise: Tensor | None = None) -> Likelihood:
    """A copy of the likelihood in float64, with `noise` in the place of the scale that it has.

    The noise broadcasts against f, `(..., N, C)`.
    """
    likelihood = copy.deepcopy(likelihood).double().requires_grad_(False)
    return likelihood if noise is None else likelihood.with_noise(noise.log())


@torch.no_grad()
def likelihoods_of_draws(model: DAK, h: Tensor, sites: Mapping[str, Tensor]) -> Iterator[Any]:
    """p(y | f) at unit inputs h, for a chunk of the draws at a time.

    A chunk has at most a few million values of f, so that memory stays small.
    """
    size = max(1, _CHUNK_ELEMENTS // (len(h) * model.num_functions))
    for start in range(0, len(sites["mu"]), size):
        part = {name: value[start : start + size] for name, value in sites.items()}
        parameters = likelihood_parameters(model, part)
        f = draw_functions(model, h, part)
        yield with_noise(model.likelihood).distribution(f, **parameters)


@torch.no_grad()
def log_likelihood(model: DAK, h: Tensor, y: Tensor, sites: Mapping[str, Tensor]) -> Tensor:
    """log p(y_n | w_s), `(S, N)`, summed over outputs."""
    return torch.cat([p.log_prob(y) for p in likelihoods_of_draws(model, h, sites)])


@torch.no_grad()
def predictive_draws(
    model: DAK, h: Tensor, sites: Mapping[str, Tensor], seed: int | None = None
) -> Tensor:
    """One y for each draw of the sites, `(S, N, C)`, or `(S, N)` for labels."""
    with seeded(seed):
        return torch.cat([p.sample() for p in likelihoods_of_draws(model, h, sites)])


@torch.no_grad()
def log_prior(model: DAK, sites: Mapping[str, Tensor]) -> Tensor:
    """log p(w_s), `(S,)`, summed over the sites of the model.

    Sites inside priors and of the likelihood are among them: the program is run on the draws.
    """
    for name, inside in model.sites_in_priors.items():
        if any(site not in sites for site in inside):
            model.prior_distribution(name, sites["mu"])  # raises, and names the site

    def program() -> None:
        model.sample_weights(sites["mu"])
        model.likelihood.sample_parameters()

    given = poutine.condition(program, data=_with_data_dim(sites))
    with pyro_lock, poutine.block(), local_parameters(model):
        trace = poutine.trace(given).get_trace()
        trace.compute_log_prob()
    nodes = [trace.nodes[name] for name in trace.observation_nodes]
    return torch.stack([node["log_prob"].double() for node in nodes]).sum(0).squeeze(-1)


def log_joint(model: DAK, h: Tensor, y: Tensor, sites: Mapping[str, Tensor]) -> Tensor:
    """log p(y, w_s), `(S,)`, summed over all rows."""
    return log_prior(model, sites) + log_likelihood(model, h, y, sites).sum(-1)
