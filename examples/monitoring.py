"""Novelty and PIT over time: `python examples/monitoring.py [weeks] [file of the figure]`.

Rows come in weeks. From a third of them on the targets drift, and in the last third the inputs move
too. One regressor is left alone; another learns each week by `partial_fit`, and forgets.
"""

import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

from pyro_dak import DAKRegressor


def week(number, num_weeks, rng, num_rows=100):
    """Inputs and targets of a week; week 0 is that of training."""
    drift = max(0.0, number / num_weeks - 1 / 3)
    move = max(0.0, number / num_weeks - 2 / 3)
    X = rng.normal(size=(num_rows, 3)) + np.array([6 * move, 0, 0])
    y = np.sin(X[:, 0]) + 0.5 * X[:, 1] + 1.5 * drift + 0.2 * rng.normal(size=num_rows)
    return X, y


def pit(prediction, y):
    """The share of the predictive distribution below each target."""
    scale = prediction.std * (1 - 2 / prediction.df) ** 0.5
    return stats.t.cdf((y - prediction.mean) / scale, prediction.df)


def watch(num_weeks):
    """Novelty and PIT of every week, before its targets are learned: `(weeks, rows)` each."""
    rng = np.random.default_rng(0)
    options = {"epochs": 40, "heteroscedastic": False, "random_state": 0, "progress": False}
    X, y = week(0, num_weeks, rng, 500)
    fixed, learning = (DAKRegressor(**options).fit(X, y) for _ in range(2))
    novelty, transforms = [], {"left alone": [], "keeps learning": []}
    for number in range(1, num_weeks + 1):
        X, y = week(number, num_weeks, rng)
        novelty.append(fixed.predict_dist(X).novelty)
        for name, model in (("left alone", fixed), ("keeps learning", learning)):
            transforms[name].append(pit(model.predict_dist(X), y))
        learning.partial_fit(X, y, forget=0.5)
    return np.array(novelty), {name: np.array(values) for name, values in transforms.items()}


def draw(novelty, transforms, path):
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.2), sharey=True)
    panels = {"novelty of the inputs": novelty}
    panels |= {f"PIT, {name}": values for name, values in transforms.items()}
    weeks = np.arange(1, len(novelty) + 1)
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        for low, high in ((5, 95), (25, 75)):
            bounds = np.percentile(values, [low, high], axis=1)
            axis.fill_between(weeks, *bounds, color="C0", alpha=0.25, lw=0)
        axis.plot(weeks, np.median(values, axis=1), color="C0")
        axis.axhline(0.5, color="0.6", lw=1, ls="--")
        axis.set(title=title, xlabel="week", ylim=(0, 1))
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    num_weeks = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    path = sys.argv[2] if len(sys.argv) > 2 else "monitoring.png"
    novelty, transforms = watch(num_weeks)
    draw(novelty, transforms, path)
    print(f"novelty: {np.median(novelty[0]):.2f} at first, {np.median(novelty[-1]):.2f} at last")
    for name, values in transforms.items():
        print(
            f"PIT, {name}: {np.median(values[0]):.2f} at first, {np.median(values[-1]):.2f} at last"
        )
