"""Exact GP: a Gaussian process with an SE kernel on the inputs."""

from torch import nn

from .shared.exact import ExactRegressor
from .shared.recipe import DEFAULT_RECIPE, Recipe


def build(
    input_dim: int,
    num_outputs: int = 1,
    feature_dim: int = 64,
    recipe: Recipe = DEFAULT_RECIPE,
    noise_scale: float = 0.5,
    learn_noise: bool = True,
    lengthscale: float | None = None,
    learn_kernel: bool = True,
) -> ExactRegressor:
    """An exact GP, trained by marginal likelihood at a cost O(N^3). `feature_dim` is not used.

    With `learn_kernel=False` the mean is zero and the kernel is the unit-variance SE kernel of the
    given lengthscale, for data whose kernel is known.
    """
    identity = nn.Identity()
    regressor = ExactRegressor(input_dim, num_outputs, identity, recipe, noise_scale, learn_noise)
    kernel = regressor.gp.covar_module
    if lengthscale is not None:
        kernel.base_kernel.lengthscale = lengthscale
    if not learn_kernel:
        kernel.outputscale = 1.0
        kernel.requires_grad_(False)
        regressor.gp.mean_module.requires_grad_(False)
    return regressor
