"""The exact posterior of the last layer for a Gaussian likelihood, and the log evidence."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_dak.guides import FullRankGuide
from pyro_dak.likelihoods import GaussianLikelihood
from pyro_dak.model import DAK
from pyro_dak.priors import normal_parameters
from pyro_dak.validation import check_finite

__all__ = ["ExactPosterior", "exact_posterior"]


class ExactPosterior(NamedTuple):
    """The posterior as a guide, and log p(y | x), summed over outputs, in nats."""

    guide: FullRankGuide
    log_evidence: float


@torch.no_grad()
def exact_posterior(model: DAK, x: Tensor, y: Tensor, chunk_size: int = 4096) -> ExactPosterior:
    """Posterior of (z, mu, linear) at the features as they are, exactly, in float64.

    For each output y = Phi w + noise with rows Phi from `AdditiveLayer.design` and
    w ~ N(w0, diag(s0^2)). With whitened weights (w - w0) / s0 and B = Phi diag(s0) / noise_scale
    the posterior precision is I + B^T B, and

        log p(y) = -(N log(2 pi noise_scale^2) + log det(I + B^T B) + r^T r - m^T (I + B^T B) m) / 2

    with r the whitened residual of the prior mean and m the whitened posterior mean. The
    factorisation is of I + B^T B (K x K, accumulated over chunks of rows) or of I + B B^T (N x N),
    whichever is smaller.

    Args:
        model: with `GaussianLikelihood` and normal priors; evaluated in eval mode.
        x: inputs, `(N, ...)`.
        y: targets, `(N, C)`, or `(N,)` for one output.
        chunk_size: rows at a time.
    """
    loc0, scale0 = _prior_parameters(model)
    noise_scale = _noise_scale(model)
    y = model.likelihood.check_targets(y, model.num_outputs)
    check_finite("x", x)
    check_finite("y", y)
    if len(x) != len(y) or len(y) == 0:
        raise ValueError(
            f"`x` and `y` must have the same, positive length; got {len(x)}, {len(y)}."
        )
    is_training = model.training
    model.eval()
    try:
        chunks = _design_and_residuals(model, x, y, loc0, chunk_size)
        solver = _by_weights(chunks) if len(y) > loc0.shape[-1] else _by_rows(chunks)
    finally:
        model.train(is_training)
    parts = [solver(c, scale0[c], noise_scale[c]) for c in range(model.num_outputs)]
    loc = loc0 + scale0 * torch.stack([mean for mean, _, _ in parts])
    tril = scale0.unsqueeze(-1) * torch.stack([tril for _, tril, _ in parts])
    log_evidence = sum(
        -0.5 * (len(y) * (math.log(2 * math.pi) + 2 * math.log(noise)) + fit)
        for noise, (_, _, fit) in zip(noise_scale, parts, strict=True)
    )
    like = model.layer.log_unit_scale
    guide = FullRankGuide(model).to(like.device, like.dtype)
    guide.set_parameters(loc, tril)
    return ExactPosterior(guide, log_evidence)


def _prior_parameters(model: DAK) -> tuple[Tensor, Tensor]:
    """Prior means and scales, `(F, K)` each, float64, in the order of `design`."""
    F = model.num_functions
    device = model.layer.log_unit_scale.device
    locs, scales = [], []
    for name in ("mu", "linear", "z"):
        if name not in model.site_shapes:
            continue
        parameters = normal_parameters(model.prior[name])
        if parameters is None:
            raise NotImplementedError(
                f"The exact posterior needs normal priors; site `{name}` has "
                f"{type(model.prior[name]).__name__}. Use run_nuts or a guide."
            )
        loc, scale = (torch.as_tensor(p, dtype=torch.float64, device=device) for p in parameters)
        locs.append(loc.expand(model.site_shapes[name]).reshape(F, -1))
        scales.append(scale.expand(model.site_shapes[name]).reshape(F, -1))
    if model.has_shrinkage:
        raise NotImplementedError(
            "The exact posterior needs Gaussian f, and a prior on `shrinkage` breaks it. "
            "Use run_nuts."
        )
    return torch.cat(locs, -1), torch.cat(scales, -1)


def _noise_scale(model: DAK) -> list[float]:
    if not isinstance(model.likelihood, GaussianLikelihood):
        raise NotImplementedError(
            f"The exact posterior needs GaussianLikelihood; got {type(model.likelihood).__name__}. "
            "Use run_nuts or a guide."
        )
    return model.likelihood.noise_scale.double().expand(model.num_outputs).tolist()


def _design_and_residuals(
    model: DAK, x: Tensor, y: Tensor, loc0: Tensor, chunk_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunks of Phi `(n, K)` and of the residuals of the prior mean `(n, C)`, float64."""
    for start in range(0, len(x), chunk_size):
        h = model.unit_inputs(x[start : start + chunk_size]).double()
        design = model.layer.design(h)
        yield design, y[start : start + chunk_size].double() - design @ loc0.mT


# Posterior mean and Cholesky factor of the whitened weights of output c, and the term
# log det(I + B^T B) + r^T r - m^T (I + B^T B) m of its evidence, from (c, s0, noise_scale).
Solver = Callable[[int, Tensor, float], tuple[Tensor, Tensor, float]]


def _by_weights(chunks: Iterator[tuple[Tensor, Tensor]]) -> Solver:
    """Solve with I + B^T B, K x K, from sums over the rows.

    With J the reversal, chol(J A J) reversed is an upper U with A = U U^T, so that U^{-T} is the
    lower Cholesky factor of A^{-1}.
    """
    gram = moment = square = torch.zeros((), dtype=torch.float64)
    for design, residual in chunks:
        gram = gram.to(design.device) + design.mT @ design
        moment = moment.to(design.device) + design.mT @ residual
        square = square.to(design.device) + residual.square().sum(0)

    def solve(c: int, scale0: Tensor, noise_scale: float) -> tuple[Tensor, Tensor, float]:
        eye = torch.eye(len(scale0), dtype=torch.float64, device=gram.device)
        weight = scale0 / noise_scale
        precision = eye + weight.unsqueeze(-1) * gram * weight
        upper = torch.linalg.cholesky(precision.flip(-1, -2)).flip(-1, -2)
        tril = torch.linalg.solve_triangular(upper, eye, upper=True).mT
        half = tril.mT @ (weight * moment[:, c] / noise_scale)
        log_det = 2 * float(upper.diagonal().log().sum())
        return tril @ half, tril, log_det + float(square[c]) / noise_scale**2 - float(half @ half)

    return solve


def _by_rows(chunks: Iterator[tuple[Tensor, Tensor]]) -> Solver:
    """Solve with I + B B^T = L L^T, N x N: covariance I - V V^T with V = B^T L^{-T}."""
    designs, residuals = zip(*chunks, strict=True)
    design, residual = torch.cat(designs), torch.cat(residuals)

    def solve(c: int, scale0: Tensor, noise_scale: float) -> tuple[Tensor, Tensor, float]:
        B, r = design * (scale0 / noise_scale), residual[:, c] / noise_scale
        eye = torch.eye(max(B.shape), dtype=torch.float64, device=B.device)
        L = torch.linalg.cholesky(eye[: len(r), : len(r)] + B @ B.mT)
        V = torch.linalg.solve_triangular(L, B, upper=False).mT  # (K, N)
        half = torch.linalg.solve_triangular(L, r.unsqueeze(-1), upper=False).squeeze(-1)
        K = len(scale0)
        tril = torch.linalg.cholesky(eye[:K, :K] - V @ V.mT)
        return V @ half, tril, 2 * float(L.diagonal().log().sum()) + float(half @ half)

    return solve
