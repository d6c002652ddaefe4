"""The terms of the bound as few operations, with their gradients written out.

What bounds the last layer is the number of operations, not their size. So the moments of the nodes
come from one product with a constant matrix (`LinearMap`), the two nodes around an input share an
axis and one gather, the scales of the units are part of the weights, and one backward pass serves
all of it. Each function here has a plain twin in `additive`, which a test holds it to.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_dak.annotations import Float, Int
from pyro_dak.fast.lengthscales import NodePattern, UnitMap
from pyro_dak.fast.transforms import needs_plain_operations

__all__ = [
    "ExpectedLogHeteroscedastic",
    "ExpectedLogNormal",
    "Intervals",
    "LinearMap",
    "MeanFieldTerms",
    "MemberTerms",
    "grad_normal",
    "interpolated_moments",
    "interval_matrix",
    "intervals_of_grid",
    "node_matrix",
    "second_derivative_error",
    "sinh_ratio",
    "stack_batches",
    "twice_kl",
    "two_nodes",
    "unit_intervals",
]

_LOG_2PI = math.log(2 * math.pi)


def second_derivative_error() -> NotImplementedError:
    """The error of a backward pass that has no gradient of its own."""
    return NotImplementedError(
        "The moments of f have first derivatives only on the local route; second ones were asked "
        "for (`create_graph=True`). Make the model with the option that has them, "
        '`DAK(..., route="dense")`, or take them by `torch.func`, as in `torch.func.hessian`.'
    )


class Intervals(NamedTuple):
    """The intervals between the nodes of a grid, as constants in one dtype on one device.

    Node j of 1 to M lies at low + j spacing; delta is the spacing in lengthscales. Numbers are kept
    as tensors where torch would otherwise convert them at each call. `slope` is delta / spacing.
    `squares`, `(M + 1,)`, holds 1 / sinh(delta)^2 for the intervals between two nodes and 0 for the
    two unbounded ones. `ends` is (1, 0) and `signs` is (-1, 1), both `(2, 1, 1, 1)`. `coefficients`
    are those of `sinh_coefficients`; `last_coefficient` is the last of them as a number. `slopes`,
    `(5, 5)`, are those of `_slopes`, times slope.

    Where units have a delta each (`unit_intervals`), it is `(P, 1)`, and so are the slope and the
    coefficients; `squares` is `(M + 1, P)`, and `last_coefficient` is `(P, 1)` too.
    """

    low: Tensor
    spacing: Tensor
    slope: Tensor
    squares: Tensor
    ends: Tensor
    signs: Tensor
    coefficients: tuple[Tensor, ...]
    last_coefficient: float | Tensor
    slopes: Tensor
    delta: float | Tensor
    num_nodes: int


def intervals_of_grid(
    num_nodes: int,
    low: float,
    spacing: float,
    delta: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Intervals:
    """The intervals of a grid, computed in float64 and then cast."""
    square = 4 * math.exp(-2 * delta) / math.expm1(-2 * delta) ** 2
    squares = torch.full((num_nodes + 1,), square, dtype=torch.float64)
    squares[[0, -1]] = 0
    coefficients = sinh_coefficients(delta, torch.finfo(dtype).eps)
    numbers = [low, spacing, delta / spacing, 1, 0, -1, 1, *coefficients]
    cast = torch.tensor(numbers, dtype=torch.float64).to(device, dtype)
    low_, spacing_, slope = cast[:3]
    ends, signs = cast[3:7].view(2, 2, 1, 1, 1)
    last = coefficients[-1] if coefficients else math.nan
    slopes = (_slopes(delta) * (delta / spacing)).to(device, dtype)
    constants = (squares.to(device, dtype), ends, signs, cast[7:].unbind(), last, slopes)
    return Intervals(low_, spacing_, slope, *constants, delta, num_nodes)


def _slopes(delta: float) -> Tensor:
    """From the five numbers of an interval to those of its slopes, `(5, 5)`, in lengthscales.

    With means m0, m1 at the nodes, variances v0, v1 and twice the covariance c, the slope of w0 m0
    + w1 m1 is w0 m0' + w1 m1', and that of w0^2 v0 + w1^2 v1 + w0 w1 c is w0^2 v0' + w1^2 v1' +
    w0 w1 c'. As the slope of w0 is -(coth(delta) w0 + w1 / sinh(delta)), and that of w1
    the same with both exchanged and the sign +,

        m0' = k m1 - l m0,  m1' = l m1 - k m0,
        v0' = k c - 2 l v0,  v1' = 2 l v1 - k c,  c' = 2 k (v1 - v0),

    where k = 1 / sinh(delta) and l = coth(delta). This holds outside the grid too if the nodes that
    do not exist are exp(-delta) times their neighbours.
    """
    k, c = 2 * math.exp(-delta) / -math.expm1(-2 * delta), 1 / math.tanh(delta)
    rows = [
        [-c, k, 0, 0, 0],
        [-k, c, 0, 0, 0],
        [0, 0, -2 * c, 0, k],
        [0, 0, 0, 2 * c, -k],
        [0, 0, -2 * k, 2 * k, 0],
    ]
    return torch.tensor(rows, dtype=torch.float64)


def unit_intervals(delta: Tensor, of_grid: Intervals, is_inside: Tensor) -> Intervals:
    """The intervals of a grid for units with delta `(P,)` each; those of the grid have any delta.

    `is_inside`, `(M + 1, 1)`, is 0 for the two unbounded intervals and else 1. The series needs to
    know how large delta is, which it asks on the CPU alone: elsewhere this would stop the device.
    """
    sinh = delta.sinh()
    squares = is_inside / sinh.square()
    delta = delta.unsqueeze(-1)  # (P, 1)
    coefficients: tuple[Tensor, ...] = ()
    if delta.device.type == "cpu" and not needs_plain_operations():
        num = len(sinh_coefficients(float(delta.detach().amax()), torch.finfo(delta.dtype).eps))
        if num > 0:
            coefficients = (delta / sinh.unsqueeze(-1),)
            square = delta * delta
        for k in range(1, num):
            coefficients += (coefficients[-1] * square / (2 * k * (2 * k + 1)),)
    low, spacing, _, _, ends, signs, _, _, slopes, _, num_nodes = of_grid
    last = coefficients[-1] if coefficients else math.nan
    # The compiler of torch 2.7 knows no `_replace`.
    constants = (squares, ends, signs, coefficients, last, slopes)
    return Intervals(low, spacing, delta / spacing, *constants, delta, num_nodes)


def sinh_coefficients(delta: float, eps: float) -> list[float]:
    """c_k with sinh(a delta) / sinh(delta) = sum_k c_k a^(2 k + 1), as many as matter for a <= 1.

    c_k = delta^(2 k + 1) / ((2 k + 1)! sinh(delta)). They are positive and sum to 1, so nothing
    cancels. In float32 three of them are enough for M = 7 on one lengthscale and two for M = 63,
    which costs a fraction of expm1. There are at least two. For delta > 1 there would be too many,
    and the list is empty.
    """
    if delta > 1:
        return []
    coefficients, c, k = [], delta / math.sinh(delta), 0
    while c > eps / 8 or k < 2:
        coefficients.append(c)
        k += 1
        c *= delta**2 / (2 * k * (2 * k + 1))
    return coefficients


class _SparseProduct(torch.autograd.Function):
    """z -> A z for a constant A in compressed rows, `(M, K)` to `(R, K)`."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, matrix: Tensor, transposed: Tensor) -> Tensor:
        ctx.matrix, ctx.transposed = matrix, transposed
        return _sparse_product(matrix, z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _SparseProduct.apply(grad, ctx.transposed, ctx.matrix), None, None


def _sparse_product(matrix: Tensor, z: Tensor) -> Tensor:
    """A z for A in compressed rows; without a gradient."""
    if z.dtype != torch.float32 or not z.is_cpu or z.shape[1] < 16:
        return matrix @ z
    # Its rows are sums of a few weighted rows of z each, for which torch has a faster operation.
    indices, starts = matrix.col_indices(), matrix.crow_indices()
    sums, *_ = torch.embedding_bag(
        z.contiguous(), indices, starts, False, 0, False, matrix.values(), True
    )
    return sums


class LinearMap:
    """A constant linear map A of the last axis of a tensor, made from a sparse COO `(R, M)`.

    The product is dense, or one with compressed rows.
    """

    def __init__(self, matrix: Tensor, is_dense: bool):
        self.is_dense = is_dense
        if is_dense:
            self.matrix = matrix.to_dense()
            self.transposed = self.matrix.mT
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            self.matrix = matrix.to_sparse_csr()
            self.transposed = matrix.mT.to_sparse_csr()

    def can_run(self) -> bool:
        """Whether the product works here: torch compiles and transforms no sparse products."""
        return self.is_dense or not needs_plain_operations()

    def __call__(self, z: Tensor) -> Tensor:
        """`(..., M)` to `(..., R)`."""
        return self.columns(z).mT.reshape(*z.shape[:-1], -1)

    def units_last(self, z: Tensor) -> Tensor:
        """`(..., P, M)` to `(..., R, P)`."""
        return self.columns(z).reshape(-1, *z.shape[:-1]).movedim(0, -2)

    def transpose(self, grad: Tensor) -> Tensor:
        """The transpose of `units_last`, `(F, R, P)` to `(F, P, M)`, without a gradient."""
        F, R, P = grad.shape
        flat = grad.transpose(0, 1).reshape(R, F * P)
        return self.transpose_rows(flat).view(F, P, -1)

    def transpose_rows(self, grad: Tensor) -> Tensor:
        """The transpose of grad `(R, K)` times A, `(K, M)`, without a gradient."""
        if self.is_dense:
            return grad.mT @ self.matrix
        return _sparse_product(self.transposed, grad).mT.contiguous()

    def columns(self, z: Tensor) -> Tensor:
        """A times the transpose of z with all but its last axis as one, `(R, K)`."""
        flat = z.reshape(-1, z.shape[-1]).mT
        if self.is_dense:
            return self.matrix @ flat
        return _SparseProduct.apply(flat, self.matrix, self.transposed)


def interval_matrix(
    L: Float[Tensor, "m m"], decay: float = 0.0
) -> Float[Tensor, "five_m_plus_5 two_m"]:
    """From means and variances of independent z, `(2 M,)`, to five numbers per interval; float64.

    Row blocks: the means of the left nodes of intervals 0 to M, the means of their right nodes, the
    variances of both likewise, and twice the covariance of the two. Nodes 0 and M + 1 do not exist;
    they are `decay` times their neighbours, by default zeros. L is L_U with sorted rows, sparse:
    row j - 1 maps z to g at node j. It has O(M log M) non-zeros, and so has the result.
    """
    before, after = (decay * L.index_select(0, torch.tensor([row])) for row in (0, len(L) - 1))
    left, right = torch.cat([before, L]).coalesce(), torch.cat([L, after]).coalesce()
    return side_by_side([left, right], [left * left, right * right, 2 * (left * right)])


def node_matrix(L: Float[Tensor, "m m"], delta: float) -> Float[Tensor, "three_m_plus_6 two_m"]:
    """From means and variances of independent z, `(2 M,)`, to three numbers per node; float64.

    Row blocks: the means of nodes 0 to M + 1, their variances, and twice the covariance of each
    with the next node. Nodes outside the grid continue the process where nothing more is known:
    each is exp(-delta) times its neighbour.
    """
    M, rho = len(L), math.exp(-delta)
    first, last = (L.index_select(0, torch.tensor([row])) for row in (0, M - 1))
    rows = torch.cat([rho * first, L, rho * last, rho**2 * last]).coalesce()
    nodes, following = (rows.index_select(0, torch.arange(M + 2) + k).coalesce() for k in (0, 1))
    return side_by_side([nodes], [nodes * nodes, 2 * (nodes * following)])


def side_by_side(of_mean: list[Tensor], of_variance: list[Tensor]) -> Tensor:
    """One block below the other; those of the mean in the left columns, the others in the right."""
    empty = torch.zeros_like(of_mean[0])
    blocks = [torch.cat([block, empty], 1) for block in of_mean]
    blocks += [torch.cat([empty, block], 1) for block in of_variance]
    return torch.cat(blocks).coalesce()


def sinh_ratio(a: Tensor, intervals: Intervals) -> Tensor:
    """sinh(a delta) / sinh(delta) for a in [0, 1]: by its series, on coarse grids by exp."""
    coefficients, delta = intervals.coefficients, intervals.delta
    if not coefficients:
        left, twice = ((a - 1) * delta).exp(), -2 * delta
        total = twice.expm1() if isinstance(twice, Tensor) else math.expm1(twice)
        return (a * twice).expm1() * left / total
    squares, last = a * a, intervals.last_coefficient
    if isinstance(last, Tensor):
        w = torch.addcmul(coefficients[-2], squares, last)
    else:
        # One pass: torch is three times slower at `addcmul` where two of the three are scalars.
        w = torch.add(coefficients[-2], squares, alpha=last)
    for c in coefficients[-3::-1]:
        w = torch.addcmul(c, w, squares)
    return a * w


def two_nodes(
    h: Float[Tensor, "e p n"], sigma: Float[Tensor, "#e p"] | None, intervals: Intervals
) -> tuple[Int[Tensor, "e p n"], Float[Tensor, "2 e p n"]]:
    """The interval of each input, and the weights of its two nodes times sigma.

    The fast twin of `additive.bridge.bridge_weights`. Outside the grid the outermost node has the
    weight sigma exp(-distance / lengthscale) and the other one has 0. A NaN lands in interval 0 and
    shows in the weights.
    """
    j, w, _, _ = _around(h, sigma, intervals)
    return j, w


def _around(
    h: Tensor, sigma: Tensor | None, intervals: Intervals
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`two_nodes`, then what their weights depend on, in spacings.

    These are the distance from each node to the other one's side, `(2, E, P, N)`, and that beyond
    the grid, `(E, P, N)`.
    """
    M = intervals.num_nodes
    if needs_plain_operations():
        x = (h - intervals.low) / intervals.spacing
        j = x.detach().clamp(0, M).to(torch.int32).clamp(0, M)
        nearest = x.clamp(1, M)
        beyond = (x - nearest).abs()
        decay = (beyond * -intervals.delta).exp()
        a = nearest - j
        a = torch.stack([1 - a, a])
    else:  # the same with less memory, and with rows last in it
        x = torch.sub(h, intervals.low, out=h.new_empty(h.shape)).div_(intervals.spacing)
        j = x.clamp(0, M).to(torch.int32).clamp_(0, M)
        nearest = x.clamp(1, M)
        beyond = x.sub_(nearest).abs_()
        decay = (beyond * -intervals.delta).exp_()
        # The distance to the other node, 1 - a for the left node and a for the right one.
        a = torch.addcmul(intervals.ends, intervals.signs, nearest.sub_(j))
    if sigma is not None:
        decay = decay * sigma.unsqueeze(-1)
    return j, sinh_ratio(a, intervals) * decay, a, beyond


def _places(j: Tensor, num_units: int) -> Tensor:
    """Where each input finds its interval in a table `(..., R U)` whose units come last."""
    units = torch.arange(num_units, dtype=torch.int32, device=j.device).view(*j.shape[:2], 1)
    return torch.add(units, j, alpha=num_units)


def _interpolate(
    h: Tensor, table: Tensor, sigma: Tensor | None, intervals: Intervals
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """`interpolated_moments`, and what its gradient needs."""
    F, five, R, U = table.shape
    j, w, a, beyond = _around(h, sigma, intervals)
    places = _places(j, U).view(-1)
    picked = table.reshape(F * five, R * U).index_select(1, places).view(F, five, *h.shape)
    mean, s = picked[:, :2], picked[:, 2:4]  # (F, 2, E, P, N)
    # In the memory of what was picked, which the gradient needs anyway: s_k of `_grad_inputs`.
    s.mul_(w)
    for own, other in ((0, 1), (1, 0)):
        s[:, own].addcmul_(w[other], picked[:, 4], value=0.5)
    saved: tuple[Tensor, ...] = (j, places, w, picked)
    if isinstance(intervals.delta, Tensor):
        saved += (a, beyond)
    return (mean * w).sum((1, 3)), (s * w).sum((1, 3)), saved


def _grad_table(
    grad_mean: Tensor, grad_var: Tensor, saved: Sequence[Tensor], shape: torch.Size
) -> Tensor:
    """Gradient of the table, `(F, 5, R, U)`, from those of mean and variance, `(F, 1, E, 1, N)`.

    In an interval the means get w_k g_m, the variances w_k^2 g_v, twice the covariance w0 w1 g_v.
    """
    _, places, w, picked = saved[:4]
    F, five, R, U = shape
    values = torch.empty_like(picked)
    torch.mul(w, grad_mean, out=values[:, :2])
    w_g = w * grad_var
    torch.mul(w_g, w, out=values[:, 2:4])
    torch.mul(w_g[:, 0], w[1], out=values[:, 4])
    values = values.view(F * five, -1)
    table = values.new_zeros(F * five, R * U)
    return table.scatter_add_(1, places.long().expand_as(values), values).view(shape)


def _grad_inputs(
    grad_mean: Tensor,
    grad_var: Tensor,
    saved: Sequence[Tensor],
    sigma: Tensor | None,
    intervals: Intervals,
) -> tuple[Tensor, Tensor | None]:
    """Gradient of h, `(E, P, N)`, and of the delta of each unit, `(P,)`, through the weights.

    With s_k = w_k var_k + w_{1-k} cov over the two nodes k, so that the variance is sum w_k s_k,

        grad w_k = sum_f g_m mean_k + 2 g_v s_k,
        grad h = (grad w1 |w1'| - grad w0 |w0'|) delta / spacing,
        grad delta = sum_nk grad w_k (a_k |w_k'| - w_k (coth(delta) + e)),

    where |w'|^2 = w^2 + (sigma / sinh(delta))^2 between the nodes, since cosh^2 = 1 + sinh^2, and
    w^2 outside, where w decays with the distance e from the grid. For w = sinh(a delta) /
    sinh(delta) the last line is the derivative of a quotient; outside, a is 1 where w is not 0, and
    coth(delta) = (1 + sinh(delta)^-2)^(1/2) becomes 1, so that -e w is left.
    """
    j, places, w, picked = saved[:4]
    grad_w = (picked[:, :2] * grad_mean).addcmul_(picked[:, 2:4], grad_var, value=2)
    grad_w = grad_w[0] if len(grad_w) == 1 else grad_w.sum(0)  # (2, E, P, N)
    squares, has_units = intervals.squares, isinstance(intervals.delta, Tensor)
    if has_units:
        squares = squares.repeat(1, len(j)).view(-1).index_select(0, places).view(j.shape)
        rate = (squares + 1).sqrt_().add_(saved[5])
    else:
        squares = squares.index_select(0, j.view(-1)).view(j.shape)
    if sigma is not None:
        squares.mul_((sigma * sigma).unsqueeze(-1))
    slopes = torch.addcmul(squares, w, w).sqrt_().mul_(grad_w)
    grad_h = (slopes[1] - slopes[0]).mul_(intervals.slope)
    if not has_units:
        return grad_h, None
    by_ratio = slopes.mul_(saved[4]).sub_(grad_w.mul_(w).mul_(rate))
    return grad_h, by_ratio.sum((0, 1, 3))


class _InterpolatedMoments(torch.autograd.Function):
    """See `interpolated_moments`; differentiable once in h, table, sigma and delta."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        table: Tensor,
        sigma: Tensor | None,
        delta: Tensor | None,  # that of the intervals, for the gradient
        intervals: Intervals,
    ) -> tuple[Tensor, Tensor]:
        mean, var, saved = _interpolate(h, table, sigma, intervals)
        ctx.save_for_backward(table, sigma, *saved)
        ctx.intervals = intervals
        return mean, var

    @staticmethod
    def backward(ctx: Any, grad_mean: Tensor, grad_var: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise second_derivative_error()
        table, sigma, *saved = ctx.saved_tensors
        F, E, N = grad_mean.shape
        shape = (F, 1, E, 1, N)
        grad_mean, grad_var = grad_mean.reshape(shape), grad_var.reshape(shape)
        grad_table = _grad_table(grad_mean, grad_var, saved, table.shape)
        grad_h = grad_delta = grad_sigma = None
        if sigma is not None:
            # Means grow with sigma, variances and covariances with its square.
            by_unit = (table * grad_table).sum((0, 2)).view(5, E, -1)
            grad_log_sigma = by_unit[:2].sum(0) + 2 * by_unit[2:].sum(0)
            grad_sigma = grad_log_sigma.sum_to_size(sigma.shape).div_(sigma)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[3]:
            grad_h, grad_delta = _grad_inputs(grad_mean, grad_var, saved, sigma, ctx.intervals)
        return grad_h, grad_table, grad_sigma, grad_delta, None


def interpolated_moments(
    h: Float[Tensor, "e p n"],
    table: Float[Tensor, "f 5 r u"],
    sigma: Float[Tensor, "#e p"] | None,
    intervals: Intervals,
    delta: Float[Tensor, " p"] | None = None,
) -> tuple[Float[Tensor, "f e n"], Float[Tensor, "f e n"]]:
    """Mean and variance of sum_p sigma_p g_p(h_p) for F functions of E members, from their nodes.

    With h in interval j, at distances a and 1 - a (in spacings) from its nodes,

        mean = sum_p w0 mean_j + w1 mean_{j+1},
        variance = sum_p w0^2 var_j + w1^2 var_{j+1} + 2 w0 w1 cov_j,

    with the weights of `two_nodes`. The table holds the numbers of `interval_matrix` for the
    U = E P units. No `sigma` stands for 1. Intervals for the `delta` of each unit are given
    together with it.
    """
    if not needs_plain_operations():
        return _InterpolatedMoments.apply(h, table, sigma, delta, intervals)
    # The compiler fuses plain operations and finds the gradient by itself.
    if not isinstance(intervals.delta, Tensor):
        return _by_rows(h.mT, table, sigma, intervals)
    j, (w0, w1) = two_nodes(h, sigma, intervals)
    places = _places(j, table.shape[-1]).long()
    mean0, mean1, var0, var1, cov = (row[:, places] for row in table.flatten(2).unbind(1))
    mean = w0 * mean0 + w1 * mean1
    var = w0 * (w0 * var0 + w1 * cov) + w1 * w1 * var1
    return mean.sum(-2), var.sum(-2)


def _by_rows(
    h: Tensor, table: Tensor, sigma: Tensor | None, intervals: Intervals
) -> tuple[Tensor, Tensor]:
    """`interpolated_moments` in plain operations for h `(E, N, P)`.

    With units last in memory, neighbours are of different units, whose gradients by the table do
    not wait for each other.
    """
    E, _, P = h.shape
    j, w = two_nodes(h, None, intervals)
    if sigma is not None:
        w = w * sigma.unsqueeze(-2)
    units = torch.arange(E * P, device=h.device).view(E, 1, P)
    places = units + j.long() * (E * P)
    w0, w1 = w.unbind()
    mean0, mean1, var0, var1, cov = (row[:, places] for row in table.flatten(2).unbind(1))
    mean = w0 * mean0 + w1 * mean1
    var = w0 * (w0 * var0 + w1 * cov) + w1 * w1 * var1
    return mean.sum(-1), var.sum(-1)


def stack_batches(h: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Arguments of `interpolated_moments`, and how to arrange its results as `(..., N, C)`.

    h is `(*b1, N, P)` and the table is `(*b2, C, 5, R, P)`; b1 and b2 broadcast. If either batch is
    trivial, it is not copied: the batch of the table joins its functions, the batch of the inputs
    joins their rows. Else the batch is one of members.
    """
    N, P = h.shape[-2:]
    C, five, R, _ = table.shape[-4:]
    batch = torch.broadcast_shapes(h.shape[:-2], table.shape[:-4])
    if math.prod(h.shape[:-2]) == 1:
        table = table.reshape(-1, five, R, P)
        return h.reshape(1, N, P), table, lambda out: out.view(*batch, C, N).mT
    if math.prod(table.shape[:-4]) == 1:
        h, table = h.reshape(1, -1, P), table.reshape(C, five, R, P)
        return h, table, lambda out: out.view(C, *batch, N).movedim(0, -1)
    E = math.prod(batch)
    table = table.expand(*batch, C, five, R, P).reshape(E, C, five, R, P)
    table = table.movedim(0, 3).flatten(3)
    h = h.expand(*batch, N, P).reshape(E, N, P)
    return h, table, lambda out: out.permute(1, 2, 0).reshape(*batch, N, C)


class MeanFieldTerms(torch.autograd.Function):
    """Mean and variance of f for independent weights, and their KL from N(0, 1), as one operation.

    These are the `interpolated_moments` of the table of z ~ N(loc, scale^2), plus mu and
    mu_scale^2. The gradient goes back through the table by the transpose of its map; it is
    differentiable once in all tensors. Where units have a `delta` each, `table_map` is the pattern
    of their nodes, and the intervals are those of the grid for any delta.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Float[Tensor, "n p"],
        loc: Float[Tensor, "f p m"],
        log_scale: Float[Tensor, "f p m"],
        log_sigma: Float[Tensor, " p"],
        mu: Float[Tensor, " f"],
        mu_log_scale: Float[Tensor, " f"],
        delta: Float[Tensor, " p"] | None,
        table_map: LinearMap | NodePattern,
        intervals: Intervals,
    ) -> tuple[Float[Tensor, "n f"], Float[Tensor, "n f"], Float[Tensor, ""]]:
        z_var, mu_var = (2 * log_scale).exp_(), (2 * mu_log_scale).exp_()
        sigma = log_sigma.exp().unsqueeze(0)
        own_map: LinearMap | UnitMap
        if isinstance(table_map, NodePattern):
            assert delta is not None
            intervals = unit_intervals(delta, intervals, table_map.is_inside)
            own_map = UnitMap(delta, table_map)
        else:
            own_map = table_map
        table = own_map.units_last(torch.cat([loc, z_var], -1)).unflatten(1, (5, -1))
        mean, var, saved = _interpolate(h.mT.unsqueeze(0), table, sigma, intervals)
        mean.add_(mu.view(-1, 1, 1))
        var.add_(mu_var.view(-1, 1, 1))
        kl = twice_kl(loc, log_scale, z_var).add_(twice_kl(mu, mu_log_scale, mu_var)).div_(2)
        ctx.save_for_backward(loc, z_var, sigma, mu, mu_var, *saved)
        ctx.table_map, ctx.intervals, ctx.shape = own_map, intervals, table.shape
        return mean.squeeze(1).mT, var.squeeze(1).mT, kl

    @staticmethod
    def backward(
        ctx: Any, grad_mean: Tensor, grad_var: Tensor, grad_kl: Tensor
    ) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise second_derivative_error()
        loc, z_var, sigma, mu, mu_var, *saved = ctx.saved_tensors
        N, F = grad_mean.shape
        shape = (F, 1, 1, 1, N)
        grad_m, grad_v = grad_mean.mT.reshape(shape), grad_var.mT.reshape(shape)
        grad_h, grad_delta = _grad_inputs(grad_m, grad_v, saved, sigma, ctx.intervals)
        table = _grad_table(grad_m, grad_v, saved, ctx.shape).flatten(1, 2)
        if grad_delta is None:
            grad_z = ctx.table_map.transpose(table)
        else:
            grad_z, through_nodes = ctx.table_map.backward(torch.cat([loc, z_var], -1), table)
            grad_delta = grad_delta + through_nodes
        grad_loc, grad_z_var = grad_z.chunk(2, -1)
        # The mean of f grows with sigma, its variance with the square.
        grad_log_sigma = torch.addcmul(loc * grad_loc, z_var, grad_z_var, value=2).sum((0, 2))
        return (
            grad_h.squeeze(0).mT.contiguous(),  # batch normalisation is slow for other strides
            *grad_normal(grad_loc, grad_z_var, grad_kl, loc, z_var),
            grad_log_sigma,
            *grad_normal(grad_mean.sum(0), grad_var.sum(0), grad_kl, mu, mu_var),
            grad_delta,
            None,
            None,
        )


class MemberTerms(torch.autograd.Function):
    """`MeanFieldTerms` of E members with weights of their own, in one pass, rows last.

    Mean and variance of f are `(F, E, N)`, and the KL of each member `(E,)`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Float[Tensor, "e p n"],
        loc: Float[Tensor, "e f p m"],
        log_scale: Float[Tensor, "e f p m"],
        log_sigma: Float[Tensor, "e p"],
        mu: Float[Tensor, "e f"],
        mu_log_scale: Float[Tensor, "e f"],
        table_map: LinearMap,
        intervals: Intervals,
    ) -> tuple[Float[Tensor, "f e n"], Float[Tensor, "f e n"], Float[Tensor, " e"]]:
        z_var, mu_var = (2 * log_scale).exp_(), (2 * mu_log_scale).exp_()
        sigma = log_sigma.exp()
        # The units of all members are one axis of the table.
        z = torch.cat([loc, z_var], -1).transpose(0, 1).flatten(1, 2)  # (F, E P, 2 M)
        table = table_map.units_last(z).unflatten(1, (5, -1))
        mean, var, saved = _interpolate(h, table, sigma, intervals)
        mean.add_(mu.mT.unsqueeze(-1))
        var.add_(mu_var.mT.unsqueeze(-1))
        pairs = (loc, log_scale, z_var), (mu, mu_log_scale, mu_var)
        elements = [torch.sub(v, s, alpha=2).addcmul_(m, m).sub_(1) for m, s, v in pairs]
        kl = torch.stack([part.flatten(1).sum(1) for part in elements]).sum(0).div_(2)
        ctx.save_for_backward(loc, z_var, sigma, mu, mu_var, *saved)
        ctx.table_map, ctx.intervals, ctx.shape = table_map, intervals, table.shape
        return mean, var, kl

    @staticmethod
    def backward(
        ctx: Any, grad_mean: Tensor, grad_var: Tensor, grad_kl: Tensor
    ) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise second_derivative_error()
        loc, z_var, sigma, mu, mu_var, *saved = ctx.saved_tensors
        F, E, N = grad_mean.shape
        grad_m, grad_v = (grad.reshape(F, 1, E, 1, N) for grad in (grad_mean, grad_var))
        grad_h, _ = _grad_inputs(grad_m, grad_v, saved, sigma, ctx.intervals)
        table = _grad_table(grad_m, grad_v, saved, ctx.shape).flatten(1, 2)
        grad_z = ctx.table_map.transpose(table).unflatten(1, (E, -1)).transpose(0, 1)
        grad_loc, grad_z_var = grad_z.chunk(2, -1)  # (E, F, P, M) each
        grad_log_sigma = torch.addcmul(loc * grad_loc, z_var, grad_z_var, value=2).sum((1, 3))
        grad_mu, grad_mu_var = (grad.sum(-1).mT for grad in (grad_mean, grad_var))
        return (
            grad_h,
            *grad_normal(grad_loc, grad_z_var, grad_kl.view(-1, 1, 1, 1), loc, z_var),
            grad_log_sigma,
            *grad_normal(grad_mu, grad_mu_var, grad_kl.unsqueeze(-1), mu, mu_var),
            None,
            None,
        )


def twice_kl(loc: Tensor, log_scale: Tensor, var: Tensor) -> Tensor:
    """Twice the KL of independent normals from N(0, 1).

    The sum is over elements: a sum of variances minus their number would cancel where q is the
    prior.
    """
    loc = loc.reshape(-1)
    return torch.sub(var, log_scale, alpha=2).sub_(1).sum().add_(torch.dot(loc, loc))


def grad_normal(
    grad_mean: Tensor, grad_var: Tensor, grad_kl: Tensor, loc: Tensor, var: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of loc and log_scale: those of mean and variance, and loc and var - 1 of the KL."""
    grad_log_scale = torch.add(grad_kl, grad_var, alpha=2).mul_(var).sub_(grad_kl)
    return torch.addcmul(grad_mean, loc, grad_kl), grad_log_scale


class ExpectedLogNormal(torch.autograd.Function):
    """E_q log N(y | f, s^2) of each row: the twin of `additive.gaussian.expected_log_normal`.

    With r = y - m and p = s^-2 the gradients per output are p r for m, -p r for y, -p / 2 for v
    and (p (r^2 + v) - 1) / s for s.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, f_mean: Tensor, f_var: Tensor, noise_scale: Tensor) -> Tensor:
        ctx.save_for_backward(y, f_mean, f_var, noise_scale)
        r = y - f_mean
        weight = noise_scale.square().mul_(-2).reciprocal_()
        constant = noise_scale.log().add_(0.5 * _LOG_2PI)
        return torch.addcmul(f_var, r, r).mul(weight).sub_(constant).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, f_mean, f_var, noise_scale = ctx.saved_tensors
        grad = grad.unsqueeze(-1)
        r = y - f_mean
        weighted = grad * noise_scale.square().reciprocal()
        grad_mean = (weighted * r).sum_to_size(f_mean.shape)
        grad_var = (-0.5 * weighted).expand_as(r).sum_to_size(f_var.shape)
        grad_y = grad_scale = None
        if ctx.needs_input_grad[0]:
            grad_y = (-weighted * r).sum_to_size(y.shape)
        if ctx.needs_input_grad[3]:
            total = (weighted * torch.addcmul(f_var, r, r) - grad).sum_to_size(noise_scale.shape)
            grad_scale = total / noise_scale
        return grad_y, grad_mean, grad_var, grad_scale


class ExpectedLogHeteroscedastic(torch.autograd.Function):
    """E_q log N(y | f, exp(eta)): the twin of `additive.gaussian.expected_log_heteroscedastic`.

    It is for f and eta that do not covary. With r = y - m_f, Q = r^2 + v_f and w = exp(v_eta / 2 -
    m_eta) the gradients per output are w r for m_f, -w r for y, -w / 2 for v_f, (w Q - 1) / 2 for
    m_eta and -w Q / 4 for v_eta.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, f_mean: Tensor, f_var: Tensor, eta_mean: Tensor, eta_var: Tensor
    ) -> Tensor:
        ctx.save_for_backward(y, f_mean, f_var, eta_mean, eta_var)
        r = y - f_mean
        w = torch.sub(eta_var, eta_mean, alpha=2).mul_(0.5).exp_()
        w_q = torch.addcmul(f_var, r, r).mul(w)
        return (w_q + eta_mean).add_(_LOG_2PI).sum(-1).mul_(-0.5)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # From the arguments, so that this has a gradient too.
        y, f_mean, f_var, eta_mean, eta_var = ctx.saved_tensors
        r = y - f_mean
        w = (0.5 * eta_var - eta_mean).exp()
        w_q = torch.addcmul(f_var, r, r) * w
        half = grad.unsqueeze(-1) * 0.5
        of_var = -w * half
        of_mean = -2 * r * of_var
        by_w_q = w_q * half
        grads = (-of_mean, of_mean, of_var, by_w_q - half, -0.5 * by_w_q)
        return tuple(
            part.expand(w_q.shape).sum_to_size(own.shape) if needed else None
            for part, own, needed in zip(
                grads, ctx.saved_tensors, ctx.needs_input_grad, strict=True
            )
        )
