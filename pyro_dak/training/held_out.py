"""Rows that are held out from training and scored: tensors, or the batches of a loader."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from pyro_dak.model.batches import Unpacking
from pyro_dak.model.dak import DAK
from pyro_dak.model.rows import Inputs, concatenate, num_rows, parts, take, to_device
from pyro_dak.training.data import (
    check_data,
    check_shared,
    fingerprint,
    generators_of,
    loader_fingerprint,
    rewound,
    share_generators,
    started,
)
from pyro_dak.training.parquet import ParquetRows

__all__ = ["HeldOut", "hold_out"]


class HeldOut:
    """Rows that are scored: tensors on the device, or a loader, which is read at each score.

    A loader gives the same rows in the same order each time, also if it shuffles.

    Args:
        model: the model, which the rows must fit.
        rows: a pair (x, y) of tensors that are checked and on the device, or a loader.
        fabric: says which device that is, and which rows are those of this process.
        unpacking: how batches of a loader are read.
        is_loader: whether the rows are a loader.
    """

    def __init__(self, model: DAK, rows: Any, fabric: Any, unpacking: Unpacking, is_loader: bool):
        self.model, self.rows, self.fabric, self.unpacking = model, rows, fabric, unpacking
        self.generators = generators_of(rows) if is_loader else []
        self.is_loader = is_loader
        if is_loader:
            check_shared("validation", rows, fabric.world_size)
            share_generators(self.generators, fabric)
            next(self._all())  # a look at the first batch, before training

    def batches(self) -> Iterator[tuple[Any, Tensor]]:
        """Checked rows (x, y) on the device, those of this process; some may have none."""
        own = slice(self.fabric.global_rank, None, self.fabric.world_size)
        for x, y in self._all():
            yield take(x, own), y[own]

    def _all(self) -> Iterator[tuple[Any, Tensor]]:
        if not self.is_loader:
            yield self.rows
            return
        with rewound(self.generators):
            for batch in started(self.rows, 0, "validation"):
                pair = self.unpacking.pair(batch, "validation")
                x, y = check_data(self.model, *pair, "validation")
                yield to_device(x, self.fabric.device), y.to(self.fabric.device)

    def sample(self, number: int) -> Inputs:
        """The inputs of all rows of tensors, or of about so many rows from all over a loader."""
        if not self.is_loader:
            return self.rows[0]
        stride = -(-sum(len(y) for _, y in self._all()) // number)
        chosen, seen = [], 0
        for x, _ in self._all():
            chosen.append(take(x, slice(-seen % stride, None, stride)))
            seen += num_rows(x)
        return concatenate(chosen)

    def fingerprint(self) -> dict[str, Any]:
        """What a resumed run must have in common, as far as it can be known."""
        if not self.is_loader:
            x, y = self.rows
            return fingerprint(**parts(x, "validation x"), **{"validation y": y})
        known = loader_fingerprint(self.rows, self.unpacking)
        return {f"{name} of validation": value for name, value in known.items()}


def hold_out(
    model: DAK, data: Any, validation: Any, seed: int, fabric: Any, unpacking: Unpacking
) -> tuple[Any, HeldOut | None]:
    """Training data, and held-out rows, or None without any.

    `validation` is a pair (x, y), a loader, a share of the rows of `data`, which `seed` chooses, or
    None.
    """
    if validation is None:
        return data, None
    pair: tuple[Any, Any] | None
    if isinstance(validation, int | float) and isinstance(data, ParquetRows):
        data, pair = _share_of_files(model, data, validation, seed)
    elif isinstance(validation, int | float):
        data, pair = _share(model, data, validation, seed, unpacking)
    else:
        pair = unpacking.of_tensors(validation)
    if pair is None:
        if not isinstance(validation, Iterable) or isinstance(validation, Iterator | str):
            raise TypeError(
                "`validation` must be a pair (x, y), a loader, or a share of the rows between 0 "
                f"and 1; got {type(validation).__name__}."
            )
        return data, HeldOut(model, validation, fabric, unpacking, True)
    x, y = check_data(model, pair[0], pair[1], "validation")
    if len(y) < fabric.world_size:
        raise ValueError(f"`validation` needs a row for each of {fabric.world_size} processes.")
    rows = (to_device(x, fabric.device), y.to(fabric.device))
    return data, HeldOut(model, rows, fabric, unpacking, False)


def _share_of_files(
    model: DAK, rows: ParquetRows, share: float, seed: int
) -> tuple[ParquetRows, tuple[Tensor, Tensor]]:
    """The rows of files that are trained on, and a share of them in memory, at most 100,000."""
    _check_share(share)
    rest, held_out = rows.split(rows.held_out_share(share), seed % 2**62)
    return rest, held_out.read_all(model.layer.log_unit_scale.dtype)


def _check_share(share: float) -> None:
    if not 0 < share < 1:
        raise ValueError(f"`validation` must be a share between 0 and 1; got {share}.")


def _share(
    model: DAK, data: Any, share: float, seed: int, unpacking: Unpacking
) -> tuple[tuple[Inputs, Tensor], tuple[Inputs, Tensor]]:
    """The rows of tensors (x, y) that are trained on, and a share of them that is held out."""
    _check_share(share)
    pair = unpacking.of_tensors(data)
    if pair is None:
        raise ValueError(
            "`validation` as a share needs tensors or ParquetRows; give a pair (x, y) or a loader "
            "instead."
        )
    x, y = check_data(model, *pair)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)).to(y.device)
    num_held_out = max(1, round(share * len(y)))
    if num_held_out >= len(y):
        raise ValueError(f"`validation`={share} of {len(y)} rows leaves none to train on.")
    held_out, kept = order[:num_held_out], order[num_held_out:]
    return (take(x, kept), y[kept]), (take(x, held_out), y[held_out])
