"""`fit` with a guide in natural form, which learns by closed steps."""

import math
from types import SimpleNamespace

import pytest
import torch
from pyro.infer import Trace_ELBO
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from pyro_dak import (
    DAK,
    BernoulliLikelihood,
    CategoricalLikelihood,
    ClosedFormELBO,
    GaussianLikelihood,
    HeteroscedasticLikelihood,
    NaturalGuide,
    NaturalVI,
    PoissonLikelihood,
    StudentTLikelihood,
    TrainingError,
    exact_posterior,
    fit,
    predict,
)
from pyro_dak.inference.natural import expected_and_rows, learn_noise
from pyro_dak.training.checkpoint import module_tensors
from pyro_dak.training.loop import Run
from pyro_dak.training.natural import NaturalLoss
from tests import scenarios
from tests.training.runs import assert_same, make_data, train

COVARIANCES = ("joint", "shared", "diagonal")


def fixed_noise():
    return GaussianLikelihood(0.3, learn=False)


def make_model(covariance="joint", network=None, **options):
    torch.manual_seed(1)
    network = network or nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
    model = DAK(network, 4, **({"num_units": 3, "level": 3} | options))
    return model, NaturalGuide(model, covariance)


def make_classes():
    x, y = make_data()
    return x, (y.squeeze(-1) > 0).long()


def assert_exact(model, guide, x, y):
    """q is the posterior of the features as they are."""
    exact = exact_posterior(model, x, y).guide
    assert_close(guide.loc, exact.loc.detach(), atol=1e-8, rtol=1e-8)
    assert_close(guide.scale_tril, exact.scale_tril.detach(), atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("others", [(), (nn.BatchNorm1d(4), nn.Dropout(0.3))], ids=len)
def test_fit_ends_in_the_exact_posterior_of_the_final_features(others):
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4), *others).double()
    model, guide = make_model(network=network, likelihood=fixed_noise())
    train(model, guide)
    assert_exact(model, guide, *make_data())


def test_without_a_final_pass_q_is_an_average_over_steps():
    model, guide = make_model(likelihood=fixed_noise())
    train(model, guide, final_pass=False)
    exact = exact_posterior(model, *make_data()).guide
    assert (guide.loc - exact.loc.detach()).abs().max() > 1e-4
    assert_close(guide.num_rows, torch.tensor(60.0))


