"""Acting on uncertainty: surrogates for optimisation, and rows worth a label."""
