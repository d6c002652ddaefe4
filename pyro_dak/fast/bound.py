"""The two terms of the bound with Gaussian noise as one operation, from unit inputs to numbers.

Its plain twin is `gaussian.expected_log_normal`, summed over rows, of `layer.moments`, and
`gaussian.kl_diagonal`. As the noise is the same for all rows, the gradient by the variances of f is
one number. So the variances of rows are never made, only their sum, and the gradient by the
moments of the nodes needs sums of products of weights that all functions share. Gradients are
computed in the forward pass, up to factors, so that no large tensor has to be kept for them.
"""

import math
from typing import Any

import torch
from torch import Tensor

from pyro_dak.annotations import Float
from pyro_dak.fast.fused import (
    Intervals,
    LinearMap,
    second_derivative_error,
    sinh_ratio,
)

__all__ = [
    "GaussianBound",
    "by_inputs_of_weights",
    "by_picked_moments",
    "places_of",
    "two_nodes",
]

_LOG_2PI = math.log(2 * math.pi)


class GaussianBound(torch.autograd.Function):
    """c sum_n E_q log N(y_n | f(h_n), s^2) and KL(q || N(0, 1)) for independent weights, scalars.

    The weights z and mu have means and standard deviations as in `fused.MeanFieldTerms`, and s is
    exp(log_noise), `()` or `(1,)`. With r = y - E f, Q = sum r^2 + Var f and p = s^-2,

        sum_n E_q log N(y_n | f(h_n), s^2) = -(p Q + N F log(2 pi s^2)) / 2,

    whose gradients are p r for E f, -p / 2 for Var f and p Q - N F for log s. It is differentiable
    once in all tensors but y. The number c is `scale`.
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
        table_map: LinearMap,
        intervals: Intervals,
        scale: float,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        (N, F), (_, P, M) = y.shape, loc.shape
        # The numbers of z and mu are computed together: all means, then all scales.
        flat = torch.cat([loc.view(-1), mu, log_scale.view(-1), mu_log_scale])
        locs, log_scales = flat.view(2, -1).unbind()
        variances = (2 * log_scales).exp_()
        z_var, mu_var = variances.split((F * P * M, F))
        z_var = z_var.view(F, P, M)
        table = table_map.units_last(torch.cat([loc, z_var], -1))  # (F, 5 R, P)
        j, w = two_nodes(h, log_sigma, intervals)
        places = places_of(j)
        picked = table.reshape(5 * F, -1).index_select(1, places).view(F, 5, N, P)
        f_mean = (picked[:, :2] * w).sum(1).sum(-1)  # (F, N)
        r = (y - mu).mT.sub(f_mean)
        # Gradients but for the factor p: by the moments picked, by inputs, and by the weights.
        by_picked = by_picked_moments(r, w)
        by_h = _by_inputs(by_picked, picked, intervals)
        by_z = table_map.transpose(_by_table(by_picked, places, table.shape))
        by_loc, by_z_var = by_z.split(M, -1)
        by_log_scale = (by_z_var * z_var).mul_(2)
        # The mean of f grows with sigma, its variance with the square.
        by_log_sigma = torch.addcmul(by_log_scale, loc, by_loc).sum((0, 2))
        # The sum of the variances is minus its own gradient by log_scale, as f ~ exp(log_scale).
        by_mu_log_scale = mu_var * -N
        Q = torch.linalg.vector_norm(r).square()
        Q.sub_(by_log_scale.sum()).sub_(by_mu_log_scale.sum())
        s_2 = (2 * log_noise).exp_().view(())
        by_noise = torch.sub(Q, s_2, alpha=N * F)
        parts = (by_loc, r.sum(-1), by_log_scale, by_mu_log_scale, by_log_sigma, by_noise)
        by_all = torch.cat([part.reshape(-1) for part in parts])
        p = scale / s_2
        expected = Q.mul_(p).add_(log_noise.view(()), alpha=2 * N * F * scale)
        expected.add_(N * F * scale * _LOG_2PI).mul_(-0.5)
        # That of the KL: the means, and the variances less 1, in the place of the scales.
        excess = variances.sub_(1)
        kl = torch.sub(excess, log_scales, alpha=2).sum().add_(torch.dot(locs, locs)).div_(2)
        log_scales.copy_(excess)
        ctx.save_for_backward(by_h, by_all, flat, p)
        ctx.sizes, ctx.shape = (F * P * M, F, F * P * M, F, P, 1), loc.shape
        ctx.noise_shape = log_noise.shape
        return expected, kl

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise second_derivative_error()
        by_h, by_all, by_kl, p = ctx.saved_tensors
        factor = grad * p
        total = by_all * factor
        total[: len(by_kl)].addcmul_(by_kl, grad_kl)
        loc, mu, log_scale, mu_log_scale, log_sigma, log_noise = total.split(ctx.sizes)
        return (
            by_h * factor,
            None,
            loc.view(ctx.shape),
            log_scale.view(ctx.shape),
            log_sigma,
            mu,
            mu_log_scale,
            log_noise.view(ctx.noise_shape),
            None,
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


def _by_inputs(by_picked: Tensor, picked: Tensor, intervals: Intervals) -> Tensor:
    """Gradient of h `(N, P)`, from that by the moments picked, of `by_picked_moments`.

    In an interval the slope of a function with values g0 and g1 at the nodes has the values
    coth(delta) g_k - g_{1-k} / sinh(delta) at the nodes, times delta / spacing and +1 on the right,
    -1 on the left, and between them the same weights as the function itself. `Intervals.slopes` has
    what follows from it for the five numbers of an interval.
    """
    F, five, N, P = picked.shape
    slopes = torch.matmul(intervals.slopes, picked.view(F, five, -1)).view(F, five, N, P)
    if F == 1:
        return slopes[0].mul_(by_picked).sum(0)
    of_means, others = by_picked.split((2 * F, 3))
    by_h = slopes[:, :2].flatten(0, 1).mul_(of_means).sum(0)
    return by_h.add_(slopes[:, 2:].sum(0).mul_(others).sum(0))


def _by_table(by_picked: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """Gradient by the table, `(F, 5 R, P)`: the sums of `by_picked_moments` over the rows."""
    F, _, P = shape
    values = by_picked.view(len(by_picked), -1)
    sums = values.new_zeros(len(values), shape[1:].numel() // 5)
    sums.scatter_add_(1, places.expand(len(values), -1), values)
    if F > 1:
        shared = sums[2 * F :].reshape(1, -1).expand(F, -1)
        sums = torch.cat([sums[: 2 * F].view(F, -1), shared], 1)
    return sums.view(F, -1, P)
