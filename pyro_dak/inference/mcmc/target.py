"""The log posterior density as Hamiltonian samplers need it: a function of one vector.

The vector, called the position, holds all weights and, where they are sampled, the scales of the
units and of the noise in unconstrained coordinates. The weights are whitened by the curvature of
the log density at its mode: the posterior of a regression becomes a standard normal, that of a
classifier nearly one, and trajectories stay short. Where scales are sampled too and the weights are
normal given them, as in a regression with normal priors, they are whitened anew at every value of
the scales: see `Target.given_scales`. This is a change of coordinates; the samples do not depend on
it.
"""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, biject_to, constraints

from pyro_dak.inference.densities import noise_scale, with_noise
from pyro_dak.inference.guides.joint import flat_priors
from pyro_dak.inference.objectives import normal_priors
from pyro_dak.model.dak import DAK
from pyro_dak.model.likelihoods import CategoricalLikelihood, GaussianLikelihood

__all__ = ["Target"]

_LOG_2PI = math.log(2 * math.pi)
# With more weights than this, those of different functions are whitened apart from each other.
_MAX_JOINT_WEIGHTS = 3000
# With more scales than this, the curvature of their log density would take too long.
_MAX_SCALES = 32


class Target:
    """The potential -log p(y, w, scales) of a position, with the Jacobian of its coordinates.

    The features are fixed: f = Phi w with the rows Phi of `AdditiveLayer.design`, one matrix
    product. For Gaussian noise, Phi = Q R enters through R alone, which has at most K rows.

    Args:
        model: the model, whose network and other parameters stay fixed.
        h: unit inputs, `(N, P)`, float64.
        y: targets, as `checked_data` returns them.
        extra_priors: priors of `noise_scale` and `unit_scale`, if these are sampled too. The shape
            of the parameter is the event shape of its prior.
        whiten: whether the weights are whitened.
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
        _check_real(self._weight_priors)
        F, K = model.num_functions, self.design.shape[-1]
        self._loc = self.design.new_zeros(F, K)
        self._root = torch.eye(K, dtype=h.dtype, device=h.device).expand(F, K, K)
        self._normal_prior = self._flat_normal_prior()
        current = {"unit_scale": self._unit_scale, "noise_scale": self._noise}
        scale_priors = self._site_priors("global_shrinkage", "shrinkage") | self._extra_priors
        self._scales = _Scales(scale_priors, current)
        self._reduced = self._reduce()
        self._lowest: Tensor | None = None
        has_normal_weights = self._reduced is not None and self._normal_prior is not None
        self.is_collapsed = bool(whiten and has_normal_weights and scale_priors)
        self._centre = self._scales.start.to(self._loc)
        self._spread = torch.eye(len(self._centre), dtype=h.dtype, device=h.device)
        if self.is_collapsed and len(self._centre) <= _MAX_SCALES:
            self._centre, self._spread = _find_mode(self._scale_potential, self._centre)
        if whiten and not self.is_collapsed:
            self._loc, self._root = _find_whitening(
                self.design, self._prior_precision(), self._log_prior, self._row_log_lik
            )
            # With Gaussian noise and normal priors the whitened weights are standard normals.
            if has_normal_weights:
                self._lowest = -self._log_joint(self._loc, {})

    def __getstate__(self) -> dict[str, Any]:
        """All but the network, which a chain does not need and which may be large."""
        model = copy.copy(self.model)
        model._modules = {**model._modules, "feature_extractor": None, "novelty": None}
        return {**self.__dict__, "model": model}

    @property
    def device(self) -> torch.device:
        """Where positions are."""
        return self._loc.device

    @property
    def num_weights(self) -> int:
        """F K, the number of weights, which are the first part of the position."""
        return self._loc.numel()

    def __call__(self, params: Mapping[str, Tensor]) -> Tensor:
        """The potential at `params["position"]`, a scalar."""
        self.num_evaluations += 1
        position = params["position"]
        if self._lowest is not None:
            return self._lowest + 0.5 * position.square().sum()
        e = position[: self.num_weights]
        free = self._free_scales(position[self.num_weights :])
        if self.is_collapsed:
            return 0.5 * (e.square() + _LOG_2PI).sum() + self._scale_potential(free)
        scales, log_det = self._scales.constrain(free)
        return -(self._log_joint(self._weights(e), scales) + log_det)

    @torch.no_grad()
    def initial_position(self, generator: torch.Generator, max_tries: int = 100) -> Tensor:
        """A random start of finite density, within two standard deviations of the mode."""
        start = self._loc.new_zeros(self.num_weights + len(self._centre))
        spread = torch.ones_like(start)
        spread[: self.num_weights] = 2.0
        for _ in range(max_tries):
            uniform = torch.rand(len(start), generator=generator, dtype=torch.float64)
            position = start + spread * (2 * uniform.to(start.device) - 1)
            if bool(torch.isfinite(self({"position": position}))):
                return position
        raise ValueError(
            f"The log density is not finite at {max_tries} random starts. Look at the priors, at "
            "`y`, and at the scale of the features."
        )

    @torch.no_grad()
    def sites(self, positions: Tensor) -> dict[str, Tensor]:
        """The sites of the model and the sampled scales at positions `(..., D)`, by name."""
        e = positions[..., : self.num_weights]
        scales = self._scales.constrain(self._free_scales(positions[..., self.num_weights :]))[0]
        flat = self._weights_given(e, scales) if self.is_collapsed else self._weights(e)
        weights = self.model.layer.split(flat)
        return {name: getattr(weights, name) for name in self._weight_priors} | scales

    def given_scales(self, scales: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Mean m `(F, K)` and root `(F, K, K)` of the weights given the scales t, and log p(y | t).

        For Gaussian noise and normal priors w_c ~ N(w0, diag(s0^2)) the weights are normal given
        the scales t. With the rows R of the reduced design, whose columns and whose noise are those
        of t, B = R diag(s0) / noise and r = (c - R w0) / noise, the precision of (w_c - w0) / s0 is
        A = I + B^T B = T T^T, so that w = m + root e with root = diag(s0) T^{-T}, e ~ N(0, I), and

            log p(y | t) = -1/2 sum_c [N log(2 pi noise^2) + log det A + r^T r - |T^{-1} B^T r|^2
                                       + rest / noise^2]

        (see `exact_posterior`). In the coordinates (e, t) the posterior is N(e | 0, I) p(t | y):
        the weights no longer depend on the scales, and the scales mix as if they were alone.
        """
        assert self._reduced is not None
        assert self._normal_prior is not None
        assert self._noise is not None
        R, c, rest = self._reduced
        loc0, scale0, _ = self._normal_prior
        ratio = self._column_ratio(scales)
        R = R if ratio is None else R * ratio
        noise = scales.get("noise_scale", self._noise).expand(len(rest))
        B = R * scale0.unsqueeze(-2) / noise[:, None, None]  # (C, n, K)
        r = ((c - R @ loc0.mT) / noise).mT.unsqueeze(-1)  # (C, n, 1)
        eye = torch.eye(B.shape[-1], dtype=B.dtype, device=B.device)
        T = torch.linalg.cholesky(eye + B.mT @ B)
        half = torch.linalg.solve_triangular(T, B.mT @ r, upper=False)  # (C, K, 1)
        log_det = 2 * T.diagonal(dim1=-2, dim2=-1).log().sum()
        fit = r.square().sum() - half.square().sum() + (rest / noise.square()).sum()
        log_norm = len(self.y) * (2 * noise.log() + _LOG_2PI).sum()
        inverse = torch.linalg.solve_triangular(T.mT, eye.expand_as(T), upper=True)
        root = scale0.unsqueeze(-1) * inverse
        return loc0 + (root @ half).squeeze(-1), root, -0.5 * (log_norm + log_det + fit)

    def _free_scales(self, u: Tensor) -> Tensor:
        """Scales in unconstrained coordinates from those of the position, both `(..., D)`."""
        return self._centre + u @ self._spread.mT

    def _scale_potential(self, free: Tensor) -> Tensor:
        """-log p(y, scales) at unconstrained scales `(D,)`, with the Jacobian of constraints."""
        scales, log_det = self._scales.constrain(free)
        return -(self.given_scales(scales)[2] + self._log_prior_of_scales(scales) + log_det)

    def _weights_given(self, e: Tensor, scales: Mapping[str, Tensor]) -> Tensor:
        """w = m + root e, `(..., F, K)`, at the scales of each position."""
        batch = e.shape[:-1]
        flat = {name: v.flatten(0, len(batch) - 1) for name, v in scales.items()}
        rows = []
        for s, row in enumerate(e.reshape(-1, *self._loc.shape)):
            mean, root, _ = self.given_scales({name: value[s] for name, value in flat.items()})
            rows.append(mean + (root @ row.unsqueeze(-1)).squeeze(-1))
        return torch.stack(rows).reshape(*batch, *self._loc.shape)

    def _weights(self, e: Tensor) -> Tensor:
        """w = loc + root e, `(..., F, K)`, from whitened weights `(..., F K)`."""
        groups = e.unflatten(-1, self._root.shape[:-1]).unsqueeze(-1)
        return self._loc + (self._root @ groups).reshape(*e.shape[:-1], *self._loc.shape)

    def _log_joint(self, weights: Tensor, scales: Mapping[str, Tensor]) -> Tensor:
        ratio = self._column_ratio(scales)
        scaled = weights if ratio is None else weights * ratio
        log_lik = self._log_lik(scaled, scales.get("noise_scale"))
        return self._log_prior(weights) + log_lik + self._log_prior_of_scales(scales)

    def _log_prior_of_scales(self, scales: Mapping[str, Tensor]) -> Tensor:
        total = self.design.new_zeros(())
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
        sites = self.model.layer.split(weights)._asdict()
        return torch.stack([p.log_prob(sites[n]) for n, p in self._weight_priors.items()]).sum()

    def _log_lik(self, weights: Tensor, noise: Tensor | None) -> Tensor:
        """log p(y | f), summed over rows, with `noise` in the place of the likelihood's scale."""
        if self._reduced is not None:
            R, c, rest = self._reduced
            assert self._noise is not None
            scale = (self._noise if noise is None else noise).expand(len(rest))
            squares = (c - R @ weights.mT).square().sum(0) + rest  # (C,)
            log_norm = len(self.y) * (scale.log() + 0.5 * _LOG_2PI)
            return -(0.5 * squares / scale.square() + log_norm).sum()
        f = self.design @ weights.mT
        if isinstance(self._likelihood, CategoricalLikelihood):  # in half the time
            return -torch.nn.functional.cross_entropy(f, self.y, reduction="sum")
        return self._row_log_lik(f, noise).sum()

    def _row_log_lik(self, f: Tensor, noise: Tensor | None = None) -> Tensor:
        likelihood = self._likelihood
        if noise is not None:
            likelihood = likelihood.with_noise(noise.log())
        return likelihood.distribution(f).log_prob(self.y)

    @torch.no_grad()
    def _reduce(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """R, c and r of |y - Phi w|^2 = |c - R w|^2 + r with Phi = Q R, for Gaussian noise."""
        if not isinstance(self.model.likelihood, GaussianLikelihood):
            return None
        Q, R = torch.linalg.qr(self.design)
        c = Q.mT @ self.y  # (K, C)
        return R, c, (self.y - Q @ c).square().sum(0)

    def _site_priors(self, *names: str) -> dict[str, Any]:
        present = [name for name in names if name in self.model.site_shapes]
        return {name: self.model.prior_distribution(name, self.design) for name in present}

    def _flat_normal_prior(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Means and scales `(F, K)`, and the normalising constant, if all priors are normal."""
        priors = normal_priors(self.model, self._weight_priors)
        if priors is None:
            return None
        parts = flat_priors(priors, self.model.site_shapes, self._loc)
        loc, scale = (part.detach() for part in parts)
        return loc, scale, -(scale.log() + 0.5 * _LOG_2PI).sum()

    def _prior_precision(self) -> Tensor:
        """1 / Var of the weights `(F, K)`, or one where the variance is infinite."""
        rows = [p.variance.reshape(len(self._loc), -1) for p in self._weight_priors.values()]
        var = torch.cat(rows, -1).to(self._loc).detach()
        return torch.where(torch.isfinite(var), 1 / var, 1.0)


def _check_real(priors: Mapping[str, Distribution]) -> None:
    for name, prior in priors.items():
        support: Any = prior.support
        while isinstance(support, constraints.independent):
            support = support.base_constraint
        if support is not constraints.real:
            raise NotImplementedError(
                f"`prior[{name!r}]` must have the real line as its support; got {support}. "
                "Give `model.observe` to Pyro's NUTS instead."
            )


def _find_whitening(
    design: Tensor,
    prior_precision: Tensor,
    log_prior_fn: Callable[[Tensor], Tensor],
    row_log_lik_fn: Callable[[Tensor], Tensor],
    max_steps: int = 30,
    tolerance: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """The mode `(F, K)` of a posterior of weights, and an inverse root of the curvature there.

    The mode is found by damped Newton steps on -log p(y, w) with f = Phi w. The curvature is
    A = diag(precision) + sum_n D_n x phi_n phi_n^T, a Kronecker product, with D_n the positive part
    of -d^2 log p(y_n | f_n) / d f_n^2. With A = L L^T the root is L^{-T}: loc + root e has
    covariance A^{-1} for e ~ N(0, I). The root is `(F, K, K)`, one for each function, if the
    likelihood does not couple the functions or there are too many weights, else `(1, F K, F K)`.

    `log_prior_fn` takes weights `(F, K)`, and `row_log_lik_fn` takes f `(N, F)`. The search ends
    when the Newton decrement is below `tolerance` nats.
    """

    def terms(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-log p(y, w), its gradient `(F, K)`, and a Cholesky factor of the curvature."""
        with torch.enable_grad():
            w = weights.detach().requires_grad_()
            log_prior = log_prior_fn(w)
            (prior_slope,) = torch.autograd.grad(log_prior, w)
            f = (design @ w.mT).detach().requires_grad_()
            log_lik = row_log_lik_fn(f).sum()
            (slope,) = torch.autograd.grad(log_lik, f, create_graph=True)
            # The likelihood of a row depends on the f of that row alone.
            slopes = [torch.autograd.grad(s.sum(), f, retain_graph=True)[0] for s in slope.mT]
        curvature = -torch.stack(slopes, -1)  # (N, F, F)
        factor = torch.linalg.cholesky(_total_curvature(design, curvature, prior_precision))
        slope = slope.detach()
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


def _find_mode(
    potential_fn: Callable[[Tensor], Tensor],
    start: Tensor,
    max_steps: int = 30,
    tolerance: float = 1e-6,
    min_curvature: float = 0.1,
) -> tuple[Tensor, Tensor]:
    """The minimum `(D,)` of a potential, and a root `(D, D)` of the inverse curvature there.

    Damped Newton steps with curvatures |lambda| of at least `min_curvature`, so that a scale whose
    prior has a long tail is not taken for a wide normal.
    """

    def inverse_root(position: Tensor) -> Tensor:
        hessian = torch.autograd.functional.hessian(potential_fn, position)
        values, vectors = torch.linalg.eigh(hessian)
        return vectors / values.abs().clamp(min=min_curvature).sqrt()

    position, root = start, inverse_root(start)
    for _ in range(max_steps):
        value, slope = torch.autograd.functional.vjp(potential_fn, position)
        step = root @ (root.mT @ slope)
        if float(step @ slope) < tolerance:
            break
        for halving in range(20):
            proposal = position - step / 2**halving
            if float(potential_fn(proposal)) < float(value):
                position = proposal
                break
        else:
            break
        root = inverse_root(position)
    return position, root


def _total_curvature(design: Tensor, curvature: Tensor, prior_precision: Tensor) -> Tensor:
    """The curvature over all weights, `(F, K, K)`, or `(1, F K, F K)` if functions are coupled."""
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


class _Scales:
    """The scales that are sampled, as one vector of unconstrained coordinates.

    A chain starts at the current value of the model. A scale that has none starts where its
    coordinates are zero. All dimensions of the priors are event dimensions.
    """

    def __init__(self, priors: Mapping[str, Distribution], current: Mapping[str, Tensor | None]):
        self._transforms = {name: biject_to(prior.support) for name, prior in priors.items()}
        self._shapes: dict[str, torch.Size] = {}
        starts = [torch.zeros(0, dtype=torch.float64)]
        for name, prior in priors.items():
            transform, value = self._transforms[name], current.get(name)
            self._shapes[name] = transform.inverse_shape(prior.event_shape)
            start = torch.zeros(self._shapes[name], dtype=torch.float64)
            if value is not None:
                start = transform.inv(value.expand(prior.event_shape)).nan_to_num(0.0, 0.0, 0.0)
            starts.append(start.flatten())
        self.start = torch.cat(starts)

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
