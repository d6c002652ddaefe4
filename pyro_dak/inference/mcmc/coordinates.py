"""Coordinates in which Hamiltonian samplers go straight: whitened weights, unconstrained scales."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributions import Distribution, biject_to, constraints
from torch.distributions.transforms import ExpTransform, IndependentTransform, Transform

__all__ = ["Scales", "find_whitening"]

_MAX_JOINT_WEIGHTS = 3000


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
