"""DAK as a surrogate for BoTorch, under a name that is easy to find; it needs that package."""

from pyro_dak.acting.botorch import DAKModel

__all__ = ["DAKModel"]
