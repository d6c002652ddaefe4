"""Memory and time of `fit` on Parquet files: an epoch over 20 million rows, and over 2 million.

    python -m benchmarks.parquet_rows [--rows 2000000 20000000] [--rounds 3] [--folder DIR]

The files are made first, unless they are there: normal inputs, and a target that depends on three
of them. Each run has a process of its own, in which a few rows go first, so that what does not
depend on their number is there already; the sizes take turns. What is printed is the processor time
of the whole call of `fit` (statistics, one epoch, the last passes), which a busy machine disturbs
less than the clock does, and the peak memory of the process. The last line has the time of the
largest size over that of the smallest, divided by the ratio of the rows.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import pyro_dak
from pyro_dak import DAK, MeanFieldGuide, NaturalGuide, ParquetRows
from pyro_dak.training.files import write_whole

__all__ = ["fit_rows", "main", "write_rows"]

GROUP_ROWS, FILE_ROWS, FIRST_ROWS = 100_000, 1_000_000, 20_000


def write_rows(folder: Path, num_rows: int, num_columns: int) -> None:
    """A folder of files with so many rows; files that are there stay as they are."""
    import pyarrow
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(0, num_rows, FILE_ROWS)):
        path = folder / f"part-{number:04d}.parquet"
        if path.exists():
            continue
        rng = np.random.default_rng(number)
        x = rng.standard_normal((min(FILE_ROWS, num_rows - start), num_columns))
        y = np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * rng.standard_normal(len(x))
        columns = {f"x{index}": x[:, index] for index in range(num_columns)}
        table = pyarrow.table(columns | {"y": y})

        def write(temporary: Path, table: Any = table) -> None:
            parquet.write_table(table, temporary, row_group_size=GROUP_ROWS)

        write_whole(path, write)


def fit_rows(
    first: Path, folder: Path, guide: str, batch_size: int, progress: bool
) -> dict[str, float]:
    """What one epoch of `fit` over these files takes, after one over others, in one process."""
    torch.set_num_threads(1)
    _fit(first, guide, batch_size, False)
    return _fit(folder, guide, batch_size, progress)


def _fit(folder: Path, guide: str, batch_size: int, progress: bool) -> dict[str, float]:
    torch.manual_seed(0)
    before, start = time.process_time(), time.perf_counter()
    rows = ParquetRows(folder, "y", progress=progress)
    network = nn.Sequential(nn.Linear(rows.width, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
    model = DAK(network, 32)
    own = (NaturalGuide if guide == "natural" else MeanFieldGuide)(model)
    options = {"epochs": 1, "batch_size": batch_size, "validation": 0.01, "seed": 0}
    history = pyro_dak.fit(model, own, rows, accelerator="cpu", progress=progress, **options)
    return {
        "rows": rows.num_rows,
        "cpu_seconds": time.process_time() - before,
        "seconds": time.perf_counter() - start,
        "epoch_seconds": history.seconds[0],
        "peak_gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2,
        "val_rmse": history.rows[-1]["val_rmse"],
    }


def main() -> None:
    """Make the files, run the sizes in turn, and print memory and the growth of time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[2_000_000, 20_000_000])
    parser.add_argument("--columns", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--guide", choices=["mean_field", "natural"], default="mean_field")
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--folder", type=Path, help="where the files are kept; else nowhere")
    parser.add_argument("--quiet", action="store_true")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    found: dict[int, list[float]] = {size: [] for size in options.rows}
    with tempfile.TemporaryDirectory() as temporary:
        root = options.folder or Path(temporary)
        folders = {size: root / f"{size}x{options.columns}" for size in options.rows}
        first = root / f"first x{options.columns}"
        for size, folder in {FIRST_ROWS: first, **folders}.items():
            write_rows(folder, size, options.columns)
        for _ in range(options.rounds):
            for size, folder in folders.items():
                arguments = (first, folder, options.guide, options.batch_size, not options.quiet)
                with context.Pool(1) as pool:
                    run = pool.apply(fit_rows, arguments)
                found[size].append(run["cpu_seconds"])
                print(json.dumps(run), flush=True)
    sizes = sorted(found)
    ratios = [b / a for a, b in zip(found[sizes[0]], found[sizes[-1]], strict=True)]
    growth = [ratio * sizes[0] / sizes[-1] for ratio in ratios]
    shown = ", ".join(f"{value:.3f}" for value in growth)
    print(f"time by rows, {sizes[-1]} against {sizes[0]}: {shown}; median "
          f"{statistics.median(growth):.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
