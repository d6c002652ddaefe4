"""Expectations under normal distributions that have no closed form."""

import math
from collections.abc import Callable

import numpy
import torch
from torch import Tensor

__all__ = ["expected_sigmoid", "gauss_hermite", "log_expectation", "log_student_t", "normal_nodes"]

# sigmoid(f) = sum_i p_i Phi(s_i f), Phi the distribution function of N(0, 1), to 3e-9 for all f,
# and 2e-8 in the derivative (Monahan and Stefanski, 1992): pairs (p_i, s_i).
_SIGMOID_MIXTURE = (
    (0.003246343272134, 1.365340806296348),
    (0.051517477033972, 1.059523971016916),
    (0.195077912673858, 0.830791313765644),
    (0.315569823632818, 0.650732166639391),
    (0.274149576158423, 0.508135425366489),
    (0.131076880695470, 0.396313345166341),
    (0.027912418727972, 0.308904252267995),
    (0.001449567805354, 0.238212616409306),
)


def gauss_hermite(mean: Tensor, var: Tensor, num_nodes: int = 48) -> tuple[Tensor, Tensor]:
    """Nodes `(Q, *shape)` and weights `(Q, 1, .., 1)` of expectations under N(mean, var)."""
    x, w = numpy.polynomial.hermite_e.hermegauss(num_nodes)
    shape = (num_nodes, *[1] * mean.dim())
    nodes = mean.new_tensor(x).reshape(shape)
    weights = mean.new_tensor(w / w.sum()).reshape(shape)
    return mean + var.sqrt() * nodes, weights


