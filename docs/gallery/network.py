"""# Your network, with error bars

You have a network and a training loop. Replace the last linear layer by `DAKHead` and the loss by
`head.loss`, and the network says how sure it is, at every point.
"""

# %%
# Here the network predicts a height from a place. Places come from a ring: nobody has measured in
# the middle, nor outside.

import torch
from torch import nn

from pyro_dak import DAKHead, GaussianLikelihood

EPOCHS = 60
torch.manual_seed(0)


def height(place):
    return torch.sin(2 * place[:, 0]) * torch.cos(2 * place[:, 1])


angle, radius = 2 * torch.pi * torch.rand(600), 1.2 + 0.8 * torch.rand(600)
x = torch.stack([radius * angle.cos(), radius * angle.sin()], -1)
y = height(x) + 0.1 * torch.randn(600)
x, x_new, y, y_new = x[:450], x[450:], y[:450], y[450:]

# %%
# This is the loop that you know. Two lines are new: the head, and its loss.


class Sine(nn.Module):
    def forward(self, x):
        return torch.sin(x)


backbone = nn.Sequential(nn.Linear(2, 64), Sine(), nn.Linear(64, 64), nn.ReLU())
head = DAKHead(64, 1, num_data=len(x), likelihood=GaussianLikelihood(0.3))
optimizer = torch.optim.Adam([*backbone.parameters(), *head.parameters()], 3e-3)

for _ in range(EPOCHS):
    for rows in torch.randperm(len(x)).split(90):
        loss = head.loss(backbone(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
head.finish(zip(x.split(150), y.split(150), strict=True), backbone)

# %%
# In place of numbers there are now predictions, with two kinds of uncertainty: what more data
# would remove, and noise. A few rows that were held out say whether the variance is right, and
# set it right.

from pyro_dak import calibrate

backbone.eval()
with torch.no_grad():
    features, features_new = backbone(x_new[:75]), backbone(x_new[75:])
factor = calibrate(head.model, head.guide, features, y_new[:75]).number
p = head.eval()(features_new)
lower, upper = p.interval(0.9)
truth = y_new[75:, None]
coverage = ((truth > lower) & (truth < upper)).float().mean()
print(f"variance times {factor:.2f}; 90 % intervals cover {coverage:.0%} of {len(truth)} new rows")

# %% [figure] Three maps: the true heights, the mean of the model, and its standard deviation.

import matplotlib.pyplot as plt

side = torch.linspace(-3, 3, 90)
map_x = torch.cartesian_prod(side, side)
with torch.no_grad():
    seen = head(backbone(map_x))
maps = {
    "the truth": (height(map_x), "RdBu", (-1, 1)),
    "mean of the model": (seen.mean[:, 0], "RdBu", (-1, 1)),
    "standard deviation of f": (seen.epistemic[:, 0].sqrt(), "magma", (0, None)),
}
figure, axes = plt.subplots(1, 3, figsize=(9, 3), sharey=True)
for ax, (name, (values, colors, (low, high))) in zip(axes, maps.items(), strict=True):
    pixels = values.reshape(90, 90).T.numpy()
    place = {"origin": "lower", "extent": (-3, 3, -3, 3)}
    image = ax.imshow(pixels, cmap=colors, vmin=low, vmax=high, **place)
    ax.plot(*x.T, ".", color="white" if colors == "magma" else "black", ms=1.2, alpha=0.6)
    ax.set(title=name, xlabel="east", xlim=(-3, 3), ylim=(-3, 3))
    figure.colorbar(image, ax=ax, shrink=0.7, ticks=[-1, 0, 1] if high else None)
axes[0].set_ylabel("north")

# %% [check]

distance, sd = map_x.norm(dim=-1), seen.epistemic[:, 0].sqrt()
on_ring = sd[(distance > 1.2) & (distance < 2)].median()
in_middle, in_corners = sd[distance < 0.6].median(), sd[distance > 3].median()
error = (seen.mean[:, 0] - height(map_x))[distance > 3].square().mean().sqrt()
assert 2 * on_ring < in_middle
assert 2 * on_ring < in_corners
assert 0.8 < coverage < 0.99

# %%
# On the ring of data the two maps agree. Elsewhere the mean is a guess, and the right panel says
# so: the standard deviation of f is {{on_ring:.2f}} on the ring, in the median, {{in_middle:.2f}}
# in the middle and {{in_corners:.2f}} in the corners. It says *where* the network guesses, not
# how badly: in the corners the error is {{error:.2f}}. The last layer is uncertain within the
# features that the network has learned, and takes those for granted.
#
# **Read next:** the [tutorial](../tutorial.md) has `fit`, which needs no loop, and all that a
# head can do in [a loop of your own](../tutorial.md#10-your-own-training-loop); the page on
# [where the data end](toy.py) says what the last layer can and cannot know.
