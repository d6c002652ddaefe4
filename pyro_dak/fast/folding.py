"""A linear map after a network that ends in a linear layer: the two as one.

With b what the last layer of the network gets, its features are W_l b + v, and

    W (W_l b + v) = (W W_l) b + W v.

For P rows of W, D features and a layer of K inputs this takes P K multiplications a row instead of
D K + P D, after P D K for the product of the two, once for all rows.
"""

from typing import NamedTuple, cast

from torch import Tensor, nn

from pyro_dak.model.modes import is_mixed

__all__ = ["FoldedLinear", "fold_last_linear", "is_plain", "is_plain_linear", "split_last_linear"]


class FoldedLinear(NamedTuple):
    """Layers to apply one after the other, then weight b + bias; `last` is what was folded."""

    layers: list[nn.Module]
    last: nn.Linear
    weight: Tensor
    bias: Tensor | None


def fold_last_linear(
    network: nn.Module, weight: Tensor, num_rows: int | None = None
) -> FoldedLinear | None:
    """weight network(x) with the network's last linear layer folded into the weight, `(P, D)`.

    None if the network does not end in a plain linear layer, if that has another precision than the
    weight, and if it does not pay for `num_rows` inputs (by default, for very many).
    """
    layers, last = split_last_linear(network)
    if last is None or is_mixed(weight) or last.out_features != weight.shape[1]:
        return None
    if last.weight.dtype != weight.dtype or last.weight.device != weight.device:
        return None
    (P, D), K = weight.shape, last.in_features
    saved = D * K + P * D - P * K
    if saved <= 0 or (num_rows is not None and num_rows * saved <= P * D * K):
        return None
    bias = None if last.bias is None else weight @ last.bias
    return FoldedLinear(layers, last, weight @ last.weight, bias)


def split_last_linear(network: nn.Module) -> tuple[list[nn.Module], nn.Linear | None]:
    """Parts to apply one after the other, and the linear layer after them that ends the network.

    None instead of the layer, and the network as the only part, unless the network is a plain
    `nn.Linear` or an `nn.Sequential` that ends in one. Layers with hooks or of other types, as
    parametrized and quantized ones are, may do more than their weights say and are left alone.
    """
    parts = [network]
    while parts and type(parts[-1]) is nn.Sequential and is_plain(parts[-1]):
        parts[-1:] = list(parts[-1])
    if parts and is_plain_linear(parts[-1]):
        return parts[:-1], cast(nn.Linear, parts[-1])
    return [network], None


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module is W x + b and nothing more."""
    if type(module) is not nn.Linear or not is_plain(module):
        return False
    return all(type(p) is nn.Parameter for p in (module.weight, module.bias) if p is not None)


def is_plain(module: nn.Module) -> bool:
    """Whether a call of a module is its class's forward pass: no hooks, patches, compiled code."""
    is_hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    is_replaced = "forward" in vars(module) or getattr(module, "_compiled_call_impl", None)
    return not is_hooked and not module._backward_pre_hooks and not is_replaced
