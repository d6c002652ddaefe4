"""Active learning: it runs on a few rows, strategies share their start, areas are means."""

import pytest
import torch

from experiments import active
from experiments.runs import read_runs
from tests.experiments.command import invoke


@pytest.fixture
def small(monkeypatch):
    """Two little problems in the place of the data sets."""

    def load(name, seed):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(120, 3, generator=generator, dtype=torch.float64)
        y = torch.sin(x[:, :1])
        y = (y[:, 0] > 0).long() if name == "mnist" else y
        return active.Data(x[:90], y[:90], x[90:], y[90:])

    monkeypatch.setattr(active, "load", load)


@pytest.mark.usefixtures("small")
def test_active_learning_runs_end_to_end(tmp_path):
    output = invoke(active.main, "--quick", "--out", tmp_path)
    assert "MC dropout" in output
    runs = read_runs(tmp_path)
    assert len(runs) == len(active.DATASETS) * len(active.STRATEGIES)
    for run in runs:
        assert len(run["errors"]) == 2
        assert run["metrics"]["area"] == pytest.approx(sum(run["errors"]) / 2)
    assert (tmp_path / "figures/curves.png").stat().st_size > 0


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["energy", "mnist"])
@pytest.mark.parametrize("strategy", list(active.STRATEGIES))
def test_new_rows_had_no_label(name, strategy):
    data, labelled = active.load(name, 0), torch.arange(20)
    error, rows = active.STRATEGIES[strategy](data, labelled, 10, 0)
    assert error >= 0
    assert len(set(rows.tolist())) == 10
    assert not set(rows.tolist()) & set(labelled.tolist())


def test_differences_to_dak_are_taken_within_seeds():
    areas = {"DAK": {0: 0.1, 1: 0.5, 2: 0.9}, "NN, random": {1: 0.7, 0: 0.2}}
    runs = [
        {
            "config": {"dataset": "energy", "model": model, "seed": seed},
            "metrics": {"area": area, "error": 0.1},
        }
        for model, values in areas.items()
        for seed, area in values.items()
    ]
    (row,) = [line for line in active.table(runs).splitlines() if "of 2" in line]
    assert "-0.1500 ± 0.0500" in row
    assert "2 of 2" in row
