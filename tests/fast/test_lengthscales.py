"""The nodes of units with lengthscales of their own against their plain twins."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from pyro_dak.additive import bridge
from pyro_dak.fast import fused
from pyro_dak.fast.lengthscales import UnitMap, node_pattern

DELTAS = (1e-5, 0.02, 0.4, 1.0, 3.0, 50.0)
CPU = torch.device("cpu")


def unit_map(level, delta):
    return UnitMap(delta, node_pattern(level, delta.dtype, CPU))


@pytest.mark.parametrize("level", [1, 2, 3, 6, 10])
def test_entries_are_the_rows_of_the_factor(level):
    delta = torch.tensor(DELTAS)
    _, expected = bridge.node_features(level, delta)
    assert_close(unit_map(level, delta).factor(), expected, rtol=1e-11, atol=1e-300)


@pytest.mark.parametrize("level", [1, 2, 5])
def test_table_is_that_of_the_linear_map_of_each_unit(level):
    delta, both = torch.tensor(DELTAS), torch.randn(3, len(DELTAS), 2 * (2**level - 1))
    found = unit_map(level, delta).units_last(both)
    for p, own in enumerate(DELTAS):
        matrix = fused.interval_matrix(bridge.node_factor(level, own))
        expected = fused.LinearMap(matrix, is_dense=True)(both[:, p])
        assert_close(found[..., p], expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("num_functions", [1, 3])
@pytest.mark.parametrize("level", [1, 2, 5])
def test_gradients_are_those_that_autograd_finds(level, num_functions):
    delta = torch.tensor(DELTAS[1:], requires_grad=True)
    both = torch.randn(num_functions, len(delta), 2 * (2**level - 1), requires_grad=True)
    table = unit_map(level, delta).units_last(both)
    grad = torch.randn_like(table)
    expected = torch.autograd.grad(table, (both, delta), grad)
    found = unit_map(level, delta.detach()).backward(both.detach(), grad)
    assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("deltas", [(1e-6, 0.3, 1.0), (0.3, 1.01, 30.0, 1e5)])
def test_weights_of_two_nodes_are_those_of_the_bridge_for_each_unit(deltas, dtype):
    delta = torch.tensor(deltas, dtype=dtype)
    of_grid = fused.intervals_of_grid(7, -1.0, 0.25, 1.0, dtype, CPU)
    intervals = fused.unit_intervals(delta, of_grid, node_pattern(3, dtype, CPU).is_inside)
    assert bool(intervals.coefficients) is (max(deltas) <= 1)
    h = torch.cat([2 * torch.rand(40, len(delta)) - 1, 2 * torch.randn(20, len(delta))]).to(dtype)
    j, w = fused.two_nodes(h.mT.unsqueeze(0), None, intervals)
    x = ((h + 1) / 0.25).double()
    interval = bridge.locate(x, 7, delta.double())
    expected = torch.stack(bridge.bridge_weights(interval, delta.double()))
    is_inner = (interval.j > 0) & (interval.j < 7)  # outside, the other node's weight is not used
    assert torch.equal(j[0].mT.long(), interval.j)
    eps = torch.finfo(dtype).eps
    found = w[:, 0].mT if w.dim() == 3 else w[:, 0].transpose(-1, -2)
    tolerance = {"rtol": (8 + 4 * max(deltas)) * eps, "atol": 8 * eps}
    assert_close(found[:, is_inner].double(), expected[:, is_inner], **tolerance)


COMPILE = """
import torch
from pyro_dak import DyadicGrid, KernelActivation, LaplaceKernel

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
activation = KernelActivation(DyadicGrid(3), LaplaceKernel((0.3, 0.9), learn=True), route="local")
h, loc, var = torch.randn(20, 2), torch.randn(1, 2, 7), torch.rand(1, 2, 7)
activation.prepare(h)

def loss():
    mean, variance = activation.combine_moments(h, loc, var)
    return (mean.sin() + variance + activation.combine(h, loc)).sum()

values, slopes = [], []
for fn in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
    value = fn()
    values.append(value)
    slopes += torch.autograd.grad(value, activation.log_lengthscale)
torch.testing.assert_close(*values)
torch.testing.assert_close(*slopes)
print("same")
"""


def test_compiled_moments_have_the_same_gradient():
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", COMPILE]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "same", result.stderr
