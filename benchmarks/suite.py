"""All timings, as ratios to the plain network or to a named peer: a table, and a json.

    python -m benchmarks [--case a b c d e] [--threads 1 2] [--repetitions 7] [--quick] [--out DIR]

Each number of threads has a process of its own; in it the candidates of a comparison take turns.
Figures are medians over the rounds, with half the range.
"""

import argparse
import json
import multiprocessing
import platform
import subprocess
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pyro
import torch
from tqdm.auto import tqdm

from benchmarks.growth import case_d
from benchmarks.serving import case_c
from benchmarks.steps import Row, case_a, case_b
from benchmarks.targets import case_e

CASES = {"a": case_a, "b": case_b, "c": case_c, "d": case_d, "e": case_e}


def run(case: str, num_threads: int, repetitions: int, quick: bool) -> list[Row]:
    """The rows of a case in this process."""
    warnings.simplefilter("ignore")  # GPyTorch, of jitter; the grid, of being coarse
    torch.set_num_threads(num_threads)
    with pyro.settings.context(module_local_params=True):  # as inside `fit`
        return [row | {"threads": num_threads} for row in CASES[case](repetitions, quick)]


def _cell(value: Any, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def format_rows(table: list[Row]) -> str:
    """The rows as Markdown: times and ratios, then slopes."""
    lines = [
        "| case | threads | setting | name | ms | ratio | of | MB | rows/s |",
        "|---" * 9 + "|",
    ]
    slopes = ["| threads | growth with | from | to | time | memory |", "|---" * 6 + "|"]
    for row in table:
        head = f"| {row['case']} | {row['threads']} | {row['setting']} | {row['name']}"
        if "slope_of_time" in row:
            sizes = f"{row['sizes'][0]} | {row['sizes'][-1]}"
            axis = row["setting"].removeprefix("growth with ")
            slopes.append(
                f"| {row['threads']} | {axis} | {sizes} | {row['slope_of_time']:.2f} "
                f"| {row['slope_of_memory']:.2f} |"
            )
            continue
        time = f"{_cell(row.get('milliseconds'), 2)} ± {_cell(row.get('spread'), 2)}".strip(" ±")
        ratio = f"{_cell(row['ratio'], 2)} ± {_cell(row.get('ratio_spread'), 2)}".strip(" ±")
        lines.append(
            f"{head} | {time} | {ratio} | {row['base']} | {_cell(row.get('megabytes'), 1)} "
            f"| {_cell(row.get('rows_per_second'), 0)} |"
        )
    parts = [lines] if len(lines) > 2 else []
    parts += [slopes] if len(slopes) > 2 else []
    return "\n\n".join("\n".join(part) for part in parts)


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Run the cases, print the table, write the json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", choices=sorted(CASES), default=sorted(CASES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: does it run?")
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    options = parser.parse_args()
    repetitions = 1 if options.quick else options.repetitions
    jobs = [(case, threads) for threads in options.threads for case in options.case]
    context = multiprocessing.get_context("spawn")
    table: list[Row] = []
    for case, threads in tqdm(jobs, desc="benchmarks", unit="case"):
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            part = pool.submit(run, case, threads, repetitions, options.quick).result()
        table += part
        options.out.mkdir(parents=True, exist_ok=True)
        content = {
            "rows": part,
            "repetitions": repetitions,
            "torch": torch.__version__,
            "machine": platform.machine(),
            "commit": _commit(),
        }
        path = options.out / f"{case}-{threads}.json"
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    print(format_rows(table))
