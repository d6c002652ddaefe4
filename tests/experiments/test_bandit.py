"""Bandits: they run, the wheel pays what it should, and regret is that of the arms chosen."""

import pytest
import torch

from experiments import bandit
from experiments.runs import read_runs
from tests.experiments.command import invoke


def test_bandits_run_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setitem(bandit.PROBLEMS, "wine", lambda n, seed: bandit.wheel(n, seed + 1))
    output = invoke(bandit.main, "--quick", "--out", tmp_path)
    assert "neural-linear" in output
    runs = read_runs(tmp_path)
    assert {run["config"]["model"] for run in runs} == set(bandit.AGENTS)
    assert (tmp_path / "figures/regret.png").stat().st_size > 0


def test_the_wheel_pays_most_outside_and_by_quadrant():
    problem = bandit.wheel(20_000, 0)
    x = 2 * problem.contexts - 1
    is_outside = x.norm(dim=-1) > 0.95
    assert is_outside.double().mean() == pytest.approx(1 - 0.95**2, abs=0.01)
    assert bool((problem.expected[~is_outside].argmax(-1) == 0).all())
    best = problem.expected[is_outside].argmax(-1)
    for arm in range(1, 5):
        signs = x[is_outside][best == arm].sign()
        assert len(torch.unique(signs, dim=0)) == 1
    assert (problem.rewards - problem.expected).std() == pytest.approx(0.01, rel=0.05)


def test_regret_is_zero_for_an_agent_that_knows():
    problem = bandit.wheel(50, 0)

    class Knowing:
        def __init__(self):
            self.round = -1

        def choose(self, context):
            self.round += 1
            return int(problem.expected[self.round].argmax())

        def update(self, context, arm, reward):
            assert reward == float(problem.rewards[self.round, arm])

    assert float(bandit.play(problem, Knowing())[0].sum()) == 0


def test_linear_thompson_sampling_updates_like_one_batch():
    agent = bandit.LinearAgent(2, 3, 0)
    for number in range(70):
        agent.update(torch.rand(2).double(), number % 3, float(number % 7))
    before = agent.precision.clone()
    agent.learn()
    torch.testing.assert_close(agent.precision, before)
