"""One writer at a time: locks that end with their process, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from pyro_dak.training.locks import locked

# Holds the lock, forks a child that stays, and says so.
HOLD = """
import os, sys, time
from pathlib import Path
from pyro_dak.training.locks import locked
with locked(Path(sys.argv[1]), "held"):
    child = os.fork()
    if child:
        print(child, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / ".lock"


def test_a_lock_has_one_holder_and_leaves_nothing(path):
    with locked(path, "held"), pytest.raises(BlockingIOError, match="held"):
        with locked(path, "held"):
            pass
    with locked(path, "held"):
        assert path.exists()
    assert not path.exists()


def test_a_file_that_was_left_behind_locks_nothing(path):
    path.touch()
    with locked(path, "held"):
        pass
    assert not path.exists()


def test_threads_wait_for_each_other(path):
    inside, most = 0, 0

    def work():
        nonlocal inside, most
        for _ in range(5):
            with locked(path, "held", wait=30):
                inside += 1
                most = max(most, inside)
                time.sleep(1e-3)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert not path.exists()


def test_a_lock_ends_with_its_process_even_if_children_live_on(path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE)
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(BlockingIOError), locked(path, "held"):
            pass
        holder.kill()
        holder.wait()
        os.kill(child, 0)  # it lives
        with locked(path, "held"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()


def test_a_link_is_not_followed(path, tmp_path):
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"), locked(path, "held"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_system_without_locks_is_told_of(path, monkeypatch):
    def no_locks(descriptor):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("pyro_dak.training.locks._lock", no_locks)
    with pytest.warns(UserWarning, match=r"without locks \(No locks available\)"):
        with locked(path, "held"):
            pass
