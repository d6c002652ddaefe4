"""DAK-MC: additive processes on embedded features, a bound with draws of f, softmax."""

from typing import Any

from torch import nn

from models.shared.image_dak import DAKClassifier, build_classifier
from models.shared.image_recipe import DEFAULT_RECIPE, ImageRecipe
from pyro_dak import LocalReparamELBO


def build(
    features: nn.Module,
    feature_dim: int,
    num_classes: int,
    recipe: ImageRecipe = DEFAULT_RECIPE,
    **options: Any,
) -> DAKClassifier:
    """The paper's DAK for images: M = 63 inducing points on [-1, 1] in each unit.

    Args:
        features: network from images to features `(N, D_w)`.
        feature_dim: D_w.
        num_classes: C.
        recipe: the settings; `num_samples_train` draws of f per image in training,
            `num_samples_test` in prediction.
        options: `num_units` P, `level` L (M = 2^L - 1), `bounds`, `lengthscale` of the Laplace
            kernel, `init_scale` of the weights, `linear_start` (the units start as straight lines
            with slopes of this size), `residual_variance`, `scaling`, `num_std` (standard
            deviations of a unit's input from the middle of the grid to a bound, else 3),
            `unit_scale` (sigma at the start, else 1 / sqrt(P)), `embedding` (False: the units
            are the features, P = D_w).
    """
    objective = LocalReparamELBO(recipe.num_samples_train)
    return build_classifier(objective, "mc", features, feature_dim, num_classes, recipe, **options)
