"""What the baselines of GPyTorch share: the noise and the start of the inducing points."""

import gpytorch
import torch
from torch import Tensor

NOISE_VAR_FLOOR = 1e-4  # GPyTorch's own


def _var_from_log_scale(log_scale: Tensor) -> Tensor:
    return (2 * log_scale).exp()


def _log_scale_from_var(var: Tensor) -> Tensor:
    return 0.5 * var.log()


def gpytorch_likelihood(
    noise_scale: float, learn_noise: bool
) -> gpytorch.likelihoods.GaussianLikelihood:
    """GPyTorch's Gaussian likelihood with a noise of our choice.

    The parameter is the log of the standard deviation (but for the floor), as in pyro_dak, so that
    a step of the optimiser changes the noise of all models alike; GPyTorch's own parameter moves it
    at half that speed.
    """
    if not noise_scale**2 > NOISE_VAR_FLOOR:
        raise ValueError(f"`noise_scale` must be above 0.01 in GPyTorch; got {noise_scale}.")
    constraint = gpytorch.constraints.GreaterThan(
        NOISE_VAR_FLOOR, transform=_var_from_log_scale, inv_transform=_log_scale_from_var
    )
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=constraint)
    likelihood.noise = noise_scale**2
    likelihood.raw_noise.requires_grad_(learn_noise)
    return likelihood


def initial_inducing_points(rows: Tensor, num_inducing: int) -> Tensor:
    """Some of the rows at random, `(num_inducing, D)`; repeated ones are moved apart by noise."""
    order = torch.randperm(len(rows), device="cpu").to(rows.device)
    if len(rows) >= num_inducing:
        return rows[order[:num_inducing]]
    points = rows[order.repeat(-(-num_inducing // len(rows)))[:num_inducing]]
    return points + 0.1 * rows.std(0, correction=0) * torch.randn_like(points)
