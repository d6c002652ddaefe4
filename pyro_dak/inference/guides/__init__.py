"""Variational families, one per file, all Gaussian over the weights of the last layer."""

from pyro_dak.inference.guides.base import GaussianGuide
from pyro_dak.inference.guides.joint import FullRankGuide, LowRankGuide, TrilGuide
from pyro_dak.inference.guides.mean_field import MeanFieldGuide
from pyro_dak.inference.guides.natural import NaturalGuide
from pyro_dak.inference.guides.unit_block import UnitBlockGuide

__all__ = [
    "FullRankGuide",
    "GaussianGuide",
    "LowRankGuide",
    "MeanFieldGuide",
    "NaturalGuide",
    "TrilGuide",
    "UnitBlockGuide",
]
