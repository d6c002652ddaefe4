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


def test_growth_is_drawn(tmp_path, monkeypatch):
    row = {"case": "complexity", "threads": 1, "sizes": [8, 16], "milliseconds_by_size": [1.0, 2.0]}
    row |= {"slope_of_time": 1.0, "slope_at_the_end": 1.0}
    growth = [
        row | {"setting": f"growth with {axis}", "name": name}
        for axis in ("M, training step", "N, prediction")
        for name in ("nn", "dak_cf")
    ]
    monkeypatch.setattr(bench, "measure", lambda *_: growth)
    invoke(bench.main, "--case", "complexity", "--threads", 1, "--out", tmp_path)
    assert (tmp_path / "figures" / "growth.png").stat().st_size > 5000
