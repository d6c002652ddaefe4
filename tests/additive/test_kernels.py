import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from pyro_dak.additive.activation import KernelActivation
from pyro_dak.additive.grid import DyadicGrid
from pyro_dak.additive.kernels import Kernel, LaplaceKernel, MaternKernel, RBFKernel

KERNELS = [LaplaceKernel(0.7), MaternKernel(0.7, nu=1.5), MaternKernel(0.7), RBFKernel(0.7)]


def name(kernel):
    return f"{type(kernel).__name__}{getattr(kernel, 'nu', '')}"


@pytest.mark.parametrize(
    ("kernel", "value"),
    [
        (LaplaceKernel(2.0), math.exp(-0.5)),
        (MaternKernel(2.0, nu=1.5), (1 + math.sqrt(3) / 2) * math.exp(-math.sqrt(3) / 2)),
        (MaternKernel(2.0, nu=2.5), (1 + math.sqrt(5) / 2 + 5 / 12) * math.exp(-math.sqrt(5) / 2)),
        (RBFKernel(2.0), math.exp(-1 / 8)),
    ],
    ids=["laplace", "matern32", "matern52", "rbf"],
)
def test_value_at_distance_one_is_the_textbook_formula(kernel, value):
    assert_close(kernel(torch.tensor([3.0]), torch.tensor([4.0])), torch.tensor([[value]]))


@pytest.mark.parametrize("kernel", KERNELS, ids=name)
def test_matrix_is_the_loop_over_distances(kernel):
    a, b = torch.randn(2, 3), torch.randn(4)
    expected = [[[kernel.of_distance((s - t).abs()) for t in b] for s in row] for row in a]
    assert_close(kernel(a, b), torch.tensor(expected))


@pytest.mark.parametrize("kernel", KERNELS, ids=name)
def test_variance_is_one_and_covariance_vanishes_far_away(kernel):
    assert kernel.of_distance(torch.tensor(0.0)) == 1
    assert kernel.of_distance(torch.tensor(1e4)) == 0


@pytest.mark.parametrize("kernel", KERNELS, ids=name)
def test_matrix_is_positive_semidefinite(kernel):
    a = torch.randn(30)
    assert torch.linalg.eigvalsh(kernel(a, a)).min() > -1e-12


@pytest.mark.parametrize("kernel", KERNELS, ids=name)
def test_lengthscale_measures_distance(kernel):
    r = torch.rand(5)
    unit = type(kernel)(1.0, **({"nu": kernel.nu} if isinstance(kernel, MaternKernel) else {}))
    assert_close(kernel.of_distance(0.7 * r), unit.of_distance(r))


def test_only_laplace_is_markov():
    assert [kernel.is_markov for kernel in KERNELS] == [True, False, False, False]


@pytest.mark.usefixtures("no_type_checker")
@pytest.mark.parametrize("kernel_class", [LaplaceKernel, MaternKernel, RBFKernel])
@pytest.mark.parametrize("lengthscale", [0.0, -1.0, float("nan"), float("inf")])
def test_lengthscale_must_be_positive_and_finite(kernel_class, lengthscale):
    with pytest.raises(ValueError, match="`lengthscale` must be positive and finite; got"):
        kernel_class(lengthscale)


@pytest.mark.usefixtures("no_type_checker")
@pytest.mark.parametrize("lengthscale", ["1", True, None])
def test_lengthscale_must_be_a_number(lengthscale):
    with pytest.raises(TypeError, match="`lengthscale` must be a real number; got"):
        LaplaceKernel(lengthscale)


@pytest.mark.parametrize("nu", [0.5, 2.0])
def test_matern_names_the_smoothness_it_has(nu):
    with pytest.raises(ValueError, match=r"`nu` must be 1.5 or 2.5; got .* use LaplaceKernel"):
        MaternKernel(1.0, nu=nu)


@pytest.mark.parametrize("kernel", KERNELS, ids=name)
@pytest.mark.parametrize("kind", [torch.tensor, list, tuple, np.array])
def test_lengthscales_of_units_are_numbers_in_a_tuple(kernel, kind):
    own = replace(kernel, lengthscale=kind([0.5, 2.0]))
    assert own.lengthscale == (0.5, 2.0)
    again = replace(kernel, lengthscale=(0.5, 2.0))
    assert own == again
    assert hash(own) == hash(again)
    assert "lengthscale=(0.5, 2.0)" in repr(own)
    assert own != kernel
    assert replace(kernel, lengthscale=kind([0.5, 2.0]), learn=True) != own


