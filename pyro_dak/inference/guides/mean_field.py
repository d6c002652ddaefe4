"""The mean-field guide: every weight is independent of the others."""

import torch
from torch import Tensor

from pyro_dak.additive.gaussian import FunctionMoments, kl_diagonal
from pyro_dak.additive.layer import AdditiveLayer, Weights
from pyro_dak.inference.guides.base import NormalParameters, SiteNormals, independent_roots
from pyro_dak.model.handlers import GuidedModel

__all__ = ["MeanFieldGuide"]


def _is_standard(priors: NormalParameters) -> bool:
    """Whether the sites are z and mu alone, both with the numbers of N(0, 1) as priors."""
    for loc, scale in priors.values():
        if isinstance(loc, Tensor) or isinstance(scale, Tensor) or (loc, scale) != (0, 1):
            return False
    return len(priors) == 2


class MeanFieldGuide(SiteNormals):
    """The paper's guide: every weight an independent normal.

    Parameters `z_loc`, `z_log_scale` `(F, P, M)`, `mu_loc`, `mu_log_scale` `(F,)`, and likewise
    `linear_*` `(F, P)`.
    """

    def __init__(self, model: GuidedModel, init_scale: float = 0.1, init_loc_scale: float = 0.1):
        super().__init__(model, init_scale, init_loc_scale)
        self.add_normals(self.weight_sites)

    @property
    def z_scale(self) -> Tensor:
        """Standard deviations of z, `(F, P, M)`."""
        return self.z_log_scale.exp()

    def moments(self, layer: AdditiveLayer, h: Tensor) -> FunctionMoments:
        scales = Weights(self.z_scale, self.mu_log_scale.exp(), self.linear_scale())
        return layer.moments(h, self.weight_means(), scales)

    def moments_and_kl(
        self, layer: AdditiveLayer, h: Tensor, priors: NormalParameters
    ) -> tuple[FunctionMoments, Tensor]:
        """One operation for this very class with standard normal priors and no linear term."""
        terms = None
        if type(self) is MeanFieldGuide and _is_standard(priors):
            z, mu = (self.z_loc, self.z_log_scale), (self.mu_loc, self.mu_log_scale)
            terms = layer.activation.mean_field_terms(h, *z, layer.log_unit_scale, *mu)
        if terms is None:
            return super().moments_and_kl(layer, h, priors)
        return FunctionMoments(terms[0], terms[1]), terms[2]

    def gaussian_bound(
        self,
        layer: AdditiveLayer,
        h: Tensor,
        y: Tensor,
        log_noise: Tensor,
        priors: NormalParameters,
        scale: float,
    ) -> tuple[Tensor, Tensor] | None:
        """One operation for this very class with standard normal priors and no linear term."""
        if type(self) is not MeanFieldGuide or not _is_standard(priors):
            return None
        z, mu = (self.z_loc, self.z_log_scale), (self.mu_loc, self.mu_log_scale)
        tensors = (*z, layer.log_unit_scale, *mu, log_noise)
        return layer.activation.gaussian_bound(h, y, *tensors, scale=scale)

    def unit_roots(self) -> tuple[Tensor, Tensor | None]:
        return independent_roots(torch.diag_embed(self.z_scale), self.linear_scale())

    def kl_normal(self, priors: NormalParameters) -> Tensor:
        parts = [kl_diagonal(*self.normal(name), *priors[name]) for name in self.weight_sites]
        return torch.stack(parts).sum()
