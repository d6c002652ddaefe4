"""# A part of your own model

`AdditiveGP` is the process without a likelihood: a function that nobody knows, as one line in a
Pyro program of yours. Around it stands whatever you do know.
"""

# %%
# Twelve bicycle counters report the rides of a day. Rides depend on the season, on rain, which
# counts for more in summer, and on the place. Counts are Poisson.

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from pyro.optim import ClippedAdam
from torch import nn

from pyro_dak import AdditiveGP, FullRankGuide, LaplaceKernel

STEPS = 800
PLACES = 12
pyro.set_rng_seed(0)
day = 365 * torch.rand(500)
rain = torch.rand(500)
place = torch.randint(PLACES, (500,))
offset = 0.4 * torch.randn(PLACES)


def season(day):
    return 3.5 - torch.cos(2 * torch.pi * (day - 20) / 365)


def of_rain(day):
    return -0.8 + 0.5 * torch.cos(2 * torch.pi * (day - 20) / 365)


rides = dist.Poisson((season(day) + rain * of_rain(day) + offset[place]).exp()).sample()

# %%
# One process has two functions of the day: the season, and what rain does. Any module makes its
# features; here they go round with the year. Its lengthscale and the scales of its units are not
# numbers but have priors of their own.


class Year(nn.Module):
    """Features that go round with the year."""

    def forward(self, day):
        angle = 2 * torch.pi * day / 365
        return torch.cat([angle.cos(), angle.sin()], -1)


process = AdditiveGP(
    Year(),
    feature_dim=2,
    num_units=6,
    num_functions=2,
    kernel=LaplaceKernel(dist.LogNormal(0.0, 0.5)),
    prior={"unit_scale": dist.LogNormal(-1.0, 0.5)},
    name="year",
)


def counters(day, rain, place, rides=None):
    f = process(day.unsqueeze(-1))  # (..., rows, 2)
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    with pyro.plate("places", PLACES):
        at = pyro.sample("at", dist.Normal(0.0, spread))
    with pyro.plate("days", len(day)):
        level = pyro.deterministic("level", 3.5 + f[..., 0])
        wet = pyro.deterministic("wet", f[..., 1])
        rate = (level + rain * wet + at[..., place]).exp()
        return pyro.sample("rides", dist.Poisson(rate), obs=rides)


# %%
# The process has a guide of this library, and all other sites get one of Pyro's. Then it is
# `SVI`, as ever.

others = ["spread", "at", "year.lengthscale", "year.unit_scale"]
guide = AutoGuideList(counters)
guide.append(FullRankGuide(process))
guide.append(AutoNormal(poutine.block(counters, expose=others), init_scale=0.05))

pyro.clear_param_store()
elbo = Trace_ELBO(num_particles=2, vectorize_particles=True, max_plate_nesting=1)
svi = SVI(counters, guide, ClippedAdam({"lr": 0.02, "lrd": 0.05 ** (1 / STEPS)}), elbo)
losses = [svi.step(day, rain, place, rides) for _ in range(STEPS)]
process.eval()

days = torch.linspace(0, 365, 120)
anywhere = torch.zeros(120, dtype=torch.long)
draws = Predictive(counters, guide=guide, num_samples=300, parallel=True)
draws = draws(days, torch.zeros(120), anywhere)

# %% [figure] The season, the effect of rain over the year, and the places, with their bands.

import matplotlib.pyplot as plt

figure, (left, middle, right) = plt.subplots(1, 3, figsize=(9, 3), width_ratios=(1.2, 1.2, 1))
ends = torch.tensor([0.05, 0.95])
shift = offset.mean()  # of the places; the season takes it
for ax, site, truth, color in (
    (left, "level", season(days) + shift, "C0"),
    (middle, "wet", of_rain(days), "C2"),
):
    curves = draws[site].reshape(300, 120)
    ax.fill_between(days, *curves.quantile(ends, 0), color=color, alpha=0.2, lw=0)
    ax.plot(days, curves.mean(0), color=color, label="mean, 90 % band")
    ax.plot(days, truth, "--", color="black", lw=1, label="truth")
    ax.set(xlabel="day of the year", xticks=range(0, 366, 91))
left.set(title="log rides on a dry day")
middle.set(title="what rain does to it")
left.legend(loc="lower center")
at = draws["at"].reshape(300, PLACES)
at = at - at.mean(1, keepdim=True)
order = offset.argsort()
low, high = at.quantile(ends, 0)[:, order]
right.hlines(range(PLACES), low, high, color="C3", lw=2.5, alpha=0.6)
right.plot(at.mean(0)[order], range(PLACES), "o", color="C3", ms=4)
right.plot((offset - shift)[order], range(PLACES), "|", color="black", ms=9, mew=1.5)
right.set(title="places, against their mean", yticks=[], xlabel="effect")

# %% [check]

held = {}
for site, truth in (("level", season(days) + shift), ("wet", of_rain(days))):
    low, high = draws[site].reshape(300, 120).quantile(ends, 0)
    held[site] = float(((truth > low) & (truth < high)).float().mean())
low, high = at.quantile(ends, 0)
held_places = float(((offset - shift > low) & (offset - shift < high)).float().mean())
held_level, held_rain = held["level"], held["wet"]
error = float((draws["level"].reshape(300, 120).mean(0) - season(days) - shift).abs().max())
assert error < 0.25
assert held_level > 0.4
assert held_rain > 0.4
assert held_places > 0.6

# %%
# Black lines are what drew the counts. The 90 % bands hold {{held_level:.0%}} of the season and
# {{held_rain:.0%}} of what rain does, and the intervals {{held_places:.0%}} of the places. The
# bands are a little narrow: the embedding has been learned from the same counts, the guide takes
# the process and the other sites for independent, and {{STEPS}} steps are few.
#
# **Read next:** [DAK as a part](../composing.md) has two processes in one program, decoders,
# ordered answers and censored times; the [researchers' guide](../researchers.md) swaps priors,
# guides and kernels.
