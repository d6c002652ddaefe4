"""Models and checkpoints on disk, without pickle: a directory of safetensors and JSON.

    model.safetensors    the weights of model and guide
    trainer.safetensors  the state of optimisers and random numbers, in checkpoints of `fit` only
    config.json          what to build
    SHA256SUMS           the checksums of these files, in the format of `sha256sum`
    README.md            a model card, if `write_card` or somebody else wrote one

A reader sees the old directory, the new one or none, and never half of one. Directories of format
version 1, which have their checksums in config.json, are read too.
"""

import hashlib
import json
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from errno import EFBIG
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import safetensors.torch
import torch
from torch import Tensor, nn

from pyro_dak.inference.guides.base import check_guide
from pyro_dak.model.dak import DAK
from pyro_dak.model.inputs import check_model
from pyro_dak.training.describe import check_sizes, describe, rebuild
from pyro_dak.training.files import (
    check_place,
    read_regular,
    recover,
    remove,
    remove_whole,
    write_whole,
)
from pyro_dak.training.locks import locked
from pyro_dak.validation import check_device, check_has_values, check_integer, check_path

__all__ = [
    "MAX_BYTES",
    "CheckpointError",
    "Checkpoints",
    "Loaded",
    "Newest",
    "blaming",
    "check_history",
    "check_replaceable",
    "is_finite",
    "load",
    "load_module_tensors",
    "module_tensors",
    "read_checkpoint",
    "read_directory",
    "save",
    "write_directory",
]

FORMAT_VERSION = 2
MAX_BYTES = 2**32  # of files, and of memory that a description may ask for beyond its weights
_JSON_EXPANSION = 32  # a list such as [[],[],...] takes so many times its bytes when it is read
_MAX_READS = 100  # of a directory that is replaced while it is being read
_CONFIG, _MODEL, _TRAINER = "config.json", "model.safetensors", "trainer.safetensors"
_SUMS, _CARD, _LOCK = "SHA256SUMS", "README.md", ".lock"
_NAME = re.compile(r"step-\d{9}")
_LEFTOVER = re.compile(r"\.(step-\d{9})\.(lock|(tmp|old)-[0-9a-f]{8})")

_Read = TypeVar("_Read")


class CheckpointError(RuntimeError):
    """A file cannot be read as what it should be. The message names the file and the problem."""


class Loaded(NamedTuple):
    """What `load` returns."""

    model: DAK
    guide: nn.Module


class Contents(NamedTuple):
    """A directory as it was read and verified."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    trainer: dict[str, Tensor] | None


class Newest(NamedTuple):
    """The newest checkpoint that can be read, what it holds, and newer ones that cannot be read."""

    path: Path
    contents: Contents
    damaged: list[Path]


@dataclass(frozen=True)
class Checkpoints:
    """Where the checkpoints of a run go, how many epochs or steps apart, and how many are kept."""

    directory: Path
    every: int = 1
    keep_last: int = 2
    steps: int | None = None

    def claimed(self) -> AbstractContextManager[None]:
        """Hold the directory for one run; a second one in it raises BlockingIOError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        message = (
            f"`checkpoint_dir` ({self.directory}) is in use by another run of `fit`, and two runs "
            "would overwrite each other's checkpoints. Wait for that run, or name another "
            "directory."
        )
        return locked(self.directory / _LOCK, message)

    @staticmethod
    def named(directory: Path) -> list[Path]:
        """What looks like our checkpoints in a directory, damaged or not, oldest first."""
        for moved in directory.glob(".step-*.old-*"):
            if match := _LEFTOVER.fullmatch(moved.name):
                _recover(directory / match[1])
        named = sorted(p for p in directory.glob("step-*") if _NAME.fullmatch(p.name))
        return [path for path in named if _has_our_files(path)]

    @staticmethod
    def found(directory: Path) -> list[Path]:
        """The checkpoints in a directory, oldest first; other things in it do not count."""
        return [path for path in Checkpoints.named(directory) if _is_ours(path)]

    @staticmethod
    def read_newest(path: Path, max_bytes: int = MAX_BYTES) -> "Newest":
        """The newest undamaged checkpoint in a directory of them; or `path`, if it is one itself.

        Newer ones that cannot be read are left out, with a warning that says why.
        """
        if (path / _CONFIG).exists():
            return Newest(path, read_checkpoint(path, max_bytes), [])
        damaged, problems = [], []
        for candidate in reversed(Checkpoints.named(path)):
            try:
                contents = read_checkpoint(candidate, max_bytes)
            except CheckpointError as error:
                damaged.append(candidate)
                problems.append(str(error))
                continue
            if damaged:
                warnings.warn(
                    f"{'; '.join(problems)} An older checkpoint is used instead: {candidate}.",
                    stacklevel=3,
                )
            return Newest(candidate, contents, damaged)
        if problems:
            raise CheckpointError(f"{path}: holds no undamaged checkpoint. {' '.join(problems)}")
        raise CheckpointError(f"{path}: holds no checkpoint.")

    def prune(self) -> None:
        """Remove all but the last checkpoints, and what an interrupted write has left behind."""
        for old in self.found(self.directory)[: -self.keep_last]:
            remove_whole(old)
        for stale in self.directory.glob(".step-*"):
            if _LEFTOVER.fullmatch(stale.name):
                remove(stale)


