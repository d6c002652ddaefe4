"""NN: the features and a linear output under a softmax, trained by the negative log-likelihood."""

import torch
from torch import Tensor, nn

from pyro_dak.additive.gaussian import FunctionMoments

from ..shared.image_baseline import ImageBaseline
from ..shared.recipe import IMAGE_RECIPE, Recipe, seeded
from ..shared.training import Terms


class NeuralNetwork(ImageBaseline):
    """y ~ softmax of the last layer's output. There is no epistemic uncertainty."""

    def terms(self, h: Tensor, y: Tensor, num_data: int) -> Terms:
        """The cross entropy; there is no prior, so the KL is 0."""
        loss = nn.functional.cross_entropy(self.last_layer(h), y)
        return Terms(loss, -loss, torch.zeros_like(loss))

    def latent_moments(self, h: Tensor) -> FunctionMoments:
        logits = self.last_layer(h)
        return FunctionMoments(logits, torch.zeros_like(logits))

    @property
    def num_draws(self) -> int:
        return 1


def build(
    features: nn.Module, feature_dim: int, num_classes: int, recipe: Recipe = IMAGE_RECIPE
) -> NeuralNetwork:
    """A linear output on the features; it counts as network, so that weight decay acts on it."""
    with seeded(recipe.seed):
        output = nn.Linear(feature_dim, num_classes)
    return NeuralNetwork(features, output, nn.Identity(), num_classes, recipe)
