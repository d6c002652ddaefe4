"""An inverse autoregressive flow: skewed and many-peaked posteriors, for small models.

The network of the flow has (number of weights) x `hidden_dim` parameters and more.
"""

from typing import Any

from pyro.infer.autoguide import AutoIAFNormal

from pyro_dak import DAK


def build(
    model: DAK, hidden_dim: int = 32, num_transforms: int = 1, **options: Any
) -> AutoIAFNormal:
    """Options: those of `AutoIAFNormal`; `hidden_dim` is the width of its network."""
    return AutoIAFNormal(model, hidden_dim=[hidden_dim], num_transforms=num_transforms, **options)
