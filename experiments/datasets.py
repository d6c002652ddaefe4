"""Regression data sets by name: from a data directory, else downloaded once and verified.

The files are those of github.com/treforevans/uci_datasets: gzipped CSV without header, the last
column is the target, every column centred.
"""

import gzip
import os
from dataclasses import dataclass
from pathlib import Path

import numpy
import pooch
import torch
from torch import Tensor

from pyro_dak.validation import check_choice

__all__ = ["REGRESSION", "DataError", "find_file", "load_regression"]

_SOURCE = "https://raw.githubusercontent.com/treforevans/uci_datasets/master/uci_datasets"


class DataError(RuntimeError):
    """A data file is missing or damaged; the message names it and says what to do."""


@dataclass(frozen=True)
class _File:
    rows: int
    columns: int
    sha256: str


# Rows, columns with the target, sha256 of the gzipped file. The first six are the paper's.
REGRESSION = {
    "wine": _File(1599, 12, "e2ca3346651ddb43fbc6a1355e70e74b7ce68f93059e04405e9cb749c219eae2"),
    "gas": _File(2565, 129, "bd82bee47199d3952bee30a59739794b26baa742e1da7f7bd42b9a34552321a1"),
    "parkinsons": _File(
        5875, 21, "d20ffd9c9e5053a03fff0b770e7b0e076bf856a34538198303c897b6cc6addde"
    ),
    "kin40k": _File(40000, 9, "9bee7f2a9f39aa61a015f239378368601fb3978c5bb9a96433e88a55d40883ba"),
    "protein": _File(45730, 10, "f709d0107c3ee90ab019b9e5d77fc2ae182158958cb70b1903236a51334fd01b"),
    "keggdirected": _File(
        48827, 21, "51b7bb56e3f3eae36273cdd5a549c042bdf0ec10948a6f8e6b01a1d6912212cd"
    ),
    "energy": _File(768, 9, "431b6df04243db782bbcd45e408373a654334496ebe5d9c9985ab2e826a39f51"),
    "yacht": _File(308, 7, "88ec8ea1a979ab0628a54392822c60b3699ea22541e912e83246f7d49f5adad1"),
    "housing": _File(506, 14, "9f5b8a1cbc051465dcf10f4298aaccd8a596ea68de0db693159be6e7d07ccf12"),
}


def find_file(relative: str, sha256: str, url: str, data_root: str | Path | None = None) -> Path:
    """A data file: under `data_root` or $PYRO_DAK_DATA if there, else downloaded to the user cache.

    A download is made once, shows a progress bar, and is verified by its checksum before it gets
    its name. A file in the data root is verified as well.
    """
    root = data_root or os.environ.get("PYRO_DAK_DATA")
    if root is not None and (Path(root) / relative).is_file():
        path = Path(root) / relative
        found = pooch.file_hash(str(path), alg="sha256")
        if found != sha256:
            raise DataError(
                f"{path}: is damaged or another version (sha256 {found[:12]}..., expected "
                f"{sha256[:12]}...). Delete it and run again to download it."
            )
        return path
    cache = Path(pooch.os_cache("pyro_dak"))
    try:
        return Path(
            pooch.retrieve(
                url,
                known_hash=f"sha256:{sha256}",
                fname=relative.replace("/", "-"),
                path=cache,
                progressbar=True,
            )
        )
    except (OSError, ValueError) as error:
        raise DataError(
            f"{relative}: is not under the data root ({root}) and could not be downloaded from "
            f"{url}: {error}. Put the file there and set PYRO_DAK_DATA or --data-root."
        ) from error


def load_regression(
    name: str, data_root: str | Path | None = None, source: str = _SOURCE
) -> tuple[Tensor, Tensor]:
    """x `(N, D)` and y `(N, 1)`, float64, as stored: centred, not scaled.

    Args:
        name: one of `REGRESSION`, or "diabetes" from scikit-learn, which needs no file.
        data_root: directory that holds `uci/NAME.csv.gz`.
        source: address to download from.
    """
    check_choice("dataset", name, [*REGRESSION, "diabetes"])
    if name == "diabetes":
        from sklearn.datasets import load_diabetes

        x, y = load_diabetes(return_X_y=True)
        return torch.as_tensor(x), torch.as_tensor(y).unsqueeze(-1)
    file = REGRESSION[name]
    path = find_file(f"uci/{name}.csv.gz", file.sha256, f"{source}/{name}/data.csv.gz", data_root)
    with gzip.open(path, "rt") as text:
        table = torch.as_tensor(numpy.loadtxt(text, delimiter=","))
    if table.shape != (file.rows, file.columns):
        raise DataError(f"{path}: has shape {tuple(table.shape)}, expected {file.rows} rows.")
    return table[:, :-1], table[:, -1:]
