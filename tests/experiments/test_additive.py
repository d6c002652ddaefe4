"""The comparison of the additive estimators, end to end on a few rows."""

import numpy as np
import pytest

from experiments import additive
from experiments.runs import read_runs
from tests.experiments.command import invoke


def test_comparison_runs_resumes_and_writes_its_table(tmp_path):
    for _ in range(2):
        output = invoke(additive.main, "--quick", "--out", tmp_path)
    assert "4 of 4 runs are recorded already; 0 to make" in output
    runs = {(r["config"]["dataset"], r["config"]["model"]): r for r in read_runs(tmp_path)}
    assert np.isfinite(runs["diabetes", "dak_pairs"]["metrics"]["dak_pairs"]["nlpd"])
    for name in ("simulated", "simulated classes"):
        assert set(additive.FUNCTIONS) <= set(runs[name, "dak"]["metrics"])
    text = (tmp_path / "table.md").read_text()
    assert "coverage of 95 % bands, 1 seeds" in text


def make_run(name, split, rmse):
    job = additive.make_job("housing", name, split)
    return {"experiment": "additive", "config": job.config, "metrics": {name: {"rmse": rmse}}}


@pytest.mark.parametrize(("ours", "verdict"), [(1.01, "at most 1.02"), (1.1, "**above** 1.02")])
def test_summary_compares_means_with_the_peers(ours, verdict):
    runs = [make_run("dak", 0, ours), make_run("ebm", 0, 1.0)]
    assert additive.summary(runs) == [
        f"- housing: the RMSE of `dak` is {ours:.3f} times that of `ebm`, {verdict}."
    ]


@pytest.mark.parametrize("name", ["ebm", "ebm_pairs", "pygam"])
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_peers_learn(name):
    pytest.importorskip("pygam" if name == "pygam" else "interpret")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 2))
    model = additive.build(name, 0)
    model.fit(x, x[:, 0])
    assert np.mean((model.predict(x) - x[:, 0]) ** 2) < 0.1
