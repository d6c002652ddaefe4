"""Simulation-based calibration of the last layer: does the inference find what made the data?

Weights are drawn from the prior and data from the weights, at the features of given inputs. If the
posterior is right, the rank of the true value among draws from it is uniform (Talts et al., 2018).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dak.diagnostics.calibration import chi_square_p_value
from pyro_dak.inference.densities import (
    cached_inputs,
    draw_functions,
    log_likelihood,
    noise_scale,
    predictive_draws,
)
from pyro_dak.inference.draws import Posterior, draw_posterior, site_labels
from pyro_dak.inference.exact import exact_posterior
from pyro_dak.model.dak import DAK
from pyro_dak.model.modes import evaluating
from pyro_dak.validation import check_finite, check_integer

__all__ = ["PosteriorFn", "SBCResult", "simulation_based_calibration"]

PosteriorFn = Callable[[DAK, Tensor, Tensor], Posterior]


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
        """Chi-square p-value of every quantity, `(quantities,)`."""
        return chi_square_p_value(self.counts(num_bins))

    def p_value(self, num_bins: int = 10) -> float:
        """Smallest p-value times the number of quantities: small if any of them is off."""
        p_values = self.p_values(num_bins)
        return min(1.0, float(p_values.min()) * len(p_values))


@torch.no_grad()
def simulation_based_calibration(
    model: DAK,
    x: Tensor,
    posterior_fn: PosteriorFn | None = None,
    *,
    num_simulations: int = 200,
    num_samples: int = 99,
    num_function_rows: int = 3,
    seed: int = 0,
    progress: bool = True,
) -> SBCResult:
    """Ranks of every weight, of f at a few inputs and of the log-likelihood, over simulations.

    Args:
        model: with proper priors; evaluated in eval mode.
        x: inputs that the simulated data are at, `(N, ...)`; a few dozen are enough.
        posterior_fn: from (model, x, y) to a posterior, a guide trained on them, say. By default
            the exact posterior, for Gaussian likelihoods, all simulations at once.
        num_simulations: simulated data sets.
        num_samples: draws that a true value is ranked among, the same for all.
        num_function_rows: rows of x at which f is ranked.
        seed: of all draws.
        progress: show a bar.
    """
    check_integer("num_simulations", num_simulations, minimum=2)
    check_integer("num_samples", num_samples, minimum=1)
    check_finite("x", x)
    h = cached_inputs(model, x)
    with evaluating(model), torch.random.fork_rng():
        torch.manual_seed(seed)
        truths = _draw_prior(model, num_simulations, h)
        ys = predictive_draws(model, h, truths)  # (simulations, N[, C])
        exact_fn = _exact_draws(model, x, h, ys) if posterior_fn is None else None
        ranks = []
        bar = tqdm(range(num_simulations), desc="sbc", delay=2.0, disable=not progress)
        for s in bar:
            truth = {name: value[s : s + 1] for name, value in truths.items()}
            if exact_fn is not None:
                sites = exact_fn(s, num_samples)
            else:
                assert posterior_fn is not None
                with torch.enable_grad():
                    posterior = posterior_fn(model, x, ys[s])
                sites = _thinned(model, posterior, x, num_samples)
            ranks.append(_ranks(model, h, ys[s], truth, sites, num_function_rows))
    rows = range(min(num_function_rows, len(h)))
    functions = [f"f[{n},{c}]" for n in rows for c in range(model.num_functions)]
    return SBCResult(
        torch.stack(ranks), [*site_labels(model), *functions, "log_likelihood"], num_samples
    )


def _draw_prior(model: DAK, num_draws: int, like: Tensor) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    for name in model.site_shapes:
        prior = model.conditional_prior(name, values, like)
        values[name] = prior.sample(() if prior.batch_shape else (num_draws,))
    return values


def _exact_draws(
    model: DAK, x: Tensor, h: Tensor, ys: Tensor
) -> Callable[[int, int], dict[str, Tensor]]:
    """Draws from the exact posterior of any simulation.

    The covariance is the same for all of them, and the mean is affine in y,
    loc(y) = loc(0) + S Phi^T y / noise^2, so that one factorisation serves all simulations.
    """
    guide = exact_posterior(model, x, torch.zeros_like(ys[0]).to(x.dtype)).guide
    tril = guide.scale_tril.double()  # (F, K, K)
    noise = noise_scale(model.likelihood)
    assert noise is not None
    noise = noise.expand(model.num_outputs)
    moment = torch.einsum("nk,snf->sfk", model.layer.design(h), ys / noise.square())
    shift = (tril @ (tril.mT @ moment.unsqueeze(-1))).squeeze(-1)
    locs = guide.loc.double() + shift  # (simulations, F, K)

    def draw_fn(s: int, num_samples: int) -> dict[str, Tensor]:
        normal = torch.randn(num_samples, *locs.shape[1:], dtype=locs.dtype, device=locs.device)
        flat = locs[s] + torch.einsum("fkl,sfl->sfk", tril, normal)
        weights = model.layer.split(flat)
        sites = {"mu": weights.mu, "linear": weights.linear, "z": weights.z}
        return {name: value for name, value in sites.items() if value is not None}

    return draw_fn


def _thinned(model: DAK, posterior: Posterior, x: Tensor, num_samples: int) -> dict[str, Tensor]:
    """`num_samples` draws; a longer run is thinned, which makes its draws less dependent."""
    flat = draw_posterior(model, posterior, num_samples=num_samples, x=x).flat()
    S = len(flat["mu"])
    if num_samples > S:
        raise ValueError(
            f"`num_samples`={num_samples} draws are to be ranked, but the posterior has {S}."
        )
    index = torch.linspace(0, S - 1, num_samples).round().long()
    return {name: value[index] for name, value in flat.items()}


def _ranks(
    model: DAK,
    h: Tensor,
    y: Tensor,
    truth: dict[str, Tensor],
    sites: dict[str, Tensor],
    num_rows: int,
) -> Tensor:
    """#{draws < truth} of every quantity, `(quantities,)`."""

    def quantities(values: dict[str, Tensor]) -> Tensor:
        weights = [values[name].flatten(1) for name in model.site_shapes]
        f = draw_functions(model, h[:num_rows], values).flatten(1)
        log_lik = log_likelihood(model, h, y, values).sum(-1, keepdim=True)
        return torch.cat([*weights, f, log_lik], -1)

    return (quantities(sites) < quantities(truth)).sum(0)
