"""One-dimensional stationary kernels k(a, b) with unit variance, as data."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_dak.annotations import Float
from pyro_dak.validation import check_kind, check_positive, check_real

__all__ = ["Kernel", "LaplaceKernel", "MaternKernel", "RBFKernel"]


@dataclass(frozen=True)
class Kernel(ABC):
    """A function of the distance r = |a - b|; k(0) = 1.

    Subclasses implement `of_distance`. `is_markov` says that the process is Markov, which is
    what the sparse factor and the local route stand on. A kernel is plain data: a learned
    lengthscale is a parameter of `KernelActivation`, and one with a prior is a site of the model.

    Args:
        lengthscale: a number; a tensor, list or tuple `(P,)` with one for each unit, which is kept
            as a tuple of numbers; or a prior: a distribution, a `Prior` of `pyro_dak`, or a
            function from the shape `(P,)` to a distribution, positive in each case.
        learn: whether each unit learns its lengthscale, starting at the given ones.
    """

    lengthscale: Any = 1.0
    learn: bool = field(default=False, kw_only=True)
    is_markov: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengthscale", _plain_lengthscale(self.lengthscale))
        check_kind("learn", self.learn, bool, "True or False")
        if self.learn and self.has_prior:
            raise ValueError(
                "`learn` must be False where the lengthscale has a prior: the site `lengthscale` "
                "is learned by inference. Give a number with `learn=True`, or a prior without."
            )

    @property
    def has_prior(self) -> bool:
        """Whether the lengthscale is random."""
        return not isinstance(self.lengthscale, float | tuple)

    @property
    def is_fixed_number(self) -> bool:
        """Whether all units have one lengthscale, which stays as it is."""
        return isinstance(self.lengthscale, float) and not self.learn

    @abstractmethod
    def of_distance(self, r: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """k as a function of the distance r >= 0, elementwise."""

    def of_scaled_distance(self, q: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """k as a function of q = r / lengthscale, whatever its own lengthscale is."""
        return replace(self, lengthscale=1.0, learn=False).of_distance(q)

    def __call__(
        self,
        a: Float[Tensor, "*batch"],
        b: Float[Tensor, " m"],
        lengthscale: Float[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "*result m"]:
        """Kernel matrix k(a_i, b_m), `(..., M)` for a of shape `(...)`.

        Lengthscales for each unit are along the last axis of a, `(..., P)`. A `lengthscale` that
        is given, of a shape that broadcasts with a, takes the place of the kernel's own.
        """
        r = (a.unsqueeze(-1) - b).abs()
        if lengthscale is None:
            if isinstance(self.lengthscale, float):
                return self.of_distance(r)
            if self.has_prior:
                raise ValueError(
                    "`lengthscale` must be given where it has a prior: it is a site of the model, "
                    "and the kernel alone does not know its value."
                )
            lengthscale = torch.tensor(self.lengthscale, dtype=r.dtype, device=r.device)
        return self.of_scaled_distance(r / lengthscale.unsqueeze(-1))


def _plain_lengthscale(value: Any) -> Any:
    """A float, a tuple of floats, or a prior as it is."""
    if isinstance(value, Tensor) or type(value).__module__ == "numpy":
        value = value.tolist()
    if isinstance(value, list | tuple):
        if not value:
            raise ValueError("`lengthscale` must have a number for each unit; got none.")
        for p, number in enumerate(value):
            check_positive(f"lengthscale[{p}]", number)
        return tuple(float(number) for number in value)
    is_distribution = isinstance(value, torch.distributions.Distribution)
    if is_distribution or hasattr(value, "element") or callable(value):
        return value
    check_positive("lengthscale", value)
    return float(value)


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
