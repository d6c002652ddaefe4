"""What a fitted model is worth: scores, checks, comparisons, exports and plots."""

from pyro_dak.diagnostics.summary import Finding, Summary, summary

__all__ = ["Finding", "Summary", "summary"]
