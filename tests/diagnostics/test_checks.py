"""k-hat, leave-one-out, PIT and predictive checks of one posterior."""

import math

import pytest
import torch
from pyro.infer.autoguide import AutoDelta
from torch.testing import assert_close

from pyro_dak import GaussianLikelihood, MeanFieldGuide, exact_posterior
from pyro_dak.diagnostics import k_hat, loo, pit_values, posterior_predictive_check
from pyro_dak.diagnostics.calibration import chi_square_p_value
from pyro_dak.inference.draws import Draws, draw_posterior
from tests import scenarios


def narrowed(posterior, factor):
    """The exact posterior with all its standard deviations times a factor."""
    guide = posterior.guide
    guide.set_parameters(guide.loc, factor * guide.scale_tril.detach())
    return guide


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_the_exact_posterior_has_constant_weights(num_outputs):
    case = scenarios.gaussian_regression(num_outputs=num_outputs, num_rows=30)
    assert k_hat(case.model, case.exact(), case.x, case.y) == -math.inf


def test_the_exact_posterior_in_single_precision_is_still_good():
    torch.set_default_dtype(torch.float32)
    case = scenarios.gaussian_regression(num_rows=30)
    assert k_hat(case.model, case.exact(), case.x, case.y) < 0.5


def test_wrong_guides_are_caught():
    case = scenarios.gaussian_regression(num_rows=30)
    assert k_hat(case.model, narrowed(case.exact(), 0.5), case.x, case.y) > 0.7
    assert k_hat(case.model, MeanFieldGuide(case.model), case.x, case.y) > 0.7
    point = AutoDelta(case.model)
    point(case.x, case.y)
    assert k_hat(case.model, point, case.x, case.y) == math.inf


def test_k_hat_needs_a_density():
    case = scenarios.gaussian_regression()
    draws = draw_posterior(case.model, case.guide, num_samples=5)
    with pytest.raises(TypeError, match="`guide` must have a density q"):
        k_hat(case.model, Draws(draws.sites), case.x, case.y)


def exact_loo(case):
    """log p(y_n | y_-n) from the posterior without row n, `(N,)`."""
    values = []
    for n in range(len(case.x)):
        rest = torch.arange(len(case.x)) != n
        guide = exact_posterior(case.model, case.x[rest], case.y[rest]).guide
        with torch.no_grad():
            q = guide.moments(case.model.layer, case.h[n : n + 1])
            values.append(case.model.likelihood.predictive_log_prob(case.y[n : n + 1], q))
    return torch.cat(values)


def test_leave_one_out_equals_refitting_without_each_row():
    case = scenarios.gaussian_regression(num_rows=25)
    expected = exact_loo(case)
    result = loo(case.model, case.exact(), case.x, case.y, num_samples=20_000)
    assert result.k_hat.max() < 0.7
    assert_close(result.pointwise, expected, rtol=0, atol=0.05)
    assert result.elpd == pytest.approx(float(expected.sum()), abs=0.15)
    assert result.se == pytest.approx(25**0.5 * float(result.pointwise.std(correction=0)))
    assert result.num_bad == 0


def test_leave_one_out_corrects_a_guide_that_is_too_wide():
    case = scenarios.gaussian_regression(num_rows=25)
    expected = float(exact_loo(case).sum())
    guide = narrowed(case.exact(), 1.15)
    draws = draw_posterior(case.model, guide, num_samples=20_000, seed=0)
    corrected = loo(case.model, guide, case.x, case.y, num_samples=20_000)
    taken_for_exact = loo(case.model, Draws(draws.sites), case.x, case.y)
    assert corrected.elpd == pytest.approx(expected, abs=0.3)
    assert abs(taken_for_exact.elpd - expected) > 2 * abs(corrected.elpd - expected)


def test_effective_number_of_parameters_is_in_sample_minus_left_out():
    case = scenarios.gaussian_regression(num_rows=25)
    exact = case.exact()
    with torch.no_grad():
        moments = exact.guide.moments(case.model.layer, case.h)
        in_sample = case.model.likelihood.predictive_log_prob(case.y, moments).sum()
    expected = float(in_sample - exact_loo(case).sum())
    result = loo(case.model, exact, case.x, case.y, num_samples=10_000)
    assert result.num_effective == pytest.approx(expected, rel=0.05)


def simulated(case, noise_scale=0.5):
    """Targets from the prior of the model, so that its predictions are calibrated."""
    with torch.no_grad():
        case.y = case.model(case.x)
    case.model.likelihood = GaussianLikelihood(noise_scale)
    return case


def test_pit_of_held_out_rows_is_uniform_for_the_true_model():
    case = simulated(scenarios.gaussian_regression(num_outputs=1, num_rows=2400))
    x, y, x_test, y_test = case.x[:2000], case.y[:2000], case.x[2000:], case.y[2000:]
    exact = exact_posterior(case.model, x, y)
    pit = pit_values(case.model, exact, x_test, y_test)
    assert chi_square_p_value(torch.histc(pit, 10, 0, 1)) > 1e-3
    case.model.likelihood = GaussianLikelihood(1.5)
    pit = pit_values(case.model, exact, x_test, y_test)
    assert chi_square_p_value(torch.histc(pit, 10, 0, 1)) < 1e-6


def test_pit_of_draws_agrees_with_the_closed_form():
    case = scenarios.gaussian_regression(num_rows=40)
    exact = case.exact()
    draws = draw_posterior(case.model, exact, num_samples=20_000, seed=0)
    closed = pit_values(case.model, exact, case.x, case.y)
    ranked = pit_values(case.model, Draws(draws.sites), case.x, case.y)
    error = (closed * (1 - closed) / 20_000).sqrt() + 1e-4
    assert ((ranked - closed).abs() < 4.5 * error).all()


def test_classes_have_no_pit():
    case = scenarios.classification()
    with pytest.raises(NotImplementedError, match="Classes have no order"):
        pit_values(case.model, case.guide, case.x, case.y)


def test_predictive_checks_pass_for_the_model_and_fail_for_another_noise():
    case = simulated(scenarios.gaussian_regression(num_outputs=1, num_rows=200))
    exact = case.exact()
    checks = posterior_predictive_check(case.model, exact, case.x, case.y)
    assert set(checks) == {"mean", "sd", "min", "max", "skewness"}
    assert all(0.005 < check.p_value < 0.995 for check in checks.values())
    assert checks["sd"].observed == pytest.approx(float(case.y.std()))
    case.model.likelihood = GaussianLikelihood(3.0)
    checks = posterior_predictive_check(case.model, exact, case.x, case.y)
    assert checks["sd"].p_value > 0.999


def test_predictive_checks_of_classes_count_them():
    case = scenarios.classification(num_rows=50)
    checks = posterior_predictive_check(case.model, case.guide, case.x, case.y)
    assert set(checks) == {"share[0]", "share[1]", "share[2]"}
    assert checks["share[1]"].observed == pytest.approx(float((case.y == 1).double().mean()))
    own = posterior_predictive_check(
        case.model, case.guide, case.x, case.y, statistics={"first": lambda v: v[..., 0]}
    )
    assert own["first[0]"].observed == float(case.y[0] == 0)
