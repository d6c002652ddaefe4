import pytest
import torch
from torch.testing import assert_close

from pyro_dak.additive.grid import DyadicGrid
from tests import reference

LEVELS = [1, 2, 3, 6, 10]


@pytest.mark.parametrize("level", LEVELS)
def test_points_are_the_dyadic_fractions_in_level_order(level):
    grid = DyadicGrid(level, (-1.0, 3.0))
    assert_close(grid.inducing_points, reference.dyadic_points(level, (-1.0, 3.0)))
    assert len(grid.inducing_points) == grid.num_inducing == 2**level - 1


@pytest.mark.parametrize("level", LEVELS)
def test_sorted_points_are_equally_spaced_and_inside_the_bounds(level):
    grid = DyadicGrid(level, (-0.5, 2.0))
    steps = torch.cat([torch.tensor([-0.5]), grid.sorted_points, torch.tensor([2.0])]).diff()
    assert_close(steps, torch.full_like(steps, grid.spacing))


@pytest.mark.parametrize("level", LEVELS)
def test_position_is_the_rank_of_each_point_among_the_sorted(level):
    grid = DyadicGrid(level)
    assert torch.equal(grid.sort_order[grid.position - 1], torch.arange(grid.num_inducing))
    assert torch.equal(grid.sorted_points[grid.position - 1], grid.inducing_points)


@pytest.mark.parametrize("level", LEVELS)
def test_point_level_counts_points_per_level(level):
    counts = torch.bincount(DyadicGrid(level).point_level)
    assert counts.tolist() == [0, *(2**i for i in range(level))]


@pytest.mark.parametrize("level", [1, 2, 3, 6])
def test_neighbours_are_the_nearest_coarser_points(level):
    grid = DyadicGrid(level, (-2.0, 1.0))
    U = grid.inducing_points.tolist()
    for m, (left, right) in enumerate(zip(*grid.neighbours, strict=True)):
        coarser = [i for i in range(m) if grid.point_level[i] < grid.point_level[m]]
        below = [i for i in coarser if U[i] < U[m]]
        above = [i for i in coarser if U[i] > U[m]]
        assert left == max(below, key=U.__getitem__, default=-1)
        assert right == min(above, key=U.__getitem__, default=-1)


def test_constants_are_float64_whatever_the_default_dtype():
    torch.set_default_dtype(torch.float32)
    assert DyadicGrid(3).inducing_points.dtype == torch.float64


def test_grids_compare_by_value():
    assert DyadicGrid(3, (0, 1)) == DyadicGrid(3) != DyadicGrid(4)


@pytest.mark.usefixtures("no_type_checker")
@pytest.mark.parametrize(
    ("level", "bounds", "error", "message"),
    [
        (0, (0.0, 1.0), ValueError, r"`level` must be between 1 and 20; got 0"),
        (-2, (0.0, 1.0), ValueError, r"`level` must be between 1 and 20; got -2"),
        (21, (0.0, 1.0), ValueError, r"`level` must be between 1 and 20; got 21"),
        (True, (0.0, 1.0), TypeError, r"`level` must be an integer; got True \(bool\)"),
        (3.0, (0.0, 1.0), TypeError, r"`level` must be an integer; got 3.0 \(float\)"),
        (3, (1.0, 0.0), ValueError, r"`bounds` must be finite with low < high; got \(1.0, 0.0\)"),
        (3, (1.0, 1.0), ValueError, r"`bounds` must be finite with low < high"),
        (3, (float("nan"), 1.0), ValueError, r"`bounds` must be finite with low < high; got \(nan"),
        (3, (0.0, float("inf")), ValueError, r"`bounds` must be finite with low < high"),
    ],
)
def test_wrong_arguments_are_named(level, bounds, error, message):
    with pytest.raises(error, match=message):
        DyadicGrid(level, bounds)
