"""Image classifiers from features, an embedding and a last layer, behind the one interface."""

from abc import abstractmethod

import torch
from torch import Tensor, nn

from pyro_dak.additive.gaussian import FunctionMoments, sample_marginals
from pyro_dak.model.likelihoods import CategoricalLikelihood
from pyro_dak.model.modes import evaluating
from pyro_dak.prediction import ClassPrediction
from pyro_dak.training.data import ResidentData
from pyro_dak.validation import check_finite, check_floating

from .augmentation import AugmentedData
from .baseline import NetworkBaseline
from .recipe import Recipe
from .training import Terms, TrainingLoss

__all__ = ["ImageBaseline", "check_images"]


def check_images(x: Tensor, y: Tensor, num_classes: int) -> None:
    """Raise unless x is `(N, channels, height, width)`, finite, and y `(N,)` labels below C."""
    check_floating("x", x)
    if x.dim() != 4 or len(x) == 0:
        raise ValueError(f"`x` must have shape (N, channels, height, width); got {tuple(x.shape)}.")
    check_finite("x", x)
    if y.is_floating_point() or y.shape != x.shape[:1]:
        raise ValueError(
            f"`y` must hold {len(x)} integer labels, one per image; got {tuple(y.shape)} {y.dtype}."
        )
    if int(y.min()) < 0 or int(y.max()) >= num_classes:
        raise ValueError(
            f"`y` must hold labels from 0 to {num_classes - 1}; got {int(y.min())} to "
            f"{int(y.max())}. Build the model for this number of classes."
        )


class ImageBaseline(NetworkBaseline):
    """A classifier from a feature extractor and a last layer. Subclasses give the layer.

    Args:
        features: network from images to features `(N, D_w)`.
        embedding: what follows and counts as network for weight decay; it may be empty.
        last_layer: everything else that is trained.
        num_classes: C.
        recipe: the settings.
    """

    chunk_size = 500

    def __init__(
        self,
        features: nn.Module,
        embedding: nn.Module,
        last_layer: nn.Module,
        num_classes: int,
        recipe: Recipe,
    ):
        super().__init__(nn.ModuleList([features, embedding]), last_layer, recipe)
        self.num_classes = num_classes

    @abstractmethod
    def terms(self, h: Tensor, y: Tensor, num_data: int) -> Terms:
        """The loss of one batch, per row, from its embedded features."""

    @abstractmethod
    def latent_moments(self, h: Tensor) -> FunctionMoments:
        """q of the functions of each image, one per class unless they are mixed, `(N, T)` each."""

    @property
    def mixing_weights(self) -> Tensor | None:
        """A of f = A g, `(C, T)`, where the softmax is not of the functions g themselves."""
        return None

    @property
    def num_draws(self) -> int:
        """The number of draws of f in prediction."""
        return self.recipe.num_samples_test

    @property
    def features(self) -> nn.Module:
        return self.network[0]

    @property
    def embedding(self) -> nn.Module:
        """What stands between the features and the last layer."""
        return self.network[1]

    def check(self, x: Tensor, y: Tensor) -> None:
        check_images(x, y, self.num_classes)

    def training_loss(self) -> TrainingLoss:
        is_fixed = self.recipe.fixed_features

        def terms(x: Tensor, y: Tensor, num_data: int) -> Terms:
            h = self.embedding(x if is_fixed else self.features(x))
            with torch.autocast(h.device.type, enabled=False):  # mixed precision is for the network
                return self.terms(_at_least_single(h), y, num_data)

        fixed = self.features if is_fixed else None
        return TrainingLoss(self.network, self.last_layer, terms, type(self).__name__, fixed)

    def batches(self, x: Tensor, y: Tensor) -> ResidentData:
        recipe = self.recipe
        if recipe.fixed_features:
            with evaluating(self.features):
                x = torch.cat([self.features(chunk) for chunk in x.split(self.chunk_size)])
        elif recipe.augment:
            return AugmentedData(x, y, recipe.batch_size)
        return ResidentData(x, y, recipe.batch_size)

    def predict(self, x: Tensor) -> ClassPrediction:
        """Class probabilities, averaged after the softmax, `(N, C)`."""
        with evaluating(*self.modules):
            parts = [
                tuple(part.to(x.device) for part in self._class_probabilities(chunk))
                for chunk in x.split(self.chunk_size)
            ]
        log_probs, entropy, mean, var = (torch.cat(part) for part in zip(*parts, strict=True))
        return ClassPrediction(log_probs, entropy, FunctionMoments(mean, var))

    def _class_probabilities(self, x: Tensor) -> tuple[Tensor, ...]:
        """log E softmax(f), E H[softmax(f)], and mean and variance of f.

        The draws are the same standard normals for each image, whatever images are beside it.
        """
        h = self.embedding(self.features(x.to(self.recipe.device)))
        q = self.latent_moments(_at_least_single(h))
        generator = torch.Generator(h.device).manual_seed(self.recipe.seed)
        draws = sample_marginals(q, self.num_draws, generator)  # (S, N, T)
        mean, var, A = q.mean, q.var, self.mixing_weights
        if A is not None:
            draws, mean, var = draws @ A.mT, mean @ A.mT, var @ A.mT.square()
        moments = FunctionMoments(mean, var)
        return (*CategoricalLikelihood().class_probabilities(moments, draws), mean, var)


def _at_least_single(h: Tensor) -> Tensor:
    """Half precision, which a network may give, as float32; everything else as it is."""
    return h.float() if h.element_size() < 4 else h
