"""The additive layer: from unit inputs h and weights to f, and from Gaussian weights to q(f)."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pyro_dak.additive.activation import KernelActivation
from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.fast.natural import FixedNodes
from pyro_dak.fast.transforms import needs_plain_operations
from pyro_dak.validation import check_integer, check_kind, check_positive

__all__ = ["AdditiveLayer", "FixedNodes", "Weights"]


class Weights(NamedTuple):
    """Weights of the layer, or their means, or their standard deviations.

    z is `(..., F, P, M)`, mu `(..., F)`, and linear `(..., F, P)` if the layer has a linear term.
    """

    z: Tensor
    mu: Tensor
    linear: Tensor | None = None


class AdditiveLayer(nn.Module):
    """f_c(h) = sum_p sigma_p (phi(h_p) . z[c, p] + r(h_p) linear[c, p]) + mu[c] (paper, eq. 8).

    Here p counts `num_units` units and c counts `num_functions` functions. The linear term is
    optional; r maps the bounds of the grid to [-1, 1]. sigma starts at `prior_scale` / sqrt(P), so
    that the processes together have this standard deviation in the prior, whatever P is.
    """

    def __init__(
        self,
        activation: KernelActivation,
        num_units: int,
        num_functions: int,
        linear_term: bool = False,
        prior_scale: float = 1.0,
    ):
        super().__init__()
        check_kind("activation", activation, KernelActivation, "a KernelActivation")
        check_integer("num_units", num_units, minimum=1)
        check_integer("num_functions", num_functions, minimum=1)
        if activation.num_units not in (None, num_units):
            raise ValueError(
                f"`activation` must have a lengthscale for each of the {num_units} units, or one "
                f"number for all; got {activation.num_units} of them."
            )
        self.activation = activation
        self.num_units = num_units
        self.num_functions = num_functions
        self.linear_term = linear_term
        check_positive("prior_scale", prior_scale)
        log_scale = math.log(prior_scale) - 0.5 * math.log(num_units)
        self.log_unit_scale = nn.Parameter(torch.full((num_units,), log_scale))

    @property
    def unit_scale(self) -> Tensor:
        """sigma, `(P,)`, positive."""
        return self.log_unit_scale.exp()

    @property
    def num_weights(self) -> int:
        """Weights of one function: bias, linear terms, kernel weights."""
        return 1 + self.num_units * (self.linear_term + self.activation.num_inducing)

    def forward(
        self,
        h: Tensor,
        weights: Weights,
        shrinkage: Tensor | None = None,
        unit_scale: Tensor | None = None,
        lengthscale: Tensor | None = None,
    ) -> Tensor:
        """f, `(..., N, F)`.

        Args:
            h: inputs of the units, `(..., N, P)`.
            weights: z, mu and linear, with any batch in front.
            shrinkage: factor of sigma, `(..., P)`, with the batch of the weights.
            unit_scale: sigma, likewise; by default the layer's own.
            lengthscale: of the kernel, likewise; by default the activation's own.
        """
        sigma = self.unit_scale if unit_scale is None else unit_scale
        sigma = sigma if shrinkage is None else sigma * shrinkage
        sigma = sigma.unsqueeze(-2)  # (..., 1, P)
        z, mu, linear = weights
        f = self.activation.combine(h, z * sigma.unsqueeze(-1), lengthscale=lengthscale)
        f = f + mu.unsqueeze(-2)
        return f if linear is None else f + self.linear_inputs(h) @ (linear * sigma).mT

    def moments(self, h: Tensor, loc: Weights, scale: Weights) -> FunctionMoments:
        """Moments of f for independent weights with these means and deviations (paper, eq. 17).

        E f = sum_p sigma_p (phi_p . m_p + r_p m'_p) + m_mu, and likewise for the variance with the
        squares of sigma_p, phi_p, r_p and the deviations.
        """
        sigma = self.unit_scale
        z_var = scale.z.square()
        mean, var = self.activation.combine_moments(h, loc.z, z_var, unit_scale=sigma)
        mean, var = mean + loc.mu.unsqueeze(-2), var + scale.mu.square().unsqueeze(-2)
        if loc.linear is not None and scale.linear is not None:
            r = sigma * self.linear_inputs(h)
            mean, var = mean + r @ loc.linear.mT, var + r.square() @ scale.linear.square().mT
        return FunctionMoments(mean, var)

    def design(self, h: Tensor, num_levels: int | None = None) -> Tensor:
        """The row of each input in the linear model of the weights, `(..., N, num_weights)`.

        Columns: 1 for the bias, sigma_p r(h_p) if there is a linear term, sigma_p phi(h_p). With
        `num_levels`, each unit has the columns of its coarsest levels only.
        """
        columns = [torch.ones_like(h[..., :1])]
        if self.linear_term:
            columns.append(self.unit_scale * self.linear_inputs(h))
        phi = self.unit_scale.unsqueeze(-1) * self.activation.features(h, num_levels)
        return torch.cat([*columns, phi.flatten(-2)], -1)

    def at_nodes(self, flat: Tensor) -> Tensor:
        """Bias, linear weights and values at the nodes, `(..., K)`, of weights `(..., K)`.

        g(U) = L_U z of each unit. Where `KernelActivation.node_matrix` is None, nothing changes.
        """
        L_U = self.activation.node_matrix(flat)
        return flat if L_U is None else self._with_units_times(flat, L_U.mT)

    def from_nodes(self, sums: Tensor) -> Tensor:
        """Sums over the rows of the design of the weights, from those of the design of node values.

        Both are `(..., K)`; this is the transpose of `at_nodes`.
        """
        L_U = self.activation.node_matrix(sums)
        return sums if L_U is None else self._with_units_times(sums, L_U)

    def _with_units_times(self, flat: Tensor, matrix: Tensor) -> Tensor:
        P, M = self.num_units, self.activation.num_inducing
        others, units = flat.split((self.num_weights - P * M, P * M), -1)
        units = units.reshape(-1, M) @ matrix
        return torch.cat([others, units.view(*flat.shape[:-1], P * M)], -1)

    def joint_moments(
        self, h: Tensor, loc: Tensor, covariance: Tensor
    ) -> tuple[FunctionMoments, Tensor]:
        """Moments of f for jointly Gaussian values at the nodes, and their design W `(N, K)`.

        E f = W m and Var f = W S W^T, `(N, F)` each, for means `(F, K)` and covariances
        `(F, K, K)`, or `(1, K, K)` if the functions share it, of what `at_nodes` gives. They are
        held fixed, and the design has no gradient.
        """
        linear = self._linear_map()
        if self.activation.node_matrix(h) is not None:
            mean, var, design = self.activation.design_moments(
                h, self.log_unit_scale, loc, covariance, linear
            )
            return FunctionMoments(mean, var), design
        design = self.design(h)
        mean = design @ loc.mT
        var = ((design @ covariance) * design).sum(-1).mT.clamp(min=0)
        return FunctionMoments(mean, var.expand_as(mean)), design.detach()

    def gaussian_rows(
        self, h: Tensor, y: Tensor, log_noise: Tensor, nodes_fn: Callable[[], FixedNodes | None]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Expected log-likelihood of all rows, residuals, squares and design of `GaussianRows`.

        The noise is Gaussian, and the same for all of y `(N, F)`. q is held fixed, and `nodes_fn`
        gives it, or None if it has no such form. The result is None then, and where the operation
        cannot run.
        """
        q = None if needs_plain_operations() or y.requires_grad else nodes_fn()
        if q is None:
            return None
        return self.activation.gaussian_rows(
            h, y, self.log_unit_scale, log_noise, q, self._linear_map()
        )

    def fixed_nodes(self, mean: Tensor, var: Tensor) -> FixedNodes:
        """Independent weights with these moments, `(F, K)` each, for `gaussian_rows`."""
        shape = torch.Size((len(mean), self.num_units, self.activation.num_inducing))
        return self.activation.fixed_nodes(self.at_nodes(mean), mean, var, shape)

    def _linear_map(self) -> tuple[float, float] | None:
        """Slope and middle of the linear inputs, if there is a linear term."""
        low, high = self.activation.grid.bounds
        return (2 / (high - low), (low + high) / 2) if self.linear_term else None

    @torch.no_grad()
    def largest_design(self, h: Tensor) -> float:
        """A bound of the entries of the design at h, and of that of node values, on the CPU.

        Features and weights of nodes are at most 1.
        """
        sigma = self.unit_scale
        largest = max(1.0, float(sigma.amax()))
        if not self.linear_term:
            return largest
        return max(largest, float((self.linear_inputs(h).abs().amax(0) * sigma).amax()))

    def row_sums(self, h: Tensor, by_mean: Tensor, by_variance: Tensor) -> tuple[Tensor, Tensor]:
        """Phi^T a and (Phi^2)^T b, `(F, num_weights)` each, for weights of rows a, b `(N, F)`.

        Phi is the design at h `(N, P)`, and Phi^2 has its squares. Since the mean of f is Phi m and
        its variance Phi^2 v for independent weights, the sums are the gradients of sum a E f and
        sum b Var f by m and v; on the local route no `(N, P, M)` tensor is made.
        """
        F, P, M = self.num_functions, self.num_units, self.activation.num_inducing
        h, sigma = h.detach(), self.unit_scale.detach()
        with torch.enable_grad():
            loc, var = (h.new_zeros(F, P, M, requires_grad=True) for _ in range(2))
            moments = self.activation.combine_moments(h, loc, var, unit_scale=sigma)
            sums = torch.autograd.grad(moments, (loc, var), (by_mean, by_variance))
        ones = torch.ones_like(h[:, :1])
        columns = [ones, sigma * self.linear_inputs(h)] if self.linear_term else [ones]
        others = torch.cat(columns, -1)
        return (
            torch.cat([by_mean.mT @ others, sums[0].flatten(-2)], -1),
            torch.cat([by_variance.mT @ others.square(), sums[1].flatten(-2)], -1),
        )

    def component_means(self, h: Tensor, weights: Weights) -> Tensor:
        """Shares of the units in f, sigma_p (phi_p . z[c, p] + r_p linear[c, p]), `(N, F, P)`."""
        values = self.activation.unit_values(h, weights.z)
        if weights.linear is not None:
            values = values + self.linear_inputs(h).unsqueeze(-2) * weights.linear
        return self.unit_scale * values

    def component_variances(self, h: Tensor, z_root: Tensor, linear_root: Tensor | None) -> Tensor:
        """Variances of those shares, `(N, F, P)`, from roots of the covariances of each unit.

        z[c, p] has covariance R R^T, with R in `z_root`, `(F, P, M, K)`; `linear_root` is
        `(F, P, K)` over the same columns.
        """
        if linear_root is None:
            return self.unit_scale.square() * self.activation.unit_block_variances(h, z_root)
        columns = torch.einsum("npm,fpmk->nfpk", self.activation.features(h), z_root)
        columns = columns + self.linear_inputs(h)[:, None, :, None] * linear_root
        return self.unit_scale.square() * columns.square().sum(-1)

    def linear_inputs(self, h: Tensor) -> Tensor:
        """r(h): the bounds of the grid mapped to [-1, 1], like h."""
        low, high = self.activation.grid.bounds
        return (h - (low + high) / 2) * (2 / (high - low))

    def unit_residuals(self, h: Tensor) -> Tensor:
        """Prior variance lost by the grid in each unit, sigma_p^2 (1 - phi phi^T), like h."""
        return self.unit_scale.square() * self.activation.residual_variance(h)

    def unit_residual_covariances(self, h: Tensor) -> Tensor:
        """Prior covariance between rows that the grid loses in each unit, `(..., P, N, N)`."""
        var = self.unit_scale.square()[:, None, None]
        return var * self.activation.residual_covariance(h)

    def split(self, flat: Tensor) -> Weights:
        """Weights from their flat form `(..., F, num_weights)`, in the order of `design`."""
        P, M = self.num_units, self.activation.num_inducing
        mu, linear, z = flat.split((1, self.num_weights - 1 - P * M, P * M), -1)
        z = z.unflatten(-1, (P, M))
        return Weights(z, mu.squeeze(-1), linear if self.linear_term else None)
