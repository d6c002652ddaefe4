"""Files and directories are written whole or not at all."""

import pytest

from pyro_dak.training.files import write_whole


def write_directory(text):
    def write(path):
        path.mkdir()
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
    write = write_directory("half") if kind == "directory" else lambda p: p.write_text("half")
    path.write_text("old")

    def fail(temporary):
        write(temporary)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_whole(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
