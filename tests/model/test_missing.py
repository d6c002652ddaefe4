"""Missing targets against naive loops over the targets that are there, and against rows removed."""

import math

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from pyro_dak import (
    DAK,
    ClosedFormELBO,
    GaussianLikelihood,
    HeteroscedasticLikelihood,
    JensenELBO,
    LocalReparamELBO,
    MeanFieldGuide,
    NaturalGuide,
    NaturalVI,
    StudentTLikelihood,
    calibrate,
    exact_posterior,
    predict,
    run_nuts,
)
from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.inference.natural import expected_and_rows, learn_noise
from pyro_dak.model.likelihoods import Likelihood
from pyro_dak.model.missing import observed_derivatives, observed_rows, with_missing
from pyro_dak.training.checkpoint import module_tensors
from tests import scenarios
from tests.training.runs import assert_same, make_model, train

C = 3
NOISES = {
    "gaussian": lambda: GaussianLikelihood(torch.tensor([0.3, 0.5, 0.9])),
    "heteroscedastic": lambda: HeteroscedasticLikelihood(torch.tensor([0.3, 0.5, 0.9])),
    "student_t": lambda: StudentTLikelihood(4.0, torch.tensor([0.3, 0.5, 0.9])),
}
KINDS = {**scenarios.LIKELIHOODS, **{f"{name}, noises": make for name, make in NOISES.items()}}


def mark(likelihood):
    return -100 if isinstance(likelihood, type(scenarios.LIKELIHOODS["categorical"]())) else "nan"


def scenario(name, guide="mean_field"):
    """A scenario in which about a third of the targets are missing, and which are there."""
    case = scenarios.make(KINDS[name](), guide, num_outputs=C, num_rows=12)
    there = torch.rand(case.y.shape) < 0.6
    there[0], there[1] = False, True
    case.y = case.y.masked_fill(~there, -100 if mark(case.model.likelihood) == -100 else math.nan)
    return case, there


def one_output(likelihood, c):
    """The likelihood of output c alone."""
    noise = getattr(likelihood, "noise", None)
    if noise is None or noise.log_scale.dim() == 0:
        return likelihood
    return likelihood.with_noise(noise.log_scale[c : c + 1])


def naive_rows(rows_fn, likelihood, y, q, there):
    """A loop over the targets that are there, each with the functions of its output."""
    totals = torch.zeros(len(y))
    for n in range(len(y)):
        if there.dim() == 1:
            root = None if q.root is None else q.root[:, n : n + 1]
            part = FunctionMoments(q.mean[n : n + 1], q.var[n : n + 1], root)
            totals[n] = rows_fn(likelihood, y[n : n + 1], part).sum() if there[n] else 0.0
            continue
        for c in range(C):
            own = slice(c, None, C)
            root = None if q.root is None else q.root[:, n : n + 1, own]
            part = FunctionMoments(q.mean[n : n + 1, own], q.var[n : n + 1, own], root)
            if there[n, c]:
                one = one_output(likelihood, c)
                totals[n] += rows_fn(one, y[n : n + 1, c : c + 1], part).sum()
    return totals


def rows_functions(likelihood: Likelihood):
    if likelihood.has_closed_form:
        yield ClosedFormELBO().expected_log_prob
    if likelihood.has_closed_form or likelihood.has_bound:
        yield JensenELBO().expected_log_prob
    if not likelihood.is_shift_invariant:
        yield lambda likelihood, y, q: likelihood.predictive_log_prob(y, q)


@pytest.mark.parametrize("guide", ["mean_field", "low_rank"])
@pytest.mark.parametrize("name", list(KINDS))
def test_only_targets_that_are_there_count(name, guide):
    case, there = scenario(name, guide)
    likelihood = case.model.likelihood
    with torch.no_grad(), with_missing(likelihood, mark(likelihood)):
        q = case.guide.moments(case.model.layer, case.h)
        for rows_fn in rows_functions(likelihood):
            found = observed_rows(rows_fn, likelihood, case.y, q)
            assert_close(found, naive_rows(rows_fn, likelihood, case.y, q, there))


