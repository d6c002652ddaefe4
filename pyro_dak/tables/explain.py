"""One self-contained page that shows what a model of a table has learned.

It holds a curve with its band for every column, over a histogram of the data; how much each column
matters; the calibration, if the targets are known; and one row taken apart. Nothing is fetched from
elsewhere, and all text from the data is escaped.
"""

import base64
import io
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from sklearn.base import is_regressor

from pyro_dak.diagnostics.plots import plot_coverage, plot_pit, plot_reliability
from pyro_dak.diagnostics.scores import accuracy, brier_score, rmse
from pyro_dak.drawing import MUTED, PALETTE, RULE
from pyro_dak.tables.additive import DAKAdditiveClassifier, DAKAdditiveRegressor
from pyro_dak.tables.predictive import Array
from pyro_dak.tables.schema import raw_columns
from pyro_dak.validation import check_integer, import_optional

__all__ = ["Line", "Page", "Panel", "additive_page", "dependence_page", "render"]

# Values of a column and rows of the table that partial dependence is taken at.
_NUM_VALUES, _NUM_ROWS = 25, 200
# Columns, classes and categories beyond these are left out, and the page says so.
_MAX_PANELS, _MAX_CLASSES, _MAX_CATEGORIES, _MAX_BARS = 60, 5, 30, 30
_SHADE = "#e6eaee"
_LONGEST = 40

_STYLE = """
:root { --ink: #24292f; --muted: #57606a; --line: #d0d7de; --shade: #f6f8fa; --accent: #1b4965; }
* { box-sizing: border-box; }
body { margin: 0; font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; color: var(--ink); }
header { padding: 1.4rem 2rem 1rem; border-bottom: 1px solid var(--line);
  background: var(--shade); }
h1 { margin: 0 0 .3rem; font-size: 1.5rem; overflow-wrap: anywhere; }
header p, .note { margin: .2rem 0; color: var(--muted); max-width: 60rem; overflow-wrap: anywhere; }
main { padding: 0 2rem 3rem; max-width: 84rem; }
h2 { margin: 2rem 0 .5rem; padding-bottom: .2rem; border-bottom: 2px solid var(--accent); }
h3 { margin: 0; font-size: 1rem; overflow-wrap: anywhere; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)); gap: 1.2rem; }
figure { margin: 0; }
img { max-width: 100%; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid var(--line); text-align: left;
  overflow-wrap: anywhere; }
td.number { text-align: right; }
"""


class Line(NamedTuple):
    """A curve with its band, `(G,)` each; `label` is that of its class, or None."""

    label: str | None
    mean: Array
    lower: Array
    upper: Array


@dataclass(frozen=True)
class Panel:
    """What is known of a column: curves over numbers or categories, or a map over two columns.

    Attributes:
        name: the title.
        grid: numbers `(G,)`, categories `(G,)`, or two of them for a map.
        lines: the curves; for a map there is one, whose mean is `(G_a, G_b)`.
        data: the values of the table, for the histogram; those of categories as texts.
        axes: the names of the two columns of a map.
        note: a further sentence.
    """

    name: str
    grid: Any
    lines: list[Line]
    data: Array | None = None
    axes: tuple[str, str] | None = None
    note: str = ""


@dataclass
class Page:
    """All that the page shows.

    Attributes:
        title: the heading.
        facts: sentences below it.
        unit: what the curves are in units of.
        panels: one for each column.
        about_panels: a sentence that says what curves and bands are.
        importances: names, values and their standard deviations, or None.
        about_importances: a sentence that says what these are.
        scores: scores by name.
        calibration: captions and pictures of the calibration.
        row: the heading of the row that is taken apart, and lines of the table: the name of the
            term, the value in the row, the contribution, and its standard deviation or None.
        about_row: a sentence that says what these are.
    """

    title: str
    facts: list[str]
    unit: str
    panels: list[Panel]
    about_panels: str
    importances: tuple[list[str], Array, Array | None]
    about_importances: str
    scores: dict[str, float] = field(default_factory=dict)
    calibration: list[tuple[str, bytes]] = field(default_factory=list)
    row: tuple[str, list[tuple[str, str, float, float | None]]] | None = None
    about_row: str = ""


