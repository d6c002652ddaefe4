"""Variational families, one per file, all Gaussian over the weights of the last layer."""

from pyro_dak.inference.guides.base import GaussianGuide, MeanFieldGuide, UnitBlockGuide
from pyro_dak.inference.guides.joint import FullRankGuide, LowRankGuide

__all__ = ["FullRankGuide", "GaussianGuide", "LowRankGuide", "MeanFieldGuide", "UnitBlockGuide"]
