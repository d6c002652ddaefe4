"""`calibrate`: one number from held-out rows, against closed forms, grids and draws."""

import copy
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch.testing import assert_close

from pyro_dak import CategoricalLikelihood, GaussianLikelihood, calibrate, fit, load, predict, save
from pyro_dak.prediction import ClassPrediction, freeze
from tests import scenarios

NOISY = ["gaussian", "heteroscedastic", "student_t"]
WITH_TEMPERATURE = ["bernoulli", "categorical"]


def make(likelihood="gaussian", guide="mean_field", num_outputs=2, num_rows=60, stretch=2.0):
    """A case whose targets are drawn from its predictions, then stretched about their mean."""
    name = "mean_field" if guide == "normal" else guide
    case = scenarios.make(likelihood, name, num_outputs, num_rows, spread=0.4, prior_scale=1.0)
    if guide == "normal":
        case.guide = AutoNormal(case.model, init_scale=0.2)
        case.guide(case.x, case.y)
    prediction = predict(case.model, case.guide, case.x)
    case.y = prediction.sample(1)[0]
    if isinstance(prediction, ClassPrediction) or likelihood == "bernoulli":
        flipped = torch.arange(num_rows) % 5 == 0
        case.y[flipped] = (case.y[flipped] + 1) % num_outputs
    else:
        case.y = prediction.mean + stretch * (case.y - prediction.mean)
    return case


def calibrated(case, **options):
    return calibrate(case.model, case.guide, case.x, case.y, progress=False, **options)


def nlpd(case, number=None, **options):
    """NLPD of the rows, by predictions with this number."""
    model = copy.deepcopy(case.model)
    model.calibration = None if number is None else torch.tensor(number)
    prediction = predict(model, case.guide, case.x, progress=False, **options)
    return -float(prediction.log_prob(case.y).mean())


@torch.no_grad()
def without_width(guide):
    """The guide with no variance, up to rounding."""
    guide.z_log_scale.fill_(-60.0)
    guide.mu_log_scale.fill_(-60.0)
    return guide


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_with_constant_variance_the_factor_is_the_mean_squared_standardised_residual(num_outputs):
    case = make(num_outputs=num_outputs)
    without_width(case.guide)
    mean = predict(case.model, case.guide, case.x).mean
    residuals = (case.y - mean) / case.model.likelihood.noise_scale.detach()
    result = calibrated(case)
    assert result.kind == "variance"
    assert_close(result.number, float(residuals.square().mean()), rtol=1e-6, atol=0)
    expected = 0.5 * num_outputs * math.log(2 * math.pi * 0.25 * result.number) + num_outputs / 2
    assert_close(result.nlpd_after, expected)


@pytest.mark.parametrize("guide", list(scenarios.GUIDES))
def test_with_gaussian_noise_the_factor_is_the_mean_mahalanobis_distance(guide):
    case = make(guide=guide)
    p = predict(case.model, case.guide, case.x)
    cov = torch.diag_embed(p.variance)
    if p.functions.root is not None:
        shared = torch.einsum("rnf,rng->nfg", p.functions.root, p.functions.root)
        cov = cov + shared - torch.diag_embed(shared.diagonal(dim1=-2, dim2=-1))
    residual = (case.y - p.mean).unsqueeze(-1)
    distance = (residual.mT @ torch.linalg.solve(cov, residual)).flatten()  # (N,)
    assert_close(calibrated(case).number, float(distance.mean() / 2), rtol=1e-6, atol=0)


@pytest.mark.parametrize("guide", ["mean_field", "low_rank"])
@pytest.mark.parametrize("likelihood", NOISY)
def test_calibrated_predictions_are_stretched_about_their_mean(likelihood, guide):
    case = make(likelihood, guide)
    before = predict(case.model, case.guide, case.x)
    k = calibrated(case).number
    after = predict(case.model, case.guide, case.x)
    assert_close(after.mean, before.mean)
    assert_close(after.epistemic, k * before.epistemic)
    assert_close(after.aleatoric, k * before.aleatoric)
    inner = before.mean + (case.y - before.mean) / math.sqrt(k)
    assert_close(after.log_prob(case.y), before.log_prob(inner) - math.log(k))  # of two outputs
    stretched = before.mean + math.sqrt(k) * (before.quantile(0.9) - before.mean)
    assert_close(after.quantile(0.9), stretched)