def additive_page(
    estimator: DAKAdditiveRegressor | DAKAdditiveClassifier,
    table: pd.DataFrame,
    y: Any = None,
    *,
    title: str = "Additive model",
    target: str = "y",
    row: int = 0,
) -> str:
    """The page of an additive estimator: its shape functions, and `table`, whose targets are y.

    Args:
        estimator: a fitted additive estimator.
        table: rows with the columns of the estimator.
        y: their targets, for the calibration, if they are known.
        title: the heading of the page.
        target: the name of what is predicted.
        row: the number of the row to take apart, from 0 on.
    """
    check_integer("row", row, minimum=0, maximum=len(table) - 1)
    has_classes = not is_regressor(estimator)
    explanation = estimator.explain(_as_given(estimator, table.iloc[[row]]))
    labels = _labels(estimator) if has_classes else [None]
    chosen = _shown_classes(labels)
    order = np.argsort(-_overall(estimator.importances_), kind="stable")
    columns = raw_columns(table.set_axis(estimator.columns_.names, axis=1), estimator.columns_)
    panels = [
        _additive_panel(estimator, estimator.term_names_[k], table, columns, labels, chosen)
        for k in order[:_MAX_PANELS]
    ]
    names = [_named(name) for name in explanation.names]
    unit = "log odds" if has_classes else target
    page = Page(
        title,
        [f"{len(panels)} of {len(names)} terms, the strongest first.", f"{len(table)} rows."],
        unit,
        panels,
        f"Each term in units of {unit}, less its mean over the training rows, with its 95 % band. "
        "Grey bars are a histogram of this table.",
        (names, _overall(estimator.importances_), _overall(estimator.importances_std_)),
        f"The standard deviation of each term over the training rows, in units of {unit}, with "
        "95 % of its posterior.",
    )
    if len(labels) > len(chosen):
        page.facts.append(f"Curves are shown for {len(chosen)} of {len(labels)} classes.")
    page.row = _additive_row(estimator, explanation, table, row, labels)
    page.about_row = "Intercept and contributions add up to the prediction."
    _calibrate(page, estimator.predict_dist(_as_given(estimator, table)), y, estimator)
    return render(page)


def _additive_panel(
    estimator: Any,
    name: Any,
    table: pd.DataFrame,
    columns: list[Array],
    labels: list[Any],
    chosen: list[int],
) -> Panel:
    """The panel of a term; `columns` are those of the table as numbers."""
    shape = estimator.shape_function(name)
    parts = (shape.mean, shape.lower, shape.upper)
    if len(labels) == 1:
        lines = [Line(None, *parts)]
    else:
        lines = [Line(labels[c], *(part[..., c] for part in parts)) for c in chosen]
    if isinstance(name, tuple):
        note = "" if lines[0].label is None else f"Class {lines[0].label}."
        axes = str(name[0]), str(name[1])
        return Panel(_named(name), shape.grid, lines[:1], axes=axes, note=note)
    index = estimator.term_names_.index(name)
    if shape.missing is None:
        return Panel(_named(name), shape.grid, lines, _texts(table.iloc[:, index]))
    data, note = columns[index], ""
    if np.isnan(data).any() and len(labels) == 1:
        mean, std = shape.missing
        note = f"Where it is missing: {mean:.3g} ± {1.96 * std:.2g}."
    return Panel(_named(name), shape.grid, lines, data[~np.isnan(data)], note=note)


def _additive_row(
    estimator: Any, explanation: Any, table: pd.DataFrame, row: int, labels: list[Any]
) -> tuple[str, list[tuple[str, str, float, float | None]]]:
    """The contributions to one row; those to its most probable class, if there are several."""
    intercept, means = explanation.intercept, explanation.contributions[0]
    stds, total = explanation.std[0], explanation.prediction[0]
    heading = f"Row {row}"
    if len(labels) > 1:
        c = int(np.argmax(total))
        intercept, means, stds, total = intercept[c], means[:, c], stds[:, c], total[c]
        heading += f", class {labels[c]}"
    elif labels[0] is not None:
        heading += f", class {labels[0]}"
    lines: list[tuple[str, str, float, float | None]] = [("intercept", "", float(intercept), None)]
    for k in np.argsort(-np.abs(means), kind="stable"):
        term = estimator.posterior_.terms[k]
        value = ", ".join(str(table.iloc[row, j]) for j in term.columns)
        lines.append((_named(explanation.names[k]), value, float(means[k]), float(stds[k])))
    return heading, [*lines, ("prediction", "", float(total), None)]


