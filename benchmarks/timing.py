"""Side-by-side timing: candidates take turns in one process, and the medians are compared."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Timing", "saved_megabytes", "time_side_by_side"]


@dataclass(frozen=True)
class Timing:
    """Median of the repetitions and half their range, in milliseconds, and all of them."""

    milliseconds: float
    spread: float
    rounds: tuple[float, ...] = ()

    def ratio_to(self, base: "Timing") -> tuple[float, float]:
        """Median over the rounds of the ratio to another candidate's time, and half its range."""
        ratios = [own / other for own, other in zip(self.rounds, base.rounds, strict=True)]
        return statistics.median(ratios), (max(ratios) - min(ratios)) / 2


def time_side_by_side(
    candidates: Mapping[str, Callable[[], object]],
    repetitions: int = 7,
    seconds_per_repetition: float = 0.03,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time each candidate once per round, `repetitions` rounds, each long enough to be measured.

    A call that is not timed goes before each, so that nobody pays for what the one before left in
    the caches, or gave back to the system; and three before all, for compilers. The `clock` may be
    `time.process_time`, which does not count what other processes take.
    """
    calls = {}
    for name, fn in candidates.items():
        for _ in range(3):
            fn()
        start = clock()
        fn()
        once = clock() - start
        calls[name] = max(1, round(seconds_per_repetition / max(once, 1e-7)))
    rounds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repetitions):
        for name, fn in candidates.items():
            fn()
            start = clock()
            for _ in range(calls[name]):
                fn()
            rounds[name].append((clock() - start) / calls[name] * 1e3)
    return {
        name: Timing(statistics.median(times), (max(times) - min(times)) / 2, tuple(times))
        for name, times in rounds.items()
    }


def saved_megabytes(fn: Callable[[], object]) -> float:
    """Memory that the graph built by `fn` holds for its backward pass, each storage once, in MB."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = fn()
    del kept
    return sum(storages.values()) / 1e6
