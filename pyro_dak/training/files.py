"""Files and directories that are written whole or not at all."""

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, write_fn: Callable[[Path], object]) -> None:
    """Write a file or a directory under a temporary name, flush it, and rename it to `path`.

    A reader sees the old one, the new one or none, and never half of one. `write_fn` writes to the
    path that it is given. If it fails, what stood at `path` is left as it was.
    """
    unique = uuid.uuid4().hex[:8]
    temporary = path.with_name(f".{path.name}.tmp-{unique}")
    try:
        write_fn(temporary)
        for part in [*temporary.rglob("*"), temporary]:
            _flush(part)
        if path.is_dir():
            old = path.with_name(f".{path.name}.old-{unique}")
            os.rename(path, old)
            os.rename(temporary, path)
            shutil.rmtree(old)
        else:
            os.replace(temporary, path)
        _flush(path.parent)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Make a file, or the names in a directory, survive a power cut, where the system can."""
    try:
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