@pytest.mark.parametrize("name", list(KINDS))
def test_draws_of_f_give_the_mean_over_targets_that_are_there(name):
    case, there = scenario(name)
    likelihood, elbo = case.model.likelihood, LocalReparamELBO(20_000)
    with torch.no_grad(), with_missing(likelihood, mark(likelihood)):
        q = case.guide.moments(case.model.layer, case.h)
        one = LocalReparamELBO(50)
        draws = [observed_rows(one.expected_log_prob, likelihood, case.y, q) for _ in range(400)]
        draws = torch.stack(draws)
        found, error = draws.mean(0), draws.std(0) / math.sqrt(len(draws))
        expected = naive_rows(elbo.expected_log_prob, likelihood, case.y, q, there)
    assert ((found - expected).abs() <= 4 * math.sqrt(2) * error).all()


@pytest.mark.parametrize("name", list(KINDS))
def test_the_program_counts_targets_that_are_there(name):
    case, there = scenario(name)
    likelihood, model = case.model.likelihood, case.model
    sites = {n: 0.3 * torch.randn(shape) for n, shape in model.site_shapes.items()}
    conditioned = poutine.condition(model, sites)
    with with_missing(likelihood, mark(likelihood)):
        trace = poutine.trace(conditioned).get_trace(case.x, case.y, 24)
        trace.compute_log_prob()
    full = case.y.masked_fill(~there, 0)
    distribution = likelihood.distribution(model.functions(case.h, sites))
    element = distribution if there.dim() == 1 else distribution.base_dist
    expected = 2 * torch.where(there, element.log_prob(full), 0.0).sum()
    assert_close(trace.nodes["y"]["log_prob_sum"], expected)


@pytest.mark.parametrize("name", list(KINDS))
def test_trace_elbo_is_the_closed_form_or_above_the_bound_in_the_mean(name):
    case, _ = scenario(name)
    likelihood = case.model.likelihood
    if not (likelihood.has_closed_form or likelihood.has_bound):
        return
    with with_missing(likelihood, mark(likelihood)), torch.no_grad():
        trace = Trace_ELBO(num_particles=500, vectorize_particles=True, max_plate_nesting=1)
        arguments = (case.model, case.guide, case.x, case.y)
        draws = -torch.tensor([trace.loss(*arguments) for _ in range(20)])
        bound = JensenELBO().terms(*arguments).elbo
    error = draws.std() / math.sqrt(len(draws))
    gap = draws.mean() - bound
    assert gap > -4 * error
    assert not likelihood.has_closed_form or gap < 4 * error


@pytest.mark.parametrize("name", list(KINDS))
def test_derivatives_are_those_of_rows_that_are_there_and_zero_elsewhere(name):
    case, there = scenario(name)
    likelihood = case.model.likelihood
    q = case.guide.moments(case.model.layer, case.h)
    q = FunctionMoments(q.mean.detach(), q.var.detach())
    full = case.y.masked_fill(~there, 0)
    torch.manual_seed(0)
    expected = likelihood.expected_derivatives(full, q)
    with with_missing(likelihood, mark(likelihood)):
        torch.manual_seed(0)
        found = observed_derivatives(likelihood, case.y, q)
    columns = there.unsqueeze(-1) if there.dim() == 1 else there
    there = columns.repeat(1, found.gradient.shape[-1] // columns.shape[-1])
    for part, other in zip(found, expected, strict=True):
        assert_close(part, torch.where(there, other, 0.0))


@pytest.mark.parametrize("noise", [0.5, torch.tensor([0.3, 0.5, 0.9])])
def test_the_best_noise_is_the_mean_square_of_targets_that_are_there(noise):
    case = scenarios.make(GaussianLikelihood(noise), "natural_joint", num_outputs=C, num_rows=12)
    there = torch.rand(12, C) < 0.6
    there[:, 2] = False
    likelihood = case.model.likelihood
    y = case.y.masked_fill(~there, math.nan)
    with with_missing(likelihood, "nan"):
        sums, h = [], case.h.detach()
        weights = case.guide.fixed_weights(case.model.layer, h.dtype)
        for own in (slice(5), slice(5, None)):
            parts = (h[own], y[own], *weights)
            rows = expected_and_rows(ClosedFormELBO(), case.model, case.guide, *parts)[1]
            sums.append(rows.sums(case.model, case.guide))
    q = case.guide.moments(case.model.layer, h)
    squares = (case.y - q.mean).square() + q.var
    before = likelihood.noise_scale.detach().clone()
    learn_noise(likelihood, sums[0].plus(sums[1]), 12, 1.0)
    if likelihood.noise_scale.dim() == 0:
        best = squares[there].mean().sqrt()
    else:
        means = [squares[there[:, c], c].mean().sqrt() for c in range(2)]
        best = torch.stack([*means, before[2]])  # of the last output nothing is known
    assert_close(likelihood.noise_scale.detach(), best.detach())


def test_a_natural_guide_ends_in_the_exact_posterior_of_each_output():
    torch.manual_seed(0)
    x, y = torch.randn(60, 3), torch.randn(60, 2)
    there = torch.rand(60, 2) < 0.6
    options = {"num_units": 3, "level": 2, "likelihood": GaussianLikelihood(0.5, learn=False)}
    model = DAK(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), 4, num_outputs=2, **options)
    guide = NaturalGuide(model)
    train(model, guide, (x, y.masked_fill(~there, math.nan)), missing="nan", novelty=False)
    q = predict(model, guide, x).functions
    for c in range(2):
        one = DAK(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), 4, **options).eval()
        one.load_state_dict(model.state_dict())
        exact = exact_posterior(one, x[there[:, c]], y[there[:, c], c])
        expected = predict(one, exact.guide, x).functions
        assert_close(q.mean[:, c : c + 1], expected.mean)
        assert_close(q.var[:, c : c + 1], expected.var)


