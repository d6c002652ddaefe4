"""What the local route needs to know of a grid and a kernel, computed once for each precision."""

from typing import NamedTuple

import torch

from pyro_dak.additive import bridge as local
from pyro_dak.additive.grid import DyadicGrid
from pyro_dak.fast.linear_maps import LinearMap
from pyro_dak.fast.moments import IntervalConstants, interval_constants
from pyro_dak.fast.serving import ServingConstants, serving_constants

__all__ = ["LocalConstants", "local_constants"]

# Up to this many nodes maps are kept dense; above, in compressed rows with few non-zeros each.
_MAX_DENSE_NODES = 127


class LocalConstants(NamedTuple):
    """Constants of the local route in one dtype on one device; no maps on the meta device."""

    levels: list[local.LevelConstants]
    features: local.FeatureConstants
    intervals: IntervalConstants
    serving: ServingConstants
    node_map: LinearMap | None = None  # L_U with sorted rows, (M, M)
    table_map: LinearMap | None = None  # see `local.table_map`, (5 M + 5, 2 M)
    node_table_map: LinearMap | None = None  # see `local.node_table_map`, (3 M + 6, 2 M)


def local_constants(
    grid: DyadicGrid, delta: float, dtype: torch.dtype, device: torch.device
) -> LocalConstants:
    """The constants of a grid, in float64 and then cast; `delta` is spacing over lengthscale."""
    M, low, spacing = grid.num_inducing, grid.bounds[0], grid.spacing
    intervals = interval_constants(M, low, spacing, delta, dtype, device)
    constants = LocalConstants(
        local.level_constants(grid.level, delta, dtype, device),
        local.feature_constants(grid.level, delta, dtype, device),
        intervals,
        serving_constants(intervals),
    )
    if device.type == "meta":
        return constants
    is_dense = M <= _MAX_DENSE_NODES
    nodes, _ = local.node_maps(grid.level, delta)
    table = local.table_map(grid.level, delta)
    node_map, table_map, node_table_map = (
        LinearMap(matrix.to(device, dtype), is_dense)
        for matrix in (nodes, table, local.node_table_map(table, delta))
    )
    return constants._replace(node_map=node_map, table_map=table_map, node_table_map=node_table_map)
