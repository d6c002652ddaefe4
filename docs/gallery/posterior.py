"""# The posterior, held to NUTS

An approximation is as good as its distance from the truth. For the last layer the truth can be
had: by NUTS, which samples any posterior, and in closed form where the noise is Gaussian. ArviZ
reads them all.
"""

# %%
# Some points, a network whose features stay as they are after training, and three posteriors of
# the same weights: the best of those in which weights are independent (mean field, as in the
# paper), a joint Gaussian, and draws of NUTS.

import torch
from torch import nn

from pyro_dak import DAK, GaussianLikelihood, NaturalGuide, fit, run_nuts

EPOCHS = 150
DRAWS = 250
torch.manual_seed(1)
x = 3 * torch.rand(40, 1).sort(0).values - 1.5
x = x[(x[:, 0] < 0.1) | (x[:, 0] > 0.7)]
y = torch.sin(3 * x) + 0.2 * torch.randn(len(x), 1)

network = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 8), nn.Tanh())
model = DAK(network, 8, num_units=2, likelihood=GaussianLikelihood(0.2, learn=False))
joint = NaturalGuide(model)
fit(model, joint, (x, y), epochs=EPOCHS, seed=0, progress=False)
model.requires_grad_(False)

mean_field = NaturalGuide(model, "diagonal")
mean_field.update(model, x, y)
nuts = run_nuts(model, x, y, DRAWS, DRAWS // 2, num_chains=4, seed=0, progress=False)

# %%
# `to_arviz` gives each of them to ArviZ, with names for the dimensions. First the chains: r-hat
# is near 1, and there are many effective draws. They may be more than the draws, because those of
# NUTS alternate around their mean.

import arviz as az

from pyro_dak import to_arviz

posteriors = {"mean field": mean_field, "joint": joint, "NUTS": nuts}
data = {name: to_arviz(model, q, x, y, log_likelihood=False) for name, q in posteriors.items()}
z = data["NUTS"].posterior["z"]
weights = z.to_dataset(name="z")
r_hat, ess = float(az.rhat(weights)["z"].max()), float(az.ess(weights)["z"].min())
print(f"{z.sizes['chain']} chains of {z.sizes['draw']} draws: ", end="")
print(f"r-hat at most {r_hat:.3f}, effective draws at least {ess:.0f}")

# %% [figure] Left: bands of the three posteriors. Right: the draws of two weights.

import matplotlib.pyplot as plt

from pyro_dak.diagnostics.plots import plot_predictive_band

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), width_ratios=(1.5, 1))
grid = torch.linspace(-2, 2, 200).unsqueeze(-1)
plot_predictive_band(model, posteriors, grid, data=(x, y), noise=False, ax=left)
left.legend(loc="upper right")

flat = {name: d.posterior["z"].stack(s=("chain", "draw")) for name, d in data.items()}
flat = {name: values.transpose("s", ...).values.reshape(-1, 14) for name, values in flat.items()}
R = torch.corrcoef(torch.as_tensor(flat["NUTS"]).T).fill_diagonal_(0)
i, k = divmod(int(R.abs().argmax()), 14)
for name, color in (("NUTS", "C0"), ("joint", "C2"), ("mean field", "C1")):
    right.plot(
        flat[name][:600, i], flat[name][:600, k], ".", ms=3, alpha=0.5, color=color, label=name
    )
right.set(xlabel=f"weight {i}", ylabel=f"weight {k}", title="the two most correlated weights")
right.legend(markerscale=3)

# %% [check]

from pyro_dak import compare_posteriors, predict

comparison = compare_posteriors(model, posteriors, x, y, reference="NUTS")
ratio = {
    name: float((comparison.fits[name].sd / comparison.fits["NUTS"].sd).median())
    for name in ("joint", "mean field")
}
field, exact = (predict(model, q, x).epistemic.sqrt() for q in (mean_field, joint))
band_ratio = float((field / exact).median())
joint_ratio, field_ratio, correlation = ratio["joint"], ratio["mean field"], float(R[i, k])
assert r_hat < 1.05
assert abs(joint_ratio - 1) < 0.1
assert field_ratio < 0.7
assert band_ratio > 1.1

# %%
# The joint posterior lies on the draws of NUTS: it is exact here, and needs no chains. Mean field
# cannot hold the correlation of {{correlation:.2f}} on the right. It takes the weights for
# independent, and makes them surer than they are: in the median their standard deviations are
# {{field_ratio:.2f}} times those of NUTS, where those of the joint posterior are
# {{joint_ratio:.2f}} times. What it lacks in the weights it adds to the function: without
# correlations that cancel, its band at the data is {{band_ratio:.2f}} times as wide.
#
# **Read next:** [is the posterior any good?](../researchers.md#is-the-posterior-any-good) has
# checks that need no NUTS; [the three side by
# side](../researchers.md#the-exact-posterior-nuts-and-vi-side-by-side) has the table of
# `compare_posteriors`.
