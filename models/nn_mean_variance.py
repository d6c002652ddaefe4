"""NN with a variance of its own for each row, calibrated on rows that it was not trained on.

A network of a mean and a log variance is the plain opponent of a model whose uncertainty depends on
the input. Trained to the end it is too sure of itself, so that a share of the training rows is kept
aside, and in the end one factor makes its variances as large as its errors on them. The variance is
a softplus with a floor, as in the paper on deep ensembles; an exponential becomes zero where a row
lies far outside.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from pyro_dak import HeteroscedasticLikelihood
from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.model.modes import evaluating
from pyro_dak.prediction import Prediction
from pyro_dak.training.plan import History
from pyro_dak.validation import check_probability

from .shared import backbones
from .shared.baseline import TableBaseline
from .shared.recipe import DEFAULT_RECIPE, Recipe, seeded
from .shared.training import Callback

# Added to the variance, in units of the level of the noise.
_LEAST_VAR = 1e-6


class LogSoftplus(nn.Module):
    """The last half of the columns, v, become log(softplus(v) + floor)."""

    def forward(self, x: Tensor) -> Tensor:
        mean, raw = x.chunk(2, -1)
        return torch.cat([mean, nn.functional.softplus(raw).add(_LEAST_VAR).log()], -1)


class MeanVarianceNetwork(TableBaseline):
    """y ~ N(mean(x), var(x)), trained by the Gaussian negative log-likelihood.

    Args:
        input_dim: D.
        num_outputs: C.
        network: from rows to the C means and the C log variances.
        likelihood: the level of the noise.
        recipe: the settings.
        held_out_share: the share of the training rows that calibrates, between 0 and 1.
    """

    last_layer: HeteroscedasticLikelihood

    def __init__(
        self,
        input_dim: int,
        num_outputs: int,
        network: nn.Module,
        likelihood: HeteroscedasticLikelihood,
        recipe: Recipe,
        held_out_share: float,
    ):
        super().__init__(input_dim, num_outputs, network, likelihood, recipe)
        self.held_out_share = held_out_share

    def loss(self, x: Tensor, y: Tensor, num_data: int) -> Tensor:
        """Mean over rows of -log N(y | mean(x), var(x))."""
        return -self.last_layer.distribution(self.network(x)).log_prob(y).mean()

    def train(
        self, x: Tensor, y: Tensor, callbacks: Sequence[Callback], checkpoint_dir: Path | None
    ) -> History:
        """Train on the rows that are not held out, then calibrate on the others."""
        generator = torch.Generator().manual_seed(self.recipe.seed)
        order = torch.randperm(len(x), generator=generator).to(x.device)
        size = max(1, int(self.held_out_share * len(x)))
        held_out, kept = order[:size], order[size:]
        history = super().train(x[kept], y[kept], callbacks, checkpoint_dir)
        self.calibrate(x[held_out], y[held_out])
        return history

    @torch.no_grad()
    def calibrate(self, x: Tensor, y: Tensor) -> None:
        """Multiply the variances of each output by one factor, the mean of (y - mean)^2 / var.

        It maximises the likelihood of these rows.
        """
        prediction = self.predict(x)
        factor = ((y - prediction.mean).square() / prediction.variance).mean(0)
        self.last_layer.noise.log_scale += 0.5 * factor.log()

    def function_moments(self, x: Tensor) -> FunctionMoments:
        f = self.network(x)
        return FunctionMoments(f, torch.zeros_like(f))

    def predict(self, x: Tensor) -> Prediction:
        """Mean and aleatoric variance of y, `(N, C)`; there is no epistemic variance."""
        with evaluating(*self.modules):
            moments = self.function_moments(x.to(self.recipe.device))
            parts = self.last_layer.predictive_moments(moments)
            mean, epistemic, aleatoric = (part.to(x.device) for part in parts)
        return Prediction(mean, epistemic, aleatoric, moments, self.last_layer)

    @property
    def noise_scale(self) -> Tensor:
        return self.last_layer.noise_scale


def build(
    input_dim: int,
    num_outputs: int = 1,
    feature_dim: int = 64,
    recipe: Recipe = DEFAULT_RECIPE,
    noise_scale: float = 0.5,
    learn_noise: bool = True,
    relu_output: bool = False,
    backbone: str = "mlp",
    held_out_share: float = 0.1,
) -> MeanVarianceNetwork:
    """The backbone to D_w features, with a ReLU on them if `relu_output`, and a linear output.

    `backbone` is a name of `models.shared.backbones`; `held_out_share` of the rows calibrate.
    """
    check_probability("held_out_share", held_out_share)
    likelihood = HeteroscedasticLikelihood(torch.full((num_outputs,), noise_scale), learn_noise)
    with seeded(recipe.seed):
        features = backbones.backbone(
            input_dim, feature_dim, relu_output=relu_output, name=backbone
        )
        network = nn.Sequential(features, nn.Linear(feature_dim, 2 * num_outputs), LogSoftplus())
    return MeanVarianceNetwork(input_dim, num_outputs, network, likelihood, recipe, held_out_share)
