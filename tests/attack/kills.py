"""Kill training runs at random moments, again and again, until they end; compare the weights."""

import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning_fabric  # noqa: F401 (once here instead of in every run)
import safetensors.torch
import torch
from pyro.infer.autoguide import AutoNormal
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from pyro_dak import (
    DAK,
    BernoulliLikelihood,
    CategoricalLikelihood,
    FullRankGuide,
    HeteroscedasticLikelihood,
    LowRankGuide,
    MeanFieldGuide,
    UnitBlockGuide,
    fit,
)
from pyro_dak.training.checkpoint import module_tensors
from tests.attack import Outcome
from tests.training.runs import SCRIPT

__all__ = ["CONFIGURATIONS", "attack"]

Train = Callable[[Path, Path], Any]
_PROCESSES = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
_MAX_KILLS_OF_A_RUN = 4


def _train(
    checkpoints: Path,
    out: Path,
    *,
    guide: Callable[[DAK], nn.Module] = MeanFieldGuide,
    likelihood: Any = None,
    dtype: torch.dtype = torch.float32,
    dropout: float = 0.0,
    loads: bool = False,
    **options: Any,
) -> None:
    """Train a small model, from its checkpoints if there are any, and write its weights."""
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    x = torch.randn(120, 3)
    y = x.sin().sum(-1, keepdim=True) + 0.1 * torch.randn(120, 1)
    if isinstance(likelihood, BernoulliLikelihood | CategoricalLikelihood):
        y = (
            (y > 0).to(dtype)
            if isinstance(likelihood, BernoulliLikelihood)
            else (y > 0).long()[:, 0]
        )
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 4))
    outputs = 2 if isinstance(likelihood, CategoricalLikelihood) else 1
    model = DAK(network, 4, num_units=3, level=3, num_outputs=outputs, likelihood=likelihood)
    q = guide(model)
    data: Any = (x, y)
    if loads:
        generator = torch.Generator().manual_seed(3)
        data = DataLoader(TensorDataset(x, y), 20, shuffle=True, generator=generator)
    settings = {"epochs": 12, "batch_size": 20, "seed": 7, "accelerator": "cpu", "progress": False}
    places = {"checkpoint_dir": checkpoints, "resume_from": checkpoints}
    fit(model, q, data, **(settings | places | options))
    safetensors.torch.save_file(module_tensors(model, q), out)


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "mean field, closed form": {},
    "dropout, held-out rows, patience": {
        "likelihood": HeteroscedasticLikelihood(),
        "objective": "local",
        "dropout": 0.2,
        "validation": 0.2,
        "patience": 3,
    },
    "full rank, float64": {"guide": FullRankGuide, "dtype": torch.float64},
    "unit blocks, classes": {"guide": UnitBlockGuide, "likelihood": CategoricalLikelihood()},
    "AutoNormal, Trace_ELBO": {"guide": AutoNormal, "objective": "trace"},
    "low rank, Jensen": {
        "guide": LowRankGuide,
        "likelihood": BernoulliLikelihood(),
        "objective": "jensen",
    },
    "fixed features": {"fixed_features": True},
    "loader with a generator": {"loads": True},
    "two processes": {},
}


def _start_fork(name: str, checkpoints: Path, out: Path) -> int:
    """Start a run in a copy of this process, which has imported everything; returns its number."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            _train(checkpoints, out, **CONFIGURATIONS[name])
            code = 0
        except BaseException:
            (out.parent / "error.txt").write_text(traceback.format_exc())
        finally:
            os._exit(code)
    return child


def _start_processes(checkpoints: Path, out: Path) -> int:
    """Start a run in two processes of their own; returns the number of their launcher."""
    command = [*_PROCESSES, str(SCRIPT), str(out), "--checkpoints", str(checkpoints), "--resume"]
    with (out.parent / "error.txt").open("w") as log:
        started = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    return started.pid


def _kill(process: int) -> None:
    """Kill a process with all that it has started, as a power cut would."""
    family, more = [process], [process]
    while more:
        parent = more.pop()
        children = Path(f"/proc/{parent}/task/{parent}/children")
        found = children.read_text().split() if children.exists() else []
        more += map(int, found)
        family += map(int, found)
    for member in family:
        with suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)
    os.waitpid(process, 0)
    while any(Path(f"/proc/{member}").exists() for member in family):
        time.sleep(0.002)


def _run(name: str, folder: Path, kill_after: float | None) -> int | None:
    """Run until the end or until it is killed; returns the exit code, or None if it was killed."""
    places = (folder / "checkpoints", folder / "out.safetensors")
    is_alone = name != "two processes"
    process = _start_fork(name, *places) if is_alone else _start_processes(*places)
    end = None if kill_after is None else time.monotonic() + kill_after
    while end is None or time.monotonic() < end:
        finished, status = os.waitpid(process, os.WNOHANG)
        if finished:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    _kill(process)
    return None


def _whole(name: str, folder: Path) -> tuple[dict[str, Tensor], float]:
    """The weights of a run that nobody kills, and its seconds."""
    folder.mkdir(parents=True)
    start = time.monotonic()
    code = _run(name, folder, None)
    if code != 0:
        raise RuntimeError(f"{name}: {(folder / 'error.txt').read_text()[-2000:]}")
    return safetensors.torch.load_file(folder / "out.safetensors"), time.monotonic() - start


def attack(count: int, seed: int, folder: Path, names: list[str] | None = None) -> Outcome:
    """Kill runs so many times in all; every run must end in the weights of one left alone."""
    rng, failures, kills = random.Random(seed), [], 0
    names = list(CONFIGURATIONS) if names is None else names
    whole = {name: _whole(name, folder / "whole" / name) for name in names}
    bar = tqdm(total=count, desc="kills")
    run = 0
    while kills < count:
        name = names[run % len(names)]
        weights, seconds = whole[name]
        here = folder / f"run-{run}"
        here.mkdir()
        code: int | None = None
        for _ in range(min(_MAX_KILLS_OF_A_RUN, count - kills)):
            code = _run(name, here, rng.uniform(0, seconds))
            if code is not None:
                break
            kills += 1
            bar.update()
        if code is None:
            code = _run(name, here, None)
        if code != 0:
            failures.append(f"{name}: {(here / 'error.txt').read_text()[-500:]}")
        else:
            found = safetensors.torch.load_file(here / "out.safetensors")
            if not all(torch.equal(found[key], weights[key]) for key in weights):
                failures.append(f"{name}: run {run} ended in other weights")
        run += 1
    bar.close()
    return Outcome(kills, failures)