@pytest.mark.parametrize("guide", ["mean_field", "low_rank"])
@pytest.mark.parametrize("likelihood", WITH_TEMPERATURE)
def test_a_temperature_divides_f(likelihood, guide):
    case = make(likelihood, guide)
    before = predict(case.model, case.guide, case.x)
    result = calibrated(case)
    after = predict(case.model, case.guide, case.x)
    assert result.kind == "temperature"
    assert_close(after.functions.mean, before.functions.mean / result.number)
    assert_close(after.functions.var, before.functions.var / result.number**2)
    if likelihood == "bernoulli":
        f = after.functions.mean + after.functions.var.sqrt() * torch.randn(20_000, 60, 2)
        error = f.sigmoid().std(0) / math.sqrt(len(f))
        assert ((f.sigmoid().mean(0) - after.mean).abs() < 5 * error).all()


@pytest.mark.parametrize(
    ("likelihood", "guide", "options"),
    [
        *((name, "mean_field", {}) for name in (*NOISY, *WITH_TEMPERATURE)),
        ("heteroscedastic", "low_rank", {}),
        ("categorical", "low_rank", {}),
        ("categorical", "mean_field", {"method": "probit"}),
        ("categorical", "mean_field", {"num_samples": 30, "seed": 4}),
        ("gaussian", "mean_field", {"residual_variance": True}),
    ],
)
def test_no_number_of_a_grid_is_better(likelihood, guide, options):
    case = make(likelihood, guide)
    result = calibrated(case, **options)
    assert_close(result.nlpd_before, nlpd(case, **options))
    assert_close(result.nlpd_after, nlpd(case, result.number, **options))
    grid = [nlpd(case, result.number * math.exp(t), **options) for t in (-1, -0.1, -0.01, 0.01, 1)]
    assert result.nlpd_after < min(grid)
    coarse = [nlpd(case, math.exp(t), **options) for t in range(-4, 5)]
    assert result.nlpd_after <= min(coarse)


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
def test_guides_known_by_draws_are_calibrated_too(likelihood):
    case = make(likelihood, "normal", num_rows=300)
    result = calibrated(case)
    assert_close(result.nlpd_after, nlpd(case, result.number))
    assert result.nlpd_after < min(nlpd(case, result.number * factor) for factor in (0.98, 1.02))


def test_targets_that_are_wider_than_predicted_by_a_factor_give_it_back():
    case = make(num_outputs=1, num_rows=4000, stretch=3.0)
    assert abs(calibrated(case).number / 9 - 1) < 4 * math.sqrt(2 / 4000)


@pytest.mark.parametrize("likelihood", ["gaussian", "heteroscedastic"])
def test_draws_have_the_calibrated_variance(likelihood):
    case = make(likelihood)
    calibrated(case)
    prediction = predict(case.model, case.guide, case.x[:5])
    squares = (prediction.sample(40_000) - prediction.mean).square()
    error = squares.std(0) / 200
    assert ((squares.mean(0) - prediction.variance).abs() < 4 * error).all()
    assert not ((squares.mean(0) * 0.25 - prediction.variance).abs() < 4 * error).any()


@pytest.mark.parametrize("likelihood", [*NOISY, *WITH_TEMPERATURE])
def test_calibrating_twice_gives_the_same_number_and_the_same_predictions(likelihood):
    case = make(likelihood)
    state = torch.get_rng_state()
    first = calibrated(case)
    before = predict(case.model, case.guide, case.x)
    assert calibrated(case) == first
    after = predict(case.model, case.guide, case.x)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(after.log_prob(case.y), before.log_prob(case.y))
    assert_close(float(case.model.calibration), first.number)


@pytest.mark.parametrize("likelihood", ["heteroscedastic", "categorical"])
def test_the_number_does_not_depend_on_the_order_of_the_rows(likelihood):
    case = make(likelihood)
    first = calibrated(case)
    whole = predict(case.model, case.guide, case.x)
    case.x, case.y = case.x.flip(0), case.y.flip(0)
    assert_close(calibrated(case, chunk_size=7).number, first.number, rtol=1e-6, atol=0)
    parts = predict(case.model, case.guide, case.x, chunk_size=7)
    assert_close(parts.log_prob(case.y), whole.log_prob(case.y.flip(0)).flip(0), rtol=1e-6, atol=0)


def test_a_model_in_single_precision_is_calibrated_in_double():
    case = make("categorical")
    exact = calibrated(case).number
    case.model.float()
    case.guide.float()
    case.x = case.x.float()
    result = calibrated(case)
    assert case.model.calibration.dtype == torch.float32
    assert_close(result.nlpd_after, nlpd(case, result.number), rtol=1e-6, atol=0)
    assert 0.5 < result.number / exact < 2  # by other draws


# The number belongs to the model.


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
def test_the_number_is_saved_and_loaded(likelihood, tmp_path):
    case = make(likelihood)
    calibrated(case)
    expected = predict(case.model, case.guide, case.x).log_prob(case.y)
    model, guide = load(save(case.model, case.guide, tmp_path / "model"))
    assert torch.equal(model.calibration, case.model.calibration)
    assert torch.equal(predict(model, guide, case.x).log_prob(case.y), expected)


