"""An additive Gaussian process on the raw inputs: one unit per input, no network."""

from typing import Any

from torch import nn

from pyro_dak import DAK


def build(
    input_dim: int,
    bounds: tuple[float, float],
    num_outputs: int = 1,
    level: int = 7,
    **options: Any,
) -> DAK:
    """A DAK of the raw inputs, which should lie within `bounds`. The options are those of `DAK`."""
    return DAK(
        nn.Identity(),
        feature_dim=input_dim,
        num_units=input_dim,
        num_outputs=num_outputs,
        level=level,
        bounds=bounds,
        scaling="none",
        embedding=False,
        **options,
    )
