"""A Gaussian kept as means and precisions, which learns by natural gradients instead of Adam.

`fit` and `NaturalVI` move it; an optimiser finds no parameters in it.
"""

from typing import Any

from pyro_dak import DAK, NaturalGuide


def build(model: DAK, **options: Any) -> NaturalGuide:
    """Options: `covariance`, "joint", "shared" or "diagonal"."""
    return NaturalGuide(model, **options)
