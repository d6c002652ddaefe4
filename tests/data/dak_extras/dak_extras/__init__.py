"""One class of every kind that pyro_dak can save and load by the name it is offered under."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_dak import DAK
from pyro_dak.additive.kernels import Kernel
from pyro_dak.model.likelihoods import Likelihood


@dataclass(frozen=True)
class RationalQuadraticKernel(Kernel):
    """k(r) = (1 + r^2 / (2 alpha lengthscale^2))^(-alpha)."""

    alpha: float = 1.0

    def of_distance(self, r: Tensor) -> Tensor:
        return (1 + (r / self.lengthscale).square() / (2 * self.alpha)) ** -self.alpha


class LogNormalLikelihood(Likelihood):
    """log y = f + noise."""

    def __init__(self, scale: float = 1.0):
        super().__init__()
        self.scale = scale

    def distribution(self, f: Tensor) -> dist.Distribution:
        return dist.LogNormal(f, self.scale).to_event(1)


class LaplaceGuide(PyroModule):
    """Every weight has a Laplace posterior."""

    def __init__(self, model: DAK, num_parts: int = 1, init_scale: float = 0.1):
        super().__init__()
        self.num_parts, self.site_shapes = num_parts, dict(model.site_shapes)
        for name, shape in self.site_shapes.items():
            setattr(self, f"{name}_loc", nn.Parameter(torch.zeros(num_parts, *shape)))
            setattr(self, f"{name}_scale", nn.Parameter(torch.full(shape, init_scale)))

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        return {name: self._sample(name, len(shape)) for name, shape in self.site_shapes.items()}

    def _sample(self, name: str, num_dims: int) -> Tensor:
        loc, scale = getattr(self, f"{name}_loc").mean(0), getattr(self, f"{name}_scale")
        return pyro.sample(name, dist.Laplace(loc, scale).to_event(num_dims))


class ForgetfulGuide(LaplaceGuide):
    """A guide with an argument that it does not keep."""

    def __init__(self, model: DAK, secret: float = 1.0):
        super().__init__(model, init_scale=secret)


class WaveNetwork(nn.Module):
    """sin(W x + b)."""

    def __init__(self, sizes: Sequence[int]):
        super().__init__()
        self.sizes = sizes
        self.linear = nn.Linear(*sizes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin()


class MirroredDAK(DAK):
    """A DAK with an argument of its own."""

    def __init__(self, *args: Any, axis: int = 0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.axis = axis
