"""`fit`: reproducible, right about its history, for every objective, precision and device."""

import math

import pytest
import torch
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from pyro_dak import (
    DAK,
    CategoricalLikelihood,
    ClosedFormELBO,
    GaussianLikelihood,
    HorseshoePrior,
    LocalReparamELBO,
    LowRankGuide,
    MeanFieldGuide,
    fit,
    predict,
)
from pyro_dak.training.checkpoint import module_tensors
from pyro_dak.training.fit import TrainingError, build_objective
from tests.training.runs import assert_same, make_data, make_model, parameters_after, train


@pytest.mark.parametrize("objective", ["closed_form", "local", "trace"])
def test_same_seed_gives_the_same_history_and_parameters(objective):
    histories, parameters = [], []
    for _ in range(2):
        model, guide = make_model()
        histories.append(train(model, guide, objective=objective, validation=0.2))
        parameters.append(module_tensors(model, guide))
    assert [repr(row) for row in histories[0].rows] == [repr(row) for row in histories[1].rows]
    assert_same(*parameters)


def test_another_seed_gives_other_parameters():
    first, second = parameters_after(seed=0), parameters_after(seed=1)
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_training_leaves_the_global_random_state_alone():
    model, guide = make_model()
    before = torch.get_rng_state()
    train(model, guide)
    assert torch.equal(before, torch.get_rng_state())


def test_training_raises_the_elbo_and_fits():
    model, guide = make_model(likelihood=GaussianLikelihood(0.3))
    x, y = make_data(200)
    history = train(model, guide, (x, y), epochs=30)
    assert history.rows[-1]["elbo"] > history.rows[0]["elbo"]
    assert (predict(model, guide, x).mean - y).square().mean() < 0.05 * y.var()


def test_history_of_one_full_batch_is_the_elbo_at_the_start():
    model, guide = make_model(scaling="none", bounds=(-1.0, 1.0))
    x, y = make_data()
    terms = ClosedFormELBO().terms(model, guide, x, y)
    row = train(model, guide, (x, y), epochs=1, batch_size=60).rows[0]
    assert_close(row["elbo"], terms.elbo.item())
    assert_close(row["kl"], terms.kl.item())
    assert_close(row["expected_log_lik"], terms.expected_log_lik.item())
    assert_close(row["elbo_per_datum"], terms.elbo.item() / 60)
    assert_close(row["loss"], -terms.elbo.item() / 60)


@pytest.mark.parametrize("kind", ["tensors", "loader", "fixed features", "early stop", "minmax"])
def test_the_final_bound_is_that_of_the_model_that_fit_leaves(kind):
    x, y = make_data()
    model, guide = make_model(scaling="minmax" if kind == "minmax" else "standardize")
    options = {
        "fixed features": {"fixed_features": True},
        "early stop": {"validation": (x, -y), "patience": 2, "learning_rate": 0.3},
    }
    data = DataLoader(TensorDataset(x, y), 25, shuffle=True) if kind == "loader" else (x, y)
    history = train(model, guide, data, epochs=5, **options.get(kind, {}))
    terms = ClosedFormELBO().terms(model, guide, x, y)
    expected = {"elbo": terms.elbo, "kl": terms.kl, "expected_log_lik": terms.expected_log_lik,
                "elbo_per_datum": terms.elbo / 60, "loss": -terms.elbo / 60}  # fmt: skip
    assert_close(history.final, {name: value.item() for name, value in expected.items()})
    assert history.final["elbo"] != history.rows[-1]["elbo"]  # the latter is a running mean


@pytest.mark.parametrize("objective", ["closed_form", "local", "trace"])
def test_evaluating_the_bound_changes_nothing_else(objective):
    states, histories = [], []
    for evaluate in (True, True, False):
        model, guide = make_model()
        model.feature_extractor.append(nn.BatchNorm1d(4))
        own = torch.Generator().manual_seed(3)
        loader = DataLoader(TensorDataset(*make_data()), 25, shuffle=True, generator=own)
        history = train(model, guide, loader, objective=objective, evaluate=evaluate)
        states.append(module_tensors(model, guide) | {"own": own.get_state()})
        histories.append(history)
    assert_same(states[0], states[2])
    assert repr(histories[0].rows) == repr(histories[2].rows)
    assert repr(histories[0].final) == repr(histories[1].final)
    assert math.isfinite(histories[0].final["elbo"])
    assert histories[2].final is None


@pytest.mark.parametrize("objective", ["closed_form", "local"])
def test_scoring_held_out_rows_changes_neither_weights_nor_running_statistics(objective):
    states = []
    for options in ({}, {"validation": make_data(7)}):
        model, guide = make_model()
        model.feature_extractor.append(nn.BatchNorm1d(4))
        train(model, guide, objective=objective, **options)
        states.append(module_tensors(model, guide))
    assert_same(*states)


def test_the_score_of_held_out_rows_counts_the_covariance_between_outputs():
    model, _ = make_model(num_outputs=3)
    guide = LowRankGuide(model)
    nn.init.normal_(guide.factor)
    x, y = make_data()[0], torch.randn(60, 3)
    row = train(model, guide, (x, y), epochs=1, validation=(x, y)).rows[-1]
    with torch.no_grad():
        q = guide.moments(model.layer, model.eval().unit_inputs(x))
        cov = torch.einsum("rnf,rng->nfg", q.root, q.root)
        independent = q.var - cov.diagonal(dim1=-2, dim2=-1) + model.likelihood.noise_scale**2
        p = torch.distributions.MultivariateNormal(q.mean, cov + torch.diag_embed(independent))
        assert row["val_nlpd"] == pytest.approx(-p.log_prob(y).mean().item())


