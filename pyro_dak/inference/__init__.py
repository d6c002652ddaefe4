"""Posteriors of the weights: guides, objectives, the exact posterior, and Markov chains."""
