"""The loss that `fit` differentiates, and what surrounds it: compilation, frozen features."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pyro.infer import ELBO
from torch import Tensor, nn

from pyro_dak.fast.compiling import Compiled
from pyro_dak.inference.objectives import AnalyticELBO
from pyro_dak.model.dak import DAK
from pyro_dak.model.modes import evaluating

__all__ = ["Loss", "extract_features", "frozen", "use_compiled"]


class Loss(nn.Module):
    """What is differentiated, wrapped, compiled: the loss, and its terms for the history."""

    def __init__(self, model: DAK, guide: nn.Module, objective: ELBO, from_features: bool):
        super().__init__()
        self.model, self.guide = model, guide
        self.objective, self.from_features = objective, from_features

    def forward(self, x: Tensor, y: Tensor, scale: float, num_data: int) -> tuple[Tensor, Tensor]:
        """Of a batch whose rows count `scale` times each, per datum: the loss, a scalar; without
        gradient loss, expected log-likelihood and KL, `(3,)`."""
        effective = scale * len(y)
        if isinstance(self.objective, AnalyticELBO):
            h = self.model.embed(x) if self.from_features else self.model.unit_inputs(x)
            guide: Any = self.guide  # the objective checks that it is Gaussian
            terms = self.objective.terms_from_units(self.model, guide, h, y, effective)
            return _per_datum(terms.kl - terms.expected_log_lik, *terms, num_data)
        program = self._from_features if self.from_features else self.model
        loss = self.objective.differentiable_loss(program, self.guide, x, y, num_data=effective)
        unknown = torch.full_like(loss, math.nan)
        return _per_datum(loss, unknown, unknown, num_data)

    def _from_features(self, x: Tensor, y: Tensor, num_data: float) -> Tensor:
        return self.model.observe(self.model.embed(x), y, num_data)


def _per_datum(
    loss: Tensor, expected_log_lik: Tensor, kl: Tensor, num_data: int
) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        terms = torch.stack([loss, expected_log_lik, kl]).div_(num_data)
    return loss / num_data, terms


def use_compiled(loss: Loss) -> None:
    """Compile the forward pass of a loss; where that fails, warn and go on without."""
    loss.model.layer.activation.prepare(loss.model.layer.log_unit_scale)
    loss.forward = Compiled(loss.forward)  # type: ignore[method-assign, assignment]


@contextmanager
def frozen(module: nn.Module, is_frozen: bool) -> Iterator[None]:
    """Parameters of `module` without gradient inside, if `is_frozen`."""
    parameters = [p for p in module.parameters() if p.requires_grad] if is_frozen else []
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def extract_features(
    model: DAK, batches: Iterator[tuple[Tensor, Tensor]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Features and targets of all rows, each row's features computed once, in eval mode."""
    features, targets = [], []
    with evaluating(model):
        for x, y in batches:
            features.append(model.feature_extractor(x.to(device)))
            targets.append(y.to(device))
    return torch.cat(features), torch.cat(targets)
