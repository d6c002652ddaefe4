"""DAK-CF: a deep additive kernel that is trained and predicts in closed form."""

from typing import Any

from pyro_dak import ClosedFormELBO

from .shared.dak import DAKOnTables, build_on_tables
from .shared.recipe import DEFAULT_RECIPE, Recipe


def build(
    input_dim: int,
    num_outputs: int = 1,
    feature_dim: int = 64,
    recipe: Recipe = DEFAULT_RECIPE,
    **options: Any,
) -> DAKOnTables:
    """A DAK on the backbone of the paper, with the mean-field guide and the exact bound.

    Args:
        input_dim: D.
        num_outputs: C.
        feature_dim: D_w.
        recipe: the settings of the training.
        options: `num_units` (16), `level` (5), `bounds` (0, 1), `lengthscale` (1),
            `learn_lengthscale` (False, else each unit learns its own from there), `kernel`
            ("laplace", or another of `models.shared.dak.KERNELS`), `noise_scale`
            (0.5), `learn_noise` (True), `heteroscedastic` (False: the same noise everywhere),
            `init_scale` (0.1), `residual_variance` (False), `unit_scale` (None: learned, else
            fixed), `joint_posterior` (False: the guide as trained, else the exact posterior of
            the last layer at the trained features), `relu_output` (False), and those of `DAK`:
            `scaling`, `linear_term`, `prior`, `input_units`.
    """
    return build_on_tables(
        ClosedFormELBO(), input_dim, num_outputs, feature_dim, recipe, num_samples=None, **options
    )
