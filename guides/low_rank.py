"""Diagonal plus low-rank covariance over all weights of all functions."""

from typing import Any

from pyro_dak import DAK, LowRankGuide


def build(model: DAK, rank: int = 8, **options: Any) -> LowRankGuide:
    """Options: `rank`, `init_scale`, `init_loc_scale`."""
    return LowRankGuide(model, rank, **options)
