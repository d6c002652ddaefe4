"""The two terms of the bound with Gaussian noise as one operation, from unit inputs to numbers.

Its plain twin is `gaussian.expected_log_normal`, summed over rows, of `layer.moments`, and
`gaussian.kl_diagonal`. As the noise is the same for all rows, the gradient by the variances of f is
one number. So the variances of rows are never made, only their sum, and the gradient by the
moments of the nodes needs sums of products of weights that all functions share. Gradients are
computed in the forward pass, up to factors, so that no large tensor has to be kept for them.

Between two nodes, t spacings from the middle, a unit has A cosh(delta t) + B sinh(delta t), whose
slope has the same A and B, exchanged. The slope of its variance needs two numbers more.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_dak.annotations import Float
from pyro_dak.fast.fused import (
    Intervals,
    LinearMap,
    second_derivative_error,
    side_by_side,
    sinh_coefficients,
    sinh_ratio,
)

__all__ = [
    "MAX_DELTA",
    "GaussianBound",
    "Middles",
    "by_inputs_of_weights",
    "by_picked_moments",
    "middle_matrix",
    "middles_of_grid",
    "places_of",
    "two_nodes",
]

# The largest distance of nodes, in lengthscales, of a grid with `Middles`: the hyperbolic cosine of
# it must be a number in single precision.
MAX_DELTA = 16.0
_LOG_2PI = math.log(2 * math.pi)


class Middles(NamedTuple):
    """The intervals between the nodes of a grid as seen from their middles, in one dtype.

    An input h is at h per_spacing + shift, in spacings; delta is the spacing in lengthscales, and
    slope is delta / spacing. The coefficients are those of sinh(delta t) by odd powers of t, and
    `last_coefficient` is the last of them as a number. The maps lead from means and variances of z
    to what `middle_matrix` says: the first to its first four blocks, the second to all.
    """

    shift: Tensor
    per_spacing: float
    slope: float
    coefficients: tuple[Tensor, ...]
    last_coefficient: float
    delta: float
    num_nodes: int
    to_means_and_slopes: LinearMap
    to_numbers: LinearMap


def middles_of_grid(
    matrix: Tensor, is_dense: bool, low: float, spacing: float, delta: float
) -> Middles:
    """The middles of a grid in the dtype and on the device of its `middle_matrix`."""
    M, dtype, device = matrix.shape[1] // 2, matrix.dtype, matrix.device
    of_four = torch.arange(4 * (M + 1), device=device)
    maps = (LinearMap(A, is_dense) for A in (matrix.index_select(0, of_four), matrix))
    # |t| <= 1/2
    ratios = sinh_coefficients(delta / 2, torch.finfo(dtype).eps)
    coefficients = [2 * math.sinh(delta / 2) * c * 4**k for k, c in enumerate(ratios)]
    last = coefficients[-1] if coefficients else math.nan
    cast = torch.tensor([-low / spacing, *coefficients], dtype=torch.float64).to(device, dtype)
    shift, *others = cast.unbind()
    return Middles(shift, 1 / spacing, delta / spacing, tuple(others), last, delta, M, *maps)


def middle_matrix(L: Float[Tensor, "m m"], delta: float) -> Float[Tensor, "five_m_plus_5 two_m"]:
    """From means and variances of independent z, `(2 M,)`, to five numbers per interval; float64.

    At t spacings from its middle a function has A cosh(delta t) + B sinh(delta t) there. Row
    blocks, for intervals 0 to M: the means of A and of B, then K = Var A + Var B, R = 2 Cov(A, B)
    and Var A. Nodes 0 and M + 1, which do not exist, are exp(-delta) times their neighbours. L is
    as in `fused.interval_matrix`.
    """
    rho = math.exp(-delta)
    before, after = (rho * L.index_select(0, torch.tensor([row])) for row in (0, len(L) - 1))
    left, right = torch.cat([before, L]), torch.cat([L, after])
    A = ((left + right) * (0.5 / math.cosh(delta / 2))).coalesce()
    B = ((right - left) * (0.5 / math.sinh(delta / 2))).coalesce()
    return side_by_side([A, B], [A * A + B * B, 2 * (A * B), A * A])


class GaussianBound(torch.autograd.Function):
    """c sum_n E_q log N(y_n | f(h_n), s^2) and KL(q || N(0, 1)) for independent weights, scalars.

    The weights z and mu have means and standard deviations as in `fused.MeanFieldTerms`, and s is
    exp(log_noise), `()` or `(1,)`. With r = y - E f, Q = sum r^2 + Var f and p = s^-2,

        sum_n E_q log N(y_n | f(h_n), s^2) = -(p Q + N F log(2 pi s^2)) / 2,

    whose gradients are p r for E f, -p / 2 for Var f and p Q - N F for log s. It is differentiable
    once in all tensors but y. The number c is `scale`.

    With C = q cosh(delta t) and S = q sinh(delta t), and K and R as in `middle_matrix`, a unit has
    the mean A C + B S and the variance q^2 Var A + S^2 K + C S R. By h, in lengthscales, their
    slopes are A S + B C and 2 C S K + (C^2 + S^2) R, outside the grid too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Float[Tensor, "n p"],
        y: Float[Tensor, "n f"],
        loc: Float[Tensor, "f p m"],
        log_scale: Float[Tensor, "f p m"],
        log_sigma: Float[Tensor, " p"],
        mu: Float[Tensor, " f"],
        mu_log_scale: Float[Tensor, " f"],
        log_noise: Float[Tensor, "..."],
        middles: Middles,
        scale: float,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        (N, F), (_, P, M) = y.shape, loc.shape
        # The numbers of z and mu are computed together: all means, then all scales.
        flat = torch.cat([loc.view(-1), mu, log_scale.view(-1), mu_log_scale])
        locs, log_scales = flat.view(2, -1).unbind()
        variances = (2 * log_scales).exp_()
        z_var, mu_var = variances.split((F * P * M, F))
        z_var = z_var.view(F, P, M)
        table = _table(middles.to_means_and_slopes.columns(torch.cat([loc, z_var], -1)), F)
        values = h.new_empty(2 * F + 3, N, P)
        r_C, r_S, products = values.split((F, F, 3))
        places, C, S = _around_middles(h, log_sigma, middles, products)
        A, B, K_R = table.index_select(1, places).view(-1, N, P).split((F, F, 2))
        r = (y - mu).mT.sub((A * C).addcmul_(B, S).sum(-1))  # (F, N)
        # Gradients but for the factor p: by the numbers of an interval, by inputs, by the weights.
        rows = r.unsqueeze(-1)
        torch.mul(C, rows, out=r_C)
        torch.mul(S, rows, out=r_S)
        by_h = _by_inputs(A, B, K_R, r_C, r_S, products)
        by_z = middles.to_numbers.transpose_rows(_by_table(values, places, table.shape[1], F))
        by_loc, by_z_var = by_z.view(F, P, 2 * M).split(M, -1)
        by_log_scale = (by_z_var * z_var).neg_()
        # The mean of f grows with sigma, its variance with the square.
        by_log_sigma = torch.addcmul(by_log_scale, loc, by_loc).sum((0, 2))
        parts = (by_loc.reshape(-1), r.sum(-1), by_log_scale.view(-1), mu_var * -N, by_log_sigma)
        by_all = torch.cat([*parts, log_noise.view(-1)])
        # The sum of the variances is minus its own gradient by log_scale, as f ~ exp(log_scale).
        num, flat_r = len(locs), r.reshape(-1)
        Q = torch.dot(flat_r, flat_r).sub_(by_all.narrow(0, num, num).sum())
        log_s = log_noise.view(())
        p = (-2 * log_s).exp_().mul_(scale)
        p_Q = Q.mul_(p)
        by_all.mul_(p)
        torch.sub(p_Q, N * F * scale, out=by_all[-1])
        expected = p_Q.add_(log_s, alpha=2 * N * F * scale).add_(N * F * scale * _LOG_2PI)
        # That of the KL: the means, and the variances less 1, in the place of the scales.
        excess = variances.sub_(1)
        kl = torch.sub(excess, log_scales, alpha=2).sum().add_(torch.dot(locs, locs)).mul_(0.5)
        log_scales.copy_(excess)
        ctx.save_for_backward(by_h, by_all, flat, p.mul_(middles.slope))
        ctx.sizes, ctx.shape = (F * P * M, F, F * P * M, F, P, 1), loc.shape
        ctx.noise_shape = log_noise.shape
        return expected.mul_(-0.5), kl

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise second_derivative_error()
        by_h, by_all, by_kl, p_slope = ctx.saved_tensors
        total = by_all * grad
        total.narrow(0, 0, len(by_kl)).add_(by_kl * grad_kl)
        loc, mu, log_scale, mu_log_scale, log_sigma, log_noise = total.split(ctx.sizes)
        return (
            by_h * (grad * p_slope),
            None,
            loc.view(ctx.shape),
            log_scale.view(ctx.shape),
            log_sigma,
            mu,
            mu_log_scale,
            log_noise.view(ctx.noise_shape),
            None,
            None,
        )