OBJECTIVES = {
    "gaussian": ["closed_form", "local", "trace"],
    "student_t": ["local", "trace"],
    "heteroscedastic": ["closed_form"],
    "poisson": ["closed_form", "jensen"],
    "bernoulli": ["jensen", "local"],
    "categorical": ["jensen", "local", "trace"],
}
RUNS = [(name, objective) for name, names in OBJECTIVES.items() for objective in names]


def fifteen_missing():
    """Data in which each fourth target is missing."""
    y = torch.randn(60, 1)
    return torch.randn(60, 3), y.masked_fill(torch.arange(60)[:, None] % 4 < 1, math.nan)


def run(name, guide, y, **options):
    torch.manual_seed(1)
    x = torch.randn(len(y), 3, generator=torch.Generator().manual_seed(0))
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    likelihood = scenarios.LIKELIHOODS[name]()
    model = DAK(network, 4, num_units=3, level=2, num_outputs=C, likelihood=likelihood)
    guide = guide(model)
    return model, guide, train(model, guide, (x, y), **options)


@pytest.mark.parametrize("guide", [MeanFieldGuide, NaturalGuide])
@pytest.mark.parametrize(("name", "objective"), RUNS)
def test_a_mark_that_marks_nothing_changes_nothing(name, objective, guide):
    if objective == "trace" and guide is NaturalGuide:
        return
    likelihood = scenarios.LIKELIHOODS[name]()
    y = scenarios.targets(likelihood, 40, C)
    options = {"objective": objective, "validation": 0.2}
    runs = [run(name, guide, y, missing=m, **options) for m in (None, mark(likelihood))]
    tensors = [module_tensors(*found[:2]) for found in runs]
    for key, value in tensors[0].items():
        assert_close(tensors[1][key], value)
    assert_close(runs[1][2].rows, runs[0][2].rows, equal_nan=True)


@pytest.mark.parametrize("guide", [MeanFieldGuide, NaturalGuide])
@pytest.mark.parametrize(("name", "objective"), RUNS)
def test_runs_with_missing_targets_are_finite_and_leave_no_mark(name, objective, guide):
    if objective == "trace" and guide is NaturalGuide:
        return
    likelihood = scenarios.LIKELIHOODS[name]()
    y = scenarios.targets(likelihood, 40, C)
    there = torch.rand(y.shape) < 0.7
    there[0] = False
    marked = y.masked_fill(~there, -100 if mark(likelihood) == -100 else math.nan)
    options = {"objective": objective, "validation": 0.2, "missing": mark(likelihood)}
    model, guide, history = run(name, guide, marked, **options)
    assert all(math.isfinite(row["loss"] + row["val_nlpd"]) for row in history.rows)
    assert model.likelihood.missing is None
    assert math.isfinite(history.final["elbo"])


