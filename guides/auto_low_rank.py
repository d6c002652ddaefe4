"""Pyro's low-rank autoguide. It is made at its first call, by a run of the model."""

from typing import Any

from pyro.infer.autoguide import AutoLowRankMultivariateNormal

from pyro_dak import DAK


def build(
    model: DAK, rank: int = 8, init_scale: float = 0.1, **options: Any
) -> AutoLowRankMultivariateNormal:
    """Options: those of `AutoLowRankMultivariateNormal`."""
    return AutoLowRankMultivariateNormal(model, rank=rank, init_scale=init_scale, **options)
