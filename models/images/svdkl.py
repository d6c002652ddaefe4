"""SV-DKL: one KISS-GP of GPyTorch on each of P embedded features, mixed under a softmax."""

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor, nn

from models.shared.image_gpytorch import GPyTorchBaseline
from models.shared.image_recipe import DEFAULT_RECIPE, ImageRecipe
from models.shared.recipe import seeded
from pyro_dak.additive.scaling import build_scaling


class GridGPs(gpytorch.models.ApproximateGP):
    """P independent one-dimensional GPs (SE kernels) on a grid, `(N, P)` to P tasks."""

    def __init__(self, num_units: int, grid_size: int, bounds: tuple[float, float]):
        batch_shape = torch.Size([num_units])
        distribution = gpytorch.variational.CholeskyVariationalDistribution(
            grid_size, batch_shape=batch_shape
        )
        grid = gpytorch.variational.GridInterpolationVariationalStrategy(
            self, grid_size, [bounds], distribution
        )
        super().__init__(
            gpytorch.variational.IndependentMultitaskVariationalStrategy(grid, num_tasks=num_units)
        )
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch_shape)
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.RBFKernel(batch_shape=batch_shape), batch_shape=batch_shape
        )

    def forward(self, h: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(h), self.covar_module(h))

    def __call__(self, h: Tensor) -> MultivariateNormal:
        return super().__call__(h.mT.unsqueeze(-1))  # from (P, N, 1) to (N, P)


class Clamp(nn.Module):
    """To the bounds of the grid: KISS-GP knows nothing outside."""

    def __init__(self, bounds: tuple[float, float]):
        super().__init__()
        self.bounds = bounds

    def forward(self, h: Tensor) -> Tensor:
        return h.clamp(*self.bounds)


def build(
    features: nn.Module,
    feature_dim: int,
    num_classes: int,
    recipe: ImageRecipe = DEFAULT_RECIPE,
    num_units: int = 16,
    grid_size: int = 64,
    bounds: tuple[float, float] = (-1.0, 1.0),
    scaling: str = "standardize",
) -> GPyTorchBaseline:
    """An embedding to P features, scaled to the grid, and P GPs mixed by the softmax likelihood.

    Args:
        features: network from images to features `(N, D_w)`.
        feature_dim: D_w.
        num_classes: C.
        recipe: the settings.
        num_units: P.
        grid_size: inducing points of each GP.
        bounds: of the grid.
        scaling: of the embedded features, one of pyro_dak's.
    """
    with seeded(recipe.seed):
        gps = GridGPs(num_units, grid_size, bounds)
        embedding = nn.Sequential(
            nn.Linear(feature_dim, num_units, bias=False),
            build_scaling(scaling, num_units, bounds),
            Clamp(bounds),
        )
        likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_units, num_classes)
        gps(torch.zeros(2, num_units))  # the first call draws the start of q(u)
    return GPyTorchBaseline(features, embedding, gps, likelihood, num_classes, recipe)
