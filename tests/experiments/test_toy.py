"""The toy experiment: it runs, its function is a draw of its GP, its scores are right."""

import pytest
import torch

from experiments import toy
from experiments.runs import read_runs
from models.shared.recipe import Recipe
from tests.experiments.command import invoke

# GPyTorch: torch.jit at import, jitter and float32 on tiny data.
gpytorch = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@gpytorch
def test_toy_runs_end_to_end(tmp_path):
    output = invoke(toy.main, "--quick", "--out", tmp_path)
    assert "DAK + residual" in output
    runs = read_runs(tmp_path)
    assert len(runs) == len(toy.PANELS) + 9
    assert {run["config"]["model"] for run in runs} == set(toy.PANELS)
    for name in ("figures/panels.png", "figures/learning_rates.png", "table.md"):
        assert (tmp_path / name).stat().st_size > 0


def test_the_table_has_the_means_over_the_draws():
    runs = []
    for seed, value in ((1, 1.0), (2, 3.0), (2, 5.0)):  # the newest run of a draw counts
        job = toy.make_job("DAK", seed, Recipe(epochs=int(value)))
        metrics = {"rmse_inside": value}
        runs.append({"experiment": "toy", "config": job.config, "metrics": metrics})
    text = toy.table(runs)
    assert text.startswith("Means over 2 draws")
    assert "| DAK | 3.000 |" in text


def rate_run(rate, seed, loss, nlpd):
    recipe = Recipe(epochs=10)
    config = toy.make_job("exact DKL", seed, recipe, rate).config
    metrics = {"rmse_inside": 1.0, "nlpd_inside": nlpd, "coverage_inside": 0.5, "final_loss": loss}
    return {"experiment": "toy", "config": config, "metrics": metrics}


def test_the_table_says_how_often_the_lowest_loss_has_the_best_fit():
    runs = [rate_run(1e-2, seed, loss=-1.0, nlpd=seed) for seed in (1, 2, 3)]
    runs += [rate_run(1e-3, seed, loss=0.0, nlpd=2.5) for seed in (1, 2, 3)]
    runs.append(rate_run(1e-1, 1, loss=-9.0, nlpd=0.0))  # no rate of the figure
    _, text = toy._rate_table(runs)
    assert "| exact DKL | 0.01 | 3 | -1.000 | 1.000 | 2.000 | 0.500 | 3, 2 |" in text
    assert "| exact DKL | 0.001 | 3 | 0.000 | 1.000 | 2.500 | 0.500 | 0, 0 |" in text
    assert "0.1 " not in text.replace("0.01 ", "")


def test_toy_function_is_a_draw_of_its_gp():
    draws = torch.stack([toy.draw_toy(seed).f_test.flatten() for seed in range(400)])
    x = torch.linspace(-12, 12, 100)
    cov = draws.mT @ draws / len(draws)
    expected = (-(x - x.unsqueeze(-1)).square()).exp()
    # The standard error of an entry of a covariance of unit-variance normals is at most sqrt(2/n).
    assert (cov - expected).abs().max() < 5.5 * (2 / 400) ** 0.5


@gpytorch
def test_toy_scores_of_a_perfect_prediction():
    draw = toy.draw_toy(0)
    model = toy.PANELS["exact GP"](Recipe(epochs=1))
    model.fit(draw.x, draw.y)
    prediction = model.predict(draw.x_test)
    scores = toy.score(prediction, draw)
    inside = draw.x_test.abs() <= 7
    half = 1.959964 * prediction.epistemic.sqrt()
    covered = (draw.f_test - prediction.mean).abs() <= half
    assert scores["coverage_inside"] == pytest.approx(covered[inside].float().mean().item())
