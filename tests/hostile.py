"""Files as someone who means harm, or a bad disk, would leave them; with a fixed seed.

    for name, directory in hostile_copies(saved, scratch, seed=0, count=100):
        failure = attempt(load, directory)  # None if it was refused properly, or is a model

The checksums fit, so that what is behind them is reached. `attempt` lets pass a CheckpointError
that names a file of the directory, and a file that could be read after all: some changes do no
harm. Anything else is a failure: other errors, warnings, and more than a few seconds.
"""

import copy
import json
import os
import random
import shutil
import struct
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyro_dak import CheckpointError
from tests.training.runs import write_sums

__all__ = ["attempt", "failures", "hostile_copies"]

CONFIG = "config.json"
# Values in place of others: of wrong kinds, too large to build, or not numbers.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 14, 20, 21, 10**5, 10**8, 10**9, 2**31, 2**63, 10**18,
    10**400, -(10**18), 0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), -float("inf"),
    "", "x", "1", "\0", "é" * 1000, "Sequential", "Linear", "MaternKernel", "AutoNormal",
    "FullRankGuide", "AutoMultivariateNormal", "float64", "same", "__class__", "../../etc/passwd",
    [], [0], [1, 2], [10**9], [10**9, 10**9], [[]], [None], ["x"], [0.1] * 1000, {}, {"name": "x"},
    {"name": "Linear", "in_features": 10**6, "out_features": 10**6, "bias": True},
    {"name": "RBFKernel", "lengthscale": 0.1}, {"name": None}, {"x": {"x": {}}},
)  # fmt: skip
DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I8", "U8", "BOOL", "F8_E4M3", "F4", "C64", "x", 3)
SLOW = 20.0  # seconds


def _places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all entries of a JSON value."""
    keys = content if isinstance(content, dict) else range(_length(content))
    below = [place for key in keys for place in _places(content[key], (*path, key))]
    return [path, *below] if path else below


def _length(content: Any) -> int:
    return len(content) if isinstance(content, list) else 0


def _nested(depth: int, kind: str) -> Any:
    value: Any = {"name": "ReLU"}
    for _ in range(depth):
        value = {"name": "Sequential", "children": [["0", value]]} if kind == "layer" else [value]
    return value


def mutate(config: dict[str, Any], rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A configuration with an entry or two changed, and what was done."""
    config, done = copy.deepcopy(config), []
    places = [place for place in _places(config) if place[0] not in ("format", "format_version")]
    # Short paths are few and matter most. The longer one goes first, so that it is still there.
    chosen = [min(rng.sample(places, 2), key=len) for _ in range(rng.choice((1, 1, 2)))]
    for place in sorted(set(chosen), key=len, reverse=True):
        parent, key = config, place[-1]
        for step in place[:-1]:
            parent = parent[step]
        if key not in (parent if isinstance(parent, dict) else range(len(parent))):
            continue
        how = rng.choice(("value", "value", "value", "remove", "wrap", "swap", "nest"))
        if how == "value":
            parent[key] = copy.deepcopy(rng.choice(VALUES))
        elif how == "remove":
            del parent[key]
        elif how == "wrap":
            parent[key] = rng.choice(([parent[key]], {"name": parent[key]}))
        elif how == "swap":
            other = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
            parent[key], parent[other] = parent[other], parent[key]
        else:
            parent[key] = _nested(rng.choice((2, 50, 200)), rng.choice(("layer", "list")))
        done.append(f"{how} at {'.'.join(map(str, place))}")
    return "; ".join(done), config


def _change_config(directory: Path, rng: random.Random) -> str:
    path = directory / CONFIG
    done, config = mutate(json.loads(path.read_text()), rng)
    path.write_text(json.dumps(config))
    return done


def _break_config(directory: Path, rng: random.Random) -> str:
    """Text that is no JSON, or JSON that is hard to read."""
    texts = {
        "deep list": "[" * 10**5,
        "deep object": '{"format": ' * 10**5,
        "deep and closed": "[" * 10**5 + "]" * 10**5,
        "number of many digits": '{"format": "pyro_dak", "format_version": 1' + "0" * 10**4 + "}",
        "not UTF-8": '{"format": "pyro_dak\udcff"}',
        "a number": "3",
        "nothing": "",
    }
    name = rng.choice(list(texts))
    (directory / CONFIG).write_bytes(texts[name].encode(errors="surrogateescape"))
    return name


def _weights(directory: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(directory.glob("*.safetensors")))