def dependence_page(
    estimator: Any,
    table: pd.DataFrame,
    y: Any = None,
    *,
    title: str = "Model",
    target: str = "y",
    row: int = 0,
) -> str:
    """The page of any estimator with `predict_dist`: partial dependence, novelty, calibration.

    The partial dependence of a column is the mean prediction of up to 200 rows, if all of them had
    the same value in this column. For regression its band is 1.96 times the root of the mean
    epistemic variance, which is no less than the standard deviation of the mean. For classes it
    holds 80 % of the rows.

    Args:
        estimator: a fitted estimator.
        table: rows with the columns of the estimator.
        y: their targets, for the calibration, if they are known.
        title: the heading of the page.
        target: the name of what is predicted.
        row: the number of the row to take apart, from 0 on.
    """
    check_integer("row", row, minimum=0, maximum=len(table) - 1)
    has_classes = not is_regressor(estimator)
    labels = [str(label) for label in estimator.classes_] if has_classes else [None]
    chosen = _shown_classes(labels)

    def predict(rows: pd.DataFrame) -> tuple[Array, Array | None]:
        """Means `(N, F)` and epistemic variances; probabilities and None."""
        prediction = estimator.predict_dist(_as_given(estimator, rows))
        if has_classes:
            return prediction.probs, None
        return prediction.mean.reshape(len(rows), -1), prediction.epistemic.reshape(len(rows), -1)

    some = np.random.default_rng(0).permutation(len(table))[:_NUM_ROWS]
    background = table.iloc[np.sort(some)]
    names = [str(name) for name in table.columns]
    panels, spreads = [], []
    for j, name in enumerate(names):
        panel = _dependence_panel(name, j, table, background, predict, labels, chosen)
        panels.append(panel)
        spreads.append(max(float(np.std(line.mean)) for line in panel.lines))
    order = np.argsort(-np.array(spreads), kind="stable")[:_MAX_PANELS]
    unit = "probability" if has_classes else target
    band = "the central 80 % of the rows" if has_classes else "twice the epistemic deviation"
    page = Page(
        title,
        [f"{len(order)} of {len(names)} columns, the strongest first.", f"{len(table)} rows."],
        unit,
        [panels[k] for k in order],
        f"Partial dependence: the mean {unit} of {len(background)} rows if all had this value. The "
        f"band is {band}. Grey bars are a histogram of this table.",
        (names, np.array(spreads), None),
        f"The standard deviation of each curve below, in units of {unit}.",
    )
    if len(labels) > len(chosen):
        page.facts.append(f"Curves are shown for {len(chosen)} of {len(labels)} classes.")
    page.row = _row_by_replacement(table, background, row, predict, labels)
    page.about_row = (
        "By how much the prediction changes if one column has the values of other rows instead. "
        "These numbers do not add up to the prediction."
    )
    prediction = estimator.predict_dist(_as_given(estimator, table))
    if prediction.novelty_scores is not None:
        novelty = np.asarray(prediction.novelty)
        page.facts.append(
            f"{np.mean(novelty < 0.05):.1%} of the rows are stranger than 95 % of the rows that "
            f"were held out in training; row {row} has novelty {novelty[row]:.3f}."
        )
        page.calibration.append(("Novelty of the rows; flat if they are usual.", _bars(novelty)))
    _calibrate(page, prediction, y, estimator)
    return render(page)


