"""Acting on uncertainty: surrogates for optimisation, and rows worth a label."""

from pyro_dak.acting.acquire import acquire

__all__ = ["acquire"]
