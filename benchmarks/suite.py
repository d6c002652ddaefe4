"""All timings, as ratios to the plain network or to a named peer, in one table.

    python -m benchmarks [--case training images ...] [--threads 1 2] [--repetitions 7] [--quick]

Each number of threads has a process of its own; in it the candidates of a comparison take turns.
The numbers are medians over the rounds, with half the range. Nothing is written to disk:
`python -m experiments.bench` measures the same and records it.
"""

import argparse
import multiprocessing
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pyro
import torch

from benchmarks import (
    complexity,
    exporting,
    growth,
    images,
    natural,
    peers,
    race,
    serving,
    training,
)
from benchmarks.steps import Row

__all__ = ["CASES", "format_rows", "main", "measure", "run"]

CASES: dict[str, Callable[[int, bool], list[Row]]] = {
    "training": training.run,
    "images": images.run,
    "natural": natural.run,
    "serving": serving.run,
    "exporting": exporting.run,
    "growth": growth.run,
    "complexity": complexity.run,
    "race": race.run,
    "peers": peers.run,
}


def run(case: str, num_threads: int, repetitions: int, quick: bool) -> list[Row]:
    """The rows of a case, measured in this process."""
    warnings.simplefilter("ignore")  # GPyTorch warns of jitter, the grid of being coarse
    torch.set_num_threads(num_threads)
    with pyro.settings.context(module_local_params=True):  # as inside `fit`
        rows = CASES[case](repetitions, quick)
    return [{"case": case} | row | {"threads": num_threads} for row in rows]


def measure(case: str, num_threads: int, repetitions: int, quick: bool) -> list[Row]:
    """The rows of a case, measured in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(run, case, num_threads, repetitions, quick).result()


def _cell(value: Any, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def format_rows(table: list[Row]) -> str:
    """The rows as Markdown: times and ratios, then slopes, then scores."""
    lines = [
        "| case | threads | setting | name | ms | ratio | of | MB | rows/s |",
        "|---" * 9 + "|",
    ]
    slopes = [
        "| threads | growth with | name | from | to | time | at the end | memory |",
        "|---" * 8 + "|",
    ]
    for row in table:
        head = f"| {row['case']} | {row['threads']} | {row['setting']} | {row['name']}"
        if "slope_of_time" in row:
            sizes = f"{row['sizes'][0]} | {row['sizes'][-1]}"
            axis = row["setting"].removeprefix("growth with ")
            slopes.append(
                f"| {row['threads']} | {axis} | {row['name']} | {sizes} "
                f"| {row['slope_of_time']:.2f} | {_cell(row.get('slope_at_the_end'), 2)} "
                f"| {_cell(row.get('slope_of_memory'), 2)} |"
            )
            continue
        time = f"{_cell(row.get('milliseconds'), 2)} ± {_cell(row.get('spread'), 2)}".strip(" ±")
        ratio = f"{_cell(row['ratio'], 2)} ± {_cell(row.get('ratio_spread'), 2)}".strip(" ±")
        lines.append(
            f"{head} | {time} | {ratio} | {row['base']} | {_cell(row.get('megabytes'), 1)} "
            f"| {_cell(row.get('rows_per_second'), 0)} |"
        )
    scores = ["| set | name | test NLPD |", "|---" * 3 + "|"]
    found = {(r["setting"].split(",")[0], r["name"]): r["nlpd"] for r in table if "nlpd" in r}
    scores += [f"| {name} | {model} | {nlpd:.3f} |" for (name, model), nlpd in found.items()]
    parts = [part for part in (lines, slopes, scores) if len(part) > 2]
    return "\n\n".join("\n".join(part) for part in parts)


def main() -> None:
    """Measure the cases one after the other and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: does it run?")
    options = parser.parse_args()
    repetitions = 1 if options.quick else options.repetitions
    table: list[Row] = []
    for threads in options.threads:
        for case in options.case:
            start = time.perf_counter()
            table += measure(case, threads, repetitions, options.quick)
            print(f"{case}, {threads} threads: {time.perf_counter() - start:.0f} s", flush=True)
    print(f"\n{format_rows(table)}")
