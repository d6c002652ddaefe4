"""DAK-MC: additive processes on embedded features, a bound with draws of f, softmax."""

from typing import Any

from torch import nn

from pyro_dak import LocalReparamELBO

from ..shared.dak import DAKOnImages, build_on_images
from ..shared.recipe import IMAGE_RECIPE, Recipe


def build(
    features: nn.Module,
    feature_dim: int,
    num_classes: int,
    recipe: Recipe = IMAGE_RECIPE,
    **options: Any,
) -> DAKOnImages:
    """The paper's DAK for images: M = 63 inducing points on [-1, 1] in each unit.

    The recipe says how many draws of f an image gets, `num_samples_train` in training and
    `num_samples_test` in prediction.

    Args:
        features: network from images to features.
        feature_dim: D_w.
        num_classes: C.
        recipe: the settings.
        options: `num_units` P, `level` L (M = 2^L - 1), `bounds`, `lengthscale` of the Laplace
            kernel, `kernel` (another of `models.shared.dak.KERNELS`), `init_scale` of the
            weights, `linear_start` (the units start as straight lines
            with slopes of this size), `residual_variance`, `scaling`, `num_std` (standard
            deviations of a unit's input from the middle of the grid to a bound, else 3),
            `unit_scale` (sigma at the start, else 1 / sqrt(P)), `embedding` (False: the units
            are the features, P = D_w).
    """
    objective = LocalReparamELBO(recipe.num_samples_train)
    return build_on_images(objective, "mc", features, feature_dim, num_classes, recipe, **options)
