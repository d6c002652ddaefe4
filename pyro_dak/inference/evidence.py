"""The log evidence of features, scales and noise, with gradients."""

import math

import torch
from torch import Tensor

from pyro_dak.inference.exact import checked_normal_priors
from pyro_dak.inference.guides.joint import flat_priors
from pyro_dak.model.dak import DAK

__all__ = ["log_evidence"]


def log_evidence(model: DAK, h: Tensor, y: Tensor, *, residual_variance: bool = False) -> Tensor:
    """log p(y) of each output, `(C,)`, in nats, with gradients in h, unit scales and noise.

    These are the numbers whose sum `exact_posterior` returns. With B = diag(v)^{-1/2} Phi diag(s0)
    and r = diag(v)^{-1/2} (y - Phi w0), as there,

        log p(y) = -(sum_n log(2 pi v_n) + log det(I + B B^T) + r^T (I + B B^T)^{-1} r) / 2,

    and the smaller one of I + B B^T, N x N, and I + B^T B, K x K, is factorised: they have the same
    determinant, and r^T (I + B B^T)^{-1} r = r^T r - m^T m with m = L^{-1} B^T r, L L^T the larger.

    Args:
        model: with `GaussianLikelihood` and normal priors.
        h: unit inputs, `(N, P)`.
        y: targets, `(N, C)`.
        residual_variance: as in `exact_posterior`.
    """
    priors, layer = checked_normal_priors(model), model.layer
    empty = h.new_empty(layer.num_functions, layer.num_weights)
    loc0, scale0 = flat_priors(priors, model.site_shapes, empty)
    noise: Tensor = model.likelihood.noise_scale  # type: ignore[assignment]
    design = layer.design(h)
    var = noise.square().expand(y.shape)
    if residual_variance:
        var = var + model.residual_variance(h)  # (N, C)
    scale = var.sqrt().mT.unsqueeze(-1)  # (C, N, 1)
    B = design * scale0.unsqueeze(-2) / scale  # (C, N, K)
    r = (y - design @ loc0.mT).mT.unsqueeze(-1) / scale
    is_wide = B.shape[-2] <= B.shape[-1]
    gram = B @ B.mT if is_wide else B.mT @ B
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    root = torch.linalg.cholesky(eye + gram)
    half = torch.linalg.solve_triangular(root, r if is_wide else B.mT @ r, upper=False)
    fit = half.square().sum((-2, -1))
    if not is_wide:
        fit = r.square().sum((-2, -1)) - fit
    log_det = 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return -0.5 * ((2 * math.pi * var).log().sum(-2) + log_det + fit)