@pytest.mark.parametrize("kernel", KERNELS, ids=name)
def test_matrix_with_a_lengthscale_for_each_unit_is_that_of_each_alone(kernel):
    a, b, scales = torch.randn(3, 2), torch.randn(4), (0.5, 2.0)
    expected = [replace(kernel, lengthscale=t)(a[:, p], b) for p, t in enumerate(scales)]
    assert_close(replace(kernel, lengthscale=scales)(a, b), torch.stack(expected, 1))
    assert_close(kernel(a, b, torch.tensor(scales)), torch.stack(expected, 1))


def test_a_kernel_of_ones_own_has_lengthscales_too():
    @dataclass(frozen=True)
    class Cauchy(Kernel):
        def of_distance(self, r):
            return 1 / (1 + (r / self.lengthscale) ** 2)

    found = Cauchy((0.5, 2.0))(torch.tensor([1.0, 1.0]), torch.zeros(1))
    assert_close(found, torch.tensor([[1 / 5], [1 / 1.25]]))


def test_a_scalar_tensor_is_a_number():
    kernel = LaplaceKernel(torch.tensor(0.5))
    assert kernel == LaplaceKernel(0.5)
    assert kernel.is_fixed_number


def test_a_prior_is_carried_and_gives_no_value():
    prior = torch.distributions.LogNormal(0.0, 1.0)
    kernel = LaplaceKernel(prior)
    assert kernel.lengthscale is prior
    assert kernel == LaplaceKernel(prior)
    assert hash(kernel) == hash(LaplaceKernel(prior))
    assert "LogNormal" in repr(kernel)
    with pytest.raises(ValueError, match="`lengthscale` must be given where it has a prior"):
        kernel(torch.rand(2), torch.rand(3))
    with pytest.raises(ValueError, match="`learn` must be False where the lengthscale has a prior"):
        LaplaceKernel(prior, learn=True)


@pytest.mark.usefixtures("no_type_checker")
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"lengthscale": torch.tensor([1.0, -1.0])}, ValueError, r"`lengthscale\[1\]` must be pos"),
        ({"lengthscale": []}, ValueError, "`lengthscale` must have a number for each unit"),
        ({"lengthscale": torch.ones(2, 2)}, TypeError, r"`lengthscale\[0\]` must be a real number"),
        ({"learn": 1}, TypeError, "`learn` must be True or False; got 1"),
    ],
)
def test_wrong_lengthscales_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        LaplaceKernel(**arguments)


def test_kernels_without_unit_variance_are_refused():
    @dataclass(frozen=True)
    class Twice(Kernel):
        def of_distance(self, r):
            return 2 * (-r).exp()

    @dataclass(frozen=True)
    class Brownian(Kernel):
        def of_distance(self, r):
            raise AssertionError

        def __call__(self, a, b):
            return torch.minimum(a.unsqueeze(-1), b)

    for kernel, most in ((Twice(), "2"), (Brownian(), "0.875")):
        with pytest.raises(ValueError, match=rf"k\(0\) = 1.*to {most} at the nodes"):
            KernelActivation(DyadicGrid(3), kernel)


def test_the_lengthscale_of_a_projection_is_no_product_over_features():
    """exp(-|w^T v| / t) is the product of exp(-|w_d v_d| / t) for one feature alone (appendix B).

    Along v orthogonal to w the kernel of the projection is 1 and the product is not.
    """
    kernel, w, zero = LaplaceKernel(0.7), torch.tensor([1.0, 2.0]), torch.zeros(1)
    for v, is_equal in (([0.5, 0.0], True), ([0.5, 0.25], True), ([1.0, -0.5], False)):
        v = torch.tensor(v)
        projected = kernel((w @ v).reshape(1), zero)
        product = kernel(w * v, zero).prod()
        assert torch.allclose(projected.squeeze(), product) == is_equal
    assert_close(projected.squeeze(), torch.ones(()))
