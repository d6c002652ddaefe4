"""The kernel activation h -> phi(h), densely or through the two nearest nodes."""

import functools
import math
import warnings
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_dak.additive import bridge
from pyro_dak.additive.factor import LevelConstants, dense_inverse_factor, level_constants
from pyro_dak.additive.grid import DyadicGrid
from pyro_dak.additive.kernels import Kernel, LaplaceKernel
from pyro_dak.fast import design, fused
from pyro_dak.validation import (
    check_choice,
    check_finite,
    check_floating,
    check_kind,
    check_not_negative,
)

__all__ = ["KernelActivation", "LocalConstants", "Route", "dense_is_faster"]

Route = Literal["auto", "dense", "local"]

# Up to this many nodes the maps to the nodes are dense; above, they are in compressed rows.
_MAX_DENSE_NODES = 127


def dense_is_faster(num_inducing: int, num_outputs: int) -> bool:
    """Whether the dense product beats the two-node gather, forward and backward.

    Times of a training step, per row and unit and in arbitrary units, as `benchmarks.activation`
    finds them: dense 1.3 + M (0.1 + 0.0007 C); local 1.8 for one output, 3.5 + 0.095 C for more.
    Many outputs and few nodes go to the matrix product, all else to the gather.
    """
    dense = 1.3 + num_inducing * (0.1 + 0.0007 * num_outputs)
    return dense < (1.8 if num_outputs == 1 else 3.5 + 0.095 * num_outputs)


class LocalConstants(NamedTuple):
    """What the local route needs to know of a grid and a Markov kernel, in one precision.

    `levels` and `features` are those of the plain formulas in `bridge`, `intervals` those of
    `fast.fused`. The maps go from z to values at the nodes, `(M, M)`, and from means and variances
    of z to the moments of intervals and of nodes (`fused.interval_matrix`, `fused.node_matrix`).
    """

    levels: LevelConstants
    features: bridge.FeatureConstants
    intervals: fused.Intervals
    node_map: fused.LinearMap
    interval_map: fused.LinearMap
    moment_map: fused.LinearMap


@functools.lru_cache(maxsize=4)
def _exact_constants(level: int, delta: float) -> list[Tensor]:
    """Constants of levels and features, and the matrices, sparse; in float64 on the CPU."""
    L = bridge.node_factor(level, delta)
    matrices = (L, fused.interval_matrix(L), fused.node_matrix(L, delta))
    return [*level_constants(level, delta), *bridge.feature_constants(level, delta), *matrices]