def _dependence_panel(
    name: str,
    j: int,
    table: pd.DataFrame,
    background: pd.DataFrame,
    predict: Callable[[pd.DataFrame], tuple[Array, Array | None]],
    labels: list[Any],
    chosen: list[int],
) -> Panel:
    """The partial dependence of a column."""
    column = table.iloc[:, j]
    numbers = pd.to_numeric(column, errors="coerce")
    is_number = bool(numbers[column.notna()].notna().all()) and numbers.nunique() > 0
    if is_number:
        data = numbers.dropna().to_numpy(dtype=np.float64)
        values = np.unique(np.quantile(data, np.linspace(0, 1, _NUM_VALUES), method="nearest"))
        source = column.loc[numbers.notna()]
        known = pd.to_numeric(source).to_numpy(dtype=np.float64)
        cells = [source.iloc[int(np.argmin(np.abs(known - value)))] for value in values]
    else:
        data = _texts(column)
        counts = column.dropna().astype(str).value_counts()
        cells = list(column.dropna().astype(str).unique())
        cells = sorted(cells, key=lambda text: -counts[text])[:_MAX_CATEGORIES]
        values = np.array(cells, dtype=object)
    number, variants = len(background), []
    for cell in cells:
        variant = background.copy()
        variant.isetitem(j, pd.Series([cell] * number, index=variant.index, dtype=column.dtype))
        variants.append(variant)
    mean, epistemic = predict(pd.concat(variants))
    mean = mean.reshape(len(cells), number, -1)
    centre = mean.mean(1)  # (G, F)
    if epistemic is None:
        lower, upper = np.quantile(mean, (0.1, 0.9), axis=1)
    else:
        half = 1.96 * np.sqrt(epistemic.reshape(len(cells), number, -1).mean(1))
        lower, upper = centre - half, centre + half
    columns = chosen if len(labels) > 1 else [0]
    lines = [Line(labels[c], centre[:, c], lower[:, c], upper[:, c]) for c in columns]
    return Panel(name, values, lines, data)


def _row_by_replacement(
    table: pd.DataFrame,
    background: pd.DataFrame,
    row: int,
    predict: Callable[[pd.DataFrame], tuple[Array, Array | None]],
    labels: list[Any],
) -> tuple[str, list[tuple[str, str, float, float | None]]]:
    """How the prediction of a row changes if its columns have the values of other rows."""
    own = predict(table.iloc[[row]])[0][0]
    c = int(np.argmax(own)) if len(labels) > 1 else 0
    few = background.iloc[:50]
    copies = table.iloc[[row] * len(few)]
    changes = []
    for j in range(table.shape[1]):
        variant = copies.copy()
        variant.isetitem(j, few.iloc[:, j].to_numpy())
        changes.append(float(own[c] - predict(variant.astype(table.dtypes))[0][:, c].mean()))
    heading = f"Row {row}" + (f", class {labels[c]}" if len(labels) > 1 else "")
    order = np.argsort(-np.abs(changes), kind="stable")
    lines: list[tuple[str, str, float, float | None]] = [
        (str(table.columns[j]), str(table.iloc[row, j]), changes[j], None) for j in order
    ]
    return heading, [*lines, ("prediction", "", float(own[c]), None)]


def _calibrate(page: Page, prediction: Any, y: Any, estimator: Any) -> None:
    """Add scores and pictures of the calibration to a page, if there are targets."""
    if y is None:
        return
    if is_regressor(estimator):
        y = np.array(y, dtype=np.float64)
        pit = torch.from_numpy(np.asarray(prediction.cdf(y)))
        lower, upper = prediction.interval(0.95)
        page.scores = {
            "RMSE": float(rmse(torch.from_numpy(y), torch.from_numpy(prediction.mean))),
            "NLPD": float(-prediction.log_prob(y).mean()),
            "coverage of 95 % intervals": float(np.mean((y >= lower) & (y <= upper))),
        }
        page.calibration.append(
            (
                "Coverage against the level of intervals.",
                _picture(lambda ax: plot_coverage(pit, ax)),
            )
        )
        page.calibration.append(
            ("PIT values; flat if right.", _picture(lambda ax: plot_pit(pit, ax=ax)))
        )
        return
    labels = torch.from_numpy(np.searchsorted(estimator.classes_, y))
    probs = torch.from_numpy(prediction.probs)
    at_label = probs.gather(-1, labels.unsqueeze(-1))
    page.scores = {
        "accuracy": float(accuracy(labels, probs)),
        "NLL": float(-at_label.clamp(min=1e-300).log().mean()),
        "Brier score": float(brier_score(labels, probs)),
    }
    page.calibration.append(
        (
            "Accuracy against confidence.",
            _picture(lambda ax: plot_reliability(labels, probs, ax=ax)),
        )
    )


def _as_given(estimator: Any, rows: pd.DataFrame) -> Any:
    """Rows as the estimator was fitted: with names of columns, or without."""
    return rows if hasattr(estimator, "feature_names_in_") else rows.to_numpy()


def _labels(estimator: Any) -> list[str]:
    """The labels of the functions of a classifier."""
    labels = [str(label) for label in estimator.classes_]
    return labels[1:] if len(labels) == 2 else labels


