"""Small models with data and a guide away from its start, for the tests of the Pyro layers."""

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro
import pytest
import torch
import torch._functorch.config
from pyro.infer import Trace_ELBO
from torch import Tensor, nn

from pyro_dak import (
    DAK,
    BernoulliLikelihood,
    CategoricalLikelihood,
    FullRankGuide,
    GaussianLikelihood,
    HeteroscedasticLikelihood,
    LowRankGuide,
    MeanFieldGuide,
    NaturalGuide,
    PoissonLikelihood,
    StudentTLikelihood,
    UnitBlockGuide,
)
from pyro_dak.inference.exact import ExactPosterior, exact_posterior
from pyro_dak.inference.guides import GaussianGuide
from pyro_dak.model.likelihoods import Likelihood

# Guides with parameters for an optimiser.
LEARNED: dict[str, Callable[..., GaussianGuide]] = {
    "mean_field": MeanFieldGuide,
    "unit_block": UnitBlockGuide,
    "low_rank": lambda model, **options: LowRankGuide(model, rank=2, **options),
    "full_rank": FullRankGuide,
}
# Guides that start at the prior, whatever the options of the others are.
NATURAL: dict[str, Callable[..., GaussianGuide]] = {
    "natural_joint": lambda model, **_: NaturalGuide(model, "joint"),
    "natural_shared": lambda model, **_: NaturalGuide(model, "shared"),
    "natural_diagonal": lambda model, **_: NaturalGuide(model, "diagonal"),
}
GUIDES = LEARNED | NATURAL

# Older versions of torch run a training step as it is, whatever `compile` says.
compiles_training = pytest.mark.skipif(
    not hasattr(torch._functorch.config, "force_non_lazy_backward_lowering"),
    reason="this version of torch compiles backward passes too late",
)

LIKELIHOODS: dict[str, Callable[[], Likelihood]] = {
    "gaussian": lambda: GaussianLikelihood(0.5),
    "heteroscedastic": lambda: HeteroscedasticLikelihood(0.5),
    "student_t": lambda: StudentTLikelihood(4.0, 0.5),
    "categorical": CategoricalLikelihood,
    "bernoulli": BernoulliLikelihood,
    "poisson": PoissonLikelihood,
}


@dataclass
class Scenario:
    """A model in eval mode, a guide for it, and data."""

    model: DAK
    guide: GaussianGuide
    x: Tensor
    y: Tensor

    @property
    def h(self) -> Tensor:
        """Unit inputs of x, `(N, P)`."""
        return self.model.unit_inputs(self.x)

    def exact(self) -> ExactPosterior:
        """The exact posterior of x and y."""
        return exact_posterior(self.model, self.x, self.y)


def make(
    likelihood: Likelihood | str = "gaussian",
    guide: str = "mean_field",
    num_outputs: int = 2,
    num_rows: int = 8,
    num_units: int = 2,
    level: int = 2,
    spread: float = 0.3,
    **options: Any,
) -> Scenario:
    """A DAK of two inputs and a small network with settled scaling, and a random guide."""
    if isinstance(likelihood, str):
        likelihood = LIKELIHOODS[likelihood]()
    x = torch.randn(num_rows, 2)
    model = DAK(
        nn.Sequential(nn.Linear(2, 4), nn.Tanh()),
        feature_dim=4,
        num_units=num_units,
        num_outputs=num_outputs,
        level=level,
        likelihood=likelihood,
        **options,
    )
    with torch.no_grad():
        model.layer.log_unit_scale += 0.2 * torch.randn_like(model.unit_scale)
    model.unit_inputs(x)  # in training mode: takes the statistics of x
    model.eval()
    y = targets(likelihood, num_rows, num_outputs)
    return Scenario(model, randomised(GUIDES[guide](model, init_scale=0.4), spread), x, y)


def targets(likelihood: Likelihood, num_rows: int, num_outputs: int) -> Tensor:
    """Random targets in the support of the likelihood."""
    if isinstance(likelihood, CategoricalLikelihood):
        return torch.randint(0, num_outputs, (num_rows,))
    if isinstance(likelihood, BernoulliLikelihood):
        return torch.randint(0, 2, (num_rows, num_outputs)).to(torch.get_default_dtype())
    if isinstance(likelihood, PoissonLikelihood):
        return torch.randint(0, 5, (num_rows, num_outputs)).to(torch.get_default_dtype())
    return torch.randn(num_rows, num_outputs)


def gaussian_regression(**options: Any) -> Scenario:
    """Homoscedastic regression."""
    return make("gaussian", **options)


def heteroscedastic(**options: Any) -> Scenario:
    """Regression with a log noise variance for each output."""
    return make("heteroscedastic", **options)


def classification(num_outputs: int = 3, **options: Any) -> Scenario:
    """Three classes."""
    return make("categorical", num_outputs=num_outputs, **options)


