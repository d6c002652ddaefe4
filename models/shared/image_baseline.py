"""What the baselines for images share: features, a last layer, and the training loop of `fit`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from models.shared.augmentation import AugmentedData
from models.shared.baseline import check_unfitted
from models.shared.image_recipe import (
    Callback,
    ImageRecipe,
    check_images,
    fabric_options,
    resume_options,
    training_options,
)
from models.shared.recipe import count_parameters, seeded
from pyro_dak.additive.gaussian import FunctionMoments, sample_marginals
from pyro_dak.model.likelihoods import CategoricalLikelihood
from pyro_dak.prediction.predict import ClassPrediction
from pyro_dak.training.data import ResidentData
from pyro_dak.training.loop import Run
from pyro_dak.training.loss import frozen
from pyro_dak.training.optimizers import build_optimizer, schedule_fn
from pyro_dak.training.plan import Checkpoints, History, Settings


class Terms(NamedTuple):
    """The loss per datum of a batch, and its parts; the KL of a network without prior is 0."""

    loss: Tensor
    expected_log_lik: Tensor
    kl: Tensor


class ImageBaseline(ABC):
    """A `Classifier` from a feature extractor and a last layer; subclasses give the layer.

    Args:
        features: network from images to features `(N, D_w)`.
        embedding: what follows and counts as network for weight decay; may be empty.
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
        recipe: ImageRecipe,
    ):
        self.features, self.embedding, self.last_layer = features, embedding, last_layer
        self.num_classes, self.recipe = num_classes, recipe
        self.history = History()

    @abstractmethod
    def terms(self, h: Tensor, y: Tensor, num_data: int) -> Terms:
        """The loss of a batch from its embedded features."""

    @abstractmethod
    def latent_moments(self, h: Tensor) -> FunctionMoments:
        """q of the functions of each image, one per class unless they are mixed, `(N, T)` each."""

    @property
    def mixing_weights(self) -> Tensor | None:
        """A of f = A g, `(C, T)`, where the softmax is not of the functions g themselves."""
        return None

    @property
    def num_draws(self) -> int:
        """Draws of f in prediction."""
        return self.recipe.num_samples_test

    def prepare(self, x: Tensor) -> None:
        """Set what must be taken from the training images; nothing here."""
        return None

    @property
    def num_parameters(self) -> int:
        """Trained parameters, variational ones included."""
        return count_parameters(self.features, self.embedding, self.last_layer)

    @property
    def num_added(self) -> int:
        """Those that are not of the feature extractor."""
        return count_parameters(self.embedding, self.last_layer)

    @property
    def epoch_seconds(self) -> list[float]:
        """Seconds of each epoch of training."""
        return self.history.seconds

    def fit(
        self,
        x: Tensor,
        y: Tensor,
        callbacks: Sequence[Callback] = (),
        checkpoint_dir: Path | None = None,
    ) -> None:
        """Train on these rows, and on nothing else."""
        check_images(x, y, self.num_classes)
        check_unfitted(self.history)
        recipe = self.recipe
        x, y = x.to(recipe.device), y.to(recipe.device)
        for module in (self.features, self.embedding, self.last_layer):
            module.to(recipe.device)
        with seeded(recipe.seed, recipe.device), frozen(self.features, recipe.fixed_features):
            self.prepare(x)
            torch.manual_seed(recipe.seed)
            run = self._run(self._data(x, y), checkpoint_dir)
            self.history = run.run(callbacks, recipe.progress)
        self._set_eval()

    def predict(self, x: Tensor) -> ClassPrediction:
        """Class probabilities, averaged after the softmax, `(N, C)`."""
        modes = [self.features.training, self.embedding.training, self.last_layer.training]
        self._set_eval()
        with torch.no_grad():
            parts = [
                tuple(part.to(x.device) for part in self._class_probabilities(chunk))
                for chunk in x.split(self.chunk_size)
            ]
        for module, mode in zip(self._modules(), modes, strict=True):
            module.train(mode)
        log_probs, entropy, mean, var = (torch.cat(part) for part in zip(*parts, strict=True))
        return ClassPrediction(log_probs, entropy, FunctionMoments(mean, var))

    def _class_probabilities(self, x: Tensor) -> tuple[Tensor, ...]:
        """log E softmax(f), E H[softmax(f)], and mean and variance of f.

        The draws are the same standard normals for each image, whatever images are beside it.
        """
        h = self.embedding(self.features(x.to(self.recipe.device)))
        q = self.latent_moments(_full(h))
        generator = torch.Generator(h.device).manual_seed(self.recipe.seed)
        draws = sample_marginals(q, self.num_draws, generator)  # (S, N, T)
        mean, var, A = q.mean, q.var, self.mixing_weights
        if A is not None:
            draws, mean, var = draws @ A.mT, mean @ A.mT, var @ A.mT.square()
        moments = FunctionMoments(mean, var)
        return (*CategoricalLikelihood().class_probabilities(moments, draws), mean, var)

    def _modules(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        return self.features, self.embedding, self.last_layer

    def _set_eval(self) -> None:
        for module in self._modules():
            module.eval()

    def _data(self, x: Tensor, y: Tensor) -> ResidentData:
        recipe = self.recipe
        if recipe.fixed_features:
            self.features.eval()
            with torch.no_grad():
                x = torch.cat([self.features(chunk) for chunk in x.split(self.chunk_size)])
        elif recipe.augment:
            return AugmentedData(x, y, recipe.batch_size)
        return ResidentData(x, y, recipe.batch_size)

    def _run(self, data: ResidentData, checkpoint_dir: Path | None) -> "_BaselineRun":
        from lightning_fabric import Fabric

        recipe, options = self.recipe, resume_options(checkpoint_dir)
        fabric: Any = Fabric(**fabric_options(recipe))
        fabric.launch()
        settings = Settings(
            **training_options(recipe),
            patience=None,
            objective=type(self).__name__,
            has_validation=False,
            world_size=1,
        )
        run = _BaselineRun(
            fabric,
            BaselineLoss(self),
            self._optimizer(),
            data,
            None,
            schedule_fn(recipe.schedule),
            data.batches_per_epoch,
            settings,
            None if checkpoint_dir is None else Checkpoints(checkpoint_dir),
        )
        if "resume_from" in options:
            run.resume(options["resume_from"])
        return run

    def _optimizer(self) -> torch.optim.Optimizer:
        recipe = self.recipe
        network = [*self.features.parameters(), *self.embedding.parameters()]
        return build_optimizer(
            recipe.optimizer,
            [p for p in network if p.requires_grad],
            [p for p in self.last_layer.parameters() if p.requires_grad],
            recipe.learning_rate,
            recipe.last_layer_learning_rate or recipe.learning_rate,
            recipe.weight_decay,
            recipe.decay_last_layer,
            fused="16" not in str(recipe.precision),
            last_layer_name=recipe.last_layer_optimizer,
        )


def _full(h: Tensor) -> Tensor:
    """Half precision, which a network may give, as float32; all else as it is."""
    return h.float() if h.element_size() < 4 else h


class BaselineLoss(nn.Module):
    """What `Run` asks of a loss: modules to keep, and what `Loss` returns."""

    def __init__(self, baseline: ImageBaseline):
        super().__init__()
        self.model = nn.ModuleList([baseline.features, baseline.embedding])
        self.guide = baseline.last_layer
        self.terms_fn, self.is_fixed = baseline.terms, baseline.recipe.fixed_features

    def train(self, mode: bool = True) -> "BaselineLoss":
        super().train(mode)
        if self.is_fixed:
            self.model[0].eval()
        return self

    def forward(self, x: Tensor, y: Tensor, scale: float, num_data: int) -> tuple[Tensor, Tensor]:
        """The loss of a batch, and its terms; mixed precision is for the network."""
        h = self.model[1](x if self.is_fixed else self.model[0](x))
        with torch.autocast(h.device.type, enabled=False):
            terms = self.terms_fn(_full(h), y, num_data)
            return terms[0], torch.stack([term.detach() for term in terms])


class _BaselineRun(Run):
    """The training run of `fit` for a model that is no DAK."""

    def _description(self) -> dict[str, Any]:
        return {"model": None}
