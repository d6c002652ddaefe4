"""Timings are recorded as runs, the newest of a case in the table."""

from experiments import bench
from experiments.runs import read_runs
from tests.experiments.command import invoke


def rows(ratio):
    row = {"case": "training", "threads": 1, "setting": "M=7", "name": "dak_cf"}
    return [row | {"milliseconds": 2.0, "ratio": ratio, "base": "nn"}]


def test_cases_are_measured_again_and_the_newest_counts(tmp_path, monkeypatch):
    arguments = ("--case", "training", "--threads", 1, "--out", tmp_path)
    for ratio in (1.5, 2.5):
        monkeypatch.setattr(bench, "measure", lambda *_, ratio=ratio: rows(ratio))
        output = invoke(bench.main, *arguments)
    assert "dak_cf" in output
    (run,) = read_runs(tmp_path)
    assert run["rows"][0]["ratio"] == 2.5
    assert (
        "| training | 1 | M=7 | dak_cf | 2.00 | 2.50 | nn |" in (tmp_path / "table.md").read_text()
    )
