"""DAK-MC with a unit for each feature instead of an embedding, on a coarse, wide grid."""

from typing import Any

from torch import nn

from models.shared.image_dak import DAKClassifier, build_classifier
from models.shared.image_recipe import DEFAULT_RECIPE, ImageRecipe
from pyro_dak import LocalReparamELBO

OPTIONS = {"embedding": False, "level": 3, "num_std": 8.0}


def build(
    features: nn.Module,
    feature_dim: int,
    num_classes: int,
    recipe: ImageRecipe = DEFAULT_RECIPE,
    **options: Any,
) -> DAKClassifier:
    """`dak_mc` with P = D_w units, M = 7 nodes each, eight standard deviations to either bound.

    An embedding into few units maps many different features to the same inputs; here an image with
    unusual features has unusual inputs, and the grid reaches out to them. Other options are those
    of `dak_mc`.
    """
    objective = LocalReparamELBO(recipe.num_samples_train)
    options = {"num_units": feature_dim} | OPTIONS | options
    return build_classifier(objective, "mc", features, feature_dim, num_classes, recipe, **options)
