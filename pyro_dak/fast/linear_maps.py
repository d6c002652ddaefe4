"""Constant linear maps, dense or in compressed rows, with their gradient."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["LinearMap", "without_beta_warning"]


@contextmanager
def without_beta_warning() -> Iterator[None]:
    """torch calls its compressed rows a beta feature."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        yield


class _SparseProduct(torch.autograd.Function):
    """z -> A z for a constant A in compressed rows, `(M, K)` to `(R, K)`."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, matrix: Tensor, transposed: Tensor) -> Tensor:
        ctx.matrix, ctx.transposed = matrix, transposed
        return matrix @ z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _SparseProduct.apply(grad, ctx.transposed, ctx.matrix), None, None


class LinearMap:
    """A constant linear map A, `(R, M)`, dense or sparse, of the last axis of a tensor.

    Args:
        matrix: sparse COO `(R, M)`.
        is_dense: whether to multiply densely.
    """

    def __init__(self, matrix: Tensor, is_dense: bool):
        self.is_dense = is_dense
        with without_beta_warning():
            self.matrix = matrix.to_dense() if is_dense else matrix.to_sparse_csr()
            self.transposed = None if is_dense else matrix.mT.to_sparse_csr()

    def can_run(self) -> bool:
        """Whether the product works here: the compiler has no sparse ones."""
        return self.is_dense or not torch.compiler.is_compiling()

    def __call__(self, z: Tensor) -> Tensor:
        """`(..., M)` to `(..., R)`."""
        return self._columns(z).mT.reshape(*z.shape[:-1], -1)

    def units_last(self, z: Tensor) -> Tensor:
        """`(..., P, M)` to `(..., R, P)`."""
        columns = self._columns(z)
        if z.dim() == 3 and len(z) == 1:
            return columns.unsqueeze(0)
        return columns.reshape(-1, *z.shape[:-1]).movedim(0, -2)

    def parts_first(self, z: Tensor, num_parts: int) -> Tensor:
        """`(F, P, M)` to `(num_parts, F, P, R / num_parts)`."""
        parts = self._columns(z).view(num_parts, -1, z.shape[0] * z.shape[1])
        return parts.mT.reshape(num_parts, *z.shape[:2], -1)

    def transpose(self, grad: Tensor) -> Tensor:
        """The transpose of `units_last`, `(F, R, P)` to `(F, P, M)`, without a gradient."""
        F, R, P = grad.shape
        flat = grad.transpose(0, 1).reshape(R, F * P)
        product = self.matrix.mT @ flat if self.transposed is None else self.transposed @ flat
        return product.mT.view(F, P, -1)

    def _columns(self, z: Tensor) -> Tensor:
        """A times the transpose of z with all but its last axis as one, `(R, K)`."""
        flat = z.reshape(-1, z.shape[-1]).mT
        if self.transposed is None:
            return self.matrix @ flat
        return _SparseProduct.apply(flat, self.matrix, self.transposed)
