"""What all plots share: colours, axes and their style. Matplotlib is imported for the first one."""

from typing import Any

from pyro_dak.validation import import_optional

__all__ = ["INK", "MUTED", "PALETTE", "RULE", "new_axes", "style_axes"]

PALETTE = ("#1b4965", "#d1495b", "#2a9d8f", "#e9a03b", "#7b5ea7", "#6e7781")
INK, MUTED, RULE = "#24292f", "#57606a", "#d0d7de"  # of titles, of other text, of lines


def new_axes(ax: Any, columns: int = 1, size: tuple[float, float] = (5.0, 3.4)) -> Any:
    """The given axes, or `columns` new ones in a row. Several of them are an array."""
    if ax is not None:
        return ax
    pyplot = import_optional("matplotlib.pyplot")
    figsize = (size[0] * columns, size[1])
    return pyplot.subplots(1, columns, figsize=figsize, layout="constrained")[1]


def style_axes(ax: Any, xlabel: str, ylabel: str, title: str = "", has_legend: bool = False) -> Any:
    """The axes with labels, title and legend, in the colours of all plots."""
    if title:
        ax.set_title(title, loc="left", fontsize=10.5, color=INK)
    if has_legend:
        ax.legend(frameon=False, fontsize=8, labelcolor=MUTED)
    ax.set_xlabel(xlabel, color=MUTED)
    ax.set_ylabel(ylabel, color=MUTED)
    ax.tick_params(colors=MUTED, length=3)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(RULE)
    return ax
