"""DAK-MC with a unit for each feature instead of an embedding, on a coarse, wide grid."""

from typing import Any

from torch import nn

from ..shared.dak import DAKOnImages
from ..shared.recipe import IMAGE_RECIPE, Recipe
from . import dak_mc

OPTIONS = {"embedding": False, "level": 3, "num_std": 8.0}


def build(
    features: nn.Module,
    feature_dim: int,
    num_classes: int,
    recipe: Recipe = IMAGE_RECIPE,
    **options: Any,
) -> DAKOnImages:
    """`dak_mc` with P = D_w units, M = 7 nodes each, eight standard deviations to either bound.

    An embedding into few units maps many different features to the same inputs; here an image with
    unusual features has unusual inputs, and the grid reaches out to them. Other options are those
    of `dak_mc`.
    """
    options = {"num_units": feature_dim} | OPTIONS | options
    return dak_mc.build(features, feature_dim, num_classes, recipe, **options)
