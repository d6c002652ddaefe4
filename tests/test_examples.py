import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run_example(name, *arguments):
    # Old packages meet newer ones, which tell what they will drop; some tell it as UserWarning too.
    warnings = ["-W", "error::UserWarning", "-W", "ignore::DeprecationWarning"]
    return subprocess.run(
        [sys.executable, *warnings, f"examples/{name}", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_svi_script_trains_with_both_guides():
    run = run_example("svi_script.py", "40")
    assert run.returncode == 0, run.stderr
    found = re.findall(r"(\w+): ELBO (-?[\d.]+) nats per row, RMSE ([\d.]+)", run.stdout)
    assert [name for name, _, _ in found] == ["AutoNormal", "MeanFieldGuide"]
    assert all(float(rmse) < 0.9 for _, _, rmse in found)


def test_svi_script_is_short():
    lines = (ROOT / "examples" / "svi_script.py").read_text().splitlines()
    assert len(lines) <= 45


def test_bandits_beat_chance():
    run = run_example("bandit.py", "120")
    assert run.returncode == 0, run.stderr
    found = re.findall(r"(\w+): regret ([\d.]+) in 120 rounds, ([\d.]+) by chance", run.stdout)
    assert [name for name, _, _ in found] == ["wheel", "flowers"]
    assert float(found[1][1]) < 0.7 * float(found[1][2])


def test_monitoring_sees_the_drift_and_learning_follows_it(tmp_path):
    run = run_example("monitoring.py", "12", str(tmp_path / "figure.png"))
    assert run.returncode == 0, run.stderr
    found = re.findall(r"(.+): ([\d.]+) at first, ([\d.]+) at last", run.stdout)
    values = {name: (float(first), float(last)) for name, first, last in found}
    assert values["novelty"][0] > 0.25
    assert values["novelty"][1] < 0.2
    assert values["PIT, left alone"][1] > 0.9
    assert values["PIT, keeps learning"][1] < values["PIT, left alone"][1]
    assert (tmp_path / "figure.png").stat().st_size > 0


@pytest.mark.parametrize(("name", "library"), [
    ("lightning_module", "lightning"), ("hugging_face", "transformers")
])  # fmt: skip
def test_a_head_learns_in_the_loop_of_another_library(name, library):
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    run = run_example(f"{name}.py", "6")
    assert run.returncode == 0, run.stderr
    ((accuracy, nll),) = re.findall(r"accuracy ([\d.]+), NLL ([\d.]+)", run.stdout)
    assert float(accuracy) > 0.8
    assert float(nll) < 0.6
