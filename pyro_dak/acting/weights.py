"""Jointly Gaussian weights, conditioned on rows in closed form, with batches and gradients."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dak.inference.draws import Posterior, as_guide
from pyro_dak.inference.exact import checked_normal_priors
from pyro_dak.inference.guides import NaturalGuide
from pyro_dak.inference.guides.base import check_guide
from pyro_dak.inference.guides.joint import TrilGuide, flat_priors
from pyro_dak.model.dak import DAK

__all__ = ["GaussianWeights"]


@dataclass(frozen=True)
class GaussianWeights:
    """Weights w_c ~ N(loc_c, R_c (I - T_c^T T_c) R_c^T) of F functions, independent of each other.

    R is shared by all batches, and T holds one row for every row of data that came after R was
    made. So few rows after the prior, whose R is diagonal, cost n K numbers a function and not K^2;
    so does each of a batch of fantasies, with gradients in the inputs of its rows.

    Attributes:
        loc: means, `(*batch, F, K)`.
        root: R, `(F, K, K)`, or its diagonal, `(F, 1, K)`.
        rows: T, `(*batch, F, n, K)`, whose batch broadcasts with that of `loc`; n may be 0.
    """

    loc: Tensor
    root: Tensor
    rows: Tensor

    @classmethod
    def of_prior(cls, model: DAK) -> "GaussianWeights":
        """The weights before any data, for normal priors."""
        layer = model.layer
        empty = layer.log_unit_scale.detach().new_empty(layer.num_functions, layer.num_weights)
        loc, scale = flat_priors(checked_normal_priors(model), model.site_shapes, empty)
        return cls(loc, scale.unsqueeze(-2), empty.new_zeros(*loc.shape[:1], 0, loc.shape[1]))

    @classmethod
    def of(cls, posterior: Posterior, model: DAK, with_shift: bool = True) -> "GaussianWeights":
        """The weights of a guide of the model with joint covariance within functions.

        A shift that functions share, as those of classes do, is no part of it: the likelihood does
        not see it. Where f itself is asked for, `with_shift` refuses such a guide.
        """
        guide = as_guide(posterior)
        is_diagonal = isinstance(guide, NaturalGuide) and guide.covariance == "diagonal"
        if not isinstance(guide, TrilGuide) or is_diagonal:
            raise NotImplementedError(
                "A joint covariance among the weights of a function is needed: that of "
                "`exact_posterior`, FullRankGuide, or NaturalGuide with covariance "
                f'"joint" or "shared"; got {type(guide or posterior).__name__}.'
            )
        check_guide(model, guide)
        if with_shift and isinstance(guide, NaturalGuide) and guide.has_common_shift:
            raise NotImplementedError(
                "The functions of classes share a shift, and with it they are not independent."
            )
        loc = guide.loc.detach().clone()
        F, K = loc.shape
        root = guide.scale_tril.detach().expand(F, K, K)
        return cls(loc, root, loc.new_zeros(F, 0, K))

    @property
    def batch_shape(self) -> torch.Size:
        """The batch of posteriors."""
        return torch.broadcast_shapes(self.loc.shape[:-2], self.rows.shape[:-3])

    def mean(self, design: Tensor) -> Tensor:
        """E f, `(*batch, N, F)`, at rows of the design `(*batch, N, K)`."""
        return design @ self.loc.mT

    def covariance(self, design: Tensor) -> Tensor:
        """Cov f between rows, Phi R (I - T^T T) R^T Phi^T, `(*batch, F, N, N)`."""
        A, explained = self._whitened(design)
        return A @ A.mT - explained @ explained.mT

    def conditioned(self, design: Tensor, y: Tensor, noise_var: Tensor) -> "GaussianWeights":
        """The weights given y = Phi w + noise, with gradients in all arguments.

        With A = Phi R, S = A (I - T^T T) A^T + diag(v) = L L^T, new rows of T are
        L^{-1} A (I - T^T T), and the mean moves by R (these rows)^T L^{-1} (y - Phi loc).

        Args:
            design: `(*batch, n, K)`.
            y: targets, `(*batch, n, F)`; its batch may be larger.
            noise_var: v, broadcasting with `(*batch, n, F)`.
        """
        A, explained = self._whitened(design)
        left = A - explained @ self.rows
        var = noise_var.expand(*design.shape[:-1], len(self.root)).mT  # (*batch, F, n)
        L = torch.linalg.cholesky(A @ left.mT + torch.diag_embed(var))
        new = torch.linalg.solve_triangular(L, left, upper=False)  # (*batch, F, n, K)
        rest = (y - self.mean(design)).mT.unsqueeze(-1)  # (*batch, F, n, 1)
        rest = torch.linalg.solve_triangular(L.expand(*rest.shape[:-2], -1, -1), rest, upper=False)
        step = new.mT @ rest  # (*batch, F, K, 1)
        step = self.root.mT * step if self._is_diagonal else self.root @ step
        batch = torch.broadcast_shapes(self.rows.shape[:-3], new.shape[:-3])
        both = [part.expand(*batch, *part.shape[-3:]) for part in (self.rows, new)]
        return GaussianWeights(self.loc + step.squeeze(-1), self.root, torch.cat(both, -2))

    def compact(self) -> "GaussianWeights":
        """The same weights; of a single posterior, rows that take much room are in the root."""
        n, K = self.rows.shape[-2:]
        is_single = self.rows.dim() == 3 and self.loc.dim() == 2
        has_gradients = self.rows.requires_grad or self.loc.requires_grad
        limit = K // 2 if self._is_diagonal else 1
        return self.folded() if is_single and n >= limit and not has_gradients else self

    @torch.no_grad()
    def folded(self) -> "GaussianWeights":
        """The same weights of a single posterior, with all rows in the root.

        With the eigenvalues s and vectors E of T T^T, `(n, n)`, I - T^T T is the square of
        I - T^T E diag((1 - sqrt(1 - s)) / s) E^T T.
        """
        loc, root, rows = self.loc.detach(), self.root, self.rows.detach()
        if self._is_diagonal:
            root = torch.diag_embed(root.squeeze(-2))
        if rows.shape[-2] > 0:
            s, E = torch.linalg.eigh(rows @ rows.mT)
            s = s.clamp(torch.finfo(s.dtype).tiny, 1).unsqueeze(-2)
            projected = E.mT @ rows  # (F, n, K)
            factor = (1 - (1 - s).sqrt()) / s
            root = root - (root @ projected.mT * factor) @ projected
        return GaussianWeights(loc, root, rows[:, :0])

    def subset(self, functions: list[int]) -> "GaussianWeights":
        """The weights of some of the functions."""
        rows = self.rows[..., functions, :, :]
        return GaussianWeights(self.loc[..., functions, :], self.root[functions], rows)

    def to(self, like: Tensor) -> "GaussianWeights":
        """The same weights in another dtype or on another device."""
        return GaussianWeights(self.loc.to(like), self.root.to(like), self.rows.to(like))

    def sample(self, num_samples: int) -> Tensor:
        """Draws of the weights of a single posterior, `(S, F, K)`."""
        single = self.folded()
        noise = torch.randn(num_samples, *single.loc.shape, 1).to(single.loc)
        return single.loc + (single.root @ noise).squeeze(-1)

    @property
    def _is_diagonal(self) -> bool:
        return self.root.shape[-2] == 1

    def _whitened(self, design: Tensor) -> tuple[Tensor, Tensor]:
        """A = Phi R, `(*batch, F, N, K)`, and A T^T, `(*batch, F, N, n)`."""
        design = design.unsqueeze(-3)
        A = design * self.root if self._is_diagonal else design @ self.root
        return A, A @ self.rows.mT
