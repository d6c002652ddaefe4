"""Full covariance among the weights of each unit, independence between units."""

from typing import Any

from pyro_dak import DAK, UnitBlockGuide


def build(model: DAK, **options: Any) -> UnitBlockGuide:
    """Options: `init_scale`, `init_loc_scale`."""
    return UnitBlockGuide(model, **options)
