"""NUTS over weights, lengthscale and noise at once finds the posterior of a grid integration."""

import math

import pyro
import pytest
import torch
from pyro.infer import MCMC, NUTS
from torch import Tensor, nn

from pyro_dak import DAK, GaussianLikelihood, LaplaceKernel, LogNormalPrior

LENGTHSCALE = LogNormalPrior(math.log(0.5), 0.5)
NOISE = LogNormalPrior(-1.0, 0.7)


def make_data() -> tuple[Tensor, Tensor]:
    """200 rows of a smooth function of one input, with noise."""
    x = torch.rand(200, 1)
    return x, torch.sin(7 * x) + 0.3 * torch.randn(200, 1)


def make_model() -> DAK:
    """One unit, whose input is x itself; lengthscale and noise have priors."""
    return DAK(
        nn.Identity(),
        feature_dim=1,
        num_units=1,
        level=3,
        kernel=LaplaceKernel(LENGTHSCALE),
        likelihood=GaussianLikelihood(NOISE),
        scaling="none",
        embedding=False,
    ).eval()


def grid_moments(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of log noise, with the weights integrated out in closed form.

    y ~ N(0, Phi Phi^T + 1 1^T + noise^2 I) for each lengthscale, of which the eigenvalues of the
    matrix without noise give the density at all noise scales at once.
    """
    log_lengths = torch.linspace(-3.5, 2.0, 111)
    log_noise = torch.linspace(-1.8, -0.6, 241)
    log_joint = torch.empty(len(log_lengths), len(log_noise))
    for i, log_length in enumerate(log_lengths):
        kernel = LaplaceKernel(float(log_length.exp()))
        U = torch.arange(1, 8) / 8
        K_xU, K_UU = kernel(x.flatten(), U), kernel(U, U)
        values, vectors = torch.linalg.eigh(K_xU @ torch.linalg.solve(K_UU, K_xU.mT) + 1)
        var = values.clamp(min=0) + (2 * log_noise).exp().unsqueeze(-1)  # (noise, N)
        log_lik = -0.5 * ((vectors.mT @ y).flatten().square() / var + var.log()).sum(-1)
        # In the logarithms both priors are normal.
        log_prior = -0.5 * ((log_length - LENGTHSCALE.loc) / LENGTHSCALE.scale).square()
        log_prior = log_prior - 0.5 * ((log_noise - NOISE.loc) / NOISE.scale).square()
        log_joint[i] = log_lik + log_prior
    weights = (log_joint - log_joint.max()).exp().sum(0)
    weights = weights / weights.sum()
    mean = weights @ log_noise
    return mean, (weights @ (log_noise - mean).square()).sqrt()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The grid is coarse")
def test_nuts_over_all_sites_finds_the_noise_of_a_grid_integration():
    x, y = make_data()
    pyro.set_rng_seed(1)
    mcmc = MCMC(NUTS(make_model()), num_samples=400, warmup_steps=200, disable_progbar=True)
    mcmc.run(x, y)
    log_noise = mcmc.get_samples()["noise_scale"].log()
    ess = pyro.ops.stats.effective_sample_size(log_noise.unsqueeze(0))
    mean, std = grid_moments(x, y)
    assert ess > 50
    assert (log_noise.mean() - mean).abs() < 4 * std / ess.sqrt()
    # The standard error of a standard deviation is about std / sqrt(2 n).
    assert (log_noise.std() - std).abs() < 4 * std / (2 * ess).sqrt()
