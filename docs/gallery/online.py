"""# A model that keeps learning

The last layer is conditioned on new rows in closed form: at once, exactly, and without the rows
before them. So it can follow a world that drifts, notice that it drifts, and act on what it has
just seen.
"""

# %%
# Every day brings thirty rows. From day 20 on the curve moves, and from day 40 on the inputs move
# too.

import torch
from torch import nn

from pyro_dak import DAK, GaussianLikelihood, LaplaceKernel, NaturalGuide, learn_novelty, predict

DAYS = 60
FORGET = 0.6
torch.manual_seed(0)


def curve(x, day):
    return torch.sin(5 * x + 2.0 * max(0, day - 20) / 20)


def rows_of(day):
    x = torch.rand(30, 1) + 0.8 * max(0, day - 40) / 20
    return x, curve(x, day) + 0.15 * torch.randn(30, 1)


model = DAK(
    nn.Identity(),
    1,
    num_units=1,
    level=6,
    bounds=(0.0, 2.0),
    kernel=LaplaceKernel(0.7),
    scaling="none",
    embedding=False,
    likelihood=GaussianLikelihood(0.15, learn=False),
).eval()

# %%
# Three models see the first ten days. One is then left alone, one learns all that comes, and one
# learns and forgets: a row that came k days ago counts \({{FORGET}}^k\). Before they learn a day
# they predict it. The *probability integral transform* (PIT) is the share of a predictive
# distribution below the target; it fills the space between 0 and 1 evenly as long as predictions
# are right.

guides = {name: NaturalGuide(model) for name in ("left alone", "learns", "learns and forgets")}
first = [torch.cat(part) for part in zip(*(rows_of(day) for day in range(10)), strict=True)]
for guide in guides.values():
    guide.update(model, *first)
learn_novelty(model, guides["left alone"], first[0])

errors, outside = ({name: [] for name in guides} for _ in range(2))
novelty, snapshots = [], {}
grid = torch.linspace(0, 1.8, 200).unsqueeze(-1)
for day in range(10, DAYS + 1):
    x, y = rows_of(day)
    for name, guide in guides.items():
        p = predict(model, guide, x, residual_variance=True)
        pit = torch.distributions.Normal(p.mean, p.std).cdf(y)
        errors[name].append(float((p.mean - curve(x, day)).square().mean().sqrt()))
        outside[name].append(float(((pit - 0.5).abs() > 0.45).float().mean()))
        if name == "left alone":
            novelty.append(p.novelty)
        else:
            guide.update(model, x, y, forget=FORGET if name == "learns and forgets" else 1.0)
    if day in (DAYS // 3, 2 * DAYS // 3, DAYS):
        seen = {n: predict(model, g, grid, residual_variance=True) for n, g in guides.items()}
        snapshots[day] = (x, y, seen)

# %% [figure] Above: three days, the curve and the models. Below: errors, PIT and novelty by day.

import matplotlib.pyplot as plt

figure, axes = plt.subplots(2, 3, figsize=(9, 5.4))
colors = dict(zip(guides, ("C5", "C3", "C2"), strict=True))
for ax, (day, (x, y, seen)) in zip(axes[0], snapshots.items(), strict=True):
    for name, p in seen.items():
        mean, width = p.mean[:, 0], 2 * p.epistemic[:, 0].sqrt()
        if name == "learns and forgets":
            ax.fill_between(grid[:, 0], mean - width, mean + width, color="C2", alpha=0.18, lw=0)
        ax.plot(grid, mean, color=colors[name], label=name)
    ax.plot(grid, curve(grid, day), "--", color="black", lw=1, label="the curve")
    ax.plot(x, y, "o", color="C1", ms=3, mew=0, label="rows of the day")
    ax.set(title=f"day {day}", xlabel="x", ylim=(-2.2, 2.2))
figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=5)

days = range(10, DAYS + 1)
for ax, values, title in (
    (axes[1, 0], errors, "error of tomorrow's curve"),
    (axes[1, 1], outside, "share of PIT outside 0.05 to 0.95"),
):
    for name in guides:
        ax.plot(days, values[name], color=colors[name], lw=1.4)
    ax.set(title=title, xlabel="day", ylim=(0, None))
