"""Chains side by side, each in a process of its own.

Processes are spawned: they share no state with this one. What a chain needs is sent to them as
bytes, and arrays come back. Nothing is read from a file.
"""

import multiprocessing
import os
import pickle
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

__all__ = ["Report", "run_in_processes"]

# Called after each draw with the stage, "warmup" or "sample", and what the sampler says of itself.
Report = Callable[[str, dict[str, Any]], None]

# Seconds between two messages of a process.
_PAUSE = 0.1
# In a process that runs a chain: where its messages go, and whether it is to stop.
_messages: Any = None
_should_stop: Any = None


class _StoppedError(RuntimeError):
    """A chain was told to stop, because another has failed."""


def run_in_processes(
    run_fn: Callable[[Any, Report], Any], chains: Sequence[Any], reports: Sequence[Report]
) -> list[Any]:
    """The results of `run_fn(chain, report)` for all chains, as many at a time as there are cores.

    Results and chains are pickled on the way. The first error of a chain is raised here, and the
    other chains stop.

    Args:
        run_fn: a function of a module, which the processes import.
        chains: what each chain needs.
        reports: a function for each chain, called here for each draw.
    """
    try:
        jobs = [pickle.dumps((run_fn, chain)) for chain in chains]
    except Exception as error:
        raise TypeError(
            "`parallel=True` sends model, priors and likelihood to other processes, and one of "
            f"them cannot be sent: {error}. Define functions and classes in a module of their own, "
            "or leave `parallel` out."
        ) from error
    context = multiprocessing.get_context("spawn")
    messages, should_stop = context.SimpleQueue(), context.Event()
    with ProcessPoolExecutor(
        min(len(jobs), os.cpu_count() or 1),
        mp_context=context,
        initializer=_start,
        initargs=(messages, should_stop, torch.get_num_threads(), str(torch.get_default_dtype())),
    ) as executor:
        futures = [executor.submit(_work, index, job) for index, job in enumerate(jobs)]
        try:
            return _collect(futures, messages, reports)
        except BrokenProcessPool as error:
            raise RuntimeError(
                "A process of `parallel=True` has ended by itself. It may have run out of memory. "
                "In a script, processes import the script again: what it does must stand under "
                '`if __name__ == "__main__":`. In a notebook, define classes in a module.'
            ) from error
        finally:
            should_stop.set()


def _collect(futures: list[Future], messages: Any, reports: Sequence[Report]) -> list[Any]:
    pending = set(futures)
    while pending:
        done, pending = wait(pending, timeout=_PAUSE)
        while not messages.empty():
            index, count, stage, facts = messages.get()
            for _ in range(count):
                reports[index](stage, facts)
        for future in done:
            future.result()
    return [future.result() for future in futures]


def _start(messages: Any, should_stop: Any, num_threads: int, dtype: str) -> None:
    """Prepare a process: sums have as many parts as in the first one, so that draws are equal."""
    global _messages, _should_stop
    _messages, _should_stop = messages, should_stop
    torch.set_num_threads(num_threads)
    torch.set_default_dtype(getattr(torch, dtype.removeprefix("torch.")))


def _work(index: int, job: bytes) -> Any:
    run_fn, chain = pickle.loads(job)  # bytes that the first process has made
    count, sent = 0, time.monotonic()

    def report(stage: str, facts: dict[str, Any]) -> None:
        nonlocal count, sent
        if _should_stop.is_set():
            raise _StoppedError("Another chain has failed.")
        count += 1
        if time.monotonic() - sent > _PAUSE:
            _messages.put((index, count, stage, facts))
            count, sent = 0, time.monotonic()

    result = run_fn(chain, report)
    _messages.put((index, count, "sample", {}))
    return result
