"""Memory of a training step, and how time and memory grow with N, B, M, P and C.

Growth is the slope of a straight line through the logarithms. A step is measured by its median time
and by the memory that its graph holds for the backward pass. Growth with N is that of an epoch of
`fit` in a process of its own, and of the peak memory of that process above what it had after a
single batch.
"""

import math
import multiprocessing
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import models
import pyro_dak
from benchmarks.steps import NUM_DATA, Row, loss_fn, training_step
from benchmarks.timing import saved_megabytes, time_side_by_side
from models.shared.dak import DAKBaseline

__all__ = ["run", "slope"]

NUM_COLUMNS = 64
BATCH_SIZE = 512


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Least-squares slope of log(values) on log(sizes)."""
    return statistics.linear_regression(
        [math.log(size) for size in sizes], [math.log(value) for value in values]
    ).slope


def _model(level: int = 6, num_units: int = 16, num_outputs: int = 1) -> DAKBaseline:
    return models.build("dak_cf", 8, num_outputs, level=level, num_units=num_units)


def _batch(batch_size: int, num_outputs: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(batch_size, 8), torch.randn(batch_size, num_outputs)


def _memory_of_steps(batch_size: int) -> list[Row]:
    """What the graph of each model holds for its backward pass."""
    x, y = _batch(batch_size)
    table: list[Row] = []
    megabytes: dict[str, float] = {}
    for name in ("nn", "dak_cf", "dak_mc", "nn_svgp", "svdkl", "avdkl"):
        fn = loss_fn(models.build(name, 8), x, y)
        fn()
        megabytes[name] = saved_megabytes(fn)
    for name, value in megabytes.items():
        row = {"setting": f"memory of a step, B={batch_size}", "name": name}
        table.append(row | {"megabytes": value, "base": "nn", "ratio": value / megabytes["nn"]})
    return table


def _growth_of_steps(repetitions: int, quick: bool) -> list[Row]:
    axes: dict[str, dict[int, tuple[DAKBaseline, Tensor, Tensor]]] = {
        "B": {n: (_model(), *_batch(n)) for n in ((8, 16) if quick else (512, 1024, 2048, 4096))},
        "M": {
            2**level - 1: (_model(level=level), *_batch(BATCH_SIZE))
            for level in ((2, 3) if quick else (3, 4, 5, 6, 7, 8, 9, 10))
        },
        "P": {
            p: (_model(num_units=p), *_batch(BATCH_SIZE))
            for p in ((2, 4) if quick else (16, 32, 64, 128))
        },
        "C": {
            c: (_model(num_outputs=c), *_batch(BATCH_SIZE, c))
            for c in ((1, 2) if quick else (1, 4, 16, 64))
        },
    }
    table = []
    for axis, cases in axes.items():
        steps = {
            str(size): partial(training_step(model, NUM_DATA), x, y)
            for size, (model, x, y) in cases.items()
        }
        timings = time_side_by_side(steps, repetitions)
        times = [timing.milliseconds for timing in timings.values()]
        megabytes = [saved_megabytes(loss_fn(*case)) for case in cases.values()]
        table.append(_growth_row(axis, list(cases), times, megabytes))
    return table


def _growth_row(
    axis: str, sizes: Sequence[int], times: Sequence[float], megabytes: Sequence[float]
) -> Row:
    return {
        "setting": f"growth with {axis}",
        "name": "dak_cf",
        "sizes": list(sizes),
        "milliseconds_by_size": list(times),
        "megabytes_by_size": list(megabytes),
        "slope_of_time": slope(sizes, times),
        "slope_of_memory": slope(sizes, megabytes),
    }


def _megabytes(name: str) -> float:
    """Memory of this process: `VmRSS` now, `VmHWM` at its peak."""
    status = Path("/proc/self/status")
    if not status.is_file():
        raise RuntimeError("Growth with N reads /proc/self/status, which Linux alone has.")
    line = next(row for row in status.read_text().splitlines() if row.startswith(name))
    return int(line.split()[1]) / 1024


def _fit(num_rows: int) -> float:
    """Milliseconds of an epoch of training on so many random rows."""
    x, y = torch.randn(num_rows, NUM_COLUMNS), torch.randn(num_rows, 1)
    model = models.build("dak_cf", NUM_COLUMNS, level=5)
    history = pyro_dak.fit(
        model.model,
        model.guide,
        (x, y),
        epochs=1,
        batch_size=min(BATCH_SIZE, num_rows),
        accelerator="cpu",
        seed=0,
        progress=False,
    )
    return 1e3 * history.seconds[0]


def fit_rows(num_rows: int, num_threads: int) -> tuple[float, float]:
    """Milliseconds of an epoch over so many rows, and MB by which memory grows at its peak.

    A batch of rows goes first, so that what does not depend on the rows is there already.
    """
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    _fit(BATCH_SIZE)
    before = _megabytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    return _fit(num_rows), _megabytes("VmHWM") - before


def _growth_with_rows(repetitions: int, quick: bool) -> Row:
    sizes = (20_000, 40_000) if quick else (10_000, 30_000, 100_000, 300_000, 1_000_000)
    context = multiprocessing.get_context("spawn")
    num_threads = torch.get_num_threads()
    runs: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    for _ in range(repetitions):
        for size, found in runs.items():
            with context.Pool(1) as pool:
                found.append(pool.apply(fit_rows, (size, num_threads)))
    times = [statistics.median(time for time, _ in runs[size]) for size in sizes]
    peaks = [statistics.median(peak for _, peak in runs[size]) for size in sizes]
    return _growth_row("N", sizes, times, peaks)


def run(repetitions: int, quick: bool) -> list[Row]:
    """Memory of the steps as ratios to the plain network, and the slopes of growth."""
    table = [] if quick else _memory_of_steps(BATCH_SIZE)
    table += _growth_of_steps(repetitions, quick)
    table.append(_growth_with_rows(1 if quick else 3, quick))
    return table
