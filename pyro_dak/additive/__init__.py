"""The mathematics of the paper, sections 3 and 4, on plain tensors.

Read `grid`, `kernels`, `factor`, `bridge`, `activation` and `layer` in this order; `scaling` brings
features into the grid, `gaussian` and `quadrature` hold closed forms and integrals.
"""

from pyro_dak.additive.activation import KernelActivation
from pyro_dak.additive.grid import DyadicGrid
from pyro_dak.additive.kernels import Kernel, LaplaceKernel, MaternKernel, RBFKernel
from pyro_dak.additive.layer import AdditiveLayer, Weights

__all__ = [
    "AdditiveLayer",
    "DyadicGrid",
    "Kernel",
    "KernelActivation",
    "LaplaceKernel",
    "MaternKernel",
    "RBFKernel",
    "Weights",
]
