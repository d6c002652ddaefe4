"""Runs in processes of their own: killed, interrupted, and several at once."""

import sys
from pathlib import Path

import pytest
import safetensors.torch
from torch import Tensor
from torch.testing import assert_close

from tests.training.runs import assert_same, run_script

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
FABRIC = (str(Path(sys.executable).with_name("fabric")), "run", "--accelerator=cpu", "--devices=2",
          "--strategy=ddp")  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[str, Tensor]:
    out = tmp_path_factory.mktemp("whole") / "out.safetensors"
    result = run_script(out)
    assert result.returncode == 0, result.stderr
    return safetensors.torch.load_file(out)


@pytest.mark.parametrize("arguments", [
    ("--kill-at-step", 8), ("--kill-at-step", 21), ("--kill-in-write", 8)
])  # fmt: skip
def test_a_killed_and_resumed_run_equals_the_uninterrupted_one(tmp_path, uninterrupted, arguments):
    out, checkpoints = tmp_path / "out.safetensors", tmp_path / "checkpoints"
    killed = run_script(out, "--checkpoints", checkpoints, *arguments)
    assert killed.returncode == -9
    assert not out.exists()
    resumed = run_script(out, "--checkpoints", checkpoints, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert_same(safetensors.torch.load_file(out), uninterrupted)
    assert not list(checkpoints.glob(".*"))


def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(tmp_path, uninterrupted):
    out, checkpoints = tmp_path / "out.safetensors", tmp_path / "checkpoints"
    stopped = run_script(out, "--checkpoints", checkpoints, "--interrupt-at-step", 9)
    assert stopped.returncode == 0
    assert stopped.stdout.startswith("interrupted")
    assert "Interrupted after step 9. Go on with fit(..., resume_from=" in stopped.stderr
    resumed = run_script(out, "--checkpoints", checkpoints, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert_same(safetensors.torch.load_file(out), uninterrupted)


def test_ctrl_c_in_one_process_stops_all_at_the_same_step(tmp_path):
    out, checkpoints = tmp_path / "out.safetensors", tmp_path / "checkpoints"
    arguments = ("--objective", "closed_form", "--checkpoints", checkpoints)
    interrupt = ("--interrupt-at-step", 9, "--only-rank", 1)
    result = run_script(out, *arguments, *interrupt, launch=TORCHRUN)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("interrupted") == 2
    assert max(path.name for path in checkpoints.iterdir()) == "step-000000009"


@pytest.mark.parametrize("launch", [TORCHRUN, pytest.param(FABRIC, marks=pytest.mark.slow)],
                         ids=["torchrun", "fabric"])  # fmt: skip
def test_two_processes_equal_one(tmp_path, launch):
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    assert run_script(one, "--objective", "closed_form").returncode == 0
    result = run_script(two, "--objective", "closed_form", launch=launch)
    assert result.returncode == 0, result.stderr
    first, second = (safetensors.torch.load_file(path) for path in (one, two))
    for name, tensor in first.items():
        assert_close(second[name], tensor, atol=1e-8, rtol=1e-8)
