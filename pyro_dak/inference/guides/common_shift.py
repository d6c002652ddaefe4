"""A Gaussian over the weights of several functions that share a shift.

Probabilities of classes do not change if one function is added to all of theirs. So the posterior
of the sum of all functions is its prior, and the functions of the classes are correlated through
it: w_c = m_c + u_c + b with independent u_c ~ N(0, V_c) and a b ~ N(0, S) in common. With the
precisions Lambda_c = V_c^{-1}, A = sum_c Lambda_c and the sum P of the precisions of the prior, the
KL divergence from the prior is least for

    S = P^{-1} - A^{-1},

which is zero at the prior. Woodbury's identity then gives, for the covariance of all weights,
log det = sum_c log det V_c + log det A - log det P, and as quadratic form of deviations d_c

    sum_c d_c^T Lambda_c d_c - v^T (A^{-1} - A^{-1} P A^{-1}) v,   v = sum_c Lambda_c d_c.
"""

import math
from typing import Any

import torch
from pyro.distributions import TorchDistribution, constraints
from torch import Tensor

__all__ = ["CommonShiftNormal"]


class CommonShiftNormal(TorchDistribution):
    """The distribution of w `(F, K)` above.

    Args:
        loc: m, `(F, K)`.
        scale_tril: Cholesky factors of V_c, `(F, K, K)`, or `(1, K, K)` if all are the same.
        total_root: the Cholesky factor T of A^{-1}, `(K, K)`.
        prior_total: the diagonal of P, `(K,)`.
        shift_root: R with R R^T = S, `(K, K)`.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012
    support = constraints.independent(constraints.real, 2)
    has_rsample = True

    def __init__(
        self,
        loc: Tensor,
        scale_tril: Tensor,
        total_root: Tensor,
        prior_total: Tensor,
        shift_root: Tensor,
        batch_shape: tuple[int, ...] = (),
    ):
        self.loc, self.scale_tril, self.total_root = loc, scale_tril, total_root
        self.prior_total, self.shift_root = prior_total, shift_root
        super().__init__(torch.Size(batch_shape), loc.shape, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "CommonShiftNormal":
        parts = (self.loc, self.scale_tril, self.total_root, self.prior_total, self.shift_root)
        return CommonShiftNormal(*parts, batch_shape=tuple(batch_shape))

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        noise = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
        own = (self.scale_tril @ noise.unsqueeze(-1)).squeeze(-1)
        shift = torch.randn_like(noise[..., :1, :]) @ self.shift_root.mT
        return self.loc + own + shift

    def log_prob(self, value: Tensor) -> Tensor:
        F, K = self.loc.shape
        deviation = (value - self.loc).unsqueeze(-1)
        whitened = torch.linalg.solve_triangular(self.scale_tril, deviation, upper=False)
        weighted = torch.linalg.solve_triangular(self.scale_tril.mT, whitened, upper=True)
        half = weighted.sum(-3).squeeze(-1) @ self.total_root  # T^T v
        smoothed = half @ self.total_root.mT  # A^{-1} v
        common = half.square().sum(-1) - (self.prior_total * smoothed.square()).sum(-1)
        quadratic = whitened.square().sum((-3, -2, -1)) - common
        own = self.scale_tril.diagonal(dim1=-2, dim2=-1).log().sum() * (F / len(self.scale_tril))
        total = self.total_root.diagonal().log().sum()
        log_det = 2 * (own - total) - self.prior_total.log().sum()
        return -0.5 * (F * K * math.log(2 * math.pi) + log_det + quadratic)
