"""Overwrite a saved model again and again, killed at another point each time.

python kill_saves.py DIRECTORY [--without-exchange]

Prints, for each point, what the save was about to do and what `load` finds after: "old", "new" or
what is wrong. The points are all events of Python's audit hooks that concern files, every `fsync`,
and the exchange of two directories.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

import torch
from save_again import make_model

from pyro_dak import load, save
from pyro_dak.training import files

EVENTS = ("open", "os.chmod", "os.chown", "os.mkdir", "os.remove", "os.rename", "os.rmdir")


class Killer:
    """Ends the process at its n-th point, and says before which event."""

    def __init__(self, n: int):
        self.left = n

    def point(self, name: str) -> None:
        if self.left == 0:
            print(f"{name}: ", end="", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    def watch(self) -> None:
        def hook(event, arguments):
            is_written = event != "open" or (isinstance(arguments[2], int) and arguments[2] & 3)
            if event in EVENTS and is_written:
                self.point(event)

        def watched(name, function):
            def call(*arguments):
                self.point(name)
                return function(*arguments)

            return call

        sys.addaudithook(hook)
        os.fsync = watched("fsync", os.fsync)
        files._exchange = watched("exchange", files._exchange)


def killed_save(path: Path, value: float, n: int) -> bool:
    """Save in a process of its own, killed at its n-th point; whether there was such a point."""
    parts, child = make_model(value), os.fork()
    if child == 0:
        try:
            Killer(n).watch()
            save(*parts, path, overwrite=True)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
        raise RuntimeError("the save failed before it was killed")
    return os.WIFSIGNALED(status)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--without-exchange", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.without_exchange:
        files._exchange = lambda first, second: False
    path = args.directory / "model"
    old, n = 0.0, 0
    save(*make_model(old), path, overwrite=True)
    while killed_save(path, old + 1, n):
        try:
            found = float(load(path).guide.z_loc.detach())
            result = {old: "old", old + 1: "new"}.get(found, f"neither ({found})")
            old = found
        except Exception as error:
            result = repr(error)
        print(result)
        n += 1
    left = sorted(entry.name for entry in args.directory.iterdir())
    print("at the end:", *left)


if __name__ == "__main__":
    main()
