"""The benchmarks of the estimators run; what they measure is not asserted."""

import sys

import pytest
import torch

from benchmarks import deep_ensembles, ensembles, million_rows


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


def test_million_rows_prints_memory_of_fit_and_predict(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks.million_rows", "--rows", "60", "--columns", "2"])
    million_rows.main()
    table, fit, predict = capsys.readouterr().out.splitlines()
    assert table.startswith("60 x 2")
    assert "GB" in fit
    assert "rows/s" in predict


def test_ensembles_prints_a_row_per_size(monkeypatch, capsys):
    arguments = ["benchmarks.ensembles", "--batch-size", "8", "--steps", "1"]
    monkeypatch.setattr(sys, "argv", arguments)
    ensembles.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == [str(n) for n in ensembles.SIZES]


def test_deep_ensembles_prints_a_row_for_each_of_them(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks.deep_ensembles", "--rows", "60", "--epochs", "1"])
    deep_ensembles.main()
    lines = capsys.readouterr().out.splitlines()
    names = [line.split("|")[1].strip() for line in lines[2:]]
    assert names == ["DAKRegressor()", "five networks, one by one", "five networks, batched"]
