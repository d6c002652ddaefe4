"""Saving and loading without pickle: a directory of safetensors and JSON, checksummed and atomic.

    model.safetensors    weights of model and guide
    trainer.safetensors  optimiser and random state, only in checkpoints of `fit`
    config.json          what to build, sha256 of the other files and of itself

A directory is written under a temporary name, flushed to disk and renamed into place, so that a
reader sees the old one, the new one or none, and never half of one.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from pyro_dak.model.dak import DAK
from pyro_dak.training.describe import (
    build_guide,
    build_model,
    describe_guide,
    describe_model,
    set_up_guide,
)

__all__ = [
    "CheckpointError",
    "Loaded",
    "describe",
    "is_ours",
    "load",
    "load_module_tensors",
    "module_tensors",
    "read_directory",
    "save",
    "write_directory",
]

FORMAT_VERSION = 1
_CONFIG, _MODEL, _TRAINER = "config.json", "model.safetensors", "trainer.safetensors"


class CheckpointError(RuntimeError):
    """A file that cannot be read as what it should be; the message names file and problem."""


class Loaded(NamedTuple):
    """What `load` returns."""

    model: DAK
    guide: nn.Module


class Contents(NamedTuple):
    """A directory as read and verified."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    trainer: dict[str, Tensor] | None


def save(
    model: DAK, guide: nn.Module, path: str | os.PathLike[str], overwrite: bool = False
) -> Path:
    """Write model and guide to the directory `path`; returns it.

    Args:
        model: its extractor is stored as an architecture if made of the usual layers, else as
            weights only.
        guide: any guide.
        path: a new directory; an existing one is replaced only with `overwrite`, and only if it
            was written by this function.
        overwrite: whether an existing model may be replaced.
    """
    path = Path(path)
    if path.exists():
        if not overwrite:
            raise FileExistsError(f"`{path}` exists; pass overwrite=True to replace it.")
        if not is_ours(path):
            raise FileExistsError(f"`{path}` is not a saved model; it is left as it is.")
    write_directory(path, describe(model, guide), module_tensors(model, guide))
    return path


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
        device: where to put them.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
    """
    path = Path(path)
    config, tensors, _ = read_directory(path)
    if config.get("model") is None:
        raise CheckpointError(f"{path / _CONFIG}: describes no model that could be built.")
    try:
        dtype = _dtype(config["dtype"])
        shape = config["input_shape"]
        example = None if shape is None else torch.zeros(2, *shape, dtype=dtype)
        with torch.random.fork_rng(devices=[]):
            model = build_model(config["model"], feature_extractor).to(dtype).eval()
            model.input_shape = None if shape is None else tuple(shape)
            if guide is None:
                made = build_guide(config["guide"], model, example)
            else:
                made = guide(model)
                if example is not None:
                    set_up_guide(made, model, example)
        made.to(dtype)
        load_module_tensors(model, made, tensors)
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path / _CONFIG}: {error}") from error
    return Loaded(model.to(device).eval(), made.to(device).eval())


def is_ours(path: Path) -> bool:
    """Whether a directory was written here: our files and no others."""
    if not path.is_dir() or {p.name for p in path.iterdir()} - {_CONFIG, _MODEL, _TRAINER}:
        return False
    try:
        config = json.loads((path / _CONFIG).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("format") == "pyro_dak"


def describe(model: DAK, guide: nn.Module) -> dict[str, Any]:
    """What `load` needs to know of a model and its guide."""
    return {
        "model": describe_model(model),
        "guide": describe_guide(guide),
        "dtype": str(model.layer.log_unit_scale.dtype).removeprefix("torch."),
        "input_shape": model.input_shape,
    }


def module_tensors(model: nn.Module, guide: nn.Module) -> dict[str, Tensor]:
    """State of both, by "model." and "guide." names, as contiguous CPU copies."""
    states = {"model": model.state_dict(), "guide": guide.state_dict()}
    return {
        f"{prefix}.{name}": tensor.detach().cpu().clone().contiguous()
        for prefix, state in states.items()
        for name, tensor in state.items()
    }


def load_module_tensors(model: nn.Module, guide: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Inverse of `module_tensors`; raises RuntimeError where names or shapes differ."""
    for prefix, module in (("model.", model), ("guide.", guide)):
        state = {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        module.load_state_dict(state)


def write_directory(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    trainer: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a checkpoint directory atomically; an existing one is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unique = uuid.uuid4().hex[:8]
    temporary = path.with_name(f".{path.name}.tmp-{unique}")
    temporary.mkdir()
    try:
        files = {_MODEL: safetensors.torch.save(dict(tensors))}
        if trainer is not None:
            files[_TRAINER] = safetensors.torch.save(dict(trainer))
        header = {
            "format": "pyro_dak",
            "format_version": FORMAT_VERSION,
            "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        }
        files[_CONFIG] = _dump_config(header | dict(config))
        for name, data in files.items():
            _write_file(temporary / name, data)
        _flush_directory(temporary)
        if path.exists():
            old = path.with_name(f".{path.name}.old-{unique}")
            os.rename(path, old)
            os.rename(temporary, path)
            shutil.rmtree(old)
        else:
            os.rename(temporary, path)
        _flush_directory(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_directory(path: Path) -> Contents:
    """Read and verify a checkpoint directory; raises CheckpointError."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory.")
    config = _load_config(path / _CONFIG)
    sums = config.get("sha256")
    if not isinstance(sums, dict) or _MODEL not in sums:
        raise CheckpointError(f"{path / _CONFIG}: lists no checksum of {_MODEL}.")
    tensors = _read_tensors(path / _MODEL, sums[_MODEL])
    trainer = _read_tensors(path / _TRAINER, sums[_TRAINER]) if _TRAINER in sums else None
    return Contents(config, tensors, trainer)


def _dump_config(config: dict[str, Any]) -> bytes:
    """JSON with a checksum of the rest as its first entry."""
    body = json.dumps(config, sort_keys=True, allow_nan=True)
    checksum = hashlib.sha256(body.encode()).hexdigest()
    return json.dumps({"checksum": checksum} | json.loads(body), indent=1).encode()


def _load_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(_read_file(path).decode())
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
    checksum = config.pop("checksum", None)
    body = json.dumps(config, sort_keys=True, allow_nan=True)
    if checksum != hashlib.sha256(body.encode()).hexdigest():
        raise CheckpointError(f"{path}: does not match its checksum; it was altered or damaged.")
    return config


def _read_tensors(path: Path, checksum: str) -> dict[str, Tensor]:
    data = _read_file(path)
    if hashlib.sha256(data).hexdigest() != checksum:
        raise CheckpointError(
            f"{path}: does not match its checksum in {_CONFIG} ({len(data)} bytes read); it is "
            "truncated, altered or from another model."
        )
    try:
        return safetensors.torch.load(data)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: is not a safetensors file: {error}") from error


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from error


def _write_file(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush_directory(path: Path) -> None:
    """Make renames inside `path` survive a power cut, where the system can."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _dtype(name: object) -> torch.dtype:
    known = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
    if name not in known:
        raise ValueError(f"unknown dtype {name!r}; known are {', '.join(known)}")
    return known[name]
