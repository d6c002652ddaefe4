"""What the baselines share: a network, a last layer, a loss per datum and the moments of f."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from models.shared.recipe import Recipe, count_parameters, seeded, train
from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.model.likelihoods import GaussianLikelihood
from pyro_dak.prediction.predict import Prediction
from pyro_dak.training.plan import History
from pyro_dak.validation import check_finite, check_floating, check_last_dim


def check_rows(x: Tensor, y: Tensor, input_dim: int, num_outputs: int) -> None:
    """Raise unless x is `(N, input_dim)` and y is `(N, num_outputs)`, finite, with rows."""
    for name, value, size in (("x", x, input_dim), ("y", y, num_outputs)):
        check_floating(name, value)
        if value.dim() != 2 or len(value) == 0:
            raise ValueError(f"`{name}` must have shape (N, {size}); got {tuple(value.shape)}.")
        check_last_dim(name, value, size, "as `build` was told", "Build the model for this data.")
        check_finite(name, value)
    if len(x) != len(y):
        raise ValueError(f"`x` and `y` must have one row each per datum; got {len(x)}, {len(y)}.")


def check_unfitted(history: History) -> None:
    """Raise if a model has been trained before."""
    if history.rows:
        raise RuntimeError(
            "`fit` was called before, and a second call would start from weights that have seen "
            "other rows. Build a fresh model."
        )


def only_one_output(num_outputs: int) -> None:
    """Raise unless C = 1."""
    if num_outputs != 1:
        raise NotImplementedError(
            f"This baseline has one output; got `num_outputs`={num_outputs}. Fit one per column."
        )


class Baseline(ABC):
    """A `Regressor` from a network and a last layer; subclasses give loss and moments of f.

    Args:
        input_dim: D.
        num_outputs: C.
        network: where weight decay acts.
        last_layer: everything else that is trained, noise included.
        recipe: the settings.
    """

    chunk_size = 1024

    def __init__(
        self,
        input_dim: int,
        num_outputs: int,
        network: nn.Module,
        last_layer: nn.Module,
        recipe: Recipe,
    ):
        self.input_dim, self.num_outputs = input_dim, num_outputs
        self.network, self.last_layer, self.recipe = network, last_layer, recipe
        self.history = History()

    @abstractmethod
    def loss(self, x: Tensor, y: Tensor, num_data: int) -> Tensor:
        """The loss per datum of a batch."""

    @abstractmethod
    def function_moments(self, x: Tensor) -> FunctionMoments:
        """q(f) at x, mean and variance `(N, C)`."""

    @property
    @abstractmethod
    def noise_scale(self) -> Tensor:
        """Standard deviation of the noise."""

    def prepare(self, x: Tensor, y: Tensor) -> Recipe:
        """Set what must be taken from the training rows; the recipe to train with."""
        return self.recipe

    @property
    def num_parameters(self) -> int:
        """Trained parameters, variational ones included."""
        return count_parameters(self.network, self.last_layer)

    @property
    def epoch_seconds(self) -> list[float]:
        """Seconds of each epoch of training."""
        return self.history.seconds

    def fit(self, x: Tensor, y: Tensor) -> None:
        """Train on these rows, and on nothing else."""
        check_rows(x, y, self.input_dim, self.num_outputs)
        check_unfitted(self.history)
        device = self.recipe.device
        x, y = x.to(device), y.to(device)
        for module in (self.network, self.last_layer):
            module.to(device)
        with seeded(self.recipe.seed, device):
            recipe = self.prepare(x, y)
        self.history = train((self.network, self.last_layer), self.loss, x, y, recipe)

    def predict(self, x: Tensor) -> Prediction:
        """Mean, epistemic and aleatoric variance of y, `(N, C)` each."""
        self.network.eval()
        self.last_layer.eval()
        with torch.no_grad(), seeded(self.recipe.seed, self.recipe.device):
            chunks = x.to(self.recipe.device).split(self.chunk_size)
            parts = [self.function_moments(chunk) for chunk in chunks]
            mean = torch.cat([part.mean for part in parts]).to(x.device)
            var = torch.cat([part.var for part in parts]).to(x.device)
            likelihood = GaussianLikelihood(self.noise_scale.detach().to(x.device), learn=False)
            aleatoric = likelihood.noise_scale.square().expand_as(mean)
        return Prediction(mean, var, aleatoric, FunctionMoments(mean, var), likelihood)
