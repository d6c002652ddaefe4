"""Contextual bandits: what is lost by not knowing which arm is best.

    python -m experiments.bandit
    python -m experiments.bandit --problem wheel --seeds 3
    python -m experiments.bandit --quick

The wheel bandit (Riquelme, Tucker and Snoek, 2018): contexts are uniform in the unit disc. Arm 0
pays 1.2; the other four pay 1.0, but beyond the radius 0.95 one of them, by quadrant, pays 50. The
noise has deviation 0.01. The wine bandit: contexts are the eleven measurements of a wine, arms are
its six possible grades, and the right one pays 1. Regret is the expected reward of the best arm
minus that of the arm chosen, summed over the rounds, and relative to that of random arms.

The peers see the same contexts and rewards: linear Thompson sampling, a network that is greedy, and
neural-linear, which is Thompson sampling with a Bayesian linear layer on the features of a network.
Both networks are trained on every 50 rounds. `ThompsonBandit` has a Matern-3/2 kernel here, since
rewards may jump. The prior of its lengthscales was chosen on draws 100 and 101 of the wheel, and
its scale, the size of the rewards and not their spread, after draws 0 and 1 had found no large one.
So runs start from seed 10, of which no draw was seen before. That lengthscales grow with the number
of columns was chosen on the wine recognition and breast cancer sets of scikit-learn.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
import typer
from torch import Tensor

from experiments.curves import by_place, draw_panels, mean_band, mean_with_error
from experiments.datasets import load_regression
from experiments.peers import NetworkEnsemble
from experiments.report import announce_report, markdown_table
from experiments.runs import Job, Line, result_directory, run_all, start
from pyro_dak import MaternKernel
from pyro_dak.acting import ThompsonBandit

HEADLINE = {"relative": "regret over random's", "milliseconds": "ms an update"}
NUM_ROUNDS, FIRST_SEED = 2000, 10
_DELTA = 0.95


@dataclass(frozen=True)
class Problem:
    """Contexts `(N, D)` in the unit cube, expected rewards `(N, A)`, and rewards `(N, A)`."""

    contexts: Tensor
    expected: Tensor
    rewards: Tensor


def wheel(num_rounds: int, seed: int) -> Problem:
    """The wheel bandit; the disc lies in the square from 0 to 1."""
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    radius = torch.rand(num_rounds, **options).sqrt()
    angle = 2 * torch.pi * torch.rand(num_rounds, **options)
    x = torch.stack([radius * angle.cos(), radius * angle.sin()], -1)
    expected = torch.full((num_rounds, 5), 1.0, dtype=torch.float64)
    expected[:, 0] = 1.2
    quadrant = 1 + (x[:, 0] < 0).long() + 2 * (x[:, 1] < 0).long()
    is_outside = radius > _DELTA
    expected[is_outside, quadrant[is_outside]] = 50.0
    rewards = expected + 0.01 * torch.randn(num_rounds, 5, **options)
    return Problem((x + 1) / 2, expected, rewards)


def wine(num_rounds: int, seed: int) -> Problem:
    """Grades of wine as arms; measurements are mapped to the cube by the normal distribution."""
    x, y = load_regression("wine")
    y = y.flatten()
    labels = torch.unique((y - y.min()).round().long(), return_inverse=True)[1]
    x = (x - x.mean(0)) / x.std(0)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.cat(
        [torch.randperm(len(x), generator=generator) for _ in range(-(-num_rounds // len(x)))]
    )
    rows = rows[:num_rounds]
    expected = torch.nn.functional.one_hot(labels[rows]).double()
    return Problem(torch.special.ndtr(x[rows]), expected, expected)


PROBLEMS: dict[str, Callable[[int, int], Problem]] = {"wheel": wheel, "wine": wine}


class Agent(Protocol):
    """What chooses an arm and learns from its reward."""

    def choose(self, context: Tensor) -> int: ...

    def update(self, context: Tensor, arm: int, reward: float) -> None: ...


class LinearAgent:
    """Thompson sampling with a Bayesian linear model of each arm, on features of the context.

    Weights have prior N(0, 1) and noise variance `noise_var`, for rewards in units of their
    standard deviation so far.
    """

    noise_var = 0.1

    def __init__(self, num_inputs: int, num_arms: int, seed: int):
        self.num_arms, self.generator = num_arms, torch.Generator().manual_seed(seed)
        self.x, self.arms, self.rewards = [], [], []  # type: ignore[var-annotated]
        self.learn()

    def features(self, x: Tensor) -> Tensor:
        """Features `(N, K)` of contexts `(N, D)`: a constant and the context."""
        return torch.cat([torch.ones_like(x[:, :1]), 2 * x - 1], -1)

    def learn(self) -> None:
        """Renew what depends on all rows: scales, and precisions of the weights."""
        rewards = torch.tensor(self.rewards, dtype=torch.float64)
        self.loc = float(rewards.mean()) if len(rewards) else 0.0
        self.scale = max(float(rewards.std(correction=0)), 1e-6) if len(rewards) else 1.0
        if not self.rewards:
            return
        phi, arms = self.features(torch.stack(self.x)), torch.tensor(self.arms)
        K = phi.shape[-1]
        self.precision = torch.eye(K, dtype=phi.dtype).repeat(self.num_arms, 1, 1)
        self.moment = phi.new_zeros(self.num_arms, K)
        for arm in range(self.num_arms):
            own, y = phi[arms == arm], (rewards[arms == arm] - self.loc) / self.scale
            self.precision[arm] += own.mT @ own / self.noise_var
            self.moment[arm] += own.mT @ y / self.noise_var

    def choose(self, context: Tensor) -> int:
        if len(self.rewards) < 3 * self.num_arms:
            return len(self.rewards) % self.num_arms
        phi = self.features(context.unsqueeze(0))[0]
        L = torch.linalg.cholesky(self.precision)
        loc = torch.cholesky_solve(self.moment.unsqueeze(-1), L)
        noise = torch.randn(loc.shape, generator=self.generator, dtype=loc.dtype)
        draws = loc + torch.linalg.solve_triangular(L.mT, noise, upper=True)
        return int((draws.squeeze(-1) @ phi).argmax())

    def update(self, context: Tensor, arm: int, reward: float) -> None:
        self.x.append(context)
        self.arms.append(arm)
        self.rewards.append(reward)
        if len(self.rewards) <= 3 * self.num_arms or len(self.rewards) % 50 == 0:
            self.learn()
            return
        phi = self.features(context.unsqueeze(0))[0]
        self.precision[arm] += phi.outer(phi) / self.noise_var
        self.moment[arm] += phi * (reward - self.loc) / self.scale / self.noise_var


class NeuralLinearAgent(LinearAgent):
    """Thompson sampling with a Bayesian linear layer on the features of a network."""

    def __init__(self, num_inputs: int, num_arms: int, seed: int):
        torch.manual_seed(seed)
        self.network = NetworkEnsemble(num_inputs, num_arms, size=1)
        super().__init__(num_inputs, num_arms, seed)

    def features(self, x: Tensor) -> Tensor:
        """The last hidden layer, and a constant."""
        with torch.no_grad():
            hidden = self.network.hidden(2 * x - 1)[0]
        return torch.cat([torch.ones_like(x[:, :1]), hidden], -1)

    def learn(self) -> None:
        if len(self.rewards) >= 3 * self.num_arms:
            y = torch.tensor(self.rewards, dtype=torch.float64)
            y = (y - y.mean()) / y.std(correction=0).clamp(min=1e-6)
            x, arms = 2 * torch.stack(self.x) - 1, torch.tensor(self.arms)
            self.network.fit_chosen(x, arms, y, num_steps=100)
        super().learn()


class GreedyAgent(NeuralLinearAgent):
    """The arm for which a network predicts most."""

    def choose(self, context: Tensor) -> int:
        if len(self.rewards) < 3 * self.num_arms:
            return len(self.rewards) % self.num_arms
        with torch.no_grad():
            return int(self.network(2 * context.unsqueeze(0) - 1)[0, 0].argmax())


class RandomAgent:
    """Any arm."""

    def __init__(self, num_inputs: int, num_arms: int, seed: int):
        self.num_arms, self.generator = num_arms, torch.Generator().manual_seed(seed)

    def choose(self, context: Tensor) -> int:
        return int(torch.randint(self.num_arms, (), generator=self.generator))

    def update(self, context: Tensor, arm: int, reward: float) -> None:
        pass


def _dak(num_inputs: int, num_arms: int, seed: int) -> ThompsonBandit:
    return ThompsonBandit(num_inputs, num_arms, seed=seed, kernel=MaternKernel(nu=1.5))


AGENTS: dict[str, Callable[[int, int, int], Agent]] = {
    "DAK": _dak,
    "linear": LinearAgent,
    "neural-linear": NeuralLinearAgent,
    "greedy network": GreedyAgent,
    "random": RandomAgent,
}


def play(
    problem: Problem, agent: Agent, tell: Callable[[str], None] = str
) -> tuple[Tensor, Tensor]:
    """The regret of each round, `(N,)`, and the CPU seconds of each update, `(N,)`."""
    chosen, seconds = [], []
    for number, context in enumerate(problem.contexts):
        arm = agent.choose(context)
        began = time.process_time()
        agent.update(context, arm, float(problem.rewards[number, arm]))
        seconds.append(time.process_time() - began)
        chosen.append(arm)
        if number % 100 == 99:
            tell(f"round {number + 1}")
    arms = torch.tensor(chosen).unsqueeze(-1)
    regret = problem.expected.amax(-1) - problem.expected.gather(-1, arms).squeeze(-1)
    return regret, torch.tensor(seconds)


def run(job: Job, tell: Callable[[str], None]) -> dict[str, Any]:
    """One agent on one sequence of contexts."""
    torch.set_num_threads(1)
    problem = PROBLEMS[job.dataset](job.settings["num_rounds"], job.seed)
    D, A = problem.contexts.shape[-1], problem.expected.shape[-1]
    regret, seconds = play(problem, AGENTS[job.model](D, A, job.seed), tell)
    by_chance = (problem.expected.amax(-1) - problem.expected.mean(-1)).sum()
    total = regret.cumsum(0)
    step = max(1, len(total) // 100)
    return {
        "metrics": {
            "regret": float(total[-1]),
            "relative": float(total[-1] / by_chance),
            "milliseconds": 1000 * float(seconds.median()),
        },
        "curve": [float(f"{value:.6g}") for value in (total / by_chance)[step - 1 :: step]],
    }


def make_job(problem: str, agent: str, seed: int, num_rounds: int = NUM_ROUNDS) -> Job:
    """The job of one run."""
    return Job("bandit", problem, agent, seed, {"num_rounds": num_rounds})


def table(runs: list[Line]) -> str:
    """Means over seeds of the regret, with standard errors, as Markdown."""
    rows = []
    for (problem, agent), group in by_place(runs, PROBLEMS, AGENTS).items():
        cells = [mean_with_error(group, "regret", 0), mean_with_error(group, "relative", 3)]
        times = [run["metrics"]["milliseconds"] for run in group]
        rows.append([problem, agent, *cells, str(len(group)), f"{statistics.median(times):.2f}"])
    columns = ["problem", "agent", "regret", "over random's", "seeds", "CPU ms an update"]
    text = "Cumulative regret, mean over seeds ± standard error, and the median time of an update."
    return f"{text}\n\n{markdown_table(columns, rows)}\n"


def draw(runs: list[Line], figures: Path) -> list[Path]:
    """Cumulative regret by round, mean over seeds with standard errors."""

    def rounds(run: Line) -> list[float]:
        number = len(run["curve"])
        return [run["config"]["num_rounds"] * (i + 1) / number for i in range(number)]

    labels = ("rounds", "regret over that of random arms")
    groups = by_place(runs, PROBLEMS, AGENTS)
    path = figures / "regret.png"
    return [draw_panels(groups, path, rounds, key="curve", band=mean_band, labels=labels)]


def main(
    problem: Annotated[list[str] | None, typer.Option(help="wheel, wine; both by default.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Agents; all by default.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each, from seed 10.")] = 10,
    rounds: Annotated[int, typer.Option(help="Rounds of a run.")] = NUM_ROUNDS,
    resume: Annotated[bool, typer.Option(help="Keep runs that are recorded.")] = True,
    out: Annotated[Path | None, typer.Option(help="Else results/bandit.")] = None,
    draft: Annotated[bool, typer.Option("--draft", help="Write to results/draft/bandit.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A draft: 40 rounds, one seed.")] = False,
) -> None:
    """Let all agents play all problems, then write the table and the figure."""
    jobs = [
        make_job(name, agent, number, 40 if quick else rounds)
        for name in problem or PROBLEMS
        for number in range(FIRST_SEED, FIRST_SEED + (1 if quick else seeds))
        for agent in model or AGENTS
    ]
    directory = result_directory("bandit", out, draft or quick)
    run_all(jobs, run, directory, HEADLINE, resume=resume)
    announce_report(directory)


if __name__ == "__main__":
    start(main)
