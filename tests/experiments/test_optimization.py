"""Bayesian optimisation: it runs, peers start from the same points, and the table has medians."""

import pytest

pytest.importorskip("botorch")
pytest.importorskip("botorch_community")

from experiments import optimization
from experiments.runs import read_runs
from tests.experiments.command import invoke

libraries = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@libraries
def test_optimization_runs_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(optimization, "_VBLL_EPOCHS", 2)
    output = invoke(optimization.main, "--quick", "--out", tmp_path)
    assert "SingleTaskGP" in output
    runs = read_runs(tmp_path)
    assert {run["config"]["model"] for run in runs} == set(optimization.MODELS)
    num_initial = optimization.PROBLEMS["branin"][1]
    first = {tuple(run["regrets"][:num_initial]) for run in runs}
    assert len(first) == 1  # all start from the same points
    for run in runs:
        assert len(run["regrets"]) == num_initial + 2
        assert run["regrets"] == sorted(run["regrets"], reverse=True)
        assert run["metrics"]["regret"] >= 0
    assert (tmp_path / "figures/regret.png").stat().st_size > 0


def test_the_table_has_medians_over_seeds():
    runs = []
    for seed, regret in enumerate((1.0, 2.0, 9.0)):
        job = optimization.make_job("branin", "DAK", seed)
        content = {"metrics": {"regret": regret, "seconds": 0.5}, "regrets": [regret]}
        runs.append({"experiment": "optimization", "config": job.config} | content)
    assert "| branin | 30 | DAK | 2 | 1.5 to 5.5 | 3 | 0.50 |" in optimization.table(runs)
