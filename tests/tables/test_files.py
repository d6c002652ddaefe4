"""Tables as files. The command line's tests cover files that cannot be read."""

import pandas as pd
import pyarrow
import pytest
from pyarrow import parquet

from pyro_dak.tables.files import TableError, read_table, write_table

FRAME = pd.DataFrame({"a": [1.5, 2.5], "b": ["x", "ü"]})


@pytest.mark.parametrize("name", ["t.csv", "t.parquet", "t.PQ", "t"])
def test_a_written_table_is_read_back(name, tmp_path):
    write_table(FRAME, tmp_path / name, force=False)
    assert read_table(tmp_path / name).to_dict() == FRAME.to_dict()
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
