"""Models and checkpoints on disk, without pickle: a directory of safetensors and JSON.

    model.safetensors    the weights of model and guide
    trainer.safetensors  the state of optimisers and random numbers, in checkpoints of `fit` only
    config.json          what to build
    SHA256SUMS           the checksums of the other files, in the format of `sha256sum`

A reader sees the old directory, the new one or none, and never half of one. Directories of format
version 1, which have their checksums in config.json, are read too.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from pyro_dak.model.dak import DAK
from pyro_dak.training.describe import describe, rebuild
from pyro_dak.training.files import write_whole

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "Loaded",
    "check_replaceable",
    "load",
    "load_module_tensors",
    "module_tensors",
    "read_directory",
    "save",
    "write_directory",
]

FORMAT_VERSION = 2
_CONFIG, _MODEL, _TRAINER = "config.json", "model.safetensors", "trainer.safetensors"
_SUMS = "SHA256SUMS"
_NAME = re.compile(r"step-\d{9}")
_TEMPORARY = re.compile(r"\.step-\d{9}\.(tmp|old)-[0-9a-f]{8}")


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


@dataclass(frozen=True)
class Checkpoints:
    """Where the checkpoints of a run go, how many epochs apart, and how many are kept."""

    directory: Path
    every: int = 1
    keep_last: int = 2

    @staticmethod
    def newest(path: Path) -> Path:
        """The newest checkpoint in a directory of them, or the directory if it is one itself."""
        if (path / _CONFIG).exists():
            return path
        found = Checkpoints.found(path)
        if not found:
            raise CheckpointError(f"{path}: holds no checkpoint.")
        return found[-1]

    @staticmethod
    def found(directory: Path) -> list[Path]:
        """The checkpoints in a directory, oldest first; other things in it do not count."""
        named = sorted(p for p in directory.glob("step-*") if _NAME.fullmatch(p.name))
        return [path for path in named if _is_ours(path)]

    def prune(self) -> None:
        """Remove all but the last checkpoints, and what an interrupted write has left behind."""
        for old in self.found(self.directory)[: -self.keep_last]:
            shutil.rmtree(old)
        for stale in self.directory.glob(".step-*"):
            if _TEMPORARY.fullmatch(stale.name):
                shutil.rmtree(stale, ignore_errors=True)


def save(
    model: DAK, guide: nn.Module, path: str | os.PathLike[str], overwrite: bool = False
) -> Path:
    """Write model and guide to the directory `path`, and return that path.

    An extractor made of the usual layers is stored as an architecture, and any other one as weights
    only. An existing directory is replaced only with `overwrite`, and only if it is a saved model.
    """
    path = Path(path)
    check_replaceable(path, overwrite)
    write_directory(path, describe(model, guide), module_tensors(model, guide))
    return path


def check_replaceable(path: Path, overwrite: bool, option: str = "overwrite=True") -> None:
    """Raise unless a model may be written to `path`; `option` allows a user to replace one."""
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
) -> Loaded:
    """Model and guide from a directory written by `save`, on `device`, in eval mode.

    Args:
        path: the directory.
        feature_extractor: a network of the stored architecture, where that was not stored.
        guide: a function from the model to a guide, where the guide is of a class of its own.
        device: the device to put them on.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
    """
    path = Path(path)
    config, tensors, _ = read_directory(path)
    if config.get("model") is None:
        raise CheckpointError(f"{path / _CONFIG}: describes no model that could be built.")
    try:
        model, made = rebuild(config, feature_extractor, guide)
        load_module_tensors(model, made, tensors)
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path / _CONFIG}: {error}") from error
    return Loaded(model.to(device), made.to(device))


def _is_ours(path: Path) -> bool:
    """Whether a directory was written here: it holds our files and no others."""
    if not path.is_dir() or {p.name for p in path.iterdir()} - {_CONFIG, _MODEL, _TRAINER, _SUMS}:
        return False
    try:
        config = json.loads((path / _CONFIG).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("format") == "pyro_dak"


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
) -> None:
    """Write a checkpoint directory whole or not at all; an existing one is replaced."""
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
        temporary.mkdir()
        for name, data in files.items():
            (temporary / name).write_bytes(data)

    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, write)


def read_directory(path: Path) -> Contents:
    """Read and verify a checkpoint directory; raises CheckpointError."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory.")
    config, sums = _read_config(path / _CONFIG)
    tensors = _read_tensors(path / _MODEL, sums.get(_MODEL))
    trainer = _read_tensors(path / _TRAINER, sums[_TRAINER]) if _TRAINER in sums else None
    return Contents(config, tensors, trainer)


def _read_config(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration, verified, and the checksums of all files by name."""
    data = _read_file(path)
    try:
        config = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: is not JSON, so it is damaged or foreign: {error}"
        ) from error
    if not isinstance(config, dict) or config.get("format") != "pyro_dak":
        raise CheckpointError(f"{path}: was not written by pyro_dak.")
    version = config.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
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
        lines = _read_file(path.with_name(_SUMS)).decode(errors="replace").splitlines()
        sums = {name: checksum for checksum, _, name in (line.partition("  ") for line in lines)}
    _verify(path, data, sums.get(_CONFIG))
    return config, sums


def _read_tensors(path: Path, checksum: object) -> dict[str, Tensor]:
    data = _read_file(path)
    _verify(path, data, checksum)
    try:
        return safetensors.torch.load(data)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: is not a safetensors file: {error}") from error


def _verify(path: Path, data: bytes, checksum: object) -> None:
    if hashlib.sha256(data).hexdigest() != checksum:
        raise CheckpointError(
            f"{path}: does not match its checksum ({len(data)} bytes read); it is truncated, "
            "altered or from another model."
        )


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from error
