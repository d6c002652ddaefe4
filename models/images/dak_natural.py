"""DAK with a joint posterior by natural gradients, on a coarse grid.

The posterior (`NaturalGuide`) starts at the prior and has no initial scale and no learning rate. By
default each feature has a unit of M = 3 nodes, and the classes share one precision.
"""

from typing import Any

from torch import nn

from pyro_dak import LocalReparamELBO

from ..shared.dak import DAKOnImages, build_natural_on_images
from ..shared.recipe import IMAGE_RECIPE, Recipe


def build(
    features: nn.Module,
    feature_dim: int,
    num_classes: int,
    recipe: Recipe = IMAGE_RECIPE,
    **options: Any,
) -> DAKOnImages:
    """A unit for each feature, and a precision that all classes share.

    Args:
        features: network from images to features.
        feature_dim: D_w.
        num_classes: C.
        recipe: the settings.
        options: `num_units` P for an embedding (else a unit per feature), `level` L, `covariance`
            of the guide, `linear_term`, `prior_scale` of f at the start, `residual_variance`.
    """
    objective = LocalReparamELBO(recipe.num_samples_train)
    return build_natural_on_images(objective, features, feature_dim, num_classes, recipe, **options)
