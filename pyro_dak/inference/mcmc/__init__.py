"""Hamiltonian Monte Carlo over the weights of the last layer."""

from pyro_dak.inference.mcmc.nuts import MCMCRun, run_hmc, run_nuts

__all__ = ["MCMCRun", "run_hmc", "run_nuts"]