@torch.no_grad()
def randomised(guide: GaussianGuide, spread: float) -> GaussianGuide:
    """The guide with every parameter moved by N(0, spread^2), and a precision that is not one."""
    for parameter in guide.parameters():
        parameter += spread * torch.randn_like(parameter)
    if isinstance(guide, NaturalGuide):
        guide.mean += spread * torch.randn_like(guide.mean)
        noise = spread * torch.randn_like(guide.precision)
        if guide.covariance == "diagonal":
            guide.precision *= 6 * noise.exp()
        else:
            guide.precision *= 6
            guide.precision += 6 * noise @ noise.mT
    return guide


def trace_elbo_draws(
    case: Scenario, num_batches: int = 30, num_particles: int = 400, **kwargs: Any
) -> Tensor:
    """Independent unbiased estimates of the ELBO by Pyro, `(num_batches,)`."""
    objective = Trace_ELBO(num_particles, max_plate_nesting=1, vectorize_particles=True)
    losses = [
        objective.loss(case.model, case.guide, case.x, case.y, **kwargs) for _ in range(num_batches)
    ]
    return -torch.tensor(losses)


def run_alone(code: str) -> None:
    """Run a script in a process of its own, without the shape checks of the tests; it must pass."""
    root = Path(__file__).parents[1]
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def standard_error(draws: Tensor) -> Tensor:
    """Standard error of the mean over the first axis."""
    return draws.std(0) / math.sqrt(len(draws))


def agrees(draws: Tensor, truth: Tensor | float) -> bool:
    """Whether the mean over the first axis is within four standard errors of the truth."""
    return bool(((draws.mean(0) - truth).abs() <= 4 * standard_error(draws) + 1e-12).all())


def weight_draws(guide: GaussianGuide, num_draws: int) -> dict[str, Tensor]:
    """Draws of every site from the guide, by its own sample statements."""
    with pyro.plate("draws", num_draws, dim=-2):
        return guide()


def flat(guide: GaussianGuide, values: dict[str, Tensor]) -> Tensor:
    """All weights as one vector `(..., K)`, in the order of `joint`."""
    *batch, F = values["mu"].shape
    rows = F if isinstance(guide, FullRankGuide | NaturalGuide) else 1
    parts = [values[name].reshape(*batch, rows, -1) for name in guide.weight_sites]
    return torch.cat(parts, -1).flatten(-2)


def unflat(
    guide: GaussianGuide, vector: Tensor, shapes: dict[str, torch.Size]
) -> dict[str, Tensor]:
    """Sites from vectors `(..., K)`: the inverse of `flat`."""
    rows = shapes["mu"][0] if isinstance(guide, FullRankGuide | NaturalGuide) else 1
    columns = vector.unflatten(-1, (rows, -1))
    sizes = [shapes[name].numel() // rows for name in guide.weight_sites]
    parts = zip(guide.weight_sites, columns.split(sizes, -1), strict=True)
    return {name: part.reshape(*vector.shape[:-1], *shapes[name]) for name, part in parts}


@torch.no_grad()
def joint(guide: GaussianGuide) -> torch.distributions.MultivariateNormal:
    """q over all weights, with its full covariance matrix written out."""
    if isinstance(guide, NaturalGuide):
        F = len(guide.mean)
        full = torch.diag_embed if guide.covariance == "diagonal" else torch.clone
        precisions = full(guide.precision).expand(F, -1, -1)
        cov = torch.block_diag(*torch.linalg.inv(precisions))
        if guide.has_common_shift:
            prior = torch.diag(guide.prior_precision.sum(0).reciprocal())
            cov += torch.kron(torch.ones(F, F), prior - torch.linalg.inv(precisions.sum(0)))
        return torch.distributions.MultivariateNormal(guide.mean.flatten(), cov)
    if isinstance(guide, FullRankGuide):
        tril = torch.block_diag(*guide.scale_tril)
        return torch.distributions.MultivariateNormal(guide.loc.flatten(), tril @ tril.mT)
    if isinstance(guide, LowRankGuide):
        cov = torch.diag(guide.log_scale.exp().square()) + guide.factor @ guide.factor.mT
        return torch.distributions.MultivariateNormal(guide.loc, cov)
    names = guide.weight_sites
    loc = flat(guide, {name: getattr(guide, f"{name}_loc") for name in names})
    blocks = []
    for name in names:
        if name == "z" and isinstance(guide, UnitBlockGuide):
            blocks += [tril @ tril.mT for tril in guide.z_scale_tril.flatten(0, 1)]
        else:
            blocks.append(torch.diag((2 * getattr(guide, f"{name}_log_scale")).exp().flatten()))
    return torch.distributions.MultivariateNormal(loc, torch.block_diag(*blocks))


def prior_trace(model: DAK, x: Tensor) -> pyro.poutine.Trace:
    """The trace of one run of the model without data."""
    return pyro.poutine.trace(model).get_trace(x)
