"""NN: the backbone and a linear output, trained by the Gaussian negative log-likelihood."""

import torch
from torch import Tensor, nn

from pyro_dak import GaussianLikelihood
from pyro_dak.additive.gaussian import FunctionMoments

from .shared import backbones
from .shared.baseline import TableBaseline
from .shared.recipe import DEFAULT_RECIPE, Recipe, seeded


class NeuralNetwork(TableBaseline):
    """y ~ N(network(x), noise_scale^2). There is no epistemic variance."""

    @property
    def likelihood(self) -> GaussianLikelihood:
        """p(y | output of the network)."""
        return self.last_layer

    def output(self, x: Tensor) -> Tensor:
        """The mean of y, `(N, C)`."""
        return self.network(x)

    def loss(self, x: Tensor, y: Tensor, num_data: int) -> Tensor:
        """Mean over rows of -log N(y | output(x), noise_scale^2)."""
        return -self.likelihood.distribution(self.output(x)).log_prob(y).mean()

    def function_moments(self, x: Tensor) -> FunctionMoments:
        mean = self.output(x)
        return FunctionMoments(mean, torch.zeros_like(mean))

    @property
    def noise_scale(self) -> Tensor:
        return self.likelihood.noise_scale


def build(
    input_dim: int,
    num_outputs: int = 1,
    feature_dim: int = 64,
    recipe: Recipe = DEFAULT_RECIPE,
    noise_scale: float = 0.5,
    learn_noise: bool = True,
    relu_output: bool = False,
    backbone: str = "mlp",
) -> NeuralNetwork:
    """The backbone to D_w features, with a ReLU on them if `relu_output`, and a linear output.

    `backbone` is a name of `models.shared.backbones`.
    """
    with seeded(recipe.seed):
        features = backbones.backbone(
            input_dim, feature_dim, relu_output=relu_output, name=backbone
        )
        network = nn.Sequential(features, nn.Linear(feature_dim, num_outputs))
    likelihood = GaussianLikelihood(noise_scale, learn_noise)
    return NeuralNetwork(input_dim, num_outputs, network, likelihood, recipe)
