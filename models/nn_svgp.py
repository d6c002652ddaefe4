"""NN+SVGP: a sparse variational Gaussian process of GPyTorch on the features of the backbone."""

import torch
from torch import Tensor

from .shared.backbones import backbone
from .shared.baseline import only_one_output
from .shared.gpytorch import (
    GPyTorchRegressor,
    SEProcesses,
    gpytorch_likelihood,
    initial_inducing_points,
    sparse_strategy,
)
from .shared.recipe import DEFAULT_RECIPE, Recipe, seeded


class SparseGP(SEProcesses):
    """One GP with learned inducing points and a full covariance of q(u), whitened."""

    def __init__(self, num_inducing: int, feature_dim: int):
        super().__init__(sparse_strategy(self, (), num_inducing, feature_dim))


class NetworkSVGP(GPyTorchRegressor):
    """The inducing points start at the features of training rows drawn at random."""

    def prepare(self, x: Tensor, y: Tensor) -> None:
        super().prepare(x, y)
        if self.history.rows:
            return
        points = self.gp.variational_strategy.inducing_points
        with torch.no_grad():
            points.copy_(initial_inducing_points(self.network(x), len(points)))


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
