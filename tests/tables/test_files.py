"""Tables as files. The command line's tests cover files that cannot be read."""

import os
import resource
import stat
import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow
import pytest
from pyarrow import parquet

from pyro_dak.tables.files import TableError, read_table, write_table

FRAME = pd.DataFrame({"a": [1.5, 2.5], "b": ["x", "ü"]})


@pytest.mark.parametrize("name", ["t.csv", "t.parquet", "t.PQ", "t"])
def test_a_written_table_is_read_back(name, tmp_path):
    write_table(FRAME, tmp_path / name, force=False)
    found, is_text = read_table(tmp_path / name), "." not in name or name.endswith("csv")
    assert found.to_dict("list") == (FRAME.astype(str) if is_text else FRAME).to_dict("list")
    with pytest.raises(TableError, match="--force"):
        write_table(FRAME, tmp_path / name, force=False)
    write_table(FRAME[:1], tmp_path / name, force=True)
    assert len(read_table(tmp_path / name)) == 1


def test_repeated_names_in_parquet_are_refused(tmp_path):
    parquet.write_table(pyarrow.table([[1], [2]], names=["a", "a"]), tmp_path / "t.parquet")
    with pytest.raises(TableError, match="cannot be read as Parquet"):
        read_table(tmp_path / "t.parquet")


def test_a_table_is_replaced_completely_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "t.csv"
    write_table(FRAME, path, force=False)

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_table(FRAME[:1], path, force=True)
    assert len(read_table(path)) == 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipe_is_not_replaced_and_a_private_table_stays_private(tmp_path):
    pipe, table = tmp_path / "pipe.csv", tmp_path / "t.csv"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="is a named pipe, not a regular file"):
        write_table(FRAME, pipe, force=True)
    assert pipe.is_fifo()
    table.touch(mode=0o600)
    write_table(FRAME, table, force=True)
    assert stat.S_IMODE(table.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_a_disk_that_is_full_is_told_of_with_the_name_of_the_file(tmp_path, name):
    path = tmp_path / name
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**22, limits[1]))
    try:
        with pytest.raises(OSError, match=rf"(?i)file too large.*{name}"):
            write_table(pd.DataFrame(np.random.default_rng(0).random((2**17, 8))), path, force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_cells_are_text_as_it_stands_there_with_the_numbers_of_their_lines(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text('a,b\n001,x\n\n"1\n2", 1.50 \nNA,\n', encoding="utf-8")
    table = read_table(path)
    assert table.to_dict("list") == {"a": ["001", "1\n2", None], "b": ["x", " 1.50 ", None]}
    assert (table.index.name, table.index.tolist()) == ("line", [2, 4, 6])


def test_a_column_without_a_name_has_that_of_pandas(tmp_path):
    FRAME.to_csv(tmp_path / "t.csv")
    assert list(read_table(tmp_path / "t.csv")) == ["Unnamed: 0", "a", "b"]
    (tmp_path / "t.csv").write_text(",Unnamed: 0\n1,2\n")
    with pytest.raises(TableError, match="several columns called `Unnamed: 0`"):
        read_table(tmp_path / "t.csv")


def test_an_empty_column_that_only_some_lines_have_is_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,2,\n3,4\n")
    with pytest.raises(TableError, match="line 3 has 2 columns, the header has 2 and the lines be"):
        read_table(path)
    path.write_text("a,b\n1,2,\n3,4,5\n")
    with pytest.raises(TableError, match="line 3 has 3 columns"):
        read_table(path)


def test_a_pipe_is_read_and_a_device_is_not(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("a,b\n1,2\n",))
    writer.start()
    assert read_table(tmp_path / "pipe").to_dict("list") == {"a": ["1"], "b": ["2"]}
    writer.join()
    with pytest.raises(TableError, match="is not a file"):
        read_table(Path("/dev/null"))


def test_whole_numbers_and_booleans_of_parquet_stay_what_they_are(tmp_path):
    columns = {"i": [2**62 + 1, None], "b": [True, None], "u": [2**64 - 1, None], "f": [0.5, None]}
    types = [pyarrow.int64(), pyarrow.bool_(), pyarrow.uint64(), pyarrow.float32()]
    table = pyarrow.table(columns, schema=pyarrow.schema(zip(columns, types, strict=True)))
    parquet.write_table(table, tmp_path / "t.parquet")
    found = read_table(tmp_path / "t.parquet")
    assert [str(kind) for kind in found.dtypes] == ["Int64", "boolean", "UInt64", "float32"]
    assert (found["i"][0], found["u"][0]) == (2**62 + 1, 2**64 - 1)
