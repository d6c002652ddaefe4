"""What all Gaussian guides have in common.

Every guide is built eagerly from the sites of a model. It samples `mu`, `linear` and `z` (and a
log-normal for `shrinkage`) as ordinary Pyro sites, and knows its own KL divergence from normal
priors and the exact q(f(x)).
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, pyro_method
from pyro.poutine import runtime
from torch import Tensor, nn
from torch.nn.functional import pad

from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.additive.layer import AdditiveLayer, Weights
from pyro_dak.model.dak import DAK
from pyro_dak.model.handlers import GuidedModel, check_store, latent_sites_of
from pyro_dak.model.modes import local_parameters
from pyro_dak.validation import check_has_values, check_kind, check_not_negative, check_positive

__all__ = [
    "GaussianGuide",
    "NormalParameters",
    "SiteNormals",
    "check_guide",
    "independent_roots",
    "tril",
]

NormalParameters = Mapping[str, tuple[Any, Any]]


class GaussianGuide(PyroModule):
    """q(z, mu, linear) Gaussian, times independent log-normals for the shrinkage sites.

    `has_closed_form` says whether q(f) is known without draws, which shrinkage sites prevent.

    Args:
        model: gives names, shapes, dtype and device of the sites, and nothing else: an
            `AdditiveGP`, a `DAK`, or one of them inside handlers of Pyro such as `poutine.block` or
            `pyro.condition`, whose hidden or given sites are left to others.
        init_scale: initial standard deviation of every weight.
        init_loc_scale: initial means are drawn from N(0, init_loc_scale^2).
    """

    def __init__(self, model: GuidedModel, init_scale: float = 0.1, init_loc_scale: float = 0.1):
        with local_parameters():
            super().__init__()
        gp, self.latent_sites = latent_sites_of(model)
        check_positive("init_scale", init_scale)
        check_not_negative("init_loc_scale", init_loc_scale)
        self.name, self.site_shapes = gp.name, dict(gp.site_shapes)
        like = gp.layer.log_unit_scale
        self._options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        self.init_scale, self.init_loc_scale = float(init_scale), float(init_loc_scale)
        self.weight_sites: list[str] = [n for n in ("mu", "linear", "z") if n in self.site_shapes]
        self.scale_sites = [n for n in self.site_shapes if n not in self.weight_sites]
        self.has_closed_form = not self.scale_sites and self.has_all_sites
        for name in self.scale_sites:
            shape = self.site_shapes[name]
            loc = nn.Parameter(torch.zeros(shape, **self._options))
            self.register_parameter(f"{name}_loc", loc)
            self.register_parameter(f"{name}_log_scale", self.initial_log_scale(*shape))

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Sample every site; arguments are those of the model and are not read."""
        check_store(self)
        values = self.sample_weights()
        for name in self.latent(self.scale_sites):
            q = dist.LogNormal(*self.normal(name)).to_event(len(self.site_shapes[name]))
            values[name] = self.emit(name, q)
        return {self.site_name(name): value for name, value in values.items()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Sample every site; outside of Pyro's handlers its global store is not used."""
        if runtime.am_i_wrapped():
            return super().__call__(*args, **kwargs)
        with local_parameters(self):
            return super().__call__(*args, **kwargs)

    @property
    def has_all_sites(self) -> bool:
        """Whether no site of the model is hidden or conditioned on."""
        return len(self.latent_sites) == len(self.site_shapes)

    def latent(self, names: Iterable[str]) -> list[str]:
        """Those of these sites that the guide has to sample."""
        return [name for name in names if name in self.latent_sites]

    def site_name(self, name: str) -> str:
        """The name that a site has in a program, such as "gp.z" for "z"."""
        return f"{self.name}.{name}" if self.name else name

    def emit(self, name: str, q: dist.Distribution) -> Tensor:
        """Sample a site."""
        return pyro.sample(self.site_name(name), q)

    def normal(self, name: str) -> tuple[Tensor, Tensor]:
        """Means and standard deviations of a site that has parameters of its own."""
        return getattr(self, f"{name}_loc"), getattr(self, f"{name}_log_scale").exp()

    @pyro_method
    def announce_parameters(self) -> None:
        """Emit Pyro's param statements, for `SVI` with objectives that trace nothing."""
        for name in [*self._parameters, *self._modules]:
            getattr(self, name)

    def sample_weights(self) -> dict[str, Tensor]:
        """Emit the sites of the weights."""
        raise NotImplementedError

    def moments(self, layer: AdditiveLayer, h: Tensor) -> FunctionMoments:
        """The exact q(f) at unit inputs h `(N, P)`, for a layer without shrinkage."""
        raise NotImplementedError

    def kl_normal(self, priors: NormalParameters) -> Tensor:
        """KL of the weights from normal priors given as (loc, scale) by site, a scalar."""
        raise NotImplementedError

    def moments_and_kl(
        self, layer: AdditiveLayer, h: Tensor, priors: NormalParameters
    ) -> tuple[FunctionMoments, Tensor]:
        """`moments` and `kl_normal` together, which some guides compute as one operation."""
        return self.moments(layer, h), self.kl_normal(priors)

    def gaussian_bound(
        self,
        layer: AdditiveLayer,
        h: Tensor,
        y: Tensor,
        log_noise: Tensor,
        priors: NormalParameters,
        scale: float,
    ) -> tuple[Tensor, Tensor] | None:
        """`scale` sum_n E_q log p(y_n | f) and `kl_normal`, for a noise alike for all of y.

        The noise has the standard deviation exp(log_noise). None where a guide does not compute
        these as one operation.
        """
        return None

    def weight_means(self) -> Weights:
        """Means of the weights."""
        raise NotImplementedError

    def unit_roots(self) -> tuple[Tensor, Tensor | None]:
        """R with covariance R R^T of the weights of each unit.

        `(F, P, M, K)` for z and, with a linear term, `(F, P, K)` for linear, over common columns.
        """
        raise NotImplementedError

    def initial_loc(self, *shape: int) -> nn.Parameter:
        """Means at the start, drawn at random."""
        return nn.Parameter((self.init_loc_scale * torch.randn(*shape)).to(**self._options))

    def initial_log_scale(self, *shape: int) -> nn.Parameter:
        """Logarithms of the standard deviations at the start."""
        return nn.Parameter(torch.full(shape, math.log(self.init_scale), **self._options))

    def initial_raw_tril(self, *shape: int) -> nn.Parameter:
        """The matrices whose `tril` are the diagonal Cholesky factors at the start."""
        identity = torch.eye(shape[-1], **self._options)
        return nn.Parameter(math.log(self.init_scale) * identity.expand(shape).clone())


def check_guide(model: DAK, guide: nn.Module, same_dtype: bool = True) -> None:
    """Raise unless `guide` is a module and, if it is one of this library, made for this model."""
    check_kind("guide", guide, nn.Module, "a guide of pyro_dak or of Pyro")
    if not isinstance(guide, GaussianGuide):
        for parameter in guide.parameters():
            check_has_values("guide", parameter)
        return
    own, like = next(_tensors(guide)), model.layer.log_unit_scale
    check_has_values("guide", own)
    if guide.site_shapes != model.site_shapes:
        sites = [{n: tuple(s) for n, s in m.site_shapes.items()} for m in (model, guide)]
        raise ValueError(
            f"`guide` must have the sites of the model, {sites[0]}; got {sites[1]}. Make a guide "
            "for this model."
        )
    if same_dtype and own.dtype != like.dtype:
        raise TypeError(
            f"`guide` must have the dtype of the model, {like.dtype}; got {own.dtype}. Convert it."
        )


def _tensors(guide: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers of a guide itself; `guide.parameters()` takes ten times as long."""
    for value in (*guide._parameters.values(), *guide._buffers.values()):
        if value is not None:
            yield value


def tril(raw: Tensor) -> Tensor:
    """Lower triangle with positive diagonal from an unconstrained square matrix."""
    return raw.tril(-1) + torch.diag_embed(raw.diagonal(dim1=-2, dim2=-1).exp())


def independent_roots(z_root: Tensor, linear: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Roots of z and of an independent linear term, whose scales get a column of their own."""
    if linear is None:
        return z_root, None
    return pad(z_root, (1, 0)), pad(linear.unsqueeze(-1), (0, z_root.shape[-1]))


class SiteNormals(GaussianGuide):
    """Guides whose sites are independent. A normal site has `NAME_loc` and `NAME_log_scale`."""

    def add_normals(self, names: list[str]) -> None:
        """Register means and logarithms of standard deviations of these sites."""
        for name in names:
            shape = self.site_shapes[name]
            self.register_parameter(f"{name}_loc", self.initial_loc(*shape))
            self.register_parameter(f"{name}_log_scale", self.initial_log_scale(*shape))

    def site_distribution(self, name: str) -> dist.Distribution:
        """q of a site."""
        return dist.Normal(*self.normal(name)).to_event(len(self.site_shapes[name]))

    def sample_weights(self) -> dict[str, Tensor]:
        names = self.latent(self.weight_sites)
        return {name: self.emit(name, self.site_distribution(name)) for name in names}

    def weight_means(self) -> Weights:
        linear = self.linear_loc if "linear" in self.site_shapes else None
        return Weights(self.z_loc, self.mu_loc, linear)

    def linear_scale(self) -> Tensor | None:
        """Standard deviations of the linear term, `(F, P)`, or None if there is none."""
        return self.normal("linear")[1] if "linear" in self.site_shapes else None
