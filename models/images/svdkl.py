"""SV-DKL: one KISS-GP of GPyTorch on each of P embedded features, mixed under a softmax."""

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor, nn

from pyro_dak.additive.scaling import build_scaling

from ..shared.gpytorch import Clamp, GPyTorchClassifier, SEProcesses, grid_strategy
from ..shared.recipe import IMAGE_RECIPE, Recipe, seeded


class GridGPs(SEProcesses):
    """P independent one-dimensional GPs on a grid, `(N, P)` to P tasks."""

    def __init__(self, num_units: int, grid_size: int, bounds: tuple[float, float]):
        super().__init__(
            gpytorch.variational.IndependentMultitaskVariationalStrategy(
                grid_strategy(self, num_units, grid_size, bounds), num_tasks=num_units
            ),
            (num_units,),
        )

    def __call__(self, h: Tensor) -> MultivariateNormal:
        return super().__call__(h.mT.unsqueeze(-1))  # from (P, N, 1) to (N, P)


def build(
    features: nn.Module,
    feature_dim: int,
    num_classes: int,
    recipe: Recipe = IMAGE_RECIPE,
    num_units: int = 16,
    grid_size: int = 64,
    bounds: tuple[float, float] = (-1.0, 1.0),
    scaling: str = "standardize",
) -> GPyTorchClassifier:
    """An embedding to P = `num_units` features, scaled to the grid, and P GPs that are mixed.

    Each GP has `grid_size` inducing points between the `bounds`. `scaling` is that of the embedded
    features, one of pyro_dak's.
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
    return GPyTorchClassifier(features, embedding, gps, likelihood, num_classes, recipe)
