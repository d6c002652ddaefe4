"""Runs in processes of their own: killed, interrupted, and several at once."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.training.runs import assert_same, run_script

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
FABRIC = (str(Path(sys.executable).with_name("fabric")), "run", "--accelerator=cpu", "--devices=2",
          "--strategy=ddp")  # fmt: skip


def histories(result) -> list[dict[str, Any]]:
    """What each process of a script printed."""
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[str, Tensor]:
    out = tmp_path_factory.mktemp("whole") / "out.safetensors"
    result = run_script(out)
    assert result.returncode == 0, result.stderr
    return safetensors.torch.load_file(out)


def run_alone(directory, *arguments) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """History and weights of a run in closed form in one process."""
    out = directory / "out.safetensors"
    result = run_script(out, "--objective", "closed_form", *arguments)
    assert result.returncode == 0, result.stderr
    return histories(result)[0], safetensors.torch.load_file(out)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return run_alone(tmp_path_factory.mktemp("alone"))


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


@pytest.mark.parametrize(("name", "cause"), [
    ("SIGINT", "Interrupted"), ("SIGTERM", "Stopped by SIGTERM")
])  # fmt: skip
def test_a_signal_stops_after_a_step_and_raises_how_to_go_on(tmp_path, uninterrupted, name, cause):
    out, checkpoints = tmp_path / "out.safetensors", tmp_path / "checkpoints"
    arguments = ("--checkpoints", checkpoints, "--interrupt-at-step", 9, "--signal", name)
    stopped = run_script(out, *arguments)
    assert stopped.returncode == -2  # as Python ends with an interrupt that nobody expects
    assert not out.exists()  # the script does not go on to save
    message = f"{cause} after step 9. Go on with fit(..., resume_from='{checkpoints}/step-"
    assert message in stopped.stderr
    (history,) = histories(stopped)
    assert history["message"].startswith(message)
    assert history["status"] == "interrupted"
    assert len(history["rows"]) == 1
    resumed = run_script(out, "--checkpoints", checkpoints, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert_same(safetensors.torch.load_file(out), uninterrupted)


def test_a_signal_to_one_process_stops_all_at_the_same_step(tmp_path, alone):
    out, checkpoints = tmp_path / "out.safetensors", tmp_path / "checkpoints"
    arguments = ("--objective", "closed_form", "--checkpoints", checkpoints)
    interrupt = ("--interrupt-at-step", 9, "--only-rank", 1)
    result = run_script(out, *arguments, *interrupt, launch=TORCHRUN)
    assert result.returncode == 1
    assert [history["status"] for history in histories(result)] == ["interrupted"] * 2
    assert max(path.name for path in checkpoints.iterdir()) == "step-000000009"
    resumed = run_script(out, *arguments, "--resume", launch=TORCHRUN)
    for history in histories(resumed):  # also of the epoch that was interrupted
        assert_close(history["rows"], alone[0]["rows"], atol=1e-8, rtol=1e-8)
    assert len(histories(resumed)) == 2, resumed.stderr


@pytest.mark.parametrize("launch", [TORCHRUN, pytest.param(FABRIC, marks=pytest.mark.slow)],
                         ids=["torchrun", "fabric"])  # fmt: skip
def test_two_processes_equal_one(tmp_path, alone, launch):
    assert_equal_to(alone, tmp_path / "out.safetensors", launch=launch)


@pytest.mark.parametrize("arguments", [("--guide", "natural"), ("--parts",)])
def test_two_processes_with_another_guide_or_inputs_equal_one(tmp_path, arguments):
    alone = run_alone(tmp_path, *arguments)
    assert_equal_to(alone, tmp_path / "two.safetensors", *arguments, launch=TORCHRUN)


def assert_equal_to(alone, out, *arguments, launch):
    """Two processes end where one did."""
    history, weights = alone
    result = run_script(out, "--objective", "closed_form", *arguments, launch=launch)
    assert result.returncode == 0, result.stderr
    for name, tensor in safetensors.torch.load_file(out).items():
        assert_close(tensor, weights[name], atol=1e-8, rtol=1e-8)
    for part in histories(result):
        assert_close(part["rows"], history["rows"], atol=1e-8, rtol=1e-8)
        assert_close(part["final"], history["final"], atol=1e-8, rtol=1e-8)
    assert len(histories(result)) == 2


SCRIPTS = Path(__file__).parents[1] / "scripts"


def results_of(script, directory, launch=(sys.executable,)) -> list[dict[str, Tensor]]:
    """What each process of a script ends with."""
    directory.mkdir(exist_ok=True)
    command = [*launch, str(SCRIPTS / script), str(directory / "own")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPTS.parents[1])}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [safetensors.torch.load_file(path) for path in sorted(directory.glob("own-*"))]


def test_an_exact_posterior_is_summed_over_processes(tmp_path):
    (one,) = results_of("exact_rows.py", tmp_path / "one")
    pair = results_of("exact_rows.py", tmp_path / "two", launch=TORCHRUN)
    assert len(pair) == 2
    for own in pair:
        assert_close(own, one, atol=1e-10, rtol=1e-10)


def test_a_loop_of_ones_own_in_two_processes_equals_one(tmp_path):
    (one,) = results_of("train_head.py", tmp_path / "one")
    first, second = results_of("train_head.py", tmp_path / "two", launch=TORCHRUN)
    for name, tensor in one.items():
        if not name.startswith("alone."):
            assert_close(first[name], tensor, atol=1e-8, rtol=1e-8, msg=name)
            assert torch.equal(first[name], second[name]), name
        else:  # these were told to know nothing of other processes, and had other rows
            assert torch.equal(first[name], tensor), name
    assert (first["alone.mean"] != second["alone.mean"]).any()
