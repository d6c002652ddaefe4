"""Moments of f, dense against local: time and memory, forward and forward + backward.

    python -m benchmarks.activation [--quick]

One thread, float32, B = 512 rows, P = 16 units. The node pass, the only part of the local route
that grows with M, is reported on its own.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.timing import saved_megabytes, time_side_by_side
from pyro_dak.additive.activation import KernelActivation, dense_is_faster
from pyro_dak.additive.grid import DyadicGrid
from pyro_dak.fast.fused import interpolated_moments

B, P = 512, 16
MAX_DENSE_PRODUCT = 10**10
LEVELS = (3, 6, 8, 10, 12)
HEADER = (
    "   C |     M |  dense forward |  local forward |     dense step |     local step |"
    "      node pass | dense MB | local MB | auto"
)


def _case(level: int, num_outputs: int) -> tuple[KernelActivation, list[Tensor]]:
    generator = torch.Generator().manual_seed(level)
    activation = KernelActivation(DyadicGrid(level))
    shape = (num_outputs, P, activation.num_inducing)
    h = torch.rand(B, P, generator=generator)
    loc = torch.randn(shape, generator=generator)
    var = torch.rand(shape, generator=generator)
    return activation, [tensor.requires_grad_() for tensor in (h, loc, var)]


def _backward(fn: Callable[[], tuple[Tensor, ...]], leaves: list[Tensor]) -> None:
    torch.autograd.grad(sum(part.sum() for part in fn()), leaves, allow_unused=True)


def _measure(level: int, num_outputs: int) -> str:
    activation, leaves = _case(level, num_outputs)
    h, loc, var = leaves
    M = activation.num_inducing
    nodes = partial(activation.interval_table, loc, var)
    routes = {"local": partial(activation.combine_moments, h, loc, var, route="local")}
    if B * P * M * num_outputs <= MAX_DENSE_PRODUCT:
        routes["dense"] = partial(activation.combine_moments, h, loc, var, route="dense")
    candidates = {f"{name} forward": fn for name, fn in routes.items()}
    candidates |= {f"{name} step": partial(_backward, fn, leaves) for name, fn in routes.items()}
    candidates |= {"nodes step": partial(_backward, nodes, [loc, var])}
    timings = time_side_by_side(candidates)
    cells = [f"{num_outputs:4d}", f"{M:5d}"]
    for name in ("dense forward", "local forward", "dense step", "local step", "nodes step"):
        timing = timings.get(name)
        cells.append(f"{timing.milliseconds:7.2f} ±{timing.spread:5.2f}" if timing else " " * 14)
    for name in ("dense", "local"):
        cells.append(f"{saved_megabytes(routes[name]):8.1f}" if name in routes else " " * 8)
    cells.append("dense" if dense_is_faster(M, num_outputs) else "local")
    return " | ".join(cells)


def _growth_with_nodes() -> str:
    """Time of the interpolation from given nodes, all M in turn, over that of M = 7."""
    candidates = {}
    for level in LEVELS:
        activation, (h, loc, var) = _case(level, 1)
        table = activation.interval_table(loc.detach(), var.detach()).requires_grad_()
        intervals = activation.local_constants(h).intervals
        fn = partial(interpolated_moments, h.mT.unsqueeze(0), table, None, intervals)
        candidates[str(2**level - 1)] = partial(_backward, fn, [h, table])
    timings = time_side_by_side(candidates, repetitions=15)
    base = timings["7"].milliseconds
    return ", ".join(f"M={M}: {t.milliseconds / base:.2f}" for M, t in timings.items())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three cases only")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    print(f"B = {B}, P = {P}, float32, one thread; milliseconds (median ± half range), megabytes")
    print(HEADER)
    for num_outputs in (1, 10, 100):
        for level in LEVELS:
            if not quick or (num_outputs, level) in [(1, 3), (1, 10), (10, 6)]:
                print(_measure(level, num_outputs), flush=True)
    print(f"interpolation step without the node pass, C = 1, over M = 7: {_growth_with_nodes()}")


if __name__ == "__main__":
    main()
