"""NUTS on the last layer: what a gradient costs with features cached, and what a run takes.

    python -m benchmarks.nuts [--rows 1600] [--draws 500]

113 weights (P = 16, M = 7). The gradient of the log density: Pyro's own potential with the network
inside, the same on cached unit inputs, and ours, one matrix product. Then 500 + 500 draws.
"""

import argparse
import time
from collections.abc import Callable

import torch
from pyro.infer.mcmc.util import initialize_model
from pyro.ops.integrator import potential_grad
from torch import Tensor, nn

from benchmarks.timing import time_side_by_side
from pyro_dak import DAK, CategoricalLikelihood, GaussianLikelihood, run_nuts
from pyro_dak.inference.densities import cached_inputs, checked_data
from pyro_dak.inference.mcmc.target import Target
from pyro_dak.model.likelihoods import Likelihood


def make(likelihood: Likelihood, num_outputs: int, num_rows: int) -> tuple[DAK, Tensor, Tensor]:
    """A model with a small network, in eval mode, and data."""
    torch.manual_seed(0)
    x = torch.randn(num_rows, 8)
    network = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
    model = DAK(network, 32, 16, num_outputs, level=3, likelihood=likelihood)
    model.unit_inputs(x)  # in training mode: takes the statistics of x
    y = torch.sin(2 * x[:, :1]) + 0.3 * torch.randn(num_rows, 1)
    if isinstance(likelihood, CategoricalLikelihood):
        y = torch.bucketize(y.squeeze(-1), torch.linspace(-1, 1, num_outputs - 1))
    return model.eval().requires_grad_(False), x, y


def gradients(model: DAK, x: Tensor, y: Tensor) -> dict[str, Callable[[], object]]:
    """The gradient by each route, at a start of its own."""
    h = cached_inputs(model, x)
    _, y64 = checked_data(model, x, y)
    routes: dict[str, Callable[[], object]] = {}
    for name, program, inputs in (
        ("Pyro, network inside", model, (x, y)),
        ("Pyro, features cached", model.observe, (h.float(), y)),
    ):
        start, potential_fn, _, _ = initialize_model(program, inputs)
        routes[name] = lambda fn=potential_fn, z=start: potential_grad(fn, z)
    target = Target(model, h, y64)
    position = {"position": target.initial_position(torch.Generator().manual_seed(0))}
    routes["ours"] = lambda: potential_grad(target, position)
    return routes


def main() -> None:
    """Print the costs of gradients side by side, then the time of a run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1600)
    parser.add_argument("--draws", type=int, default=500)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, likelihood, num_outputs in (
        ("regression", GaussianLikelihood(0.3), 1),
        ("five classes", CategoricalLikelihood(), 5),
    ):
        model, x, y = make(likelihood, num_outputs, arguments.rows)
        timings = time_side_by_side(gradients(model, x, y))
        own = timings["ours"].milliseconds
        print(f"{name}: {num_outputs * model.layer.num_weights} weights x {len(x)} rows")
        for route, timing in timings.items():
            cost = timing.milliseconds
            print(f"  gradient, {route}: {cost:.2f} ms, {cost / own:.1f} times ours")
        start, cpu = time.perf_counter(), time.process_time()
        run = run_nuts(model, x, y, arguments.draws, arguments.draws, progress=False)
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        print(f"  {arguments.draws} + {arguments.draws} draws: {wall:.1f} s ({cpu:.1f} s of CPU)")
        print("  " + run.report().replace("\n", "\n  "))


if __name__ == "__main__":
    main()