def test_missing_rows_leave_the_bound_of_the_others():
    x, y = torch.randn(60, 3), torch.randn(60, 1)
    there = torch.arange(60) % 3 > 0
    model, guide = make_model()
    marked = y.masked_fill(~there.unsqueeze(-1), math.nan)
    rates = {"learning_rate": 1e-30, "last_layer_learning_rate": None, "batch_size": 16}
    for data in ((x, marked), DataLoader(TensorDataset(x, marked), 16)):
        history = train(model, guide, data, missing="nan", **rates)
        terms = ClosedFormELBO().terms(model, guide, x[there], y[there])
        assert_close(history.final["expected_log_lik"], terms.expected_log_lik.item())
        assert_close(history.final["kl"], terms.kl.item())


def test_held_out_rows_are_scored_by_the_targets_that_are_there():
    x, y = torch.randn(60, 3), torch.randn(60, 2)
    there = torch.rand(60, 2) < 0.6
    model, guide = make_model(num_outputs=2)
    marked = y.masked_fill(~there, math.nan)
    rates = {"learning_rate": 1e-30, "last_layer_learning_rate": None, "epochs": 1}
    history = train(model, guide, (x, marked), missing="nan", validation=(x, marked), **rates)
    p = predict(model, guide, x)
    element = torch.distributions.Normal(p.mean, p.std).log_prob(y)
    nlpd = -torch.where(there, element, 0.0).sum() / there.any(-1).sum()
    rmse = (p.mean - y)[there].square().mean().sqrt()
    assert_close(history.rows[0]["val_nlpd"], nlpd.item())
    assert_close(history.rows[0]["val_rmse"], rmse.item())


def test_a_run_with_missing_targets_is_resumed(tmp_path):
    x, y = fifteen_missing()
    whole = make_model()
    train(*whole, (x, y), missing="nan", epochs=4)
    stopped = make_model()
    train(*stopped, (x, y), missing="nan", epochs=4, checkpoint_dir=tmp_path, keep_last=9)
    resumed = make_model()
    train(*resumed, (x, y), missing="nan", epochs=4, resume_from=tmp_path / "step-000000006")
    assert_same(module_tensors(*resumed), module_tensors(*whole))


def test_scripts_mark_missing_targets_too():
    x, y = fifteen_missing()
    model, guide = make_model()
    natural = NaturalGuide(model)
    with pytest.raises(ValueError, match="15 NaN"):
        train(model, guide, (x, y))
    model.likelihood.missing = "nan"
    pyro.clear_param_store()
    assert math.isfinite(SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO()).step(x, y))
    assert math.isfinite(NaturalVI(model, natural).step(x, y))
    for call in (
        exact_posterior,
        lambda *a: run_nuts(*a, 5, 5),
        lambda m, *a: calibrate(m, guide, *a),
    ):
        with pytest.raises(NotImplementedError, match="Leave out the rows"):
            call(model.eval(), x, y)


class Own(GaussianLikelihood):
    """A likelihood of one's own."""


@pytest.mark.usefixtures("no_type_checker")
@pytest.mark.parametrize(("likelihood", "missing", "error", "message"), [
    (GaussianLikelihood(), -100, ValueError, '`missing` must be "nan" for the targets of Gaussian'),
    (GaussianLikelihood(), "none", ValueError, "got 'none'"),
    (GaussianLikelihood(), True, ValueError, "got True"),
    (scenarios.LIKELIHOODS["categorical"](), "nan", ValueError, "a negative integer such as -100"),
    (scenarios.LIKELIHOODS["categorical"](), 1, ValueError, "a negative integer such as -100"),
    (Own(), "nan", NotImplementedError, "Own does not say what it is without some targets"),
])  # fmt: skip
def test_marks_that_make_no_sense_are_refused(likelihood, missing, error, message):
    model, guide = make_model(likelihood=likelihood, num_outputs=2)
    with pytest.raises(error, match=message):
        train(model, guide, missing=missing)


def test_data_without_any_target_are_refused():
    x = torch.randn(60, 3)
    y = torch.full((60, 1), math.nan)
    with pytest.raises(ValueError, match="all of them are missing"):
        train(*make_model(), (x, y), missing="nan")
    with pytest.raises(ValueError, match="all of them are missing"):
        train(*make_model(), (x, x[:, :1]), missing="nan", validation=(x, y))
    with pytest.raises(ValueError, match="60 NaN"):
        train(*make_model(), (x, y))
