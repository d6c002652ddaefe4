"""DGP: a deep Gaussian process of two layers, by doubly stochastic variational inference."""

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor, nn

from pyro_dak.additive.gaussian import FunctionMoments

from .shared.baseline import only_one_output
from .shared.gpytorch import (
    GPyTorchRegressor,
    gpytorch_likelihood,
    initial_inducing_points,
)
from .shared.recipe import DEFAULT_RECIPE, Recipe, seeded


class Layer(gpytorch.models.deep_gps.DeepGPLayer):
    """Independent sparse GPs with SE kernels; with `output_dim` None there is a single one."""

    def __init__(
        self,
        input_dim: int,
        output_dim: int | None,
        num_inducing: int,
        mean_module: gpytorch.means.Mean,
    ):
        batch_shape = torch.Size([] if output_dim is None else [output_dim])
        distribution = gpytorch.variational.CholeskyVariationalDistribution(
            num_inducing, batch_shape=batch_shape
        )
        strategy = gpytorch.variational.VariationalStrategy(
            self, torch.randn(*batch_shape, num_inducing, input_dim), distribution
        )
        super().__init__(strategy, input_dim, output_dim)
        self.mean_module = mean_module
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.RBFKernel(batch_shape=batch_shape), batch_shape=batch_shape
        )

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class TwoLayers(gpytorch.models.deep_gps.DeepGP):
    """A hidden layer with a linear mean that starts as the identity, then one GP."""

    def __init__(self, input_dim: int, hidden_dim: int, num_inducing: int):
        super().__init__()
        linear = gpytorch.means.LinearMean(input_dim, batch_shape=torch.Size([hidden_dim]))
        with torch.no_grad():
            linear.weights.copy_(torch.eye(hidden_dim, input_dim).unsqueeze(-1))
            linear.bias.zero_()
        self.hidden = Layer(input_dim, hidden_dim, num_inducing, linear)
        self.last = Layer(hidden_dim, None, num_inducing, gpytorch.means.ConstantMean())

    def forward(self, x: Tensor) -> MultivariateNormal:
        return self.last(self.hidden(x))


class DGP(GPyTorchRegressor):
    """There are `num_samples_train` and `num_samples_test` draws of the hidden layer per row.

    Inducing points start at training rows, and the hidden layer nearly without variance, so that
    the model starts as a sparse GP.
    """

    @torch.no_grad()
    def prepare(self, x: Tensor, y: Tensor) -> None:
        super().prepare(x, y)
        self.bound = gpytorch.mlls.DeepApproximateMLL(self.bound)
        hidden, last = (layer.variational_strategy for layer in (self.gp.hidden, self.gp.last))
        points = initial_inducing_points(x, hidden.inducing_points.shape[-2])
        hidden.inducing_points.copy_(points.expand_as(hidden.inducing_points))
        last.inducing_points.copy_(self.gp.hidden.mean_module(points).mT)
        hidden._variational_distribution.chol_variational_covar.mul_(1e-2)
        hidden.variational_params_initialized.fill_(1)

    def loss(self, x: Tensor, y: Tensor, num_data: int) -> Tensor:
        """Minus the ELBO, per row, estimated by draws of the hidden layer."""
        with gpytorch.settings.num_likelihood_samples(self.recipe.num_samples_train):
            return super().loss(x, y, num_data)

    def function_moments(self, x: Tensor) -> FunctionMoments:
        """Mean and variance of the mixture over the draws."""
        with gpytorch.settings.num_likelihood_samples(self.recipe.num_samples_test):
            q = self.gp(x)
        mean, spread = q.mean.mean(0), q.mean.var(0, correction=0)
        return FunctionMoments(mean.unsqueeze(-1), (q.variance.mean(0) + spread).unsqueeze(-1))


def build(
    input_dim: int,
    num_outputs: int = 1,
    feature_dim: int = 64,
    recipe: Recipe = DEFAULT_RECIPE,
    hidden_dim: int | None = None,
    num_inducing: int = 64,
    noise_scale: float = 0.5,
    learn_noise: bool = True,
) -> DGP:
    """Two layers of GPs; the hidden one is as wide as the inputs, at most 30, if not given.

    `feature_dim` is not used, because there are no features.
    """
    only_one_output(num_outputs)
    with seeded(recipe.seed):
        gp = TwoLayers(input_dim, hidden_dim or min(input_dim, 30), num_inducing)
    likelihood = gpytorch_likelihood(noise_scale, learn_noise)
    return DGP(input_dim, nn.Identity(), gp, likelihood, recipe)
