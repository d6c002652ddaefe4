"""Moments of the additive layer in operations that other runtimes have, for weights that stay.

Everything here works in coordinates x = (h - first node) / spacing, in which the sorted nodes of
the grid lie at 0, 1, ..., M - 1. The modules hold constants only, computed in float64 and then
cast, and no operation looks at values to decide what to do, so that a module can be traced once and
run elsewhere. They are held to `AdditiveLayer` by one test.

**Local.** Where the kernel is Markov and units are independent, mean and variance of a unit between
two nodes follow from five numbers (see `bridge`): with the weights w0 and w1 of the nodes,

    mean = w0 m0 + w1 m1,   variance = w0^2 v0 + 2 w0 w1 c + w1^2 v1.

Outside the nodes both weights fall by exp(-distance / lengthscale).

**Dense.** Else phi(h) is written out, `(N, P, M)`. For a Markov kernel it is H(h) L_U, where H has
the weights of all nodes: w(1 - |x - m|) for node m, zero where this is further than a spacing away.
Nothing cancels, on grids of any spacing.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from pyro_dak.additive.activation import KernelActivation
from pyro_dak.additive.bridge import node_features
from pyro_dak.additive.factor import as_tensor, dense_inverse_factor
from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.additive.layer import AdditiveLayer

__all__ = [
    "DenseMoments",
    "KernelFeatures",
    "LocalMoments",
    "NodeWeights",
    "PortableMoments",
    "WeightMoments",
    "grid_coordinates",
]

# Longer series of sinh are not summed up.
_MAX_TERMS = 12


class WeightMoments(NamedTuple):
    """Gaussian weights of F functions, in the order of `AdditiveLayer.design`: mu, linear, z.

    One of `scale` and `root` is given. The weights of a function are independent, or have the
    covariance R R^T. All that there is more of is added to that.

    Attributes:
        loc: means, `(F, K)`.
        scale: standard deviations of independent weights, `(F, K)`.
        unit_root: roots of the covariances of z in each unit, `(F, P, M, R)`, in the place of the
            last P M columns of `scale`.
        root: roots R of the covariances, `(F, K, R)`, or `(1, K, R)` if functions share one.
        shared: columns that functions have in common, `(R, F, K)`.
    """

    loc: Tensor
    scale: Tensor | None = None
    unit_root: Tensor | None = None
    root: Tensor | None = None
    shared: Tensor | None = None


def grid_coordinates(layer: AdditiveLayer) -> tuple[float, float]:
    """Gain and shift of the map from h to the coordinates of this module."""
    grid = layer.activation.grid
    return 1 / grid.spacing, -grid.bounds[0] / grid.spacing - 1


class NodeWeights(nn.Module):
    """The weights of nodes at coordinates x `(N, P)`, of a Markov kernel.

    w(a) = sinh(a delta) / sinh(delta), by its series: a sum of terms of one sign. On grids that are
    coarse against the lengthscale it is exp((a - 1) delta) (1 - exp(-2 a delta)) /
    (1 - exp(-2 delta)), which cancels on fine ones only.

    Args:
        num_nodes: M.
        delta: the spacing in lengthscales, a scalar or one for each unit `(P,)`, float64.
        dtype: of what it returns.
    """

    delta: Tensor
    coefficients: Tensor
    inverse: Tensor

    def __init__(self, num_nodes: int, delta: Tensor, dtype: torch.dtype):
        super().__init__()
        self.num_nodes = num_nodes
        series = _series_of_sinh(delta, torch.finfo(dtype).eps)
        self.num_terms = len(series)
        self.register_buffer("coefficients", series.to(dtype))
        self.register_buffer("delta", delta.to(dtype))
        self.register_buffer("inverse", -torch.expm1(-2 * delta).reciprocal().to(dtype))

    def nearest(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The place between the outer nodes next to x, and exp(-distance / lengthscale) to it."""
        near = x.clamp(0, self.num_nodes - 1)
        return near, ((x - near).abs() * -self.delta).exp()

    def ratio(self, a: Tensor, per_node: bool = False) -> Tensor:
        """w(a) for a in [0, 1], `(N, P)`, or `(N, P, M)` with `per_node`."""

        def fit(constant: Tensor) -> Tensor:
            return constant.unsqueeze(-1) if per_node and constant.dim() > 0 else constant

        if self.num_terms == 0:
            delta = fit(self.delta)
            return ((a - 1) * delta).exp() * (1 - (-2 * a * delta).exp()) * fit(self.inverse)
        w = fit(self.coefficients[-1])
        squares = a * a
        for k in range(self.num_terms - 2, -1, -1):
            w = squares * w + fit(self.coefficients[k])
        return a * w

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The left node, the weights of it and of the next one, and the factor that is in both."""
        near, decay = self.nearest(x)
        left = near.floor()
        a = near - left
        return left, self.ratio(1 - a) * decay, self.ratio(a) * decay, decay

    def lost(self, w0: Tensor, w1: Tensor, decay: Tensor) -> Tensor:
        """1 - phi phi^T: inside the grid 2 sinh(delta) w0 w1, outside 1 - exp(-2 distance)."""
        return 1 - decay * decay + 2 * self.delta.sinh() * w0 * w1


def _series_of_sinh(delta: Tensor, eps: float) -> Tensor:
    """c_k with sinh(a delta) / sinh(delta) = sum_k c_k a^(2 k + 1), `(n, ...)`; none if n is large.

    c_k = delta^(2 k + 1) / ((2 k + 1)! sinh(delta)), as many as count beside the first.
    """
    terms = [delta / delta.sinh()]
    for k in range(1, _MAX_TERMS + 1):
        term = terms[-1] * delta.square() / (2 * k * (2 * k + 1))
        if bool((term < eps / 4 * terms[0]).all()):
            return torch.stack(terms)
        terms.append(term)
    return delta.new_zeros(0, *delta.shape)


def _node_factor(activation: KernelActivation, delta: Tensor) -> Tensor:
    """L_U with sorted rows, and columns in level order, `(..., M, M)`, dense."""
    columns, values = node_features(activation.grid.level, delta)  # (M, L), (..., M, L)
    factor = values.new_zeros(*values.shape[:-1], activation.num_inducing)
    return factor.scatter(-1, columns.expand_as(values), values)


class KernelFeatures(nn.Module):
    """phi(h), `(N, P, M)` in level order, at coordinates x `(N, P)`.

    For a kernel that is not Markov it is k(h, U) L_U^{-T}, in float64 as in `KernelActivation`.
    """

    factor: Tensor
    nodes: Tensor
    delta: Tensor
    weights: NodeWeights | None

    def __init__(self, activation: KernelActivation, dtype: torch.dtype):
        super().__init__()
        self.kernel, self.dtype, self.weights = activation.kernel, dtype, None
        delta = as_tensor(activation.delta).detach().double().cpu()
        if activation.has_local_route:
            self.weights = NodeWeights(activation.num_inducing, delta, dtype)
            nodes = torch.arange(activation.num_inducing).to(dtype)
            factor = _node_factor(activation, delta).to(dtype)
        else:
            nodes = (activation.grid.position - 1).double()
            scales = activation.grid.spacing / delta
            factor = dense_inverse_factor(activation.grid, self.kernel, activation.jitter, scales)
        self.register_buffer("nodes", nodes)
        self.register_buffer("factor", factor)
        self.register_buffer("delta", delta)

    def forward(self, x: Tensor) -> Tensor:
        if self.weights is not None:
            near, decay = self.weights.nearest(x)
            distance = (near.unsqueeze(-1) - self.nodes).abs()
            k = self.weights.ratio((1 - distance).relu(), per_node=True) * decay.unsqueeze(-1)
        else:
            delta = self.delta.unsqueeze(-1) if self.delta.dim() > 0 else self.delta
            k = self.kernel.of_scaled_distance(
                (x.double().unsqueeze(-1) - self.nodes).abs() * delta
            )
        if self.factor.dim() == 2:
            return (k @ self.factor).to(self.dtype)
        return (k.transpose(0, 1) @ self.factor).transpose(0, 1).to(self.dtype)


class PortableMoments(nn.Module):
    """q(f) at coordinates x `(N, P)`: for Gaussian weights that stay as they are.

    The base of `LocalMoments` and `DenseMoments`, of which `of` takes the one that suits.

    Args:
        layer: the layer, whose unit scales and linear term count.
        weights: the weights.
        lost: variances in the prior of the weights z, `(F, P)`, to add what the grid loses of them;
            None to leave it out.
    """

    lost_var: Tensor | None

    def __init__(self, layer: AdditiveLayer, lost: Tensor | None):
        super().__init__()
        sigma = layer.unit_scale.detach()
        self.dtype, self.num_units, self.num_functions = sigma.dtype, *_sizes(layer)
        self.has_linear_term = layer.linear_term
        low, high = layer.activation.grid.bounds
        spacing = layer.activation.grid.spacing
        # r(h) = (h - middle) 2 / (high - low), with h = low + (x + 1) spacing.
        self.linear_gain = 2 * spacing / (high - low)
        self.linear_shift = self.linear_gain - 1
        lost_var = None if lost is None else lost.double().cpu() * sigma.double().cpu().square()
        self.register_buffer("lost_var", None if lost_var is None else lost_var.mT.to(self.dtype))

    def linear_inputs(self, x: Tensor) -> Tensor:
        """r(h), like x."""
        return x * self.linear_gain + self.linear_shift

    def _keep(self, **constants: Tensor) -> None:
        for name, value in constants.items():
            self.register_buffer(name, value.to(self.dtype).contiguous())

    @property
    def num_shared(self) -> int:
        """How many rows the root of q(f) has, 0 without one."""
        return 0

    @staticmethod
    def of(
        layer: AdditiveLayer, weights: WeightMoments, lost: Tensor | None = None
    ) -> "PortableMoments":
        """The local form where there is one and functions are few against nodes, else the dense.

        A row and unit cost about 15 F in the local form and 10 M in the dense one, in ns.
        """
        F, M = layer.num_functions, layer.activation.num_inducing
        has_local_form = layer.activation.has_local_route and weights.root is None
        if has_local_form and weights.shared is None and 15 * F <= 10 * M:
            return LocalMoments(layer, weights, lost)
        return DenseMoments(layer, weights, lost)


def _sizes(layer: AdditiveLayer) -> tuple[int, int]:
    return layer.num_units, layer.num_functions


def _with_unit_scales(layer: AdditiveLayer, flat: Tensor) -> Tensor:
    """Weights `(..., K)` times the scales of their units, in float64 on the CPU."""
    sigma = layer.unit_scale.detach().double().cpu()
    linear = [sigma] if layer.linear_term else []
    by_node = sigma.repeat_interleave(layer.activation.num_inducing)
    return flat.detach().double().cpu() * torch.cat([sigma.new_ones(1), *linear, by_node])


class LocalMoments(PortableMoments):
    """The local form, for a Markov kernel and independent units."""

    mean0: Tensor
    mean1: Tensor
    var0: Tensor
    var1: Tensor
    twice_cov: Tensor
    mu: Tensor
    mu_var: Tensor
    linear: Tensor
    linear_var: Tensor

    def __init__(self, layer: AdditiveLayer, weights: WeightMoments, lost: Tensor | None):
        super().__init__(layer, lost)
        activation, (P, F), M = layer.activation, _sizes(layer), layer.activation.num_inducing
        delta = as_tensor(activation.delta).detach().double().cpu()
        self.weights = NodeWeights(M, delta, self.dtype)
        L_U = _node_factor(activation, delta)  # (M, M) or (P, M, M)
        loc = _with_unit_scales(layer, weights.loc)
        assert weights.scale is not None
        var = _with_unit_scales(layer, weights.scale).square()
        z_loc, z_var = (part[:, -P * M :].view(F, P, M, 1) for part in (loc, var))
        mean = (L_U @ z_loc).squeeze(-1)  # (F, P, M)
        if weights.unit_root is None:
            node_var = (L_U.square() @ z_var).squeeze(-1)
            covariance = ((L_U[..., :-1, :] * L_U[..., 1:, :]) @ z_var).squeeze(-1)
        else:
            sigma = layer.unit_scale.detach().double().cpu()[:, None, None]
            G = L_U @ (sigma * weights.unit_root.detach().double().cpu())  # (F, P, M, R)
            node_var = G.square().sum(-1)
            covariance = (G[..., :-1, :] * G[..., 1:, :]).sum(-1)
        tables = [mean, node_var, 2 * covariance]
        left = [torch.nn.functional.pad(t, (0, M - t.shape[-1])) for t in tables]
        right = [torch.nn.functional.pad(t[..., 1:], (0, 1)) for t in tables[:2]]
        names = ("mean0", "var0", "twice_cov", "mean1", "var1")
        self._keep(**{n: t.flatten(0, 1).mT for n, t in zip(names, left + right, strict=True)})
        self._keep(mu=loc[:, 0], mu_var=var[:, 0])
        if layer.linear_term:
            self._keep(linear=loc[:, 1 : 1 + P].mT, linear_var=var[:, 1 : 1 + P].mT)

    def forward(self, x: Tensor) -> FunctionMoments:
        F, P = self.num_functions, self.num_units
        left, w0, w1, decay = self.weights(x)
        # A NaN has no place; it shows in the weights.
        place = left.to(torch.int64).clamp(0, self.weights.num_nodes - 1)
        lost = None if self.lost_var is None else self.weights.lost(w0, w1, decay) @ self.lost_var
        if F > 1:
            place, w0, w1 = (part.repeat(1, F) for part in (place, w0, w1))

        def at(table: Tensor) -> Tensor:
            return torch.gather(table, 0, place)

        mean = w0 * at(self.mean0) + w1 * at(self.mean1)
        var = w0 * (w0 * at(self.var0) + w1 * at(self.twice_cov)) + w1 * w1 * at(self.var1)
        if F > 1:
            mean, var = (part.reshape(-1, F, P).sum(-1) for part in (mean, var))
        else:
            mean, var = (part.sum(-1, keepdim=True) for part in (mean, var))
        mean, var = mean + self.mu, var + self.mu_var
        if self.has_linear_term:
            r = self.linear_inputs(x)
            mean, var = mean + r @ self.linear, var + r.square() @ self.linear_var
        return FunctionMoments(mean, var if lost is None else var + lost)


class DenseMoments(PortableMoments):
    """The dense form, for any kernel and any Gaussian weights."""

    loc: Tensor
    var: Tensor
    root: Tensor
    first_row: Tensor
    shared: Tensor

    def __init__(self, layer: AdditiveLayer, weights: WeightMoments, lost: Tensor | None):
        super().__init__(layer, lost)
        self.features = KernelFeatures(layer.activation, self.dtype)
        self._keep(loc=_with_unit_scales(layer, weights.loc))
        if weights.unit_root is not None:
            weights = _with_block_root(layer, weights)
        self.has_root, self.has_shared = weights.root is not None, weights.shared is not None
        if weights.root is not None:
            root = _with_unit_scales(layer, weights.root.mT).mT  # (F, K, R)
            self._keep(root=root[:, 1:], first_row=root[:, :1])
        else:
            assert weights.scale is not None
            self._keep(var=_with_unit_scales(layer, weights.scale).square())
        if weights.shared is not None:
            self._keep(shared=_with_unit_scales(layer, weights.shared))

    @property
    def num_shared(self) -> int:
        """How many rows the root of q(f) has, 0 without one."""
        return len(self.shared) if self.has_shared else 0

    def forward(self, x: Tensor) -> FunctionMoments:
        phi = self.features(x)
        lost = None if self.lost_var is None else self._lost(x, phi) @ self.lost_var
        design = phi.flatten(-2)
        if self.has_linear_term:
            design = torch.cat([self.linear_inputs(x), design], -1)
        mean = torch.addmm(self.loc[:, 0], design, self.loc[:, 1:].mT)
        if self.has_root:
            var = (design @ self.root + self.first_row).square().sum(-1).mT  # (N, F) or (N, 1)
            var = var.expand_as(mean)
        else:
            var = torch.addmm(self.var[:, 0], design.square(), self.var[:, 1:].mT)
        root = None
        if self.has_shared:
            root = design @ self.shared[..., 1:].mT + self.shared[..., :1].mT  # (R, N, F)
            var = var + root.square().sum(0)
        return FunctionMoments(mean, var if lost is None else var + lost, root)

    def _lost(self, x: Tensor, phi: Tensor) -> Tensor:
        weights = self.features.weights
        if weights is None:
            return (1 - phi.square().sum(-1)).clamp(min=0)
        _, w0, w1, decay = weights(x)
        return weights.lost(w0, w1, decay)


def _with_block_root(layer: AdditiveLayer, weights: WeightMoments) -> WeightMoments:
    """The same weights with one root for all of a function, `(F, K, R)`."""
    assert weights.scale is not None
    assert weights.unit_root is not None
    scale, blocks = weights.scale.detach(), weights.unit_root.detach()
    first = scale[:, : -layer.num_units * layer.activation.num_inducing]
    roots = [
        torch.block_diag(torch.diag(own), *units) for own, units in zip(first, blocks, strict=True)
    ]
    return WeightMoments(weights.loc, root=torch.stack(roots), shared=weights.shared)
