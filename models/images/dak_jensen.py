"""Sampling-free DAK: Jensen's bound of the softmax in training, probit in prediction."""

from typing import Any

from torch import nn

from pyro_dak import JensenELBO

from ..shared.dak import DAKOnImages, build_on_images
from ..shared.recipe import IMAGE_RECIPE, Recipe


def build(
    features: nn.Module,
    feature_dim: int,
    num_classes: int,
    recipe: Recipe = IMAGE_RECIPE,
    **options: Any,
) -> DAKOnImages:
    """A DAK of which nothing is sampled; the options are those of `dak_mc`."""
    return build_on_images(
        JensenELBO(), "probit", features, feature_dim, num_classes, recipe, **options
    )
