"""Call every public function with odd arguments."""

from pathlib import Path

import torch

from tests.attack import Outcome
from tests.fuzz import fuzz

__all__ = ["attack"]


def attack(count: int, seed: int, folder: Path) -> Outcome:
    """So many calls: a right answer, or an error in our own words."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        faults = fuzz(count, seed)
    finally:
        torch.set_default_dtype(dtype)
    return Outcome(count, [f"{f.target}({f.arguments}): {f.answer}" for f in faults])
