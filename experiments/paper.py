"""The numbers printed in the paper, by data set and model of ours."""

import csv
from collections.abc import Iterator
from pathlib import Path

__all__ = ["COST", "MODELS", "REGRESSION", "SCORES"]

# The models of the paper in its order, by the names of our boards.
MODELS = {
    "NN": "nn",
    "NN+SVGP": "nn_svgp",
    "SV-DKL": "svdkl",
    "AV-DKL": "avdkl",
    "DAK-MC": "dak_mc",
    "DAK-CF": "dak_cf",
}
_SETS = {"MNIST": "mnist", "CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "kegg": "keggdirected"}


def _rows(table: int) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Data set, model, and the cells of each row of a table of the paper."""
    with Path(__file__).with_name(f"paper_table{table}.csv").open() as file:
        for row in csv.DictReader(file):
            yield _SETS.get(row["dataset"], row["dataset"]), MODELS[row["model"]], row


# RMSE and NLPD of Table 1 by data set, model and D_w. The paper's cross-validation keeps the
# weights from fold to fold, so that test rows have been trained on; its NLPD has a fixed noise.
REGRESSION = {
    (dataset, model, int(row["feature_dim"])): {k: float(row[k]) for k in ("rmse", "nlpd")}
    for dataset, model, row in _rows(1)
}
# Table 2 and the AV-DKL table by data set, model, batch size and metric; accuracy in [0, 1]. The
# paper averages logits, not probabilities, over draws, and its ELBO weighs the KL otherwise.
SCORES = {
    (dataset, model, int(row["batch_size"]), row["metric"]): float(row["value"])
    / (100 if row["metric"] == "accuracy" else 1)
    for dataset, model, row in _rows(2)
}
# Table 3 by data set and model: millions of parameters, added ones but for NN, and seconds.
COST = {
    (dataset, model): {
        "parameters": float(row["parameters_millions"]),
        "epoch_seconds": float(row["epoch_seconds"]),
    }
    for dataset, model, row in _rows(3)
}
