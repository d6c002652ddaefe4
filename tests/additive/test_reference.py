"""The references themselves, where the library does not already hold them to another number."""

import torch
from torch.testing import assert_close

from tests import reference


def test_additive_gp_at_its_inputs_is_ridge_regression_with_the_kernel_matrix():
    x, y = torch.rand(6, 2), torch.randn(6, 3)
    K = torch.full((6, 6), 0.25)
    for p, sigma in enumerate([0.5, 2.0]):
        K += sigma**2 * torch.exp(-(x[:, None, p] - x[None, :, p]).abs() / 0.7)
    mean, var = reference.additive_gp_posterior(x, y, x, 0.7, torch.tensor([0.5, 2.0]), 0.5, 0.3)
    smoother = torch.eye(6) - 0.09 * torch.linalg.inv(K + 0.09 * torch.eye(6))
    assert_close(mean, smoother @ y)
    assert_close(var, 0.09 * smoother.diagonal())


def test_additive_gp_far_from_the_data_has_the_variance_of_the_units_and_less_of_the_bias():
    x, y, far = torch.rand(50, 2), torch.randn(50), torch.full((1, 2), 1e3)
    _, var = reference.additive_gp_posterior(x, y, far, 0.7, 1.0, 2.0, 0.3)
    assert 2.0 < float(var) < 2.0 + 4.0
