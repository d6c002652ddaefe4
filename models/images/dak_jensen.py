"""Sampling-free DAK: Jensen's bound of the softmax in training, probit in prediction."""

from typing import Any

from torch import nn

from models.shared.image_dak import DAKClassifier, build_classifier
from models.shared.image_recipe import DEFAULT_RECIPE, ImageRecipe
from pyro_dak import JensenELBO


def build(
    features: nn.Module,
    feature_dim: int,
    num_classes: int,
    recipe: ImageRecipe = DEFAULT_RECIPE,
    **options: Any,
) -> DAKClassifier:
    """DAK of which nothing is sampled; the options are those of `dak_mc`."""
    return build_classifier(
        JensenELBO(), "probit", features, feature_dim, num_classes, recipe, **options
    )