def two_nodes(h: Tensor, log_sigma: Tensor, intervals: Intervals) -> tuple[Tensor, Tensor]:
    """`fused.two_nodes` for h `(N, P)` and log_sigma `(P,)`: `(N, P)`, and weights `(2, N, P)`.

    With units last in memory, neighbours there are of different units, which do not wait for each
    other where they are added up by interval.
    """
    M, delta = intervals.num_nodes, intervals.delta
    assert isinstance(delta, float)  # all units have the same
    x = torch.sub(h, intervals.low).div_(intervals.spacing)
    j = x.clamp(0, M).int().clamp_(0, M)  # also of a NaN
    nearest = x.clamp(1, M)
    distance = x.sub_(nearest).abs_()
    decay = torch.add(log_sigma, distance, alpha=-delta).exp_()  # times sigma
    right = nearest.sub_(j)
    a = torch.stack([1 - right, right])
    return j, sinh_ratio(a, intervals).mul_(decay)


def places_of(j: Tensor) -> Tensor:
    """Where inputs in intervals j `(N, P)` find these in a table `(R P)`, `(N P,)`."""
    P = j.shape[-1]
    return torch.add(torch.arange(P, device=j.device), j, alpha=P).view(-1)


def by_inputs_of_weights(
    by_weight: Tensor, j: Tensor, w: Tensor, sigma: Tensor, intervals: Intervals
) -> Tensor:
    """Gradient of h `(N, P)` from that of the weights of the two nodes, `(2, N, P)`.

    See `fused._grad_inputs`; the left weight falls.
    """
    squares = intervals.squares.index_select(0, j.view(-1)).view(j.shape).mul_(sigma * sigma)
    left, right = torch.addcmul(squares, w, w).sqrt_().mul_(by_weight).unbind()
    return right.sub_(left).mul_(intervals.slope)