def test_on_fixed_features_a_pass_in_batches_is_the_exact_posterior():
    model, guide = make_model(likelihood=fixed_noise(), embedding=False, num_units=4)
    model.layer.log_unit_scale.requires_grad_(False)
    x, y = make_data()
    model.train()
    model.unit_inputs(x)  # running statistics, which no later step changes
    model.eval()
    vi = NaturalVI(model, guide)
    for rows in torch.randperm(len(x)).split(20):
        vi.step(x[rows], y[rows], len(x))
    assert_exact(model, guide, x, y)


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_fit_takes_the_steps_of_natural_vi(covariance):
    x, y = make_data()
    model, guide = make_model(covariance)
    options = {"schedule": "constant", "clip_norm": None, "last_layer_learning_rate": 1e-2}
    train(model, guide, epochs=2, final_pass=False, **options)
    other, by_hand = make_model(covariance)
    vi = NaturalVI(other, by_hand, torch.optim.Adam(other.parameters(), 1e-2, eps=60e-8))
    generator = torch.Generator().manual_seed(0)
    other.train()
    for _ in range(2):
        for rows in torch.randperm(60, generator=generator).tensor_split(3):
            vi.step(x[rows], y[rows], 60)
    for name, tensor in module_tensors(other, by_hand).items():
        assert_close(module_tensors(model, guide)[name], tensor, atol=1e-8, rtol=1e-6, msg=name)


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize(("step", "batch_size"), [(4, 20), (6, 20), (8, 20), (19, 2), (53, 2)])
def test_a_stopped_run_resumes_as_if_uninterrupted(
    tmp_path, covariance, step, batch_size, monkeypatch
):
    whole = make_model(covariance)
    train(*whole, batch_size=batch_size)
    train_step = Run.train_step

    def stop_at(run, *arguments):
        train_step(run, *arguments)
        if run.step == step:
            assert (run.learner.gathering.sums is not None) == (batch_size == 2)
            run.save()
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "train_step", stop_at)
    with pytest.raises(KeyboardInterrupt):
        train(*make_model(covariance), batch_size=batch_size, checkpoint_dir=tmp_path)
    monkeypatch.undo()
    resumed = make_model(covariance)
    options = {"checkpoint_dir": tmp_path, "resume_from": tmp_path}
    train(*resumed, batch_size=batch_size, **options)
    assert_same(module_tensors(*resumed), module_tensors(*whole))


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_rows_that_wait_are_those_of_the_guide_or_refused(covariance):
    model, guide = make_model(covariance)
    learner = NaturalLoss(model, guide, ClosedFormELBO())
    x, y = make_data()
    guide.num_rows.fill_(100_000)  # of which one row is a small part
    seen = learner(x[:1], y[:1], 60.0, 60)[2]
    learner.after_step(seen, 1, 100_000, SimpleNamespace(world_size=1))
    counts, tensors = learner.progress(), learner.progress_tensors()
    other = NaturalLoss(model, guide, ClosedFormELBO())
    other.restore_progress(counts, tensors)
    assert (other.progress(), other.progress_tensors()) == (counts, tensors)
    for name, value in tensors.items():
        broken = tensors | {name: torch.full_like(value, math.nan)}
        with pytest.raises(ValueError, match="not finite, or of another guide"):
            other.restore_progress(counts, broken)
        wrong = tensors | {name: value.unsqueeze(0)}
        with pytest.raises(ValueError, match="not finite, or of another guide"):
            other.restore_progress(counts, wrong)
    with pytest.raises(ValueError, match="not finite, or of another guide"):
        other.restore_progress(counts, dict(list(tensors.items())[:1]))
    with pytest.raises(ValueError, match="num_batches"):
        other.restore_progress(counts | {"num_batches": 0}, tensors)


@pytest.mark.parametrize("kind", [
    GaussianLikelihood,
    HeteroscedasticLikelihood,
    StudentTLikelihood,
    BernoulliLikelihood,
    PoissonLikelihood,
    CategoricalLikelihood,
])  # fmt: skip
@pytest.mark.parametrize("covariance", ["joint", "diagonal"])
def test_training_raises_the_bound_for_every_likelihood(kind, covariance):
    (x, y), likelihood = make_data(), kind()
    num_outputs = 3 if kind is CategoricalLikelihood else 1
    if isinstance(likelihood, CategoricalLikelihood):
        y = y.squeeze(-1).clamp(-1, 1).round().long() + 1
    elif isinstance(likelihood, BernoulliLikelihood | PoissonLikelihood):
        y = (y > 0).double()
    model, guide = make_model(covariance, likelihood=likelihood, num_outputs=num_outputs)
    before = train(model, guide, (x, y), epochs=1)
    after = train(model, guide, (x, y), epochs=10)
    assert after.final["elbo"] > before.final["elbo"]
    assert after.final["kl"] > 0
    assert bool(predict(model, guide, x).log_prob(y).isfinite().all())


def test_a_second_fit_does_not_count_the_rows_twice():
    model, guide = make_model(likelihood=fixed_noise())
    train(model, guide)
    train(model, guide, epochs=1, final_pass=False)
    assert_close(guide.num_rows, torch.tensor(60.0), rtol=0.05, atol=0)


def test_a_loader_gives_the_posterior_of_the_same_rows_as_tensors():
    x, y = make_data()
    model, guide = make_model(likelihood=fixed_noise())
    train(model, guide, DataLoader(TensorDataset(x, y), batch_size=25, shuffle=True))
    assert_exact(model, guide, x, y)


