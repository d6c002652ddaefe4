"""The comparison of posteriors runs on a few rows."""

import pytest

import guides
from experiments import hmc
from experiments.runs import read_runs
from tests.experiments.command import invoke


@pytest.mark.parametrize("problem", hmc.PROBLEMS)
def test_hmc_runs_end_to_end(problem, tmp_path):
    output = invoke(hmc.main, "--quick", "--problem", problem, "--out", tmp_path)
    (content,) = read_runs(tmp_path)
    natural = {f"natural, {family}" for family in ("joint", "shared", "diagonal")}
    expected = {*guides.names(), *natural, "NUTS"} - {"natural"}
    expected |= {"exact"} if problem != "digits" else set()
    assert {row["posterior"] for row in content["rows"]} == expected
    assert (content["log_evidence"] is None) == (problem == "digits")
    assert (tmp_path / "figures" / f"{problem}-weights.png").stat().st_size > 0
    assert f"## {problem}" in (tmp_path / "table.md").read_text()
    assert "NUTS" in output
    assert "| NUTS |" in (tmp_path / "table.md").read_text()
