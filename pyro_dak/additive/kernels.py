"""One-dimensional stationary kernels k(a, b) with unit variance and a fixed lengthscale."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from pyro_dak.validation import check_positive, check_real

__all__ = ["Kernel", "LaplaceKernel", "MaternKernel", "RBFKernel"]


@dataclass(frozen=True)
class Kernel(ABC):
    """A function of the distance r = |a - b|; k(0) = 1.

    Subclasses implement `of_distance`. `is_markov` says that the process is Markov, which is
    what the sparse factor and the local route stand on.
    """

    lengthscale: float = 1.0
    is_markov: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_positive("lengthscale", self.lengthscale)
        object.__setattr__(self, "lengthscale", float(self.lengthscale))

    @abstractmethod
    def of_distance(self, r: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """k as a function of the distance r >= 0, elementwise."""

    def __call__(
        self, a: Float[Tensor, "*batch"], b: Float[Tensor, " m"]
    ) -> Float[Tensor, "*batch m"]:
        """Kernel matrix k(a_i, b_m), `(..., M)` for a of shape `(...)`."""
        return self.of_distance((a.unsqueeze(-1) - b).abs())


@dataclass(frozen=True)
class LaplaceKernel(Kernel):
    """k(r) = exp(-r / lengthscale); Matern-1/2, the Ornstein-Uhlenbeck process (paper, eq. 5)."""

    is_markov: ClassVar[bool] = True

    def of_distance(self, r: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return (-r / self.lengthscale).exp()


@dataclass(frozen=True)
class MaternKernel(Kernel):
    """Matern kernel with nu = 1.5 or 2.5.

    With q = sqrt(2 nu) r / lengthscale: k = (1 + q) exp(-q) for nu = 1.5,
    k = (1 + q + q^2 / 3) exp(-q) for nu = 2.5.
    """

    nu: float = 2.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_real("nu", self.nu)
        if self.nu not in (1.5, 2.5):
            raise ValueError(f"`nu` must be 1.5 or 2.5; got {self.nu}. For 0.5 use LaplaceKernel.")

    def of_distance(self, r: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        q = math.sqrt(2 * self.nu) / self.lengthscale * r
        polynomial = 1 + q if self.nu == 1.5 else 1 + q + q.square() / 3
        return polynomial * (-q).exp()


@dataclass(frozen=True)
class RBFKernel(Kernel):
    """k(r) = exp(-r^2 / (2 lengthscale^2)); the squared exponential."""

    def of_distance(self, r: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return (-0.5 * (r / self.lengthscale).square()).exp()
