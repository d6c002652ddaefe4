"""Processor time of `DAKRegressor().fit` beside deep ensembles of its size, in the same epochs.

    python -m benchmarks.deep_ensembles [--rows 5000] [--epochs 20]

A deep ensemble is five networks with a mean and a variance, of the same widths and batches, in a
plain loop of torch. As most people write it, they are trained one after the other. The other one
has all weights stacked, and is trained in one batched pass. Neither holds out rows, scores them,
calibrates or learns what is novel, as `fit` does.
"""

import argparse
import time
from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from benchmarks.timing import time_side_by_side
from pyro_dak import DAKRegressor
from pyro_dak.tables.rows import default_batch_size

_HIDDEN = (64, 32, 64)


def _train(
    network_fn: Callable[[torch.Tensor], torch.Tensor],
    parameters: Iterable[torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
    epochs: int,
) -> None:
    """Minimise the Gaussian negative log-likelihood of mean and variance, `(..., N, 2)`."""
    optimizer = torch.optim.Adam(parameters, 2e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(default_batch_size(len(x))):
            mean, raw = network_fn(x[batch]).unbind(-1)
            var = nn.functional.softplus(raw) + 1e-6
            loss = nn.functional.gaussian_nll_loss(mean, y[batch].expand_as(mean), var)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def _one_by_one(x: torch.Tensor, y: torch.Tensor, epochs: int) -> None:
    """Train five networks, one after the other."""
    for _ in range(5):
        parts = [(nn.Linear(*sizes), nn.ReLU()) for sizes in pairwise((x.shape[1], *_HIDDEN))]
        network = nn.Sequential(*(layer for part in parts for layer in part), nn.Linear(64, 2))
        _train(network, network.parameters(), x, y, epochs)


def _batched(x: torch.Tensor, y: torch.Tensor, epochs: int) -> None:
    """Train five networks whose weights are stacked."""
    sizes = [*pairwise((x.shape[1], *_HIDDEN, 2))]
    weights = [(torch.randn(5, *size) / size[0] ** 0.5).requires_grad_() for size in sizes]
    biases = [torch.zeros(5, 1, size[1], requires_grad=True) for size in sizes]

    def network_fn(rows: torch.Tensor) -> torch.Tensor:
        h = rows.expand(5, -1, -1)
        for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            h = torch.baddbmm(bias, h.relu() if number else h, weight)
        return h

    _train(network_fn, [*weights, *biases], x, y, epochs)


def main() -> None:
    """Print the seconds of each and the ratio of ours to them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    X = rng.standard_normal((options.rows, 8))
    target = np.sin(2 * X[:, 0]) + X[:, 1] + 0.1 * rng.standard_normal(options.rows)
    x, y = torch.from_numpy(X).float(), torch.from_numpy(target).float()
    model = DAKRegressor(epochs=options.epochs, progress=False, random_state=0)
    candidates: dict[str, Callable[[], object]] = {
        "DAKRegressor()": lambda: model.fit(X, target),
        "five networks, one by one": lambda: _one_by_one(x, y, options.epochs),
        "five networks, batched": lambda: _batched(x, y, options.epochs),
    }
    clock = time.process_time  # with one thread, and other programs at work
    timings = time_side_by_side(candidates, 3, 0.0, clock)
    print("| | seconds | DAKRegressor() against it |\n|---|---|---|")
    for name, timing in timings.items():
        ratio, spread = timings["DAKRegressor()"].ratio_to(timing)
        print(f"| {name} | {timing.milliseconds / 1e3:.2f} | {ratio:.2f} ± {spread:.2f} |")


if __name__ == "__main__":
    main()
