"""DAK in a plain Pyro script: `python examples/svi_script.py [number of steps]`."""

import sys

import pyro
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from torch import nn

from pyro_dak import DAK, ClosedFormELBO, GaussianLikelihood, MeanFieldGuide


def synthetic(num_rows):
    x = torch.randn(num_rows, 3)
    f = torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2]
    return x, f + 0.2 * torch.randn(num_rows)


def train(make_guide, objective, num_steps):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    (x, y), (x_test, y_test) = synthetic(500), synthetic(500)
    extractor = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 16))
    model = DAK(extractor, 16, num_units=8, level=4, likelihood=GaussianLikelihood(0.5))
    guide = make_guide(model)
    svi = SVI(model, guide, Adam({"lr": 0.01}), objective)
    for _ in range(num_steps):
        loss = svi.step(x, y)
    model.eval()  # the scaling of the features stops following the data
    draws = Predictive(model, guide=guide, num_samples=200, parallel=True)(x_test)["y"]
    rmse = (draws.mean(0)[:, 0] - y_test).square().mean().sqrt()
    print(f"{type(guide).__name__}: ELBO {-loss / len(y):.3f} nats per row, RMSE {rmse:.3f}")


if __name__ == "__main__":
    num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    train(AutoNormal, Trace_ELBO(), num_steps)
    train(MeanFieldGuide, ClosedFormELBO(), num_steps)  # swapped by one line
