"""Gaussian guides with correlation among the weights of all units.

Correlated sites are sampled one after the other, each from its conditional distribution given those
before it: no auxiliary site is needed.
"""

from collections.abc import Mapping
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.distributions.transforms import ReshapeTransform

from pyro_dak.additive.gaussian import FunctionMoments, kl_low_rank, kl_tril
from pyro_dak.additive.layer import AdditiveLayer, Weights
from pyro_dak.inference.guides.base import GaussianGuide, NormalParameters, tril
from pyro_dak.model.dak import DAK
from pyro_dak.validation import check_integer

__all__ = ["FullRankGuide", "LowRankGuide"]


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
        self.loc = self.initial_loc(F, K)
        self.raw_tril = self.initial_raw_tril(F, K, K)

    @property
    def scale_tril(self) -> Tensor:
        """Cholesky factors, `(F, K, K)`."""
        return tril(self.raw_tril)

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
        scale_tril, loc = self.scale_tril, self.loc
        noises: list[Tensor] = []
        values: dict[str, Tensor] = {}
        start = 0
        for name, size in zip(self.weight_sites, self._sizes, strict=True):
            block = slice(start, start + size)
            conditional_loc = loc[:, block]
            if noises:
                before = torch.cat(noises, -1)  # (..., F, start)
                shift = (scale_tril[:, block, :start] @ before.unsqueeze(-1)).squeeze(-1)
                conditional_loc = conditional_loc + shift
            own = scale_tril[:, block, block]
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
        self.loc = self.initial_loc(K)
        self.log_scale = self.initial_log_scale(K)
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
