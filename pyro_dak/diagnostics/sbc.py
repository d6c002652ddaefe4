"""Simulation-based calibration of the last layer: does inference find what made the data?

Weights are drawn from the prior, and data from the weights, at the features of given inputs. If the
posterior is right, the rank of a true value among draws from it is uniform (Talts et al., 2018).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pyro
import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dak.diagnostics.calibration import chi_square_p_value
from pyro_dak.inference.densities import (
    cached_inputs,
    draw_functions,
    log_likelihood,
    predictive_draws,
    seeded,
)
from pyro_dak.inference.draws import Posterior, draw_posterior, site_labels
from pyro_dak.inference.exact import exact_posterior
from pyro_dak.model.dak import DAK
from pyro_dak.model.inputs import check_inputs
from pyro_dak.model.modes import evaluating
from pyro_dak.model.rows import Inputs
from pyro_dak.validation import check_integer, check_kind, check_seed

__all__ = ["PosteriorFn", "SBCResult", "simulation_based_calibration"]

PosteriorFn = Callable[[DAK, Inputs, Tensor], Posterior]


@dataclass(frozen=True)
class SBCResult:
    """Ranks 0 .. num_samples of the true values, `(simulations, quantities)`, with their names."""

    ranks: Tensor
    names: list[str]
    num_samples: int

    def counts(self, num_bins: int = 10) -> Tensor:
        """Histograms of the ranks, `(quantities, num_bins)`."""
        check_integer("num_bins", num_bins, minimum=2, maximum=self.num_samples + 1)
        if (self.num_samples + 1) % num_bins:
            raise ValueError(
                f"`num_bins` must divide the {self.num_samples + 1} ranks, so that bins are "
                f"equally likely; got {num_bins}."
            )
        bins = self.ranks.mT * num_bins // (self.num_samples + 1)
        return torch.nn.functional.one_hot(bins, num_bins).sum(-2)

    def p_values(self, num_bins: int = 10) -> Tensor:
        """The p-value of a chi-square test of each quantity, `(quantities,)`."""
        return chi_square_p_value(self.counts(num_bins))

    def p_value(self, num_bins: int = 10) -> float:
        """The smallest p-value times the number of quantities: small if any of them is wrong."""
        p_values = self.p_values(num_bins)
        return min(1.0, float(p_values.min()) * len(p_values))


@torch.no_grad()
def simulation_based_calibration(
    model: DAK,
    x: Inputs,
    posterior_fn: PosteriorFn = exact_posterior,
    *,
    num_simulations: int = 200,
    num_samples: int = 99,
    num_function_rows: int = 3,
    seed: int = 0,
    progress: bool = True,
) -> SBCResult:
    """Ranks of every weight, of f at a few inputs, and of the log-likelihood, over simulations.

    Args:
        model: the model, with proper priors; it is evaluated in eval mode.
        x: the inputs at which data are simulated, `(N, ...)`; a few dozen are enough.
        posterior_fn: a function from (model, x, y) to a posterior, for example to a guide that it
            trains. By default the exact posterior, which Gaussian likelihoods have.
        num_samples: number of draws among which a true value is ranked.
        num_function_rows: number of rows of x at which f is ranked.
    """
    check_integer("num_simulations", num_simulations, minimum=2)
    check_integer("num_samples", num_samples, minimum=1)
    check_integer("num_function_rows", num_function_rows, minimum=0)
    check_seed("seed", seed)
    check_kind("posterior_fn", posterior_fn, Callable, "a function of model, x and y")
    check_inputs(model, x)
    h = cached_inputs(model, x)
    rows = h[:num_function_rows]

    @torch.no_grad()
    def quantities(values: Mapping[str, Tensor], y: Tensor) -> Tensor:
        """All that is ranked, of each draw, `(S, quantities)`."""
        weights = [values[name].reshape(len(values[name]), -1) for name in model.site_shapes]
        f = draw_functions(model, rows, values).flatten(1)
        log_lik = log_likelihood(model, h, y, values).sum(-1, keepdim=True)
        return torch.cat([*weights, f, log_lik], -1)

    ranks = []
    with evaluating(model), seeded(seed):
        with pyro.plate("simulations", num_simulations):
            truths = model.sample_weights(h)
        ys = predictive_draws(model, h, truths)  # (simulations, N[, C])
        for s in tqdm(range(num_simulations), desc="sbc", delay=2.0, disable=not progress):
            with torch.enable_grad():
                posterior = posterior_fn(model, x, ys[s])
            sites = _thinned(model, posterior, x, num_samples)
            truth = {name: value[s : s + 1] for name, value in truths.items()}
            ranks.append((quantities(sites, ys[s]) < quantities(truth, ys[s])).sum(0))
    functions = [f"f[{n},{c}]" for n in range(len(rows)) for c in range(model.num_functions)]
    names = [*site_labels(model), *functions, "log_likelihood"]
    return SBCResult(torch.stack(ranks), names, num_samples)


def _thinned(model: DAK, posterior: Posterior, x: Inputs, num_samples: int) -> dict[str, Tensor]:
    """`num_samples` draws. A longer run is thinned, which makes its draws less dependent."""
    flat = draw_posterior(model, posterior, num_samples=num_samples, x=x).flat()
    S = len(flat["mu"])
    if num_samples > S:
        raise ValueError(
            f"A true value is to be ranked among `num_samples`={num_samples} draws, but the "
            f"posterior has only {S}."
        )
    index = torch.linspace(0, S - 1, num_samples).round().long()
    return {name: value[index] for name, value in flat.items()}
