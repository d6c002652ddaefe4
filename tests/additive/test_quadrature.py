"""Integrals against normal distributions, held to integrals of twenty digits."""

import math

import mpmath
import pytest
import torch
from torch.testing import assert_close

from pyro_dak.additive.quadrature import log_student_t


def slow_log_student_t(residual, var, scale, df):
    """The logarithm of the integral over the noise, piece by piece, in twenty digits."""
    with mpmath.workdps(20):
        residual, var, scale, df = map(mpmath.mpf, (residual, var, scale, df))
        constant = mpmath.gammaprod([(df + 1) / 2], [df / 2]) / mpmath.sqrt(mpmath.pi * df)

        def density(e):
            t = (1 + (e / scale) ** 2 / df) ** (-(df + 1) / 2)
            return t * mpmath.exp(-((residual - e) ** 2) / (2 * var))

        steps = [0, 1, 3, 8, 20, 60, 400, 10_000]
        widths = (scale, mpmath.sqrt(var))
        modes = (0, residual / (1 + var / scale**2), residual)
        points = {m + s * k * w for m in modes for w in widths for k in steps for s in (-1, 1)}
        integral = mpmath.quad(density, sorted(points))
        return float(mpmath.log(constant * integral / (scale * mpmath.sqrt(2 * mpmath.pi * var))))


@pytest.mark.parametrize("df", [0.5, 4.0, 1e3, 1e6, 1e8])
@pytest.mark.parametrize(
    ("residual", "var", "scale"),
    [(-1.3, 0.2, 0.5), (1.0, 25.0, 0.01), (40.0, 1e-2, 1.0)],
)
def test_student_t_noise_on_a_normal_is_exact_for_all_degrees_of_freedom(residual, var, scale, df):
    arguments = torch.tensor([residual]), torch.tensor([var]), torch.tensor(scale)
    expected = slow_log_student_t(residual, var, scale, df)
    assert_close(log_student_t(*arguments, df).item(), expected, rtol=1e-8, atol=1e-8)


def test_both_explanations_of_an_outlier_count():
    # The normal and the noise explain a residual of 160 with about the same density.
    log_p = log_student_t(torch.tensor([160.0]), torch.tensor([300.0]), torch.tensor(1.0), 20.0)
    assert_close(log_p.item(), slow_log_student_t(160.0, 300.0, 1.0, 20.0), rtol=1e-8, atol=1e-8)


def test_limits_of_student_t_noise_are_the_normal_and_the_noise_alone():
    residual = torch.linspace(-9, 9, 19)
    scale, var = torch.tensor(0.7), torch.tensor(0.4)
    normal = torch.distributions.Normal(0.0, (var + scale.square()).sqrt())
    assert_close(log_student_t(residual, var, scale, 1e12), normal.log_prob(residual))
    alone = torch.distributions.StudentT(3.0, 0.0, scale)
    assert_close(log_student_t(residual, 0 * var, scale, 3.0), alone.log_prob(residual))


@pytest.mark.parametrize("residual", [1e10, 1e20, 1e100, 1e300])
def test_student_t_noise_has_a_density_at_any_distance(residual):
    # log p = log c - log u - (df + 1) log(r / u) with u = s sqrt(df) far away, for any variance.
    scale, df = 0.5, 4.0
    unit = scale * df**0.5
    log_c = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(math.pi)
    expected = log_c - math.log(unit) - (df + 1) * (math.log(residual) - math.log(unit))
    arguments = (torch.tensor([residual]), torch.tensor([2.0]), torch.tensor(scale))
    assert_close(log_student_t(*arguments, df).item(), expected, rtol=0, atol=1e-8)


def test_student_t_noise_in_single_precision_is_that_of_double_precision():
    residual, var = torch.randn(50), torch.rand(50)
    double = log_student_t(residual, var, torch.tensor(0.3), 1e6)
    single = log_student_t(residual.float(), var.float(), torch.tensor(0.3).float(), 1e6)
    assert single.dtype == torch.float32
    assert_close(single, double.float())


def test_the_gradient_of_student_t_noise_is_that_of_the_integral():
    arguments = torch.randn(2), torch.rand(2), torch.tensor(0.3)
    for argument in arguments:
        argument.requires_grad_()
    assert torch.autograd.gradcheck(lambda *a: log_student_t(*a, 3.0), arguments)