axes[1, 1].axhline(0.1, color="black", lw=0.8, ls=":")
levels = torch.stack(novelty).quantile(torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95]), 1)
for low, high in ((0, 4), (1, 3)):
    axes[1, 2].fill_between(days, levels[low], levels[high], color="C0", alpha=0.2, lw=0)
axes[1, 2].plot(days, levels[2], color="C0")
axes[1, 2].axhline(0.5, color="black", lw=0.8, ls=":")
axes[1, 2].set(title="novelty of the inputs", xlabel="day", ylim=(0, 1))

# %% [check]


def late(values):
    return sum(values[-10:]) / 10


alone, forgets = late(outside["left alone"]), late(outside["learns and forgets"])
assert alone > 0.5
assert forgets < 0.3
assert late(errors["learns and forgets"]) < 0.5 * late(errors["left alone"])
assert late(errors["learns and forgets"]) < 0.7 * late(errors["learns"])
assert levels[2, :10].mean() > 0.4
assert levels[2, -1] < 0.1

# %%
# In the last ten days {{alone:.0%}} of the rows fall outside the 90 % intervals of the model that
# was left alone, and {{forgets:.0%}} outside those of the one that forgets. Novelty does not see
# the curve move: it falls when the inputs do.

# %%
# ## Acting on it
#
# A bandit chooses one of several arms, sees the reward of this one alone, and has to find out
# what the others are worth without losing too much. `ThompsonBandit` draws a function for each
# arm from its posterior, chooses the best one, and is conditioned on the reward. Here each of
# three arms pays best in its own part of a square.

from pyro_dak import ThompsonBandit

ROUNDS = 300
centres = torch.tensor([[0.2, 0.2], [0.8, 0.3], [0.4, 0.8]])
bandit = ThompsonBandit(num_inputs=2, num_arms=3, num_directions=4, seed=0)
contexts = torch.rand(ROUNDS, 2)
worth = torch.exp(-8 * torch.cdist(contexts, centres).square())
chosen = []
for context, values in zip(contexts, worth, strict=True):
    arm = bandit.choose(context)
    bandit.update(context, arm, float(values[arm] + 0.1 * torch.randn(())))
    chosen.append(arm)
lost = worth.amax(1) - worth[torch.arange(ROUNDS), chosen]
by_chance = float((worth.amax(1) - worth.mean(1)).sum())

# %% [figure] Where each arm was chosen, early and late, and what was lost.

figure, (early, late, right) = plt.subplots(1, 3, figsize=(9, 3))
half = ROUNDS // 3
for ax, part, title in (
    (early, slice(0, half), f"rounds 1 to {half}"),
    (late, slice(half, None), f"rounds {half + 1} to {ROUNDS}"),
):
    for arm, color in enumerate(("C0", "C1", "C3")):
        where = contexts[part][torch.tensor(chosen[part]) == arm]
        ax.plot(*where.T, "o", color=color, ms=4, mew=0, alpha=0.8)
        ax.plot(*centres[arm], "*", color=color, ms=15, mec="white")
    ax.set(title=title, aspect="equal", xlim=(0, 1), ylim=(0, 1), xticks=[], yticks=[])
right.plot(range(1, ROUNDS + 1), lost.cumsum(0), color="C0", label="bandit")
right.plot([0, ROUNDS], [0, by_chance], color="C5", ls="--", label="by chance")
right.set(title="reward lost", xlabel="round")
right.legend()

# %% [check]

total = float(lost.sum())
assert total < 0.4 * by_chance

# %%
# In {{ROUNDS}} rounds the bandit lost {{total:.0f}} in reward, where chance loses
# {{by_chance:.0f}}.
#
# **Read next:** [acting on uncertainty](../acting.md), with `partial_fit` of the estimators and
# rows that are worth a label. `examples/monitoring.py` and `examples/bandit.py` are scripts to
# start from.