def by_picked_moments(r: Tensor, w: Tensor) -> Tensor:
    """Gradient of the expectation by means and other moments at the nodes, `(2 F + 3, N, P)`.

    Those of a function's means are w_k r; the variances get -w_k^2 / 2, and twice the covariance
    -w0 w1 / 2, for all functions alike. All are without the factor p.
    """
    (F, N), P = r.shape, w.shape[-1]
    values = w.new_empty(2 * F + 3, N, P)
    means, squares, both = values.split((2 * F, 2, 1))
    half = w * -0.5
    torch.mul(w, half, out=squares)
    torch.mul(w[1:], half[:1], out=both)
    torch.mul(w, r.view(F, 1, N, 1), out=means.view(F, 2, N, P))
    return values


def _around_middles(
    h: Tensor, log_sigma: Tensor, middles: Middles, products: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Where inputs `(N, P)` find their intervals in a table, `(N P,)`, and C and S, `(N, P)` each.

    C is q cosh(delta t) and S is q sinh(delta t), at t spacings from the middle of the interval,
    where q is sigma exp(-distance from the grid). S^2, C S and q^2 are written to `products`,
    `(3, N, P)`. A NaN lands in interval 0 and shows in them all.
    """
    M, P, coefficients = middles.num_nodes, h.shape[-1], middles.coefficients
    S_2, C_S, q_2 = products.unbind()
    x = torch.add(middles.shift, h, alpha=middles.per_spacing)
    j = x.clamp(0, M).int().clamp_(0, M)  # also of a NaN
    places = torch.add(torch.arange(P, device=h.device, dtype=j.dtype), j, alpha=P).view(-1).long()
    nearest = x.clamp(1, M)
    distance = x.sub_(nearest).abs_()
    q = torch.add(log_sigma, distance, alpha=-middles.delta).exp_()
    t = nearest.sub_(j).sub_(0.5)
    if coefficients:
        t_2 = t * t
        ratio = torch.add(coefficients[-2], t_2, alpha=middles.last_coefficient)
        for c in coefficients[-3::-1]:
            ratio = torch.addcmul(c, ratio, t_2)
        S = t.mul_(ratio)
    else:
        S = t.mul_(middles.delta).sinh_()
    S.mul_(q)
    torch.mul(q, q, out=q_2)
    torch.mul(S, S, out=S_2)
    C = torch.add(q_2, S_2).sqrt_()  # cosh^2 = 1 + sinh^2
    torch.mul(C, S, out=C_S)
    return places, C, S


def _by_inputs(
    A: Tensor, B: Tensor, K_R: Tensor, r_C: Tensor, r_S: Tensor, products: Tensor
) -> Tensor:
    """Gradient of h `(N, P)`, in lengthscales and without the factor p; A is overwritten.

    It is r (A S + B C) - C S K - (C^2 + S^2) R / 2, of which the first is summed over functions,
    and C^2 + S^2 = q^2 + 2 S^2.
    """
    (K, R), (S_2, C_S, q_2) = K_R.unbind(), products.unbind()
    of_means = A.mul_(r_S).addcmul_(B, r_C)
    by_h = of_means[0] if len(A) == 1 else of_means.sum(0)
    by_h.addcmul_(K, C_S, value=-1)
    return by_h.addcmul_(R, torch.add(q_2, S_2, alpha=2), value=-0.5)


def _table(columns: Tensor, F: int) -> Tensor:
    """A and B of each function, and K and R of all, at `(R P)` places, from `(4 R, F P)`."""
    if F == 1:
        return columns.view(4, -1)
    columns = columns.view(4, -1, F, columns.shape[1] // F)
    means = columns[:2].transpose(1, 2).reshape(2 * F, -1)
    return torch.cat([means, columns[2:].sum(2).view(2, -1)])


def _by_table(values: Tensor, places: Tensor, num_places: int, F: int) -> Tensor:
    """Sums of these values `(2 F + 3, N, P)` over rows, by place, `(5 R, F P)`."""
    (num, _, P), R = values.shape, num_places // values.shape[-1]
    sums = values.new_zeros(num, num_places)
    sums.scatter_add_(1, places.expand(num, -1), values.view(num, -1))
    if F == 1:
        return sums.view(-1, P)
    means = sums[: 2 * F].view(2, F, R, P).transpose(1, 2)
    shared = sums[2 * F :].view(3, R, 1, P).expand(-1, -1, F, -1)
    return torch.cat([means, shared]).view(5 * R, F * P)
