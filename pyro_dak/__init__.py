"""Deep additive kernels in Pyro: a network whose last layer is an additive Gaussian process."""

from pyro_dak.activation import KernelActivation
from pyro_dak.grids import DyadicGrid
from pyro_dak.kernels import LaplaceKernel, MaternKernel, RBFKernel

__all__ = [
    "DyadicGrid",
    "KernelActivation",
    "LaplaceKernel",
    "MaternKernel",
    "RBFKernel",
]

__version__ = "0.1.0"
