"""The comparison of epochs runs on a few rows."""

import pytest

from experiments import cost
from experiments.runs import read_runs
from tests.experiments.command import invoke


# GPyTorch: torch.jit at import, jitter and float32 on tiny data.
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_epochs_are_timed_for_every_candidate_and_set(tmp_path):
    arguments = ("--dataset", "diabetes", "--rows", 32, "--repetitions", 1, "--out", tmp_path)
    output = invoke(cost.main, *arguments)
    (run,) = read_runs(tmp_path)
    assert list(run["seconds"]) == list(cost.CANDIDATES)
    assert all(value > 0 for value in run["seconds"].values())
    assert "diabetes" in output
    row = (tmp_path / "table.md").read_text().splitlines()[-1].split("|")
    assert row[1].strip() == "diabetes"
    assert float(row[3]) == 1  # DAK-CF to itself
