"""Train a small model and write its parameters: run by tests as a process of its own.

python train.py OUT.safetensors [--checkpoints DIR] [--resume] [--kill-at-step N]
                [--kill-in-write N] [--interrupt-at-step N] [--signal NAME] [--only-rank R]
                [--objective NAME] [--guide NAME] [--compile] [--parts] [--files DIR]
                [--before-kill COMMAND] [--timeout SECONDS]
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pyro_dak import (
    DAK,
    GaussianLikelihood,
    HeteroscedasticLikelihood,
    MeanFieldGuide,
    NaturalGuide,
    ParquetRows,
    fit,
)
from pyro_dak.training.checkpoint import module_tensors
from pyro_dak.training.loop import Run
from pyro_dak.training.plan import History


def tell(what: dict[str, Any]) -> None:
    """Print in one piece, also where several processes print."""
    os.write(sys.stdout.fileno(), f"{json.dumps(what)}\n".encode())


class Joined(nn.Module):
    """A network of two inputs."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, first: Tensor, others: Tensor) -> Tensor:
        return self.network(torch.cat([first.unsqueeze(-1), others], -1))


def train(model: DAK, guide: nn.Module, x: Tensor, y: Tensor, args: Any) -> History:
    validation: Any = (x[:11], y[:11])
    if args.parts:  # inputs of two parts, and a loader of odd batches that are scored
        x = {"first": x[:, 0], "others": x[:, 1:]}
        rows = [{name: part[i] for name, part in x.items()} | {"y": y[i]} for i in range(11)]
        validation = DataLoader(rows, batch_size=5, shuffle=True)
    data: Any = (x, y)
    if args.files:  # read in as many parts by one process as by two
        data = ParquetRows(args.files, "y", shards=2, progress=False)
    return fit(
        model,
        guide,
        data,
        target="y" if args.parts else None,
        objective=args.objective,
        epochs=5,
        batch_size=20,
        seed=7,
        validation=validation,
        patience=3,
        checkpoint_dir=args.checkpoints,
        resume_from=args.checkpoints if args.resume else None,
        accelerator="auto" if "LT_CLI_USED" in os.environ else "cpu",
        compile=args.compile,
        timeout=args.timeout,
        progress=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--checkpoints")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--kill-at-step", type=int)
    parser.add_argument("--kill-in-write", type=int)
    parser.add_argument("--interrupt-at-step", type=int)
    parser.add_argument("--signal", default="SIGINT")
    parser.add_argument("--only-rank")
    parser.add_argument("--objective", default="local")
    parser.add_argument("--guide", default="mean_field")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--files")
    parser.add_argument("--before-kill", default="true")
    parser.add_argument("--timeout", type=float, default=300.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    x = torch.randn(101, 3)
    y = x.sin().sum(-1, keepdim=True) + 0.1 * torch.randn(101, 1)
    dropout = 0.0 if args.objective == "closed_form" else 0.1
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 4))
    network = Joined(network) if args.parts else network
    is_natural = args.guide == "natural"
    likelihood = GaussianLikelihood(0.5) if is_natural else HeteroscedasticLikelihood()
    model = DAK(network, 4, num_units=3, level=3, likelihood=likelihood)
    guide = NaturalGuide(model) if is_natural else MeanFieldGuide(model)

    step = Run.train_step

    def watched_step(run: Run, *arguments: object) -> None:
        step(run, *arguments)
        is_chosen = args.only_rank in (None, os.environ.get("RANK"))
        if run.step == args.kill_at_step and is_chosen:
            subprocess.run(shlex.split(args.before_kill), check=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if run.step == args.interrupt_at_step and is_chosen:
            os.kill(os.getpid(), getattr(signal, args.signal))

    Run.train_step = watched_step
    flush = os.fsync
    flushes = 0

    def watched_flush(descriptor: int) -> None:
        nonlocal flushes
        flushes += 1
        if flushes == args.kill_in_write:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        flush(descriptor)

    os.fsync = watched_flush
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        history = train(model, guide, x, y, args)
    except KeyboardInterrupt as error:
        tell({"message": str(error), **vars(error.history)})
        raise
    finally:
        assert not model.training
        assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    tell(vars(history))
    if int(os.environ.get("RANK", "0")) == 0:
        safetensors.torch.save_file(module_tensors(model, guide), args.out)


if __name__ == "__main__":
    main()
    if "RANK" in os.environ:  # torch 2.14 with gloo sometimes aborts while it shuts down
        os._exit(0)
