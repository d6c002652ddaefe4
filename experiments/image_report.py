"""Tables and figures of the image results: ours beside the paper's, curves, reliability."""

import csv
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from experiments.results import read_json

__all__ = ["PAPER_COST", "PAPER_SCORES", "Key", "aggregate", "write_report"]

_NAMES = {
    "NN": "nn",
    "NN+SVGP": "nn_svgp",
    "SV-DKL": "svdkl",
    "AV-DKL": "avdkl",
    "DAK-MC": "dak_mc",
}
_ORDER = [*_NAMES.values(), "dak_jensen", "dak_features"]
_SETS = {"MNIST": "mnist", "CIFAR-10": "cifar10", "CIFAR-100": "cifar100"}
_COLUMNS = (
    "accuracy",
    "nll",
    "ece",
    "elbo",
    "brier",
    "ood_entropy",
    "ood_mutual_information",
    "parameters",
    "parameters_added",
    "epoch_seconds",
)
_MISSING = "—"


class Key(NamedTuple):
    """What runs have in common that are averaged over seeds."""

    preset: str
    model: str
    batch_size: int
    epochs: int
    fixed_features: bool
    pretrained_epochs: int | None

    @property
    def all_epochs(self) -> str:
        """Epochs, after those of the network on whose features the last layer was trained."""
        if self.pretrained_epochs is None:
            return str(self.epochs)
        return f"{self.pretrained_epochs} + {self.epochs}"


def _read_scores() -> dict[tuple[str, str, int, str], float]:
    """Table 2 and the AV-DKL table by data set, model, batch size and metric; accuracy in [0, 1].

    The paper averages logits, not probabilities, over draws, and its ELBO weighs the KL otherwise.
    """
    with Path(__file__).with_name("paper_table2.csv").open() as file:
        return {
            (
                _SETS[row["dataset"]],
                _NAMES[row["model"]],
                int(row["batch_size"]),
                row["metric"],
            ): float(row["value"]) / (100 if row["metric"] == "accuracy" else 1)
            for row in csv.DictReader(file)
        }


def _read_cost() -> dict[tuple[str, str], dict[str, float]]:
    """Table 3 by data set and model: millions of parameters, added ones but for NN, and seconds."""
    with Path(__file__).with_name("paper_table3.csv").open() as file:
        return {
            (_SETS[row["dataset"]], _NAMES[row["model"]]): {
                "parameters": float(row["parameters_millions"]),
                "epoch_seconds": float(row["epoch_seconds"]),
            }
            for row in csv.DictReader(file)
        }


PAPER_SCORES = _read_scores()
PAPER_COST = _read_cost()


def read_finished(directory: Path) -> list[dict[str, Any]]:
    """The finished runs of a data set; those on held-out training images lie deeper."""
    runs = [read_json(path) for path in sorted(directory.glob("*.json"))]
    return [run for run in runs if run is not None and run.get("status") == "finished"]


