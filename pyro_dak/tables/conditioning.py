"""Members of an ensemble whose last layers have learned more rows since they were trained."""

from typing import Any

import torch
from torch import Tensor

from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.inference.guides import NaturalGuide
from pyro_dak.tables.ensemble import Ensemble

__all__ = ["ConditionedMembers"]


class ConditionedMembers:
    """The posteriors of the weights of all members, conditioned on further rows.

    They start from q of the members, as the prior of what comes. Networks, unit scales and noise
    stay as they were trained.

    Attributes:
        models: the members, in double precision.
        guides: their posteriors.
    """

    def __init__(self, ensemble: Ensemble):
        self.models, self.guides = [], []
        for model, q in ensemble.to(torch.float64).members():
            guide = NaturalGuide(model)
            parts = [q.normal(name) for name in guide.weight_sites]
            F = model.num_functions
            loc, scale = (
                torch.cat([p.reshape(F, -1) for p in part], -1) for part in zip(*parts, strict=True)
            )
            guide.set_parameters(
                loc.detach(), torch.diag_embed(scale.detach().square().reciprocal())
            )
            self.models.append(model)
            self.guides.append(guide)

    def updated(self, x: Tensor, y: Tensor, forget: float) -> "ConditionedMembers":
        """The posteriors given rows x `(N, D)`, y `(N, C)` too; see `NaturalGuide.update`."""
        other = object.__new__(ConditionedMembers)
        other.models, other.guides = self.models, []
        for model, guide in zip(self.models, self.guides, strict=True):
            new = NaturalGuide(model)
            new.load_state_dict(guide.state_dict())
            new.update(model, x.double(), y.double(), forget=forget)
            other.guides.append(new)
        return other

    def moments(self, ensemble: Ensemble, features: Tensor) -> FunctionMoments:
        """q(f) of every member from its features, as `Ensemble.moments_from` has it."""
        h = ensemble.unit_inputs(features)  # (E, P, N)
        parts = [
            guide.moments(model.layer, rows.mT)
            for model, guide, rows in zip(self.models, self.guides, h, strict=True)
        ]
        mean, var = (
            torch.stack(values) for values in zip(*((q.mean, q.var) for q in parts), strict=True)
        )
        return FunctionMoments(mean, var + ensemble.lost_variance(h))

    def state_dict(self) -> dict[str, Tensor]:
        """What the posteriors know, with the members as first axis."""
        states = [guide.state_dict() for guide in self.guides]
        return {name: torch.stack([state[name] for state in states]) for name in states[0]}

    @classmethod
    def load(cls, ensemble: Ensemble, stored: dict[str, Tensor]) -> "ConditionedMembers":
        """The posteriors that `state_dict` described, or an error if they do not fit."""
        self = cls(ensemble)
        for index, guide in enumerate(self.guides):
            own: dict[str, Any] = {name: value[index] for name, value in stored.items()}
            guide.load_state_dict(own)
            guide.set_parameters(guide.mean, guide.precision)  # which checks them
        return self
