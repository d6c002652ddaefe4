"""Two hosts: network namespaces on this machine with a link between them, started by torchrun."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pytest
import safetensors.torch
import torch
from pyarrow import parquet
from torch.testing import assert_close

from tests.training.runs import SCRIPT
from tests.training.test_processes import histories, run_alone

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need Linux, root and `ip`",
    ),
]
PORT = 29517
TIMEOUT = 45.0  # seconds; machines that are busy with other things start slowly


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


class Hosts:
    """Two namespaces, a and b, and what runs in them."""

    def __init__(self):
        self.names = [f"pd{os.getpid()}{letter}" for letter in "ab"]
        self.running = []
        for name in self.names:
            ip("netns", "add", name)
        first, second = self.names
        ip("link", "add", first, "netns", first, "type", "veth", "peer", second, "netns", second)
        for number, name in enumerate(self.names, start=1):
            inside = ("netns", "exec", name, "ip")
            ip(*inside, "address", "add", f"10.231.77.{number}/30", "dev", name)
            ip(*inside, "link", "set", "dev", "lo", "up")
            self.link(number - 1, "up")

    def link(self, rank, state):
        """Take the link of a host up or down."""
        name = self.names[rank]
        ip("netns", "exec", name, "ip", "link", "set", "dev", name, state)

    def train(self, out, *arguments):
        """The training script on both hosts, one process each: return codes, stdout, stderr."""
        launch = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        launch += ["--master-addr=10.231.77.1", f"--master-port={PORT}"]
        for rank, name in enumerate(self.names):
            inside = ["ip", "netns", "exec", name, sys.executable, *launch, f"--node-rank={rank}"]
            command = [*inside, str(SCRIPT), str(out), "--timeout", str(TIMEOUT)]
            environment = os.environ | {
                "GLOO_SOCKET_IFNAME": name,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(SCRIPT.parents[2]),
            }
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            arguments = [str(argument) for argument in arguments]
            own = subprocess.Popen([*command, *arguments], env=environment, **pipes)
            self.running.append(own)
        return self.running[-2:]

    def close(self):
        for process in self.running:
            process.kill()
            process.communicate(timeout=30)
        for name in self.names:
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            for pid in pids.stdout.split():  # of nobody else: the namespace is ours
                os.kill(int(pid), 9)
            ip("netns", "delete", name)


@pytest.fixture
def hosts():
    made = Hosts()
    yield made
    made.close()


@pytest.fixture
def files(tmp_path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    x = torch.randn(101, 3)
    y = x.sin().sum(-1)
    columns = {f"x{i}": x[:, i].numpy() for i in range(3)} | {"y": y.numpy()}
    parquet.write_table(pyarrow.table(columns), folder / "a.parquet", row_group_size=17)
    return folder


def assert_finished_like(alone, out, processes):
    """Both hosts end where one process did."""
    history, weights = alone
    outputs = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    for name, tensor in safetensors.torch.load_file(out).items():
        assert_close(tensor, weights[name], atol=1e-8, rtol=1e-8)
    for stdout, _ in outputs:
        (part,) = histories(subprocess.CompletedProcess([], 0, stdout))
        assert_close(part["rows"], history["rows"], atol=1e-8, rtol=1e-8)
        assert_close(part["final"], history["final"], atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("kind", ["tensors", "natural", "files", "natural from files"])
def test_two_hosts_equal_one_process(hosts, tmp_path, files, kind):
    arguments = ("--guide", "natural") if "natural" in kind else ()
    arguments += ("--files", files) if "files" in kind else ()
    alone = run_alone(tmp_path, *arguments)
    out = tmp_path / "two.safetensors"
    assert_finished_like(alone, out, hosts.train(out, "--objective", "closed_form", *arguments))


@pytest.mark.parametrize(("dead", "is_cut_off"), [(1, False), (1, True), (0, True)])
def test_a_host_that_dies_stops_the_other_in_time_and_the_run_goes_on(
    hosts, tmp_path, dead, is_cut_off
):
    """Its process is killed: the connection is closed. Its link is down: there is silence."""
    alone = run_alone(tmp_path)
    out, checkpoints = tmp_path / "two.safetensors", tmp_path / "checkpoints"
    arguments = ("--objective", "closed_form", "--checkpoints", checkpoints)
    name = hosts.names[dead]
    cut = f"ip link set dev {name} down" if is_cut_off else "true"
    dying = ("--kill-at-step", 9, "--only-rank", dead, "--before-kill", cut)
    processes = hosts.train(out, *arguments, *dying)
    survivor, start = processes[1 - dead], time.monotonic()
    _, stderr = survivor.communicate(timeout=600)
    print(f"{time.monotonic() - start:.0f} s from the start to the end of the survivor")
    assert survivor.returncode == 1, stderr
    message = f"Another process is gone, or has not answered for {TIMEOUT:g} s, in epoch 2 after"
    assert message in stderr
    assert f"Go on with fit(..., resume_from='{checkpoints}/step-000000006')" in stderr
    assert not out.exists()
    processes[dead].kill()
    processes[dead].communicate(timeout=60)
    hosts.link(dead, "up")
    resumed = hosts.train(out, *arguments, "--resume")
    assert_finished_like(alone, out, resumed)