def test_fixed_features_give_the_exact_posterior():
    x, y = make_data()
    model, guide = make_model(likelihood=fixed_noise())
    train(model, guide, fixed_features=True)
    assert_exact(model, guide, x, y)


def test_rows_added_after_a_fit_on_half_give_the_posterior_of_all():
    x, y = make_data()
    model, guide = make_model(likelihood=fixed_noise())
    train(model, guide, (x[:30], y[:30]))
    guide.update(model, x[30:], y[30:])
    assert_exact(model, guide, x, y)


def test_the_noise_in_closed_form_maximises_the_bound():
    x, y = make_data()
    model, guide = make_model(likelihood=GaussianLikelihood(torch.tensor([0.5])))
    train(model, guide)
    h = model.unit_inputs(x)
    weights = guide.fixed_weights(model.layer, h.dtype)
    _, rows = expected_and_rows(ClosedFormELBO(), model, guide, h, y, *weights)
    learn_noise(model.likelihood, rows.sums(model, guide), len(y), 1.0)
    (gradient,) = torch.autograd.grad(
        ClosedFormELBO().terms(model, guide, x, y).elbo, model.likelihood.closed_noise
    )
    assert gradient.abs() < 1e-9


def test_a_noise_that_is_not_learned_stays():
    model, guide = make_model(likelihood=fixed_noise())
    train(model, guide)
    assert model.likelihood.noise_scale.item() == pytest.approx(0.3)


def test_objectives_that_do_not_look_at_q_are_refused():
    with pytest.raises(NotImplementedError, match=r"A NaturalGuide learns from the exact q\(f\)"):
        train(*make_model(), objective=Trace_ELBO())


def test_mixed_precision_trains_a_natural_guide():
    x, y = make_classes()
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
    model = DAK(network, 4, 3, 2, 3, likelihood=CategoricalLikelihood()).float()
    guide = NaturalGuide(model, "shared")
    history = train(model, guide, (x.float(), y), precision="bf16-mixed", epochs=5)
    assert guide.precision.dtype == torch.float64
    assert math.isfinite(history.final["elbo"])
    assert history.final["elbo_per_datum"] > -math.log(2)


def test_early_stopping_goes_back_to_the_best_q():
    x, y = make_data(120)
    data = {"validation": (x[60:], y[60:] + 3 * torch.randn(60, 1)), "patience": 1}
    model, guide = make_model(likelihood=fixed_noise())
    history = train(model, guide, (x[:60], y[:60]), epochs=20, **data)
    assert history.status == "stopped early"
    assert_exact(model, guide, x[:60], y[:60])


def test_the_final_pass_scales_by_the_statistics_of_all_rows():
    model, guide = make_model(likelihood=fixed_noise())
    train(model, guide, epochs=1)
    x, _ = make_data()
    raw = model.embedding(model.feature_extractor(x))
    assert_close(model.scaling.first, raw.mean(0))
    assert_close(model.scaling.second, raw.var(0, correction=0))


COMPILED = """
import functools, torch
from torch.testing import assert_close
from pyro_dak.training.checkpoint import module_tensors
from tests import scenarios
from tests.training.runs import train
from tests.training.test_natural import make_model

torch.set_default_dtype(torch.float64)
torch.compile = functools.partial(torch.compile, backend="aot_eager")
for covariance in ("joint", "shared"):
    results = []
    for compile in (False, True):
        model, guide = make_model(covariance)
        train(model, guide, compile=compile)
        results.append(module_tensors(model, guide))
    for name, tensor in results[0].items():
        if "feature_extractor.2.bias" not in name:  # of which batches are free
            assert_close(results[1][name], tensor, atol=1e-5, rtol=1e-5, msg=name)
assert not torch._dynamo.utils.counters["graph_break"]
"""


@pytest.mark.slow
@scenarios.compiles_training
def test_a_compiled_step_is_the_same_step():
    # In a process of its own: the compiler cannot look through the shape checks of the tests.
    scenarios.run_alone(COMPILED)


