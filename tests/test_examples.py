import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def output_of(name, *arguments):
    """What an example prints."""
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", f"examples/{name}", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_svi_script_trains_with_both_guides():
    output = output_of("svi_script.py", 40)
    found = re.findall(r"(\w+): ELBO (-?[\d.]+) nats per row, RMSE ([\d.]+)", output)
    assert [name for name, _, _ in found] == ["AutoNormal", "MeanFieldGuide"]
    assert all(float(rmse) < 0.9 for _, _, rmse in found)


def test_svi_script_is_short():
    lines = (ROOT / "examples" / "svi_script.py").read_text().splitlines()
    assert len(lines) <= 45


def test_bandits_beat_chance():
    output = output_of("bandit.py", 120)
    found = re.findall(r"(\w+): regret ([\d.]+) in 120 rounds, ([\d.]+) by chance", output)
    assert [name for name, _, _ in found] == ["wheel", "flowers"]
    assert float(found[1][1]) < 0.7 * float(found[1][2])


def test_monitoring_sees_the_drift_and_learning_follows_it(tmp_path):
    output = output_of("monitoring.py", 12, tmp_path / "figure.png")
    found = re.findall(r"(.+): ([\d.]+) at first, ([\d.]+) at last", output)
    values = {name: (float(first), float(last)) for name, first, last in found}
    assert values["novelty"][0] > 0.25
    assert values["novelty"][1] < 0.2
    assert values["PIT, left alone"][1] > 0.9
    assert values["PIT, keeps learning"][1] < values["PIT, left alone"][1]
    assert (tmp_path / "figure.png").stat().st_size > 0
