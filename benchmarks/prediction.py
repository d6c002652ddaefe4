"""Memory and time of prediction: does memory grow with the rows beyond the result itself?

    python -m benchmarks.prediction [--rows 1000000]

Prints the peak memory of the process above what it held with model and inputs in memory.
"""

import argparse
import resource
import time

import torch
from torch import nn

from pyro_dak import DAK, MeanFieldGuide, predict


def _peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Predict once to warm up, then all rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    num_rows = parser.parse_args().rows
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
    model = DAK(network, 32, num_units=16, level=6).eval()
    guide = MeanFieldGuide(model)
    x = torch.randn(num_rows, 8)
    predict(model, guide, x[:1000])
    before = _peak_megabytes()
    start = time.perf_counter()
    prediction = predict(model, guide, x)
    seconds = time.perf_counter() - start
    result = 4 * sum(part.nelement() for part in (prediction.mean, prediction.variance)) / 1e6
    print(
        f"{num_rows} rows x P = 16, M = 63: {seconds:.1f} s, {num_rows / seconds:.0f} rows/s, peak "
        f"memory {_peak_megabytes() - before:.0f} MB above model and inputs "
        f"({x.nelement() * 4 / 1e6:.0f} MB); mean and variance take {result:.0f} MB"
    )


if __name__ == "__main__":
    main()
