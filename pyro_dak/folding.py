"""The linear layer at the end of a network, for folding it into an affine map that follows."""

from torch import nn

__all__ = ["is_plain", "split_last_linear"]


def split_last_linear(network: nn.Module) -> tuple[list[nn.Module], nn.Linear | None]:
    """Parts to apply one after the other, and the linear layer after them that ends the network.

    None instead of the layer, and the network as the only part, unless the network is a plain
    `nn.Linear` or an `nn.Sequential` that ends in one. Layers with hooks or of other types, as
    parametrized and quantized ones are, may do more than their weights say and are left alone.
    """
    parts = [network]
    while parts and type(parts[-1]) is nn.Sequential and is_plain(parts[-1]):
        parts[-1:] = list(parts[-1])
    if parts and type(parts[-1]) is nn.Linear and is_plain(parts[-1]):
        return parts[:-1], parts[-1]
    return [network], None


def is_plain(module: nn.Module) -> bool:
    """Whether nothing is hooked to the forward pass of a module."""
    return not module._forward_hooks and not module._forward_pre_hooks
