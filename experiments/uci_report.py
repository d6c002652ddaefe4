"""Tables and figures of the UCI results: ours beside the paper's."""

import csv
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from experiments.results import read_runs

__all__ = ["PAPER", "aggregate", "misses", "write_report"]

# RMSE of the paper's Table 1 by data set, model and D_w. Its cross-validation keeps the weights
# from fold to fold, so that test rows have been trained on; its NLPD is taken with a fixed noise.
_PAPER_FILE = Path(__file__).with_name("paper_table1.csv")
_NAMES = {
    "NN": "nn",
    "NN+SVGP": "nn_svgp",
    "SV-DKL": "svdkl",
    "AV-DKL": "avdkl",
    "DAK-MC": "dak_mc",
    "DAK-CF": "dak_cf",
}
_ORDER = list(_NAMES.values())
_COLUMNS = (
    "rmse",
    "nlpd",
    "nlpd_paper",
    "crps",
    "coverage_95",
    "width_95",
    "epoch_seconds",
    "train_seconds",
    "parameters",
    "rmse_distinct",
    "nlpd_distinct",
)
_COVERAGE = (0.90, 0.98)  # what a 95 % interval may cover
Key = tuple[str, str, str, int]  # preset, data set, model, D_w


def _read_paper() -> dict[tuple[str, str, int], dict[str, float]]:
    with _PAPER_FILE.open() as file:
        return {
            (
                "keggdirected" if row["dataset"] == "kegg" else row["dataset"],
                _NAMES[row["model"]],
                int(row["feature_dim"]),
            ): {name: float(row[name]) for name in ("rmse", "nlpd")}
            for row in csv.DictReader(file)
        }


PAPER = _read_paper()


