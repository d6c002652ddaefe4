"""The exact posterior of the last layer for a Gaussian likelihood, and the log evidence."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_dak.inference.densities import checked_data, noise_scale
from pyro_dak.inference.guides.joint import FullRankGuide, flat_priors
from pyro_dak.inference.objectives import normal_priors
from pyro_dak.model.dak import DAK
from pyro_dak.model.likelihoods import GaussianLikelihood
from pyro_dak.model.modes import evaluating

__all__ = ["ExactPosterior", "exact_posterior"]


class ExactPosterior(NamedTuple):
    """The posterior as a guide, and log p(y | x), summed over outputs, in nats."""

    guide: FullRankGuide
    log_evidence: float


@torch.no_grad()
def exact_posterior(
    model: DAK, x: Tensor, y: Tensor, *, residual_variance: bool = False, chunk_size: int = 4096
) -> ExactPosterior:
    """Posterior of (z, mu, linear) at the features as they are, exactly, in float64.

    For each output y = Phi w + noise with rows Phi from `AdditiveLayer.design`,
    w ~ N(w0, diag(s0^2)) and noise of variance v_n at row n. With whitened weights (w - w0) / s0
    and B = diag(v)^{-1/2} Phi diag(s0) the posterior precision is A = I + B^T B, K x K, and

        log p(y) = -(sum_n log(2 pi v_n) + log det A + r^T r - m^T A m) / 2

    with r = diag(v)^{-1/2} (y - Phi w0) and m = A^{-1} B^T r the whitened posterior mean.

    Args:
        model: with `GaussianLikelihood` and normal priors; evaluated in eval mode.
        x: inputs, `(N, ...)`.
        y: targets, `(N, C)`, or `(N,)` for one output.
        residual_variance: whether v_n is noise_scale^2 plus the prior variance that the grid loses
            at row n, instead of noise_scale^2 alone. On a fine grid this is the posterior of the
            additive GP itself (rows that share no interval between nodes lose independent parts);
            without it, it is the posterior of the model as written.
        chunk_size: number of rows at a time; A is summed over them.
    """
    priors, noise = _normal_priors(model), noise_scale(model.likelihood)
    assert noise is not None
    x, y = checked_data(model, x, y)
    like = model.layer.log_unit_scale
    with torch.random.fork_rng(devices=[]):  # the guide's random start is not used
        guide = FullRankGuide(model).to(like.device, torch.float64)
    loc0, scale0 = flat_priors(priors, guide.site_shapes, guide.loc)
    C, K = loc0.shape
    eye = torch.eye(K, dtype=torch.float64, device=like.device)
    A, moment, fit = eye.repeat(C, 1, 1), loc0.new_zeros(C, K, 1), loc0.new_zeros(C)
    with evaluating(model):
        for x_part, y_part in zip(x.split(chunk_size), y.split(chunk_size), strict=True):
            h = model.unit_inputs(x_part).double()
            design = model.layer.design(h)
            lost = model.residual_variance(h) if residual_variance else h.new_zeros(len(h), C)
            var = noise.square() + lost  # (n, C)
            r = ((y_part - design @ loc0.mT) / var.sqrt()).mT.unsqueeze(-1)  # (C, n, 1)
            B = design / var.sqrt().mT.unsqueeze(-1) * scale0.unsqueeze(-2)  # (C, n, K)
            A += B.mT @ B
            moment += B.mT @ r
            fit += (2 * math.pi * var).log().sum(0) + r.square().sum((-2, -1))
    # With J the reversal, chol(J A J) reversed is an upper U with A = U U^T, so that U^{-T} is
    # the lower Cholesky factor of A^{-1}.
    lower, info = torch.linalg.cholesky_ex(A.flip(-1, -2))
    if bool(info.any()):
        raise ValueError(
            f"`noise_scale`={float(noise.min()):.2g} is too small against the scale of f: the "
            "posterior is singular in float64. Raise it."
        )
    upper = lower.flip(-1, -2)
    tril = torch.linalg.solve_triangular(upper, eye.expand_as(upper), upper=True).mT
    half = tril.mT @ moment  # (C, K, 1)
    log_det = 2 * upper.diagonal(dim1=-2, dim2=-1).log().sum()
    log_evidence = -0.5 * (fit.sum() + log_det - half.square().sum())
    loc = loc0 + scale0 * (tril @ half).squeeze(-1)
    guide.set_parameters(loc, scale0.unsqueeze(-1) * tril)
    return ExactPosterior(guide.to(like.dtype), float(log_evidence))


def _normal_priors(model: DAK) -> dict[str, tuple[Any, Any]]:
    """(loc, scale) of the prior of each site, or an error if the posterior is not Gaussian."""
    priors = normal_priors(model, model.site_shapes)
    if not isinstance(model.likelihood, GaussianLikelihood):
        need = f"GaussianLikelihood; got {type(model.likelihood).__name__}"
    elif model.has_shrinkage:
        need = "Gaussian f, and a prior on `shrinkage` breaks it"
    elif priors is None:
        name = next(name for name in model.site_shapes if model.normal_prior(name) is None)
        need = f"normal priors; site `{name}` has {type(model.prior[name]).__name__}"
    else:
        return priors
    raise NotImplementedError(f"The exact posterior needs {need}. Use run_nuts or a guide.")
