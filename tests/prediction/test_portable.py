"""The portable module of a model gives what `predict` gives, for every guide and likelihood."""

import pytest
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_dak import calibrate, learn_novelty, predict
from pyro_dak.prediction.novelty import Tails, minus_log_tail, tail_share
from pyro_dak.prediction.portable import PortableTails, entropy, portable_model
from tests import scenarios


def assert_same(case, **options):
    """All outputs of the portable module are those of `predict`."""
    wanted = predict(case.model, case.guide, case.x, progress=False, **options)
    module = portable_model(case.model, case.guide, **options)
    with torch.no_grad():
        found = dict(zip(module.outputs, module(case.x), strict=True))
    noise_scale = found.pop("noise_scale", None)
    assert (noise_scale is not None) == ("df" in module.facts)
    for name, value in found.items():
        torch.testing.assert_close(value, getattr(wanted, name), rtol=1e-7, atol=1e-9)
    return found


@pytest.mark.parametrize("guide", scenarios.GUIDES)
@pytest.mark.parametrize("likelihood", scenarios.LIKELIHOODS)
def test_outputs_are_those_of_predict(likelihood, guide):
    case = scenarios.make(likelihood, guide, num_outputs=3, level=3, linear_term=True)
    assert_same(case)


@pytest.mark.parametrize("guide", scenarios.GUIDES)
def test_probit_probabilities_are_those_of_predict(guide):
    case = scenarios.classification(guide=guide)
    found = assert_same(case, method="probit")
    assert "expected_entropy" not in found


@pytest.mark.parametrize("options", [
    {"embedding": False, "num_units": 4}, {"scaling": "minmax"}, {"scaling": "none"},
    {"input_units": True}, {"features": lambda out: 2 * out},
])  # fmt: skip
def test_ways_to_the_units(options):
    case = scenarios.make("heteroscedastic", num_outputs=1, level=4, **options)
    assert_same(case, residual_variance=True)


@pytest.mark.parametrize("likelihood", ["heteroscedastic", "student_t", "categorical"])
def test_calibration_and_novelty_are_in_it(likelihood):
    case = scenarios.make(likelihood, num_rows=300)
    learn_novelty(case.model, case.guide, case.x[:200], progress=False)
    calibrate(case.model, case.guide, case.x, case.y, progress=False)
    assert float(case.model.calibration) != 1
    assert "novelty" in assert_same(case)
    assert "novelty" not in assert_same(case, novelty=False)


def test_the_exact_posterior_is_a_guide():
    case = scenarios.gaussian_regression()
    case.guide = case.exact()
    assert_same(case)


def test_a_later_change_of_the_model_does_not_show():
    case = scenarios.gaussian_regression()
    module = portable_model(case.model, case.guide)
    before = module(case.x)
    with torch.no_grad():
        for parameter in [*case.model.parameters(), *case.guide.parameters()]:
            parameter.zero_()
    torch.testing.assert_close(module(case.x), before)


@pytest.mark.filterwarnings("ignore")
def test_posteriors_known_by_draws_are_refused():
    case = scenarios.gaussian_regression()
    guide = AutoNormal(case.model)
    guide(case.x, case.y)
    with pytest.raises(NotImplementedError, match="closed form"):
        portable_model(case.model, guide)


@pytest.mark.parametrize("size", [1, 2, 7, 50, 2000])
def test_tails_are_those_of_the_reference(size):
    leverage, of_reference = torch.rand(size).exp(), torch.rand(size)
    tails = Tails.of(leverage, of_reference)
    scores = torch.cat([leverage, 3 * torch.rand(100), torch.tensor([0.0, 1e9])])
    entropies = torch.cat([of_reference, torch.rand(100), torch.tensor([0.0, 1e9])])
    wanted = tails.scores(scores, entropies)
    found = PortableTails(tails, torch.float64)
    torch.testing.assert_close(found(scores, entropies), wanted.novelty)
    by_leverage = minus_log_tail(scores, tails.leverage)
    torch.testing.assert_close(found.by_leverage(scores), by_leverage)
    alone = PortableTails(Tails.of(leverage), torch.float64)
    torch.testing.assert_close(alone(scores, None), tail_share(scores, tails.leverage))


def test_entropy_of_certainty_is_zero():
    probs = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    torch.testing.assert_close(entropy(probs), torch.tensor([1.0, 2.0]).log())