def save(
    model: DAK, guide: nn.Module, path: str | os.PathLike[str], overwrite: bool = False
) -> Path:
    """Write model and guide to the directory `path`, and return that path.

    An extractor made of the usual layers is stored as an architecture, and any other one as weights
    only. An existing directory is replaced only with `overwrite`, and only if it is a saved model;
    a reader finds the old model or the new one, whatever happens meanwhile. A README.md in it is
    kept (see `write_card`).

    Raises:
        FileExistsError: if something stands at `path` that must not be replaced.
        OSError: naming `path`, if it cannot be written.
        ValueError: if a part cannot be stored as data, or a weight is NaN or infinite.
    """
    check_model(model)
    check_guide(model, guide, same_dtype=False)
    check_path("path", path)
    path, tensors = Path(path), module_tensors(model, guide)
    write_directory(path, describe(model, guide), tensors, overwrite=overwrite)
    return path


def check_replaceable(path: Path, overwrite: bool, option: str = "overwrite=True") -> None:
    """Raise unless a model may be written to `path`; `option` allows a user to replace one.

    Ask before training: afterwards it is too late to learn that a directory is not writable.
    """
    check_place(path, makes_parents=True)
    recover(path)
    if path.exists():
        if not overwrite:
            raise FileExistsError(f"`{path}` exists; pass {option} to replace it.")
        if not _is_ours(path):
            raise FileExistsError(f"`{path}` is not a saved model; it is left as it is.")


def load(
    path: str | os.PathLike[str],
    feature_extractor: nn.Module | None = None,
    guide: Callable[[DAK], nn.Module] | None = None,
    device: str | torch.device = "cpu",
    max_bytes: int = MAX_BYTES,
    features: Callable[[Any], Tensor] | None = None,
) -> Loaded:
    """Model and guide from a directory written by `save`, on `device`, in eval mode.

    Args:
        path: the directory.
        feature_extractor: a network of the stored architecture, where that was not stored.
        guide: a function from the model to a guide, where the guide is of a class of its own.
        device: the device to put them on.
        max_bytes: the most bytes that the files may have, and the most memory that the description
            may ask for beyond its weights. By default each is 4 GiB.
        features: the function from the output of the network to features, for a model that has one.

    Raises:
        CheckpointError: naming the file and what is wrong with it. Nothing is allocated for weights
            that are not in the file.
    """
    check_path("path", path)
    check_device("device", device)
    path = Path(path)
    config, tensors, _ = read_directory(path, max_bytes)
    if config.get("model") is None:
        raise CheckpointError(f"{path / _CONFIG}: describes no model that could be built.")
    with blaming(path / _CONFIG):
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        check_sizes(config, shapes, max_bytes, feature_extractor, guide is not None)
        model, made = rebuild(config, feature_extractor, guide, features)
        load_module_tensors(model, made, tensors)
        for name, tensor in model.state_dict().items():
            check_has_values(name, tensor)
    return Loaded(model.to(device), made.to(device))


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Make any error inside a CheckpointError that names the file whose content led to it."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        reason = f"has no {error}" if type(error) is KeyError else str(error)
        raise CheckpointError(f"{path}: {reason or type(error).__name__}") from error


