import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_svi_script_trains_with_both_guides():
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "examples/svi_script.py", "40"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = re.findall(r"(\w+): ELBO (-?[\d.]+) nats per row, RMSE ([\d.]+)", run.stdout)
    assert [name for name, _, _ in found] == ["AutoNormal", "MeanFieldGuide"]
    assert all(float(rmse) < 0.9 for _, _, rmse in found)


def test_svi_script_is_short():
    lines = (ROOT / "examples" / "svi_script.py").read_text().splitlines()
    assert len(lines) <= 45
