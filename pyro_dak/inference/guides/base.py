"""Gaussian guides that emit the sites of the model directly, with closed-form moments of f.

Every guide here is built eagerly from the sites of a model, samples `mu`, `linear`, `z` (and a
log-normal for `shrinkage`) as ordinary Pyro sites, and knows its own KL divergence from normal
priors and the exact q(f(x)). Those here have no correlation between units; those of
`pyro_dak.inference.guides.joint` do.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, pyro_method
from torch import Tensor, nn

from pyro_dak.additive.gaussian import FunctionMoments, kl_diagonal, kl_diagonals, kl_tril
from pyro_dak.additive.layer import AdditiveLayer, Weights
from pyro_dak.model.dak import DAK
from pyro_dak.validation import check_positive

__all__ = ["GaussianGuide", "MeanFieldGuide", "NormalParameters", "UnitBlockGuide", "tril"]

NormalParameters = Mapping[str, tuple[Any, Any]]


class GaussianGuide(PyroModule):
    """q(z, mu, linear) Gaussian, times independent log-normals for the shrinkage sites.

    Args:
        model: gives names and shapes of the sites, and nothing else.
        init_scale: initial standard deviation of every weight.
        init_loc_scale: initial means are drawn from N(0, init_loc_scale^2).
    """

    def __init__(self, model: DAK, init_scale: float = 0.1, init_loc_scale: float = 0.1):
        with pyro.settings.context(module_local_params=True):
            super().__init__()
        check_positive("init_scale", init_scale)
        self.site_shapes = dict(model.site_shapes)
        self.init_scale, self.init_loc_scale = init_scale, init_loc_scale
        self.weight_sites: list[str] = [n for n in ("mu", "linear", "z") if n in self.site_shapes]
        self.scale_sites = [n for n in self.site_shapes if n not in self.weight_sites]
        for name in self.scale_sites:
            shape = self.site_shapes[name]
            self.register_parameter(f"{name}_loc", nn.Parameter(torch.zeros(shape)))
            log_scale = torch.full(shape, math.log(init_scale))
            self.register_parameter(f"{name}_log_scale", nn.Parameter(log_scale))

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Sample every site; arguments are those of the model and are not read."""
        values = self.sample_weights()
        for name in self.scale_sites:
            values[name] = pyro.sample(name, self.scale_distribution(name))
        return values

    def scale_distribution(self, name: str) -> dist.Distribution:
        """q of a shrinkage site."""
        loc, log_scale = getattr(self, f"{name}_loc"), getattr(self, f"{name}_log_scale")
        return dist.LogNormal(loc, log_scale.exp()).to_event(len(self.site_shapes[name]))

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

    def fixed_moments(self, layer: AdditiveLayer) -> Callable[[Tensor], FunctionMoments]:
        """`moments` as a function of h, for many calls with the same q, without gradient."""
        return partial(self.moments, layer)

    def kl_normal(self, priors: NormalParameters) -> Tensor:
        """KL of the weights from normal priors given as (loc, scale) by site, a scalar."""
        raise NotImplementedError

    def moments_and_kl(
        self, layer: AdditiveLayer, h: Tensor, priors: NormalParameters
    ) -> tuple[FunctionMoments, Tensor]:
        """`moments` and `kl_normal`, together where that is faster."""
        return self.moments(layer, h), self.kl_normal(priors)

    def weight_means(self) -> Weights:
        """Means of the weights."""
        raise NotImplementedError

    def unit_roots(self) -> tuple[Tensor, Tensor | None]:
        """R with covariance R R^T of the weights of each unit.

        `(F, P, M, K)` for z and, with a linear term, `(F, P, K)` for linear, over common columns.
        """
        raise NotImplementedError

    def _initial_loc(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(self.init_loc_scale * torch.randn(*shape))

    def _initial_log_scale(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.full(shape, math.log(self.init_scale)))

    def _initial_raw_tril(self, *shape: int) -> nn.Parameter:
        size = shape[-1]
        return nn.Parameter(math.log(self.init_scale) * torch.eye(size).expand(*shape).clone())


def _is_standard(loc: Any, scale: Any) -> bool:
    """Whether these are the numbers of N(0, 1)."""
    return (
        isinstance(loc, int | float) and isinstance(scale, int | float) and (loc, scale) == (0, 1)
    )


def tril(raw: Tensor) -> Tensor:
    """Lower triangle with positive diagonal from an unconstrained square matrix."""
    return raw.tril(-1) + torch.diag_embed(raw.diagonal(dim1=-2, dim2=-1).exp())


class _SiteNormals(GaussianGuide):
    """Guides in which some sites are independent normals, `NAME_loc` and `NAME_log_scale`."""

    def _add_normals(self, names: list[str]) -> None:
        for name in names:
            shape = self.site_shapes[name]
            self.register_parameter(f"{name}_loc", self._initial_loc(*shape))
            self.register_parameter(f"{name}_log_scale", self._initial_log_scale(*shape))

    def _normal(self, name: str) -> tuple[Tensor, Tensor]:
        return getattr(self, f"{name}_loc"), getattr(self, f"{name}_log_scale").exp()

    def normal_distribution(self, name: str) -> dist.Distribution:
        """q of a site of independent normals."""
        return dist.Normal(*self._normal(name)).to_event(len(self.site_shapes[name]))

    def _independent_roots(self, z_root: Tensor) -> tuple[Tensor, Tensor | None]:
        """Roots of z and of an independent linear term, which gets a column of its own."""
        if "linear" not in self.site_shapes:
            return z_root, None
        linear = torch.nn.functional.pad(
            self._normal("linear")[1].unsqueeze(-1), (0, z_root.shape[-1])
        )
        return torch.nn.functional.pad(z_root, (1, 0)), linear

    def weight_means(self) -> Weights:
        return Weights(
            self.z_loc, self.mu_loc, self.linear_loc if "linear" in self.site_shapes else None
        )


class MeanFieldGuide(_SiteNormals):
    """The paper's guide: every weight an independent normal.

    Parameters `z_loc`, `z_log_scale` `(F, P, M)`, `mu_loc`, `mu_log_scale` `(F,)`, and likewise
    `linear_*` `(F, P)`.
    """

    def __init__(self, model: DAK, init_scale: float = 0.1, init_loc_scale: float = 0.1):
        super().__init__(model, init_scale, init_loc_scale)
        self._add_normals(self.weight_sites)

    @property
    def z_scale(self) -> Tensor:
        """Standard deviations of z, `(F, P, M)`."""
        return self.z_log_scale.exp()

    def sample_weights(self) -> dict[str, Tensor]:
        return {n: pyro.sample(n, self.normal_distribution(n)) for n in self.weight_sites}

    def _weights(self) -> tuple[Weights, Weights]:
        """Means and standard deviations."""
        parts = {name: self._normal(name) for name in self.weight_sites}
        linear_loc, linear_scale = parts.get("linear", (None, None))
        (z, z_scale), (mu, mu_scale) = parts["z"], parts["mu"]
        return Weights(z, mu, linear_loc), Weights(z_scale, mu_scale, linear_scale)

    def moments(self, layer: AdditiveLayer, h: Tensor) -> FunctionMoments:
        return layer.moments(h, *self._weights())

    def moments_and_kl(
        self, layer: AdditiveLayer, h: Tensor, priors: NormalParameters
    ) -> tuple[FunctionMoments, Tensor]:
        terms = None
        own = type(self)
        is_plain = (
            own.moments is MeanFieldGuide.moments and own.kl_normal is MeanFieldGuide.kl_normal
        )
        if is_plain and all(_is_standard(*prior) for prior in priors.values()):
            log_scale = Weights(self.z_log_scale, self.mu_log_scale)
            terms = layer.terms(h, self.weight_means(), log_scale)
        return super().moments_and_kl(layer, h, priors) if terms is None else terms

    def fixed_moments(self, layer: AdditiveLayer) -> Callable[[Tensor], FunctionMoments]:
        return layer.fixed_moments(*self._weights())

    def unit_roots(self) -> tuple[Tensor, Tensor | None]:
        return self._independent_roots(torch.diag_embed(self.z_scale))

    def kl_normal(self, priors: NormalParameters) -> Tensor:
        sites = [
            (getattr(self, f"{name}_loc"), getattr(self, f"{name}_log_scale"))
            for name in self.weight_sites
        ]
        return kl_diagonals(sites, [priors[name] for name in self.weight_sites])


class UnitBlockGuide(_SiteNormals):
    """Full covariance among the M weights of each unit and function; all else independent.

    Parameters `z_loc` `(F, P, M)` and `z_raw_tril` `(F, P, M, M)`, whose lower triangle with
    exponentiated diagonal is the Cholesky factor; `mu` and `linear` as in `MeanFieldGuide`.
    """

    def __init__(self, model: DAK, init_scale: float = 0.1, init_loc_scale: float = 0.1):
        super().__init__(model, init_scale, init_loc_scale)
        self._add_normals([name for name in self.weight_sites if name != "z"])
        shape = self.site_shapes["z"]
        self.z_loc = self._initial_loc(*shape)
        self.z_raw_tril = self._initial_raw_tril(*shape, shape[-1])

    @property
    def z_scale_tril(self) -> Tensor:
        """Cholesky factors of the blocks, `(F, P, M, M)`."""
        return tril(self.z_raw_tril)

    def sample_weights(self) -> dict[str, Tensor]:
        names = [name for name in self.weight_sites if name != "z"]
        values: dict[str, Tensor] = {
            name: pyro.sample(name, self.normal_distribution(name)) for name in names
        }
        z = dist.MultivariateNormal(self.z_loc, scale_tril=self.z_scale_tril).to_event(2)
        values["z"] = pyro.sample("z", z)
        return values

    def moments(self, layer: AdditiveLayer, h: Tensor) -> FunctionMoments:
        mean = layer(h, self.weight_means())
        blocks = layer.activation.unit_block_variances(h, self.z_scale_tril)  # (N, F, P)
        var = blocks @ layer.unit_scale.square() + self._normal("mu")[1].square()
        if "linear" in self.site_shapes:
            r = (layer.unit_scale * layer.linear_inputs(h)).square()
            var = var + r @ self._normal("linear")[1].square().mT
        return FunctionMoments(mean, var)

    def unit_roots(self) -> tuple[Tensor, Tensor | None]:
        return self._independent_roots(self.z_scale_tril)

    def kl_normal(self, priors: NormalParameters) -> Tensor:
        kl = kl_tril(self.z_loc, self.z_scale_tril, *priors["z"])
        for name in self.weight_sites:
            if name != "z":
                kl = kl + kl_diagonal(*self._normal(name), *priors[name])
        return kl
