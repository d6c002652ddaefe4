"""Acting on uncertainty: surrogates for optimisation, rows worth a label, bandits."""

from pyro_dak.acting.acquire import acquire
from pyro_dak.acting.bandit import ThompsonBandit

__all__ = ["ThompsonBandit", "acquire"]
