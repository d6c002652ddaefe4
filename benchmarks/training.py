"""Training steps of regression, side by side, in the kin40k setting.

D = 8 columns, D_w = 64 features, P = 16 units, batches of B = 512 rows. First come the steps of
`fit` and of one's own loop beside a network as people write it, with a linear output, the mean
squared error, torch's fused Adam and nothing else ("bare network"; a timed call is eight steps);
then all models of the board, whose network has the same loop as they have.
"""

from collections.abc import Iterable
from functools import partial

import torch
from pyro.infer import Trace_ELBO
from torch import Tensor, nn

import models
from benchmarks.natural import NUM_STEPS, NUM_WARM_UP, fit_step, network_step
from benchmarks.steps import NUM_DATA, Row, Step, ratio_rows, training_step
from benchmarks.timing import time_side_by_side
from models.shared.backbones import backbone
from pyro_dak import DAK, ClosedFormELBO, MeanFieldGuide

__all__ = ["run"]


def regression_steps(
    names: Iterable[str], level: int, batch_size: int, is_compiled: bool = False
) -> dict[str, Step]:
    """Steps by name; "dak_trace" is DAK-MC through Pyro's `Trace_ELBO` with 8 particles."""
    torch.manual_seed(0)
    x, y = torch.randn(batch_size, 8), torch.randn(batch_size, 1)
    steps: dict[str, Step] = {}
    for name in names:
        board_name = "dak_mc" if name == "dak_trace" else name
        options = {"level": level} if board_name.startswith("dak") else {}
        model = models.build(board_name, 8, feature_dim=64, **options)
        if name == "dak_trace":
            model.objective = Trace_ELBO(
                num_particles=8, vectorize_particles=True, max_plate_nesting=1
            )
        model.prepare(x, y)
        step = training_step(model, NUM_DATA, is_compiled=is_compiled)
        steps[f"{name} compiled" if is_compiled else name] = partial(step, x, y)
    return steps


def own_loop_step(model: DAK, guide: MeanFieldGuide, x: Tensor, y: Tensor) -> Step:
    """Eight steps of a bare loop on the loss as a module."""
    loss = ClosedFormELBO()(model, guide)
    optimizer = torch.optim.Adam(loss.parameters(), fused=True)

    def step() -> None:
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            loss(x, y, num_data=NUM_DATA).backward()
            optimizer.step()

    return step


def beside_bare_network(
    level: int, batch_size: int, is_compiled: bool, repetitions: int, num_warm_up: int
) -> list[Row]:
    """Ratios of DAK-CF's steps to those of the bare network."""
    torch.manual_seed(0)
    x, y = torch.randn(batch_size, 8), torch.randn(batch_size, 1)
    network = nn.Sequential(backbone(8, 64), nn.Linear(64, 1))
    steps = {"bare network": network_step(network, nn.functional.mse_loss, x, y, is_compiled)}
    model = DAK(backbone(8, 64), 64, level=level)
    guide = MeanFieldGuide(model)
    steps["fit"] = fit_step(model, guide, x, y, compile=is_compiled, num_warm_up=num_warm_up)
    if not is_compiled:
        model = DAK(backbone(8, 64), 64, level=level)
        steps["own loop"] = own_loop_step(model, MeanFieldGuide(model), x, y)
    setting = f"M={2**level - 1}, {'compiled, ' * is_compiled}eight steps"
    return ratio_rows(setting, time_side_by_side(steps, repetitions), "bare network")


def run(repetitions: int, quick: bool) -> list[Row]:
    """Ratios to the network; compiled steps are compared with the compiled network."""
    batch_size = 32 if quick else 512
    table = []
    for level in (3,) if quick else (3, 6, 10):
        for is_compiled in (False,) if quick else (False, True):
            warm_up = 1 if quick else NUM_WARM_UP
            table += beside_bare_network(level, batch_size, is_compiled, repetitions, warm_up)
    for level in (3,) if quick else (3, 6, 10):
        names = ["nn", "dak_cf", "dak_mc", "dak_trace"]
        if level == 3:
            names += ["nn_svgp"] if quick else ["nn_svgp", "svdkl", "avdkl"]
        setting = f"M={2**level - 1}"
        timings = time_side_by_side(regression_steps(names, level, batch_size), repetitions)
        table += ratio_rows(setting, timings, "nn")
        if not quick:
            steps = regression_steps(["nn", "dak_cf"], level, batch_size, is_compiled=True)
            timings = time_side_by_side(steps, repetitions)
            table += ratio_rows(f"{setting}, compiled", timings, "nn compiled")
    return table if quick else table + _growth_with_nodes(repetitions, batch_size)


def _growth_with_nodes(repetitions: int, batch_size: int) -> list[Row]:
    steps = {}
    for level in (3, 6, 10):
        for name in ("dak_cf", "dak_mc"):
            own = regression_steps([name], level, batch_size)
            steps[f"{name} M={2**level - 1}"] = own[name]
    timings = time_side_by_side(steps, repetitions)
    table = []
    for name in ("dak_cf", "dak_mc"):
        own_timings = {key: value for key, value in timings.items() if key.startswith(name)}
        table += ratio_rows("growth with M", own_timings, f"{name} M=7")
    return table
