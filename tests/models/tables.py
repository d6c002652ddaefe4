"""Data and small models for the tests of the models for tables."""

import torch

import models
from models.shared.recipe import Recipe

SMALL = {
    "avdkl": {"num_inducing": 6},
    "dak_cf": {"num_units": 4, "level": 3},
    "dak_mc": {"num_units": 4, "level": 3},
    "dgp": {"num_inducing": 20},
    "exact_dkl": {},
    "exact_gp": {},
    "nn": {},
    "nn_bn": {},
    "nn_svgp": {"num_inducing": 20},
    "svdkl": {"num_units": 4, "grid_size": 16},
}
RECIPE = Recipe(epochs=30, batch_size=32, learning_rate=0.03)
BACKBONE = (3 * 64 + 64) + (64 * 32 + 32) + (32 * 8 + 8)


def data(num_rows=64, input_dim=3, seed=0):
    """A smooth function of the inputs, with noise of standard deviation 0.1."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, input_dim, generator=generator)
    f = x[:, :1].sin() + 0.5 * x[:, -1:]
    return x, f + 0.1 * torch.randn(num_rows, 1, generator=generator)


def build(name, input_dim=3, recipe=RECIPE, **options):
    small = {"feature_dim": 8, "recipe": recipe, **SMALL[name], **options}
    return models.build(name, input_dim, **small)
