"""Time of a training step of an ensemble by its size, side by side.

    python -m benchmarks.ensembles [--batch-size 512]

Shapes of kin40k: 8 columns, network 64-32-64, 16 units, level 5, noise that depends on the inputs.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.timing import time_side_by_side
from pyro_dak import DAKRegressor
from pyro_dak.tables.ensemble import ensemble_plan, train
from pyro_dak.tables.rows import Rows

SIZES = (1, 2, 5, 10)


def _epoch_fn(size: int, batch_size: int, steps: int) -> Callable[[], object]:
    """A function that makes `steps` steps of an ensemble of this size."""
    num_rows = batch_size * steps
    torch.manual_seed(0)
    x, y = torch.randn(num_rows, 8), torch.randn(num_rows, 1)
    options: dict[str, Any] = {
        "early_stopping": False,
        "progress": False,
        "numeric_embedding": None,
    }
    model = DAKRegressor(size, epochs=1, random_state=0, **options)
    model.fit(x[:50].numpy(), y[:50, 0].numpy())
    rows = Rows(x, y, torch.ones(num_rows))
    plan = ensemble_plan(epochs=1, batch_size=batch_size)
    return lambda: train(model.ensemble_, rows, plan)


def main() -> None:
    """Print the time of a step for each size and its ratio to a single member."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    candidates = {str(size): _epoch_fn(size, options.batch_size, options.steps) for size in SIZES}
    timings = time_side_by_side(candidates, repetitions=9, seconds_per_repetition=0.0)
    single = timings["1"].milliseconds
    print("| members | ms per step | against one |\n|---|---|---|")
    for name, timing in timings.items():
        print(
            f"| {name} | {timing.milliseconds / options.steps:.2f} | "
            f"{timing.milliseconds / single:.2f} |"
        )


if __name__ == "__main__":
    main()
