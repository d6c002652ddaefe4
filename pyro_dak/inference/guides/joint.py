"""Gaussian guides with correlation among the weights of all units.

Correlated sites are sampled one after the other, each from its conditional distribution given those
before it: no auxiliary site is needed.
"""

from collections.abc import Mapping
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.distributions.transforms import ReshapeTransform

from pyro_dak.additive.gaussian import FunctionMoments, kl_low_rank, kl_tril
from pyro_dak.additive.layer import AdditiveLayer, Weights
from pyro_dak.inference.guides.base import GaussianGuide, NormalParameters, independent_roots, tril
from pyro_dak.model.handlers import GuidedModel
from pyro_dak.validation import check_finite, check_floating, check_has_values, check_integer

__all__ = ["FullRankGuide", "LowRankGuide", "TrilGuide", "design_moments", "flat_priors"]


def flat_priors(
    priors: NormalParameters, shapes: Mapping[str, torch.Size], like: Tensor
) -> tuple[Tensor, Tensor]:
    """Means and scales of normal priors, with one site after the other in the last dimension.

    Both have the shape of `like`: `(F, K)` with one row per function, or `(K,)` for all weights.
    """
    options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
    columns = [
        [torch.as_tensor(v, **options).expand(shapes[n]).reshape(*like.shape[:-1], -1) for v in p]
        for n, p in priors.items()
    ]
    loc, scale = (torch.cat(part, -1) for part in zip(*columns, strict=True))
    return loc, scale


def design_moments(design: Tensor, loc: Tensor, scale_tril: Tensor) -> FunctionMoments:
    """Moments of f = Phi w, `(N, F)` each, for a design `(N, K)` and w_c ~ N(loc_c, T_c T_c^T).

    `loc` is `(F, K)` and `scale_tril` `(F, K, K)`, or `(1, K, K)` if the functions share it.
    """
    mean = design @ loc.mT
    var = (design @ scale_tril).square().sum(-1).mT  # (F, N, K) -> (N, F)
    return FunctionMoments(mean, var.expand_as(mean))


class _JointGuide(GaussianGuide):
    """A guide with means `loc` `(..., K)`, in which the sites mu, linear and z follow each other.

    K counts the weights of one function, or those of all functions.
    """

    _sizes: list[int]  # number of weights of each site in a row of `loc`

    def __init__(self, model: GuidedModel, init_scale: float = 0.1, init_loc_scale: float = 0.1):
        super().__init__(model, init_scale, init_loc_scale)
        if not self.has_all_sites:
            others = [n for n in self.site_shapes if n not in self.latent_sites]
            raise NotImplementedError(
                f"{type(self).__name__} is one distribution of all weights, and "
                f"{', '.join(f'`{name}`' for name in others)} is hidden or given in this model. "
                "Use MeanFieldGuide or UnitBlockGuide, whose sites are independent."
            )

    def split(self, flat: Tensor) -> Weights:
        """Weights from the form of `loc`, with any batch in front."""
        batch = flat.shape[: flat.dim() - self.loc.dim()]
        parts = zip(self.weight_sites, flat.split(self._sizes, -1), strict=True)
        sites = {name: part.reshape(*batch, *self.site_shapes[name]) for name, part in parts}
        return Weights(sites["z"], sites["mu"], sites.get("linear"))

    def weight_means(self) -> Weights:
        return self.split(self.loc)

    def sample_weights(self) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        shifts: list[Tensor] = []
        for name, loc in zip(self.weight_sites, self.loc.split(self._sizes, -1), strict=True):
            before = torch.cat(shifts, -1) if shifts else self.loc[..., :0]
            q = self.conditional(before, loc.shape[-1])
            shape = self.site_shapes[name]
            reshape = ReshapeTransform(q.event_shape, shape)
            values[name] = self.emit(name, dist.TransformedDistribution(q, [reshape]))
            batch = values[name].shape[: -len(shape)]
            shifts.append(values[name].reshape(*batch, *loc.shape) - loc)
        return values

    def conditional(self, before: Tensor, size: int) -> dist.Distribution:
        """q of the next `size` weights, given w - loc of all weights before them, `(..., k)`."""
        raise NotImplementedError


