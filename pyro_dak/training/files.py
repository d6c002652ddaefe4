"""Files and directories that are written whole or not at all, by one writer at a time.

Whenever a writer is stopped, a reader finds what stood there before or what was written.
"""

import ctypes
import errno
import os
import re
import shutil
import stat
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from pyro_dak.training.locks import locked

__all__ = ["check_place", "read_regular", "recover", "remove", "remove_whole", "write_whole"]

# What may stand at a path, by the letter that `ls -l` shows for it.
_KINDS = {
    "-": "a regular file",
    "b": "a device",
    "c": "a device",
    "d": "a directory",
    "p": "a named pipe",
    "s": "a socket",
}
_WAIT = 10.0  # seconds for which a writer waits for another one


def write_whole(
    path: Path, write_fn: Callable[[Path], object], check_fn: Callable[[], object] = lambda: None
) -> None:
    """Write a file or a directory under a temporary name, flush it, and rename it to `path`.

    Symbolic links are followed. What is replaced keeps its mode, and its owner where the system
    allows it. If anything fails, what stood at `path` is left as it was.

    Args:
        path: the file or directory.
        write_fn: writes to the path that it is given. Where something is replaced, an empty file or
            directory stands there already, so that nobody else can read what is private.
        check_fn: raises if what stands at `path` must stay. It is called when no other process is
            writing there.

    Raises:
        OSError: naming `path`, if it cannot be written, if something other than a regular file or a
            directory stands there, or if another process goes on writing there.
    """
    check_place(path)
    target = _real(path)
    with _naming(path), _held(target):
        _settle(target)
        check_fn()
        temporary = _beside(target, "tmp")
        try:
            if target.is_dir():
                temporary.mkdir(mode=0o700)
            elif target.exists():
                temporary.touch(mode=0o600, exist_ok=False)
            write_fn(temporary)
            for part in [*temporary.rglob("*"), temporary]:
                _flush(part)
            _copy_modes(target, temporary)
            _install(temporary, target)
        finally:
            remove(temporary)


def check_place(path: Path, makes_parents: bool = False) -> None:
    """Raise an OSError if it is plain to see that nothing can be written at `path`.

    Devices, pipes and sockets are never replaced. The directory around must be there, unless it is
    to be made, and be writable.
    """
    kind = _kind(path)
    if kind not in (None, "-", "d"):
        raise FileExistsError(f"`{path}` is {_KINDS[kind]}, not a regular file; it stays as it is.")
    parent = _real(path).parent
    while makes_parents and not os.path.lexists(parent):
        parent = parent.parent
    if not parent.is_dir():
        problem = "is not a directory" if os.path.lexists(parent) else "does not exist"
        raise NotADirectoryError(f"`{path}` cannot be written: `{parent}` {problem}.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"`{path}` cannot be written: `{parent}` is not writable.")


def recover(path: Path) -> None:
    """Put back what a writer had moved away from `path` when it was killed."""
    target = _real(path)
    if os.path.lexists(target) or not (old := _leftovers(target, "old")):
        return
    try:
        with _held(target):
            _settle(target)
    except OSError as error:
        raise OSError(
            f"`{path}` was moved to `{old[0]}` by a writer that was stopped, and cannot be moved "
            f"back: {error}. Rename it by hand."
        ) from error


def remove_whole(path: Path) -> None:
    """Remove a directory, of which a reader never finds a part."""
    temporary = _beside(path, "tmp")
    os.rename(path, temporary)
    shutil.rmtree(temporary)


def read_regular(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file that has at most `max_bytes` bytes, or an OSError."""
    _check_regular(os.stat(path))  # to open a device may do something already
    with open(path, "rb", opener=_open_at_once) as file:
        status = os.fstat(file.fileno())
        _check_regular(status)
        if status.st_size > max_bytes:
            raise OSError(
                errno.EFBIG, f"it has {status.st_size} bytes, and only {max_bytes} may be read"
            )
        return file.read(status.st_size)


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting for the writer of a named pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _check_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS[stat.filemode(status.st_mode)[0]]
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file")


def _kind(path: Path) -> str | None:
    """The letter of `_KINDS` for what stands at a path, behind all links, or None for nothing."""
    try:
        return stat.filemode(os.stat(path).st_mode)[0]
    except (FileNotFoundError, NotADirectoryError):
        return None


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}-{uuid.uuid4().hex[:8]}")


def _leftovers(path: Path, kind: str) -> list[Path]:
    """What writers of `path` that were stopped have left beside it."""
    name = re.compile(rf"\.{re.escape(path.name)}\.{kind}-[0-9a-f]{{8}}")
    names = os.listdir(path.parent) if path.parent.is_dir() else []
    return [path.with_name(n) for n in names if name.fullmatch(n)]


def _held(path: Path) -> AbstractContextManager[None]:
    """The lock of those who write to `path`."""
    message = f"`{path}` is being written by another process. Wait for it, or use another name."
    return locked(path.with_name(f".{path.name}.lock"), message, _WAIT)


def _settle(path: Path) -> None:
    """Put back what was moved away from `path`, and remove what writers have left beside it."""
    if not os.path.lexists(path) and (old := _leftovers(path, "old")):
        os.rename(max(old, key=os.path.getmtime), path)
    for rubbish in _leftovers(path, "(tmp|old)"):
        remove(rubbish)


def _install(temporary: Path, path: Path) -> None:
    """Give the temporary file or directory its name, in one step where the system can."""
    if not path.is_dir():
        os.replace(temporary, path)
        _flush(path.parent)
        return
    old = temporary
    if not _exchange(temporary, path):  # then `recover` closes the gap between two renames
        old = _beside(path, "old")
        os.rename(path, old)
        try:
            os.rename(temporary, path)
        except BaseException:
            os.rename(old, path)
            raise
    _flush(path.parent)
    remove(old)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two paths in one step, or return False where the system cannot."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of linux/fcntl.h and linux/fs.h
    names = os.fsencode(first), os.fsencode(second)
    return rename is not None and rename(here, names[0], here, names[1], exchange) == 0


def _copy_modes(old: Path, new: Path) -> None:
    """Give a new file, or the files of a directory, the modes and owners of the old ones."""
    for part in [new, *new.rglob("*")] if old.exists() else []:
        with suppress(OSError):
            status = os.stat(old / part.relative_to(new))
            for owner in (-1, status.st_uid):  # a group is often allowed where an owner is not
                with suppress(OSError, AttributeError):
                    os.chown(part, owner, status.st_gid)
            os.chmod(part, stat.S_IMODE(status.st_mode))


def remove(path: Path) -> None:
    """Remove a file or a directory, as far as the system allows it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in what the system says, such as that the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # our own words, which name it
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
