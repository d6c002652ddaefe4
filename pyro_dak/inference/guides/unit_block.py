"""The unit-block guide: weights of a unit are correlated, those of different units are not."""

import pyro.distributions as dist
from torch import Tensor

from pyro_dak.additive.gaussian import FunctionMoments, kl_diagonal, kl_tril
from pyro_dak.additive.layer import AdditiveLayer
from pyro_dak.inference.guides.base import NormalParameters, SiteNormals, independent_roots, tril
from pyro_dak.model.handlers import GuidedModel

__all__ = ["UnitBlockGuide"]


class UnitBlockGuide(SiteNormals):
    """Full covariance among the M weights of each unit and function; all else independent.

    Parameters `z_loc` `(F, P, M)` and `z_raw_tril` `(F, P, M, M)`, whose lower triangle with
    exponentiated diagonal is the Cholesky factor; `mu` and `linear` as in `MeanFieldGuide`.
    """

    def __init__(self, model: GuidedModel, init_scale: float = 0.1, init_loc_scale: float = 0.1):
        super().__init__(model, init_scale, init_loc_scale)
        self.add_normals(self.weight_sites[:-1])  # z, which is the last, has its own form
        shape = self.site_shapes["z"]
        self.z_loc = self.initial_loc(*shape)
        self.z_raw_tril = self.initial_raw_tril(*shape, shape[-1])

    @property
    def z_scale_tril(self) -> Tensor:
        """Cholesky factors of the blocks, `(F, P, M, M)`."""
        return tril(self.z_raw_tril)

    def site_distribution(self, name: str) -> dist.Distribution:
        if name != "z":
            return super().site_distribution(name)
        return dist.MultivariateNormal(self.z_loc, scale_tril=self.z_scale_tril).to_event(2)

    def moments(self, layer: AdditiveLayer, h: Tensor) -> FunctionMoments:
        mean = layer(h, self.weight_means())
        blocks = layer.activation.unit_block_variances(h, self.z_scale_tril)  # (N, F, P)
        var = blocks @ layer.unit_scale.square() + self.normal("mu")[1].square()
        linear = self.linear_scale()
        if linear is not None:
            r = layer.unit_scale * layer.linear_inputs(h)
            var = var + r.square() @ linear.square().mT
        return FunctionMoments(mean, var)

    def unit_roots(self) -> tuple[Tensor, Tensor | None]:
        return independent_roots(self.z_scale_tril, self.linear_scale())

    def kl_normal(self, priors: NormalParameters) -> Tensor:
        others = [kl_diagonal(*self.normal(name), *priors[name]) for name in self.weight_sites[:-1]]
        return kl_tril(self.z_loc, self.z_scale_tril, *priors["z"]) + sum(others)
