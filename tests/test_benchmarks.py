import sys

import pytest
import torch

from benchmarks import activation, nuts, timing


@pytest.fixture
def _one_call_each(monkeypatch):
    """One repetition of one call on few rows: what is tested is that the benchmark runs."""

    def once(candidates, **_):
        return timing.time_side_by_side(candidates, repetitions=1, seconds_per_repetition=0.0)

    monkeypatch.setattr(activation, "time_side_by_side", once)
    monkeypatch.setattr(activation, "B", 8)
    monkeypatch.setattr(sys, "argv", ["benchmarks.activation", "--quick"])


@pytest.mark.usefixtures("_one_call_each")
def test_benchmark_prints_a_row_per_case_and_the_growth_with_nodes(capsys):
    activation.main()
    lines = capsys.readouterr().out.splitlines()
    assert "dense forward" in lines[1]
    assert [line.split("|")[1].strip() for line in lines[2:5]] == ["7", "1023", "63"]
    assert lines[-1].count("M=") == len(activation.LEVELS)


@pytest.mark.filterwarnings("ignore:.*r-hat.*:UserWarning")
def test_benchmark_of_nuts_compares_gradients_and_runs(capsys, monkeypatch):
    def once(candidates, **_):
        return timing.time_side_by_side(candidates, repetitions=1, seconds_per_repetition=0.0)

    monkeypatch.setattr(nuts, "time_side_by_side", once)
    monkeypatch.setattr(sys, "argv", ["benchmarks.nuts", "--rows", "30", "--draws", "4"])
    torch.set_default_dtype(torch.float32)
    nuts.main()
    output = capsys.readouterr().out
    assert "regression: 113 weights x 30 rows" in output
    assert output.count("times ours") == 6
    assert output.count("4 + 4 draws") == 2


def test_timing_is_the_median_and_half_the_range():
    timings = timing.time_side_by_side({"a": lambda: None}, repetitions=3)
    assert timings["a"].milliseconds > 0
    assert timings["a"].spread >= 0
