"""A point: the posterior mode of the weights, without uncertainty in f."""

from typing import Any

from pyro.infer.autoguide import AutoDelta

from pyro_dak import DAK


def build(model: DAK, **options: Any) -> AutoDelta:
    """Options: those of `AutoDelta`."""
    return AutoDelta(model, **options)
