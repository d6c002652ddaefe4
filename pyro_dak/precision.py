"""Mixed precision: whether it is on, and how the last layer keeps out of it."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["is_mixed", "own_precision"]


def is_mixed(like: Tensor) -> bool:
    """Whether autocast is on for the device of a tensor."""
    kind = like.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def own_precision(like: Tensor) -> AbstractContextManager[Any]:
    """A context without autocast; where there is none already, it costs nothing."""
    return torch.autocast(like.device.type, enabled=False) if is_mixed(like) else nullcontext()
