"""Log densities of draws, and what draws say about f and y, in float64 on cached unit inputs."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from pyro.distributions import Categorical
from torch import Tensor, nn

from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.inference.draws import Draws, Posterior, as_guide, has_closed_form
from pyro_dak.inference.guides import GaussianGuide
from pyro_dak.model.dak import DAK
from pyro_dak.model.likelihoods import GaussianLikelihood, Likelihood
from pyro_dak.model.modes import evaluating
from pyro_dak.validation import check_finite

__all__ = [
    "Response",
    "cached_inputs",
    "checked_data",
    "draw_functions",
    "exact_moments",
    "log_joint",
    "log_likelihood",
    "log_prior",
    "noise_scale",
    "predictive_draws",
    "response",
    "with_noise",
]

_CHUNK_ELEMENTS = 4_000_000


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


def noise_scale(likelihood: Likelihood) -> Tensor | None:
    """The noise scale of a likelihood in float64, a scalar or `(C,)`, or None if it has none."""
    noise: Any = getattr(likelihood, "noise", None)
    return None if noise is None else noise.log_scale.detach().double().exp()


class _GivenNoise(nn.Module):
    """Stands for the noise of a likelihood; `log_scale` broadcasts against f."""

    def __init__(self, log_scale: Tensor):
        super().__init__()
        self.log_scale = log_scale

    def forward(self) -> Tensor:
        return self.log_scale.exp()


def with_noise(likelihood: Likelihood, noise: Tensor | None = None) -> Likelihood:
    """A copy of the likelihood in float64, with `noise` in the place of its own scale.

    Args:
        likelihood: with a noise scale, if one is given.
        noise: a scalar or anything that broadcasts against f, `(..., N, C)`.
    """
    likelihood = copy.deepcopy(likelihood).double().requires_grad_(False)
    if noise is not None:
        likelihood.noise = _GivenNoise(noise.log())
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


def exact_moments(model: DAK, guide: GaussianGuide, h: Tensor) -> FunctionMoments:
    """q(f) at unit inputs h, with the layer in float64 as the guide and h are."""
    return guide.moments(copy.deepcopy(model.layer).double(), h)


class Response(NamedTuple):
    """E[y | f] over a posterior: its mean and standard deviation, and the mean of Var[y | f].

    All `(N, C)`. E[y | f] is f for a regression and the probabilities for classes.
    """

    mean: Tensor
    sd: Tensor
    noise_var: Tensor


@torch.no_grad()
def response(model: DAK, posterior: Posterior, h: Tensor, draws: Draws) -> Response:
    """The response at unit inputs h, `(N, P)`.

    In closed form for Gaussian noise and a Gaussian guide, else over the draws, whose chunks are
    joined by the parallel formula of the sum of squares, which does not cancel.
    """
    guide = as_guide(posterior, torch.float64)
    if isinstance(model.likelihood, GaussianLikelihood) and has_closed_form(guide, model):
        moments = exact_moments(model, guide, h)
        noise_var = model.likelihood.noise_scale.double().square().expand(moments.mean.shape)
        return Response(moments.mean, moments.var.sqrt(), noise_var)
    count, mean, squares, noise_var = 0, h.new_zeros(()), h.new_zeros(()), h.new_zeros(())
    for p in _chunked_distributions(model, h, draws.flat()):
        values, variances = p.mean, p.variance
        if isinstance(p, Categorical):
            values, variances = p.probs, p.probs * (1 - p.probs)
        n, part = len(values), values.mean(0)
        shift, weight = part - mean, n / (count + n)
        squares = squares + (values - part).square().sum(0) + shift.square() * count * weight
        mean = mean + shift * weight
        noise_var = noise_var + (variances.mean(0) - noise_var) * weight
        count += n
    return Response(mean, (squares / max(count - 1, 1)).sqrt(), noise_var)


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
