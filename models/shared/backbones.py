"""The feature extractor of the paper for tables."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

__all__ = ["backbone"]


def backbone(
    input_dim: int,
    feature_dim: int,
    hidden: Sequence[int] = (64, 32),
    relu_output: bool = False,
) -> nn.Sequential:
    """The paper's network for tables: D -> 64 -> 32 -> D_w with ReLUs between the layers.

    Args:
        input_dim: D.
        feature_dim: D_w.
        hidden: widths of the layers between them.
        relu_output: whether the features go through a ReLU too.
    """
    widths = [input_dim, *hidden, feature_dim]
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*(layers if relu_output else layers[:-1]))
