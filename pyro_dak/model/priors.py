"""Priors as data: what the weights are before they have seen anything.

`DAK(prior={"z": StudentTPrior(df=4), "mu": NormalPrior(scale=3)})` names a prior for some sites;
the others keep N(0, 1). A value is one of the classes here, a Pyro distribution with the site's
shape, or a function from the shape to a distribution.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, TypeGuard

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine import runtime
from torch import Tensor

from pyro_dak.model.modes import pyro_lock
from pyro_dak.validation import check_choice, check_kind, check_positive, check_real

__all__ = [
    "GammaScalePrior",
    "HorseshoePrior",
    "LaplacePrior",
    "LogNormalPrior",
    "NormalPrior",
    "Prior",
    "PriorLike",
    "StudentTPrior",
    "check_positive_prior",
    "is_prior",
    "resolve_priors",
    "sample_scale",
    "scale_shape",
    "site_prior",
    "sites_inside",
]


# Of a function that samples sites of its own.
_HOW = (
    " Sites that it samples, such as `tau`, have draws in front under vectorised particles: write "
    "`tau[..., None, None, None]`, with as many None as the shape has dimensions, and leave "
    "`.expand` and `.to_event` out."
)


@dataclass(frozen=True)
class Prior(ABC):
    """The same distribution for every element of a site."""

    @abstractmethod
    def element(self, like: Tensor) -> dist.Distribution:
        """The distribution of one element, in the dtype and on the device of `like`."""


@dataclass(frozen=True)
class _CheckedPrior(Prior):
    """The priors of this file, all of whose numbers but `loc` are positive."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor) and value.dim() > 0:
                raise TypeError(
                    f"`{field.name}` of {type(self).__name__} is one number for all elements of a "
                    f"site; got shape {tuple(value.shape)}. For one number each, give a "
                    "distribution, such as pyro.distributions.Normal(0.0, scales)."
                )
            check_fn = check_real if field.name == "loc" else check_positive
            check_fn(field.name, value)


PriorLike: TypeAlias = (
    Prior
    | torch.distributions.Distribution
    | Callable[[torch.Size], torch.distributions.Distribution]
)


@dataclass(frozen=True)
class NormalPrior(_CheckedPrior):
    """N(loc, scale^2)."""

    loc: float = 0.0
    scale: float = 1.0

    def element(self, like: Tensor) -> dist.Distribution:
        return dist.Normal(like.new_tensor(self.loc), like.new_tensor(self.scale))


@dataclass(frozen=True)
class LaplacePrior(_CheckedPrior):
    """Laplace with standard deviation `scale`: sparse weights."""

    scale: float = 1.0

    def element(self, like: Tensor) -> dist.Distribution:
        return dist.Laplace(like.new_tensor(0.0), like.new_tensor(self.scale / 2**0.5))


@dataclass(frozen=True)
class StudentTPrior(_CheckedPrior):
    """Student-t with `df` degrees of freedom: occasional large weights."""

    df: float = 4.0
    scale: float = 1.0

    def element(self, like: Tensor) -> dist.Distribution:
        return dist.StudentT(like.new_tensor(self.df), like.new_tensor(0.0), self.scale)


@dataclass(frozen=True)
class HorseshoePrior(_CheckedPrior):
    """Horseshoe over the scales of the units, for the site "shrinkage" only.

    shrinkage_p ~ HalfCauchy(global_shrinkage), global_shrinkage ~ HalfCauchy(global_scale): most
    units are switched off, a few are free (two sites).
    """

    global_scale: float = 1.0

    def element(self, like: Tensor) -> dist.Distribution:
        return dist.HalfCauchy(like.new_tensor(self.global_scale))


@dataclass(frozen=True)
class GammaScalePrior(_CheckedPrior):
    """Automatic relevance: shrinkage_p ~ Gamma(concentration, rate), for the site "shrinkage"."""

    concentration: float = 1.0
    rate: float = 1.0

    def element(self, like: Tensor) -> dist.Distribution:
        return dist.Gamma(like.new_tensor(self.concentration), like.new_tensor(self.rate))


@dataclass(frozen=True)
class LogNormalPrior(_CheckedPrior):
    """exp of N(loc, scale^2), for positive hyper-parameters: scales, noise, lengthscales."""

    loc: float = 0.0
    scale: float = 1.0

    def element(self, like: Tensor) -> dist.Distribution:
        return dist.LogNormal(like.new_tensor(self.loc), like.new_tensor(self.scale))


def resolve_priors(
    prior: Mapping[str, PriorLike] | None,
    shapes: Mapping[str, torch.Size],
    scale_shapes: Mapping[str, torch.Size] | None = None,
) -> dict[str, Any]:
    """A prior for every site, from the given ones and N(0, 1) for the rest.

    Args:
        prior: priors by site.
        shapes: event shapes of the weights.
        scale_shapes: event shapes of positive hyper-parameters, each of which has a prior.

    Raises:
        ValueError: for an unknown site, or a distribution of another shape than its site.
    """
    given, scale_shapes = dict(prior or {}), scale_shapes or {}
    for name in given:
        check_choice("prior", name, {*shapes, *scale_shapes, "shrinkage", "unit_scale"})
    if isinstance(given.get("shrinkage"), HorseshoePrior):
        given["global_shrinkage"] = given["shrinkage"]
    resolved = {name: given.get(name, NormalPrior()) for name in shapes}
    for name, value in resolved.items():
        is_for_scales = isinstance(value, HorseshoePrior | GammaScalePrior | LogNormalPrior)
        is_misplaced = is_for_scales != (name in ("shrinkage", "global_shrinkage"))
        if is_misplaced and isinstance(value, Prior):
            raise ValueError(
                f"{type(value).__name__} is not a prior for the site `{name}`: HorseshoePrior, "
                'GammaScalePrior and LogNormalPrior are for "shrinkage", the others for weights.'
            )
        site_prior(name, value, shapes[name], torch.zeros((), device="cpu"))
    scales = {name: given[name] for name in scale_shapes}
    for name, value in scales.items():
        check_positive_prior(f"prior[{name!r}]", value, scale_shapes[name])
    return resolved | scales