def test_weights_without_a_number_come_with_none():
    case = make()
    weights = copy.deepcopy(case.model.state_dict())
    assert "calibration" not in weights
    calibrated(case)
    calibrated_weights = copy.deepcopy(case.model.state_dict())
    case.model.load_state_dict(weights)
    assert case.model.calibration is None
    case.model.load_state_dict(calibrated_weights)
    assert_close(case.model.calibration, calibrated_weights["calibration"])


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_number_that_is_not_positive_is_refused_with_the_weights(value):
    case = make()
    weights = case.model.state_dict() | {"calibration": torch.tensor(value)}
    with pytest.raises(RuntimeError, match="`calibration` must be positive and finite"):
        case.model.load_state_dict(weights)
    assert case.model.calibration is None


def test_a_new_fit_forgets_the_number(tmp_path):
    case = make()
    calibrated(case)
    options = {"epochs": 2, "batch_size": 60, "seed": 0, "progress": False, "accelerator": "cpu"}
    data = (case.x, case.y)
    history = fit(case.model, case.guide, data, validation=data, checkpoint_dir=tmp_path, **options)
    assert case.model.calibration is None
    assert_close(history.column("val_nlpd")[-1], nlpd(case))
    assert load(next(tmp_path.glob("step-*"))).model.calibration is None


def test_a_fit_that_is_refused_before_it_trains_leaves_the_number():
    case = make()
    number = calibrated(case).number
    with pytest.raises(ValueError, match="`y` must"):
        fit(case.model, case.guide, (case.x, case.y * math.nan), progress=False)
    assert_close(float(case.model.calibration), number)


def test_without_a_number_predictions_are_those_of_the_frozen_posterior():
    case = make()
    frozen = freeze(case.model, case.guide)(case.x)
    before = predict(case.model, case.guide, case.x)
    assert torch.equal(before.epistemic, frozen.var)
    case.model.calibration = torch.tensor(1.0)
    after = predict(case.model, case.guide, case.x)
    assert torch.equal(after.variance, before.variance)
    assert torch.equal(after.log_prob(case.y), before.log_prob(case.y))
    calibrated(case)
    assert torch.equal(freeze(case.model, case.guide)(case.x).var, frozen.var)


def test_eight_threads_predict_with_the_number_while_others_calibrate():
    case = make("categorical")
    calibrated(case)
    expected = predict(case.model, case.guide, case.x).log_probs

    def run(i):
        if i % 8 == 0:
            calibrated(case)
        return predict(case.model, case.guide, case.x, progress=False).log_probs

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(run, range(32)))
    assert all(torch.equal(log_probs, expected) for log_probs in found)


# What cannot be calibrated.


def test_too_few_rows_are_refused():
    case = make()
    with pytest.raises(ValueError, match=r"at least 10 rows.*got 9\. Hold out more rows"):
        calibrate(case.model, case.guide, case.x[:9], case.y[:9])
    assert case.model.calibration is None


def test_rows_that_do_not_match_are_refused():
    case = make()
    with pytest.raises(ValueError, match="same, positive length; got 60, 59"):
        calibrate(case.model, case.guide, case.x, case.y[:-1])


class Own(GaussianLikelihood):
    """A likelihood of one's own, whose noise may mean anything."""


@pytest.mark.parametrize("likelihood", ["poisson", Own(0.5)])
def test_other_likelihoods_are_refused_with_advice(likelihood):
    case = scenarios.make(likelihood, num_rows=20)
    with pytest.raises(NotImplementedError, match=r"Calibrate one of Bernoulli.*or go on without"):
        calibrated(case)


def test_labels_that_are_all_predicted_right_determine_no_temperature():
    case = scenarios.make(CategoricalLikelihood(), num_rows=20)
    case.y = predict(case.model, without_width(case.guide), case.x).label
    with pytest.raises(ValueError, match="near 0: every row is predicted right"):
        calibrated(case)
    assert case.model.calibration is None


def test_targets_that_are_met_exactly_determine_no_factor():
    case = scenarios.make(num_rows=20)
    case.y = predict(case.model, case.guide, case.x).mean
    with pytest.raises(ValueError, match="near 0: every row is predicted right"):
        calibrated(case)


def test_targets_in_other_units_determine_no_factor():
    case = scenarios.make(num_rows=20)
    case.y = 1e6 * case.y
    with pytest.raises(
        ValueError, match=r"near infinity: the predictions are far from.*more rows, look at"
    ):
        calibrated(case)
