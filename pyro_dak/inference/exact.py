"""The exact posterior of the last layer for a Gaussian likelihood, and the log evidence."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_dak.inference.guides import FullRankGuide
from pyro_dak.model.dak import DAK
from pyro_dak.model.likelihoods import GaussianLikelihood
from pyro_dak.model.modes import evaluating
from pyro_dak.validation import check_finite

__all__ = ["ExactPosterior", "exact_posterior"]


class ExactPosterior(NamedTuple):
    """The posterior as a guide, and log p(y | x), summed over outputs, in nats."""

    guide: FullRankGuide
    log_evidence: float


@torch.no_grad()
def exact_posterior(
    model: DAK,
    x: Tensor,
    y: Tensor,
    *,
    residual_variance: bool = False,
    chunk_size: int = 4096,
) -> ExactPosterior:
    """Posterior of (z, mu, linear) at the features as they are, exactly, in float64.

    For each output y = Phi w + noise with rows Phi from `AdditiveLayer.design`,
    w ~ N(w0, diag(s0^2)) and noise of variance v_n at row n. With whitened weights (w - w0) / s0
    and B = diag(v)^{-1/2} Phi diag(s0) the posterior precision is I + B^T B, and

        log p(y) = -(sum_n log(2 pi v_n) + log det(I + B^T B) + r^T r - m^T (I + B^T B) m) / 2

    with r the whitened residual of the prior mean and m the whitened posterior mean. The
    factorisation is of I + B^T B (K x K, accumulated over chunks of rows) or of I + B B^T (N x N),
    whichever is smaller.

    Args:
        model: with `GaussianLikelihood` and normal priors; evaluated in eval mode.
        x: inputs, `(N, ...)`.
        y: targets, `(N, C)`, or `(N,)` for one output.
        residual_variance: whether v_n is noise_scale^2 plus the prior variance that the grid loses
            at row n, instead of noise_scale^2 alone. On a fine grid this is the posterior of the
            additive GP itself (rows that share no interval between nodes lose independent parts);
            without it, it is the posterior of the model as written.
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
    with evaluating(model):
        chunks = _design_and_residuals(model, x, y, loc0, residual_variance, chunk_size)
        solver = _by_weights if len(y) > loc0.shape[-1] else _by_rows
        parts = solver(chunks, scale0, noise_scale)
    loc = loc0 + scale0 * torch.stack([part.mean for part in parts])
    tril = scale0.unsqueeze(-1) * torch.stack([part.tril for part in parts])
    log_evidence = -0.5 * sum(len(y) * math.log(2 * math.pi) + part.fit for part in parts)
    like = model.layer.log_unit_scale
    with torch.random.fork_rng(devices=[]):  # its random start is not used
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
        parameters = model.normal_prior(name)
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


class _Solution(NamedTuple):
    """The solution for one output: mean and Cholesky factor of the whitened weights, and `fit`,

    sum_n log v_n + log det(I + B^T B) + r^T r - m^T (I + B^T B) m.
    """

    mean: Tensor
    tril: Tensor
    fit: float


# Chunks of Phi (n, K), of the residuals of the prior mean and of the variance lost, (n, C) each.
_Chunks = Iterator[tuple[Tensor, Tensor, Tensor]]


def _design_and_residuals(
    model: DAK, x: Tensor, y: Tensor, loc0: Tensor, residual_variance: bool, chunk_size: int
) -> _Chunks:
    for start in range(0, len(x), chunk_size):
        h = model.unit_inputs(x[start : start + chunk_size]).double()
        design = model.layer.design(h)
        residual = y[start : start + chunk_size].double() - design @ loc0.mT
        lost = model.residual_variance(h) if residual_variance else torch.zeros_like(residual)
        yield design, residual, lost


def _by_weights(chunks: _Chunks, scale0: Tensor, noise_scale: list[float]) -> list[_Solution]:
    """Solve with I + B^T B, K x K, from sums over the rows; outputs with one noise share them.

    With J the reversal, chol(J A J) reversed is an upper U with A = U U^T, so that U^{-T} is the
    lower Cholesky factor of A^{-1}.
    """
    C, K = len(noise_scale), scale0.shape[-1]
    options: dict[str, Any] = {"dtype": torch.float64, "device": scale0.device}
    is_shared = len(set(noise_scale)) == 1 and bool((scale0 == scale0[0]).all())
    grams = [torch.zeros(K, K, **options) for _ in range(1 if is_shared else C)]
    moment, square, log_var = (torch.zeros(*shape, **options) for shape in ((C, K), (C,), (C,)))
    for design, residual, lost in chunks:
        for c, noise in enumerate(noise_scale):
            var = noise**2 + lost[:, c]
            if c < len(grams):
                grams[c] += design.mT @ (design / var.unsqueeze(-1))
            moment[c] += design.mT @ (residual[:, c] / var)
            square[c] += (residual[:, c].square() / var).sum()
            log_var[c] += var.log().sum()
    eye = torch.eye(K, **options)
    solutions = []
    for c in range(C):
        gram = grams[c if c < len(grams) else 0]
        precision = eye + scale0[c].unsqueeze(-1) * gram * scale0[c]
        upper = torch.linalg.cholesky(precision.flip(-1, -2)).flip(-1, -2)
        tril = torch.linalg.solve_triangular(upper, eye, upper=True).mT
        half = tril.mT @ (scale0[c] * moment[c])
        fit = log_var[c] + 2 * upper.diagonal().log().sum() + square[c] - half @ half
        solutions.append(_Solution(tril @ half, tril, float(fit)))
    return solutions


def _by_rows(chunks: _Chunks, scale0: Tensor, noise_scale: list[float]) -> list[_Solution]:
    """Solve with I + B B^T = L L^T, N x N: covariance I - V V^T with V = B^T L^{-T}."""
    design, residual, lost = (torch.cat(part) for part in zip(*chunks, strict=True))
    N, K = design.shape
    eye = torch.eye(max(N, K), dtype=torch.float64, device=design.device)
    solutions = []
    for c, noise in enumerate(noise_scale):
        var = noise**2 + lost[:, c]
        B, r = design * scale0[c] / var.sqrt().unsqueeze(-1), residual[:, c] / var.sqrt()
        L = torch.linalg.cholesky(eye[:N, :N] + B @ B.mT)
        V = torch.linalg.solve_triangular(L, B, upper=False).mT  # (K, N)
        half = torch.linalg.solve_triangular(L, r.unsqueeze(-1), upper=False).squeeze(-1)
        tril, info = torch.linalg.cholesky_ex(eye[:K, :K] - V @ V.mT)
        if int(info) != 0:
            raise ValueError(
                f"`noise_scale`={noise:.2g} is too small against the scale of f: the posterior is "
                "singular in float64. Raise it."
            )
        fit = var.log().sum() + 2 * L.diagonal().log().sum() + half @ half
        solutions.append(_Solution(V @ half, tril, float(fit)))
    return solutions
