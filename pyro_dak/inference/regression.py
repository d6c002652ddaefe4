"""Bayesian linear regression from sums over rows: exact posterior, evidence and its gradient.

The model of a row is y = mu + phi w + noise, with a flat prior on mu and w ~ N(0, C), where C has a
block for each term. The columns of phi have mean zero over the rows in every direction in which C
has variance, so that mu and w are independent in the posterior. With G = sum phi^T phi,
b = sum phi^T (y - mean y), t = sum (y - mean y)^2 and n rows, the posterior of w has

    covariance S = (C^{-1} + G / s^2)^{-1},   mean m = S b / s^2,

and the log evidence, of the n - 1 contrasts of y, is

    -1/2 [(n - 1) log(2 pi s^2) + log det(I + C G / s^2) + (t - b^T m) / s^2].

Rows are seen once, for the sums; all else costs the number of weights cubed. Everything is float64.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Evidence", "LinearPosterior", "RegressionSums", "evidence", "linear_posterior"]


class RegressionSums(NamedTuple):
    """Sums over rows: G `(K, K)`, b `(K,)`, t and n, as in the docstring of the module."""

    gram: Tensor
    projection: Tensor
    total: float
    num_rows: float


class LinearPosterior(NamedTuple):
    """The posterior of the weights: `mean` `(K,)` and a `root` `(Z, K)`, S = root^T root."""

    mean: Tensor
    root: Tensor


class Evidence(NamedTuple):
    """The log evidence and its derivatives: by each block of C, and by log s."""

    value: float
    by_blocks: list[Tensor]
    by_log_noise: float


class _Whitened(NamedTuple):
    """What posterior and evidence share. With C = R R^T and B = I + R^T G R / s^2 = T T^T.

    `tril` is T, `solved` is T^{-1} R^T `(Z, K)`, and `projected` is T^{-1} R^T b `(Z,)`.
    """

    tril: Tensor
    solved: Tensor
    projected: Tensor


def linear_posterior(
    sums: RegressionSums, roots: Sequence[Tensor], noise_scale: float
) -> LinearPosterior:
    """The exact posterior of the weights, for priors N(0, R R^T) of the terms, one root R each."""
    _, solved, projected = _whitened(sums, roots, noise_scale)
    return LinearPosterior(solved.mT @ projected / noise_scale**2, solved)


def evidence(sums: RegressionSums, roots: Sequence[Tensor], noise_scale: float) -> Evidence:
    """The log evidence with its gradient.

    With r = (b - G m) / s^2 and Q = (G - G S G / s^2) / s^2, the derivative by C is
    (r r^T - Q) / 2, of which the diagonal blocks are given. By the same letters the derivative by
    log s is -(n - 1) + tr(S G) / s^2 + (t - 2 b^T m + m^T G m) / s^2.
    """
    s2 = noise_scale**2
    tril, solved, projected = _whitened(sums, roots, noise_scale)
    m = solved.mT @ projected / s2
    G_m = sums.gram @ m
    fit = float(sums.projection @ m)
    log_det = 2 * float(tril.diagonal().log().sum())
    value = (sums.num_rows - 1) * math.log(2 * math.pi * s2) + log_det + (sums.total - fit) / s2
    V = solved @ sums.gram / s2  # (Z, K)
    r = (sums.projection - G_m) / s2
    blocks, start = [], 0
    for root in roots:
        part = slice(start, start + len(root))
        start += len(root)
        Q = sums.gram[part, part] / s2 - V[:, part].mT @ V[:, part]
        blocks.append((torch.outer(r[part], r[part]) - Q) / 2)
    misfit = (sums.total - 2 * fit + float(m @ G_m)) / s2
    trace = float((solved * V).sum())
    return Evidence(-value / 2, blocks, misfit + trace - (sums.num_rows - 1))


def _whitened(sums: RegressionSums, roots: Sequence[Tensor], noise_scale: float) -> _Whitened:
    G_R = _times_blocks(sums.gram, roots) / noise_scale**2  # (K, Z)
    B = _times_blocks(G_R.mT, roots)
    B = (B + B.mT) / 2
    B.diagonal().add_(1)
    tril = torch.linalg.cholesky(B)
    solved = torch.linalg.solve_triangular(tril, torch.block_diag(*roots).mT, upper=False)
    return _Whitened(tril, solved, solved @ sums.projection)


def _times_blocks(matrix: Tensor, roots: Sequence[Tensor]) -> Tensor:
    """A times the block-diagonal matrix of the roots."""
    parts = matrix.split([len(root) for root in roots], -1)
    return torch.cat([part @ root for part, root in zip(parts, roots, strict=True)], -1)
