"""Steps, predictions and test NLPD beside other Bayesian last layers on the same network.

The network is that of kin40k and protein, D -> 64 -> 32 -> 64 with ReLUs. VBLL has its dense
covariance, laplace-torch the full last-layer Laplace approximation of the network that was trained
as NN, with the noise of its training residuals and its own prior precision. All are trained side by
side on the same batches, for as many epochs, with Adam at a constant rate. Peers that are not
installed are left out, and so are sets whose files are not under $PYRO_DAK_DATA.
"""

import math
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import models
from benchmarks.race import load
from benchmarks.steps import CLIP_NORM, BatchStep, Row, ratio_rows, training_step
from benchmarks.timing import time_side_by_side
from models.shared.backbones import backbone
from models.shared.recipe import Recipe
from pyro_dak.prediction import Prediction
from pyro_dak.training.data import ResidentData

__all__ = ["run"]

SETS = ("kin40k", "protein")
LEARNING_RATE, BATCH_SIZE, NUM_EPOCHS, MAX_ROWS = 5e-3, 512, 20, 16_384
PACKAGES = {"nn_svgp": "gpytorch", "vbll": "vbll", "laplace": "laplace"}
Moments = tuple[Tensor, Tensor]


class _OfBoard:
    """A model of the boards: its step, and mean and variance of y."""

    def __init__(self, name: str, x: Tensor, y: Tensor):
        self.model: Any = models.build(name, x.shape[1], recipe=Recipe(), relu_output=True)
        self.model.prepare(x, y)
        self.step: BatchStep = training_step(self.model, len(x), LEARNING_RATE)

    def moments(self, x: Tensor) -> Moments:
        prediction: Prediction = self.model.predict(x)
        return prediction.mean, prediction.variance


class _VBLL:
    """The last layer of VBLL as its authors show it, on the network of the boards."""

    def __init__(self, x: Tensor, y: Tensor):
        from vbll import Regression

        torch.manual_seed(0)
        last = Regression(64, 1, regularization_weight=1 / len(x))
        self.model = nn.Sequential(backbone(x.shape[1], 64, relu_output=True), last)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(self.parameters, LEARNING_RATE, fused=True)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(x).train_loss_fn(y).backward()
        nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM)
        self.optimizer.step()

    @torch.no_grad()
    def moments(self, x: Tensor) -> Moments:
        y = self.model(x).predictive
        return y.mean, y.covariance_diagonal


def _laplace(network: nn.Module, x: Tensor, y: Tensor) -> Callable[[Tensor], Moments]:
    """Mean and variance of y after a Laplace approximation of the last layer of a network."""
    from laplace import Laplace

    residual = float((network(x) - y).detach().square().mean().sqrt())
    posterior = Laplace(network, "regression", "last_layer", "full", sigma_noise=residual)
    posterior.fit(DataLoader(TensorDataset(x, y), batch_size=BATCH_SIZE))
    posterior.optimize_prior_precision()

    def moments(x: Tensor) -> Moments:
        mean, var = posterior(x)
        return mean, var.squeeze(-1) + residual**2

    return moments


def _nlpd(moments: Moments, y: Tensor) -> float:
    mean, var = moments
    return float((var.log() + (y - mean).square() / var + math.log(2 * math.pi)).mean() / 2)


def run(repetitions: int, quick: bool) -> list[Row]:
    """Times as ratios to those of DAK-CF, and the NLPD of standardised y."""
    missing = {name for name, package in PACKAGES.items() if find_spec(package) is None}
    for name in sorted(missing):
        print(f"peers: {PACKAGES[name]} is not installed, so {name} is left out.")
    table: list[Row] = []
    for name in SETS:
        rows = load(name, 500 if quick else None)
        if rows is None:
            print(f"peers: uci/{name}.csv.gz is not under $PYRO_DAK_DATA, so it is left out.")
            continue
        table += _compare(name, rows, missing, repetitions, quick)
    return table


def _compare(
    setting: str, rows: tuple[Tensor, ...], missing: set[str], repetitions: int, quick: bool
) -> list[Row]:
    x, y, x_test, y_test = rows
    runners: dict[str, Any] = {n: _OfBoard(n, x, y) for n in ("nn", "dak_cf")}
    if "nn_svgp" not in missing:
        runners["nn_svgp"] = _OfBoard("nn_svgp", x, y)
    if "vbll" not in missing:
        runners["vbll"] = _VBLL(x, y)
    data = ResidentData(x, y, BATCH_SIZE)
    for epoch in range(1 if quick else NUM_EPOCHS):
        for batch_x, batch_y, _ in data.epoch(torch.Generator().manual_seed(epoch), 0):
            for runner in runners.values():
                runner.step(batch_x, batch_y)
    moments = {name: runner.moments for name, runner in runners.items()}
    if "laplace" not in missing:
        moments["laplace"] = _laplace(runners["nn"].model.network.eval(), x, y)
    nlpd = {name: _nlpd(moments_at(x_test), y_test) for name, moments_at in moments.items()}
    table = []
    for num_rows in (1, min(MAX_ROWS, len(x))):
        calls = {n: partial(moments_at, x[:num_rows]) for n, moments_at in moments.items()}
        timings = time_side_by_side(calls, repetitions)
        table += ratio_rows(f"{setting}, prediction of {num_rows} rows", timings, "dak_cf")
    # Last, because they train on; at one batch, and the scores are known already.
    batch = x[:BATCH_SIZE], y[:BATCH_SIZE]
    steps = {name: partial(runner.step, *batch) for name, runner in runners.items()}
    timings = time_side_by_side(steps, repetitions)
    table += ratio_rows(f"{setting}, training step", timings, "dak_cf")
    return [row | {"nlpd": nlpd[row["name"]]} for row in table]
