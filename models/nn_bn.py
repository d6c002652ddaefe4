"""NN + BatchNorm: standardised features, and a linear output that can have a rate of its own.

DAK standardises what its units see, and its last layer is a group of parameters whose rate a recipe
can set (`last_layer_learning_rate`). A network that has both as well is the fair opponent: what is
left of a difference is the last layer's.
"""

from typing import Any

from torch import Tensor, nn

from pyro_dak import GaussianLikelihood

from . import nn as nn_board
from .shared.recipe import DEFAULT_RECIPE, Recipe


class NormalizedNetwork(nn_board.NeuralNetwork):
    """y ~ N(output of normalised features, noise_scale^2). There is no epistemic variance."""

    last_layer: nn.ModuleDict

    @property
    def likelihood(self) -> GaussianLikelihood:
        return self.last_layer["likelihood"]

    def output(self, x: Tensor) -> Tensor:
        return self.last_layer["output"](self.network(x))


def build(
    input_dim: int,
    num_outputs: int = 1,
    feature_dim: int = 64,
    recipe: Recipe = DEFAULT_RECIPE,
    **options: Any,
) -> NormalizedNetwork:
    """The network of `models.nn`, with its features normalised and its output as last layer.

    The options are those of `models.nn.build`.
    """
    plain = nn_board.build(input_dim, num_outputs, feature_dim, recipe, **options)
    features, output = plain.network
    network = nn.Sequential(features, nn.BatchNorm1d(feature_dim))
    last_layer = nn.ModuleDict({"output": output, "likelihood": plain.likelihood})
    return NormalizedNetwork(input_dim, num_outputs, network, last_layer, recipe)
