"""Curves over seeds: runs by place, means with their errors, and panels with bands."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from experiments.report import newest, save_figure
from experiments.runs import Line

__all__ = ["Groups", "by_place", "draw_panels", "mean_band", "mean_with_error", "quartile_band"]

Groups = dict[tuple[str, str], list[Line]]
# From curves `(seeds, steps)` to lower end, middle and upper end, `(steps,)` each.
Band = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


def by_place(runs: Sequence[Line], datasets: Iterable[str], models: Iterable[str]) -> Groups:
    """The newest run of each seed, by data set and model, in the order of both."""
    names = ("dataset", "model", "seed")
    models = list(models)
    groups: Groups = {(dataset, model): [] for dataset in datasets for model in models}
    for run in newest(runs, lambda run: tuple(run["config"][name] for name in names)):
        groups[run["config"]["dataset"], run["config"]["model"]].append(run)
    return {place: group for place, group in groups.items() if group}


def mean_with_error(group: Sequence[Line], name: str, digits: int) -> str:
    """The mean of a metric over runs, and its standard error if there are several."""
    values = [run["metrics"][name] for run in group]
    mean = f"{statistics.fmean(values):.{digits}f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(values) / len(values) ** 0.5:.{digits}f}"


def mean_band(curves: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean, and a standard error to either side."""
    mean = curves.mean(0)
    error = curves.std(0, correction=min(1, len(curves) - 1)) / len(curves) ** 0.5
    return mean - error, mean, mean + error


def quartile_band(curves: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The quartiles."""
    low, middle, high = curves.quantile(torch.tensor([0.25, 0.5, 0.75]).to(curves), 0)
    return low, middle, high


def draw_panels(
    groups: Groups,
    path: Path,
    steps_fn: Callable[[Line], Sequence[float]],
    *,
    key: str,
    band: Band,
    labels: tuple[str, str],
    is_log: bool = False,
    floor: float = -math.inf,
) -> Path:
    """A panel for each data set, with a line and a band for each model.

    Args:
        groups: those of `by_place`.
        path: the file of the figure.
        steps_fn: positions of the points of a run's curve.
        key: where a run has its curve.
        band: what the line and the band are.
        labels: of the axes.
        is_log: whether the values are on a logarithmic scale.
        floor: the least value that is drawn.
    """
    datasets = list(dict.fromkeys(dataset for dataset, _ in groups))
    models = list(dict.fromkeys(model for _, model in groups))
    figure, axes = plt.subplots(1, len(datasets), figsize=(4 * len(datasets), 3.4), squeeze=False)
    for (dataset, model), group in groups.items():
        axis, color = axes[0][datasets.index(dataset)], f"C{models.index(model)}"
        curves = torch.tensor([run[key] for run in group], dtype=torch.float64)
        low, middle, high = (part.clamp(min=floor) for part in band(curves))
        steps = steps_fn(group[0])
        axis.plot(steps, middle, color=color, label=model)
        axis.fill_between(steps, low, high, color=color, alpha=0.2, lw=0)
    for axis, dataset in zip(axes[0], datasets, strict=True):
        axis.set_title(dataset)
        axis.set_xlabel(labels[0])
        axis.set_yscale("log" if is_log else "linear")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel(labels[1])
    axes[0][0].legend(fontsize=7)
    return save_figure(figure, path)
