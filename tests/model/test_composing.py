"""A process beside random effects, as in `docs/composing.md`, recovers both."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal
from pyro.optim import ClippedAdam
from torch import nn

from pyro_dak import AdditiveGP

NUM_GROUPS, NUM_STEPS = 50, 1500


def simulate():
    """Rows in groups of ten: inputs, groups, effects of the groups, the trend, and y."""
    x, group = torch.rand(500, 2), torch.arange(NUM_GROUPS).repeat_interleave(10)
    effects = 0.8 * torch.randn(NUM_GROUPS)
    trend = torch.sin(6 * x[:, 0]) + x[:, 1]
    return x, group, effects, trend, trend + effects[group] + 0.3 * torch.randn(500)


def build_program(gp):
    """The process, effects of groups, and noise, all with priors."""

    def program(x, group, y=None):
        f = pyro.deterministic("trend", gp(x)[..., 0].unsqueeze(-2), event_dim=2)[..., 0, :]
        spread = pyro.sample("spread", dist.LogNormal(torch.tensor(0.0), 1.0))
        noise = pyro.sample("noise", dist.LogNormal(torch.tensor(-1.0), 1.0))
        with pyro.plate("groups", NUM_GROUPS):
            effect = pyro.sample("effect", dist.Normal(torch.tensor(0.0), spread))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(f + effect[..., group], noise), obs=y)

    return program


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_random_effects_and_trend_are_recovered(seed):
    torch.set_default_dtype(torch.float32)
    pyro.set_rng_seed(seed)
    x, group, effects, trend, y = simulate()
    network = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 8))
    gp = AdditiveGP(network, feature_dim=8, num_units=4)
    program = build_program(gp)
    guide = AutoMultivariateNormal(program, init_scale=0.05)
    elbo = Trace_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=1)
    optimizer = ClippedAdam({"lr": 0.02, "lrd": 0.05 ** (1 / NUM_STEPS)})
    svi = SVI(program, guide, optimizer, elbo)
    for _ in range(NUM_STEPS):
        svi.step(x, group, y)
    gp.eval()
    draws = Predictive(program, guide=guide, num_samples=1000, parallel=True)(x, group)
    drawn = draws["effect"].reshape(1000, NUM_GROUPS)
    is_inside = (effects > drawn.quantile(0.05, 0)) & (effects < drawn.quantile(0.95, 0))
    assert 0.8 <= is_inside.double().mean() <= 0.97
    # Only the sum of a constant of the trend and the mean of the effects is known.
    found = draws["trend"].reshape(1000, -1).mean(0)
    error = (found - found.mean()) - (trend - trend.mean())
    assert error.square().mean().sqrt() < 0.15
