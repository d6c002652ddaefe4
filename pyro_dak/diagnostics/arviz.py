"""Export of any posterior to ArviZ 0.x (InferenceData) or 1.x (DataTree), with named dimensions."""

import inspect
import math
import warnings
from typing import Any

import torch
from torch import Tensor

from pyro_dak.diagnostics.importance import pareto_smooth
from pyro_dak.inference.densities import (
    cached_inputs,
    log_prior,
    noise_scale,
    predictive_draws,
    unit_data,
)
from pyro_dak.inference.densities import log_likelihood as row_log_likelihoods
from pyro_dak.inference.draws import Posterior, draw_posterior
from pyro_dak.model.dak import DAK
from pyro_dak.model.inputs import check_inputs
from pyro_dak.model.rows import Inputs, num_numbers, num_rows
from pyro_dak.validation import import_optional

__all__ = ["to_arviz"]

Group = dict[str, Tensor]


@torch.no_grad()
def to_arviz(
    model: DAK,
    posterior: Posterior,
    x: Inputs,
    y: Tensor | None = None,
    *,
    num_samples: int = 250,
    num_chains: int = 4,
    posterior_predictive: bool = True,
    log_likelihood: bool = True,
    seed: int | None = 0,
) -> Any:
    """A posterior with its predictions and log-likelihoods, in the form that ArviZ reads.

    This is an `arviz.InferenceData`, or with ArviZ 1.x an `xarray.DataTree`. x is `(N, ...)`.
    The groups are `posterior` (the sites, with dimensions `output, unit, node`; a heteroscedastic
    model has `function` in the place of `output`), `sample_stats` (of a sampler `lp`, `energy`,
    `diverging`, `n_steps`, `step_size`, of Pyro's `MCMC` `lp` and `diverging`; of a guide `log_p`
    and `log_q`, log p(y, w) and log q(w) at its draws, and `log_weight`, the logarithms of their
    Pareto-smoothed importance weights, which sum to one),
    `posterior_predictive`, `log_likelihood` (of each row, dimension `obs_id`, summed over outputs),
    `observed_data`, and `constant_data` (inputs of the units, their scales, and the nodes).

    ArviZ takes all draws for draws from the posterior, and `az.loo` of a bad guide looks healthy.
    The groups `posterior` and `log_likelihood` of a guide therefore carry its `k_hat` as an
    attribute, and above 0.7 there is a warning. `pyro_dak.diagnostics.loo`, and
    `az.loo_approximate_posterior` of ArviZ 1.x with `log_p` and `log_q`, correct for the guide.

    Args:
        y: targets. Without them there are no log-likelihoods, no `log_p` and no observed data.
        num_samples: number of draws per chain from a guide.
        num_chains: number of chains that the independent draws from a guide are arranged in.
        posterior_predictive: whether to draw one y at each row for each draw of the weights.
        log_likelihood: whether to export log-likelihoods, if there are targets.
        seed: seed of all draws; with None, torch's global state is used.
    """
    arviz = import_optional("arviz")
    check_inputs(model, x)
    draws = draw_posterior(
        model, posterior, num_samples=num_samples, num_chains=num_chains, x=x, seed=seed
    )
    if y is None:
        h = cached_inputs(model, x, given=draws.sites)
    else:
        h, y = unit_data(model, x, y, given=draws.sites)
    flat, stats, batch = draws.flat(), dict(draws.stats), (draws.num_chains, draws.num_samples)
    groups: dict[str, Group] = {"posterior": draws.sites, "sample_stats": stats}
    if posterior_predictive:
        y_new = predictive_draws(model, h, flat, None if seed is None else seed + 1)
        y_new = y_new.flatten(1) if model.num_outputs == 1 else y_new
        groups["posterior_predictive"] = {"y": y_new.unflatten(0, batch)}
    if draws.log_q is not None:
        stats["log_q"] = draws.log_q
    attrs: dict[str, Any] = {}
    if y is not None:
        log_lik = row_log_likelihoods(model, h, y, flat)
        if log_likelihood:
            groups["log_likelihood"] = {"y": log_lik.unflatten(0, batch)}
        groups["observed_data"] = {"y": y.flatten() if model.num_outputs == 1 else y}
        if draws.log_q is not None:
            stats["log_p"] = (log_prior(model, flat) + log_lik.sum(-1)).unflatten(0, batch)
            smoothed = pareto_smooth((stats["log_p"] - draws.log_q).flatten())
            stats["log_weight"] = smoothed.log_weights.unflatten(0, batch)
            attrs = _marks_of_a_guide(float(smoothed.k_hat), draws.is_point, log_likelihood)
        elif "diverging" in stats and "lp" not in stats:  # a run of Pyro
            stats["lp"] = (log_prior(model, flat) + log_lik.sum(-1)).unflatten(0, batch)
    groups["constant_data"] = {
        "unit_inputs": h,
        "unit_scale": model.unit_scale.detach(),
        "inducing_points": model.layer.activation.grid.inducing_points,
    }
    if isinstance(x, Tensor) and x.dim() == 2:
        groups["constant_data"]["x"] = x
    data = _from_groups(arviz, groups, *_names(model, x))
    for group in ("posterior", "log_likelihood") if attrs else ():
        if group in groups:
            data[group].attrs.update(attrs)
    return data


