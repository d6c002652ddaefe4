"""Thompson sampling on two bandits: `python examples/bandit.py [number of rounds]`.

The wheel: contexts in a disc; arm 0 pays 1.2 and four others 1.0, but near the rim one of them, by
quadrant, pays 50. The flowers: contexts are the measurements of an iris, arms are its three kinds,
and the right one pays 1.
"""

import math
import sys

import torch

from pyro_dak import MaternKernel, ThompsonBandit


def wheel(num_rounds, delta=0.95):
    radius, angle = torch.rand(num_rounds).sqrt(), 2 * math.pi * torch.rand(num_rounds)
    x = torch.stack([radius * angle.cos(), radius * angle.sin()], -1)
    pays = torch.full((num_rounds, 5), 1.0)
    pays[:, 0] = 1.2
    best = 1 + (x[:, 0] < 0).long() + 2 * (x[:, 1] < 0).long()
    pays[radius > delta, best[radius > delta]] = 50.0
    return (x + 1) / 2, pays


def flowers(num_rounds):
    from sklearn.datasets import load_iris

    x, labels = (torch.as_tensor(part) for part in load_iris(return_X_y=True))
    rows = torch.randint(len(x), (num_rounds,))
    x = (x - x.amin(0)) / (x.amax(0) - x.amin(0))
    return x[rows], torch.nn.functional.one_hot(labels[rows]).double()


def play(name, contexts, pays):
    bandit = ThompsonBandit(contexts.shape[1], pays.shape[1], kernel=MaternKernel(nu=1.5))
    regret = 0.0
    for context, rewards in zip(contexts, pays, strict=True):
        arm = bandit.choose(context)
        bandit.update(context, arm, float(rewards[arm]))
        regret += float(rewards.max() - rewards[arm])
    by_chance = float((pays.amax(-1) - pays.mean(-1)).sum())
    print(f"{name}: regret {regret:.1f} in {len(contexts)} rounds, {by_chance:.1f} by chance")


if __name__ == "__main__":
    torch.manual_seed(0)
    num_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    play("wheel", *wheel(num_rounds))
    play("flowers", *flowers(num_rounds))
