"""Rows whose labels make the predictions at other rows surest, by the integrated variance."""

import torch
from torch import Tensor

from pyro_dak.acting.curvature import expected_curvature
from pyro_dak.acting.weights import GaussianWeights
from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.inference.draws import Posterior
from pyro_dak.model.dak import DAK
from pyro_dak.model.likelihoods import Likelihood
from pyro_dak.prediction.predict import with_bar

__all__ = ["IntegratedVariance"]


class IntegratedVariance:
    """The mean over target rows r of sum_c k_c(r) Var f_c(r), and how far a label lowers it.

    With the covariance S_c of the weights of function c, the design phi(x) and the curvature k_c(x)
    of the log-likelihood, the label of x lowers it by

        sum_c m_c k_c / (1 + k_c v_c),  v_c = phi^T S_c phi,  m_c = phi^T S_c G_c S_c phi,

    where G_c is the mean over target rows of k_c(r) phi(r) phi(r)^T: m_c(x) is the weighted mean
    square of Cov(f_c(r), f_c(x)). So the rows of the target enter once, in a matrix. The label
    turns S_c into S_c - u u^T, u = S_c phi (k / (1 + k v))^{1/2}, and therefore at any row

        v -> v - a^2,  m -> m - 2 a b + a^2 (u^T G u),  a = phi^T u,  b = phi^T S_c G_c u,

    so that each choice costs O(K) for every row and function. A row that is far from all others
    has a large variance, and is not chosen, since it tells little of them. Curvatures are those
    before the first choice: for classes, p (1 - p) under the posterior.

    Args:
        model: the model.
        posterior: with a joint covariance within functions.
        likelihood: that of the model, in float64.
        target: unit inputs of the target rows, `(R, P)`.
        chunk_size: rows at a time.
    """

    def __init__(
        self,
        model: DAK,
        posterior: Posterior,
        likelihood: Likelihood,
        target: Tensor,
        chunk_size: int,
    ):
        weights = GaussianWeights.of(posterior, model, with_shift=False)
        self.layer, self.likelihood, self.chunk_size = model.layer, likelihood, chunk_size
        self.loc = weights.loc.double()  # (F, K)
        root = weights.root.double()
        self.covariance = root @ root.mT  # S, (F, K, K)
        self.gram = torch.zeros_like(self.covariance)  # G
        for part in target.split(chunk_size):
            design, _, var = self._spread(part)
            k = self._curvature(design, var)  # (F, n)
            self.gram += (design.mT * k.unsqueeze(-2)) @ design / len(target)

    def _spread(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """phi `(n, K)`, phi S `(F, n, K)` and v `(F, n)`."""
        design = self.layer.design(h)
        spread = design @ self.covariance
        return design, spread, (spread * design).sum(-1).clamp(min=0)

    def _curvature(self, design: Tensor, var: Tensor) -> Tensor:
        """k, `(F, n)`."""
        moments = FunctionMoments(design @ self.loc.mT, var.mT)
        return expected_curvature(self.likelihood, moments).mT

    def choose(self, h: Tensor, num: int, progress: bool) -> Tensor:
        """The best row of a pool `(N, P)`, then the best one given its label, and so on, `(num,)`.

        The drop that a row brings may grow as others are chosen, so all rows are seen every time.
        """
        k, v, m = self._start(h)
        is_free = torch.ones(len(h), dtype=torch.bool, device=h.device)
        chosen: list[int] = []
        for _ in with_bar(range(num), progress, "acquire"):
            drops = (m * k / (1 + k * v)).sum(0)
            best = int(drops.masked_fill(~is_free, -torch.inf).argmax())
            chosen.append(best)
            is_free[best] = False
            if len(chosen) < num:
                v, m = self._given(h, best, k[:, best], v, m)
        return torch.tensor(chosen, device=h.device)

    def _start(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """k, v and m of all rows, `(F, N)` each."""
        parts = []
        for part in h.split(self.chunk_size):
            design, spread, v = self._spread(part)
            m = ((spread @ self.gram) * spread).sum(-1)
            parts.append(torch.stack([self._curvature(design, v), v, m]))
        k, v, m = torch.cat(parts, -1)
        return k, v, m

    def _given(
        self, h: Tensor, best: int, k: Tensor, v: Tensor, m: Tensor
    ) -> tuple[Tensor, Tensor]:
        """v and m of all rows given the label of row `best`, whose curvatures are k `(F,)`."""
        phi = self.layer.design(h[best : best + 1])
        gain = (k / (1 + k * v[:, best])).sqrt().unsqueeze(-1)
        u = (self.covariance @ phi.mT).squeeze(-1) * gain  # (F, K)
        Gu = (self.gram @ u.unsqueeze(-1)).squeeze(-1)
        SGu = (self.covariance @ Gu.unsqueeze(-1)).squeeze(-1)
        designs = (self.layer.design(part) for part in h.split(self.chunk_size))
        pairs = [torch.stack([u @ design.mT, SGu @ design.mT]) for design in designs]
        a, b = torch.cat(pairs, -1)  # (F, N) each
        self.covariance -= u.unsqueeze(-1) * u.unsqueeze(-2)
        m = m - 2 * a * b + (u * Gu).sum(-1, keepdim=True) * a.square()
        return (v - a.square()).clamp(min=0), m.clamp(min=0)
