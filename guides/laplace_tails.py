"""A guide written by hand, to copy from: every weight has a Laplace posterior, with heavy tails.

What a guide for `DAK` must do is what Pyro asks of any guide: take the arguments of the model and
emit its latent sites, with their names and event shapes. `model.site_shapes` has both:

    mu (F,), z (F, P, M); linear (F, P) with `linear_term=True`; shrinkage (P,), and
    global_shrinkage () for a horseshoe, with a prior on the scales of the units.

Three things are worth copying.

- Parameters are plain `nn.Parameter`s, made in the constructor: the guide is complete before it
  has seen data, saves with `state_dict` and loads cold. Scales are kept as their logarithms.
- `to_event` turns the elements of a site into one event, as in the model; then vectorised
  particles and `Predictive(parallel=True)` work without a further line.
- Positive sites get a distribution on the positive numbers, here the exponential of a Laplace.

q(f) is not Gaussian here, so the objective is `Trace_ELBO`; `TraceMeanField_ELBO` takes the KL
analytically where torch knows the pair of distributions. To be offered by name, a file needs
nothing but a `build` function, and to lie in this folder:

    guide = guides.build("laplace_tails", model, init_scale=0.05)
    svi = SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO(num_particles=8))
"""

import math
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_dak import DAK


class LaplaceTailsGuide(PyroModule):
    """q = product of Laplace(loc, scale) over the elements of every site.

    Args:
        model: gives names and shapes of the sites.
        init_scale: initial scale of every element.
    """

    def __init__(self, model: DAK, init_scale: float = 0.1):
        super().__init__()
        self.site_shapes = dict(model.site_shapes)
        for name, shape in self.site_shapes.items():
            setattr(self, f"{name}_loc", nn.Parameter(torch.zeros(shape)))
            log_scale = torch.full(shape, math.log(init_scale))
            setattr(self, f"{name}_log_scale", nn.Parameter(log_scale))

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Emit every site; the arguments of the model are not read."""
        return {name: pyro.sample(name, self.posterior(name)) for name in self.site_shapes}

    def posterior(self, name: str) -> dist.Distribution:
        """q of one site."""
        loc, log_scale = getattr(self, f"{name}_loc"), getattr(self, f"{name}_log_scale")
        q: dist.Distribution = dist.Laplace(loc, log_scale.exp())
        if name in ("shrinkage", "global_shrinkage"):  # positive
            q = dist.TransformedDistribution(q, [dist.transforms.ExpTransform()])
        return q.to_event(len(self.site_shapes[name]))


def build(model: DAK, init_scale: float = 0.1) -> LaplaceTailsGuide:
    """Options: `init_scale`."""
    return LaplaceTailsGuide(model, init_scale)
