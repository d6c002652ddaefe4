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
from torch.distributions.transforms import ExpTransform, IndependentTransform, Transform

from pyro_dak.inference.densities import noise_scale, with_noise
from pyro_dak.model.dak import DAK
from pyro_dak.model.likelihoods import CategoricalLikelihood, GaussianLikelihood

__all__ = ["Target"]

# From weights (F, K), already times the ratios of their columns, and the noise to log p(y | f).
_LogLikFn = Callable[[Tensor, Tensor | None], Tensor]
_LOG_2PI = math.log(2 * math.pi)
_MAX_JOINT_WEIGHTS = 3000


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
        self._scales = Scales(
            self._site_priors("global_shrinkage", "shrinkage") | self._extra_priors,
            self._current_scales(),
        )
        self._reduced = self._reduce()
        self._log_lik_fn = self._log_lik if self._reduced is None else self._reduced_log_lik
        F, K = model.num_functions, self.design.shape[-1]
        self._loc = self.design.new_zeros(F, K)
        self._root = torch.eye(K, dtype=h.dtype, device=h.device).expand(F, K, K)
        if whiten:
            self._loc, self._root = find_whitening(
                self.design, self._prior_precision(), self._log_prior, self._row_log_lik
            )
        self._quadratic = self._quadratic_form()

    @property
    def num_weights(self) -> int:
        """F K, the length of the leading part of the position."""
        return self._loc.numel()

    def __call__(self, params: Mapping[str, Tensor]) -> Tensor:
        """The potential at `params["position"]`, a scalar."""
        self.num_evaluations += 1
        position = params["position"]
        if self._quadratic is not None:
            A, b, constant = self._quadratic
            e = position.view(*self._loc.shape, 1)
            return constant + 0.5 * (A @ e - b).square().sum()
        weights = self._colour(position[: self.num_weights])
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
        split = self.model.layer.split(self._colour(positions[:, : self.num_weights]))
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
        """w = loc + root e, `(..., F, K)`, from the flat `(..., F K)`."""
        groups = e.unflatten(-1, self._root.shape[:-1]).unsqueeze(-1)
        return self._loc + (self._root @ groups).reshape(*e.shape[:-1], *self._loc.shape)

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
        f = self.design @ weights.mT
        if isinstance(self._likelihood, CategoricalLikelihood):  # spares half of the time
            return -torch.nn.functional.cross_entropy(f, self.y, reduction="sum")
        return self._row_log_lik(f, noise).sum()

    def _row_log_lik(self, f: Tensor, noise: Tensor | None = None) -> Tensor:
        likelihood: Any = self._likelihood
        if noise is not None:
            likelihood.noise.log_scale = noise.log()
        return likelihood.distribution(f).log_prob(self.y)

    @torch.no_grad()
    def _reduce(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """R, c and r of |y - Phi w|^2 = |c - R w|^2 + r for Gaussian noise.

        With Phi = Q R: c = Q^T y and r = |y - Q c|^2, for each output, if there are rows to save.
        """
        if not isinstance(self.model.likelihood, GaussianLikelihood):
            return None
        if len(self.design) <= self.design.shape[-1]:
            return self.design, self.y, torch.zeros_like(self.y[0])
        Q, R = torch.linalg.qr(self.design)
        c = Q.mT @ self.y  # (K, C)
        return R, c, (self.y - Q @ c).square().sum(0)

    def _reduced_log_lik(self, weights: Tensor, noise: Tensor | None) -> Tensor:
        assert self._reduced is not None
        assert self._noise is not None
        R, c, rest = self._reduced
        scale = (self._noise if noise is None else noise).expand(len(rest))
        squares = (c - R @ weights.mT).square().sum(0) + rest  # (C,)
        log_norm = len(self.y) * (scale.log() + 0.5 * _LOG_2PI)
        return -(0.5 * squares / scale.square() + log_norm).sum()

    @torch.no_grad()
    def _quadratic_form(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """A `(F, J, K)`, b `(F, J, 1)` and k of the potential |A e - b|^2 / 2 + k.

        For Gaussian noise, normal priors and nothing else to sample: likelihood and prior below
        each other, both linear in the whitened weights.
        """
        if self._reduced is None or self._normal_prior is None or self._scales.priors:
            return None
        assert self._noise is not None
        (R, c, _), (prior_loc, prior_scale, _) = self._reduced, self._normal_prior
        noise = self._noise.expand(len(self._loc)).reshape(-1, 1, 1)
        rows = [(R @ self._root) / noise, self._root / prior_scale.unsqueeze(-1)]
        residual = c.mT - self._loc @ R.mT  # (F, J)
        values = [
            residual.unsqueeze(-1) / noise,
            ((prior_loc - self._loc) / prior_scale).unsqueeze(-1),
        ]
        A, b = torch.cat(rows, -2), torch.cat(values, -2)
        log_joint = self._log_joint(self._loc, {}, self._log_lik_fn)
        return A, b, -log_joint - 0.5 * b.square().sum()

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

    def _prior_precision(self) -> Tensor:
        """1 / Var of the weights `(F, K)`, one where the variance is infinite."""
        parts = []
        for name, prior in self._weight_priors.items():
            shape = self.model.site_shapes[name]
            parts.append(prior.variance.double().expand(shape).reshape(shape[0], -1))
        var = torch.cat(parts, -1)
        return torch.where(torch.isfinite(var), 1 / var, 1.0)


def find_whitening(
    design: Tensor,
    prior_precision: Tensor,
    log_prior_fn: Callable[[Tensor], Tensor],
    row_log_lik_fn: Callable[[Tensor], Tensor],
    max_steps: int = 30,
    tolerance: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Mode `(F, K)` of a posterior of weights, and an inverse root of the curvature there.

    By damped Newton steps on -log p(y, w) with f = Phi w. The curvature is A = diag(precision) +
    sum_n D_n x phi_n phi_n^T, a Kronecker product, with D_n the positive part of
    -d^2 log p(y_n | f_n) / d f_n^2. With A = L L^T the root is L^{-T}: loc + root e has covariance
    A^{-1}. Where the likelihood does not couple the functions, or there are too many weights, the
    root is `(F, K, K)`, one for each function, else `(1, F K, F K)`.

    Args:
        design: Phi, `(N, K)`.
        prior_precision: of the weights, `(F, K)`.
        log_prior_fn: of weights `(F, K)`, a scalar.
        row_log_lik_fn: of f `(N, F)`, a value for each row.
        max_steps: Newton steps at most.
        tolerance: of the Newton decrement, in nats.
    """

    def terms(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-log p(y, w), its gradient `(F, K)`, and a Cholesky factor of the curvature."""
        with torch.enable_grad():
            w = weights.detach().requires_grad_()
            log_prior = log_prior_fn(w)
            (prior_slope,) = torch.autograd.grad(log_prior, w)
            f = (design @ w.mT).detach().requires_grad_()
            log_lik = row_log_lik_fn(f).sum()
            slope, curvature = _row_derivatives(log_lik, f)
        factor = torch.linalg.cholesky(_total_curvature(design, curvature, prior_precision))
        return -(log_prior + log_lik).detach(), -(prior_slope + slope.mT @ design), factor

    weights = torch.zeros_like(prior_precision)
    value, slope, factor = terms(weights)
    for _ in range(max_steps):
        step = torch.cholesky_solve(slope.reshape(*factor.shape[:-1], 1), factor)
        step = step.reshape(weights.shape)
        if float((step * slope).sum()) < tolerance:
            break
        for halving in range(20):
            proposal = weights - step / 2**halving
            new = terms(proposal)
            if float(new[0]) < float(value):
                weights, (value, slope, factor) = proposal, new
                break
        else:
            break
    eye = torch.eye(factor.shape[-1], dtype=weights.dtype, device=weights.device)
    root = torch.linalg.solve_triangular(factor.mT, eye.expand_as(factor), upper=True)
    return weights, root


def _row_derivatives(log_lik: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """First and minus second derivatives in f `(N, F)`, `(N, F)` and `(N, F, F)`.

    A row of the likelihood depends on its own f alone.
    """
    (slope,) = torch.autograd.grad(log_lik, f, create_graph=True)
    columns = [
        torch.autograd.grad(slope[:, c].sum(), f, retain_graph=True)[0] for c in range(f.shape[-1])
    ]
    return slope.detach(), -torch.stack(columns, -1)


def _total_curvature(design: Tensor, curvature: Tensor, prior_precision: Tensor) -> Tensor:
    """Curvature over all weights, `(F, K, K)` or, if functions are coupled, `(1, F K, F K)`."""
    F, K = prior_precision.shape
    diagonal = curvature.diagonal(dim1=-2, dim2=-1)  # (N, F)
    is_coupled = bool((curvature != torch.diag_embed(diagonal)).any())
    if not is_coupled or F * K > _MAX_JOINT_WEIGHTS:
        blocks = [design.mT @ (d.unsqueeze(-1) * design) for d in diagonal.clamp(min=0).mT]
        return torch.stack(blocks) + torch.diag_embed(prior_precision)
    values, vectors = torch.linalg.eigh(curvature)
    D = (vectors * values.clamp(min=0).unsqueeze(-2)) @ vectors.mT
    rows = [
        torch.cat([design.mT @ (D[:, a, b].unsqueeze(-1) * design) for b in range(F)], -1)
        for a in range(F)
    ]
    return (torch.cat(rows) + torch.diag(prior_precision.flatten())).unsqueeze(0)


class Scales:
    """Scales that are sampled, in unconstrained coordinates, one after the other.

    Args:
        priors: by name, all dimensions events.
        current: values of the model to start at; others start where their coordinate is zero.
    """

    def __init__(self, priors: Mapping[str, Distribution], current: Mapping[str, Tensor]):
        self.priors = dict(priors)
        self._transforms = {name: _unconstrained(prior) for name, prior in priors.items()}
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


def _unconstrained(prior: Distribution) -> Transform:
    """From the whole space to the support; the exponential for the positive numbers."""
    support = prior.support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    if getattr(support, "lower_bound", None) == 0 and not hasattr(support, "upper_bound"):
        return IndependentTransform(ExpTransform(), len(prior.event_shape))
    return biject_to(prior.support)
