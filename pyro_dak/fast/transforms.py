"""What torch does to the code that runs now: nothing, compile it, or transform it."""

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["needs_plain_operations", "outside_transforms"]


def needs_plain_operations() -> bool:
    """Whether torch compiles or transforms what runs now, and can so with plain operations only.

    Compiled, they make one loop, and the compiler finds the gradient by itself; under `torch.func`
    they have derivatives of any order.
    """
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def outside_transforms() -> AbstractContextManager[object]:
    """A context whose tensors can be kept: `torch.func` neither wraps nor follows them."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return torch._C._DisableFuncTorch()
    return nullcontext()
