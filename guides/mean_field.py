"""The paper's guide: every weight an independent normal."""

from typing import Any

from pyro_dak import DAK, MeanFieldGuide


def build(model: DAK, **options: Any) -> MeanFieldGuide:
    """Options: `init_scale`, `init_loc_scale`."""
    return MeanFieldGuide(model, **options)
