"""Plots show the numbers that they are given."""

import sys

import numpy
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from pyro_dak import (
    DAK,
    CategoricalLikelihood,
    GaussianLikelihood,
    MeanFieldGuide,
    compare_posteriors,
    components,
    exact_posterior,
)
from pyro_dak.diagnostics import loo, pit_values, plots, simulation_based_calibration
from pyro_dak.inference.draws import Draws, draw_posterior
from pyro_dak.training.plan import History
from pyro_dak.validation import import_optional
from tests import scenarios

import_optional("matplotlib").use("Agg")
pyplot = import_optional("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    pyplot.close("all")


def line(ax, index=0):
    return torch.as_tensor(numpy.asarray(ax.lines[index].get_ydata(), dtype=float))


def one_input(likelihood=None, num_outputs=1):
    likelihood = GaussianLikelihood(0.3) if likelihood is None else likelihood
    x = torch.rand(20, 1)
    model = DAK(
        nn.Identity(), 1, 1, num_outputs, 3, likelihood=likelihood, scaling="none", embedding=False
    ).eval()
    return model, x, torch.sin(6 * x) + 0.3 * torch.randn(20, 1)


def test_band_is_mean_and_quantiles_of_f():
    model, x, y = one_input()
    exact, grid = exact_posterior(model, x, y), torch.linspace(0, 1, 11).unsqueeze(-1)
    ax = plots.plot_predictive_band(model, exact, grid, data=(x, y), truth=grid, level=0.9)
    with torch.no_grad():
        q = exact.guide.moments(model.layer, grid)
    assert_close(line(ax), q.mean.detach().flatten())
    upper = q.mean + 1.6448536 * (q.var + 0.09).sqrt()
    assert_close(line(ax, 2), upper.detach().flatten(), rtol=1e-6, atol=1e-6)
    (band,) = ax.collections
    top = band.get_paths()[0].vertices[:, 1].max()
    assert top == pytest.approx(float((q.mean + 1.6448536 * q.var.sqrt()).max()), abs=1e-6)


def test_bands_of_several_posteriors_are_overlaid():
    model, x, y = one_input()
    exact = exact_posterior(model, x, y)
    samples = draw_posterior(model, exact, num_samples=100, seed=0)
    named = {"VI": MeanFieldGuide(model), "NUTS": Draws(samples.sites), "exact": exact}
    ax = plots.plot_predictive_band(
        model, named, torch.linspace(0, 1, 5).unsqueeze(-1), noise=False
    )
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(named)
    one = plots.plot_predictive_band(model, samples.flat(), x.sort(0).values)
    assert len(one.collections) == 1


def test_band_of_a_class_is_its_probability():
    model, x, _ = one_input(CategoricalLikelihood(), num_outputs=3)
    y = torch.randint(0, 3, (20,))
    guide = MeanFieldGuide(model)
    ax = plots.plot_predictive_band(model, guide, x.sort(0).values, data=(x, y), output=2)
    assert ax.get_ylabel() == "P(class 2)"
    assert ((line(ax) > 0) & (line(ax) < 1)).all()
    assert torch.equal(line(ax, -1), (y == 2).double())


def test_components_are_those_of_the_library():
    case = scenarios.make(guide="full_rank", linear_term=True, num_rows=30)
    axes = plots.plot_components(case.model, case.guide, case.x, output=1)
    assert len(axes) == 2
    h = case.h.detach()
    for p in range(2):
        grid = torch.as_tensor(axes[p].lines[1].get_xdata())
        order = h[:, p].argsort()
        expected = components(case.model, case.guide, case.x, progress=False).mean[order, 1, p]
        drawn = numpy.interp(h[order, p].numpy(), grid.numpy(), line(axes[p], 1).numpy())
        assert_close(torch.as_tensor(drawn), expected.detach(), rtol=0, atol=2e-2)
    single = plots.plot_components(case.model, case.guide, case.x, units=[1])
    assert single.get_title(loc="left") == "unit 1"


def test_learning_curves_are_the_columns_of_the_history():
    rows = [{"loss": 3.0, "val_nlpd": 4.0}, {"loss": 1.0, "val_nlpd": 2.0}]
    ax = plots.plot_learning_curves(History(rows, best_epoch=2))
    assert line(ax).tolist() == [3.0, 1.0]
    assert line(ax, 1).tolist() == [4.0, 2.0]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "training",
        "validation",
        "best",
    ]


