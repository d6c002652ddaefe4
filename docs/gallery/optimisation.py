"""# Where to look next

Every evaluation costs a day in the laboratory, and there are a few dozen of them. Bayesian
optimisation asks a model that knows what it does not know where the next one is worth most. Here
DAK is that model, and BoTorch does the asking.
"""

# %%
# The function is Branin's, with three equally deep valleys. The search knows nothing of it but
# the values at six random points.

import warnings

import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.exceptions.warnings import BotorchWarning
from botorch.optim import optimize_acqf
from botorch.test_functions import Branin

from pyro_dak.botorch import DAKModel

warnings.simplefilter("ignore", BotorchWarning)
ROUNDS = 20
branin = Branin().double()
low, high = branin.bounds.double()
cube = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.double)


def loss(x):
    return branin(low + (high - low) * x).unsqueeze(-1)


# %%
# A round fits the model, finds the point with the largest expected improvement, and evaluates
# there.

torch.manual_seed(1)
x = torch.rand(6, 2, dtype=torch.double)
y = loss(x)
for _ in range(ROUNDS):
    model = DAKModel(x, -y)
    improvement = LogExpectedImprovement(model, best_f=-y.min())
    point, _ = optimize_acqf(improvement, cube, q=1, num_restarts=2, raw_samples=64)
    x, y = torch.cat([x, point]), torch.cat([y, loss(point)])

regret = (y.cummin(0).values - branin.optimal_value)[:, 0]
random = loss(torch.rand(200, len(x), 2, dtype=torch.double)).squeeze(-1)
random = random.cummin(1).values - branin.optimal_value
chance = random[:, -1].median()
print(f"regret after {len(x)} evaluations: {regret[-1]:.4f}; random points: {chance:.2f}")

# %% [figure] The function with its evaluations, the uncertainty of the model, and the regret.

import matplotlib.pyplot as plt

side = torch.linspace(0, 1, 80, dtype=torch.double)
grid = torch.cartesian_prod(side, side)
with torch.no_grad():
    sd = DAKModel(x, -y).posterior(grid.unsqueeze(1)).variance.sqrt()
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(9, 3), width_ratios=(1.1, 1.1, 1))
depth = loss(grid).reshape(80, 80).T.log1p().numpy()
left.contourf(depth, levels=20, cmap="Blues_r", extent=(0, 1, 0, 1))
image = middle.imshow(
    sd.reshape(80, 80).T.numpy(), cmap="magma", origin="lower", extent=(0, 1, 0, 1)
)
figure.colorbar(image, ax=middle, shrink=0.85)
for ax in (left, middle):
    ax.scatter(*x[:6].T, s=22, marker="s", color="white", edgecolor="black", lw=0.8)
    ax.scatter(*x[6:].T, s=22, c=range(len(x) - 6), cmap="YlOrRd", edgecolor="black", lw=0.6)
    ax.set(aspect="equal", xlabel="$x_1$", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
left.set(title="the function and its evaluations", ylabel="$x_2$")
middle.set(title="standard deviation of the model")
steps = range(1, len(x) + 1)
bounds = random.quantile(torch.tensor([0.25, 0.75], dtype=torch.double), 0)
right.fill_between(steps, *bounds, color="C5", alpha=0.2, lw=0)
right.plot(steps, random.median(0).values, color="C5", label="random, quartiles")
right.plot(steps, regret.clamp(min=1e-6), color="C1", label="DAK")
right.axvline(6, color="C5", lw=0.8, ls=":")
right.set(yscale="log", xlabel="evaluations", title="regret")
right.legend(loc="upper right")

# %% [check]

evaluations, final, by_chance = len(x), float(regret[-1]), float(random[:, -1].median())
assert final < 0.05
assert final < by_chance / 10

# %%
# Squares are the six points of the start, and later points are redder. The search spreads out
# where the model is uncertain, and goes down into the valleys that it has found. After
# {{evaluations}} evaluations it is {{final:.4f}} above the optimum; a random search is
# {{by_chance:.2f}} above it, in the median of 200.
#
# **Read next:** [acting on uncertainty](../acting.md) has rows worth a label and Thompson
# sampling; [the results](../results.md#acting-on-uncertainty) compare surrogates on four
# functions, and say where a Gaussian process is better.