class TrilGuide(_JointGuide):
    """Functions that are independent of one another, each with a covariance among its K weights.

    A subclass has `loc`, `(F, K)` over the K = 1 [+ P] + P M weights (mu, linear, z) of a function,
    and `scale_tril`, the Cholesky factors of the covariances, `(F, K, K)`, or `(1, K, K)` if the
    functions share one.
    """

    def __init__(self, model: GuidedModel, init_scale: float = 0.1, init_loc_scale: float = 0.1):
        super().__init__(model, init_scale, init_loc_scale)
        self._sizes = [self.site_shapes[n][1:].numel() for n in self.weight_sites]

    @property
    def num_weights(self) -> int:
        """K."""
        return sum(self._sizes)

    @property
    def scale_tril(self) -> Tensor:
        """Cholesky factors, `(F, K, K)` or `(1, K, K)`."""
        raise NotImplementedError

    def conditional(self, before: Tensor, size: int) -> dist.Distribution:
        """w_i | w_<i ~ N(loc_i + T_i< eps_<, T_ii T_ii^T) with eps_< = T_<<^{-1} (w_< - loc_<)."""
        scale_tril, k = self.scale_tril, before.shape[-1]
        block = slice(k, k + size)
        noise = torch.linalg.solve_triangular(
            scale_tril[:, :k, :k], before.unsqueeze(-1), upper=False
        )
        loc = self.loc[:, block] + (scale_tril[:, block, :k] @ noise).squeeze(-1)
        return dist.MultivariateNormal(loc, scale_tril=scale_tril[:, block, block]).to_event(1)

    def moments(self, layer: AdditiveLayer, h: Tensor) -> FunctionMoments:
        return design_moments(layer.design(h), self.loc, self.scale_tril)

    def unit_roots(self) -> tuple[Tensor, Tensor | None]:
        scale_tril = self.scale_tril.expand(len(self.loc), -1, -1)
        _, *linear, z = scale_tril.split(self._sizes, 1)
        return z.unflatten(1, self.site_shapes["z"][1:]), linear[0] if linear else None

    def weight_covariance(self) -> Tensor:
        """Covariance of all weights, one function after the other, `(F K, F K)`."""
        scale_tril = self.scale_tril.expand(len(self.loc), -1, -1)
        return torch.block_diag(*(scale_tril @ scale_tril.mT))

    def kl_normal(self, priors: NormalParameters) -> Tensor:
        prior = flat_priors(priors, self.site_shapes, self.loc)
        return kl_tril(self.loc, self.scale_tril, *prior)


class FullRankGuide(TrilGuide):
    """Full covariance among all weights of each function; functions independent of one another.

    For a Gaussian likelihood the exact posterior is of this form. Parameters `loc` `(F, K)` and
    `raw_tril` `(F, K, K)` over the K = 1 [+ P] + P M weights (mu, linear, z) of a function.
    """

    def __init__(self, model: GuidedModel, init_scale: float = 0.1, init_loc_scale: float = 0.1):
        super().__init__(model, init_scale, init_loc_scale)
        F, K = self.site_shapes["mu"][0], self.num_weights
        self.loc = self.initial_loc(F, K)
        self.raw_tril = self.initial_raw_tril(F, K, K)

    @property
    def scale_tril(self) -> Tensor:
        """Cholesky factors, `(F, K, K)`."""
        return tril(self.raw_tril)

    @torch.no_grad()
    def set_parameters(self, loc: Tensor, scale_tril: Tensor) -> None:
        """Set mean `(F, K)` and Cholesky factor `(F, K, K)`."""
        for name, value, like in (
            ("loc", loc, self.loc),
            ("scale_tril", scale_tril, self.raw_tril),
        ):
            check_floating(name, value)
            check_has_values(name, value)
            check_finite(name, value)
            if value.shape != like.shape:
                raise ValueError(
                    f"`{name}` must have shape {tuple(like.shape)}; got {tuple(value.shape)}."
                )
        if not bool((scale_tril.diagonal(dim1=-2, dim2=-1) > 0).all()):
            raise ValueError("`scale_tril` must have a positive diagonal.")
        self.loc.copy_(loc)
        diagonal = torch.diag_embed(scale_tril.diagonal(dim1=-2, dim2=-1).log())
        self.raw_tril.copy_(scale_tril.tril(-1) + diagonal)


