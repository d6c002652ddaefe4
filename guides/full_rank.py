"""Full covariance among all weights of each function: holds the exact posterior of a regression."""

from typing import Any

from pyro_dak import DAK, FullRankGuide


def build(model: DAK, **options: Any) -> FullRankGuide:
    """Options: `init_scale`, `init_loc_scale`."""
    return FullRankGuide(model, **options)
