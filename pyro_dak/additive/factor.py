"""The inverse Cholesky factor L_U^{-T}: O(M) for Markov kernels, dense for any kernel."""

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from pyro_dak.additive.grid import DyadicGrid
from pyro_dak.additive.kernels import Kernel
from pyro_dak.annotations import Float

__all__ = [
    "Delta",
    "LevelConstants",
    "as_tensor",
    "dense_inverse_factor",
    "level_coefficients",
    "level_constants",
    "sparse_inverse_factor",
]

# The spacing of a grid in lengthscales: a number, or one for each unit, `(..., P)`.
Delta: TypeAlias = float | Float[Tensor, "..."]


def as_tensor(delta: Delta) -> Float[Tensor, "..."]:
    """Delta as a tensor; a number becomes one in float64 on the CPU."""
    return delta if isinstance(delta, Tensor) else torch.tensor(delta, dtype=torch.float64)


def level_coefficients(
    level: int, delta: Delta
) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."], Float[Tensor, "..."], Float[Tensor, "..."]]:
    """Regression of a level's points on their coarser neighbours: `(c, scale, c_edge, scale_edge)`.

    Each is like `delta`. With both neighbours at distance d and delta = d / t, the
    Ornstein-Uhlenbeck bridge gives

        g = c (g_left + g_right) + scale z,   c = 1 / (2 cosh delta),   scale^2 = tanh delta;

    the first and last point of a level have one neighbour and
    `g = c_edge g_neighbour + scale_edge z` with c_edge = exp(-delta),
    scale_edge^2 = 1 - exp(-2 delta). This is the solution of the 3 x 3 system of the paper's
    Algorithm 1, written so that nothing overflows and nothing cancels. At level 1 the one point
    has no neighbour and `g = z`.
    """
    delta = as_tensor(delta)
    if level == 1:
        zero, one = torch.zeros_like(delta), torch.ones_like(delta)
        return zero, one, zero, one
    c_edge = (-delta).exp()
    c = c_edge / (1 + (-2 * delta).exp())
    return c, delta.tanh().sqrt(), c_edge, (-torch.expm1(-2 * delta)).sqrt()


class LevelConstants(NamedTuple):
    """Per point in level order, `(..., M)`: coefficient of the neighbours and scale of z."""

    c: Float[Tensor, "*units m"]
    scale: Float[Tensor, "*units m"]


def level_constants(level: int, delta: Delta) -> LevelConstants:
    """Coefficients of all points of a grid with spacing `delta` t, `(..., M)` each."""
    delta = as_tensor(delta)
    parts: list[list[Tensor]] = [[], []]
    for current in range(1, level + 1):
        c, scale, *edges = level_coefficients(current, delta * 2 ** (level - current))
        for part, inner, edge in zip(parts, (c, scale), edges, strict=True):
            num_inner = max(2 ** (current - 1) - 2, 0)
            inner = inner.unsqueeze(-1).expand(*delta.shape, num_inner)
            ends = [edge.unsqueeze(-1)] * min(current, 2)
            part.append(torch.cat([*ends[:1], inner, *ends[1:]], -1))
    return LevelConstants(*(torch.cat(part, -1) for part in parts))


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
    if not isinstance(kernel.lengthscale, float):
        raise ValueError(
            f"`kernel` must have one lengthscale, a number, for the sparse factor; got {kernel}. "
            "Take the factor of one unit at a time."
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
    grid: DyadicGrid,
    kernel: Kernel,
    jitter: float = 1e-6,
    lengthscale: Float[Tensor, "*units"] | None = None,
) -> Float[Tensor, "*units m m"]:
    """L_U^{-T} with L_U L_U^T = K_UU + jitter I, dense and upper triangular, `(..., M, M)`.

    It is in float64 on the CPU, or, for a `lengthscale` that is given instead of the kernel's own,
    in its dtype and on its device, and differentiable by it. Smooth kernels on fine grids are
    singular in floating point; the jitter bounds the entries of the factor by 1 / sqrt(jitter) and
    with them the rounding errors of the activation.

    Raises:
        ValueError: if K_UU + jitter I has no Cholesky factor in floating point.
    """
    U = grid.inducing_points
    if lengthscale is None:
        K_UU = kernel(U, U)
    else:
        U = U.to(lengthscale.device, lengthscale.dtype)
        K_UU = kernel.of_scaled_distance((U.unsqueeze(-1) - U).abs() / lengthscale[..., None, None])
    eye = torch.eye(grid.num_inducing, dtype=U.dtype, device=U.device)
    L_U, info = torch.linalg.cholesky_ex(K_UU + jitter * eye)
    if int(info.amax()) != 0:
        raise ValueError(
            f"`jitter`={jitter} is too small: the {type(kernel).__name__} matrix of "
            f"{grid.num_inducing} points is not positive definite in {str(U.dtype)[6:]}. Raise "
            "`jitter`, lower `level` or shorten the lengthscale."
        )
    return torch.linalg.solve_triangular(L_U, eye.expand_as(L_U), upper=False).mT