def aggregate(runs: list[dict[str, Any]]) -> dict[Key, dict[str, Any]]:
    """Mean and standard deviation over folds of every metric, for each `Key`."""
    groups: dict[Key, list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        config = run["config"]
        key = (config["preset"], config["dataset"], config["model"], config["feature_dim"])
        groups[key].append(run)
    return {key: _summary(group) for key, group in sorted(groups.items(), key=_sort_key)}


def _sort_key(item: tuple[Key, Any]) -> tuple[Any, ...]:
    preset, dataset, model, dim = item[0]
    return preset, dataset, dim, _ORDER.index(model) if model in _ORDER else 99


def _summary(group: list[dict[str, Any]]) -> dict[str, Any]:
    epochs = sorted({run["config"]["recipe"]["epochs"] for run in group})
    summary: dict[str, Any] = {
        "folds": len(group),
        "epochs": ", ".join(map(str, epochs)),
        "commit": group[0]["commit"],
    }
    for name in _COLUMNS:
        values = [run["metrics"][name] for run in group if name in run["metrics"]]
        if values:
            summary[name] = statistics.fmean(values)
            summary[f"{name}_std"] = statistics.stdev(values) if len(values) > 1 else math.nan
    levels = [run["metrics"]["coverage"] for run in group]
    summary["coverage"] = [statistics.fmean(values) for values in zip(*levels, strict=True)]
    return summary


def write_report(results: Path) -> list[Path]:
    """Write `table.md`, `table.csv` and the figures beside the results; returns their paths."""
    summaries = aggregate(list(read_runs(results)))
    if not summaries:
        return []
    paths = [_write_markdown(results, summaries), _write_csv(results, summaries)]
    for preset in sorted({key[0] for key in summaries}):
        chosen = {key: s for key, s in summaries.items() if key[0] == preset}
        paths.append(_draw_scores(results, preset, chosen))
        paths.append(_draw_time(results, preset, chosen))
        paths.append(_draw_calibration(results, preset, chosen))
    return paths


def _write_markdown(results: Path, summaries: dict[Key, dict[str, Any]]) -> Path:
    lines = [
        "Mean ± standard deviation over folds. `paper` is the RMSE printed in the paper's Table 1; "
        "NLPD is that of the full predictive distribution, `NLPD paper` uses the paper's "
        "formula, with a noise variance fixed at 0.693.",
        "",
        "| preset | set | D_w | model | folds | epochs | RMSE | paper | NLPD | NLPD paper | CRPS "
        "| 95 % coverage | s/epoch | parameters | RMSE, distinct rows | misses |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (preset, dataset, model, dim), s in summaries.items():
        paper = PAPER.get((dataset, model, dim), {}).get("rmse")
        distinct = f"{s['rmse_distinct']:.4f}" if "rmse_distinct" in s else ""
        lines.append(
            f"| {preset} | {dataset} | {dim} | {model} | {s['folds']} | {s['epochs']} "
            f"| {s['rmse']:.4f} ± {s['rmse_std']:.4f} | {'' if paper is None else paper} "
            f"| {s['nlpd']:.3f} ± {s['nlpd_std']:.3f} | {s['nlpd_paper']:.3f} | {s['crps']:.4f} "
            f"| {s['coverage_95']:.3f} | {s['epoch_seconds']:.3f} | {s['parameters']:.0f} "
            f"| {distinct} | {'; '.join(misses((preset, dataset, model, dim), summaries))} |"
        )
    path = results / "table.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def misses(key: Key, summaries: dict[Key, dict[str, Any]]) -> list[str]:
    """What a DAK falls short of: the paper's RMSE, calibration, and the baselines run beside it."""
    preset, dataset, model, dim = key
    if not model.startswith("dak"):
        return []
    own, found = summaries[key], []
    if own["rmse"] > PAPER.get((dataset, model, dim), {}).get("rmse", math.inf):
        found.append("RMSE above the paper's")
    if not _COVERAGE[0] <= own["coverage_95"] <= _COVERAGE[1]:
        found.append(f"coverage not in {_COVERAGE[0]:.2f}-{_COVERAGE[1]:.2f}")
    for metric in ("rmse", "nlpd"):
        better = [
            name
            for name in _ORDER
            if not name.startswith("dak")
            and (preset, dataset, name, dim) in summaries
            and summaries[preset, dataset, name, dim][metric] < own[metric]
        ]
        if better:
            found.append(f"{metric.upper()} of {', '.join(better)} is lower")
    return found


def _write_csv(results: Path, summaries: dict[Key, dict[str, Any]]) -> Path:
    path = results / "table.csv"
    names = [n for column in _COLUMNS for n in (column, f"{column}_std")]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        header = ["preset", "dataset", "model", "feature_dim", "folds", "epochs", "commit"]
        writer.writerow([*header, "paper_rmse", *names])
        for (preset, dataset, model, dim), s in summaries.items():
            paper = PAPER.get((dataset, model, dim), {}).get("rmse", "")
            row = [preset, dataset, model, dim, s["folds"], s["epochs"], s["commit"], paper]
            writer.writerow([*row, *(s.get(name, "") for name in names)])
    return path


def _sets_and_models(summaries: dict[Key, dict[str, Any]]) -> tuple[list[str], list[str], int]:
    dims = [key[3] for key in summaries]
    dim = max(set(dims), key=dims.count)
    sets = list(dict.fromkeys(key[1] for key in summaries))
    present = {key[2] for key in summaries}
    ordered = [m for m in _ORDER if m in present] + sorted(present - set(_ORDER))
    return sets, ordered, dim


def _draw_scores(results: Path, preset: str, summaries: dict[Key, dict[str, Any]]) -> Path:
    sets, names, dim = _sets_and_models(summaries)
    figure, axes = plt.subplots(2, len(sets), figsize=(2.4 * len(sets), 5), squeeze=False)
    for column, dataset in enumerate(sets):
        for row, metric in enumerate(("rmse", "nlpd")):
            axis = axes[row][column]
            for x, name in enumerate(names):
                s = summaries.get((preset, dataset, name, dim))
                if s is not None:
                    error = 0 if math.isnan(s[f"{metric}_std"]) else s[f"{metric}_std"]
                    axis.errorbar(x, s[metric], error, fmt="o", color=f"C{x}", capsize=3)
            axis.set_xticks(range(len(names)), names if row else [], rotation=60, ha="right")
            axis.set_xlim(-0.5, len(names) - 0.5)
            axis.set_title(dataset if row == 0 else "")
            axis.spines[["top", "right"]].set_visible(False)
        axes[0][0].set_ylabel("RMSE")
        axes[1][0].set_ylabel("NLPD")
    return _save(figure, results / f"scores-{preset}.png")


def _draw_time(results: Path, preset: str, summaries: dict[Key, dict[str, Any]]) -> Path:
    sets, names, dim = _sets_and_models(summaries)
    figure, axes = plt.subplots(1, len(sets), figsize=(2.6 * len(sets), 2.8), squeeze=False)
    for axis, dataset in zip(axes[0], sets, strict=True):
        for x, name in enumerate(names):
            s = summaries.get((preset, dataset, name, dim))
            if s is not None:
                axis.loglog(s["train_seconds"], s["rmse"], "o", color=f"C{x}", label=name)
        axis.set_title(dataset)
        axis.set_xlabel("training, s")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("RMSE")
    axes[0][-1].legend(fontsize=7)
    return _save(figure, results / f"time-{preset}.png")


def _draw_calibration(results: Path, preset: str, summaries: dict[Key, dict[str, Any]]) -> Path:
    sets, names, dim = _sets_and_models(summaries)
    figure, axes = plt.subplots(1, len(sets), figsize=(2.6 * len(sets), 2.8), squeeze=False)
    for axis, dataset in zip(axes[0], sets, strict=True):
        axis.plot([0, 1], [0, 1], color="0.7", lw=1)
        for x, name in enumerate(names):
            s = summaries.get((preset, dataset, name, dim))
            if s is not None:
                levels = [(i + 1) / (len(s["coverage"]) + 1) for i in range(len(s["coverage"]))]
                axis.plot(levels, s["coverage"], color=f"C{x}", lw=1.2, label=name)
        axis.set_title(dataset)
        axis.set_xlabel("nominal")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("coverage")
    axes[0][-1].legend(fontsize=7)
    return _save(figure, results / f"calibration-{preset}.png")


def _save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
