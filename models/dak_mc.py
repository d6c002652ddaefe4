"""DAK-MC: a deep additive kernel that draws f in training and the weights in prediction."""

from typing import Any

from pyro_dak import LocalReparamELBO

from .shared.dak import DAKOnTables, build_on_tables
from .shared.recipe import DEFAULT_RECIPE, Recipe


def build(
    input_dim: int,
    num_outputs: int = 1,
    feature_dim: int = 64,
    recipe: Recipe = DEFAULT_RECIPE,
    closed_form_prediction: bool = False,
    **options: Any,
) -> DAKOnTables:
    """A DAK on the backbone of the paper, with the mean-field guide and a sampled bound.

    Args:
        input_dim: D.
        num_outputs: C.
        feature_dim: D_w.
        recipe: the settings of the training; `num_samples_train` draws of f per row in training,
            `num_samples_test` draws of the weights in prediction.
        closed_form_prediction: whether predictions are made without draws instead.
        options: those of `dak_cf`.
    """
    num_samples = None if closed_form_prediction else recipe.num_samples_test
    objective = LocalReparamELBO(recipe.num_samples_train)
    return build_on_tables(
        objective, input_dim, num_outputs, feature_dim, recipe, num_samples=num_samples, **options
    )
