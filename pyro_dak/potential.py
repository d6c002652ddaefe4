"""The log posterior density as Hamiltonian samplers want it: one vector, whitened, features cached.

The position is one vector of all weights and, where they are sampled, of the scales of units and
noise in unconstrained coordinates. Weights are whitened by the curvature of the log density near
its mode: the posterior of a regression becomes a standard normal, that of a classifier nearly one,
and trajectories stay short. It is a change of coordinates, so that samples do not depend on it.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, biject_to, constraints

from pyro_dak.densities import noise_scale, with_noise
from pyro_dak.likelihoods import GaussianLikelihood
from pyro_dak.model import DAK

__all__ = ["Target"]

# From weights (F, K), already times the ratios of their columns, and the noise to log p(y | f).
_LogLikFn = Callable[[Tensor, Tensor | None], Tensor]
_LOG_2PI = math.log(2 * math.pi)


class Target:
    """-log p(y, w, scales) over one position vector, with the Jacobian of its coordinates.

    f = Phi w with the cached rows Phi of `AdditiveLayer.design`, one matrix product; for Gaussian
    noise and N > K the rows enter through Phi = Q R alone, and the product is K x K.

    Args:
        model: the model.
        h: unit inputs, `(N, P)`, float64.
        y: targets, as `check_targets` returns them.
        extra_priors: of `noise_scale` and `unit_scale` where these are sampled, with event shapes.
        whiten: whether weights are whitened.
    """

    def __init__(
        self,
        model: DAK,
        h: Tensor,
        y: Tensor,
        extra_priors: Mapping[str, Distribution] | None = None,
        whiten: bool = True,
    ):
        self.model, self.y = model, y
        self.num_evaluations = 0
        with torch.no_grad():
            self.design = model.layer.design(h)  # (N, K)
            self._unit_scale = model.unit_scale.double()
        self._noise = noise_scale(model.likelihood)
        self._likelihood = with_noise(model.likelihood, self._noise)
        self._extra_priors = dict(extra_priors or {})
        self._weight_priors = self._site_priors("mu", "linear", "z")
        self._check_supports()
        self._normal_prior = self._flat_normal_prior()
        self._scales = _Scales(
            self._site_priors("global_shrinkage", "shrinkage") | self._extra_priors,
            self._current_scales(),
        )
        self._log_lik_fn = self._reduced_log_lik() or self._log_lik
        F, K = model.num_functions, self.design.shape[-1]
        self._loc = self.design.new_zeros(F, K)
        self._root = torch.eye(K, dtype=h.dtype, device=h.device).expand(F, K, K)
        if whiten:
            self._loc, self._root = self._whitening()

    @property
    def num_weights(self) -> int:
        """F K, the length of the leading part of the position."""
        return self._loc.numel()

    def __call__(self, params: Mapping[str, Tensor]) -> Tensor:
        """The potential at `params["position"]`, a scalar."""
        self.num_evaluations += 1
        position = params["position"]
        weights = self._colour(position[: self.num_weights].view(self._loc.shape))
        scales, log_det = self._scales.constrain(position[self.num_weights :])
        return -(self._log_joint(weights, scales, self._log_lik_fn) + log_det)

    @torch.no_grad()
    def initial_position(self, generator: torch.Generator, max_tries: int = 100) -> Tensor:
        """A start with finite density: uniform within two deviations of the mode."""
        start = torch.cat([self._loc.new_zeros(self.num_weights), self._scales.start.to(self._loc)])
        spread = torch.ones_like(start)
        spread[: self.num_weights] = 2.0
        for _ in range(max_tries):
            uniform = torch.rand(len(start), generator=generator, dtype=torch.float64)
            position = start + spread * (2 * uniform.to(start.device) - 1)
            if bool(torch.isfinite(self({"position": position}))):
                return position
        raise ValueError(
            f"The log density is not finite at {max_tries} starts; look at the priors, at `y`, and "
            "at the scale of the features."
        )

    @torch.no_grad()
    def sites(self, positions: Tensor) -> dict[str, Tensor]:
        """Sites of the model and the sampled scales from positions `(S, D)`, each `(S, *event)`."""
        e = positions[:, : self.num_weights].unflatten(-1, self._loc.shape)
        split = self.model.layer.split(self._colour(e))
        sites = {"mu": split.mu, "linear": split.linear, "z": split.z}
        scales, _ = self._scales.constrain(positions[:, self.num_weights :])
        return {name: value for name, value in sites.items() if value is not None} | scales

    @torch.no_grad()
    def log_joints(self, sites: Mapping[str, Tensor]) -> Tensor:
        """log p(y, w, scales) of draws `(S, *event)`, without any Jacobian, `(S,)`."""
        values = []
        for s in range(len(sites["mu"])):
            parts = [sites[n][s].reshape(len(self._loc), -1) for n in self._weight_priors]
            scales = {name: sites[name][s] for name in self._scales.priors}
            values.append(self._log_joint(torch.cat(parts, -1), scales, self._log_lik_fn))
        return torch.stack(values)

    def _colour(self, e: Tensor) -> Tensor:
        """w = loc + root e, `(..., F, K)`."""
        return self._loc + (self._root @ e.unsqueeze(-1)).squeeze(-1)

    def _log_joint(
        self, weights: Tensor, scales: Mapping[str, Tensor], log_lik_fn: _LogLikFn
    ) -> Tensor:
        ratio = self._column_ratio(scales)
        scaled = weights if ratio is None else weights * ratio
        total = self._log_prior(weights) + log_lik_fn(scaled, scales.get("noise_scale"))
        for name, value in scales.items():
            prior = self._extra_priors.get(name)
            if prior is None:
                prior = self.model.conditional_prior(name, scales, self.design)
            total = total + prior.log_prob(value)
        return total

    def _column_ratio(self, scales: Mapping[str, Tensor]) -> Tensor | None:
        """Factor of each column of the design, `(K,)`: the sampled scales over the model's."""
        if "unit_scale" not in scales and "shrinkage" not in scales:
            return None
        ratio = scales.get("unit_scale", self._unit_scale) / self._unit_scale
        ratio = ratio * scales.get("shrinkage", 1.0)
        parts = [torch.ones_like(ratio[:1]), ratio.repeat_interleave(self.model.num_inducing)]
        if self.model.layer.linear_term:
            parts.insert(1, ratio)
        return torch.cat(parts)

    def _log_prior(self, weights: Tensor) -> Tensor:
        if self._normal_prior is not None:
            loc, scale, constant = self._normal_prior
            return constant - 0.5 * ((weights - loc) / scale).square().sum()
        shapes = [self.model.site_shapes[name] for name in self._weight_priors]
        parts = weights.split([shape.numel() // shape[0] for shape in shapes], -1)
        triples = zip(self._weight_priors.values(), parts, shapes, strict=True)
        return torch.stack([prior.log_prob(w.reshape(shape)) for prior, w, shape in triples]).sum()

    def _log_lik(self, weights: Tensor, noise: Tensor | None) -> Tensor:
        return self._row_log_lik(self.design @ weights.mT, noise).sum()

    def _row_log_lik(self, f: Tensor, noise: Tensor | None = None) -> Tensor:
        likelihood: Any = self._likelihood
        if noise is not None:
            likelihood.noise.log_scale = noise.log()
        return likelihood.distribution(f).log_prob(self.y)

    @torch.no_grad()
    def _reduced_log_lik(self) -> _LogLikFn | None:
        """The Gaussian log-likelihood through |y - Phi w|^2 = |Q^T y - R w|^2 + |y - Q Q^T y|^2."""
        if not isinstance(self.model.likelihood, GaussianLikelihood):
            return None
        N, K = self.design.shape
        R, c, rest = self.design, self.y, torch.zeros_like(self.y[0])
        if N > K:
            Q, R = torch.linalg.qr(self.design)
            c = Q.mT @ self.y  # (K, C)
            rest = (self.y - Q @ c).square().sum(0)
        own_noise = self._noise
        assert own_noise is not None

        def log_lik_fn(weights: Tensor, noise: Tensor | None) -> Tensor:
            scale = (own_noise if noise is None else noise).expand(len(rest))
            squares = (c - R @ weights.mT).square().sum(0) + rest  # (C,)
            log_norm = N * (scale.log() + 0.5 * _LOG_2PI)
            return -(0.5 * squares / scale.square() + log_norm).sum()

        return log_lik_fn

    def _site_priors(self, *names: str) -> dict[str, Any]:
        present = [name for name in names if name in self.model.site_shapes]
        return {name: self.model.prior_distribution(name, self.design) for name in present}

    def _check_supports(self) -> None:
        for name, prior in self._weight_priors.items():
            support = prior.support
            while isinstance(support, constraints.independent):
                support = support.base_constraint
            if support is not constraints.real:
                raise NotImplementedError(
                    f"`prior[{name!r}]` must have the real line as its support; got {support}. "
                    "Give `model.observe` to Pyro's NUTS instead."
                )

    def _current_scales(self) -> dict[str, Tensor]:
        current = {"unit_scale": self._unit_scale, "noise_scale": self._noise}
        return {name: value for name, value in current.items() if value is not None}

    def _flat_normal_prior(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Means and scales `(F, K)`, and the normalising constant, if all priors are normal."""
        locs: list[Tensor] = []
        scales: list[Tensor] = []
        for name in self._weight_priors:
            shape, parameters = self.model.site_shapes[name], self.model.normal_prior(name)
            if parameters is None:
                return None
            for value, parts in zip(parameters, (locs, scales), strict=True):
                part = torch.as_tensor(value, dtype=torch.float64, device=self.design.device)
                parts.append(part.detach().expand(shape).reshape(shape[0], -1))
        loc, scale = torch.cat(locs, -1), torch.cat(scales, -1)
        return loc, scale, -(scale.log() + 0.5 * _LOG_2PI).sum()

    def _whitening(self, max_steps: int = 30, tolerance: float = 1e-6) -> tuple[Tensor, Tensor]:
        """Mode and inverse root of the curvature of -log p(y, w), by damped Newton steps.

        The curvature is block-diagonal over the functions, A = diag(1 / Var w) + Phi^T D Phi with
        D = -d^2 log p(y_n | f_n) / d f_n^2. With A = L L^T the root is L^{-T}.
        """
        weights = self._loc
        value, slope, factor = self._newton_terms(weights)
        for _ in range(max_steps):
            step = torch.cholesky_solve(slope.unsqueeze(-1), factor).squeeze(-1)
            if float((step * slope).sum()) < tolerance:
                break
            for halving in range(20):
                proposal = weights - step / 2**halving
                new = self._newton_terms(proposal)
                if float(new[0]) < float(value):
                    weights, (value, slope, factor) = proposal, new
                    break
            else:
                break
        eye = torch.eye(weights.shape[-1], dtype=weights.dtype, device=weights.device)
        root = torch.linalg.solve_triangular(factor.mT, eye.expand_as(factor), upper=True)
        return weights, root

    def _newton_terms(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-log p(y, w), its gradient `(F, K)`, and Cholesky factors of the curvature."""
        with torch.enable_grad():
            w = weights.detach().requires_grad_()
            log_prior = self._log_prior(w)
            f = (self.design @ w.mT).detach().requires_grad_()
            rows = self._row_log_lik(f)
            (prior_slope,) = torch.autograd.grad(log_prior, w)
            (row_slope,) = torch.autograd.grad(rows.sum(), f, create_graph=True)
            columns = [
                torch.autograd.grad(row_slope[:, c].sum(), f, retain_graph=True)[0][:, c]
                for c in range(f.shape[-1])
            ]
        D = -torch.stack(columns).clamp(max=0)  # (F, N)
        A = torch.stack([self.design.mT @ (d.unsqueeze(-1) * self.design) for d in D])
        A = A + torch.diag_embed(self._prior_precision())
        slope = -(prior_slope + row_slope.detach().mT @ self.design)
        value = -(log_prior + rows.sum()).detach()
        return value, slope, torch.linalg.cholesky(A)

    def _prior_precision(self) -> Tensor:
        """1 / Var of the weights `(F, K)`, one where the variance is infinite."""
        parts = []
        for name, prior in self._weight_priors.items():
            shape = self.model.site_shapes[name]
            parts.append(prior.variance.double().expand(shape).reshape(shape[0], -1))
        var = torch.cat(parts, -1)
        return torch.where(torch.isfinite(var), 1 / var, 1.0)


class _Scales:
    """Scales that are sampled, in unconstrained coordinates, one after the other.

    Args:
        priors: by name, all dimensions events.
        current: values of the model to start at; others start where their coordinate is zero.
    """

    def __init__(self, priors: Mapping[str, Distribution], current: Mapping[str, Tensor]):
        self.priors = dict(priors)
        self._transforms = {name: biject_to(prior.support) for name, prior in priors.items()}
        self._shapes = {
            name: self._transforms[name].inverse_shape(prior.event_shape)
            for name, prior in priors.items()
        }
        starts = []
        for name, shape in self._shapes.items():
            start = torch.zeros(shape, dtype=torch.float64)
            if name in current:
                value = self._transforms[name].inv(current[name].expand(priors[name].event_shape))
                start = torch.where(torch.isfinite(value), value, 0.0)
            starts.append(start.flatten())
        self.start = torch.cat(starts) if starts else torch.zeros(0, dtype=torch.float64)

    def constrain(self, flat: Tensor) -> tuple[dict[str, Tensor], Tensor | float]:
        """Values by name and the log determinant of the map, from coordinates `(..., D)`."""
        values: dict[str, Tensor] = {}
        log_det: Tensor | float = 0.0
        sizes = [shape.numel() for shape in self._shapes.values()]
        for (name, shape), part in zip(self._shapes.items(), flat.split(sizes, -1), strict=True):
            coordinates = part.reshape(flat.shape[:-1] + shape)
            transform = self._transforms[name]
            values[name] = transform(coordinates)
            log_det = log_det + transform.log_abs_det_jacobian(coordinates, values[name])
        return values, log_det