@pytest.mark.parametrize(("likelihood", "name"), [
    (GaussianLikelihood(), ClosedFormELBO), (CategoricalLikelihood(), LocalReparamELBO),
])  # fmt: skip
def test_auto_objective_fits_the_likelihood(likelihood, name):
    model, guide = make_model(likelihood=likelihood, num_outputs=2)
    assert type(build_objective("auto", model, guide)) is name


def test_auto_objective_is_traced_for_other_guides_and_priors():
    model, _ = make_model()
    assert isinstance(build_objective("auto", model, AutoNormal(model)), Trace_ELBO)
    model, guide = make_model(prior={"shrinkage": HorseshoePrior()})
    assert isinstance(build_objective("auto", model, guide), Trace_ELBO)


def test_objectives_of_pyro_and_autoguides_train():
    model, _ = make_model()
    guide = AutoNormal(model)
    train(model, guide)
    assert predict(model, guide, make_data()[0]).std.shape == (60, 1)
    model, guide = make_model()
    history = train(model, guide, objective=TraceMeanField_ELBO())
    assert math.isfinite(history.rows[-1]["loss"])


def test_classes_train_and_validate():
    x, _ = make_data(120)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    model, guide = make_model(likelihood=CategoricalLikelihood(), num_outputs=3)
    history = train(model, guide, (x, y), epochs=40, validation=(x, y))
    assert history.rows[-1]["val_accuracy"] > 0.9


def test_two_models_trained_alternately_equal_each_alone():
    alone = parameters_after(epochs=2)
    first, second = make_model(), make_model(num_units=2)
    train(*first, epochs=2)
    train(*second, epochs=2)
    assert_same(module_tensors(*first), alone)


class CountingExtractor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.rows = 0

    def forward(self, x: Tensor) -> Tensor:
        self.rows += len(x)
        return self.linear(x)


@pytest.mark.parametrize("as_loader", [False, True])
def test_fixed_features_are_computed_once_per_row_and_extractor_stays(as_loader):
    x, y = make_data()
    extractor = CountingExtractor()
    model = DAK(extractor, 4, num_units=3, level=3)
    guide = MeanFieldGuide(model)
    before = extractor.linear.weight.clone()
    embedding = model.embedding.weight.clone()
    data = DataLoader(TensorDataset(x, y), batch_size=7) if as_loader else (x, y)
    train(model, guide, data, epochs=4, fixed_features=True)
    assert extractor.rows == 60
    assert torch.equal(extractor.linear.weight, before)
    assert extractor.linear.weight.requires_grad
    assert not torch.equal(model.embedding.weight, embedding)


def test_one_row_trains():
    model, guide = make_model()
    x, y = make_data(1)
    assert math.isfinite(train(model, guide, (x, y)).rows[-1]["loss"])


def test_training_has_gradients_where_the_caller_has_none():
    with torch.no_grad():
        found = parameters_after(epochs=2)
    assert_same(found, parameters_after(epochs=2))


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true", "32-true"])
def test_precision_passes_through(precision):
    torch.set_default_dtype(torch.float32)
    x, y = make_data()
    model, guide = make_model()
    history = train(model, guide, (x, y), precision=precision, validation=(x, y))
    assert math.isfinite(history.rows[-1]["val_nlpd"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_training_on_cuda_agrees_with_the_cpu():
    cpu = parameters_after()
    model, guide = make_model()
    train(model, guide, accelerator="cuda")
    for name, tensor in module_tensors(model, guide).items():
        assert_close(tensor, cpu[name], atol=1e-6, rtol=1e-6)


def test_a_frozen_network_whose_statistics_would_move_is_told():
    network = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)).requires_grad_(False)
    model = DAK(network, feature_dim=4, num_units=2)
    data = torch.randn(20, 2), torch.randn(20)
    with pytest.warns(UserWarning, match=r"statistics of `1`.*fixed_features=True"):
        fit(model, MeanFieldGuide(model), data, epochs=1, progress=False)
    before = network[1].running_mean.clone()
    fit(model, MeanFieldGuide(model), data, epochs=1, fixed_features=True, progress=False)
    assert torch.equal(network[1].running_mean, before)


@pytest.mark.parametrize("data", [torch.tensor(1.0), torch.zeros(4, 2)])
def test_a_tensor_alone_is_no_data(data):
    model = DAK(nn.Identity(), 2, 2, level=2)
    with pytest.raises(TypeError, match="`data` must be a pair"):
        fit(model, MeanFieldGuide(model), data, epochs=1, progress=False)


def test_a_last_step_to_infinite_weights_is_an_error():
    model = DAK(nn.Linear(2, 3), 3, 2, level=2)
    options = {"optimizer": "adamw", "weight_decay": 1e300, "learning_rate": 1e10, "epochs": 1}
    with pytest.raises(TrainingError, match="sum of"):
        fit(model, MeanFieldGuide(model), (torch.randn(20, 2), torch.randn(20, 1)), **options)