def normal_nodes(dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes `(Q, dim)` and weights `(Q,)` of expectations under N(0, I).

    They are those of Gauss and Hermite, as a product in two dimensions; for more dimensions they
    are 1,024 points of a scrambled Sobol sequence, always the same.
    """
    if dim <= 2:
        zero = torch.zeros(dim, dtype=torch.float64)
        nodes, weights = gauss_hermite(
            zero, torch.ones_like(zero), num_nodes=48 if dim == 1 else 24
        )
        grid = torch.cartesian_prod(*nodes.mT).reshape(-1, dim)
        products = torch.cartesian_prod(*[weights.flatten()] * dim).reshape(-1, dim).prod(-1)
        return grid.to(like), products.to(like)
    points = torch.quasirandom.SobolEngine(dim, scramble=True, seed=0).draw(1024).double()
    nodes = torch.special.ndtri(points.clamp(1e-9, 1 - 1e-9)).to(like)
    return nodes, nodes.new_full((len(nodes),), 1 / len(nodes))


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


def log_student_t(residual: Tensor, var: Tensor, scale: Tensor, df: float) -> Tensor:
    """log density of the sum of `scale` times a Student-t variable and N(0, var), elementwise.

    With the noise e = scale sqrt(df) sinh w, rho = |residual| / (scale sqrt(df)) and
    beta = var / scale^2 the density is

        c / sqrt(2 pi var) int exp(-df E(w)) dw,   E(w) = log cosh w + (sinh w - rho)^2 / (2 beta)

    with c = Gamma((df + 1) / 2) / (Gamma(df / 2) sqrt(pi)). In this coordinate the tails are those
    of a normal distribution, however heavy those of the noise are. E has one minimum, or two with a
    maximum between them: an outlier may be noise, or may be the other term. Around each minimum
    the integral is taken by Gauss-Legendre quadrature over the w with an integrand of at least
    exp(-40) times the largest. The result is exact to about 1e-8, for any df and any arguments.
    Far out, where only noise can explain the residual, the density falls as rho^-(df + 1).
    """
    dtype = residual.dtype
    residual, var, scale = residual.double(), var.double(), scale.double()
    rho, beta = torch.broadcast_tensors(
        residual.abs() / (scale * math.sqrt(df)),
        (var / scale.square()).clamp(min=1e-200),
    )
    # The next terms of that law are (df + 1) / 2 rho^-2 and (df + 1) (df + 2) / (2 df) beta rho^-2.
    far = 1e6 * ((df + 1) * (1 + (df + 2) / df * beta)).sqrt()
    log_excess, rho = (rho / far).clamp(min=1).log(), rho.minimum(far)
    x, weights = (torch.as_tensor(part) for part in numpy.polynomial.legendre.leggauss(64))
    shape = (-1, *[1] * rho.dim())
    t, log_weights = ((1 + x) / 2).reshape(shape).to(rho), (weights / 2).log().reshape(shape)
    with torch.no_grad():
        lowest, windows = _student_t_windows(rho, beta, df)
    parts = []
    for start, end in windows:
        exponents = -df * (_student_t_energy(start + (end - start) * t, rho, beta) - lowest)
        total = torch.logsumexp(exponents + log_weights.to(rho), 0)
        parts.append(total + (end - start).clamp(min=0).log())
    log_constant = _log_gamma_step(df / 2) - 0.5 * math.log(2 * math.pi**2)
    log_scale = 0.5 * beta.log() + scale.log() + (df + 1) * log_excess
    return (log_constant - log_scale - df * lowest + torch.logaddexp(*parts)).to(dtype)


def _student_t_energy(d: Tensor, rho: Tensor, beta: Tensor) -> Tensor:
    """E(w) of `log_student_t` at w = arsinh(rho) + d."""
    centre = rho.asinh()
    difference = 2 * (centre + d / 2).cosh() * (d / 2).sinh()  # sinh w - rho, nothing cancels
    return 0.5 * torch.log1p((centre + d).sinh().square()) + difference.square() / (2 * beta)


def _student_t_windows(
    rho: Tensor, beta: Tensor, df: float
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """The minimum of E, and two intervals of d = w - arsinh(rho) that hold all of the integral.

    E is stationary where S = sinh w solves (1 + S^2) (S - rho) + beta S = 0, a cubic equation with
    all its real roots between 0 and rho and an inflection at rho / 3.
    """

    def root(S: Tensor) -> Tensor:
        """The root that Newton's method finds, which from a start on its side is monotone."""
        for _ in range(60):
            value = (1 + S * S) * (S - rho) + beta * S
            S = (S - value / (3 * S * S - 2 * rho * S + 1 + beta)).clamp(min=0).minimum(rho)
        return S

    def offset(S: Tensor) -> Tensor:
        """d at a root S, from rho - S = beta S / (1 + S^2)."""
        sum_of_products = S * (1 + rho * rho).sqrt() + rho * (1 + S * S).sqrt()
        difference = beta * S / (1 + S * S) * (S + rho)
        return -(difference / sum_of_products.clamp(min=1e-300)).asinh()

    def edge(inside: Tensor, outside: Tensor) -> Tensor:
        """Where E rises above `ceiling` on the way, or `outside` if it does not, by bisection."""
        for _ in range(40):
            middle = (inside + outside) / 2
            is_inside = _student_t_energy(middle, rho, beta) < ceiling
            inside = torch.where(is_inside, middle, inside)
            outside = torch.where(is_inside, outside, middle)
        return outside

    slope, value = 1 + beta - rho * rho / 3, rho * (1 + beta) / 3 - rho - 2 * rho**3 / 27
    are_three = 4 * slope**3 + 27 * value**2 < 0  # by the discriminant
    zero = torch.zeros_like(rho)
    first = root(torch.where(are_three | (value > 0), zero, rho))
    last = root(torch.where(are_three | (value <= 0), rho, zero))
    left, right = offset(first), offset(last)
    between = torch.where(are_three, offset(rho - first - last), left)  # the roots sum up to rho
    lowest = torch.minimum(*(_student_t_energy(d, rho, beta) for d in (left, right)))
    ceiling = lowest + 40 / df
    reach = 2 * (beta * ceiling / 2).sqrt().asinh()  # beyond it the second term of E is above
    windows = [
        (edge(left, -reach), edge(left, between)),
        (edge(right, between), edge(right, reach)),
    ]
    return lowest, windows


def _log_gamma_step(x: float) -> float:
    """log Gamma(x + 1/2) - log Gamma(x), for large x by its expansion, in which nothing cancels."""
    if x < 1e4:
        return math.lgamma(x + 0.5) - math.lgamma(x)
    return 0.5 * math.log(x) - 1 / (8 * x) + 1 / (192 * x**3)


def expected_sigmoid(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """E sigmoid(f) and E sigmoid'(f) under f ~ N(mean, var), elementwise, to 2e-8.

    The sigmoid is a mixture of normal distribution functions Phi(s f) to that accuracy, and for
    each of them E Phi(s f) = Phi(s m / sqrt(1 + s^2 v)): exact however wide q(f) is.
    """
    constants = mean.new_tensor(_SIGMOID_MIXTURE)
    p, s = constants.reshape(-1, 2, *[1] * mean.dim()).unbind(1)
    slope = s * torch.rsqrt(1 + s.square() * var)
    t = slope * mean
    density = (-0.5 * t.square()).exp() / math.sqrt(2 * math.pi)
    return (p * torch.special.ndtr(t)).sum(0), (p * slope * density).sum(0)
