"""Feature extractors for tables: that of the paper, and one that keeps distances."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm

from pyro_dak.validation import check_choice

__all__ = ["BACKBONES", "Residual", "backbone", "residual_mlp"]

BACKBONES = ("mlp", "residual_mlp")


class Residual(nn.Module):
    """x + factor branch(x): it keeps distances if the branch is a contraction.

    With a branch of Lipschitz constant 1 and a factor c below 1, distances become at least 1 - c
    and at most 1 + c times what they were.
    """

    def __init__(self, branch: nn.Module, factor: float):
        super().__init__()
        self.branch, self.factor = branch, factor

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x, self.branch(x), alpha=self.factor)


def residual_mlp(
    input_dim: int, feature_dim: int, num_blocks: int = 3, factor: float = 0.5
) -> nn.Sequential:
    """A residual network that keeps distances: D -> D_w by an isometry, then blocks.

    Inputs that are apart have features that are apart, by (1 - c)^n to (1 + c)^n times their
    distance for n blocks with the factor c. A plain network can map strange inputs onto known ones.

    Args:
        input_dim: D.
        feature_dim: D_w, at least D.
        num_blocks: n, blocks x + c relu(A x + b) with A of spectral norm 1.
        factor: c, below 1.
    """
    if feature_dim < input_dim:
        raise ValueError(
            f"`feature_dim` must be at least `input_dim`, or distances are lost; got {feature_dim} "
            f"and {input_dim}. Raise it, or use the plain backbone."
        )
    blocks = []
    for _ in range(num_blocks):
        linear = spectral_norm(nn.Linear(feature_dim, feature_dim))
        blocks.append(Residual(nn.Sequential(linear, nn.ReLU()), factor))
    return nn.Sequential(orthogonal(nn.Linear(input_dim, feature_dim)), *blocks)


def backbone(
    input_dim: int,
    feature_dim: int,
    hidden: Sequence[int] = (64, 32),
    relu_output: bool = False,
    name: str = "mlp",
) -> nn.Sequential:
    """The paper's network for tables, D -> 64 -> 32 -> D_w with ReLUs between, or a residual one.

    Args:
        input_dim: D.
        feature_dim: D_w.
        hidden: widths of the layers between them.
        relu_output: whether the features go through a ReLU too; the residual network has none.
        name: "mlp", or "residual_mlp" for that network, which has other layers between.
    """
    check_choice("backbone", name, BACKBONES)
    if name == "residual_mlp":
        return residual_mlp(input_dim, feature_dim)
    widths = [input_dim, *hidden, feature_dim]
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*(layers if relu_output else layers[:-1]))
