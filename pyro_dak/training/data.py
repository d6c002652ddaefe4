"""Batches for training: resident tensors by index, or whatever a loader yields."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from pyro_dak.model.dak import DAK
from pyro_dak.validation import check_finite, check_floating, check_integer

Batch = tuple[Tensor, Tensor, float]

__all__ = ["LoaderData", "ResidentData", "check_data", "is_pair", "training_data"]


def is_pair(data: Any) -> bool:
    """Whether data are (x, y) themselves, and not batches of them."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        return False
    return not any(isinstance(part, tuple | list) and len(part) == 2 for part in data)


def check_data(model: DAK, x: object, y: object, name: str = "data") -> tuple[Tensor, Tensor]:
    """x and y as tensors that fit the model, or an error that says what does not fit."""
    check_floating(f"{name} x", x)
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        raise TypeError(f"`{name} y` must be a torch.Tensor; got {type(y).__name__}.")
    if x.dim() < 2:
        raise ValueError(f"`{name} x` must have shape (N, ...); got {tuple(x.shape)}.")
    if len(x) != len(y):
        raise ValueError(f"`{name}` must have one y per x; got {len(x)} and {len(y)} rows.")
    if len(x) == 0:
        raise ValueError(f"`{name}` has no rows.")
    dtype = model.layer.log_unit_scale.dtype
    if x.dtype != dtype:
        raise TypeError(
            f"`{name} x` must have the dtype of the model, {dtype}; got {x.dtype}. Convert it."
        )
    check_finite(f"{name} x", x)
    y = model.likelihood.check_targets(y, model.num_outputs)
    if y.is_floating_point():
        y = y.to(dtype)
    model.likelihood.check_values(y, model.num_outputs)
    return x, y


class ResidentData:
    """Tensors on the device, cut into batches by index: every row once per epoch.

    The rows of an epoch are split into ceil(N / batch_size) batches of nearly equal size, so that
    there is no small last batch; of each batch a process takes every `world_size`-th row.
    """

    def __init__(self, x: Tensor, y: Tensor, batch_size: int, rank: int = 0, world_size: int = 1):
        check_integer("batch_size", batch_size, minimum=1)
        self.x, self.y = x, y
        self.num_data = len(x)
        self.batches_per_epoch = -(-len(x) // batch_size)
        if len(x) // self.batches_per_epoch < world_size:
            raise ValueError(
                f"`batch_size` must give each of the {world_size} processes a row; got batches of "
                f"{len(x) // self.batches_per_epoch} rows."
            )
        self.rank, self.world_size = rank, world_size

    def epoch(self, generator: torch.Generator, start: int) -> Iterator[Batch]:
        """Batches from number `start` on: x, y, and the weight of a row in the whole data set."""
        order = torch.randperm(self.num_data, generator=generator).to(self.x.device)
        for batch in order.tensor_split(self.batches_per_epoch)[start:]:
            scale = self.num_data * self.world_size / len(batch)
            own = batch[self.rank :: self.world_size] if self.world_size > 1 else batch
            yield self.x[own], self.y[own], scale


class LoaderData:
    """Batches of a `DataLoader` or any iterable of (x, y); shuffling is the loader's business.

    Args:
        loader: the iterable.
        num_data: rows in all; by default `len(loader.dataset)`.
        model: checks each batch.
        device: where batches go.
        rank: this process.
        world_size: number of processes. Each takes every `world_size`-th row of each batch.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        num_data: int | None,
        model: DAK,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
    ):
        if iter(loader) is loader:
            raise TypeError(
                "`data` must be iterable anew for each epoch; got an iterator, which is spent "
                "after one. Give a DataLoader, a list of batches, or tensors."
            )
        if num_data is None:
            try:
                num_data = len(loader.dataset)  # type: ignore[attr-defined]
            except (AttributeError, TypeError):
                raise ValueError(
                    "`num_data` must be given for a loader whose data set has no length."
                ) from None
        check_integer("num_data", num_data, minimum=1)
        self.loader, self.num_data, self.model, self.device = loader, num_data, model, device
        try:
            self.batches_per_epoch: int | None = len(loader)  # type: ignore[arg-type]
        except TypeError:
            self.batches_per_epoch = None
        self.rank, self.world_size = rank, world_size

    def epoch(self, generator: torch.Generator, start: int) -> Iterator[Batch]:
        """Batches from number `start` on.

        What the loader draws to shuffle comes from `generator`, in every process the same.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
            batches = iter(self.loader)
            batch = next(batches, None)  # a sampler draws its order here
        number = 0
        while batch is not None:
            if number >= start:
                x, y = check_data(self.model, batch[0], batch[1], "batch")
                if len(x) < self.world_size:
                    raise ValueError(
                        f"every batch needs a row for each of the {self.world_size} processes; got "
                        f"{len(x)}. Use drop_last=True or another batch size."
                    )
                scale = self.num_data * self.world_size / len(x)
                own = slice(self.rank, None, self.world_size)
                yield x[own].to(self.device), y[own].to(self.device), scale
            number += 1
            batch = next(batches, None)
        if number == 0:
            raise ValueError("`data` yields no batch.")


def training_data(
    model: DAK,
    data: Any,
    batch_size: int,
    num_data: int | None,
    device: torch.device,
    rank: int,
    world_size: int,
) -> ResidentData | LoaderData:
    """`ResidentData` for a pair of tensors, `LoaderData` for anything else that can be iterated."""
    if is_pair(data):
        if num_data is not None:
            raise ValueError("`num_data` is for iterables; tensors know their number of rows.")
        x, y = check_data(model, *data)
        return ResidentData(x.to(device), y.to(device), batch_size, rank, world_size)
    if not isinstance(data, Iterable):
        raise TypeError(
            f"`data` must be a pair (x, y) of tensors or an iterable of such pairs; "
            f"got {type(data).__name__}."
        )
    return LoaderData(data, num_data, model, device, rank, world_size)