def _marks_of_a_guide(k: float, is_point: bool, has_log_likelihood: bool) -> dict[str, Any]:
    """Attributes that tell the draws of a guide from those of the posterior, with a warning."""
    k = math.inf if is_point else k
    if k > 0.7 and has_log_likelihood:
        warnings.warn(
            f"The draws come from a guide far from the posterior: its k-hat is {k:.2f}, above 0.7. "
            "`az.loo` and `az.compare` do not know that, and look healthy. Use "
            "`pyro_dak.diagnostics.loo`, or leave them out with `log_likelihood=False`.",
            stacklevel=3,
        )
    return {"k_hat": k, "note": "at draws from a guide, not from the posterior"}


def _names(model: DAK, x: Inputs) -> tuple[dict[str, int], dict[str, list[str]]]:
    """The size of each dimension, and the dimensions of each variable."""
    F, P, M = model.site_shapes["z"]
    output = "output" if model.num_outputs == F else "function"
    sizes = {output: F, "output": model.num_outputs, "unit": P, "node": M}
    sizes |= {"obs_id": num_rows(x), "feature": num_numbers(x)}
    dims = {
        "z": [output, "unit", "node"],
        "mu": [output],
        "linear": [output, "unit"],
        "shrinkage": ["unit"],
        "unit_scale": ["unit"],
        "unit_inputs": ["obs_id", "unit"],
        "inducing_points": ["node"],
        "x": ["obs_id", "feature"],
        "y": ["obs_id"],
    }
    has_columns = model.likelihood.placeholder_targets(1, model.num_outputs).dim() > 1
    if has_columns and model.num_outputs > 1:
        dims["y"].append("output")
    noise = noise_scale(model.likelihood)
    if noise is not None and noise.dim() == 1:
        dims["noise_scale"] = ["output"]
    return sizes, dims


def _from_groups(
    arviz: Any, groups: dict[str, Group], sizes: dict[str, int], dims: dict[str, list[str]]
) -> Any:
    arrays = {
        group: {name: value.detach().cpu().numpy() for name, value in values.items()}
        for group, values in groups.items()
        if values
    }
    variables = {name for values in arrays.values() for name in values}
    dims = {name: names for name, names in dims.items() if name in variables}
    coords = {name: list(range(sizes[name])) for names in dims.values() for name in names}
    if "posterior" in inspect.signature(arviz.from_dict).parameters:  # ArviZ 0.x
        return arviz.from_dict(**arrays, coords=coords, dims=dims)
    return arviz.from_dict(arrays, coords=coords, dims=dims)
