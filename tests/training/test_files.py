"""Files and directories are written whole or not at all, and only where they may."""

import os
import resource
import socket
import stat
import threading
from pathlib import Path

import pytest

from pyro_dak.training import files
from pyro_dak.training.files import check_place, read_regular, recover, write_whole


def write_directory(text):
    def write(path):
        path.mkdir(exist_ok=True)
        (path / "part").mkdir()
        (path / "part" / "content").write_text(text)

    return write


def test_a_file_is_written_and_replaced(tmp_path):
    path = tmp_path / "table.csv"
    for text in ("old", "new"):
        write_whole(path, lambda temporary, text=text: temporary.write_text(text))
        assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_is_written_and_replaced(tmp_path):
    path = tmp_path / "model"
    for text in ("old", "new"):
        write_whole(path, write_directory(text))
        assert (path / "part" / "content").read_text() == text
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_failed_write_leaves_the_old_one_and_no_rubbish(tmp_path, kind):
    path = tmp_path / "thing"
    write = write_directory if kind == "directory" else lambda text: lambda p: p.write_text(text)
    content = path / "part" / "content" if kind == "directory" else path
    write_whole(path, write("old"))

    def fail(temporary):
        write("half")(temporary)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=rf"No space left on device: '{path}'"):
        write_whole(path, fail)
    assert content.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_the_system_refuses_names_the_file(tmp_path):
    path = tmp_path / "table.csv"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**22, limits[1]))
    try:
        with pytest.raises(OSError, match=rf"File too large: '{path}'"):
            write_whole(path, lambda temporary: temporary.write_bytes(bytes(2**23)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match=r"`.*no/table.csv` cannot be written: `.*no` does not exist"):
        write_whole(tmp_path / "no" / "table.csv", lambda temporary: None)
    path.touch()
    with pytest.raises(OSError, match=r"table.csv/x` cannot be written: .* is not a directory"):
        write_whole(path / "x", lambda temporary: None)


def test_a_place_that_is_not_writable_is_seen_before_the_work(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("os.access", lambda path, mode: asked.append(path))
    with pytest.raises(PermissionError, match=rf"`{tmp_path}/a/b` cannot .* is not writable"):
        check_place(tmp_path / "a" / "b", makes_parents=True)
    assert asked == [tmp_path]


def make_pipe(path):
    os.mkfifo(path)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))


def make_link_to_device(path):
    path.symlink_to(os.devnull)


@pytest.mark.parametrize("make", [make_pipe, make_socket, make_link_to_device])
def test_pipes_sockets_and_devices_are_not_replaced(tmp_path, make):
    path = tmp_path / "out"
    make(path)
    before = os.lstat(path)
    with pytest.raises(FileExistsError, match=r"out` is a (named pipe|socket|device), not a reg"):
        write_whole(path, lambda temporary: temporary.write_text("new"))
    assert os.path.samestat(os.lstat(path), before)
    assert stat.S_IFMT(os.lstat(path).st_mode) == stat.S_IFMT(before.st_mode)


def test_files_and_directories_do_not_replace_each_other(tmp_path):
    path = tmp_path / "thing"
    write_whole(path, write_directory("old"))
    with pytest.raises(IsADirectoryError, match="thing"):
        write_whole(path, lambda temporary: temporary.write_text("new"))
    assert (path / "part" / "content").read_text() == "old"
    other = tmp_path / "file"
    other.write_text("old")
    with pytest.raises(FileExistsError, match="file"):
        write_whole(other, write_directory("new"))
    assert other.read_text() == "old"


def test_what_is_replaced_keeps_its_mode_and_is_never_open_to_others(tmp_path):
    file, directory = tmp_path / "file", tmp_path / "directory"
    modes = {file: 0o600, directory: 0o750, directory / "part" / "content": 0o640}
    write_whole(file, lambda temporary: temporary.write_text("old"))
    write_whole(directory, write_directory("old"))
    for path, mode in modes.items():
        path.chmod(mode)
    seen = []

    def write(temporary):
        seen.append(stat.S_IMODE(temporary.stat().st_mode))
        if temporary.is_dir():
            write_directory("new")(temporary)
        else:
            temporary.write_text("new")

    write_whole(file, write)
    write_whole(directory, write)
    assert {path: stat.S_IMODE(path.stat().st_mode) for path in modes} == modes
    assert seen == [0o600, 0o700]
    assert file.read_text() == (directory / "part" / "content").read_text() == "new"


