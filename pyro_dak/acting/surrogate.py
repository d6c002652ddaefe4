"""A DAK for few evaluations of a function on the unit cube, and its fit by the evidence."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pyro_dak.additive.kernels import Kernel, RBFKernel
from pyro_dak.inference.evidence import log_evidence
from pyro_dak.model.dak import DAK
from pyro_dak.model.likelihoods import GaussianLikelihood
from pyro_dak.model.modes import local_parameters
from pyro_dak.validation import check_integer, check_not_negative, check_positive

__all__ = ["Projections", "build_surrogate", "maximize_evidence"]

# The grid in units of the lengthscale of the kernel: 15 nodes, half a lengthscale apart.
_HALF_WIDTH, _LEVEL = 4.0, 4
# What log deviations of the noise are expected to be for standardised outcomes.
_NOISE_LOC, _NOISE_SCALE = math.log(0.05), 1.5


class Projections(nn.Module):
    """Inputs of the units from x in the unit cube: its columns, and random directions in it.

    h(x) = B (a * (u + g(u))), u = x - 1/2, with a row of B for each unit: first the unit vectors of
    the D columns, then random unit vectors. a holds the inverse lengthscales of the columns, and g
    is a network that bends the cube, zero at first. An average of processes along all directions w,

        E_w exp(-(w . r)^2 / 2) ~ (1 + |r|^2 / D)^{-1/2}  for r = a * (u - u'),

    is a rational quadratic kernel in all D columns with a lengthscale of its own for each, and the
    columns themselves add the main effects. So the prior knows functions of any interaction, and
    starts from one whose lengthscale grows with the square root of D.

    Args:
        num_inputs: D.
        num_directions: random directions beside the columns; none if there is one column.
        hidden_size: the width of the network g; 0 leaves it out.
        lengthscale: of the columns at the start and at the mode of its prior; the cube has width 1.
        log_deviation: standard deviation of its logarithm in the prior, around the level if there
            is one.
        level_deviation: standard deviation of a level that all columns share; 0 for none.
        seed: of directions and network.
    """

    directions: Tensor

    def __init__(
        self,
        num_inputs: int,
        num_directions: int,
        hidden_size: int = 0,
        lengthscale: float = 0.5,
        log_deviation: float = 1.0,
        level_deviation: float = 0.0,
        seed: int = 0,
    ):
        super().__init__()
        check_positive("lengthscale", lengthscale)
        check_positive("log_deviation", log_deviation)
        check_not_negative("level_deviation", level_deviation)
        check_integer("num_inputs", num_inputs, minimum=1)
        check_integer("num_directions", num_directions, minimum=0)
        check_integer("hidden_size", hidden_size, minimum=0)
        D, generator = num_inputs, torch.Generator().manual_seed(seed)
        vectors = torch.randn(num_directions if D > 1 else 0, D, generator=generator)
        vectors = nn.functional.normalize(vectors, dim=-1)
        self.register_buffer("directions", torch.cat([torch.eye(D), vectors]))
        self.prior_loc = -math.log(lengthscale)
        self.log_deviation, self.level_deviation = log_deviation, level_deviation
        self.log_inverse_lengthscale = nn.Parameter(torch.full((D,), self.prior_loc))
        self.bend_in = self.bend_out = None
        if hidden_size > 0:
            self.bend_in, self.bend_out = nn.Linear(D, hidden_size), nn.Linear(hidden_size, D)
            with torch.no_grad():
                for parameter in self.bend_in.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
                for parameter in self.bend_out.parameters():
                    parameter.zero_()

    @property
    def num_units(self) -> int:
        """P."""
        return len(self.directions)

    def forward(self, x: Tensor) -> Tensor:
        """h, `(N, P)`, for x `(N, D)`."""
        u = x - 0.5
        if self.bend_in is not None and self.bend_out is not None:
            u = u + self.bend_out(torch.tanh(self.bend_in(2 * u)))
        return (u * self.log_inverse_lengthscale.exp()) @ self.directions.mT

    def log_prior(self) -> Tensor:
        """log density of the parameters, up to a constant: a around its start, g around zero."""
        centre = torch.full_like(self.log_inverse_lengthscale, self.prior_loc)
        deviations = (self.log_deviation, self.level_deviation)
        total = -0.5 * _distance(self.log_inverse_lengthscale, centre, *deviations)
        for layer, scale in ((self.bend_in, 1.0), (self.bend_out, 0.1)):
            if layer is not None:
                total = total - sum((p / scale).square().sum() for p in layer.parameters()) / 2
        return total


def build_surrogate(
    num_inputs: int,
    num_outputs: int = 1,
    *,
    num_directions: int = 32,
    hidden_size: int = 0,
    lengthscale: float = 0.5,
    log_deviation: float = 1.0,
    level_deviation: float = 0.0,
    kernel: Kernel | None = None,
    noise_scale: float = 0.05,
    seed: int = 0,
) -> DAK:
    """A DAK on `Projections`, for x in the unit cube and standardised outcomes.

    Half of the prior variance is that of the columns, half that of the directions.

    Args:
        num_inputs: D.
        num_outputs: C.
        num_directions: random directions, each a unit.
        hidden_size: the width of the network that bends the cube; 0 leaves it out.
        lengthscale: of the columns in the prior; the cube has width 1.
        log_deviation: standard deviation of its logarithm in the prior, around the level if there
            is one.
        level_deviation: standard deviation of a level that all columns share; 0 for none.
        kernel: of the units, in whose lengthscale the grid is measured; by default `RBFKernel()`,
            for functions as smooth as those that one optimises by gradients of a surrogate.
        noise_scale: the standard deviation of the noise before it is learned.
        seed: of the directions.
    """
    features = Projections(
        num_inputs,
        num_directions,
        hidden_size,
        lengthscale,
        log_deviation,
        level_deviation,
        seed,
    )
    D, P = num_inputs, features.num_units
    kernel = RBFKernel() if kernel is None else kernel
    if not isinstance(kernel.lengthscale, float):
        raise ValueError(
            "`kernel` must have one number as its lengthscale, in which the grid is measured; got "
            f"{kernel.lengthscale!r}. The lengthscales of the columns are learned beside it."
        )
    half = _HALF_WIDTH * kernel.lengthscale
    noise = torch.full((num_outputs,), float(noise_scale)) if num_outputs > 1 else noise_scale
    model = DAK(
        features,
        P,
        P,
        num_outputs,
        level=_LEVEL,
        bounds=(-half, half),
        kernel=kernel,
        likelihood=GaussianLikelihood(noise),
        scaling="none",
        embedding=False,
    )
    if P > D:
        with torch.no_grad():
            model.layer.log_unit_scale[:D] = -0.5 * math.log(2 * D)
            model.layer.log_unit_scale[D:] = -0.5 * math.log(2 * (P - D))
    model.input_shape = (D,)
    return model.eval()


def maximize_evidence(
    model: DAK,
    x: Tensor,
    y: Tensor,
    *,
    residual_variance: bool = True,
    log_unit_scale: Tensor | None = None,
    log_deviation: float = 1.0,
    level_deviation: float = 0.0,
    weight_decay: float = 1e-2,
    max_steps: int = 60,
) -> float:
    """Set network, unit scales and noise to a maximum of log p(y | x) + log prior, and return it.

    All rows enter every step of L-BFGS, so this is for hundreds of rows. The weights are integrated
    out. Logarithms of the unit scales have a normal prior, and so has that of the noise, around
    0.05 of standardised outcomes. Units with the same centre, such as the columns, or the
    directions, of `Projections`, may share a level of their scales, which has a prior deviation of
    its own. A network may have a method `log_prior` of its own; of others the squares of the
    parameters count `weight_decay` / 2 times.

    Args:
        model: with `GaussianLikelihood`; changed in place, and left in eval mode.
        x: inputs, `(N, ...)`.
        y: standardised targets, `(N, C)`.
        residual_variance: as in `exact_posterior`.
        log_unit_scale: the centre of the prior of the unit scales, `(P,)`; by default where they
            start.
        log_deviation: standard deviation of that prior, around the level if there is one.
        level_deviation: standard deviation of the levels; 0 for none.
        weight_decay: for networks without a prior.
        max_steps: iterations of L-BFGS; with 0 nothing changes.
    """
    check_not_negative("weight_decay", weight_decay)
    check_positive("log_deviation", log_deviation)
    check_not_negative("level_deviation", level_deviation)
    check_integer("max_steps", max_steps, minimum=0)
    model.eval()
    own = model.layer.log_unit_scale
    centre = (own if log_unit_scale is None else log_unit_scale).detach().clone()

    def objective() -> Tensor:
        h = model.unit_inputs(x)
        evidence = log_evidence(model, h, y, residual_variance=residual_variance).sum()
        likelihood: Any = model.likelihood
        log_noise = likelihood.noise.log_scale
        noise = ((log_noise - _NOISE_LOC) / _NOISE_SCALE).square().sum()
        scales = _distance(model.layer.log_unit_scale, centre, log_deviation, level_deviation)
        return evidence + _log_prior(model, weight_decay) - 0.5 * (noise + scales)

    with torch.enable_grad(), local_parameters(model):
        _ascend(objective, [p for p in model.parameters() if p.requires_grad], max_steps)
        return float(objective().detach())


def _distance(
    log_scale: Tensor, centre: Tensor, deviation: float, level_deviation: float
) -> Tensor:
    """-2 log density of logarithms of scales, up to a constant.

    The n of a group, which have the same centre, have covariance s^2 I + t^2 1 1^T around it, so
    that r = log_scale - centre enters as sum (r - mean r)^2 / s^2 + n (mean r)^2 / (s^2 + n t^2).
    """
    groups, index, sizes = centre.unique(return_inverse=True, return_counts=True)
    r, n = log_scale - centre, sizes.to(centre.dtype)
    mean = torch.zeros_like(groups).index_add(0, index, r) / n
    var = deviation**2
    within = (r - mean[index]).square().sum() / var
    return within + (n * mean.square() / (var + n * level_deviation**2)).sum()


def _log_prior(model: DAK, weight_decay: float) -> Tensor:
    """log density of the parameters of network and embedding, up to a constant."""
    network: Any = model.feature_extractor
    if hasattr(network, "log_prior"):
        return network.log_prior()
    parts = [network] if model.embedding is None else [network, model.embedding]
    squares = [p.square().sum() for part in parts for p in part.parameters()]
    return -0.5 * weight_decay * sum(squares, torch.zeros_like(model.layer.log_unit_scale[0]))


def _ascend(objective: Callable[[], Tensor], parameters: list[Tensor], max_steps: int) -> None:
    """Maximise by L-BFGS; a step that leaves the numbers is taken back."""
    if max_steps == 0:
        return
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=max_steps, history_size=10, line_search_fn="strong_wolfe"
    )
    best, values = -math.inf, [p.detach().clone() for p in parameters]

    def closure() -> Tensor:
        nonlocal best, values
        optimizer.zero_grad()
        try:
            value = objective()
        except torch.linalg.LinAlgError:  # noise below rounding: the line search turns back
            return torch.full((), math.inf, dtype=parameters[0].dtype)
        (-value).backward()
        if float(value.detach()) > best:
            best, values = float(value.detach()), [p.detach().clone() for p in parameters]
        return -value.detach()

    optimizer.step(closure)
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
            parameter.grad = None
