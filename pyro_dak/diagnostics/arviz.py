"""Any posterior for ArviZ, 0.x (InferenceData) and 1.x (DataTree), with named dimensions."""

import importlib
import inspect
import warnings
from typing import Any

import torch
from torch import Tensor

from pyro_dak.inference.densities import (
    cached_inputs,
    checked_data,
    log_joint,
    log_likelihood,
    noise_scale,
    predictive_draws,
)
from pyro_dak.inference.draws import Draws, Posterior, draw_posterior
from pyro_dak.model.dak import DAK

__all__ = ["import_optional", "to_arviz"]

Group = dict[str, Tensor]


def import_optional(name: str) -> Any:
    """A module of the extra "diagnostics", or an error that says how to install it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces 1.0 at import
            return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"This needs {name.split('.')[0]}, which is not installed. "
            "Run `pip install 'pyro_dak[diagnostics]'`."
        ) from error


@torch.no_grad()
def to_arviz(
    model: DAK,
    posterior: Posterior,
    x: Tensor,
    y: Tensor | None = None,
    *,
    num_samples: int = 250,
    num_chains: int = 4,
    posterior_predictive: bool = True,
    seed: int | None = 0,
) -> Any:
    """A posterior with its predictions and log-likelihoods, as ArviZ wants it.

    Groups: `posterior` (the sites, with dimensions `output, unit, node`; a heteroscedastic model
    has `function` in the place of `output`), `sample_stats` (of a sampler: `lp`, `diverging`,
    `n_steps`, `step_size`; of a guide: `log_p` and `log_q`, log p(y, w) and log q(w) at its draws),
    `posterior_predictive`, `log_likelihood` (of each row, dimension `obs_id`, summed over outputs),
    `observed_data`, and `constant_data` (inputs of the units, their scales, the nodes).

    Args:
        model: the model.
        posterior: a guide, an exact posterior, an MCMC run, or a dictionary of samples.
        x: inputs, `(N, ...)`.
        y: targets; without them there are no log-likelihoods, `log_p` or observed data.
        num_samples: draws per chain from a guide.
        num_chains: chains that the independent draws of a guide are laid out as.
        posterior_predictive: whether to draw y; one draw and row for each draw of the weights.
        seed: of all draws; None goes on from torch's global state.

    Returns:
        An `arviz.InferenceData`, or with ArviZ 1.x an `xarray.DataTree`.
    """
    arviz = import_optional("arviz")
    if y is not None:
        x, y = checked_data(model, x, y)
    draws = draw_posterior(
        model, posterior, num_samples=num_samples, num_chains=num_chains, x=x, seed=seed
    )
    h = cached_inputs(model, x)
    flat = draws.flat()
    groups: dict[str, Group] = {"posterior": draws.sites, "sample_stats": dict(draws.stats)}
    if posterior_predictive:
        with torch.random.fork_rng(enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed + 1)
            y_new = predictive_draws(model, h, flat)
        groups["posterior_predictive"] = {"y": _by_chain(_drop_single_output(y_new, 2), draws)}
    if y is not None:
        y = y.to(h.device)
        groups["log_likelihood"] = {"y": _by_chain(log_likelihood(model, h, y, flat), draws)}
        groups["observed_data"] = {"y": _drop_single_output(y, 1)}
    groups["constant_data"] = _constant_data(model, x, h)
    if draws.log_q is not None:
        groups["sample_stats"]["log_q"] = draws.log_q
        if y is not None:
            groups["sample_stats"]["log_p"] = _by_chain(log_joint(model, h, y, flat), draws)
    return _from_groups(arviz, groups, *_names(model, len(x), x))


def _by_chain(values: Tensor, draws: Draws) -> Tensor:
    return values.unflatten(0, (draws.num_chains, draws.num_samples))


def _drop_single_output(values: Tensor, row_dims: int) -> Tensor:
    """A single output needs no dimension: `(..., N)` from `(..., N, 1)`."""
    has_one = values.dim() > row_dims and values.shape[-1] == 1
    return values.squeeze(-1) if has_one else values


def _constant_data(model: DAK, x: Tensor, h: Tensor) -> Group:
    grid = model.layer.activation.grid
    data = {
        "unit_inputs": h,
        "unit_scale": model.unit_scale.detach(),
        "inducing_points": grid.inducing_points,
    }
    return data | ({"x": x} if x.dim() == 2 else {})


def _names(model: DAK, num_rows: int, x: Tensor) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Coordinates and dimensions."""
    F, P, M = model.site_shapes["z"]
    output = "output" if model.num_outputs == F else "function"
    coords: dict[str, Any] = {
        output: range(F),
        "output": range(model.num_outputs),
        "unit": range(P),
        "node": range(M),
        "obs_id": range(num_rows),
    }
    dims = {
        "z": [output, "unit", "node"],
        "mu": [output],
        "linear": [output, "unit"],
        "shrinkage": ["unit"],
        "unit_scale": ["unit"],
        "unit_inputs": ["obs_id", "unit"],
        "inducing_points": ["node"],
        "y": ["obs_id"],
    }
    likelihood = model.likelihood
    has_columns = likelihood.placeholder_targets(1, model.num_outputs).dim() > 1
    if has_columns and model.num_outputs > 1:
        dims["y"].append("output")
    noise = noise_scale(likelihood)
    if noise is not None and noise.dim() == 1:
        dims["noise_scale"] = ["output"]
    if x.dim() == 2:
        coords["feature"] = range(x.shape[1])
        dims["x"] = ["obs_id", "feature"]
    return {name: list(values) for name, values in coords.items()}, dims


def _from_groups(
    arviz: Any, groups: dict[str, Group], coords: dict[str, Any], dims: dict[str, list[str]]
) -> Any:
    arrays = {
        group: {name: value.detach().cpu().numpy() for name, value in values.items()}
        for group, values in groups.items()
        if values
    }
    used = {n: dims[n] for n in {n for values in arrays.values() for n in values} & set(dims)}
    names = {dim for of_variable in used.values() for dim in of_variable}
    coords = {name: values for name, values in coords.items() if name in names}
    if "posterior" in inspect.signature(arviz.from_dict).parameters:  # ArviZ 0.x
        return arviz.from_dict(**arrays, coords=coords, dims=used)
    return arviz.from_dict(arrays, coords=coords, dims=used)
