"""Batches for training: tensors on the device cut by index, or whatever a loader yields."""

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from pyro_dak.model.dak import DAK
from pyro_dak.model.modes import evaluating
from pyro_dak.training.plan import Plan
from pyro_dak.validation import check_finite, check_floating, check_integer

__all__ = ["Data", "LoaderData", "ResidentData", "hold_out", "is_pair", "training_data"]

# Inputs, targets, and how many rows of the data set each row stands for: a number for all rows, or
# a tensor `(N,)` or `(E, N)`.
Batch = tuple[Tensor, Tensor, float | Tensor]


def is_pair(data: Any) -> bool:
    """Whether data are (x, y) themselves, and not batches of them."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        return False
    return not any(isinstance(part, tuple | list) and len(part) == 2 for part in data)


def _check_data(model: DAK, x: object, y: object, name: str = "data") -> tuple[Tensor, Tensor]:
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
    """Tensors on the device, cut into batches by index: every row comes once per epoch.

    The rows of an epoch are split into ceil(N / batch_size) batches of nearly equal size, so that
    there is no small last batch. Each process takes every `world_size`-th row of each batch. A row
    counts as often as its weight says, `(N,)`, or `(E, N)` for E members; by default once.

    Attributes:
        num_rows: N.
        num_data: what the rows count in all, which the loss divides by: N, or the sum of weights.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        weights: Tensor | None = None,
    ):
        check_integer("batch_size", batch_size, minimum=1)
        self.x, self.y, self.weights = x, y, weights
        self.num_rows = len(x)
        self.num_data: int | Tensor = len(x) if weights is None else weights.sum(-1)
        self.batches_per_epoch = -(-len(x) // batch_size)
        if len(x) // self.batches_per_epoch < world_size:
            raise ValueError(
                f"`batch_size` must give each of the {world_size} processes a row; got batches of "
                f"{len(x) // self.batches_per_epoch} rows."
            )
        self.rank, self.world_size = rank, world_size

    def epoch(self, generator: torch.Generator, start: int) -> Iterator[Batch]:
        """The batches of an epoch from number `start` on, in an order that `generator` draws."""
        order = torch.randperm(self.num_rows, generator=generator).to(self.x.device)
        for batch in order.tensor_split(self.batches_per_epoch)[start:]:
            scale: float | Tensor = self.num_rows * self.world_size / len(batch)
            own = batch[self.rank :: self.world_size] if self.world_size > 1 else batch
            if self.weights is not None:
                scale = self.weights[..., own] * scale
            yield self.x[own], self.y[own], scale


class LoaderData:
    """The batches of a `DataLoader` or any iterable of (x, y), which does its own shuffling.

    There are `num_data` rows in all, by default `len(loader.dataset)`. Each batch is checked, and
    goes to the device. Each process takes every `world_size`-th row of it.
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
        self.loader, self.model, self.device = loader, model, device
        self.num_rows = self.num_data = num_data
        try:
            self.batches_per_epoch: int | None = len(loader)  # type: ignore[arg-type]
        except TypeError:
            self.batches_per_epoch = None
        self.rank, self.world_size = rank, world_size

    def epoch(self, generator: torch.Generator, start: int) -> Iterator[Batch]:
        """The batches of an epoch from number `start` on.

        What the loader draws to shuffle comes from `generator` and is the same in every process.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
            batches = iter(self.loader)
            first = next(batches, None)  # a sampler draws its order here
        if first is None:
            raise ValueError("`data` yields no batch.")
        own = slice(self.rank, None, self.world_size)
        for batch in islice(chain([first], batches), start, None):
            x, y = _check_data(self.model, batch[0], batch[1], "batch")
            if len(x) < self.world_size:
                raise ValueError(
                    f"every batch needs a row for each of the {self.world_size} processes; got "
                    f"{len(x)}. Use drop_last=True or another batch size."
                )
            scale = self.num_rows * self.world_size / len(x)
            yield x[own].to(self.device), y[own].to(self.device), scale


Data = ResidentData | LoaderData


def training_data(model: DAK, data: Any, plan: Plan, num_data: int | None, fabric: Any) -> Data:
    """`ResidentData` for tensors and for fixed features, `LoaderData` for any other iterable."""
    device, share = fabric.device, (fabric.global_rank, fabric.world_size)
    if plan.fixed_features:
        return ResidentData(*_features(model, data, device), plan.batch_size, *share)
    if is_pair(data):
        if num_data is not None:
            raise ValueError("`num_data` is for iterables; tensors know their number of rows.")
        x, y = _check_data(model, *data)
        return ResidentData(x.to(device), y.to(device), plan.batch_size, *share)
    if not isinstance(data, Iterable):
        raise TypeError(
            f"`data` must be a pair (x, y) of tensors or an iterable of such pairs; "
            f"got {type(data).__name__}."
        )
    return LoaderData(data, num_data, model, device, *share)


def _features(model: DAK, data: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """The features and targets of all rows; the network runs in eval mode, once per row."""
    features, targets = [], []
    name, batches = ("data", [data]) if is_pair(data) else ("batch", data)
    with evaluating(model.feature_extractor):
        for batch in batches:
            x, y = _check_data(model, batch[0], batch[1], name)
            features += [model.feature_extractor(part.to(device)) for part in x.split(1024)]
            targets.append(y.to(device))
    return torch.cat(features), torch.cat(targets)


def hold_out(
    model: DAK, data: Any, validation: Any, seed: int, fabric: Any
) -> tuple[Any, tuple[Tensor, Tensor] | None]:
    """Training data, and held-out rows that are checked and on the device, or None without any.

    `validation` is a pair (x, y), a share of the rows of `data`, which `seed` chooses, or None.
    """
    if validation is None:
        return data, None
    if isinstance(validation, int | float):
        if not 0 < validation < 1:
            raise ValueError(f"`validation` must be a share between 0 and 1; got {validation}.")
        if not is_pair(data):
            raise ValueError("`validation` as a share needs tensors; give a pair (x, y) instead.")
        x, y = _check_data(model, *data)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device)
        num_held_out = max(1, round(validation * len(x)))
        if num_held_out >= len(x):
            raise ValueError(f"`validation`={validation} of {len(x)} rows leaves none to train on.")
        held_out, kept = order[:num_held_out], order[num_held_out:]
        data, validation = (x[kept], y[kept]), (x[held_out], y[held_out])
    if not is_pair(validation):
        raise TypeError(
            "`validation` must be a pair (x, y) or a share of the rows between 0 and 1; "
            f"got {type(validation).__name__}."
        )
    x, y = _check_data(model, validation[0], validation[1], "validation")
    if len(x) < fabric.world_size:
        raise ValueError(f"`validation` needs a row for each of {fabric.world_size} processes.")
    return data, (x.to(fabric.device), y.to(fabric.device))
