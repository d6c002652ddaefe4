"""Two writers of one model beside a reader, saves killed at every point, two runs in one place."""

import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

from pyro_dak import load
from tests.attack import Outcome
from tests.training.runs import SCRIPT, make_model, train

__all__ = ["attack"]


def _start(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT.with_name(script)), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _read_beside_writers(count: int, path: Path, *options: str) -> tuple[int, list[str]]:
    """Read a model while two processes overwrite it so many times each."""
    writers = [_start("save_again.py", path, count, *options) for _ in range(2)]
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.readline()
    failures, tried = [], 2 * count
    while any(writer.poll() is None for writer in writers):
        tried += 1
        try:
            loaded = load(path)
            if loaded.model.feature_extractor.weight.item() != loaded.guide.z_loc.item():
                failures.append(f"read a mixture of two models, {options}")
        except Exception as error:
            failures.append(f"load: {error!r}, {options}")
    for writer in writers:
        writer.communicate()
    failures += [f"a writer failed, {options}" for writer in writers if writer.returncode]
    return tried, failures


def _kill_saves(folder: Path, *options: str) -> tuple[int, list[str]]:
    """Kill a save before every file operation of it."""
    folder.mkdir()
    output, _ = _start("kill_saves.py", folder, *options).communicate()
    lines = [line for line in output.splitlines() if not line.startswith("at the end")]
    return len(lines), [line for line in lines if line.split(": ")[-1] not in ("old", "new")]


def _fit_twice(folder: Path) -> list[str]:
    """Start a run in the directory of one that is going on."""
    refusals = []

    def start_another(epoch: int, row: dict[str, float]) -> None:
        try:
            train(*make_model(), checkpoint_dir=folder, resume_from=folder)
        except BlockingIOError as error:
            refusals.append(error)

    train(*make_model(), checkpoint_dir=folder, epochs=2, callbacks=[start_another])
    return [] if len(refusals) == 2 else ["two runs wrote to one directory of checkpoints"]


def attack(count: int, seed: int, folder: Path) -> Outcome:
    """So many saves by each of two writers, with a reader; all points of a save; two runs."""
    tried, failures = 0, []
    for options in tqdm(((), ("--without-exchange",)), desc="writers"):
        place = folder / "-".join(["writers", *options])
        place.mkdir()
        for made, found in (
            _read_beside_writers(count, place / "model", *options),
            _kill_saves(place / "killed", *options),
        ):
            tried, failures = tried + made, failures + found
    for number in range(max(1, count // 10)):
        tried, failures = tried + 2, failures + _fit_twice(folder / f"checkpoints-{number}")
    return Outcome(tried, failures)