def _shown_classes(labels: Sequence[Any]) -> list[int]:
    """The classes whose curves are shown; the second of two says all."""
    return [1] if len(labels) == 2 else list(range(min(len(labels), _MAX_CLASSES)))


def _overall(values: Array) -> Array:
    """Values `(T,)`, the largest of several functions."""
    return values if values.ndim == 1 else values.max(-1)


def _named(name: Any) -> str:
    return (
        " \N{MULTIPLICATION SIGN} ".join(map(str, name)) if isinstance(name, tuple) else str(name)
    )


def _texts(column: pd.Series) -> Array:
    return column.dropna().astype(str).to_numpy(dtype=object)


def _short(text: str) -> str:
    """A text for a picture: printable, and not too long."""
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text))
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _picture(draw: Callable[[Any], Any], size: tuple[float, float] = (4.2, 2.9)) -> bytes:
    """A picture that is drawn into new axes, as PNG. No text in it is read as a formula."""
    matplotlib = import_optional("matplotlib")
    figure_module = import_optional("matplotlib.figure")
    with warnings.catch_warnings(), matplotlib.rc_context({"text.parse_math": False}):
        warnings.simplefilter("ignore")  # of letters that the font does not have
        figure = figure_module.Figure(figsize=size, layout="constrained")
        draw(figure.add_subplot())
        temporary = io.BytesIO()
        figure.savefig(temporary, format="png", dpi=110)
    return temporary.getvalue()


def _bars(values: Array) -> bytes:
    """A histogram of numbers between 0 and 1."""

    def draw(ax: Any) -> None:
        ax.hist(values, bins=np.linspace(0, 1, 21), color=PALETTE[0], alpha=0.8)
        _plain(ax)
        ax.set_xlabel("novelty", color=MUTED)

    return _picture(draw)


