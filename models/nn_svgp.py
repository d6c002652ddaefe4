"""NN+SVGP: a sparse variational Gaussian process of GPyTorch on the features of the backbone."""

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor, nn

from models.shared.baseline import Baseline, only_one_output
from models.shared.gpytorch import gpytorch_likelihood, initial_inducing_points
from models.shared.recipe import DEFAULT_RECIPE, Recipe, backbone, seeded
from pyro_dak.additive.gaussian import FunctionMoments


class SparseGP(gpytorch.models.ApproximateGP):
    """SE kernel, constant mean, learned inducing points, full covariance of q(u), whitened."""

    def __init__(self, num_inducing: int, feature_dim: int):
        distribution = gpytorch.variational.CholeskyVariationalDistribution(num_inducing)
        strategy = gpytorch.variational.VariationalStrategy(
            self,
            torch.randn(num_inducing, feature_dim),
            distribution,
            learn_inducing_locations=True,
        )
        super().__init__(strategy)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, features: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(features), self.covar_module(features))


class NetworkSVGP(Baseline):
    """The inducing points start at the features of training rows drawn at random."""

    def __init__(
        self,
        input_dim: int,
        network: nn.Module,
        gp: SparseGP,
        likelihood: nn.Module,
        recipe: Recipe,
    ):
        super().__init__(input_dim, 1, network, nn.ModuleList([gp, likelihood]), recipe)
        self.gp, self.likelihood = gp, likelihood

    def prepare(self, x: Tensor, y: Tensor) -> Recipe:
        points = self.gp.variational_strategy.inducing_points
        with torch.no_grad():
            points.copy_(initial_inducing_points(self.network(x), len(points)))
        self.bound = gpytorch.mlls.VariationalELBO(self.likelihood, self.gp, num_data=len(x))
        return self.recipe

    def loss(self, x: Tensor, y: Tensor, num_data: int) -> Tensor:
        """Minus the ELBO, per datum."""
        return -self.bound(self.gp(self.network(x)), y[:, 0])

    def function_moments(self, x: Tensor) -> FunctionMoments:
        q = self.gp(self.network(x))
        return FunctionMoments(q.mean.unsqueeze(-1), q.variance.unsqueeze(-1))

    @property
    def noise_scale(self) -> Tensor:
        return self.likelihood.noise[0].sqrt()


def build(
    input_dim: int,
    num_outputs: int = 1,
    feature_dim: int = 64,
    recipe: Recipe = DEFAULT_RECIPE,
    num_inducing: int = 64,
    noise_scale: float = 0.5,
    learn_noise: bool = True,
    relu_output: bool = False,
) -> NetworkSVGP:
    """The backbone to D_w features, and on them a sparse GP with `num_inducing` points."""
    only_one_output(num_outputs)
    with seeded(recipe.seed):
        network = backbone(input_dim, feature_dim, relu_output=relu_output)
        gp = SparseGP(num_inducing, feature_dim)
    likelihood = gpytorch_likelihood(noise_scale, learn_noise)
    return NetworkSVGP(input_dim, network, gp, likelihood, recipe)
