"""Pyro's mean-field autoguide. It is made at its first call, by a run of the model."""

from typing import Any

from pyro.infer.autoguide import AutoNormal

from pyro_dak import DAK


def build(model: DAK, init_scale: float = 0.1, **options: Any) -> AutoNormal:
    """Options: those of `AutoNormal`."""
    return AutoNormal(model, init_scale=init_scale, **options)
