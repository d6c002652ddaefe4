"""What a fitted model is worth: scores, checks, comparisons, exports and plots.

Plots are in `pyro_dak.diagnostics.plots`, and scores in `pyro_dak.diagnostics.scores`. ArviZ and
matplotlib are imported when they are first needed.
"""

from pyro_dak.diagnostics.arviz import to_arviz
from pyro_dak.diagnostics.checks import (
    LeaveOneOut,
    PredictiveCheck,
    k_hat,
    loo,
    pit_values,
    posterior_predictive_check,
)
from pyro_dak.diagnostics.comparison import PosteriorComparison, compare_posteriors
from pyro_dak.diagnostics.sbc import SBCResult, simulation_based_calibration
from pyro_dak.diagnostics.summary import Finding, Summary, summary

__all__ = [
    "Finding",
    "LeaveOneOut",
    "PosteriorComparison",
    "PredictiveCheck",
    "SBCResult",
    "Summary",
    "compare_posteriors",
    "k_hat",
    "loo",
    "pit_values",
    "posterior_predictive_check",
    "simulation_based_calibration",
    "summary",
    "to_arviz",
]