def _plain(ax: Any) -> None:
    ax.tick_params(colors=MUTED, length=3, labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(RULE)


def _panel_picture(panel: Panel, unit: str) -> bytes:
    if isinstance(panel.grid, tuple):
        return _picture(lambda ax: _draw_map(ax, panel))
    if np.asarray(panel.grid).dtype.kind in "OU":
        return _picture(lambda ax: _draw_categories(ax, panel, unit))
    return _picture(lambda ax: _draw_curves(ax, panel, unit))


def _draw_curves(ax: Any, panel: Panel, unit: str) -> None:
    grid = np.asarray(panel.grid, dtype=np.float64)
    if panel.data is not None and len(panel.data):
        behind = ax.twinx()
        inside = panel.data[(panel.data >= grid[0]) & (panel.data <= grid[-1])]
        behind.hist(inside, bins=min(30, max(5, len(grid))), color=_SHADE)
        behind.set_ylim(0, 3 * max(1, behind.get_ylim()[1]))
        behind.set_axis_off()
        ax.set_zorder(behind.get_zorder() + 1)
        ax.set_frame_on(False)
    for line, color in zip(panel.lines, PALETTE, strict=False):
        label = None if line.label is None else _short(line.label)
        ax.fill_between(grid, line.lower, line.upper, color=color, alpha=0.2, lw=0)
        ax.plot(grid, line.mean, color=color, lw=1.6, label=label)
    _finish(ax, panel, unit)


def _draw_categories(ax: Any, panel: Panel, unit: str) -> None:
    names = [_short(name) for name in panel.grid[:_MAX_CATEGORIES]]
    places = np.arange(len(names))
    for k, (line, color) in enumerate(zip(panel.lines, PALETTE, strict=False)):
        shift = 0.12 * (k - (len(panel.lines) - 1) / 2)
        mean = line.mean[: len(names)]
        errors = np.stack([mean - line.lower[: len(names)], line.upper[: len(names)] - mean])
        label = None if line.label is None else _short(line.label)
        style = {"fmt": "o", "ms": 4, "lw": 1.4, "color": color, "label": label}
        ax.errorbar(places + shift, mean, np.maximum(errors, 0), **style)
    is_many = len(names) > 4
    ax.set_xticks(places, names, rotation=40 if is_many else 0, ha="right" if is_many else "center")
    ax.margins(x=0.12)
    _finish(ax, panel, unit)


def _draw_map(ax: Any, panel: Panel) -> None:
    """A map of the values of a pair over the numbers of their grids."""
    mean = panel.lines[0].mean
    largest = max(float(np.abs(mean).max()), 1e-300)
    mesh = ax.imshow(
        mean.T, origin="lower", aspect="auto", cmap="RdBu_r", vmin=-largest, vmax=largest
    )
    ax.figure.colorbar(mesh, ax=ax)
    for axis, grid in zip((ax.xaxis, ax.yaxis), panel.grid, strict=True):
        places = np.unique(np.linspace(0, len(grid) - 1, 5).round().astype(int))
        is_text = np.asarray(grid).dtype.kind in "OU"
        labels = [_short(grid[k]) if is_text else f"{grid[k]:.3g}" for k in places]
        axis.set_ticks(places, labels)
    _plain(ax)
    if panel.axes is not None:
        ax.set_xlabel(_short(panel.axes[0]), color=MUTED, fontsize=9)
        ax.set_ylabel(_short(panel.axes[1]), color=MUTED, fontsize=9)


def _finish(ax: Any, panel: Panel, unit: str) -> None:
    _plain(ax)
    ax.set_ylabel(_short(unit), color=MUTED, fontsize=9)
    if panel.lines[0].label is not None and len(panel.lines) > 1:
        ax.legend(frameon=False, fontsize=7)


def _draw_importances(ax: Any, names: list[str], values: Array, stds: Array | None) -> None:
    order = np.argsort(values, kind="stable")[-_MAX_BARS:]
    errors = None if stds is None else 1.96 * stds[order]
    places = np.arange(len(order))
    ax.barh(places, values[order], xerr=errors, color=PALETTE[0], ecolor=MUTED, height=0.7)
    ax.set_yticks(places, [_short(names[k]) for k in order])
    ax.set_xlim(left=0)
    _plain(ax)


def render(page: Page) -> str:
    """The page as HTML."""
    title = escape(page.title)
    facts = "\n".join(f"<p>{escape(fact)}</p>" for fact in page.facts)
    names, values, stds = page.importances
    height = 1.0 + 0.24 * min(len(names), _MAX_BARS)
    bars = _picture(lambda ax: _draw_importances(ax, names, values, stds), (6.5, height))
    sections = [
        "<h2>Importances</h2>",
        f"<p class='note'>{escape(page.about_importances)}</p>",
        _image(bars, "Importances"),
        f"<h2>Columns</h2>\n<p class='note'>{escape(page.about_panels)}</p>",
        "<div class='grid'>",
        *(_panel_html(panel, page.unit) for panel in page.panels),
        "</div>",
    ]
    if page.scores or page.calibration:
        sections.append("<h2>Calibration</h2>")
        if page.scores:
            sections.append(_table([(name, _number(v)) for name, v in page.scores.items()]))
        sections.append("<div class='grid'>")
        for caption, picture in page.calibration:
            sections.append(
                f"<figure><h3>{escape(caption)}</h3>{_image(picture, caption)}</figure>"
            )
        sections.append("</div>")
    if page.row is not None:
        heading, lines = page.row
        cells = [
            (name, value, _number(number), "" if std is None else f"± {1.96 * std:.2g}")
            for name, value, number, std in lines
        ]
        sections.append(f"<h2>{escape(heading)}</h2>\n<p class='note'>{escape(page.about_row)}</p>")
        sections.append(_table(cells))
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    head = (
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>"
    )
    body = f"<header><h1>{title}</h1>\n{facts}</header>\n<main>" + "\n".join(sections) + "</main>"
    start = '<!doctype html>\n<html lang="en">'
    return f"{start}\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n"


def _panel_html(panel: Panel, unit: str) -> str:
    note = f"<p class='note'>{escape(panel.note)}</p>" if panel.note else ""
    image = _image(_panel_picture(panel, unit), panel.name)
    return f"<figure><h3>{escape(panel.name)}</h3>{image}{note}</figure>"


def _image(data: bytes, alt: str) -> str:
    return (
        f'<img alt="{escape(alt)}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    """A table of texts; those from the third cell on, or the last of two, are numbers."""
    lines = []
    for cells in rows:
        first = len(cells) - 1 if len(cells) == 2 else 2
        tags = [
            f"<td class='number'>{escape(cell)}</td>" if k >= first else f"<td>{escape(cell)}</td>"
            for k, cell in enumerate(cells)
        ]
        lines.append(f"<tr>{''.join(tags)}</tr>")
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "-"
