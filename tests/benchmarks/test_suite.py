import gzip
import importlib.util
import json
import sys

import pytest
import torch

from benchmarks import (
    activation,
    complexity,
    growth,
    nuts,
    parquet_rows,
    peers,
    suite,
    timing,
)


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


def test_benchmark_of_files_writes_them_once_and_fits_all_their_rows(tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(parquet_rows, "FILE_ROWS", 1000)
    for _ in range(2):
        parquet_rows.write_rows(tmp_path, 2500, 4)
        written = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(written) == 3
    run = parquet_rows.fit_rows(tmp_path, tmp_path, "natural", 256, progress=False)
    assert run["rows"] == 2500
    assert run["cpu_seconds"] > 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written


@pytest.mark.usefixtures("small_data")
def test_peers_that_are_not_installed_are_left_out_with_a_word(monkeypatch, capsys):
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(peers, "find_spec", lambda package: None)
    table = peers.run(repetitions=1, quick=True)
    assert {row["name"] for row in table} == {"nn", "dak_cf"}
    assert "vbll is not installed, so vbll is left out" in capsys.readouterr().out


def test_timing_is_the_median_and_half_the_range():
    timings = timing.time_side_by_side({"a": lambda: None}, repetitions=3)
    assert timings["a"].milliseconds > 0
    assert timings["a"].spread >= 0


def test_ratio_is_the_median_over_the_rounds():
    base, own = timing.Timing(2.0, 1.0, (1.0, 2.0, 4.0)), timing.Timing(4.0, 2.0, (3.0, 4.0, 4.0))
    assert own.ratio_to(base) == (2.0, 1.0)


def test_the_sizes_of_a_grid_are_its_points():
    levels, rows = (
        complexity.Case("M", "dak_cf", option, (3, 10)).sizes for option in ("level", "rows")
    )
    assert levels == (7, 1023)
    assert rows == (3, 10)


def test_processor_time_is_measured_by_its_own_clock():
    ticks = iter(range(100))
    timings = timing.time_side_by_side(
        {"a": lambda: None}, 3, seconds_per_repetition=0.0, clock=lambda: next(ticks)
    )
    assert timings["a"].milliseconds == 1000.0  # one tick to each round


def test_slope_is_the_power():
    assert growth.slope([1, 10, 100], [3.0, 3e2, 3e4]) == pytest.approx(2.0)


@pytest.fixture
def small_data(tmp_path, monkeypatch):
    """Two small tables where the benchmark looks for kin40k and protein."""
    (tmp_path / "uci").mkdir()
    for name in ("kin40k", "protein"):
        with gzip.open(tmp_path / "uci" / f"{name}.csv.gz", "wt") as text:
            for row in torch.randn(40, 3).tolist():
                text.write(",".join(map(str, row)) + "\n")
    monkeypatch.setenv("PYRO_DAK_DATA", str(tmp_path))


def is_installed(peer):
    return importlib.util.find_spec(peers.PACKAGES[peer]) is not None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("small_data")
@pytest.mark.parametrize(
    ("case", "names"),
    [
        (
            "training",
            {"bare network", "fit", "own loop", "nn", "dak_cf", "dak_mc", "dak_trace", "nn_svgp"},
        ),
        ("images", {"nn", "dak_jensen", "dak_mc"}),
        ("serving", {"nn", "network forward", "dak_cf M=7", "dak_cf M=63", "dak_cf M=1023"}),
        pytest.param("exporting", {"predict", "onnxruntime"}, marks=pytest.mark.slow),
        pytest.param("growth", {"dak_cf"}, marks=pytest.mark.slow),
        (
            "complexity",
            {"nn", "dak_cf", "dak_mc", "nn_svgp", "svdkl", "avdkl"},
        ),
        ("race", {"nn", "dak_cf", "dak_mc", "nn_svgp"}),
        ("peers", {"nn", "dak_cf", *filter(is_installed, peers.PACKAGES)}),
    ],
)
def test_every_case_runs_and_every_time_is_a_ratio_to_a_peer(case, names):
    torch.set_default_dtype(torch.float32)
    table = suite.run(case, torch.get_num_threads(), repetitions=1, quick=True)
    assert {row["name"] for row in table} == names
    assert {row["case"] for row in table} == {case}
    json.dumps(table, allow_nan=False)
    for row in table:
        assert "slope_of_time" in row or row["base"] in names
    assert suite.format_rows(table).count("\n") > len(table)
