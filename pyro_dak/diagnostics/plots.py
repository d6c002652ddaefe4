"""Plots of predictions, components, training, calibration and posteriors.

Every function draws into the axes it is given, or into new ones, and returns them. Matplotlib is
imported when the first plot is made.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy
import torch
from torch import Tensor

from pyro_dak.diagnostics.arguments import check_pit
from pyro_dak.diagnostics.calibration import coverage_curve, reliability_curve
from pyro_dak.diagnostics.checks import LeaveOneOut
from pyro_dak.diagnostics.comparison import PosteriorComparison
from pyro_dak.diagnostics.posterior_moments import gaussian_fit, response, weight_names
from pyro_dak.diagnostics.sbc import SBCResult
from pyro_dak.drawing import INK, MUTED, PALETTE, RULE, new_axes, style_axes
from pyro_dak.inference.densities import cached_inputs
from pyro_dak.inference.draws import Posterior, draw_posterior
from pyro_dak.model.dak import DAK
from pyro_dak.model.inputs import check_inputs, check_model
from pyro_dak.model.likelihoods import CategoricalLikelihood
from pyro_dak.model.rows import Inputs, shown
from pyro_dak.training.plan import History
from pyro_dak.validation import (
    check_floating,
    check_integer,
    check_kind,
    check_probability,
    check_tensor,
)

__all__ = [
    "PALETTE",
    "plot_comparison",
    "plot_components",
    "plot_coverage",
    "plot_k_hat",
    "plot_learning_curves",
    "plot_pit",
    "plot_predictive_band",
    "plot_reliability",
    "plot_sbc",
]

_DASHES: tuple[Any, ...] = ((0, (5, 2)), (0, (2, 1.5)), (0, (5, 1.5, 1, 1.5)))


def _normal_quantile(level: float) -> float:
    """Half the width of the central interval of a standard normal."""
    check_probability("level", level)
    return math.sqrt(2) * float(torch.erfinv(torch.tensor(level, dtype=torch.float64)))


@torch.no_grad()
def plot_predictive_band(
    model: DAK,
    posteriors: Posterior | Mapping[str, Posterior],
    x: Tensor,
    *,
    data: tuple[Tensor, Tensor] | None = None,
    truth: Tensor | None = None,
    level: float = 0.9,
    output: int = 0,
    noise: bool = True,
    ax: Any = None,
) -> Any:
    """The mean of a function of one input with its band, for one posterior or for several.

    The band is mean +- q sd of E[y | f], with q the normal quantile of `level`: it shows what the
    posterior does not know. Dotted lines are the edges of the band of y itself. Of several
    posteriors the last one, the reference, is shaded, and the others are lines on top of it.

    Args:
        x: the inputs to draw at, in ascending order, `(N, 1)`.
        data: observed x and y, which are drawn as points.
        truth: the true function at x.
        level: probability of the band.
        output: which output to draw, or which class's probability.
        noise: whether to draw the edges of the band of y.
    """
    check_inputs(model, x)
    if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] != 1:
        got = tuple(x.shape) if isinstance(x, Tensor) else shown(x)
        raise ValueError(f"`x` must have one column, (N, 1); got {got}.")
    check_integer("output", output, minimum=0, maximum=model.num_outputs - 1)
    ax = new_axes(ax)
    quantile, h, grid = _normal_quantile(level), cached_inputs(model, x), _numpy(x[:, 0])
    is_class = isinstance(model.likelihood, CategoricalLikelihood)
    # A single posterior, which may be a dictionary of samples, has no name.
    is_several = isinstance(posteriors, Mapping) and "mu" not in posteriors
    named: Any = posteriors if is_several else {"": posteriors}
    for i, (name, posterior) in enumerate(named.items()):
        draws = draw_posterior(model, posterior, num_samples=2000, x=x, seed=0)
        parts = response(model, posterior, h, draws)
        mean, sd, noise_var = (_numpy(part[:, output]) for part in parts)
        is_last = i == len(named) - 1
        color, dashes = (PALETTE[0], "-") if is_last else (PALETTE[1 + i % 5], _DASHES[i % 3])
        style = {"color": color, "ls": dashes, "zorder": 2.0 if is_last else 2.5}
        ax.plot(grid, mean, lw=1.8, label=name or f"mean, {level:.0%} band", **style)
        width, outer = quantile * sd, quantile * (sd**2 + noise_var) ** 0.5
        if is_last:
            ax.fill_between(grid, mean - width, mean + width, color=color, alpha=0.18, lw=0)
        for sign in (-1, 1):
            if not is_last:
                ax.plot(grid, mean + sign * width, lw=1.0, **style)
            if noise and not is_class:
                ax.plot(grid, mean + sign * outer, **(style | {"lw": 0.9, "ls": (0, (1, 2))}))
    if truth is not None:
        check_floating("truth", truth)
        if truth.numel() == 0 or truth.shape[:1] != x.shape[:1]:
            raise ValueError(
                f"`truth` must have {len(x)} values, one per row of `x`; got {tuple(truth.shape)}."
            )
        values = _numpy(truth.reshape(len(x), -1)[:, 0])
        ax.plot(grid, values, color=INK, lw=1.1, ls="--", label="truth")
    if data is not None:
        y = _checked_pair(data).reshape(len(data[1]), -1)
        y = y[:, min(output, y.shape[1] - 1)]
        y = (y == output).double() if is_class else y
        ax.plot(_numpy(data[0][:, 0]), _numpy(y), "o", ms=3.2, color=INK, mew=0, label="data")
    return style_axes(ax, "x", f"P(class {output})" if is_class else "y", has_legend=True)


def _checked_pair(data: tuple[Tensor, Tensor]) -> Tensor:
    """The y of observed x `(N, 1)` and y, or an error."""
    check_kind("data", data, tuple | list, "a pair (x, y) of tensors")
    for part in data:
        check_tensor("data", part)
    shapes = [tuple(part.shape) for part in data]
    if len(data) != 2 or len(shapes[0]) != 2 or shapes[0][:1] != shapes[1][:1] or 0 in shapes[1]:
        raise ValueError(f"`data` must be x (N, 1) and y with as many rows; got shapes {shapes}.")
    return data[1]


@torch.no_grad()
def plot_components(
    model: DAK,
    posterior: Posterior,
    x: Inputs,
    *,
    units: Sequence[int] | None = None,
    output: int = 0,
    level: float = 0.9,
    axes: Any = None,
) -> Any:
    """What each unit adds to f against its own input, with a band. Each unit has its own axis.

    The curves are sigma_p g_p over the range of the unit inputs h_p of x `(N, ...)`, the ticks.

    Args:
        units: which units to draw; by default the first six.
        output: which function to draw.
        level: probability of the bands.
    """
    check_model(model)
    if model.has_shrinkage:
        raise NotImplementedError(
            "Components cannot be drawn with a prior on `shrinkage`; draw a model without it."
        )
    check_integer("output", output, minimum=0, maximum=model.num_functions - 1)
    chosen = list(range(min(model.num_units, 6))) if units is None else _checked_units(model, units)
    h, quantile = cached_inputs(model, x), _normal_quantile(level)
    own = slice(output * model.layer.num_weights, (output + 1) * model.layer.num_weights)
    fit, names = gaussian_fit(model, posterior), weight_names(model)[1][own]
    loc, cov = fit.mean[own], fit.cov[own, own]
    axes = new_axes(axes, len(chosen), (2.8, 2.6))
    for i, (ax, p) in enumerate(zip(numpy.atleast_1d(axes), chosen, strict=True)):
        grid = torch.linspace(float(h[:, p].min()), float(h[:, p].max()), 300, dtype=h.dtype)
        is_own = torch.tensor([name == f"unit {p}" for name in names], device=h.device)
        design = model.layer.design(grid.to(h.device).unsqueeze(-1).expand(-1, h.shape[-1]))
        design = design * is_own
        sd = ((design @ cov) * design).sum(-1).clamp(min=0).sqrt()
        mean, width, grid = _numpy(design @ loc), quantile * _numpy(sd), _numpy(grid)
        ax.axhline(0, color=RULE, lw=0.8, zorder=0)
        ax.fill_between(grid, mean - width, mean + width, color=PALETTE[0], alpha=0.2, lw=0)
        ax.plot(grid, mean, color=PALETTE[0], lw=1.8)
        ticks, place = _numpy(h[:: max(1, len(h) // 200), p]), ax.get_xaxis_transform()
        ax.plot(ticks, [0.02] * len(ticks), "|", color=MUTED, ms=4, transform=place)
        style_axes(ax, "$h_p$", "" if i else r"$\sigma_p\, g_p(h_p)$", f"unit {p}")
    return axes


def _checked_units(model: DAK, units: Sequence[int]) -> list[int]:
    check_kind("units", units, Sequence, "a list of units by number")
    for p in units:
        check_integer("units", p, minimum=0, maximum=model.num_units - 1)
    return list(units)


def plot_learning_curves(history: History, ax: Any = None) -> Any:
    """The loss per row in each epoch, of training and, if rows were held out, of validation."""
    check_kind("history", history, History, "a History, as `fit` returns it")
    return history.plot(ax)


def plot_reliability(
    y: Tensor, probs: Tensor | Mapping[str, Tensor], *, num_bins: int = 10, ax: Any = None
) -> Any:
    """Accuracy against confidence, for one set of class probabilities `(N, C)` or for several."""
    ax = new_axes(ax, size=(4.0, 3.6))
    for name, values, color in _on_diagonal(ax, probs):
        curve = reliability_curve(y, values, num_bins)
        confidence, accuracy, rows = (_numpy(part) for part in curve)
        ax.plot(confidence, accuracy, color=color, lw=1.4, label=name)
        ax.scatter(confidence, accuracy, s=12 + 120 * rows / rows.sum(), color=color, lw=0)
    return style_axes(ax, "confidence", "accuracy", has_legend=isinstance(probs, Mapping))


def _on_diagonal(
    ax: Any, values: Any, ends: tuple[float, float] = (0, 1)
) -> Iterator[tuple[str | None, Any, str]]:
    """Draw the diagonal, and give name, values and colour of what is to be drawn over it."""
    ax.plot(ends, ends, color=RULE, lw=1.2, zorder=0)
    named = values if isinstance(values, Mapping) else {None: values}
    for (name, one), color in zip(named.items(), cycle(PALETTE), strict=False):
        yield name, one, color


def plot_pit(pit: Tensor, *, num_bins: int = 20, ax: Any = None) -> Any:
    """Histogram of PIT values, with a band that holds 99 % of the bars if predictions are right.

    A valley means that predictions are too narrow, a hill that they are too wide, and a slope that
    they are biased.
    """
    check_pit(pit)
    check_integer("num_bins", num_bins, minimum=1, maximum=10_000)
    ax = new_axes(ax)
    counts = torch.histc(pit.flatten().double().cpu(), num_bins, 0.0, 1.0)
    _bars(ax, counts, pit.numel() / num_bins)
    return style_axes(ax, "PIT", "rows")


def plot_coverage(pit: Tensor | Mapping[str, Tensor], ax: Any = None) -> Any:
    """Share of y inside the central interval, against its level; the diagonal is best."""
    ax = new_axes(ax, size=(4.0, 3.6))
    levels = torch.linspace(0.02, 0.98, 49, dtype=torch.float64)
    for name, values, color in _on_diagonal(ax, pit):
        check_floating("pit", values)
        curve = coverage_curve(values.double(), levels.to(values.device))
        ax.plot(_numpy(levels), _numpy(curve), color=color, lw=1.6, label=name)
    return style_axes(ax, "level of the interval", "coverage", has_legend=isinstance(pit, Mapping))


def plot_comparison(comparison: PosteriorComparison, axes: Any = None) -> Any:
    """Means and standard deviations of all weights against those of the reference, on two axes."""
    check_kind("comparison", comparison, PosteriorComparison, "what `compare_posteriors` returns")
    axes = new_axes(axes, 2, (4.0, 3.8))
    reference = comparison.fits[comparison.reference]
    others = {n: f for n, f in comparison.fits.items() if n != comparison.reference}
    for ax, part in zip(axes, ("mean", "sd"), strict=True):
        truth = _numpy(getattr(reference, part))
        for name, fit, color in _on_diagonal(ax, others, (truth.min(), truth.max())):
            values = _numpy(getattr(fit, part))
            ax.plot(truth, values, "o", ms=3.4, mew=0, alpha=0.7, color=color, label=name)
        title = f"posterior {part}s of the weights"
        style_axes(ax, comparison.reference, "", title, has_legend=part == "mean")
    return axes


def plot_sbc(
    result: SBCResult, names: Sequence[str] | None = None, num_bins: int = 10, axes: Any = None
) -> Any:
    """Histograms of the ranks of some quantities: flat, within the band, if inference is right.

    Args:
        names: which quantities to draw; by default the first and the last three.
        num_bins: number of bins, which must divide the number of ranks.
    """
    check_kind("result", result, SBCResult, "what `simulation_based_calibration` returns")
    if names is not None:
        check_kind("names", names, Sequence, "a list of names of quantities")
    chosen = [*result.names[:1], *result.names[-3:]] if names is None else list(names)
    unknown = [name for name in chosen if name not in result.names]
    if unknown:
        raise ValueError(f"`names` must be quantities of the result; got {unknown}.")
    counts = result.counts(num_bins)
    axes = new_axes(axes, len(chosen), (2.8, 2.6))
    for i, (ax, name) in enumerate(zip(numpy.atleast_1d(axes), chosen, strict=True)):
        _bars(ax, counts[result.names.index(name)], len(result.ranks) / num_bins)
        style_axes(ax, "rank of the truth", "" if i else "simulations", name)
    return axes


def plot_k_hat(left_out: LeaveOneOut, ax: Any = None) -> Any:
    """k-hat of every row of a leave-one-out result. Those above 0.7 are red."""
    check_kind("left_out", left_out, LeaveOneOut, "what `loo` returns")
    ax = new_axes(ax)
    k = _numpy(left_out.k_hat.clamp(min=-1, max=2))
    rows, is_bad = _numpy(torch.arange(len(k))), k > 0.7
    ax.axhline(0.7, color=MUTED, lw=0.9, ls="--")
    for part, color in ((~is_bad, PALETTE[0]), (is_bad, PALETTE[1])):
        ax.plot(rows[part], k[part], "o", ms=3, mew=0, color=color)
    return style_axes(ax, "row", "k-hat")


def _bars(ax: Any, counts: Tensor, expected: float) -> None:
    """Bars over [0, 1], with a band that holds 99 % of binomial counts."""
    num_bins = len(counts)
    spread = 2.576 * math.sqrt(expected * (1 - 1 / num_bins))
    ax.axhspan(max(expected - spread, 0), expected + spread, color=RULE, alpha=0.6, lw=0, zorder=0)
    centres = (torch.arange(num_bins) + 0.5) / num_bins
    ax.bar(_numpy(centres), _numpy(counts), width=0.94 / num_bins, color=PALETTE[0], alpha=0.85)
    ax.axhline(expected, color=MUTED, lw=0.9)


def _numpy(values: Tensor) -> Any:
    return values.detach().double().cpu().numpy()
