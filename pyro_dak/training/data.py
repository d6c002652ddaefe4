"""Batches for training: tensors on the device cut by index, Parquet files, or what a loader yields.

**How much a row counts.** The bound of N rows is L = sum_n l_n - KL. An epoch shows R rows in T
batches of B_1, ..., B_T rows, B = R / T on average; R = N, unless a loader says otherwise. Batch t
estimates the bound by L_t = (N / B_t) sum_{n in t} l_n - KL, and the loss of its step is

    -(B_t / B) L_t / N.

Over an epoch at fixed weights, (1 / T) sum_t (B_t / B) L_t = (N / R) sum_n l_n - KL. Each row
counts the same whatever the size of its batch, and once if R = N. The KL counts once in all; a
short batch, such as the last one of a loader, brings only its share of it. So the mean gradient of
the steps is that of the bound. With W processes, whose gradients are averaged, each takes its own
rows of a batch, and they count W times as much. A row with a weight counts as often as that says.
"""

import copy
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from pyro_dak.model.batches import Unpacking
from pyro_dak.model.dak import DAK
from pyro_dak.model.explaining import explaining
from pyro_dak.model.inputs import check_inputs
from pyro_dak.model.latent_sites import known_sites
from pyro_dak.model.missing import check_observed_values, is_observed
from pyro_dak.model.modes import evaluating
from pyro_dak.model.rows import Inputs, check_parts, num_rows, parts, split, take, to_device
from pyro_dak.training.parquet import ParquetRows
from pyro_dak.training.plan import Plan
from pyro_dak.validation import check_integer

if TYPE_CHECKING:
    from pyro_dak.training.held_out import HeldOut

__all__ = [
    "Data",
    "Epochs",
    "LoaderData",
    "ParquetData",
    "ResidentData",
    "check_data",
    "check_shared",
    "data_differences",
    "fingerprint",
    "generators_of",
    "loader_fingerprint",
    "rewound",
    "share_generators",
    "started",
    "training_data",
]

# Inputs, targets, and how many rows of the data set each row stands for in an average batch, N / B:
# a number for all rows, or a tensor `(n,)` or `(E, n)`.
Batch = tuple[Inputs, Tensor, float | Tensor]

_AS_PAIRS = Unpacking()
_MAX_SAMPLED_ROWS, _MAX_SAMPLED_NUMBERS = 256, 2**20


def check_data(model: DAK, x: Any, y: object, name: str = "data") -> tuple[Inputs, Tensor]:
    """x and y as tensors that fit the model, or an error that says what does not fit."""
    check_parts(f"{name} x", x)
    if not isinstance(y, Tensor) or y.dim() == 0:
        got = "a single number" if isinstance(y, Tensor) else type(y).__name__
        raise TypeError(f"`{name} y` must be a torch.Tensor with an entry per row; got {got}.")
    if num_rows(x) != len(y):
        raise ValueError(f"`{name}` must have one y per x; got {num_rows(x)} and {len(y)} rows.")
    if len(y) == 0:
        raise ValueError(f"`{name}` has no rows.")
    check_inputs(model, x, f"{name} x")
    y = model.likelihood.check_targets(y, model.num_outputs)
    if y.is_floating_point():
        y = y.to(model.layer.log_unit_scale.dtype)
    check_observed_values(model.likelihood, y, model.num_outputs)
    return x, y


