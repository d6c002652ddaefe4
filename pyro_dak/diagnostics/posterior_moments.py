"""Moments of any posterior: of all weights together, and of the predictions."""

import copy
from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
from pyro.distributions import Categorical
from torch import Tensor

from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.inference.densities import likelihoods_of_draws, with_noise
from pyro_dak.inference.draws import Draws, Posterior, as_guide, draw_posterior, has_closed_form
from pyro_dak.inference.guides import GaussianGuide, LowRankGuide, TrilGuide
from pyro_dak.inference.guides.base import check_guide
from pyro_dak.model.dak import DAK
from pyro_dak.model.likelihoods import GaussianLikelihood

__all__ = [
    "GaussianFit",
    "Response",
    "function_moments",
    "gaussian_fit",
    "response",
    "weight_names",
]


class GaussianFit(NamedTuple):
    """Mean `(W,)` and covariance `(W, W)` of all weights of all functions.

    One function stands after the other. Each has its bias, its linear terms, and then the kernel
    weights of one unit after the other.
    """

    mean: Tensor
    cov: Tensor

    @property
    def sd(self) -> Tensor:
        """Standard deviations, `(W,)`."""
        return self.cov.diagonal().sqrt()


@torch.no_grad()
def gaussian_fit(model: DAK, posterior: Posterior, draws: Draws | None = None) -> GaussianFit:
    """Mean and covariance of all weights.

    They are exact for the Gaussian guides of this library. For every other posterior they are
    those of `draws`, or of 4000 draws if none are given.
    """
    guide = as_guide(posterior, torch.float64)
    if isinstance(guide, GaussianGuide):
        check_guide(model, guide, same_dtype=False)
        return GaussianFit(_flat(guide.weight_means()._asdict()), _covariance(guide))
    if draws is None:
        draws = draw_posterior(model, posterior, num_samples=4000, seed=0)
    flat = _flat(draws.flat(), has_draws=True)
    return GaussianFit(flat.mean(0), flat.mT.cov().reshape(flat.shape[-1], -1))


def _flat(sites: Mapping[str, Any], has_draws: bool = False) -> Tensor:
    """Weights in the order of `GaussianFit`, `(W,)` or `(S, W)`."""
    parts = (sites["mu"].unsqueeze(-1), sites.get("linear"), sites["z"].flatten(-2))
    flat = torch.cat([part for part in parts if part is not None], -1)
    return flat.flatten(1 if has_draws else 0).double()


def _covariance(guide: GaussianGuide) -> Tensor:
    if isinstance(guide, TrilGuide):
        return guide.weight_covariance()
    if isinstance(guide, LowRankGuide):  # its weights stand site after site
        order = _flat(guide.split(torch.arange(len(guide.loc)))._asdict()).long()
        factor = guide.factor[order]
        return factor @ factor.mT + torch.diag((2 * guide.log_scale[order]).exp())
    z_root, _ = guide.unit_roots()
    blocks = []
    for c, covariances in enumerate(z_root @ z_root.mT):
        for name in guide.weight_sites[:-1]:
            blocks.append(torch.diag(guide.normal(name)[1][c : c + 1].square().flatten()))
        blocks += list(covariances)
    return torch.block_diag(*blocks)


def weight_names(model: DAK) -> tuple[list[str], list[str]]:
    """A label for each weight, and the unit it belongs to, in the order of `GaussianFit`."""
    names = [name for name in ("mu", "linear", "z") if name in model.site_shapes]
    elements = [(n, i) for n in names for i in product(*map(range, model.site_shapes[n]))]
    elements.sort(key=lambda element: element[1][0])  # by function; the sites keep their order
    labels = [f"{name}[{','.join(map(str, index))}]" for name, index in elements]
    return labels, [f"unit {i[1]}" if len(i) > 1 else "bias" for _, i in elements]


def function_moments(model: DAK, guide: GaussianGuide, h: Tensor) -> FunctionMoments:
    """q(f) at unit inputs h, in float64, which the guide and h must be too."""
    return guide.moments(copy.deepcopy(model.layer).double(), h)


class Response(NamedTuple):
    """Mean and standard deviation of E[y | f] over a posterior, and the mean of Var[y | f].

    All are `(N, C)`. E[y | f] is f for a regression and the probabilities for classes.
    """

    mean: Tensor
    sd: Tensor
    noise_var: Tensor


@torch.no_grad()
def response(model: DAK, posterior: Posterior, h: Tensor, draws: Draws) -> Response:
    """The response at unit inputs h, `(N, P)`.

    It is exact for Gaussian noise and a Gaussian guide, and otherwise that of the draws. Chunks of
    draws are joined by the parallel formula for sums of squares, in which nothing cancels.
    """
    guide = as_guide(posterior, torch.float64)
    if isinstance(model.likelihood, GaussianLikelihood) and has_closed_form(guide):
        moments = function_moments(model, guide, h)
        mean, var, noise_var = with_noise(model.likelihood).predictive_moments(moments)
        return Response(mean, var.sqrt(), noise_var)
    count, mean, squares, noise_var = 0, h.new_zeros(()), h.new_zeros(()), h.new_zeros(())
    for p in likelihoods_of_draws(model, h, draws.flat()):
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