def test_independent_weights_are_not_compiled():
    with pytest.warns(UserWarning, match='compile=True is for covariance="joint" and "shared"'):
        train(*make_model("diagonal"), epochs=1, compile=True)


@pytest.mark.parametrize("covariance", ["joint", "shared"])
@pytest.mark.parametrize("noise_scale", [0.1, 0.01, 0.001])
def test_single_precision_gives_the_posterior_also_for_little_noise(covariance, noise_scale):
    """The sums over rows in float32 were off by more than the prior, and even indefinite."""
    likelihood = GaussianLikelihood(noise_scale, learn=False)
    model, guide = make_model(covariance, likelihood=likelihood, level=4)
    model.float()
    guide.float()
    x = torch.randn(2000, 3, dtype=torch.float32)
    train(model, guide, data=(x, x.sum(-1, keepdim=True).sin()), epochs=1, batch_size=512)
    with torch.no_grad():
        new = model.layer.design(model.unit_inputs(3 * x)).double()
        design = model.layer.design(model.unit_inputs(x)).double()
    precision = torch.eye(design.shape[-1]) + design.mT @ design / noise_scale**2
    expected = (torch.linalg.solve(precision, new.mT).mT * new).sum(-1, keepdim=True)
    found = predict(model, guide, 3 * x).functions.var.double()
    assert_close(found, expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("batch_size", [20, 60])
@pytest.mark.parametrize("covariance", COVARIANCES)
def test_targets_that_are_constant_leave_noise_above_rounding(covariance, batch_size):
    likelihood = GaussianLikelihood(torch.tensor([0.1, 0.1]))
    model, guide = make_model(covariance, num_outputs=2, likelihood=likelihood)
    model.float()
    guide.float()
    x, y = (part.float() for part in make_data())
    data = (x, torch.cat([y, torch.zeros_like(y)], -1))
    history = train(model, guide, data=data, epochs=150, batch_size=batch_size)
    assert math.isfinite(history.final["elbo"])
    assert 1e-7 < likelihood.noise_scale[1] < 1e-2
    assert predict(model, guide, x).mean[:, 1].abs().max() < 1e-2


@pytest.mark.parametrize("precision", [None, "bf16-mixed"])
def test_sums_over_rows_keep_the_precision_of_q(precision, monkeypatch):
    dtypes = set()

    def step(guide, sums, *_, **__):
        dtypes.add(sums.curvature.dtype)

    monkeypatch.setattr(NaturalGuide, "step", step)
    model, guide = make_model(likelihood=fixed_noise())
    model.float()
    guide.float()
    data = tuple(part.float() for part in make_data())
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # to which Fabric converts what comes out of a module
    try:
        train(model, guide, data=data, precision=precision, final_pass=False)
    finally:
        torch.set_default_dtype(before)
    assert dtypes == {torch.float64}


def test_a_final_posterior_that_is_not_finite_is_told(monkeypatch):
    model, guide = make_model(likelihood=fixed_noise())
    sums_over = NaturalLoss._sums_over

    def broken(self, *arguments):
        sums, num_rows = sums_over(self, *arguments)
        return sums._replace(curvature=-sums.curvature), num_rows

    monkeypatch.setattr(NaturalLoss, "_sums_over", broken)
    with pytest.raises(TrainingError, match="The posterior of the final features is not finite"):
        train(model, guide)


def test_the_noise_of_a_finished_run_is_that_of_its_posterior():
    torch.manual_seed(0)
    x = torch.randn(157, 3)
    y = torch.sin(2 * x[:, :1]) + 0.2 * torch.randn(157, 1)
    model = DAK(nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 8)), 8, num_units=4)
    guide = NaturalGuide(model)
    fit(model, guide, (x, y), epochs=8, batch_size=5, seed=0, progress=False, novelty=False)
    q = predict(model, guide, x).functions
    best = ((y - q.mean).square() + q.var).mean().sqrt()
    # From the q of the last epoch, on features scaled anew, it was half as large again.
    assert float(model.likelihood.noise_scale.detach() / best) == pytest.approx(1, abs=0.2)
