"""Memory and time of the estimator on a large table: one epoch of `fit`, then `predict`.

    python -m benchmarks.million_rows [--rows 1000000] [--columns 10] [--ensemble-size 5]

Prints seconds and the peak memory of the process; bars on stderr show progress.
"""

import argparse
import resource
import time

import numpy as np

from pyro_dak import DAKRegressor


def _peak_gigabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2


def main() -> None:
    """Make the table, train for one epoch with the defaults, predict all rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=10)
    parser.add_argument("--ensemble-size", type=int, default=5)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    X = rng.standard_normal((options.rows, options.columns))
    y = np.sin(X[:, 0]) + 0.1 * rng.standard_normal(options.rows)
    print(f"{options.rows} x {options.columns}, table in memory: peak {_peak_gigabytes():.2f} GB")
    model = DAKRegressor(options.ensemble_size, epochs=1, random_state=0)
    start = time.perf_counter()
    model.fit(X, y)
    passes = len(model.history_.rows)
    seconds = time.perf_counter() - start
    print(
        f"fit, {passes} passes (one held out, one on all rows if refitted): {seconds:.1f} s, "
        f"peak {_peak_gigabytes():.2f} GB"
    )
    start = time.perf_counter()
    mean, _ = model.predict(X, return_std=True)
    seconds = time.perf_counter() - start
    error = float(np.sqrt(np.mean((mean - y) ** 2)))
    print(
        f"predict: {seconds:.1f} s, {options.rows / seconds:.0f} rows/s, peak "
        f"{_peak_gigabytes():.2f} GB; RMSE {error:.3f}"
    )


if __name__ == "__main__":
    main()
