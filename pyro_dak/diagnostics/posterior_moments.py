"""Gaussian fits of a posterior of the weights, and the distance between two of them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_dak.inference.draws import Draws, Posterior, as_guide, draw_posterior
from pyro_dak.inference.guides.base import GaussianGuide, UnitBlockGuide
from pyro_dak.inference.guides.joint import FullRankGuide, LowRankGuide
from pyro_dak.model.dak import DAK

__all__ = ["GaussianFit", "gaussian_fit", "wasserstein_2"]


class GaussianFit(NamedTuple):
    """Mean `(W,)` and covariance `(W, W)` of all weights: of one function after the other, bias,
    linear terms, then the kernel weights of one unit after the other."""

    mean: Tensor
    cov: Tensor

    @property
    def sd(self) -> Tensor:
        """Standard deviations, `(W,)`."""
        return self.cov.diagonal().sqrt()


@torch.no_grad()
def gaussian_fit(model: DAK, posterior: Posterior, draws: Draws | None = None) -> GaussianFit:
    """Mean and covariance of all weights: of a Gaussian guide itself, else of draws."""
    guide = as_guide(posterior, torch.float64)
    if isinstance(guide, GaussianGuide):
        return GaussianFit(_flat(guide.weight_means()._asdict()), _covariance(guide))
    if draws is None:
        draws = draw_posterior(model, posterior, num_samples=4000, seed=0)
    flat = _flat(draws.flat(), has_draws=True)
    return GaussianFit(flat.mean(0), flat.mT.cov().reshape(flat.shape[-1], -1))


def _flat(sites: Mapping[str, Any], has_draws: bool = False) -> Tensor:
    """Weights in the order of `GaussianFit`, `(W,)` or `(S, W)`."""
    linear = sites.get("linear")
    parts = [sites["mu"].unsqueeze(-1), sites["z"].flatten(-2)]
    if linear is not None:
        parts.insert(1, linear)
    return torch.cat(parts, -1).flatten(1 if has_draws else 0).double()


def _covariance(guide: GaussianGuide) -> Tensor:
    if isinstance(guide, FullRankGuide):
        return torch.block_diag(*(guide.scale_tril @ guide.scale_tril.mT))
    if isinstance(guide, LowRankGuide):
        index = guide._split(torch.arange(len(guide.loc)))._asdict()
        order = _flat(index).long()
        factor = guide.factor[order]
        return factor @ factor.mT + torch.diag((2 * guide.log_scale[order]).exp())
    scales = {n: getattr(guide, f"{n}_log_scale").exp() for n in guide.weight_sites if n != "z"}
    if not isinstance(guide, UnitBlockGuide):
        return torch.diag(_flat({**scales, "z": guide.z_scale}).square())
    blocks = []
    for c, trils in enumerate(guide.z_scale_tril):
        blocks.append(scales["mu"][c].square())
        if "linear" in scales:
            blocks.append(torch.diag(scales["linear"][c].square()))
        blocks += list(trils @ trils.mT)
    return torch.block_diag(*blocks)


def wasserstein_2(a: GaussianFit, b: GaussianFit) -> float:
    """2-Wasserstein distance of two Gaussians.

    W2^2 = |m_a - m_b|^2 + tr A + tr B - 2 tr (A^1/2 B A^1/2)^1/2.
    """
    values, vectors = torch.linalg.eigh(a.cov)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.mT
    cross = torch.linalg.eigvalsh(root @ b.cov @ root).clamp(min=0).sqrt().sum()
    squared = (a.mean - b.mean).square().sum() + a.cov.trace() + b.cov.trace() - 2 * cross
    return float(squared.clamp(min=0).sqrt())