def check_positive_prior(label: str, value: PriorLike, shape: torch.Size) -> None:
    """Raise unless a prior is one of positive numbers, for a site with this event shape."""
    with pyro_lock, torch.random.fork_rng(devices=[]), poutine.block():
        prior = site_prior(label, value, shape, torch.zeros((), device="cpu"))
    minus_one = torch.full(shape, -1.0, device="cpu")
    if bool(prior.support.check(minus_one).any()):
        raise ValueError(
            f"`{label}` must be a prior of positive numbers, such as "
            f"pyro.distributions.LogNormal(0.0, 1.0); got {type(value).__name__}, which allows "
            "negative ones."
        )


def is_prior(value: object) -> TypeGuard[PriorLike]:
    """Whether a value stands for a distribution, and not for a number or a tensor."""
    return isinstance(value, Prior | torch.distributions.Distribution) or callable(value)


def scale_shape(value: PriorLike) -> torch.Size:
    """The shape of a parameter with this prior: that of a distribution, a number for the rest."""
    if isinstance(value, torch.distributions.Distribution):
        return value.batch_shape + value.event_shape
    return torch.Size()


def sample_scale(name: str, value: PriorLike, like: Tensor) -> Tensor:
    """Sample a parameter of a likelihood; a number gets a dimension for the outputs, `(..., 1)`."""
    shape = scale_shape(value)
    sampled = pyro.sample(name, site_prior(name, value, shape, like, is_batched=True))
    return sampled if shape else sampled.unsqueeze(-1)


def sites_inside(value: PriorLike, shape: torch.Size) -> list[str]:
    """Names of the sites that a function of the shape samples on its way to a distribution."""
    if isinstance(value, Prior | torch.distributions.Distribution):
        return []
    with pyro_lock, torch.random.fork_rng(devices=[]), poutine.block():
        with poutine.trace() as capture:
            value(shape)
    return list(capture.trace.stochastic_nodes)


def site_prior(
    name: str, value: PriorLike, shape: torch.Size, like: Tensor, is_batched: bool = False
) -> dist.Distribution:
    """The distribution of a site with event shape `shape`.

    A scalar distribution is expanded, one with the right batch shape is turned into an event. The
    result of a function is expanded to `shape` in any way that broadcasts. With `is_batched` it may
    have draws in front, as it has under vectorised particles if it samples inside.
    """
    is_function = not isinstance(value, torch.distributions.Distribution)
    if isinstance(value, Prior):
        return value.element(like).expand(shape).to_event(len(shape))
    if not isinstance(value, torch.distributions.Distribution):
        if not callable(value):
            raise TypeError(
                f"`prior[{name!r}]` must be a Prior, a distribution or a function of the shape; "
                f"got {type(value).__name__}."
            )
        try:
            value = value(shape)
        except (AttributeError, LookupError, RuntimeError, TypeError) as error:
            raise TypeError(
                f"`prior[{name!r}]` must be a Prior, a distribution or a function of the shape; "
                f"called with {tuple(shape)}, it says: {error}{_HOW if is_batched else ''}"
            ) from error
        check_kind(f"prior[{name!r}]", value, torch.distributions.Distribution, "a distribution")
    if value.event_shape == shape and value.batch_shape == ():
        return value if isinstance(value, dist.Distribution) else dist.Independent(value, 0)
    if value.batch_shape + value.event_shape == shape:
        return dist.Independent(value, len(value.batch_shape))
    if value.batch_shape + value.event_shape == ():
        return dist.Independent(value.expand(shape), len(shape))
    if is_function and (expanded := _expanded(value, shape, is_batched)) is not None:
        return expanded
    raise ValueError(
        f"`prior[{name!r}]` must have event shape {tuple(shape)}, the shape of the site; got batch "
        f"{tuple(value.batch_shape)} and event {tuple(value.event_shape)}. Use `.expand` and "
        f"`.to_event`, or pass a function of the shape.{_HOW if is_batched else ''}"
    )


def _expanded(value: Any, shape: torch.Size, is_batched: bool) -> dist.Distribution | None:
    """A distribution with its elements expanded to `(..., *shape)`, or None if they do not fit."""
    full, n = value.batch_shape + value.event_shape, len(shape)
    batch, own = full[: max(len(full) - n, 0)], full[max(len(full) - n, 0) :]
    fits = all(
        size in (1, want) for size, want in zip(reversed(own), reversed(shape), strict=False)
    )
    num_events = len(value.event_shape)
    if not fits or own[len(own) - num_events :] != shape[n - num_events :]:
        return None
    if batch and not is_batched:
        return None
    # Under plates, what the function has sampled has their dimensions: all in front, or none.
    depth = max((-f.dim for f in runtime.get_plates() if f.dim is not None), default=0)
    is_whole = own == shape or all(size == 1 for size in own)
    if (
        is_batched
        and depth
        and full
        and len(full) != n + depth
        and not (len(full) == n and is_whole)
    ):
        return None
    elements = value.expand((*batch, *shape[: n - num_events]))
    return dist.Independent(elements, n - num_events)
