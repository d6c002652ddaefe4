"""NN+SVGP: a sparse variational GP of GPyTorch per class on embedded features, under a softmax."""

import gpytorch
import torch
from torch import Tensor, nn

from ..shared.gpytorch import (
    GPyTorchClassifier,
    SEProcesses,
    initial_inducing_points,
    sparse_strategy,
)
from ..shared.recipe import IMAGE_RECIPE, Recipe, seeded


class ClassGPs(SEProcesses):
    """C independent GPs, each with inducing points of its own in P dimensions."""

    def __init__(self, num_classes: int, num_units: int, num_inducing: int):
        strategy = sparse_strategy(self, (num_classes,), num_inducing, num_units)
        super().__init__(
            gpytorch.variational.IndependentMultitaskVariationalStrategy(
                strategy, num_tasks=num_classes
            ),
            (num_classes,),
        )


class NetworkSVGP(GPyTorchClassifier):
    """The inducing points start at embedded training images drawn at random."""

    @torch.no_grad()
    def prepare(self, x: Tensor, y: Tensor) -> None:
        if self.history.rows:
            return
        points = self.gps.variational_strategy.base_variational_strategy.inducing_points
        rows = x[torch.randperm(len(x))[: points.shape[-2]].to(x.device)]
        self.network.eval()
        h = self.embedding(self.features(rows))
        for own in points:
            own.copy_(initial_inducing_points(h, len(own)))


def build(
    features: nn.Module,
    feature_dim: int,
    num_classes: int,
    recipe: Recipe = IMAGE_RECIPE,
    num_units: int = 16,
    num_inducing: int = 512,
) -> NetworkSVGP:
    """An embedding to P = `num_units` features and one GP per class, with `num_inducing` points."""
    with seeded(recipe.seed):
        gps = ClassGPs(num_classes, num_units, num_inducing)
        embedding = nn.Linear(feature_dim, num_units, bias=False)
        likelihood = gpytorch.likelihoods.SoftmaxLikelihood(
            num_classes=num_classes, mixing_weights=False
        )
        gps(torch.zeros(2, num_units))  # the first call draws the start of q(u)
    return NetworkSVGP(features, embedding, gps, likelihood, num_classes, recipe)
