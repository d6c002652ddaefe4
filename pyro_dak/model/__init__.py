"""The Pyro program: network, additive layer, priors and likelihood."""

from pyro_dak.model.dak import DAK
from pyro_dak.model.modes import evaluating, local_parameters

__all__ = ["DAK", "evaluating", "local_parameters"]
