"""The coverage of intervals on simulated tables, end to end on a few rows."""

import numpy as np
import pytest

from experiments import coverage
from experiments.runs import read_runs
from tests.experiments.command import invoke


def test_coverage_runs_resumes_and_writes_its_table(tmp_path):
    for _ in range(2):
        output = invoke(coverage.main, "--quick", "--out", tmp_path)
    assert "3 of 3 runs are recorded already; 0 to make" in output
    for run in read_runs(tmp_path):
        assert 0 <= run["metrics"]["dak"]["coverage_50"] <= run["metrics"]["dak"]["coverage_95"]
    assert (tmp_path / "table.md").exists()


@pytest.mark.parametrize("noise", coverage.NOISES)
def test_simulated_noise_has_mean_zero_and_the_width_that_it_should_have(noise):
    x, y = coverage.simulate(100_000, noise, seed=0)
    error = y - (x[:, 0] + np.sin(2 * x[:, 1]) + 0.5 * x[:, 2] * x[:, 3])
    scale = {"gaussian": 1.0, "heteroscedastic": 0.6 * np.exp(0.7 * x[:, 4]), "heavy-tailed": 0.6}
    share = {"heavy-tailed": 0.608997}.get(noise, 0.682689)  # within one scale of the median
    found = np.mean(np.abs(error) < scale[noise])
    assert abs(found - share) < 4 * np.sqrt(share * (1 - share) / 100_000)
    assert abs(np.mean(error > 0) - 0.5) < 4 * np.sqrt(0.25 / 100_000)
