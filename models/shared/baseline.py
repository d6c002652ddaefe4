"""The one interface of the boards, for tables and for images: `fit(x, y)`, then `predict(x)`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.model.likelihoods import GaussianLikelihood
from pyro_dak.model.modes import evaluating
from pyro_dak.prediction import ClassPrediction, Prediction
from pyro_dak.training.data import ResidentData
from pyro_dak.training.loop import frozen
from pyro_dak.training.plan import History
from pyro_dak.validation import check_finite, check_floating, check_last_dim

from .recipe import Recipe, count_parameters, seeded
from .training import Callback, Terms, TrainingLoss, train

__all__ = ["Baseline", "NetworkBaseline", "TableBaseline", "check_rows", "only_one_output"]


class Baseline(ABC):
    """A model of a board with everything that its training needs.

    For tables x is `(N, D)` and y is `(N, C)`; for images x is `(N, channels, height, width)` with
    values in [0, 1] and y is `(N,)` with labels. The caller prepares both.

    Args:
        recipe: the settings of the training.
    """

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.history = History()

    @property
    @abstractmethod
    def features(self) -> nn.Module:
        """The feature extractor."""

    @property
    @abstractmethod
    def modules(self) -> tuple[nn.Module, ...]:
        """Everything that is trained."""

    @abstractmethod
    def check(self, x: Tensor, y: Tensor) -> None:
        """Raise unless x and y are what the model was built for."""

    @abstractmethod
    def training_loss(self) -> nn.Module:
        """A module from (x, y, scale, num_data) to the loss of a batch and its terms."""

    @abstractmethod
    def train(
        self, x: Tensor, y: Tensor, callbacks: Sequence[Callback], checkpoint_dir: Path | None
    ) -> History:
        """Train on checked rows, which are on the device of the recipe."""

    @abstractmethod
    def predict(self, x: Tensor) -> Prediction | ClassPrediction:
        """The predictive distribution of each row of x, whatever rows are beside it."""

    def prepare(self, x: Tensor, y: Tensor) -> None:
        """Set what must be taken from the training rows; by default nothing.

        Parameters that start at training rows are set in the first call of `fit` alone, when
        `history` has no rows.
        """
        return None

    def fit(
        self,
        x: Tensor,
        y: Tensor,
        callbacks: Sequence[Callback] = (),
        checkpoint_dir: Path | None = None,
        keep_weights: bool = False,
    ) -> None:
        """Train on these rows, and on nothing else. It can be called once.

        Args:
            x: inputs.
            y: targets, or labels.
            callbacks: called after each epoch with its number and its row of the history.
            checkpoint_dir: where checkpoints go; training goes on from the newest one in it.
            keep_weights: whether a second call is meant. It trains on from the weights of the
                first, with a fresh optimiser, so the model has seen the rows of both.
        """
        self.check(x, y)
        if self.history.rows and not keep_weights:
            raise RuntimeError(
                "`fit` was called before, and a second call would start from weights that have "
                "seen other rows. Build a fresh model, or pass `keep_weights=True` if you mean it."
            )
        device = self.recipe.device
        self.history = self.train(x.to(device), y.to(device), callbacks, checkpoint_dir)

    @property
    def num_parameters(self) -> int:
        """The number of trained parameters, variational ones included."""
        return count_parameters(*self.modules)

    @property
    def num_added(self) -> int:
        """The number of trained parameters that are not those of the feature extractor."""
        return self.num_parameters - count_parameters(self.features)

    @property
    def epoch_seconds(self) -> list[float]:
        """Seconds of each epoch of training."""
        return self.history.seconds


def check_rows(x: Tensor, y: Tensor, input_dim: int, num_outputs: int, recipe: Recipe) -> None:
    """Raise unless x is `(N, input_dim)` and y is `(N, num_outputs)`, finite, with rows."""
    if recipe.augment or recipe.fixed_features or recipe.precision is not None:
        raise ValueError(
            "`augment`, `fixed_features` and `precision` are settings for images, and this model "
            "is for tables. Leave them out of its recipe."
        )
    for name, value, size in (("x", x, input_dim), ("y", y, num_outputs)):
        check_floating(name, value)
        if value.dim() != 2 or len(value) == 0:
            raise ValueError(f"`{name}` must have shape (N, {size}); got {tuple(value.shape)}.")
        check_last_dim(name, value, size, "as `build` was told", "Build the model for this data.")
        check_finite(name, value)
    if len(x) != len(y):
        raise ValueError(f"`x` and `y` must have one row each per datum; got {len(x)}, {len(y)}.")


def only_one_output(num_outputs: int) -> None:
    """Raise unless there is one output."""
    if num_outputs != 1:
        raise NotImplementedError(
            f"This baseline has one output; got `num_outputs`={num_outputs}. Fit one per column."
        )


class NetworkBaseline(Baseline):
    """A model that is no DAK: a network, a last layer and a loss, trained in the loop of `fit`.

    Args:
        network: where weight decay acts.
        last_layer: everything else that is trained.
        recipe: the settings.
    """

    def __init__(self, network: nn.Module, last_layer: nn.Module, recipe: Recipe):
        super().__init__(recipe)
        self.network, self.last_layer = network, last_layer

    @abstractmethod
    def training_loss(self) -> TrainingLoss:
        """The loss in the form that the training loop asks for."""

    @abstractmethod
    def batches(self, x: Tensor, y: Tensor) -> ResidentData:
        """The batches that it is trained on."""

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return self.network, self.last_layer

    def train(
        self, x: Tensor, y: Tensor, callbacks: Sequence[Callback], checkpoint_dir: Path | None
    ) -> History:
        recipe = self.recipe
        loss = self.training_loss().to(recipe.device)
        with frozen(self.features, recipe.fixed_features):
            with seeded(recipe.seed, recipe.device):
                self.prepare(x, y)
            return train(loss, self.batches(x, y), recipe, callbacks, checkpoint_dir)


class TableBaseline(NetworkBaseline):
    """A regressor. Subclasses give the loss and the moments of f; the noise is in the last layer.

    Args:
        input_dim: D.
        num_outputs: C.
        network: where weight decay acts.
        last_layer: everything else that is trained, noise included.
        recipe: the settings.
    """

    chunk_size = 1024

    def __init__(self, input_dim: int, num_outputs: int, *parts: Any):
        super().__init__(*parts)
        self.input_dim, self.num_outputs = input_dim, num_outputs

    @abstractmethod
    def loss(self, x: Tensor, y: Tensor, num_data: int) -> Tensor:
        """The loss of one batch, per row."""

    @abstractmethod
    def function_moments(self, x: Tensor) -> FunctionMoments:
        """q(f) at x, mean and variance `(N, C)`."""

    @property
    @abstractmethod
    def noise_scale(self) -> Tensor:
        """The standard deviation of the noise."""

    @property
    def features(self) -> nn.Module:
        return self.network

    def check(self, x: Tensor, y: Tensor) -> None:
        check_rows(x, y, self.input_dim, self.num_outputs, self.recipe)

    def training_loss(self) -> TrainingLoss:
        def terms(x: Tensor, y: Tensor, num_data: int) -> Terms:
            loss = self.loss(x, y, num_data)
            unknown = torch.full_like(loss, torch.nan)
            return Terms(loss, unknown, unknown)

        return TrainingLoss(self.network, self.last_layer, terms, type(self).__name__)

    def batches(self, x: Tensor, y: Tensor) -> ResidentData:
        return ResidentData(x, y, self.recipe.batch_size)

    def predict(self, x: Tensor) -> Prediction:
        """Mean, epistemic and aleatoric variance of y, `(N, C)` each."""
        with evaluating(*self.modules), seeded(self.recipe.seed, self.recipe.device):
            chunks = x.to(self.recipe.device).split(self.chunk_size)
            parts = [self.function_moments(chunk) for chunk in chunks]
            mean = torch.cat([part.mean for part in parts]).to(x.device)
            var = torch.cat([part.var for part in parts]).to(x.device)
            likelihood = GaussianLikelihood(self.noise_scale.detach().to(x.device), learn=False)
            aleatoric = likelihood.noise_scale.square().expand_as(mean)
        return Prediction(mean, var, aleatoric, FunctionMoments(mean, var), likelihood)