def fingerprint(**tensors: Tensor) -> dict[str, Any]:
    """What tells tensors from others: shape, dtype and five numbers of each, as plain data.

    The numbers are the logarithm of the norm of a sample of rows, and four sums of its entries with
    signs and weights that differ by row and column, divided by the norm. So they move little if
    entries are rounded, visibly if rows are others or in another order, and tell nothing about a
    single row.
    """
    entries: dict[str, Any] = {}
    for name, tensor in tensors.items():
        N, D = len(tensor), math.prod(tensor.shape[1:])
        num_sampled = max(1, min(N, _MAX_SAMPLED_ROWS, _MAX_SAMPLED_NUMBERS // max(D, 1)))
        index = torch.linspace(0, N - 1, num_sampled, dtype=torch.float64).round().long()
        rows = tensor[index.to(tensor.device)].detach().reshape(num_sampled, D).double().cpu()
        rows = rows.nan_to_num(0.0)  # missing targets
        frequency = torch.arange(1, 5, dtype=torch.float64).unsqueeze(-1)
        u, v = (frequency * torch.arange(size) for size in (num_sampled, D))  # (4, n), (4, D)
        size = float(rows.abs().max()) if rows.numel() else 0.0
        norm = float((rows / size).norm()) if size else 1.0
        sums = ((u.cos() @ rows) * (v * math.sqrt(2)).cos()).sum(-1) / ((size or 1.0) * norm)
        entries[f"shape of {name}"] = list(tensor.shape)
        entries[f"dtype of {name}"] = str(tensor.dtype)
        entries[f"values of {name}"] = [math.log(norm) + math.log(size or 1.0), *sums.tolist()]
    return entries


def _row_of_largest(values: Tensor) -> int:
    rows = values.reshape(len(values), -1)
    rows = rows.nan_to_num(0.0) if values.is_floating_point() else rows  # missing targets
    return int(torch.maximum(rows.amax(1).double(), -rows.amin(1).double()).argmax())


def data_differences(then: Any, now: dict[str, Any]) -> Iterator[str]:
    """The entries of two fingerprints that both know and that differ by more than rounding.

    `now` is ours, and `then` comes from a file.
    """
    then = then if isinstance(then, dict) else {}
    for name in [name for name in now if then.get(name) is not None and now[name] is not None]:
        if name.startswith("values of "):
            if not _are_close(then[name], now[name]):
                yield f"other {name}"
        elif then[name] != now[name]:
            yield f"{name}: {then[name]} then, {now[name]} now"


def _are_close(first: Any, second: list[float]) -> bool:
    if not isinstance(first, list) or len(first) != len(second):
        return False
    numbers = [value if isinstance(value, float) else math.nan for value in first]
    return all(abs(a - b) <= 1e-3 for a, b in zip(numbers, second, strict=True))


class ResidentData:
    """Tensors on the device, cut into batches by index: every row comes once per epoch.

    The rows of an epoch are split into ceil(N / batch_size) batches of nearly equal size, so that
    there is no small last batch. Each process takes every `world_size`-th row of each batch. A row
    counts as often as its weight says, `(N,)`, or `(E, N)` for E members; by default once.

    Attributes:
        num_rows: N.
        num_data: what the rows count in all, which the loss divides by: N, or the sum of weights.
        batches_per_epoch: T.
        epoch_weight: the sum of B_t / B over an epoch, T.
        held_out: rows that are scored, if there are any.
    """

    held_out: "HeldOut | None" = None

    generators: Sequence[torch.Generator] = ()

    def __init__(
        self,
        x: Inputs,
        y: Tensor,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        weights: Tensor | None = None,
    ):
        check_integer("batch_size", batch_size, minimum=1)
        N = num_rows(x)
        self.x, self.y, self.weights = x, y, weights
        self.num_rows = N
        self.num_data: int | Tensor = N if weights is None else weights.sum(-1)
        self.batches_per_epoch = self.epoch_weight = -(-N // batch_size)
        if N // self.batches_per_epoch < world_size:
            raise ValueError(
                f"`batch_size` must give each of the {world_size} processes a row; got batches of "
                f"{N // self.batches_per_epoch} rows."
            )
        self.rank, self.world_size = rank, world_size

    def sample(self) -> tuple[Any, Tensor]:
        """Some rows from all over the data, and those with the largest numbers."""
        index = torch.linspace(0, self.num_rows - 1, min(self.num_rows, _MAX_SAMPLED_ROWS)).long()
        tensors = [*parts(self.x).values(), self.y]
        rows = {int(i) for i in index} | {_row_of_largest(part) for part in tensors}
        chosen = torch.tensor(sorted(rows), device=self.y.device)
        return take(self.x, chosen), self.y[chosen]

    def fingerprint(self) -> dict[str, Any]:
        """What a resumed run must have in common; see `fingerprint`."""
        own = fingerprint(**parts(self.x), y=self.y)
        return own if self.held_out is None else own | self.held_out.fingerprint()

    def epoch(self, generator: torch.Generator, start: int) -> Iterator[Batch]:
        """The batches of an epoch from number `start` on, in an order that `generator` draws."""
        order = torch.randperm(self.num_rows, generator=generator).to(self.y.device)
        scale: float | Tensor = float(self.batches_per_epoch * self.world_size)
        for batch in order.tensor_split(self.batches_per_epoch)[start:]:
            own = batch[self.rank :: self.world_size] if self.world_size > 1 else batch
            rows = scale if self.weights is None else self.weights[..., own] * scale
            yield take(self.x, own), self.y[own], rows


class ParquetData:
    """The batches of Parquet files, which are read block by block (see `ParquetRows`).

    Each process reads other parts of an epoch, and the batches of all have about `batch_size` rows
    together. The remainder is spread: batches differ by at most one row in each part.

    Attributes:
        num_rows: N.
        num_data: N.
        batches_per_epoch: T = ceil(N / batch_size), in every process.
        epoch_weight: the sum of B_t / B over an epoch, T.
        held_out: rows that are scored, if there are any.
    """

    held_out: "HeldOut | None" = None

    generators: Sequence[torch.Generator] = ()

    def __init__(
        self,
        rows: ParquetRows,
        model: DAK,
        batch_size: int,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
    ):
        check_integer("batch_size", batch_size, minimum=1)
        self.rows, self.model, self.device = rows, model, device
        self.num_rows = self.num_data = N = rows.num_rows
        self.batches_per_epoch = self.epoch_weight = -(-N // batch_size)
        self.num_parts = world_size if rows.shards is None else rows.shards
        if self.num_parts % world_size:
            raise ValueError(
                f"`shards` must be a multiple of the number of processes, {world_size}; got "
                f"{self.num_parts}."
            )
        if N // self.num_parts < self.batches_per_epoch:
            raise ValueError(
                f"`batch_size` must give each of the {self.num_parts} parts of an epoch a row; got "
                f"batches of {N // self.batches_per_epoch} rows."
            )
        self.rank, self.world_size = rank, world_size
        self._dtype = model.layer.log_unit_scale.dtype

    def sample(self) -> tuple[Tensor, Tensor]:
        """Some rows from all over the files, on the device."""
        x, y = self.rows.sample(self._dtype)
        return x[:_MAX_SAMPLED_ROWS].to(self.device), y[:_MAX_SAMPLED_ROWS].to(self.device)

    def fingerprint(self) -> dict[str, Any]:
        """What a resumed run must have in common: the files, and what decides on the order."""
        x, y = self.rows.sample(self._dtype)
        settings = {"row groups": len(self.rows.groups), "columns": self.rows.columns}
        order = {"shards": self.num_parts, "buffer_bytes": self.rows.buffer_bytes}
        own = settings | order | fingerprint(x=x, y=y)
        return own if self.held_out is None else own | self.held_out.fingerprint()

    def epoch(self, generator: torch.Generator, start: int) -> Iterator[Batch]:
        """The batches of an epoch from number `start` on, in an order that `generator` draws."""
        seed = int(torch.randint(2**62, (), generator=generator))
        V, T = self.num_parts, self.batches_per_epoch
        parts = [
            self.rows.part(seed, number, V, T, start, self._dtype)
            for number in range(self.rank, V, self.world_size)
        ]
        scale = float(T * self.world_size)
        for pairs in zip(*parts, strict=True):
            xs, ys = zip(*pairs, strict=True)
            x, y = check_data(self.model, torch.cat(xs), torch.cat(ys), "batch")
            yield to_device(x, self.device), y.to(self.device), scale

    def inputs(self, seed: int) -> Iterator[Inputs]:
        """Inputs from all over the files, in a random order that is always the same."""
        yield from self.rows.sample(self._dtype)[0].to(self.device).split(1024)


class LoaderData:
    """The batches of a `DataLoader` or any iterable of (x, y), which does its own shuffling.

    Each batch is checked, and goes to the device. Each process takes every `world_size`-th row of
    it. N is `num_data`, or what `_count_rows` finds out. An epoch that has other rows or batches
    than expected is told: by an error if N comes from its rows, else by one warning.

    Attributes:
        num_rows: N.
        num_data: N.
        rows_per_epoch: R, or None if that is not known before the end of an epoch.
        batches_per_epoch: T, or None likewise.
        average_size: B; if R or T is not known, the size of the first batch, which serves as well,
            since it is one factor of all steps.
        generators: the loader's own, which checkpoints keep.
        held_out: rows that are scored, if there are any.
    """

    held_out: "HeldOut | None" = None

    def __init__(
        self,
        loader: Iterable[Any],
        num_data: int | None,
        model: DAK,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
        unpacking: Unpacking = _AS_PAIRS,
    ):
        if isinstance(loader, Iterator):
            raise TypeError(
                "`data` must be iterable anew for each epoch; got an iterator, which is spent "
                "after one. Give a DataLoader, a list of batches, or tensors."
            )
        check_shared("data", loader, world_size)
        self.generators = generators_of(loader)
        self.rows_per_epoch: int | None = None
        self.has_own_count = num_data is None  # N comes from what the loader yields
        if num_data is None:
            num_data, self.rows_per_epoch = _count_rows(loader, self.generators, unpacking)
        check_integer("num_data", num_data, minimum=1)
        self.loader, self.model, self.device = loader, model, device
        self.unpacking = unpacking
        self.num_rows = self.num_data = num_data
        try:
            self.batches_per_epoch: int | None = len(loader)  # type: ignore[arg-type]
        except TypeError:
            self.batches_per_epoch = None
        self.average_size: float | None = None
        if self.rows_per_epoch and self.batches_per_epoch:
            self.average_size = self.rows_per_epoch / self.batches_per_epoch
        self.rank, self.world_size = rank, world_size
        self.rows_seen = 0
        self.has_warned = False
        self.row: dict[str, Any] = {}  # shapes and dtypes

    @property
    def epoch_weight(self) -> float:
        """The sum of B_t / B over the batches that this epoch has had so far."""
        assert self.average_size is not None
        return self.rows_seen / self.average_size

    def fingerprint(self) -> dict[str, Any]:
        """What a resumed run must have in common, as far as a loader lets it be known.

        The rows are sampled in a list of batches and in a `TensorDataset`; those of other data sets
        may come out otherwise each time, so that only their number, shapes and dtypes are known.
        """
        in_memory = loader_fingerprint(self.loader, self.unpacking)
        if self.held_out is not None:
            in_memory |= self.held_out.fingerprint()
        return {"rows per epoch": self.rows_per_epoch} | self.row | in_memory

    def first(self) -> tuple[Inputs, Tensor]:
        """A first batch; what is not known of an epoch is estimated from it."""
        with rewound(self.generators):
            batch = next(iter(self.loader), None)
        if batch is None:
            raise ValueError("`data` yields no batch.")
        x, y = check_data(self.model, *self.unpacking.pair(batch), "batch")
        self.average_size = self.average_size or len(y)
        self.batches_per_epoch = self.batches_per_epoch or -(-self.num_rows // len(y))
        for name, part in (parts(x) | {"y": y}).items():
            self.row[f"a row of {name}"] = f"{part.dtype} {tuple(part.shape[1:])}"
        return x, y

    def epoch(self, generator: torch.Generator, start: int) -> Iterator[Batch]:
        """The batches of an epoch from number `start` on.

        What the loader draws to shuffle comes from `generator` and is the same in every process.
        """
        seed = int(torch.randint(2**31, (), generator=generator))
        pairs = map(self.unpacking.pair, started(self.loader, seed))
        first = next(pairs)
        self.average_size = self.average_size or len(first[1])
        scale = self.num_rows * self.world_size / self.average_size
        own = slice(self.rank, None, self.world_size)
        self.rows_seen = number = 0
        for number, pair in enumerate(chain([first], pairs), start=1):
            self.rows_seen += len(pair[1])
            if number <= start:
                continue
            x, y = check_data(self.model, *pair, "batch")
            if len(y) < self.world_size:
                raise ValueError(
                    f"every batch needs a row for each of the {self.world_size} processes; got "
                    f"{len(y)}. Use drop_last=True or another batch size."
                )
            yield to_device(take(x, own), self.device), y[own].to(self.device), scale
        self._check_epoch(number)

    def inputs(self, seed: int) -> Iterator[Inputs]:
        """The inputs of one more epoch, batch by batch, all rows in every process.

        What is drawn comes from the seed, and leaves the generators as they were.
        """
        own = copy.copy(self)
        own.rank, own.world_size = 0, 1
        with rewound(self.generators):
            for x, _, _ in own.epoch(torch.Generator().manual_seed(seed), 0):
                yield x

    def _check_epoch(self, num_batches: int) -> None:
        """Tell if this epoch had other rows or batches than expected, or than the first one."""
        seen, num_rows = (self.rows_seen, num_batches), self.rows_per_epoch or self.rows_seen
        expected = (num_rows, self.batches_per_epoch or num_batches)
        self.rows_per_epoch = num_rows
        if seen == expected:
            return
        what = (
            f"an epoch of `data` had {seen[0]} rows in {seen[1]} batches, where {expected[0]} rows "
            f"in {expected[1]} batches were expected"
        )
        if self.has_own_count and seen[0] != num_rows:
            raise ValueError(
                f"{what}, so that nobody knows how many rows the bound counts. Give `num_data`, "
                "the number of rows in all, or look at the sampler and the workers of the loader."
            )
        if not self.has_warned:
            self.has_warned = True
            warnings.warn(
                f"{what}. Each row counts num_data / {seen[0]} = {self.num_rows / seen[0]:.3g} "
                f"times in such an epoch, and the schedule of the learning rate is made for "
                f"{expected[1]} batches an epoch.",
                stacklevel=2,
            )


def _parts(loader: object) -> list[Any]:
    """A loader, and its data set and samplers, as far as it has them."""
    parts = [loader, *(getattr(loader, n, None) for n in ("dataset", "sampler", "batch_sampler"))]
    return [part for part in [*parts, getattr(parts[3], "sampler", None)] if part is not None]


def check_shared(name: str, loader: object, world_size: int) -> None:
    """Raise if a loader gives each of several processes other batches."""
    if world_size > 1 and any(isinstance(p, DistributedSampler) for p in _parts(loader)):
        raise ValueError(
            f"`{name}` must yield the same batches in every process, of which `fit` gives each "
            "process its rows; got a DistributedSampler, which would leave most rows out. Use "
            "a loader without."
        )


def started(loader: Iterable[Any], seed: int, name: str = "data") -> Iterator[Any]:
    """The batches of a loader; what it draws to shuffle comes from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        batches = iter(loader)
        first = next(batches, None)  # a sampler draws its order here
    if first is None:
        raise ValueError(f"`{name}` yields no batch.")
    return chain([first], batches)


def loader_fingerprint(loader: Any, unpacking: Unpacking) -> dict[str, Any]:
    """Shapes and samples of what a loader holds in memory."""
    tensors: dict[str, Any] = {}
    if isinstance(loader, list | tuple):
        for i in sorted({round(k * (len(loader) - 1) / 7) for k in range(8)}):
            x, y = unpacking.pair(loader[i])
            tensors |= parts(x, f"x in batch {i}") | {f"y in batch {i}": y}
    for part in _parts(loader):
        while isinstance(part, Subset):
            tensors[f"subset {len(tensors)}"] = part.indices
            part = part.dataset
        if isinstance(part, TensorDataset):
            tensors |= {f"tensor {i}": tensor for i, tensor in enumerate(part.tensors)}
        elif isinstance(part, SubsetRandomSampler):
            tensors["sampled rows"] = part.indices
        elif isinstance(part, WeightedRandomSampler):
            tensors["sampling weights"] = part.weights
    return fingerprint(**{name: torch.as_tensor(value) for name, value in tensors.items()})


def generators_of(loader: object) -> list[torch.Generator]:
    """The generators of a loader, its data set and its samplers, each once."""
    found = [v for part in _parts(loader) for v in getattr(part, "__dict__", {}).values()]
    return [*{id(value): value for value in found if isinstance(value, torch.Generator)}.values()]


@contextmanager
def rewound(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """What is drawn inside leaves these generators and the global one as they were."""
    states = [generator.get_state() for generator in generators]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _count_rows(
    loader: Any, generators: Sequence[torch.Generator], unpacking: Unpacking
) -> tuple[int, int]:
    """N and R of a loader, from its sampler; an error with the reason where nobody can know.

    They differ for samplers that shuffle: `drop_last` and `num_samples` change how many rows an
    epoch has, but every row has its turn. Otherwise N is R, so that each row counts as often as an
    epoch shows it.
    """
    if isinstance(loader, list | tuple):
        total = sum(len(unpacking.pair(batch)[1]) for batch in loader)
        return total, total
    dataset, batches = getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)
    if batches is None or isinstance(dataset, IterableDataset):
        if getattr(loader, "batch_size", 1) is None:
            _ask("the items of its data set are whole batches (batch_size=None)")
        try:
            total = len(dataset)  # type: ignore[arg-type]
        except TypeError:
            _ask("its data set has no length")
        total -= total % loader.batch_size if getattr(loader, "drop_last", False) else 0
        return total, total
    if type(batches) is not BatchSampler:
        try:
            with rewound(generators):
                total = sum(map(len, islice(batches, len(batches))))
        except TypeError:
            _ask(f"its batch sampler ({type(batches).__name__}) has no length")
        return total, total
    sampler: Any = batches.sampler
    try:
        per_epoch = len(sampler)
    except TypeError:
        _ask(f"its sampler ({type(sampler).__name__}) has no length")
    per_epoch -= per_epoch % batches.batch_size if batches.drop_last else 0
    if type(sampler) is RandomSampler:
        return len(sampler.data_source), per_epoch
    return len(sampler.indices) if type(sampler) is SubsetRandomSampler else per_epoch, per_epoch


def _ask(reason: str) -> NoReturn:
    raise ValueError(
        f"`num_data` must be given for this loader, the number of rows in all: {reason}."
    ) from None


Data = ResidentData | ParquetData | LoaderData


@runtime_checkable
class Epochs(Protocol):
    """What one more pass over all rows asks of data."""

    @property
    def num_rows(self) -> int:
        """Rows of the data set."""

    @property
    def generators(self) -> Sequence[torch.Generator]:
        """What draws the order of rows."""

    def epoch(self, generator: torch.Generator, start: int) -> Iterator[Batch]:
        """The batches of an epoch from number `start` on."""


def training_data(
    model: DAK,
    data: Any,
    plan: Plan,
    num_data: int | None,
    fabric: Any,
    unpacking: Unpacking = _AS_PAIRS,
) -> tuple[Data, Inputs, tuple[Any, Tensor]]:
    """`ResidentData` for tensors and fixed features, `ParquetData` for files, or `LoaderData`.

    With it come some inputs of the network, and some rows (x, y) of batches as the loss sees them.
    """
    device, share = fabric.device, (fabric.global_rank, fabric.world_size)
    if isinstance(data, ParquetRows):
        if plan.fixed_features or num_data is not None:
            raise ValueError(
                "`fixed_features` and `num_data` are not for ParquetRows: features of all rows "
                "would be kept in memory, and the files know their number of rows."
            )
        files = ParquetData(data, model, plan.batch_size, device, *share)
        sample = files.sample()
        return files, check_data(model, *sample)[0], sample
    if (pair := unpacking.of_tensors(data)) is not None:
        if num_data is not None:
            raise ValueError("`num_data` is for iterables; tensors know their number of rows.")
        inputs, y = check_data(model, *pair)
        observed = is_observed(model.likelihood, y)
        if observed is not None and not bool(observed.any()):
            raise ValueError("`data y` must hold targets; all of them are missing.")
        x = _features(model, inputs, device) if plan.fixed_features else to_device(inputs, device)
        resident = ResidentData(x, y.to(device), plan.batch_size, *share)
        return resident, inputs, resident.sample()
    if not isinstance(data, Iterable) or isinstance(data, Tensor):
        raise TypeError(
            f"`data` must be a pair (x, y) of tensors or an iterable of such pairs; "
            f"got {type(data).__name__}."
        )
    if not plan.fixed_features:
        loader = LoaderData(data, num_data, model, device, *share, unpacking)
        share_generators(loader.generators, fabric)
        x, y = loader.first()
        return loader, x, (to_device(x, device), y.to(device))
    first, features, targets = None, [], []
    for batch in data:
        x, y = check_data(model, *unpacking.pair(batch), "batch")
        first = x if first is None else first
        features.append(_features(model, x, device))
        targets.append(y.to(device))
    if first is None:
        raise ValueError("`data` yields no batch.")
    resident = ResidentData(torch.cat(features), torch.cat(targets), plan.batch_size, *share)
    if num_data not in (None, resident.num_rows):
        raise ValueError(
            f"`num_data` must be the number of rows that `data` yields, since fixed features are "
            f"those of one pass: {resident.num_rows}; got {num_data}. Leave it out."
        )
    return resident, first, resident.sample()


def share_generators(generators: Sequence[torch.Generator], fabric: Any) -> None:
    """Let a loader have the same batches in every process."""
    for generator in generators:
        generator.set_state(fabric.broadcast(generator.get_state()))


def _features(model: DAK, x: Inputs, device: torch.device) -> Tensor:
    """What `model.embed` takes, of all rows; the network runs in eval mode, once per row."""
    module = model.feature_extractor
    with explaining(model, x), evaluating(module), known_sites(model, for_y=False):
        return torch.cat([model.features(to_device(part, device)) for part in split(x, 1024)])