def _change_weights(directory: Path, rng: random.Random) -> str:
    """A header that tells lies about names, types, shapes and places, or weights of NaN."""
    path = _weights(directory, rng)
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + size]), bytearray(data[8 + size :])
    name = rng.choice([name for name in header if name != "__metadata__"])
    entry, how = header[name], rng.choice(("shape", "dtype", "offsets", "remove", "rename", "nan"))
    shape = entry["shape"]
    if how == "shape":
        huge = [[0, 2**62], [2**32, 2**32], [10**9], [-1], [2**64], [*shape, 0], [0.5], "x", None]
        entry["shape"] = rng.choice([shape[::-1], [1, *shape], shape[:-1], [], *huge])
    elif how == "dtype":
        entry["dtype"] = rng.choice(DTYPES)
    elif how == "offsets":
        start, end = entry["data_offsets"]
        wrong = [[0, 2**62], [end, start], [-8, end], [start, end + 8], [start, start], [0], "x"]
        entry["data_offsets"] = rng.choice(wrong)
    elif how == "remove":
        del header[name]
    elif how == "rename":
        header[rng.choice(("x", "model.x", "", "optimizer.99.exp_avg", "optimizer.-1.step"))] = (
            header.pop(name)
        )
    else:
        start, end = entry["data_offsets"]
        body[start:end] = (b"\xff" * (end - start))[: end - start]
    text = json.dumps(header).encode()
    size = rng.choice((len(text), len(text), len(text), len(text), 2**63, len(text) // 2))
    path.write_bytes(struct.pack("<Q", size) + text + body)
    return f"{how} of {name} in {path.name}"


def _damage_bytes(directory: Path, rng: random.Random) -> str:
    """Some bytes changed, or the end missing."""
    path = rng.choice([directory / CONFIG, _weights(directory, rng)])
    data = bytearray(path.read_bytes())
    if rng.random() < 0.3:
        del data[rng.randrange(len(data)) :]
    for _ in range(rng.choice((0, 1, 10)) if data else 0):
        data[rng.randrange(len(data))] = rng.randrange(256)
    path.write_bytes(data)
    return f"bytes of {path.name}"


def _replace_file(directory: Path, rng: random.Random) -> str:
    """Something that is not a regular file, a file that is far too large, or none."""
    path = rng.choice([p for p in sorted(directory.iterdir())])
    how = rng.choice(("pipe", "directory", "device", "endless device", "loop", "huge", "missing"))
    if how == "huge":
        os.truncate(path, 2**40)  # it takes no room on the disk
        return f"{how} {path.name}"
    path.unlink()
    if how == "pipe":
        os.mkfifo(path)
    elif how == "directory":
        path.mkdir()
    elif how != "missing":
        targets = {"device": os.devnull, "endless device": "/dev/zero", "loop": path.name}
        path.symlink_to(targets[how])
    return f"{how} in place of {path.name}"


ATTACKS: dict[Callable[[Path, random.Random], str], int] = {
    _change_config: 60,
    _break_config: 5,
    _change_weights: 20,
    _damage_bytes: 5,
    _replace_file: 10,
}


def hostile_copies(
    source: Path, scratch: Path, seed: int, count: int
) -> Iterator[tuple[str, Path]]:
    """So many damaged copies of a saved directory, one after the other, and what was done to each.

    A copy is removed when the next is asked for. The checksums fit, except for a few.
    """
    rng = random.Random(seed)
    for number in range(count):
        directory = Path(shutil.copytree(source, scratch / f"hostile-{number}"))
        attack = rng.choices(list(ATTACKS), list(ATTACKS.values()))[0]
        name = attack(directory, rng)
        is_regular = all(p.is_file() and p.stat().st_size < 2**30 for p in directory.iterdir())
        if is_regular and rng.random() < 0.95:
            write_sums(directory)
        yield f"{number}: {name}", directory
        shutil.rmtree(directory)


def attempt(read_fn: Callable[[Path], object], directory: Path) -> str | None:
    """What went wrong when a hostile directory was read; None if all is well."""
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            read_fn(directory)
    except CheckpointError as error:
        if str(directory) not in str(error):
            return f"does not name the file: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - start
    return f"took {seconds:.0f} s" if seconds > SLOW else None


def failures(
    source: Path, scratch: Path, read_fn: Callable[[Path], object], seed: int, count: int
) -> list[str]:
    """All failures in so many attempts to read a damaged copy of `source`."""
    found = []
    for name, directory in hostile_copies(source, scratch, seed, count):
        if problem := attempt(read_fn, directory):
            found.append(f"{name}: {problem}"[:500])
    return found
