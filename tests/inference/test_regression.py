"""Posterior and evidence from sums over rows, against the dense normal distribution of y."""

import math

import pytest
import torch

from pyro_dak.inference.regression import RegressionSums, evidence, linear_posterior

SIZES = (3, 4)


def problem(num_rows=12):
    """Centred designs and targets, roots of the prior of two terms, and a noise scale."""
    phi = torch.randn(num_rows, sum(SIZES))
    phi = phi - phi.mean(0)
    y = torch.randn(num_rows) + phi[:, 0]
    y = y - y.mean()
    roots = [torch.randn(size, size) for size in SIZES]
    return phi, y, roots, 0.7


def sums_of(phi, y):
    return RegressionSums(phi.mT @ phi, phi.mT @ y, float(y @ y), float(len(y)))


def contrasts(num_rows):
    """Rows that are orthonormal and orthogonal to 1, `(N - 1, N)`."""
    first = torch.ones(num_rows, 1) / math.sqrt(num_rows)
    return torch.linalg.qr(torch.cat([first, torch.eye(num_rows)[:, 1:]], 1)).Q[:, 1:].mT


def dense_evidence(phi, y, covariances, log_noise):
    """log density of the contrasts of y, computed with an N x N matrix."""
    A = contrasts(len(y))
    cov = phi @ torch.block_diag(*covariances) @ phi.mT
    cov = cov + (2 * log_noise).exp() * torch.eye(len(y))
    law = torch.distributions.MultivariateNormal(torch.zeros(len(y) - 1), A @ cov @ A.mT)
    return law.log_prob(A @ y)


def test_evidence_is_the_density_of_the_contrasts_of_y():
    phi, y, roots, noise = problem()
    covariances = [root @ root.mT for root in roots]
    expected = dense_evidence(phi, y, covariances, torch.tensor(noise).log())
    assert evidence(sums_of(phi, y), roots, noise).value == pytest.approx(float(expected))


def test_gradient_is_that_of_the_dense_density():
    phi, y, roots, noise = problem()
    covariances = [(root @ root.mT).requires_grad_() for root in roots]
    log_noise = torch.tensor(noise).log().requires_grad_()
    dense_evidence(phi, y, covariances, log_noise).backward()
    found = evidence(sums_of(phi, y), roots, noise)
    assert found.by_log_noise == pytest.approx(float(log_noise.grad))
    for block, covariance in zip(found.by_blocks, covariances, strict=True):
        gradient = (covariance.grad + covariance.grad.mT) / 2
        torch.testing.assert_close(block, gradient)


def test_posterior_is_that_of_dense_conditioning():
    phi, y, roots, noise = problem()
    C = torch.block_diag(*(root @ root.mT for root in roots))
    gain = C @ phi.mT @ torch.linalg.inv(phi @ C @ phi.mT + noise**2 * torch.eye(len(y)))
    mean, root = linear_posterior(sums_of(phi, y), roots, noise)
    torch.testing.assert_close(mean, gain @ y)
    torch.testing.assert_close(root.mT @ root, C - gain @ phi @ C)


def test_a_singular_prior_is_fine():
    phi, y, roots, noise = problem()
    roots[1] = roots[1][:, :2]
    C = torch.block_diag(*(root @ root.mT for root in roots))
    mean, root = linear_posterior(sums_of(phi, y), roots, noise)
    gain = C @ phi.mT @ torch.linalg.inv(phi @ C @ phi.mT + noise**2 * torch.eye(len(y)))
    torch.testing.assert_close(mean, gain @ y)
    assert root.shape == (5, 7)