@pytest.mark.skipif(os.name == "nt" or os.getuid() != 0, reason="only root may change owners")
def test_what_is_replaced_keeps_its_owner(tmp_path):
    path = tmp_path / "file"
    path.touch()
    os.chown(path, 12, 34)
    write_whole(path, lambda temporary: temporary.write_text("new"))
    assert (path.stat().st_uid, path.stat().st_gid) == (12, 34)


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_followed_and_stays(tmp_path, exists):
    (tmp_path / "elsewhere").mkdir()
    link, target = tmp_path / "link", tmp_path / "elsewhere" / "file"
    if exists:
        target.write_text("old")
    link.symlink_to(target)
    write_whole(link, lambda temporary: temporary.write_text("new"))
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_directory_behind_a_link_is_replaced(tmp_path, can_exchange, monkeypatch):
    if not can_exchange:
        monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    write_whole(tmp_path / "real", write_directory("old"))
    (tmp_path / "link").symlink_to("real")
    write_whole(tmp_path / "link", write_directory("new"))
    assert (tmp_path / "real" / "part" / "content").read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]


def test_a_rename_that_fails_brings_the_old_directory_back(tmp_path, monkeypatch):
    path, rename, calls = tmp_path / "model", os.rename, []
    write_whole(path, write_directory("old"))

    def fail_once(first, second):
        calls.append(first)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        rename(first, second)

    monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    monkeypatch.setattr("os.rename", fail_once)
    with pytest.raises(OSError, match=f"Input/output error: '{path}'"):
        write_whole(path, write_directory("new"))
    assert (path / "part" / "content").read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_leftovers_are_put_back_or_removed_and_others_left_alone(tmp_path):
    path = tmp_path / "model"
    others = [".model.old-mine", ".model2.old-00000000", "model.tmp-00000000"]
    for name in [".model.old-01234567", ".model.tmp-89abcdef", ".model.lock", *others]:
        (tmp_path / name).write_text(name)
    recover(path)
    assert path.read_text() == ".model.old-01234567"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["model", *others])
    (tmp_path / ".model.old-01234567").write_text("older")
    write_whole(path, lambda temporary: temporary.write_text("new"))
    assert path.read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["model", *others])


def test_what_cannot_be_put_back_is_named(tmp_path, monkeypatch):
    (tmp_path / ".model.old-01234567").mkdir()

    def refuse(first, second):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("os.rename", refuse)
    with pytest.raises(OSError, match=r"moved to `.*\.model\.old-01234567`.*Read-only.*by hand"):
        recover(tmp_path / "model")


def test_writers_wait_for_each_other_and_give_up(tmp_path, monkeypatch):
    path, is_inside, may_end = tmp_path / "file", threading.Event(), threading.Event()
    monkeypatch.setattr(files, "_WAIT", 0.05)

    def slow(temporary):
        is_inside.set()
        may_end.wait()
        temporary.write_text("slow")

    thread = threading.Thread(target=write_whole, args=(path, slow))
    thread.start()
    is_inside.wait()
    with pytest.raises(BlockingIOError, match="is being written by another process"):
        write_whole(path, lambda temporary: temporary.write_text("fast"))
    monkeypatch.setattr(files, "_WAIT", 30)
    threading.Timer(0.05, may_end.set).start()
    write_whole(path, lambda temporary: temporary.write_text("last"))
    thread.join()
    assert path.read_text() == "last"


def test_the_check_is_made_when_no_other_writes(tmp_path):
    path, results = tmp_path / "file", []

    def only_once():
        if path.exists():
            raise FileExistsError("there")

    def work(text):
        try:
            write_whole(path, lambda temporary: temporary.write_text(text), only_once)
            results.append(text)
        except FileExistsError:
            results.append("refused")

    threads = [threading.Thread(target=work, args=(str(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == sorted([path.read_text(), *["refused"] * 3])


@pytest.mark.parametrize("make", [make_pipe, make_socket, make_link_to_device, Path.mkdir])
def test_only_regular_files_are_read(tmp_path, make):
    path = tmp_path / "weights"
    make(path)
    with pytest.raises(OSError, match=r"it is a .*, not a regular file"):
        read_regular(path, 100)


def test_a_file_is_read_within_its_limit(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"0123456789")
    assert read_regular(path, 10) == b"0123456789"
    with pytest.raises(OSError, match="it has 10 bytes, and only 9 may be read"):
        read_regular(path, 9)
    os.truncate(path, 2**40)  # it takes no room on the disk
    with pytest.raises(OSError, match=r"bytes, and only 9 may be read"):
        read_regular(path, 9)