class LowRankGuide(_JointGuide):
    """Covariance diag(scale^2) + B B^T with B of `rank` columns, over all weights of all functions.

    Parameters `loc`, `log_scale` `(K,)` and `factor` `(K, rank)` over all weights (mu, linear, z).
    The columns of B start at random, at a tenth of `init_scale`.
    """

    def __init__(
        self,
        model: GuidedModel,
        rank: int = 8,
        init_scale: float = 0.1,
        init_loc_scale: float = 0.1,
    ):
        super().__init__(model, init_scale, init_loc_scale)
        check_integer("rank", rank, minimum=1)
        self.rank = rank
        self._sizes = [self.site_shapes[n].numel() for n in self.weight_sites]
        K = sum(self._sizes)
        self.loc = self.initial_loc(K)
        self.log_scale = self.initial_log_scale(K)
        self.factor = nn.Parameter(
            (0.1 * init_scale / rank**0.5 * torch.randn(K, rank)).to(**self._options)
        )

    def conditional(self, before: Tensor, size: int) -> dist.Distribution:
        """w_i = loc_i + B_i u + scale_i eps_i, with u ~ N(0, I) inferred from the weights before.

        Given these, u ~ N(A^{-1} b, A^{-1}) with A = I + B_<^T D_<^{-2} B_< and
        b = B_<^T D_<^{-2} (w_< - loc_<), so that the conditional is low-rank as well.
        """
        B, D, k = self.factor, self.log_scale.exp(), before.shape[-1]
        block = slice(k, k + size)
        whitened = B[:k] / D[:k].square().unsqueeze(-1)
        A = torch.eye(self.rank, dtype=D.dtype, device=D.device) + whitened.mT @ B[:k]
        root = torch.linalg.cholesky(A)
        u = torch.cholesky_solve((before @ whitened).unsqueeze(-1), root).squeeze(-1)
        factor = torch.linalg.solve_triangular(root, B[block].mT, upper=False).mT  # B A^{-1/2}
        loc = self.loc[block] + u @ B[block].mT
        return dist.LowRankMultivariateNormal(loc, factor, D[block].square())

    def moments(self, layer: AdditiveLayer, h: Tensor) -> FunctionMoments:
        own = layer.moments(h, self.weight_means(), self.split(self.log_scale.exp()))
        root = layer(h, self.split(self.factor.mT))  # (rank, N, F)
        return FunctionMoments(own.mean, own.var + root.square().sum(0), root)

    def unit_roots(self) -> tuple[Tensor, Tensor | None]:
        scale, shared = self.split(self.log_scale.exp()), self.split(self.factor.mT)
        z_root, linear_root = independent_roots(torch.diag_embed(scale.z), scale.linear)
        z_root = torch.cat([z_root, shared.z.movedim(0, -1)], -1)
        if linear_root is not None and shared.linear is not None:
            linear_root = torch.cat([linear_root, shared.linear.movedim(0, -1)], -1)
        return z_root, linear_root

    def kl_normal(self, priors: NormalParameters) -> Tensor:
        prior = flat_priors(priors, self.site_shapes, self.loc)
        return kl_low_rank(self.loc, self.log_scale.exp(), self.factor, *prior)
