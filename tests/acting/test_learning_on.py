"""Posteriors that keep learning: one row after the other, saved and loaded in between."""

import gc

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from pyro_dak import (
    DAK,
    GaussianLikelihood,
    NaturalGuide,
    exact_posterior,
    fit,
    load,
    predict,
    save,
)


def model_and_rows(num_rows, **options):
    options = {"num_units": 4, "level": 3} | options
    x = torch.randn(num_rows, 3)
    y = torch.sin(x[:, :1]) + 0.2 * torch.randn(num_rows, 1)
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh())
    model = DAK(network, 8, likelihood=GaussianLikelihood(0.2), **options)
    model.unit_inputs(x)
    return model.eval(), x, y


@pytest.mark.parametrize("kind", ["natural", "exact"])
def test_a_thousand_updates_equal_one_batch_and_take_no_room(kind):
    model, x, y = model_and_rows(1001)
    posterior = NaturalGuide(model) if kind == "natural" else exact_posterior(model, x[:1], y[:1])

    def num_elements():
        gc.collect()
        kinds = (torch.Tensor, torch.nn.Parameter)
        return sum(t.numel() for t in gc.get_objects() if type(t) in kinds)

    sizes = []
    for row in range(kind == "exact", 1001):
        if kind == "natural":
            posterior.update(model, x[row : row + 1], y[row : row + 1])
        else:
            posterior = posterior.update(model, x[row : row + 1], y[row : row + 1])
        if row in (50, 1000):
            sizes.append(num_elements())
    K = model.layer.num_weights
    assert sizes[1] - sizes[0] < 2 * K**2 < 950 * K  # no rows are kept; a root may be made anew
    guide = posterior if kind == "natural" else posterior.guide
    whole = exact_posterior(model, x, y)
    for value, truth in (
        (guide.loc, whole.guide.loc),
        (guide.weight_covariance(), whole.guide.weight_covariance()),
    ):
        assert (value - truth).norm() < 1e-6 * truth.norm()
    if kind == "exact":
        assert posterior.log_evidence == pytest.approx(whole.log_evidence, rel=1e-6)


def test_a_conditioned_posterior_is_saved_and_goes_on(tmp_path):
    model, x, y = model_and_rows(60)
    guide = NaturalGuide(model)
    fit(model, guide, (x[:30], y[:30]), epochs=2, progress=False)
    guide.update(model, x[30:45], y[30:45], forget=0.9)
    save(model, guide, tmp_path / "model")
    again, loaded = load(tmp_path / "model")
    before, after = (predict(*pair, x) for pair in ((model, guide), (again, loaded)))
    assert_close(after.mean, before.mean)
    assert_close(after.epistemic, before.epistemic)
    for pair in ((model, guide), (again, loaded)):
        pair[1].update(pair[0], x[45:], y[45:])
    assert_close(loaded.loc, guide.loc)
    assert float(loaded.num_rows) == pytest.approx(0.9 * 30 + 30)
