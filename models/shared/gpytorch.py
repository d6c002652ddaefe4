"""What the baselines of GPyTorch have in common: processes, noise, bounds, inducing points."""

from collections.abc import Sequence

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor, nn

from pyro_dak.additive.gaussian import FunctionMoments

from .baseline import TableBaseline
from .image_baseline import ImageBaseline
from .recipe import Recipe
from .training import Terms

__all__ = [
    "Clamp",
    "GPyTorchClassifier",
    "GPyTorchRegressor",
    "SEProcesses",
    "gpytorch_likelihood",
    "grid_strategy",
    "initial_inducing_points",
    "sparse_strategy",
]

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


class SEProcesses(gpytorch.models.ApproximateGP):
    """Independent GPs with constant means and SE kernels, one for each entry of a batch shape.

    Subclasses choose the variational strategy.
    """

    def __init__(
        self,
        strategy: gpytorch.variational._VariationalStrategy,
        batch_shape: Sequence[int] = (),
    ):
        super().__init__(strategy)
        batch_shape = torch.Size(batch_shape)
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch_shape)
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.RBFKernel(batch_shape=batch_shape), batch_shape=batch_shape
        )

    def forward(self, h: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(h), self.covar_module(h))


def sparse_strategy(
    process: SEProcesses, batch_shape: Sequence[int], num_inducing: int, dim: int
) -> gpytorch.variational.VariationalStrategy:
    """Learned inducing points, full covariance of q(u), whitened."""
    distribution = gpytorch.variational.CholeskyVariationalDistribution(
        num_inducing, batch_shape=torch.Size(batch_shape)
    )
    points = torch.randn(*batch_shape, num_inducing, dim)
    return gpytorch.variational.VariationalStrategy(
        process, points, distribution, learn_inducing_locations=True
    )


def grid_strategy(
    process: SEProcesses,
    num_units: int,
    grid_size: int,
    bounds: tuple[float, float],
) -> gpytorch.variational.GridInterpolationVariationalStrategy:
    """KISS-GP: a grid of inducing points in one dimension, for each of the units."""
    distribution = gpytorch.variational.CholeskyVariationalDistribution(
        grid_size, batch_shape=torch.Size([num_units])
    )
    return gpytorch.variational.GridInterpolationVariationalStrategy(
        process, grid_size, [bounds], distribution
    )


class Clamp(nn.Module):
    """Clamps to the bounds of the grid, because KISS-GP knows nothing outside."""

    def __init__(self, bounds: tuple[float, float]):
        super().__init__()
        self.bounds = bounds

    def forward(self, h: Tensor) -> Tensor:
        return h.clamp(*self.bounds)


def _keep_constants_out_of_files(module: nn.Module) -> None:
    """Bounds of constraints may be infinite, and checkpoints hold finite numbers only."""
    for part in module.modules():
        if isinstance(part, gpytorch.constraints.Interval):
            for name in ("lower_bound", "upper_bound"):
                part.register_buffer(name, getattr(part, name), persistent=False)


class GPyTorchRegressor(TableBaseline):
    """A process of GPyTorch on the output of a network, with Gaussian noise, for one output.

    Args:
        input_dim: D.
        network: from inputs to what the process sees.
        gp: the process; `q_functions` applies it.
        likelihood: the noise.
        recipe: the settings.
    """

    def __init__(
        self,
        input_dim: int,
        network: nn.Module,
        gp: gpytorch.Module,
        likelihood: gpytorch.likelihoods.GaussianLikelihood,
        recipe: Recipe,
    ):
        last_layer = nn.ModuleList([gp, likelihood])
        super().__init__(input_dim, 1, network, last_layer, recipe)
        self.gp, self.likelihood = gp, likelihood
        _keep_constants_out_of_files(last_layer)

    def q_functions(self, x: Tensor) -> MultivariateNormal:
        """q(f) at x, `(N,)`."""
        return self.gp(self.network(x))

    def prepare(self, x: Tensor, y: Tensor) -> None:
        self.bound = gpytorch.mlls.VariationalELBO(self.likelihood, self.gp, num_data=len(x))

    def loss(self, x: Tensor, y: Tensor, num_data: int) -> Tensor:
        """Minus the ELBO, per row."""
        return -self.bound(self.q_functions(x), y[:, 0])

    def function_moments(self, x: Tensor) -> FunctionMoments:
        q = self.q_functions(x)
        return FunctionMoments(q.mean.unsqueeze(-1), q.variance.unsqueeze(-1))

    @property
    def noise_scale(self) -> Tensor:
        return self.likelihood.noise[0].sqrt()


class GPyTorchClassifier(ImageBaseline):
    """Processes of GPyTorch on embedded features under its `SoftmaxLikelihood`.

    Args:
        features: network from images to features.
        embedding: from features to what the processes see.
        gps: the processes, `(N, ...)` to a multitask normal `(N, tasks)`.
        likelihood: the softmax, which may mix the tasks into classes.
        num_classes: C.
        recipe: the settings.
    """

    def __init__(
        self,
        features: nn.Module,
        embedding: nn.Module,
        gps: SEProcesses,
        likelihood: gpytorch.likelihoods.SoftmaxLikelihood,
        num_classes: int,
        recipe: Recipe,
    ):
        last_layer = nn.ModuleList([gps, likelihood])
        super().__init__(features, embedding, last_layer, num_classes, recipe)
        self.gps, self.likelihood = gps, likelihood
        _keep_constants_out_of_files(last_layer)

    def terms(self, h: Tensor, y: Tensor, num_data: int) -> Terms:
        """E log p(y | f) by draws of f, minus KL / num_data: GPyTorch's `VariationalELBO`."""
        with gpytorch.settings.num_likelihood_samples(self.recipe.num_samples_train):
            fit = self.likelihood.expected_log_prob(y, self.gps(h)).mean()
        kl = self.gps.variational_strategy.kl_divergence() / num_data
        return Terms(kl - fit, fit, kl)

    def latent_moments(self, h: Tensor) -> FunctionMoments:
        q = self.gps(h)
        return FunctionMoments(q.mean, q.variance)

    @property
    def mixing_weights(self) -> Tensor | None:
        return self.likelihood.mixing_weights
