"""The paper's model for tables: D -> 64 -> 32 -> D_w with ReLUs between, then P additive units."""

from typing import Any

from pyro_dak import DAK
from pyro_dak.model.likelihoods import Likelihood

from .shared import backbones


def build(
    input_dim: int,
    num_outputs: int = 1,
    feature_dim: int = 64,
    num_units: int = 16,
    level: int = 3,
    likelihood: Likelihood | None = None,
    relu_output: bool = False,
    backbone: str = "mlp",
    **options: Any,
) -> DAK:
    """The `DAK` itself, without training, on a `backbone` of `models.shared.backbones`.

    The options are those of `DAK`.
    """
    return DAK(
        backbones.backbone(input_dim, feature_dim, relu_output=relu_output, name=backbone),
        feature_dim=feature_dim,
        num_units=num_units,
        num_outputs=num_outputs,
        level=level,
        likelihood=likelihood,
        **options,
    )
