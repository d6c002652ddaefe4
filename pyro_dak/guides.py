"""Gaussian guides that emit the sites of the model directly, with closed-form moments of f.

Every guide here is built eagerly from the sites of a model, samples `mu`, `linear`, `z` (and a
log-normal for `shrinkage`) as ordinary Pyro sites, and knows its own KL divergence from normal
priors and the exact q(f(x)). Correlated sites are sampled one after the other, each from its
conditional distribution given those before it: no auxiliary site is needed.
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
from torch.distributions.transforms import ReshapeTransform

from pyro_dak.additive import AdditiveLayer, Weights
from pyro_dak.gaussian import FunctionMoments, kl_diagonal, kl_diagonals, kl_low_rank, kl_tril
from pyro_dak.model import DAK
from pyro_dak.validation import check_integer, check_positive

__all__ = ["FullRankGuide", "GaussianGuide", "LowRankGuide", "MeanFieldGuide", "UnitBlockGuide"]

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


def _tril(raw: Tensor) -> Tensor:
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
        return _tril(self.z_raw_tril)

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


class FullRankGuide(GaussianGuide):
    """Full covariance among all weights of each function; functions independent of one another.

    For a Gaussian likelihood the exact posterior is of this form. Parameters `loc` `(F, K)` and
    `raw_tril` `(F, K, K)` over the K = 1 [+ P] + P M weights (mu, linear, z) of a function.
    """

    def __init__(self, model: DAK, init_scale: float = 0.1, init_loc_scale: float = 0.1):
        super().__init__(model, init_scale, init_loc_scale)
        F = self.site_shapes["mu"][0]
        self._sizes = [self.site_shapes[n][1:].numel() for n in self.weight_sites]
        K = sum(self._sizes)
        self.loc = self._initial_loc(F, K)
        self.raw_tril = self._initial_raw_tril(F, K, K)

    @property
    def scale_tril(self) -> Tensor:
        """Cholesky factors, `(F, K, K)`."""
        return _tril(self.raw_tril)

    @torch.no_grad()
    def set_parameters(self, loc: Tensor, scale_tril: Tensor) -> None:
        """Set mean `(F, K)` and Cholesky factor `(F, K, K)`."""
        self.loc.copy_(loc)
        diagonal = torch.diag_embed(scale_tril.diagonal(dim1=-2, dim2=-1).log())
        self.raw_tril.copy_(scale_tril.tril(-1) + diagonal)

    def weight_means(self) -> Weights:
        return _split_columns(self.loc, self.site_shapes)

    def sample_weights(self) -> dict[str, Tensor]:
        """w_i | w_<i ~ N(loc_i + sum_{j<i} T_ij eps_j, T_ii T_ii^T) with the eps_j recovered."""
        tril, loc = self.scale_tril, self.loc
        noises: list[Tensor] = []
        values: dict[str, Tensor] = {}
        start = 0
        for name, size in zip(self.weight_sites, self._sizes, strict=True):
            block = slice(start, start + size)
            conditional_loc = loc[:, block]
            if noises:
                before = torch.cat(noises, -1)  # (..., F, start)
                shift = (tril[:, block, :start] @ before.unsqueeze(-1)).squeeze(-1)
                conditional_loc = conditional_loc + shift
            own = tril[:, block, block]
            site = dist.MultivariateNormal(conditional_loc, scale_tril=own).to_event(1)
            shape = self.site_shapes[name]
            reshape = ReshapeTransform(torch.Size((shape[0], size)), shape)
            values[name] = pyro.sample(name, dist.TransformedDistribution(site, [reshape]))
            if name != self.weight_sites[-1]:
                flat = values[name].reshape(*values[name].shape[: -len(shape)], shape[0], size)
                residual = (flat - conditional_loc).unsqueeze(-1)
                noise = torch.linalg.solve_triangular(own, residual, upper=False)
                noises.append(noise.squeeze(-1))
            start += size
        return values

    def moments(self, layer: AdditiveLayer, h: Tensor) -> FunctionMoments:
        mean = layer(h, self.weight_means())
        var = (layer.design(h) @ self.scale_tril).square().sum(-1).mT  # (F, N, K) -> (N, F)
        return FunctionMoments(mean, var)

    def unit_roots(self) -> tuple[Tensor, Tensor | None]:
        _, P, M = self.site_shapes["z"]
        linear, z = self.scale_tril[:, 1:].split([sum(self._sizes) - 1 - P * M, P * M], 1)
        return z.unflatten(1, (P, M)), linear if "linear" in self.site_shapes else None

    def kl_normal(self, priors: NormalParameters) -> Tensor:
        prior_loc, prior_scale = _flat_priors(priors, self.site_shapes, self.weight_sites, self.loc)
        return kl_tril(self.loc, self.scale_tril, prior_loc, prior_scale)


class LowRankGuide(GaussianGuide):
    """Covariance diag(scale^2) + B B^T with B of `rank` columns, over all weights of all functions.

    Parameters `loc`, `log_scale` `(K,)` and `factor` `(K, rank)` over all weights (mu, linear, z).

    Args:
        model: gives the sites.
        rank: number of columns of B.
        init_scale: initial standard deviation; the columns start at a tenth of it, at random.
        init_loc_scale: initial means are drawn from N(0, init_loc_scale^2).
    """

    def __init__(
        self, model: DAK, rank: int = 8, init_scale: float = 0.1, init_loc_scale: float = 0.1
    ):
        super().__init__(model, init_scale, init_loc_scale)
        check_integer("rank", rank, minimum=1)
        self.rank = rank
        self._sizes = [self.site_shapes[n].numel() for n in self.weight_sites]
        K = sum(self._sizes)
        self.loc = self._initial_loc(K)
        self.log_scale = self._initial_log_scale(K)
        self.factor = nn.Parameter(0.1 * init_scale / rank**0.5 * torch.randn(K, rank))

    def _split(self, flat: Tensor) -> Weights:
        """Weights from `(..., K)`."""
        parts = dict(zip(self.weight_sites, flat.split(self._sizes, -1), strict=True))
        shaped = {name: part.unflatten(-1, self.site_shapes[name]) for name, part in parts.items()}
        return Weights(shaped["z"], shaped["mu"], shaped.get("linear"))

    def weight_means(self) -> Weights:
        return self._split(self.loc)

    def sample_weights(self) -> dict[str, Tensor]:
        """Blocks w_i = loc_i + B_i u + scale_i eps_i in turn, with u ~ N(0, I) inferred so far.

        Given earlier blocks u ~ N(A^{-1} b, A^{-1}), A = I + sum_j B_j^T D_j^{-2} B_j and
        b = sum_j B_j^T D_j^{-2} (w_j - loc_j), so the conditional of a block is low-rank as well.
        """
        scale = self.log_scale.exp()
        A = torch.eye(self.rank, dtype=scale.dtype, device=scale.device)
        b = scale.new_zeros(self.rank)
        values: dict[str, Tensor] = {}
        start = 0
        for name, size in zip(self.weight_sites, self._sizes, strict=True):
            block = slice(start, start + size)
            B, D, loc = self.factor[block], scale[block], self.loc[block]
            root = torch.linalg.cholesky(A)
            u = torch.cholesky_solve(b.unsqueeze(-1), root).squeeze(-1)
            factor = torch.linalg.solve_triangular(root, B.mT, upper=False).mT  # B A^{-1/2}
            conditional_loc = loc + u @ B.mT
            site = dist.LowRankMultivariateNormal(conditional_loc, factor, D.square())
            shape = self.site_shapes[name]
            reshape = ReshapeTransform(torch.Size((size,)), shape)
            values[name] = pyro.sample(name, dist.TransformedDistribution(site, [reshape]))
            whitened = B / D.square().unsqueeze(-1)
            flat = values[name].reshape(*values[name].shape[: -len(shape)], size)
            A, b = A + whitened.mT @ B, b + (flat - loc) @ whitened
            start += size
        return values

    def moments(self, layer: AdditiveLayer, h: Tensor) -> FunctionMoments:
        own = layer.moments(h, self._split(self.loc), self._split(self.log_scale.exp()))
        root = layer(h, self._split(self.factor.mT))  # (rank, N, F)
        return FunctionMoments(own.mean, own.var + root.square().sum(0), root)

    def unit_roots(self) -> tuple[Tensor, Tensor | None]:
        scale = self._split(self.log_scale.exp())
        z, _, linear = self._split(self.factor.mT)  # (rank, F, P, M), (rank, F, P)
        own = torch.diag_embed(scale.z)
        z_root = torch.cat([own, z.movedim(0, -1)], -1)
        if linear is None or scale.linear is None:
            return z_root, None
        own_linear = torch.nn.functional.pad(scale.linear.unsqueeze(-1), (0, own.shape[-1]))
        linear_root = torch.cat([own_linear, linear.movedim(0, -1)], -1)
        return torch.nn.functional.pad(z_root, (1, 0)), linear_root

    def kl_normal(self, priors: NormalParameters) -> Tensor:
        parts = [_expanded(priors[n], self.site_shapes[n], self.loc) for n in self.weight_sites]
        prior_loc = torch.cat([loc.reshape(-1) for loc, _ in parts])
        prior_scale = torch.cat([scale.reshape(-1) for _, scale in parts])
        return kl_low_rank(self.loc, self.log_scale.exp(), self.factor, prior_loc, prior_scale)


def _expanded(prior: tuple[Any, Any], shape: torch.Size, like: Tensor) -> tuple[Tensor, Tensor]:
    loc, scale = (torch.as_tensor(p, dtype=like.dtype, device=like.device) for p in prior)
    return loc.expand(shape), scale.expand(shape)


def _flat_priors(
    priors: NormalParameters, shapes: Mapping[str, torch.Size], names: list[str], like: Tensor
) -> tuple[Tensor, Tensor]:
    """Prior means and scales per function, `(F, K)` each, in the order of `names`."""
    parts = [_expanded(priors[name], shapes[name], like) for name in names]
    F = shapes["mu"][0]
    loc = torch.cat([loc.reshape(F, -1) for loc, _ in parts], -1)
    return loc, torch.cat([scale.reshape(F, -1) for _, scale in parts], -1)


def _split_columns(flat: Tensor, shapes: Mapping[str, torch.Size]) -> Weights:
    """Weights from `(F, K)` in the order (mu, linear, z)."""
    num_linear = shapes["linear"][1] if "linear" in shapes else 0
    mu, linear, z = flat.split([1, num_linear, shapes["z"][1:].numel()], -1)
    return Weights(z.reshape(shapes["z"]), mu[:, 0], linear if num_linear else None)
