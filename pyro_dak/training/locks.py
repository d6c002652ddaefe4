"""Locks between processes, so that two of them do not write to one place at the same time.

The operating system holds the lock and frees it when its process ends, however it ends. A lock file
that was left behind locks nothing, so that there are no stale locks.
"""

import errno
import functools
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["locked"]

# What the system says of a lock that another process holds; of others it says that it has no locks.
_HELD = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
_descriptors: set[int] = set()  # of the locks that this process holds

if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def locked(path: Path, message: str, wait: float = 0.0) -> Iterator[None]:
    """Hold the lock file `path`, as one holder at a time can; it is removed at the end.

    Threads exclude each other too. Where the file system has no locks, it warns and goes on.

    Raises:
        BlockingIOError: with this message, if another holds the lock and does not let it go within
            `wait` seconds.
    """
    deadline = time.monotonic() + wait
    while (descriptor := _try_lock(path)) is None:
        if time.monotonic() >= deadline:
            raise BlockingIOError(message)
        time.sleep(0.01)
    _leave_locks_to_parents()
    _descriptors.add(descriptor)
    try:
        yield
    finally:
        if descriptor in _descriptors:  # not in a process that was forked meanwhile
            _descriptors.remove(descriptor)
            with suppress(OSError):  # Windows cannot remove a file that is open
                path.unlink()
            os.close(descriptor)


def _try_lock(path: Path) -> int | None:
    """The descriptor of the locked file, or None if another holds the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    is_locked = False
    try:
        _lock(descriptor)
        # The last holder has removed its file: a lock on that one is worth nothing.
        is_locked = os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in _HELD:
            warnings.warn(
                f"{path.parent} is on a file system without locks ({error.strerror}). Let only "
                "one process at a time write there.",
                stacklevel=4,
            )
            is_locked = True
    finally:
        if not is_locked:
            os.close(descriptor)
    return descriptor if is_locked else None


@functools.cache
def _leave_locks_to_parents() -> None:
    """Let forked processes, such as those of data loaders, close the locks they inherit.

    They would hold a lock for as long as they outlive a parent that was killed.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_close_locks)


def _close_locks() -> None:
    while _descriptors:
        os.close(_descriptors.pop())