def aggregate(runs: list[dict[str, Any]]) -> dict[Key, dict[str, Any]]:
    """Mean and standard deviation over seeds of every metric, and mean curves, for each `Key`."""
    groups: dict[Key, list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        config, recipe = run["config"], run["config"]["recipe"]
        sizes = (recipe["batch_size"], recipe["epochs"], recipe["fixed_features"])
        key = Key(config["preset"], config["model"], *sizes, config.get("pretrained_epochs"))
        groups[key].append(run)
    return {key: _summary(group) for key, group in sorted(groups.items(), key=_sort_key)}


def _sort_key(item: tuple[Key, Any]) -> tuple[Any, ...]:
    key = item[0]
    place = _ORDER.index(key.model) if key.model in _ORDER else len(_ORDER)
    return key.preset, key.batch_size, place, key.epochs, key.pretrained_epochs or 0


def _summary(group: list[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {"runs": len(group), "commit": group[0]["commit"]}
    for name in _COLUMNS:
        values = [run["metrics"].get(name) for run in group]
        if None not in values:
            summary[name] = statistics.fmean(values)
            summary[f"{name}_std"] = statistics.stdev(values) if len(values) > 1 else math.nan
    for name in ("error", "nll", "elbo_per_datum"):
        columns = [[row[name] for row in run["curve"]] for run in group]
        summary[f"curve_{name}"] = [statistics.fmean(v) for v in zip(*columns, strict=False)]
    bins = [run["metrics"]["reliability"] for run in group]
    count = [sum(values) for values in zip(*(b["count"] for b in bins), strict=True)]
    summary["bins"] = {"count": count} | {
        name: [
            sum(b["count"][i] * b[name][i] for b in bins) / max(count[i], 1)
            for i in range(len(count))
        ]
        for name in ("confidence", "accuracy")
    }
    return summary


def write_report(directory: Path) -> list[Path]:
    """Write `table.md`, `table.csv` and the figures beside the runs of a data set."""
    summaries = aggregate(read_finished(directory))
    if not summaries:
        return []
    dataset = directory.name
    return [
        _write_markdown(directory, dataset, summaries),
        _write_csv(directory, dataset, summaries),
        _draw_curves(directory, dataset, summaries),
        _draw_reliability(directory, dataset, summaries),
    ]


def label(key: Key) -> str:
    """A short name of a group of runs."""
    tuned = " fine-tuned" if key.fixed_features else ""
    return f"{key.model}{tuned}, batch {key.batch_size}, {key.all_epochs} epochs"


def _cell(s: dict[str, Any], name: str, digits: int, factor: float = 1.0) -> str:
    if name not in s:
        return _MISSING
    std = s[f"{name}_std"]
    spread = "" if math.isnan(std) else f" ± {factor * std:.{digits}f}"
    return f"{factor * s[name]:.{digits}f}{spread}"


def _write_markdown(directory: Path, dataset: str, summaries: dict[Key, dict[str, Any]]) -> Path:
    lines = [
        "Mean ± standard deviation over seeds, on the test images; probabilities are averaged "
        "after the softmax. ELBO: bound per datum in nats, mean over the last epoch of training. "
        "AUROC: telling images of another data set apart by entropy and by mutual information. "
        "*paper*: printed in its Tables 2 and 3 or its AV-DKL table, for the full data and its "
        "networks, with 20 (MNIST) or 200 (CIFAR) epochs; it averages logits before the softmax "
        "and weighs the KL otherwise, so its ELBO is not comparable. Seconds per epoch are of the "
        "machine and the load of each run: `python -m benchmarks --case b` compares side by side.",
        "",
        "| preset | model | batch | epochs | runs | accuracy, % | *paper* | NLL | *paper* | ECE "
        "| *paper* | ELBO | *paper* | Brier | AUROC entropy | AUROC MI | parameters, M | added, M "
        "| *paper* | s/epoch |",
        "|" + "---|" * 20,
    ]
    for key, s in summaries.items():
        lines.append("| " + " | ".join(_markdown_row(dataset, key, s)) + " |")
    path = directory / "table.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def _markdown_row(dataset: str, key: Key, s: dict[str, Any]) -> list[str]:
    def paper(metric: str) -> str:
        value = PAPER_SCORES.get((dataset, key.model, key.batch_size, metric))
        if value is None:
            return _MISSING
        return f"{100 * value:.2f}" if metric == "accuracy" else f"{value:.3f}"

    cost = PAPER_COST.get((dataset, key.model))
    model = key.model + (" (fine-tuned)" if key.fixed_features else "")
    cells = [key.preset, model, str(key.batch_size), key.all_epochs, str(s["runs"])]
    for name, digits, factor in (("accuracy", 2, 100), ("nll", 4, 1), ("ece", 4, 1)):
        cells += [_cell(s, name, digits, factor), paper(name)]
    cells += [_cell(s, "elbo", 3), paper("elbo"), _cell(s, "brier", 4)]
    cells += [_cell(s, "ood_entropy", 4), _cell(s, "ood_mutual_information", 4)]
    cells += [f"{s['parameters'] / 1e6:.3f}", f"{s['parameters_added'] / 1e6:.3f}"]
    added = _MISSING if cost is None else f"{'' if key.model == 'nn' else '+'}{cost['parameters']}"
    return [*cells, added, f"{s['epoch_seconds']:.1f}" if "epoch_seconds" in s else _MISSING]


def _write_csv(directory: Path, dataset: str, summaries: dict[Key, dict[str, Any]]) -> Path:
    path = directory / "table.csv"
    names = [n for column in _COLUMNS for n in (column, f"{column}_std")]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["dataset", *Key._fields, "runs", "commit", *names])
        for key, s in summaries.items():
            row = [dataset, *key, s["runs"], s["commit"]]
            writer.writerow([*row, *(s.get(name, "") for name in names)])
    return path


def _draw_curves(directory: Path, dataset: str, summaries: dict[Key, dict[str, Any]]) -> Path:
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2))
    panels = (("error", "test error, %", 100), ("nll", "test NLL", 1))
    for color, (key, s) in enumerate(summaries.items()):
        for axis, (name, title, factor) in zip(axes, panels, strict=False):
            values = [factor * value for value in s[f"curve_{name}"]]
            axis.semilogy(range(1, len(values) + 1), values, color=f"C{color}", label=label(key))
            axis.set_ylabel(title)
        if key.model != "nn":
            loss = [-value for value in s["curve_elbo_per_datum"]]
            axes[2].semilogy(range(1, len(loss) + 1), loss, color=f"C{color}")
    axes[2].set_ylabel("-ELBO per datum")
    for axis in axes:
        axis.set_xlabel("epoch")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_title(dataset)
    axes[1].legend(fontsize=6)
    return _save(figure, directory / "curves.png")


def _draw_reliability(directory: Path, dataset: str, summaries: dict[Key, dict[str, Any]]) -> Path:
    num = len(summaries)
    figure, axes = plt.subplots(1, num, figsize=(2.4 * num, 2.8), squeeze=False, sharey=True)
    for axis, (key, s) in zip(axes[0], summaries.items(), strict=True):
        bins = s["bins"]
        shown = [i for i, count in enumerate(bins["count"]) if count > 0]
        axis.plot([0, 1], [0, 1], color="0.7", lw=1)
        sizes = [4 + 60 * bins["count"][i] / sum(bins["count"]) for i in shown]
        confidence = [bins["confidence"][i] for i in shown]
        axis.scatter(confidence, [bins["accuracy"][i] for i in shown], s=sizes, color="C0")
        axis.set_title(label(key).replace(", ", "\n", 1), fontsize=7)
        axis.set_xlabel("confidence")
        axis.text(0.05, 0.9, f"ECE {s['ece']:.4f}", fontsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel(f"accuracy, {dataset}")
    return _save(figure, directory / "reliability.png")


def _save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
