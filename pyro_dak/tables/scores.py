"""Scores and calibration curves of predictions of a table, for the command line."""

import os
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from pyro_dak.tables.files import TableError
from pyro_dak.tables.predictive import StudentPrediction

__all__ = ["calibration_plot", "class_scores", "regression_scores"]

Array = np.ndarray[Any, np.dtype[Any]]
# Expected and observed frequencies.
Curve = tuple[list[float], list[float]]


def regression_scores(
    prediction: StudentPrediction, y: Array
) -> tuple[dict[str, float | int], Curve]:
    """RMSE, MAE, R^2, NLPD and coverages; the curve is coverage by level."""
    residual = y - prediction.mean
    levels = [round(0.05 * i, 2) for i in range(1, 20)]
    coverages = []
    for level in levels:
        lower, upper = prediction.interval(level)
        coverages.append(float(np.mean((y >= lower) & (y <= upper))))
    spread = float(np.sum((y - y.mean()) ** 2))
    scores: dict[str, float | int] = {
        "rows": len(y),
        "rmse": float(np.sqrt(np.mean(residual**2))),
        "mae": float(np.mean(np.abs(residual))),
        "r2": 1 - float(np.sum(residual**2)) / spread if spread > 0 else float("nan"),
        "nlpd": float(-prediction.log_prob(y).mean()),
        "coverage_50": coverages[levels.index(0.5)],
        "coverage_90": coverages[levels.index(0.9)],
        "coverage_95": coverages[levels.index(0.95)],
    }
    return scores, (levels, coverages)


def class_scores(probs: Array, y: Array, classes: Array) -> tuple[dict[str, float | int], Curve]:
    """Accuracy, negative log-likelihood and Brier score; the curve is accuracy by confidence."""
    position = {label: k for k, label in enumerate(classes.tolist())}
    unknown = sorted({str(label) for label in y.tolist() if label not in position})
    if unknown:
        raise TableError(f"target has classes that were not there in training: {unknown[:5]}.")
    index = np.array([position[label] for label in y.tolist()])
    confidence, is_right = probs.max(-1), probs.argmax(-1) == index
    bins = np.clip(np.ceil(confidence * 10).astype(int) - 1, 0, 9)
    used = [b for b in range(10) if (bins == b).any()]
    curve = (
        [float(confidence[bins == b].mean()) for b in used],
        [float(is_right[bins == b].mean()) for b in used],
    )
    at_label = probs[np.arange(len(y)), index]
    one_hot = np.eye(len(classes))[index]
    scores: dict[str, float | int] = {
        "rows": len(y),
        "accuracy": float(is_right.mean()),
        "nll": float(-np.log(np.maximum(at_label, 1e-300)).mean()),
        "brier": float(((probs - one_hot) ** 2).sum(-1).mean()),
    }
    return scores, curve


def calibration_plot(curve: Curve, path: Path) -> None:
    """Draw expected against observed frequencies into a file, written whole or not at all."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TableError("a plot needs matplotlib; `pip install pyro_dak[diagnostics]`.") from error
    figure = Figure(figsize=(4, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], color="0.7", label="perfect")
    axes.plot(*curve, marker="o", label="this table")
    axes.set(xlabel="expected frequency", ylabel="observed frequency", xlim=(0, 1), ylim=(0, 1))
    axes.legend()
    kind = path.suffix.lower().lstrip(".") or "png"
    if kind not in figure.canvas.get_supported_filetypes():
        raise TableError(f"{path}: cannot be drawn as `{kind}`; use .png, .pdf or .svg.")
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        figure.savefig(temporary, format=kind, dpi=150)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