class KernelActivation(nn.Module):
    """phi(h) = k(h, U) L_U^{-T}: `(..., N, P)` to `(..., N, P, M)` (paper, eq. 7).

    With z ~ N(0, I_M), phi(h) z is the Gaussian process with covariance k(h, U) K_UU^{-1} k(U, h').
    For a Markov kernel phi has one non-zero per level, and sums over phi can go through the two
    nodes around h instead: `combine` and `combine_moments` choose the faster route.

    The module has no parameters and no buffers: constants are computed once in float64 and cast to
    the dtype and device of the input, once for each. Kernels that are not Markov are evaluated in
    float64 whatever the dtype: their factor has entries up to 1 / sqrt(jitter).

    Args:
        grid: inducing points U.
        kernel: one-dimensional kernel; `LaplaceKernel` is Markov, the others take the dense route.
        jitter: added to the diagonal of K_UU for kernels that are not Markov.

    Attributes:
        num_inducing: M.
        delta: spacing of the grid over the lengthscale of the kernel.
        has_local_route: whether the kernel is Markov.
    """

    def __init__(self, grid: DyadicGrid, kernel: Kernel | None = None, jitter: float = 1e-6):
        super().__init__()
        check_kind("grid", grid, DyadicGrid, "a DyadicGrid")
        if kernel is not None:
            check_kind("kernel", kernel, Kernel, "a kernel, such as LaplaceKernel(1.0)")
        check_not_negative("jitter", jitter)
        self.grid = grid
        self.kernel = LaplaceKernel() if kernel is None else kernel
        self.num_inducing = grid.num_inducing
        self.delta = grid.spacing / self.kernel.lengthscale
        is_markov = self.has_local_route = self.kernel.is_markov
        self._factor = None if is_markov else dense_inverse_factor(grid, self.kernel, float(jitter))
        self._cache: dict[tuple[torch.dtype, torch.device], Any] = {}
        kept = self.prior_variance_between_nodes()
        if self.num_inducing > 1 and kept < 0.5:
            warnings.warn(
                f"The grid is coarse for the lengthscale: between two nodes (spacing "
                f"{grid.spacing:.3g}, lengthscale {self.kernel.lengthscale:.3g}) the prior "
                f"keeps only {kept:.0%} of its variance. Raise `level` or the lengthscale.",
                stacklevel=2,
            )

    def extra_repr(self) -> str:
        return f"{self.grid}, {self.kernel}"

    def __getstate__(self) -> dict[str, Any]:
        """The state without the constants: sparse tensors are better made anew than copied."""
        return {**self.__dict__, "_cache": {}}

    def forward(self, h: Tensor) -> Tensor:
        """phi(h), `(..., N, P, M)`, in the level order of the grid, for finite h `(..., N, P)`."""
        check_floating("h", h)
        check_finite("h", h)
        return self.features(h)

    def features(self, h: Tensor, num_levels: int | None = None) -> Tensor:
        """`forward` without the checks, for callers that have made them.

        With `num_levels`, only the columns of the coarsest levels, `(..., N, P, 2^num_levels - 1)`.
        """
        M = self.num_inducing if num_levels is None else 2**num_levels - 1
        if self._factor is not None:
            # The factor, with entries up to 1 / sqrt(jitter), would enlarge the rounding errors of
            # the kernel; Apple's GPUs have no double precision.
            dtype = torch.float32 if h.device.type == "mps" else torch.float64
            key = (dtype, h.device)
            if key not in self._cache:
                tensors = (self.grid.inducing_points, self._factor)
                self._cache[key] = [tensor.to(h.device, dtype) for tensor in tensors]
            U, factor = self._cache[key]
            return (self.kernel(h.to(dtype), U) @ factor[:, :M]).to(h.dtype)
        constants = self.local_constants(h).features
        if num_levels is not None:
            constants = bridge.FeatureConstants(*(part[:num_levels] for part in constants))
        index, value = bridge.level_features(self._coordinates(h), constants, self.delta)
        return h.new_zeros(*h.shape, M).scatter(-1, index, value)

    def residual_variance(self, h: Tensor) -> Tensor:
        """Prior variance lost between and outside the nodes, 1 - phi phi^T, like h.

        It is exact and non-negative for a Markov kernel. For the others the difference is taken as
        it is, and rounding (down to -1e-6 in float32 at a node) is cut at zero.
        """
        if not self.has_local_route:
            return (1 - self.features(h).square().sum(-1)).clamp(min=0)
        interval = bridge.locate(self._coordinates(h), self.num_inducing, self.delta)
        return bridge.bridge_variance(interval, self.delta)

    def residual_covariance(self, h: Tensor) -> Tensor:
        """Prior covariance between rows that the nodes do not explain, `(..., P, N, N)`.

        k(h, h') - phi(h) phi(h')^T for the rows of h `(..., N, P)`, with `residual_variance` on the
        diagonal. For a Markov kernel it is that of bridges between nodes, without a difference.
        """
        rows = h.mT  # (..., P, N)
        if self.has_local_route:
            x = self._coordinates(rows)
            interval = bridge.locate(x, self.num_inducing, self.delta)
            return bridge.bridge_covariance(interval, x, self.delta)
        phi = self.features(h).transpose(-3, -2)  # (..., P, N, M)
        prior = self.kernel.of_distance((rows.unsqueeze(-1) - rows.unsqueeze(-2)).abs())
        lost = prior - phi @ phi.mT
        own = lost.diagonal(dim1=-2, dim2=-1)
        return lost + torch.diag_embed(own.clamp(min=0) - own)

    def node_values(self, z: Tensor) -> Tensor:
        """g(U) = L_U z at the sorted nodes, `(..., M)`, from weights in level order."""
        constants = self.local_constants(z)
        if constants.node_map.can_run():
            return constants.node_map(z)
        return bridge.node_values(z, constants.levels)

    def interval_table(self, z_loc: Tensor, z_var: Tensor) -> Tensor:
        """The table of `fused.interpolated_moments`, `(..., 5, M + 1, P)`.

        It holds moments of g at the two nodes of every interval, for independent weights z
        `(..., P, M)` in level order.
        """
        constants = self.local_constants(z_loc)
        if constants.interval_map.can_run():
            both = torch.cat(torch.broadcast_tensors(z_loc, z_var), -1)
            return constants.interval_map.units_last(both).unflatten(-2, (5, -1))
        mean, var, cov = bridge.node_moments(z_loc, z_var, constants.levels)
        rows = [F.pad(row, pad) for row in (mean, var) for pad in ((1, 0), (0, 1))]
        return torch.stack([*rows, F.pad(2 * cov, (1, 1))], -3).mT

    def node_table(self, z_loc: Tensor, z_var: Tensor) -> Tensor:
        """The table of `fast.serving.FixedMoments`, `(3, F, P, M + 2)`.

        It holds moments of g at the sorted nodes, and at one more on either side, for independent
        weights z `(F, P, M)` in level order.
        """
        moment_map = self.local_constants(z_loc).moment_map
        return moment_map(torch.cat([z_loc, z_var], -1)).unflatten(-1, (3, -1)).movedim(-2, 0)

    def combine(self, h: Tensor, weights: Tensor, route: Route = "auto") -> Tensor:
        """sum_p phi(h_p) . weights[c, p], `(..., N, C)`.

        Args:
            h: `(*b1, N, P)`.
            weights: `(*b2, C, P, M)` in level order; b1 and b2 broadcast.
            route: "dense", "local", or "auto" for the faster one.
        """
        if self.takes_dense_route(weights, route):
            return _flat(self.features(h)) @ _flat(weights).mT
        return self._between_nodes(h, weights).sum(-2).mT

    def combine_moments(
        self,
        h: Tensor,
        loc: Tensor,
        var: Tensor,
        route: Route = "auto",
        unit_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Mean and variance of sum_p sigma_p phi(h_p) . z[c, p] for independent z, `(..., N, C)`.

        mean = sum_p sigma_p phi_p loc_p and variance = sum_p sigma_p^2 phi_p^2 var_p (paper, eq.
        17). Every term of the variance is non-negative on either route.

        Args:
            h: `(*b1, N, P)`.
            loc: means of the weights, `(*b2, C, P, M)` in level order.
            var: variances of the weights, like `loc`.
            route: "dense", "local", or "auto" for the faster one.
            unit_scale: sigma, `(P,)`; by default 1.
        """
        if self.takes_dense_route(loc, route):
            phi = self.features(h)
            phi = _flat(phi if unit_scale is None else phi * unit_scale.unsqueeze(-1))
            return phi @ _flat(loc).mT, phi.square() @ _flat(var).mT
        h, table, arrange = fused.stack_batches(h, self.interval_table(loc, var))
        sigma = None if unit_scale is None else unit_scale.unsqueeze(0)
        intervals = self.local_constants(h).intervals
        mean, variance = fused.interpolated_moments(h.mT, table, sigma, intervals)
        return arrange(mean), arrange(variance)

    def stacked_moments(self, h: Tensor, loc: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """`combine_moments` on the local route for E members, rows last: each `(C, E, N)`.

        Here h is `(E, P, N)`, and means and variances of the weights are `(C, E, P, M)`.
        """
        table = self.interval_table(loc.flatten(1, 2), var.flatten(1, 2))
        intervals = self.local_constants(h).intervals
        return fused.interpolated_moments(h, table, None, intervals)

    def mean_field_terms(
        self, h: Tensor, loc: Tensor, *others: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Mean and variance of f, and the KL of z and mu from N(0, 1).

        The arguments are the tensors of `fused.MeanFieldTerms`. The result is None where there is
        no such operation, or where the dense route is faster.
        """
        if torch.compiler.is_compiling() or h.dim() > 2 or loc.dim() > 3:
            return None
        if not self.has_local_route or dense_is_faster(self.num_inducing, len(loc)):
            return None
        constants = self.local_constants(loc)
        maps = (constants.interval_map, constants.intervals)
        return fused.MeanFieldTerms.apply(h, loc, *others, *maps)

    def design_moments(
        self,
        h: Tensor,
        log_sigma: Tensor,
        loc: Tensor,
        covariance: Tensor,
        linear: tuple[float, float] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, variance and design of `design.design_moments`, from the moments of node values."""
        intervals = self.local_constants(h).intervals
        return design.design_moments(h, log_sigma, loc, covariance, intervals, linear)

    def node_matrix(self, like: Tensor) -> Tensor | None:
        """L_U with sorted nodes as rows and weights in level order as columns, `(M, M)`.

        None where it would be large, and for kernels that have no local route: there functions are
        not known from their values at two nodes.
        """
        if not self.has_local_route or self.num_inducing > _MAX_DENSE_NODES:
            return None
        return self.local_constants(like).node_map.matrix

    def unit_values(self, h: Tensor, weights: Tensor) -> Tensor:
        """phi(h_p) . weights[c, p] of every unit, `(N, C, P)`, for h `(N, P)`; no sum over p."""
        if not self.has_local_route:
            return torch.einsum("npm,cpm->ncp", self.features(h), weights)
        return self._between_nodes(h, weights).permute(2, 0, 1)

    def unit_block_variances(self, h: Tensor, scale_tril: Tensor) -> Tensor:
        """Variance of phi(h_p) . z[c, p] for z[c, p] ~ N(., T T^T), `(N, C, P)`.

        Between two nodes with prior-weighted rows G_j, G_{j+1} of L_U T the variance is
        |w0 G_j + w1 G_{j+1}|^2 = (w0 a + w1 b)^2 + (w1 e)^2 with a = |G_j|, b = G_j . G_{j+1} / a
        and e = |G_{j+1} - (b / a) G_j|: three numbers per interval, and a sum of squares. T is
        `scale_tril`, `(C, P, M, M)` in level order, and h is `(N, P)`.
        """
        if not self.has_local_route:
            return torch.einsum("npm,cpmk->ncpk", self.features(h), scale_tril).square().sum(-1)
        j, w0, w1 = self._two_nodes(h)
        G = F.pad(self.node_values(scale_tril.mT), (1, 1))  # (C, P, K, M + 2)
        left, right = G[..., :-1], G[..., 1:]
        a = torch.linalg.vector_norm(left, dim=-2)  # (C, P, M + 1)
        safe = torch.where(a > 0, a, 1)
        b = (left * right).sum(-2) / safe
        e = torch.linalg.vector_norm(right - left * (b / safe).unsqueeze(-2), dim=-2)
        a, b, e = _pick(a, j), _pick(b, j), _pick(e, j)
        return ((w0 * a + w1 * b).square() + (w1 * e).square()).permute(2, 0, 1)

    def prior_variance_between_nodes(self) -> float:
        """Least prior variance phi phi^T inside the grid, at the middle between two nodes.

        It is 1 - tanh(delta / 2) for the Laplace kernel; 1 means that the grid loses nothing.
        """
        if self.has_local_route:
            return 1 - math.tanh(self.delta / 2)
        nodes = self.grid.sorted_points
        middles = (nodes[:-1] + nodes[1:]) / 2 if len(nodes) > 1 else nodes
        return float(self.features(middles.unsqueeze(-1)).square().sum(-1).min())

    def takes_dense_route(self, weights: Tensor, route: Route = "auto") -> bool:
        """Whether sums over these weights, `(..., C, P, M)`, take the dense route."""
        check_choice("route", route, ("auto", "dense", "local"))
        if route != "auto":
            return route == "dense"
        num_outputs = math.prod(weights.shape[:-2])
        return not self.has_local_route or dense_is_faster(self.num_inducing, num_outputs)

    def prepare(self, like: Tensor) -> None:
        """Compute the constants for tensors like this one, for instance ahead of compilation."""
        if self.has_local_route:
            self.local_constants(like)

    def local_constants(self, like: Tensor) -> LocalConstants:
        """The constants of the local route in the dtype and on the device of `like`."""
        if not self.has_local_route:
            raise ValueError(
                f"`kernel` must be Markov for the local route; got {type(self.kernel).__name__}. "
                'Use LaplaceKernel, or route="dense".'
            )
        key = (like.dtype, like.device)
        if key not in self._cache:
            # Constants made in inference mode could not train; those in float64 are on the CPU.
            with torch.inference_mode(False), torch.device("cpu"):
                self._cache[key] = self._make_constants(*key)
        return self._cache[key]

    def _make_constants(self, dtype: torch.dtype, device: torch.device) -> LocalConstants:
        exact = _exact_constants(self.grid.level, self.delta)
        dtypes = [dtype if part.is_floating_point() else part.dtype for part in exact]
        is_meta = device.type == "meta"  # it has no sparse tensors, and dense ones take no memory
        if is_meta:
            exact = [torch.empty(part.shape, device=device) for part in exact]
        cast = [part.to(device, own) for part, own in zip(exact, dtypes, strict=True)]
        M, low, spacing = self.num_inducing, self.grid.bounds[0], self.grid.spacing
        is_dense = is_meta or M <= _MAX_DENSE_NODES
        node_map, interval_map, moment_map = (fused.LinearMap(A, is_dense) for A in cast[7:])
        return LocalConstants(
            LevelConstants(*cast[:2]),
            bridge.FeatureConstants(*cast[2:7]),
            fused.intervals_of_grid(M, low, spacing, self.delta, dtype, device),
            node_map,
            interval_map,
            moment_map,
        )

    def _between_nodes(self, h: Tensor, weights: Tensor) -> Tensor:
        """phi(h_p) . weights[c, p] through the two nodes around h_p, `(..., C, P, N)`."""
        j, w0, w1 = self._two_nodes(h)
        table = F.pad(self.node_values(weights), (1, 1))  # (*b2, C, P, M + 2)
        return w0 * _pick(table, j) + w1 * _pick(table, j + 1)

    def _two_nodes(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The interval of each input and the weights of its two nodes, `(..., 1, P, N)` each."""
        x = self._coordinates(h).mT.unsqueeze(-3)
        interval = bridge.locate(x, self.num_inducing, self.delta)
        return interval.j, *bridge.bridge_weights(interval, self.delta)

    def _coordinates(self, h: Tensor) -> Tensor:
        return (h - self.grid.bounds[0]) / self.grid.spacing


def _pick(table: Tensor, index: Tensor) -> Tensor:
    """table[..., c, p, index[..., 0, p, n]], `(..., C, P, N)`, for a table `(..., C, P, R)`."""
    C, P, R = table.shape[-3:]
    batch = torch.broadcast_shapes(table.shape[:-3], index.shape[:-3])
    index = index.expand(*batch, C, P, index.shape[-1])
    return table.expand(*batch, C, P, R).gather(-1, index)


def _flat(value: Tensor) -> Tensor:
    return value.flatten(-2)  # units and nodes as one axis, (..., P M)
