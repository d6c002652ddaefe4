"""Expectations under normal distributions, by Gauss-Hermite quadrature."""

from collections.abc import Callable

import numpy
import torch
from torch import Tensor

__all__ = ["gauss_hermite", "log_expectation"]


def gauss_hermite(mean: Tensor, var: Tensor, num_nodes: int = 48) -> tuple[Tensor, Tensor]:
    """Nodes `(Q, *shape)` and weights `(Q, 1, .., 1)` of expectations under N(mean, var)."""
    x, w = numpy.polynomial.hermite_e.hermegauss(num_nodes)
    shape = (num_nodes, *[1] * mean.dim())
    nodes = mean.new_tensor(x).reshape(shape)
    weights = mean.new_tensor(w / w.sum()).reshape(shape)
    return mean + var.sqrt() * nodes, weights


def log_expectation(
    log_prob_fn: Callable[[Tensor], Tensor],
    slope_and_curvature_fn: Callable[[Tensor], tuple[Tensor, Tensor]],
    mean: Tensor,
    var: Tensor,
) -> Tensor:
    """log E exp(log_prob_fn(f)) under f ~ N(mean, var), elementwise, for a log-concave function.

    Gauss-Hermite quadrature around the mode of the integrand, found by Newton's method with steps
    of at most a few standard deviations, with the curvature there: exact where a sharp likelihood
    would fall between nodes that are spread over q(f). `slope_and_curvature_fn` gives the first and
    the (negative) second derivative of `log_prob_fn`.
    """
    var = var.clamp(min=torch.finfo(var.dtype).tiny)
    mode = mean.clone()
    for _ in range(50):
        slope, curvature = slope_and_curvature_fn(mode)
        precision = 1 / var - curvature
        step = (slope - (mode - mean) / var) / precision
        mode = mode + step.clamp(-4, 4)
    width = (1 / var - slope_and_curvature_fn(mode)[1]).rsqrt()
    nodes, weights = gauss_hermite(mode, width.square())
    # The integrand over the density of the nodes, N(mode, width^2).
    log_q = -0.5 * ((nodes - mean).square() / var + var.log())
    log_nodes = -0.5 * (((nodes - mode) / width).square() + 2 * width.log())
    return torch.logsumexp(log_prob_fn(nodes) + log_q - log_nodes + weights.log(), 0)
