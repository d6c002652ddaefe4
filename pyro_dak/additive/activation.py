"""The kernel activation h -> phi(h), densely or through the two nearest nodes."""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_dak.additive import bridge
from pyro_dak.additive.factor import (
    Delta,
    LevelConstants,
    as_tensor,
    dense_inverse_factor,
    level_constants,
)
from pyro_dak.additive.grid import DyadicGrid
from pyro_dak.additive.kernels import Kernel, LaplaceKernel
from pyro_dak.fast import bound, design, fused, natural
from pyro_dak.fast.lengthscales import NodePattern, UnitMap, node_pattern
from pyro_dak.fast.serving import FixedMoments
from pyro_dak.fast.transforms import needs_plain_operations, outside_transforms
from pyro_dak.validation import (
    check_choice,
    check_finite,
    check_floating,
    check_integer,
    check_kind,
    check_last_dim,
    check_not_negative,
)

__all__ = ["KernelActivation", "LocalConstants", "Route", "UnitConstants", "dense_is_faster"]

Route = Literal["auto", "dense", "local"]
_ROUTES = ("auto", "dense", "local")

# Up to this many nodes the maps to the nodes are dense; above, they are in compressed rows.
_MAX_DENSE_NODES = 127
# Those of `bound.Middles`, which are never compiled, are dense up to this many.
_MAX_DENSE_MIDDLES = 63


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
    `middles` are those of `bound.GaussianBound`, which has none on very coarse grids.
    """

    levels: LevelConstants
    features: bridge.FeatureConstants
    intervals: fused.Intervals
    node_map: fused.LinearMap
    interval_map: fused.LinearMap
    moment_map: fused.LinearMap
    middles: bound.Middles | None


class UnitConstants(NamedTuple):
    """What the local route needs to know of a grid where units have lengthscales of their own.

    `columns` are those of `bridge.node_features`, `(M, L)`; `intervals` are those of the grid for
    any lengthscale.
    """

    columns: Tensor
    pattern: NodePattern
    intervals: fused.Intervals


@functools.lru_cache(maxsize=4)
def _exact_constants(level: int, delta: float) -> list[Tensor]:
    """Constants of levels and features, and the matrices, sparse; in float64 on the CPU."""
    L = bridge.node_factor(level, delta)
    matrices = [L, fused.interval_matrix(L, math.exp(-delta)), fused.node_matrix(L, delta)]
    if delta <= bound.MAX_DELTA:
        matrices.append(bound.middle_matrix(L, delta))
    return [*level_constants(level, delta), *bridge.feature_constants(level, delta), *matrices]


class KernelActivation(nn.Module):
    """phi(h) = k(h, U) L_U^{-T}: `(..., N, P)` to `(..., N, P, M)` (paper, eq. 7).

    With z ~ N(0, I_M), phi(h) z is the Gaussian process with covariance k(h, U) K_UU^{-1} k(U, h').
    For a Markov kernel phi has one non-zero per level, and sums over phi can go through the two
    nodes around h instead: `combine` and `combine_moments` choose the faster route.

    The kernel's lengthscale is a number; or one for each unit; or learned, which makes the
    parameter `log_lengthscale` `(P,)`; or random, and then each call takes it as an argument.

    With a lengthscale that is not learned the module has no parameters, and it never has buffers:
    constants are computed once in float64 and cast to the dtype and device of the input, once for
    each. Kernels that are not Markov are evaluated in float64 whatever the dtype: their factor has
    entries up to 1 / sqrt(jitter).

    Args:
        grid: inducing points U.
        kernel: one-dimensional kernel; `LaplaceKernel` is Markov, the others take the dense route.
        jitter: added to the diagonal of K_UU for kernels that are not Markov.
        num_units: P, for a kernel that learns a lengthscale for each unit from one number.
        route: "dense", "local", or "auto" for the faster one, in methods that are not told.
            Everything on the dense route has derivatives of any order.

    Attributes:
        num_inducing: M.
        has_local_route: whether the kernel is Markov.
    """

    log_lengthscale: nn.Parameter | None

    def __init__(
        self,
        grid: DyadicGrid,
        kernel: Kernel | None = None,
        jitter: float = 1e-6,
        num_units: int | None = None,
        route: Route = "auto",
    ):
        super().__init__()
        check_kind("grid", grid, DyadicGrid, "a DyadicGrid")
        if kernel is not None:
            check_kind("kernel", kernel, Kernel, "a kernel, such as LaplaceKernel(1.0)")
        check_not_negative("jitter", jitter)
        check_choice("route", route, _ROUTES)
        self.grid, self.route, self.jitter = grid, route, float(jitter)
        self.kernel = LaplaceKernel() if kernel is None else kernel
        self.num_inducing = grid.num_inducing
        self.has_local_route = self.kernel.is_markov
        if route == "local":
            self._check_is_markov()
        number = self.kernel.lengthscale if self.kernel.is_fixed_number else None
        self._fixed_delta = None if number is None else grid.spacing / number
        self._factor = None
        if number is not None and not self.has_local_route:
            self._check_variance()
            self._factor = dense_inverse_factor(grid, self.kernel, self.jitter)
        self._cache: dict[tuple[str, torch.dtype, torch.device], Any] = {}
        start = self._start(num_units)
        self.log_lengthscale = nn.Parameter(start) if self.kernel.learn else None
        if self.num_inducing > 1 and not self.kernel.has_prior:
            self._warn_if_coarse()

    def _check_variance(self) -> None:
        """Raise unless k(u, u) = 1 at the nodes, which the residual variance stands on."""
        U = self.grid.inducing_points
        variance = self.kernel(U, U).diagonal()
        if not torch.allclose(variance, torch.ones_like(variance), atol=1e-6):
            raise ValueError(
                f"`kernel` must be a function of the distance with k(0) = 1; {self.kernel} has "
                f"variances from {float(variance.min()):.3g} to {float(variance.max()):.3g} at the "
                "nodes. Divide it by k(0): the scales of the units are learned beside it."
            )

    def _start(self, num_units: int | None) -> Tensor:
        """Logarithms of the kernel's lengthscales, `(P,)`, for its parameter; empty without one."""
        values = self.kernel.lengthscale
        if num_units is not None:
            check_integer("num_units", num_units, minimum=1)
            if isinstance(values, tuple) and len(values) != num_units:
                raise ValueError(
                    f"`kernel` must have a lengthscale for each of the {num_units} units, or one "
                    f"number for all; got {len(values)} of them."
                )
        if not self.kernel.learn:
            return torch.empty(0)
        if isinstance(values, float):
            if num_units is None:
                raise ValueError(
                    "`num_units` must be given for a kernel that learns a lengthscale for each "
                    "unit from one number. Or start it from a tensor with one for each."
                )
            values = [values] * num_units
        return torch.tensor([math.log(value) for value in values])

    def _warn_if_coarse(self) -> None:
        own = self.kernel.lengthscale
        shortest = own if isinstance(own, float) else min(own)
        with torch.device("cpu"):
            scales = None if self.kernel.is_fixed_number else torch.tensor([shortest]).double()
            kept = self.prior_variance_between_nodes(scales)
        if kept < 0.5:
            warnings.warn(
                f"The grid is coarse for the lengthscale: between two nodes (spacing "
                f"{self.grid.spacing:.3g}, lengthscale {shortest:.3g}) the prior "
                f"keeps only {kept:.0%} of its variance. Raise `level` or the lengthscale.",
                stacklevel=3,
            )

    @property
    def num_units(self) -> int | None:
        """P, where the kernel has a lengthscale for each unit; None where it fits any P."""
        if self.log_lengthscale is not None:
            return len(self.log_lengthscale)
        own = self.kernel.lengthscale
        return len(own) if isinstance(own, tuple) else None

    @property
    def lengthscale(self) -> float | Tensor:
        """The lengthscale as it is now: a number, or one for each unit, `(P,)`."""
        if self.log_lengthscale is not None:
            return self.log_lengthscale.exp()
        self._check_is_known()
        own = self.kernel.lengthscale
        return own if isinstance(own, float) else torch.tensor(own, dtype=torch.float64)

    @property
    def delta(self) -> float | Tensor:
        """Spacing of the grid over the lengthscale: a number, or one for each unit, `(P,)`."""
        return self.grid.spacing / self.lengthscale

    def _delta(self, like: Tensor, lengthscale: Tensor | None = None) -> Delta:
        """`delta`, or that of the given lengthscale `(..., P)`, in the dtype of `like`."""
        if lengthscale is not None:
            return self.grid.spacing / lengthscale.to(like.dtype)
        if self._fixed_delta is not None:
            return self._fixed_delta
        if self.log_lengthscale is not None:
            return (-self.log_lengthscale.to(like.dtype)).exp() * self.grid.spacing
        return self._cached("delta", like, lambda: torch.as_tensor(self.delta).to(like))

    def _check_is_known(self) -> None:
        if self.kernel.has_prior:
            raise NotImplementedError(
                "The lengthscale has a prior: it is the latent site `lengthscale`, and closed "
                "forms, which know one value for each unit, cannot take it as given. Train by "
                "Trace_ELBO of Pyro with an autoguide, or sample by NUTS of Pyro."
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

    def features(
        self, h: Tensor, num_levels: int | None = None, lengthscale: Tensor | None = None
    ) -> Tensor:
        """`forward` without the checks, for callers that have made them.

        With `num_levels`, only the columns of the coarsest levels, `(..., N, P, 2^num_levels - 1)`.
        A `lengthscale` `(..., P)` takes the place of the kernel's own.
        """
        M = self.num_inducing if num_levels is None else 2**num_levels - 1
        if not self.has_local_route:
            return self._dense_features(h, lengthscale)[..., :M]
        delta = self._delta(h, lengthscale)
        if isinstance(delta, Tensor):
            delta = delta.unsqueeze(-2)  # (..., 1, P)
            constants = bridge.feature_constants(self.grid.level, delta)
        else:
            constants = self.local_constants(h).features
        if num_levels is not None:
            constants = bridge.FeatureConstants(*(part[..., :num_levels] for part in constants))
        index, value = bridge.level_features(self._coordinates(h), constants, delta)
        phi = value.new_zeros(*value.shape[:-1], M)
        return phi.scatter(-1, index.expand_as(value), value)

    def _dense_features(self, h: Tensor, lengthscale: Tensor | None) -> Tensor:
        """k(h, U) L_U^{-T} by a dense factor, of each unit where their lengthscales differ.

        The factor, with entries up to 1 / sqrt(jitter), would enlarge the rounding errors of the
        kernel; Apple's GPUs have no double precision.
        """
        dtype = torch.float32 if h.device.type == "mps" else torch.float64
        like = h.detach().to(dtype) if h.dtype != dtype else h
        U = self._cached("points", like, lambda: self.grid.inducing_points.to(h.device, dtype))
        if self._factor is not None and lengthscale is None:
            own = self._factor
            factor = self._cached("factor", like, lambda: own.to(h.device, dtype))
            return (self.kernel(h.to(dtype), U) @ factor).to(h.dtype)
        scales = self.grid.spacing / as_tensor(self._delta(like, lengthscale))  # (..., P)
        factor = dense_inverse_factor(self.grid, self.kernel, self.jitter, scales)
        k_hU = self.kernel(h.to(dtype), U, scales.unsqueeze(-2))  # (..., N, P, M)
        return torch.einsum("...npm,...pmk->...npk", k_hU, factor).to(h.dtype)

    def residual_variance(self, h: Tensor, lengthscale: Tensor | None = None) -> Tensor:
        """Prior variance lost between and outside the nodes, 1 - phi phi^T, like h `(..., P)`.

        It is exact and non-negative for a Markov kernel. For the others the difference is taken as
        it is, and rounding (down to -1e-6 in float32 at a node) is cut at zero.
        """
        if not self.has_local_route:
            return (1 - self.features(h, None, lengthscale).square().sum(-1)).clamp(min=0)
        delta = self._delta(h, lengthscale)
        if isinstance(delta, Tensor):
            delta = delta.unsqueeze(-2)  # (..., 1, P)
        interval = bridge.locate(self._coordinates(h), self.num_inducing, delta)
        return bridge.bridge_variance(interval, delta)

    def residual_covariance(self, h: Tensor) -> Tensor:
        """Prior covariance between rows that the nodes do not explain, `(..., P, N, N)`.

        k(h, h') - phi(h) phi(h')^T for the rows of h `(..., N, P)`, with `residual_variance` on the
        diagonal. For a Markov kernel it is that of bridges between nodes, without a difference.
        """
        rows, delta = h.mT, self._delta(h)  # (..., P, N)
        if isinstance(delta, Tensor):
            delta = delta.unsqueeze(-1)  # (P, 1)
        x = self._coordinates(rows)
        if self.has_local_route:
            interval = bridge.locate(x, self.num_inducing, delta)
            return bridge.bridge_covariance(interval, x, delta)
        distance = (x.unsqueeze(-1) - x.unsqueeze(-2)).abs()  # (..., P, N, N)
        scale = delta.unsqueeze(-1) if isinstance(delta, Tensor) else delta
        phi = self.features(h).transpose(-3, -2)  # (..., P, N, M)
        lost = self.kernel.of_scaled_distance(scale * distance) - phi @ phi.mT
        own = lost.diagonal(dim1=-2, dim2=-1)
        return lost + torch.diag_embed(own.clamp(min=0) - own)

    def node_values(self, z: Tensor, lengthscale: Tensor | None = None) -> Tensor:
        """g(U) = L_U z at the sorted nodes, `(..., P, M)`, from weights in level order."""
        delta = self._delta(z, lengthscale)
        if isinstance(delta, Tensor) and delta.dim() > 1:
            delta = delta.unsqueeze(-2)  # (..., 1, P), alike for all functions
        return self._node_values(z, delta)

    def _node_values(self, z: Tensor, delta: Delta) -> Tensor:
        """L_U z, `(..., M)`, for delta that broadcasts with z but for its last axis."""
        if isinstance(delta, Tensor):
            _, values = bridge.node_features(self.grid.level, delta)  # (..., M, L)
            return (z[..., self.unit_constants(z).columns] * values).sum(-1)
        constants = self.local_constants(z)
        if constants.node_map.can_run():
            return constants.node_map(z)
        return bridge.node_values(z, constants.levels)

    def interval_table(self, z_loc: Tensor, z_var: Tensor) -> Tensor:
        """The table of `fused.interpolated_moments`, `(..., 5, M + 1, P)`.

        It holds moments of g at the two nodes of every interval, for independent weights z
        `(..., P, M)` in level order.
        """
        both = torch.cat(torch.broadcast_tensors(z_loc, z_var), -1)
        delta = self._delta(z_loc)
        if isinstance(delta, Tensor):
            unit_map = UnitMap(delta, self.unit_constants(z_loc).pattern)
            return unit_map.units_last(both).unflatten(-2, (5, -1))
        constants = self.local_constants(z_loc)
        if constants.interval_map.can_run():
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

    def fixed_moments(self, z_loc: Tensor, z_var: Tensor) -> FixedMoments:
        """`combine_moments` as a function of h `(N, P)`, for weights that stay as they are.

        Mean and variance are `(N, F)`, without gradients. The weights are those of `node_table`.
        """
        table = self.node_table(z_loc, z_var)
        return FixedMoments(table, self.local_constants(table).intervals)

    def combine(
        self,
        h: Tensor,
        weights: Tensor,
        route: Route | None = None,
        lengthscale: Tensor | None = None,
    ) -> Tensor:
        """sum_p phi(h_p) . weights[c, p], `(..., N, C)`.

        Args:
            h: `(*b1, N, P)`.
            weights: `(*b2, C, P, M)` in level order; b1 and b2 broadcast.
            route: "dense", "local", "auto" for the faster one, or None for the activation's own.
            lengthscale: `(*b3, P)`, draws of a random one for instance, instead of the kernel's
                own; b3 broadcasts with b1 and b2.
        """
        if lengthscale is not None:
            self._check_lengthscale(lengthscale, h.shape[-1])
        if self.takes_dense_route(weights, route, lengthscale):
            return _flat(self.features(h, None, lengthscale)) @ _flat(weights).mT
        return self._between_nodes(h, weights, lengthscale).sum(-2).mT

    def _check_lengthscale(self, lengthscale: Tensor, num_units: int) -> None:
        check_floating("lengthscale", lengthscale)
        remedy = "Expand it to the units."
        check_last_dim("lengthscale", lengthscale, num_units, "one per additive unit", remedy)

    def combine_moments(
        self,
        h: Tensor,
        loc: Tensor,
        var: Tensor,
        route: Route | None = None,
        unit_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Mean and variance of sum_p sigma_p phi(h_p) . z[c, p] for independent z, `(..., N, C)`.

        mean = sum_p sigma_p phi_p loc_p and variance = sum_p sigma_p^2 phi_p^2 var_p (paper, eq.
        17). Every term of the variance is non-negative on either route.

        Args:
            h: `(*b1, N, P)`.
            loc: means of the weights, `(*b2, C, P, M)` in level order.
            var: variances of the weights, like `loc`.
            route: "dense", "local", "auto" for the faster one, or None for the activation's own.
            unit_scale: sigma, `(P,)`; by default 1.
        """
        if self.takes_dense_route(loc, route):
            phi = self.features(h)
            phi = _flat(phi if unit_scale is None else phi * unit_scale.unsqueeze(-1))
            return phi @ _flat(loc).mT, phi.square() @ _flat(var).mT
        h, table, arrange = fused.stack_batches(h, self.interval_table(loc, var))
        sigma = None if unit_scale is None else unit_scale.unsqueeze(0)
        mean, variance = fused.interpolated_moments(h.mT, table, sigma, *self._intervals(h))
        return arrange(mean), arrange(variance)

    def stacked_moments(self, h: Tensor, loc: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """`combine_moments` on the local route for E members, rows last: each `(C, E, N)`.

        Here h is `(E, P, N)`, and means and variances of the weights are `(C, E, P, M)`.
        """
        if not self.kernel.is_fixed_number:
            raise NotImplementedError(
                "Members in one pass need a kernel with one lengthscale for all units, a number "
                f"that is not learned; got {self.kernel}. Train members one by one."
            )
        table = self.interval_table(loc.flatten(1, 2), var.flatten(1, 2))
        return fused.interpolated_moments(h, table, None, *self._intervals(h))

    def member_terms(
        self, h: Tensor, loc: Tensor, *others: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Mean and variance of f of E members, `(F, E, N)` each, and the KL of each, `(E,)`.

        The arguments are the tensors of `fused.MemberTerms`. The result is None where there is no
        such operation.
        """
        if needs_plain_operations() or not self.kernel.is_fixed_number:
            return None
        constants = self.local_constants(loc)
        maps = constants.interval_map, constants.intervals
        return fused.MemberTerms.apply(h, loc, *others, *maps)

    def _intervals(self, like: Tensor) -> tuple[fused.Intervals, Tensor | None]:
        """The intervals of the units, and delta `(P,)` if they have one each."""
        delta = self._delta(like)
        if not isinstance(delta, Tensor):
            return self.local_constants(like).intervals, None
        constants = self.unit_constants(like)
        own = delta if needs_plain_operations() else delta.detach()  # else the gradient is written
        is_inside = constants.pattern.is_inside
        return fused.unit_intervals(own, constants.intervals, is_inside), delta

    def mean_field_terms(
        self, h: Tensor, loc: Tensor, *others: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Mean and variance of f, and the KL of z and mu from N(0, 1).

        The arguments are the tensors of `fused.MeanFieldTerms`. The result is None where there is
        no such operation, or where the dense route is faster.
        """
        if needs_plain_operations() or h.dim() > 2 or loc.dim() > 3:
            return None
        if self.takes_dense_route(loc):
            return None
        delta = self._delta(loc)
        if isinstance(delta, Tensor):
            _, pattern, intervals = self.unit_constants(loc)
            return fused.MeanFieldTerms.apply(h, loc, *others, delta, pattern, intervals)
        constants = self.local_constants(loc)
        maps = (constants.interval_map, constants.intervals)
        return fused.MeanFieldTerms.apply(h, loc, *others, None, *maps)

    def gaussian_bound(
        self, h: Tensor, y: Tensor, loc: Tensor, *others: Tensor, scale: float
    ) -> tuple[Tensor, Tensor] | None:
        """Expected log-likelihood of all rows with Gaussian noise, and the KL from N(0, 1).

        The first counts `scale` times. The other arguments are the tensors of
        `bound.GaussianBound`. The result is None where there is no such operation, or where the
        dense route is faster.
        """
        if needs_plain_operations() or h.dim() > 2 or not self.kernel.is_fixed_number:
            return None
        if y.requires_grad or self.takes_dense_route(loc):
            return None
        middles = self.local_constants(loc).middles
        if middles is None:
            return None
        return bound.GaussianBound.apply(h, y, loc, *others, middles, scale)

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

    def gaussian_rows(
        self,
        h: Tensor,
        y: Tensor,
        log_sigma: Tensor,
        log_noise: Tensor,
        q: natural.FixedNodes,
        linear: tuple[float, float] | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The results of `natural.GaussianRows`, where functions are known from their nodes."""
        intervals = self.local_constants(h).intervals
        return natural.GaussianRows.apply(h, y, log_sigma, log_noise, q, intervals, linear)

    def fixed_nodes(
        self, loc: Tensor, mean: Tensor, var: Tensor, shape: torch.Size
    ) -> natural.FixedNodes:
        """Independent weights in the form that `gaussian_rows` takes (`natural.fixed_nodes`)."""
        constants = self.local_constants(loc)
        slopes = constants.intervals.slopes
        return natural.fixed_nodes(loc, mean, var, shape, constants.interval_map, slopes)

    def node_matrix(self, like: Tensor) -> Tensor | None:
        """L_U with sorted nodes as rows and weights in level order as columns, `(M, M)`.

        None where it would be large, where units have lengthscales of their own, and on the dense
        route: there functions are not known from their values at two nodes.
        """
        is_local = self.has_local_route and self.route != "dense"
        if not is_local or not self.kernel.is_fixed_number or self.num_inducing > _MAX_DENSE_NODES:
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
        delta = self._delta(h)
        j, w0, w1 = self._two_nodes(h, delta)
        if isinstance(delta, Tensor):
            delta = delta.unsqueeze(-1)  # (P, 1), alike for all columns
        G = F.pad(self._node_values(scale_tril.mT, delta), (1, 1))  # (C, P, K, M + 2)
        left, right = G[..., :-1], G[..., 1:]
        a = torch.linalg.vector_norm(left, dim=-2)  # (C, P, M + 1)
        safe = torch.where(a > 0, a, 1)
        b = (left * right).sum(-2) / safe
        e = torch.linalg.vector_norm(right - left * (b / safe).unsqueeze(-2), dim=-2)
        a, b, e = _pick(a, j), _pick(b, j), _pick(e, j)
        return ((w0 * a + w1 * b).square() + (w1 * e).square()).permute(2, 0, 1)

    @torch.no_grad()
    def prior_variance_between_nodes(self, lengthscale: Tensor | None = None) -> float:
        """Least prior variance phi phi^T inside the grid, at the middle between two nodes.

        It is 1 - tanh(delta / 2) for the Laplace kernel; 1 means that the grid loses nothing. Of
        several units, it is that of the unit with the least.
        """
        like = torch.empty((), dtype=torch.float64) if lengthscale is None else lengthscale
        if self.has_local_route:
            delta = self._delta(like, lengthscale)
            return 1 - math.tanh(float(torch.as_tensor(delta).max()) / 2)
        nodes = self.grid.sorted_points.to(like.device)
        middles = (nodes[:-1] + nodes[1:]) / 2 if len(nodes) > 1 else nodes
        phi = self.features(middles.unsqueeze(-1), None, lengthscale)
        return float(phi.square().sum(-1).min())

    def takes_dense_route(
        self, weights: Tensor, route: Route | None = None, lengthscale: Tensor | None = None
    ) -> bool:
        """Whether sums over these weights, `(..., C, P, M)`, take the dense route.

        With a batch of lengthscales there is no phi that all of its members could share.
        """
        if route is None:
            route = self.route
        else:
            check_choice("route", route, _ROUTES)
        if route != "auto":
            return route == "dense"
        if lengthscale is not None and lengthscale.dim() > 1:
            return not self.has_local_route
        num_outputs = math.prod(weights.shape[:-2])
        return not self.has_local_route or dense_is_faster(self.num_inducing, num_outputs)

    def prepare(self, like: Tensor) -> None:
        """Compute the constants for tensors like this one, for instance ahead of compilation."""
        if not self.has_local_route:
            return
        if self.kernel.is_fixed_number:
            self.local_constants(like)
        else:
            self.unit_constants(like)

    def local_constants(self, like: Tensor) -> LocalConstants:
        """The constants of the local route in the dtype and on the device of `like`."""
        self._check_is_markov()
        if not self.kernel.is_fixed_number:
            raise ValueError(
                "`kernel` must have one lengthscale for all units, a number that is not learned, "
                f"for constants that depend on it; got {self.kernel}."
            )
        return self._cached("local", like, lambda: self._make_constants(like.dtype, like.device))

    def unit_constants(self, like: Tensor) -> UnitConstants:
        """The constants of the local route that all lengthscales share, likewise."""
        self._check_is_markov()
        return self._cached("units", like, lambda: self._make_patterns(like.dtype, like.device))

    def _check_is_markov(self) -> None:
        if not self.has_local_route:
            raise ValueError(
                f"`kernel` must be Markov for the local route; got {type(self.kernel).__name__}. "
                'Use LaplaceKernel, or route="dense".'
            )

    def _cached(self, name: str, like: Tensor, make: Callable[[], Any]) -> Any:
        key = (name, like.dtype, like.device)
        if key not in self._cache:
            # Constants made in inference mode could not train; those in float64 are on the CPU.
            with outside_transforms(), torch.inference_mode(False), torch.device("cpu"):
                self._cache[key] = make()
        return self._cache[key]

    def _make_patterns(self, dtype: torch.dtype, device: torch.device) -> UnitConstants:
        level, (low, _) = self.grid.level, self.grid.bounds
        columns, _ = bridge.node_features(level, torch.ones((), dtype=torch.float64))
        pattern = node_pattern(level, dtype, device)
        of_grid = (self.num_inducing, low, self.grid.spacing, 1.0, dtype, device)
        return UnitConstants(columns.to(device), pattern, fused.intervals_of_grid(*of_grid))

    def _make_constants(self, dtype: torch.dtype, device: torch.device) -> LocalConstants:
        delta = self._fixed_delta
        assert delta is not None
        exact = _exact_constants(self.grid.level, delta)
        dtypes = [dtype if part.is_floating_point() else part.dtype for part in exact]
        is_meta = device.type == "meta"  # it has no sparse tensors, and dense ones take no memory
        if is_meta:
            exact = [torch.empty(part.shape, device=device) for part in exact]
        cast = [part.to(device, own) for part, own in zip(exact, dtypes, strict=True)]
        M, low, spacing = self.num_inducing, self.grid.bounds[0], self.grid.spacing
        is_dense = is_meta or M <= _MAX_DENSE_NODES
        node_map, interval_map, moment_map = (fused.LinearMap(A, is_dense) for A in cast[7:10])
        middles = None
        if len(cast) > 10:
            is_dense = is_meta or M <= _MAX_DENSE_MIDDLES
            middles = bound.middles_of_grid(cast[10], is_dense, low, spacing, delta)
        return LocalConstants(
            LevelConstants(*cast[:2]),
            bridge.FeatureConstants(*cast[2:7]),
            fused.intervals_of_grid(M, low, spacing, delta, dtype, device),
            node_map,
            interval_map,
            moment_map,
            middles,
        )

    def _between_nodes(
        self, h: Tensor, weights: Tensor, lengthscale: Tensor | None = None
    ) -> Tensor:
        """phi(h_p) . weights[c, p] through the two nodes around h_p, `(..., C, P, N)`."""
        j, w0, w1 = self._two_nodes(h, self._delta(h, lengthscale))
        table = F.pad(self.node_values(weights, lengthscale), (1, 1))  # (*b2, C, P, M + 2)
        return w0 * _pick(table, j) + w1 * _pick(table, j + 1)

    def _two_nodes(self, h: Tensor, delta: Delta) -> tuple[Tensor, Tensor, Tensor]:
        """The interval of each input and the weights of its two nodes, `(..., 1, P, N)` each."""
        x = self._coordinates(h).mT.unsqueeze(-3)
        if isinstance(delta, Tensor):
            delta = delta.unsqueeze(-2).unsqueeze(-1)  # (..., 1, P, 1)
        interval = bridge.locate(x, self.num_inducing, delta)
        return interval.j, *bridge.bridge_weights(interval, delta)

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
