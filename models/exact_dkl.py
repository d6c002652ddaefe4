"""Exact DKL: an exact Gaussian process on the features of the backbone, trained with it."""

from typing import Any

from .shared.backbones import backbone
from .shared.exact import ExactRegressor
from .shared.recipe import DEFAULT_RECIPE, Recipe, seeded


def build(
    input_dim: int,
    num_outputs: int = 1,
    feature_dim: int = 64,
    recipe: Recipe = DEFAULT_RECIPE,
    relu_output: bool = False,
    **options: Any,
) -> ExactRegressor:
    """An exact GP whose network and kernel are trained by marginal likelihood, at a cost O(N^3).

    The options are `noise_scale` (0.5) and `learn_noise` (True).
    """
    with seeded(recipe.seed):
        network = backbone(input_dim, feature_dim, relu_output=relu_output)
    return ExactRegressor(input_dim, num_outputs, network, recipe, **options)
