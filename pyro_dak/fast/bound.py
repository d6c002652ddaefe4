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
    grad_normal,
    second_derivative_error,
    sinh_ratio,
    twice_kl,
)

__all__ = ["GaussianBound"]

_LOG_2PI = math.log(2 * math.pi)


class GaussianBound(torch.autograd.Function):
    """sum_n E_q log N(y_n | f(h_n), s^2) and KL(q || N(0, 1)) for independent weights, scalars.

    The weights z and mu have means and standard deviations as in `fused.MeanFieldTerms`, and s is
    exp(log_noise), `()` or `(1,)`. With r = y - E f, Q = sum r^2 + Var f and p = s^-2,

        sum_n E_q log N(y_n | f(h_n), s^2) = -(p Q + N F log(2 pi s^2)) / 2,

    whose gradients are p r for E f, -p / 2 for Var f and p Q - N F for log s. It is differentiable
    once in all tensors but y.
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
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        (N, F), P = y.shape, len(log_sigma)
        z_var, mu_var = (2 * log_scale).exp_(), (2 * mu_log_scale).exp_()
        sigma = log_sigma.exp().unsqueeze(-1)
        table = table_map.units_last(torch.cat([loc, z_var], -1))  # (F, 5 R, P)
        j, w = _two_nodes(h, sigma, intervals)
        units = torch.arange(P, device=j.device).unsqueeze(-1)
        places = torch.add(units, j, alpha=P).view(-1)
        picked = table.reshape(5 * F, -1).index_select(1, places).view(F, 5, P, N)
        means, s, (w0, w1) = picked[:, :2], picked[:, 2:4], w.unbind()
        s.mul_(w)
        s[:, 0].addcmul_(w1, picked[:, 4], value=0.5)
        s[:, 1].addcmul_(w0, picked[:, 4], value=0.5)
        r = torch.sub(y.mT, (means * w).sum((1, 2))).sub_(mu.unsqueeze(-1))  # (F, N)
        Q = torch.mv(s.reshape(F, -1), w.view(-1)).add_(mu_var, alpha=N).sum()
        Q.add_(torch.linalg.vector_norm(r).square())
        p, log_s = (-2 * log_noise).exp_().view(()), log_noise.view(())
        expected = (Q * p).add_(log_s, alpha=2 * N * F).add_(N * F * _LOG_2PI).mul_(-0.5)
        kl = twice_kl(loc, log_scale, z_var).add_(twice_kl(mu, mu_log_scale, mu_var)).div_(2)
        # The gradient by the weight of node k, sum_f r mean_k - s_k, but for the factor p.
        by_weight = means.mul_(r.view(F, 1, 1, N)).sub_(s)
        by_weight = by_weight[0] if F == 1 else by_weight.sum(0)
        squares = intervals.squares.index_select(0, j.view(-1)).view(P, N).mul_(sigma * sigma)
        slope0, slope1 = torch.addcmul(squares, w, w).sqrt_().mul_(by_weight).unbind()
        # Units last in memory, which batch normalisation needs to be fast.
        by_h = torch.sub(slope1.mT, slope0.mT, out=h.new_empty(N, P))
        by_z = table_map.transpose(_by_table(r, places, w, table[0].numel() // 5))
        ctx.save_for_backward(loc, z_var, mu, mu_var, by_h, by_z, r, Q, p, intervals.slope)
        ctx.noise_shape = log_noise.shape
        return expected, kl

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise second_derivative_error()
        loc, z_var, mu, mu_var, by_h, by_z, r, Q, p, slope = ctx.saved_tensors
        (F, N), factor = r.shape, grad * p
        grad_loc, grad_z_var = (by_z * factor).chunk(2, -1)
        # The mean of f grows with sigma, its variance with the square.
        grad_log_sigma = torch.addcmul(loc * grad_loc, z_var, grad_z_var, value=2).sum((0, 2))
        grad_mu, grad_mu_var = r.sum(-1).mul_(factor), (factor * (-0.5 * N)).expand(F)
        grad_noise = (Q * factor).sub_(grad, alpha=N * F).view(ctx.noise_shape)
        return (
            by_h * (factor * slope),
            None,
            *grad_normal(grad_loc, grad_z_var, grad_kl, loc, z_var),
            grad_log_sigma,
            *grad_normal(grad_mu, grad_mu_var, grad_kl, mu, mu_var),
            grad_noise,
            None,
            None,
        )


def _two_nodes(h: Tensor, sigma: Tensor, intervals: Intervals) -> tuple[Tensor, Tensor]:
    """`fused.two_nodes` for h `(N, P)` and sigma `(P, 1)`, `(P, N)` and `(2, P, N)`."""
    M, (N, P) = intervals.num_nodes, h.shape
    x = torch.sub(h.mT, intervals.low, out=h.new_empty(P, N)).div_(intervals.spacing)
    j = x.clamp(0, M).long().clamp_(0, M)  # also of a NaN
    nearest = x.clamp(1, M)
    decay = x.sub_(nearest).abs_().mul_(-intervals.delta).exp_().mul_(sigma)
    a = x.new_empty(2, P, N)
    left, right = a.unbind()
    torch.sub(nearest, j, out=right)
    torch.sub(intervals.ends[0, 0], right, out=left)
    return j, sinh_ratio(a, intervals).mul_(decay)


def _by_table(r: Tensor, places: Tensor, w: Tensor, num_places: int) -> Tensor:
    """Gradient of the expectation by the table, `(F, 5 R, P)`, but for the factor p.

    In an interval the means of a function get sums of w_k r. The variances get -1/2 times sums of
    w_k^2, and twice the covariance -1/2 times the sum of w0 w1, for all functions alike.
    """
    (F, N), (_, P, _) = r.shape, w.shape
    values = w.new_empty(2 * F + 3, P, N)
    means, squares, products = values.split((2 * F, 2, 1))
    torch.mul(w, r.view(F, 1, 1, N), out=means.view(F, 2, P, N))
    torch.mul(w, w, out=squares)
    torch.mul(w[0], w[1], out=products[0])
    sums = values.new_zeros(len(values), num_places)
    sums.scatter_add_(1, places.expand(len(values), -1), values.view(len(values), -1))
    sums[2 * F :].mul_(-0.5)
    if F > 1:
        shared = sums[2 * F :].reshape(1, -1).expand(F, -1)
        sums = torch.cat([sums[: 2 * F].view(F, -1), shared], 1)
    return sums.view(F, -1, P)
