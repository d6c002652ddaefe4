"""NN + BatchNorm: standardised features and a linear output that is trained at a rate of its own.

DAK standardises what its units see and trains its last layer at a rate of its own. A network that
has both as well is the fair opponent: what is left of a difference is the last layer's.
"""

from torch import Tensor, nn

from models.nn import NeuralNetwork
from models.shared import backbones
from models.shared.recipe import DEFAULT_RECIPE, Recipe, seeded
from pyro_dak import GaussianLikelihood


class NormalizedNetwork(NeuralNetwork):
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
    noise_scale: float = 0.5,
    learn_noise: bool = True,
    relu_output: bool = False,
    backbone: str = "mlp",
) -> NormalizedNetwork:
    """The backbone, batch normalisation of its features, and a linear output as last layer.

    `backbone` is a name of `models.shared.backbones`.
    """
    with seeded(recipe.seed):
        features = backbones.backbone(
            input_dim, feature_dim, relu_output=relu_output, name=backbone
        )
        output = nn.Linear(feature_dim, num_outputs)
    network = nn.Sequential(features, nn.BatchNorm1d(feature_dim))
    likelihood = GaussianLikelihood(noise_scale, learn_noise)
    last_layer = nn.ModuleDict({"output": output, "likelihood": likelihood})
    return NormalizedNetwork(input_dim, num_outputs, network, last_layer, recipe)
