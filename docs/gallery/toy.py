"""# Where the data end

Twenty noisy points of a curve, and a question: how sure may a model be where it has seen nothing?
This page draws the answer of a deep additive kernel, and two options that make it honest.
"""

# %%
# The points lie between -5 and 5, with a gap in the middle. We look at the model from -12 to 12.

import torch
from torch import nn

from pyro_dak import DAK, GaussianLikelihood, LaplaceKernel, NaturalGuide, fit, predict

EPOCHS = 300
torch.manual_seed(0)


def curve(x):
    return torch.sin(1.3 * x) + 0.4 * torch.cos(2.9 * x)


x = torch.cat([torch.linspace(-5, -1.5, 11), torch.linspace(1.5, 5, 9)]).unsqueeze(-1)
y = curve(x) + 0.1 * torch.randn(20, 1)
grid = torch.linspace(-12, 12, 300).unsqueeze(-1)

# %%
# A network makes the inputs of two Gaussian processes of one variable, whose sum is the model.
# With `input_units=True` a third process has x itself as its input. We state the prior and keep
# it: all processes together have variance one.


def learn(input_units):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh())
    model = DAK(
        network,
        feature_dim=32,
        num_units=2,
        level=6,
        kernel=LaplaceKernel(0.2),
        input_units=input_units,
        likelihood=GaussianLikelihood(0.1, learn=False),
    )
    scale = torch.tensor(1 / model.num_units).sqrt()
    model.layer.log_unit_scale.data.fill_(scale.log()).requires_grad_(False)
    guide = NaturalGuide(model)
    fit(model, guide, (x, y), epochs=EPOCHS, batch_size=20, seed=0, progress=False)
    return model, guide


deep, deep_with_x = learn(input_units=False), learn(input_units=True)
predictions = {
    "inducing points alone": predict(*deep, grid),
    "+ residual variance": predict(*deep, grid, residual_variance=True),
    "+ x as a unit": predict(*deep_with_x, grid, residual_variance=True),
}

# %% [figure] Three bands around twenty points. They widen from the left panel to the right one.
# The bands are two standard deviations of the function.

import matplotlib.pyplot as plt

figure, axes = plt.subplots(1, 3, figsize=(9, 3), sharey=True)
for ax, (name, p) in zip(axes, predictions.items(), strict=True):
    mean, width = p.mean[:, 0], 2 * p.epistemic[:, 0].sqrt()
    ax.fill_between(grid[:, 0], mean - width, mean + width, color="C0", alpha=0.18, lw=0)
    ax.plot(grid, mean, color="C0", label="mean and two sd of f")
    ax.plot(grid, curve(grid), "--", color="C5", lw=1, label="the curve")
    ax.plot(x, y, "o", color="C1", ms=3.5, mew=0, label="data")
    ax.set(title=name, xlabel="x", ylim=(-3.3, 3.3), xlim=(-12, 12))
axes[0].set_ylabel("y")
axes[0].legend(loc="lower left", ncols=1)

# %%
# **Left.** What the model knows is stored at inducing points on a grid. Between and outside of
# them they express less variance than the prior has.
#
# **Middle.** `residual_variance=True` adds what is missing, which is known [in closed
# form](../mathematics.md#residual-variance). The network is still a risk: its units saturate, and
# take a far x for one that they know.
#
# **Right.** An affine map of x cannot do that. Its process leaves the data as x does, and the
# band goes back to what the prior says.

for name, p in predictions.items():
    sd = p.epistemic[:, 0].sqrt()
    print(f"{name:22}  sd of f: {sd[200]:.2f} at {grid[200, 0]:.0f}, {sd[-1]:.2f} at 12")

# %% [check]

outer = [p.epistemic[-1, 0].sqrt() for p in predictions.values()]
assert outer[0] < outer[1] < outer[2]
assert outer[2] > 0.8
assert all(p.epistemic[200, 0].sqrt() < 0.3 for p in predictions.values())

# %%
# **Read next:** [your own network](network.py) in a training loop of yours; [inputs unlike the
# data](../researchers.md#inputs-unlike-the-data) in the researchers' guide; and the [toy
# experiment](../results.md) that compares seven models over twenty curves.
