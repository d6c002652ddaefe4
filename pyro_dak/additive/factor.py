"""The inverse Cholesky factor L_U^{-T}: O(M) for Markov kernels, dense for any kernel."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_dak.additive.grid import DyadicGrid
from pyro_dak.additive.kernels import Kernel

__all__ = [
    "LevelConstants",
    "dense_inverse_factor",
    "level_coefficients",
    "level_constants",
    "sparse_inverse_factor",
]


def level_coefficients(level: int, delta: float) -> tuple[float, float, float, float]:
    """Regression of a level's points on their coarser neighbours: `(c, scale, c_edge, scale_edge)`.

    With both neighbours at distance d and delta = d / t, the Ornstein-Uhlenbeck bridge gives

        g = c (g_left + g_right) + scale z,   c = 1 / (2 cosh delta),   scale^2 = tanh delta;

    the first and last point of a level have one neighbour and
    `g = c_edge g_neighbour + scale_edge z` with c_edge = exp(-delta),
    scale_edge^2 = 1 - exp(-2 delta). This is the solution of the 3 x 3 system of the paper's
    Algorithm 1, written so that nothing overflows and nothing cancels. At level 1 the one point
    has no neighbour and `g = z`.
    """
    if level == 1:
        return 0.0, 1.0, 0.0, 1.0
    c_edge = math.exp(-delta)
    c = c_edge / (1 + math.exp(-2 * delta))
    return c, math.sqrt(math.tanh(delta)), c_edge, math.sqrt(-math.expm1(-2 * delta))


class LevelConstants(NamedTuple):
    """Per point in level order, `(M,)`: coefficient of the neighbours and scale of z."""

    c: Float[Tensor, " m"]
    scale: Float[Tensor, " m"]


def level_constants(level: int, delta: float) -> LevelConstants:
    """Coefficients of all points of a grid with spacing `delta` t, in float64."""
    levels = []
    for current in range(1, level + 1):
        coefficients = level_coefficients(current, delta * 2 ** (level - current))
        inner, edge = torch.tensor(coefficients, dtype=torch.float64).view(2, 2, 1)
        values = inner.repeat(1, 2 ** (current - 1))
        values[:, [0, -1]] = edge
        levels.append(values)
    return LevelConstants(*torch.cat(levels, 1))


def sparse_inverse_factor(grid: DyadicGrid, kernel: Kernel) -> Float[Tensor, "m m"]:
    """L_U^{-T} of a Markov kernel in O(M), a sparse upper-triangular `(M, M)` COO tensor, float64.

    Column m holds 1/scale at (m, m) and -c/scale at m's neighbours (paper, Algorithm 1),
    because z_m = (g_m - c g_left - c g_right) / scale: at most three non-zeros a column.
    """
    if not kernel.is_markov:
        raise ValueError(
            f"`kernel` must be Markov for the sparse factor; got {type(kernel).__name__}. "
            "Use LaplaceKernel, or the dense factor."
        )
    M = grid.num_inducing
    c, scale = level_constants(grid.level, grid.spacing / kernel.lengthscale)
    rows = torch.cat([torch.arange(M), *grid.neighbours])
    columns = torch.arange(M).repeat(3)
    values = torch.cat([1 / scale, -c / scale, -c / scale])
    exists = rows >= 0
    indices = torch.stack([rows, columns])[:, exists]
    factor = torch.sparse_coo_tensor(indices, values[exists], (M, M), check_invariants=True)
    return factor.coalesce()


def dense_inverse_factor(
    grid: DyadicGrid, kernel: Kernel, jitter: float = 1e-6
) -> Float[Tensor, "m m"]:
    """L_U^{-T} with L_U L_U^T = K_UU + jitter I, a dense upper-triangular `(M, M)`, float64.

    Smooth kernels on fine grids are singular in floating point; the jitter bounds the entries of
    the factor by 1 / sqrt(jitter) and with them the rounding errors of the activation.

    Raises:
        ValueError: if K_UU + jitter I has no Cholesky factor in float64.
    """
    U = grid.inducing_points
    eye = torch.eye(grid.num_inducing, dtype=torch.float64)
    L_U, info = torch.linalg.cholesky_ex(kernel(U, U) + jitter * eye)
    if int(info) != 0:
        raise ValueError(
            f"`jitter`={jitter} is too small: the {type(kernel).__name__} matrix of "
            f"{grid.num_inducing} points is not positive definite in float64. Raise `jitter`, "
            "lower `level` or shorten the lengthscale."
        )
    return torch.linalg.solve_triangular(L_U, eye, upper=False).mT
