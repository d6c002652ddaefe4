"""The Markov formulas of a unit: O(M) for its nodes, then O(1) per input.

Everything here works in *grid coordinates* x = (h - low) / spacing, in which the sorted nodes lie
at 1, 2, ..., M, and knows the kernel only through `delta` = spacing / lengthscale, a number or one
for each unit in a tensor that broadcasts with the coordinates, with its gradient. Interval j
(0 <= j <= M) lies between nodes j and j + 1; intervals 0 and M reach to infinity. Tables are
padded with a zero at either end, so that nodes 0 and M + 1 exist and contribute nothing.

Because the Ornstein-Uhlenbeck process is Markov, g(h) given all nodes depends on the two around h
alone, and the conditional mean is that of the bridge:

    g(h) = w0 g(u_j) + w1 g(u_{j+1}),   w0 = sinh(b delta) / sinh(delta),  b = j + 1 - x,
                                        w1 = sinh(a delta) / sinh(delta),  a = x - j.

Written with exp and expm1 of negative arguments, no term overflows, and none cancels on fine grids:
sinh(b delta) / sinh(delta) = exp(-a delta) (1 - exp(-2 b delta)) / (1 - exp(-2 delta)).
At a node, gradients are those from the right.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dak.additive.factor import Delta, LevelConstants, as_tensor, level_coefficients
from pyro_dak.annotations import Float, Int

__all__ = [
    "FAR",
    "FeatureConstants",
    "Interval",
    "bridge_covariance",
    "bridge_variance",
    "bridge_weights",
    "feature_constants",
    "level_features",
    "locate",
    "node_factor",
    "node_features",
    "node_moments",
    "node_values",
]

# The distance to a node that does not exist. The exponential of minus it is zero, and so is its
# gradient by delta, which an infinite distance would turn into NaN.
FAR = 1e20


def _far(like: Tensor) -> float:
    """`FAR`, or the largest number of the dtype if that is less, as it is in half precision."""
    return min(FAR, torch.finfo(like.dtype).max)


class Interval(NamedTuple):
    """Where inputs lie: interval `j` and distances `a`, `b` to its two nodes, all `(...)`.

    Distances are in grid coordinates; that to a node that does not exist is `FAR`.
    `norm` is 1 / (1 - exp(-2 delta)), or 1 in the two unbounded intervals.
    """

    j: Int[Tensor, "..."]
    a: Float[Tensor, "..."]
    b: Float[Tensor, "..."]
    norm: Float[Tensor, "..."]


def _levels(num_inducing: int) -> list[slice]:
    """Where the points of each level are in level order, from the coarsest to the finest."""
    starts = [2**k - 1 for k in range(num_inducing.bit_length())]
    return [slice(start, 2 * start + 1) for start in starts]


def _interleave(new: Tensor, old: Tensor) -> Tensor:
    """Sorted values of a level from its n new and the n - 1 older points, `(..., 2n - 1)`."""
    pairs = torch.stack([new, F.pad(old, (0, 1))], -1)  # (..., n, 2)
    return pairs.flatten(-2)[..., :-1]


def node_values(
    z: Float[Tensor, "*batch m"], constants: LevelConstants
) -> Float[Tensor, "*batch m"]:
    """g(U) = L_U z at the sorted nodes, `(..., M)`, from z in level order; O(M), coarse to fine.

    A point is c (g_left + g_right) + scale z, with a neighbour that does not exist counted as zero.
    Constants for each unit, `(..., P, M)`, broadcast with z.
    """
    g = z[..., :0]
    for points in _levels(z.shape[-1]):
        around = F.pad(g, (1, 0)) + F.pad(g, (0, 1))
        new = constants.scale[..., points] * z[..., points] + constants.c[..., points] * around
        g = _interleave(new, g)
    return g


def node_moments(
    z_loc: Float[Tensor, "*batch m"],
    z_var: Float[Tensor, "*batch m"],
    constants: LevelConstants,
) -> tuple[Float[Tensor, "*batch m"], Float[Tensor, "*batch m"], Float[Tensor, "*batch k"]]:
    """Moments of g(U) = L_U z at the sorted nodes for independent z; O(M), coarse to fine.

    These are mean and variance `(..., M)`, and the covariance of neighbours `(..., M-1)`.
    With neighbours l, r of a new point (level order in, sorted order out):

        var = c^2 (var_l + var_r + 2 cov_lr) + scale^2 z_var,
        cov(l, new) = c (var_l + cov_lr),   cov(new, r) = c (var_r + cov_lr).

    All entries of L_U are non-negative, hence so are the variances and covariances here.
    """
    mean = node_values(z_loc, constants)
    var, cov = z_var[..., :0], z_var[..., :0]
    for points in _levels(z_var.shape[-1]):
        c = constants.c[..., points]
        z_var_new = constants.scale[..., points].square() * z_var[..., points]
        if c.shape[-1] == 1:
            var = z_var_new
            continue
        cov_lr = F.pad(cov, (1, 1))  # (..., n), zero where a neighbour is missing
        to_left = F.pad(var, (1, 0)) + cov_lr
        to_right = F.pad(var, (0, 1)) + cov_lr
        cov = (c.unsqueeze(-1) * torch.stack([to_left, to_right], -1)).flatten(-2)[..., 1:-1]
        var = _interleave(c.square() * (to_left + to_right) + z_var_new, var)
    return mean, var, cov


def locate(x: Float[Tensor, "*shape"], num_inducing: int, delta: Delta) -> Interval:
    """The interval of each grid coordinate x, with the distances to its nodes.

    A NaN lands in interval 0 with NaN distances, so that it shows in the result and never
    becomes an index out of range.
    """
    M = num_inducing
    index = x.detach().clamp(0, M).long().clamp(0, M)
    is_left, is_right = index == 0, index == M
    a = (x - index).masked_fill(is_left, _far(x))
    b = (1 + index - x).masked_fill(is_right, _far(x))
    is_outside = is_left | is_right
    if isinstance(delta, Tensor):
        return Interval(index, a, b, torch.where(is_outside, 1, -1 / torch.expm1(-2 * delta)))
    norm = torch.full_like(x, -1 / math.expm1(-2 * delta), requires_grad=False)
    return Interval(index, a, b, norm.masked_fill_(is_outside, 1.0))


def bridge_weights(
    interval: Interval, delta: Delta
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """Weights (w0, w1) of the two nodes around each input; each in [0, 1]."""
    _, a, b, norm = interval
    w0 = (-delta * a).exp() * -torch.expm1(-2 * delta * b) * norm
    w1 = (-delta * b).exp() * -torch.expm1(-2 * delta * a) * norm
    return w0, w1


def bridge_variance(interval: Interval, delta: Delta) -> Float[Tensor, "*shape"]:
    """Prior variance that the nodes do not explain, 1 - phi phi^T, in [0, 1].

    1 - w0^2 - w1^2 - 2 w0 w1 exp(-delta) = (1 - exp(-2 a delta)) (1 - exp(-2 b delta)) /
    (1 - exp(-2 delta)): a product of non-negative factors, exact also where the difference cancels.
    """
    _, a, b, norm = interval
    return torch.expm1(-2 * delta * a) * torch.expm1(-2 * delta * b) * norm


def bridge_covariance(
    interval: Interval, x: Float[Tensor, "*batch n"], delta: Delta
) -> Float[Tensor, "*batch n n"]:
    """Prior covariance between inputs that the nodes do not explain, k(x, x') - phi phi'^T.

    Between two nodes the process minus its interpolation is an Ornstein-Uhlenbeck bridge, and those
    of different intervals are independent. For x <= x' in the same interval the covariance is

        exp(-(x' - x) delta) (1 - exp(-2 a delta)) (1 - exp(-2 b' delta)) / (1 - exp(-2 delta)),

    with a the distance of x to the left node and b' that of x' to the right one: the smaller of
    either distance of the two. On the diagonal it is `bridge_variance`.

    Args:
        interval: where x lies.
        x: grid coordinates.
        delta: spacing over lengthscale, a number or `(..., 1)`.
    """
    j, a, b, norm = interval
    if isinstance(delta, Tensor):
        delta = delta.unsqueeze(-1)
    a = torch.minimum(a.unsqueeze(-1), a.unsqueeze(-2))
    b = torch.minimum(b.unsqueeze(-1), b.unsqueeze(-2))
    distance = (x.unsqueeze(-1) - x.unsqueeze(-2)).abs()
    product = torch.expm1(-2 * delta * a) * torch.expm1(-2 * delta * b) * norm.unsqueeze(-1)
    is_same = j.unsqueeze(-1) == j.unsqueeze(-2)
    return torch.where(is_same, product * (-delta * distance).exp(), 0.0)


class FeatureConstants(NamedTuple):
    """Per level: number of points and support d of their columns, `(L,)`; scales and norm.

    The last three depend on delta and are `(..., L)` for delta `(...)`.
    """

    num_points: Int[Tensor, " level"]
    d: Int[Tensor, " level"]
    scale: Float[Tensor, "*units level"]
    edge_scale: Float[Tensor, "*units level"]
    norm: Float[Tensor, "*units level"]


def feature_constants(level: int, delta: Delta) -> FeatureConstants:
    """Constants of `level_features`, in the dtype and on the device of delta."""
    delta = as_tensor(delta)
    count = 2 ** torch.arange(level, device=delta.device)
    d = count.flip(0)
    coefficients = [level_coefficients(i + 1, delta * 2 ** (level - i - 1)) for i in range(level)]
    scale, edge_scale = (torch.stack([c[k] for c in coefficients], -1) for k in (1, 3))
    norm = -1 / torch.expm1(-2 * delta.unsqueeze(-1) * d)
    return FeatureConstants(count, d, scale, edge_scale, norm)


def level_features(
    x: Float[Tensor, "*shape"], constants: FeatureConstants, delta: Delta
) -> tuple[Int[Tensor, "*shape level"], Float[Tensor, "*units level"]]:
    """The L columns of phi that can be non-zero at x, and their values, both `(..., L)`.

    On every level x lies in the support of one point, at i = (2 k + 1) d with d = 2^(L - l), whose
    column is scale sinh((d - |x - i|) delta) / sinh(d delta), or scale exp(-|x - i| delta) towards
    a side without a neighbour.
    """
    count, d, scale, edge_scale, norm = constants
    if isinstance(delta, Tensor):
        delta = delta.unsqueeze(-1)
    last = count - 1
    k = torch.minimum((x.detach().unsqueeze(-1) / (2 * d)).clamp(min=0), count)
    k = torch.minimum(k.long().clamp(min=0), last)  # (..., L); a NaN has become 0
    r = x.unsqueeze(-1) - (2 * k + 1) * d
    is_right = r >= 0
    r = torch.where(is_right, r, -r)
    is_first, is_last = k == 0, k == last
    is_open = torch.where(is_right, is_last, is_first)
    rest = (d - r).masked_fill(is_open, _far(r))
    amplitude = torch.where(is_first | is_last, edge_scale, scale) * torch.where(is_open, 1, norm)
    return last + k, amplitude * (-delta * r).exp() * -torch.expm1(-2 * delta * rest)


def node_features(
    level: int, delta: Float[Tensor, "*units"]
) -> tuple[Int[Tensor, "m level"], Float[Tensor, "*units m level"]]:
    """The rows of L_U, sorted: row j - 1 is phi(u_j), with one column for each level.

    The columns `(M, L)` are the same for every delta; the values are `(..., M, L)`, some of which
    are zero.
    """
    delta = delta.unsqueeze(-1)
    nodes = torch.arange(1, 2**level, dtype=delta.dtype, device=delta.device)
    return level_features(nodes, feature_constants(level, delta), delta)


def node_factor(level: int, delta: float) -> Float[Tensor, "m m"]:
    """L_U with sorted rows, which maps z to the values at the nodes; sparse COO, float64.

    Row j - 1 is phi(u_j), with one non-zero per level: O(M log M) in all.
    """
    M = 2**level - 1
    columns, values = node_features(level, as_tensor(delta))  # (M, L)
    rows = torch.arange(M).unsqueeze(-1).expand_as(columns)
    keep = values != 0
    indices = torch.stack([rows[keep], columns[keep]])
    return torch.sparse_coo_tensor(indices, values[keep], (M, M), check_invariants=True).coalesce()
