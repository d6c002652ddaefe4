"""NN + BatchNorm: standardised features and a linear output that is trained at a rate of its own.

DAK standardises what its units see and trains its last layer at a rate of its own. A network that
has both as well is the fair opponent: what is left of a difference is the last layer's.
"""

from torch import nn

from ..shared.recipe import IMAGE_RECIPE, Recipe, seeded
from .nn import NeuralNetwork


def build(
    features: nn.Module, feature_dim: int, num_classes: int, recipe: Recipe = IMAGE_RECIPE
) -> NeuralNetwork:
    """Batch normalisation of the features, then a linear output, which is the last layer."""
    with seeded(recipe.seed):
        output = nn.Linear(feature_dim, num_classes)
    return NeuralNetwork(features, nn.BatchNorm1d(feature_dim), output, num_classes, recipe)