def _is_ours(path: Path) -> bool:
    """Whether a directory was written here: it holds our files and no others."""
    if not _has_our_files(path):
        return False
    try:
        config = json.loads(read_regular(path / _CONFIG, MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.get("format") == "pyro_dak"


def _has_our_files(path: Path) -> bool:
    """Whether a directory holds files with our names, damaged or not, and no others."""
    names = {part.name for part in path.iterdir()} if path.is_dir() else set()
    if _CARD in names and not (path / _CARD).is_file():
        return False  # somebody else's
    return bool(names - {_CARD}) and names <= {_CONFIG, _MODEL, _TRAINER, _SUMS, _CARD}


def module_tensors(model: nn.Module, guide: nn.Module) -> dict[str, Tensor]:
    """The state of both, with the prefixes "model." and "guide.", as contiguous CPU copies."""
    return _cpu_copies(nn.ModuleDict({"model": model, "guide": guide}).state_dict())


def _cpu_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies on the CPU, as safetensors wants them."""
    return {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}


def load_module_tensors(model: nn.Module, guide: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Inverse of `module_tensors`; raises RuntimeError where names or shapes differ."""
    nn.ModuleDict({"model": model, "guide": guide}).load_state_dict(tensors)


def write_directory(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    trainer: Mapping[str, Tensor] | None = None,
    overwrite: bool = True,
) -> None:
    """Write a checkpoint directory whole or not at all; with `overwrite` it replaces one of ours.

    Raises:
        FileExistsError: if something stands at `path` that must not be replaced.
        OSError: naming `path`, if it cannot be written.
    """
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise ValueError(
                f"`{name}` holds NaN or infinite numbers. `{path}` is not written: a model with "
                "such weights is refused when it is loaded."
            )
    header = {"format": "pyro_dak", "format_version": FORMAT_VERSION}
    files = {
        _CONFIG: json.dumps(header | dict(config), indent=1, allow_nan=True).encode(),
        _MODEL: safetensors.torch.save(_cpu_copies(tensors)),
    }
    if trainer is not None:
        files[_TRAINER] = safetensors.torch.save(_cpu_copies(trainer))
    sums = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items()]
    files[_SUMS] = "".join(sums).encode()

    def write(temporary: Path) -> None:
        temporary.mkdir(exist_ok=True)
        kept = {_CARD: (path / _CARD).read_bytes()} if (path / _CARD).is_file() else {}
        for name, data in {**files, **kept}.items():
            (temporary / name).write_bytes(data)

    check_place(path, makes_parents=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, write, lambda: check_replaceable(path, overwrite))


def read_directory(path: Path, max_bytes: int = MAX_BYTES) -> Contents:
    """Read and verify a checkpoint directory with files of `max_bytes` bytes in all at most.

    A directory that is replaced meanwhile is read again, and one that a writer had moved away when
    it was killed is put back.

    Raises:
        CheckpointError: naming the file and what is wrong with it. Weights that are not finite are
            wrong, too.
    """
    return _read_again_if_replaced(path, lambda: _read_directory(path, max_bytes))


def read_checkpoint(path: Path, max_bytes: int = MAX_BYTES) -> Contents:
    """A checkpoint of a training run, read by `read_directory`, with entries of the right kinds."""
    contents = read_directory(path, max_bytes)
    state = contents.config.get("trainer")
    if state is None or contents.trainer is None:
        raise CheckpointError(f"{path}: is a saved model, not a checkpoint of a training run.")
    with blaming(path / _CONFIG):
        for name in ("step", "epoch", "batch", "num_data"):
            check_integer(name, state[name], minimum=0, maximum=2**53)
        check_history(state["rows"], state["best_epoch"])
        if not isinstance(state["settings"], dict):
            raise TypeError("`settings` is not a dictionary")
        if not isinstance(state["best_score"], int | float):
            raise TypeError("`best_score` is not a number")
    return contents


def check_history(rows: Any, best_epoch: Any) -> None:
    """Raise unless these are the rows of a `History`, numbers by name, and one of its epochs."""
    values = [value for row in rows for value in row.values()]
    if not isinstance(rows, list) or not all(isinstance(value, int | float) for value in values):
        raise TypeError("the history is not a list of rows with numbers by name")
    if best_epoch is not None:
        check_integer("best_epoch", best_epoch, minimum=1, maximum=max(1, len(rows)))


def _read_again_if_replaced(path: Path, read_fn: Callable[[], _Read]) -> _Read:
    for _ in range(_MAX_READS):
        _recover(path)
        before = _identity(path)
        try:
            if before is None:
                raise CheckpointError(f"{path}: no such directory.")
            return read_fn()
        except CheckpointError:
            if _identity(path) == before:
                raise
    raise CheckpointError(f"{path}: was replaced {_MAX_READS} times while it was being read.")


def _recover(path: Path) -> None:
    try:
        recover(path)
    except OSError as error:
        raise CheckpointError(str(error)) from error


def _identity(path: Path) -> tuple[int, ...] | None:
    """What tells a directory from the one that replaces it; None if there is no directory."""
    try:
        status = path.stat()
    except OSError:
        return None
    is_directory = stat.S_ISDIR(status.st_mode)
    return (status.st_dev, status.st_ino, status.st_mtime_ns) if is_directory else None


def _read_directory(path: Path, max_bytes: int) -> Contents:
    config, sums = _read_config(path / _CONFIG, max_bytes)
    tensors = _read_tensors(path / _MODEL, sums.get(_MODEL), max_bytes)
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise CheckpointError(f"{path / _MODEL}: `{name}` holds NaN or infinite numbers.")
    trainer = None
    if _TRAINER in sums:
        left = max_bytes - sum(tensor.nbytes for tensor in tensors.values())
        trainer = _read_tensors(path / _TRAINER, sums[_TRAINER], left)
    return Contents(config, tensors, trainer)


def _read_config(path: Path, max_bytes: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration, verified, and the checksums of all files by name."""
    data = _read_file(path, max_bytes // _JSON_EXPANSION)
    try:
        config = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: is not JSON, so it is damaged or foreign: {error}"
        ) from error
    if not isinstance(config, dict) or config.get("format") != "pyro_dak":
        raise CheckpointError(f"{path}: was not written by pyro_dak.")
    version = config.get("format_version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: has format version {version}, this library reads up to {FORMAT_VERSION}. "
            "Install a newer pyro_dak."
        )
    if version == 1:  # the checksum of the configuration covers all its other entries
        checksum, sums = config.pop("checksum", None), config.get("sha256")
        if not isinstance(sums, dict):
            raise CheckpointError(f"{path}: lists no checksum of {_MODEL}.")
        data = json.dumps(config, sort_keys=True, allow_nan=True).encode()
        sums = {_CONFIG: checksum, **sums}
    else:
        lines = _read_file(path.with_name(_SUMS), max_bytes // _JSON_EXPANSION)
        pairs = (line.partition("  ") for line in lines.decode(errors="replace").splitlines())
        sums = {name: checksum for checksum, _, name in pairs}
    _verify(path, data, sums.get(_CONFIG))
    return config, sums


def _read_tensors(path: Path, checksum: object, max_bytes: int) -> dict[str, Tensor]:
    data = _read_file(path, max_bytes)
    _verify(path, data, checksum)
    try:
        return safetensors.torch.load(data)
    except Exception as error:  # a header that lies makes it raise errors of several kinds
        raise CheckpointError(f"{path}: is not a safetensors file: {error}") from error


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinite numbers."""
    return bool(tensor.isfinite().all())


def _verify(path: Path, data: bytes, checksum: object) -> None:
    if hashlib.sha256(data).hexdigest() != checksum:
        raise CheckpointError(
            f"{path}: does not match its checksum ({len(data)} bytes read); it is truncated, "
            "altered or from another model."
        )


def _read_file(path: Path, max_bytes: int) -> bytes:
    try:
        return read_regular(path, max_bytes)
    except OSError as error:
        remedy = " Pass a larger `max_bytes` if you trust it." if error.errno == EFBIG else ""
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}.{remedy}") from error
