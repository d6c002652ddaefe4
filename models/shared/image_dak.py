"""DAK behind the interface of image classifiers."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from pyro.infer import ELBO
from torch import Tensor, nn

import pyro_dak
from models.shared.augmentation import AugmentedBatches
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
from pyro_dak import DAK, CategoricalLikelihood, LaplaceKernel, MeanFieldGuide
from pyro_dak.additive.scaling import Standardize
from pyro_dak.prediction.predict import ClassPrediction
from pyro_dak.training.plan import History
from pyro_dak.validation import check_positive


class DAKClassifier:
    """A `Classifier` from a DAK with its mean-field guide.

    Args:
        model: the model.
        guide: its guide.
        objective: the bound to maximise.
        method: of prediction, "mc" or "probit".
        recipe: the settings.
        residual_variance: whether predictions add the prior variance that the grid loses.
    """

    chunk_size = 500

    def __init__(
        self,
        model: DAK,
        guide: MeanFieldGuide,
        objective: ELBO,
        method: Literal["mc", "probit"],
        recipe: ImageRecipe,
        residual_variance: bool,
    ):
        self.model, self.guide, self.objective, self.recipe = model, guide, objective, recipe
        self.method: Literal["mc", "probit"] = method
        self.residual_variance = residual_variance
        self.features: nn.Module = model.feature_extractor
        self.history = History()

    @property
    def num_parameters(self) -> int:
        """Trained parameters, variational ones included."""
        return count_parameters(self.model, self.guide)

    @property
    def num_added(self) -> int:
        """Those that are not of the feature extractor."""
        return self.num_parameters - count_parameters(self.features)

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
        check_images(x, y, self.model.num_outputs)
        check_unfitted(self.history)
        recipe = self.recipe
        is_augmented = recipe.augment and not recipe.fixed_features
        x, y = x.to(recipe.device), y.to(recipe.device)
        self.history = pyro_dak.fit(
            self.model,
            self.guide,
            AugmentedBatches(x, y, recipe.batch_size) if is_augmented else (x, y),
            objective=self.objective,
            callbacks=callbacks,
            progress=recipe.progress,
            **training_options(recipe),
            **resume_options(checkpoint_dir),
            **fabric_options(recipe),
        )

    def predict(self, x: Tensor) -> ClassPrediction:
        """Class probabilities, averaged after the softmax, `(N, C)`."""
        prediction = pyro_dak.predict(
            self.model,
            self.guide,
            x,
            method=self.method,
            num_samples=self.recipe.num_samples_test,
            residual_variance=self.residual_variance,
            seed=self.recipe.seed,
            chunk_size=self.chunk_size,
            progress=self.recipe.progress,
        )
        assert isinstance(prediction, ClassPrediction)
        return prediction


@torch.no_grad()
def start_linear(model: DAK, guide: MeanFieldGuide, slope: float) -> None:
    """Set the means of z so that the units start as straight lines, slopes N(0, slope^2 / P).

    With g(U) = L_U z and phi(U) = L_U: z = L_U^{-1} (slope U). Random z make a rough function,
    whose slopes say nothing to the network; so the layer starts as a linear one.
    """
    activation = model.layer.activation
    U = activation.grid.inducing_points.to(guide.z_loc)
    L_U = activation(U.unsqueeze(-1)).squeeze(-2)  # (M, M)
    line = torch.linalg.solve_triangular(L_U, U.unsqueeze(-1), upper=False).squeeze(-1)  # (M,)
    slopes = slope * torch.randn(guide.z_loc.shape[:2]) / model.num_units**0.5  # (C, P)
    guide.z_loc.copy_(slopes.unsqueeze(-1) * line)
    guide.mu_loc.zero_()


def set_num_std(model: DAK, num_std: float) -> None:
    """Let the grid reach so many standard deviations of the unit inputs to either side."""
    check_positive("num_std", num_std)
    if not isinstance(model.scaling, Standardize):
        raise ValueError('`num_std` is for scaling="standardize"; leave it out with another.')
    model.scaling.num_std = num_std


def build_classifier(
    objective: ELBO,
    method: Literal["mc", "probit"],
    features: nn.Module,
    feature_dim: int,
    num_classes: int,
    recipe: ImageRecipe,
    num_units: int = 16,
    level: int = 6,
    bounds: tuple[float, float] = (-1.0, 1.0),
    lengthscale: float = 1.0,
    init_scale: float = 0.1,
    linear_start: float | None = None,
    residual_variance: bool = False,
    scaling: str = "standardize",
    num_std: float | None = None,
    unit_scale: float | None = None,
    embedding: bool = True,
) -> DAKClassifier:
    """DAK on features; the options are described in `dak_mc.build`."""
    with seeded(recipe.seed):
        model = DAK(
            features,
            feature_dim,
            num_units,
            num_classes,
            level,
            bounds,
            LaplaceKernel(lengthscale),
            CategoricalLikelihood(),
            scaling,
            embedding,
        )
        guide = MeanFieldGuide(model, init_scale)
        if linear_start is not None:
            start_linear(model, guide, linear_start)
    if num_std is not None:
        set_num_std(model, num_std)
    if unit_scale is not None:
        check_positive("unit_scale", unit_scale)
        nn.init.constant_(model.layer.log_unit_scale, math.log(unit_scale))
    return DAKClassifier(model, guide, objective, method, recipe, residual_variance)