def test_a_history_plots_itself_by_the_epochs_that_were_scored():
    _, ax = pyplot.subplots()
    history = History([{"loss": 3.0}, {"loss": 2.0, "val_score": 5.0}, {"loss": 1.0}])
    assert history.plot(ax) is ax
    assert line(ax).tolist() == [3.0, 2.0, 1.0]
    assert (ax.lines[1].get_xdata().tolist(), line(ax, 1).tolist()) == ([2], [5.0])
    assert len(History().plot().lines) == 0


def test_calibration_plots_show_their_curves():
    probs = torch.randn(300, 4).softmax(-1)
    y = torch.randint(0, 4, (300,))
    ax = plots.plot_reliability(y, {"a": probs, "b": probs}, num_bins=5)
    assert len(ax.collections) == 2
    pit = torch.rand(400)
    bars = plots.plot_pit(pit, num_bins=10).containers[0]
    assert [bar.get_height() for bar in bars] == torch.histc(pit, 10, 0, 1).tolist()
    ax = plots.plot_coverage(pit)
    levels = torch.as_tensor(ax.lines[1].get_xdata())
    assert (line(ax, 1) - levels).abs().max() < 4 * 0.5 / 400**0.5


def test_comparison_plots_weights_against_the_reference():
    case = scenarios.gaussian_regression()
    posteriors = {"q": case.guide, "exact": case.exact()}
    comparison = compare_posteriors(case.model, posteriors, case.x, case.y)
    axes = plots.plot_comparison(comparison)
    assert_close(line(axes[0], 1), comparison.fits["q"].mean)
    assert_close(line(axes[1], 1), comparison.fits["q"].sd)
    assert_close(torch.as_tensor(axes[1].lines[1].get_xdata()), comparison.fits["exact"].sd)


def test_ranks_and_leave_one_out_are_drawn():
    case = scenarios.gaussian_regression(num_outputs=1)
    result = simulation_based_calibration(case.model, case.x, num_simulations=20, num_samples=9)
    axes = plots.plot_sbc(result, num_bins=5)
    assert len(axes) == 4
    assert plots.plot_sbc(result, ["mu[0]"], num_bins=5).get_title(loc="left") == "mu[0]"
    with pytest.raises(ValueError, match=r"got \['nothing'\]"):
        plots.plot_sbc(result, ["nothing"])
    left_out = loo(case.model, case.exact(), case.x, case.y, num_samples=500)
    ax = plots.plot_k_hat(left_out)
    assert sum(len(lines.get_xdata()) for lines in ax.lines[1:]) == len(case.x)


def test_plots_draw_into_a_given_axis():
    _, ax = pyplot.subplots()
    case = scenarios.gaussian_regression()
    assert plots.plot_pit(pit_values(case.model, case.guide, case.x, case.y), ax=ax) is ax


def test_bad_requests_are_refused(monkeypatch):
    case = scenarios.gaussian_regression()
    with pytest.raises(ValueError, match=r"`x` must have one column, \(N, 1\); got \(8, 2\)"):
        plots.plot_predictive_band(case.model, case.guide, case.x)
    model, x, _ = one_input()
    with pytest.raises(ValueError, match="`level` must lie strictly between 0 and 1; got 90"):
        plots.plot_predictive_band(model, MeanFieldGuide(model), x, level=90)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match="needs matplotlib"):
        plots.plot_pit(torch.rand(5))
