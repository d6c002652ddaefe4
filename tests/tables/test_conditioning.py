"""Estimators whose last layers learn more rows, against the posterior of all rows at once."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pyro_dak import CheckpointError, DAKRegressor
from pyro_dak.inference.guides import NaturalGuide

SMALL = {"hidden_layer_sizes": (8,), "num_units": 3, "level": 3, "epochs": 5, "progress": False}


def rows(num_rows, seed=0, shift=0.0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(num_rows, 2))
    return X, np.sin(X[:, 0]) + shift + 0.1 * rng.normal(size=num_rows)


def fitted(**options):
    options = SMALL | {"heteroscedastic": False, "random_state": 0} | options
    return DAKRegressor(**options).fit(*rows(60))


def moments(model, X):
    prediction = model.predict_dist(X)
    return prediction.mean, prediction.epistemic, prediction.aleatoric


@pytest.mark.parametrize("ensemble_size", [1, 2])
@pytest.mark.parametrize("input_units", [True, False])
def test_rows_one_by_one_are_rows_at_once(ensemble_size, input_units):
    X, y = rows(20, seed=1)
    test = rows(15, seed=2)[0]
    options = {"ensemble_size": ensemble_size, "input_units": input_units}
    one, all_at_once = fitted(**options), fitted(**options)
    for i in range(20):
        one.partial_fit(X[i : i + 1], y[i : i + 1])
    all_at_once.partial_fit(X, y)
    for value, truth in zip(moments(one, test), moments(all_at_once, test), strict=True):
        np.testing.assert_allclose(value, truth, rtol=1e-6, atol=1e-9)
    assert one.num_rows_seen_ == 80


def test_the_result_is_bayes_rule_from_the_posterior_of_the_member():
    X, y = rows(20, seed=1)
    model, test = fitted(ensemble_size=1, numeric_embedding=None), rows(15, seed=2)[0]
    member, q = model.ensemble_.to(torch.float64).members()[0]
    mean, variance = (torch.from_numpy(v).squeeze() for v in (model.y_mean_, model.y_scale_))
    x = torch.from_numpy((X - model.x_mean_) / model.x_scale_).float().double()
    target = torch.from_numpy((y - float(mean)) / float(variance)).float().double()
    design = member.layer.design(member.unit_inputs(x)).detach()
    weights = [
        torch.cat([part.flatten() for part in parts])
        for parts in zip(*(q.normal(n) for n in q.weight_sites), strict=True)
    ]
    loc, scale = (value.detach() for value in weights)
    noise = member.likelihood.noise_scale.detach().square()
    precision = torch.diag(scale**-2) + design.mT @ design / noise
    expected = torch.linalg.solve(precision, loc / scale**2 + design.mT @ target / noise)
    model.partial_fit(X, y)
    x_test = torch.from_numpy((test - model.x_mean_) / model.x_scale_)
    f = (member.layer.design(member.unit_inputs(x_test)) @ expected).detach().numpy()
    np.testing.assert_allclose(model.predict(test), float(mean) + float(variance) * f, rtol=1e-5)


@pytest.mark.parametrize("heteroscedastic", [True, False])
def test_more_rows_lower_the_error_and_leave_the_network(heteroscedastic):
    model = fitted(heteroscedastic=heteroscedastic)
    before = {name: tensor.clone() for name, tensor in model.ensemble_.tensors.items()}
    X, y = rows(300, seed=1, shift=0.5)
    test, truth = rows(300, seed=2, shift=0.5)
    error = np.mean((model.predict(test) - truth) ** 2)
    model.partial_fit(X, y)
    assert np.mean((model.predict(test) - truth) ** 2) < 0.7 * error
    for name, tensor in model.ensemble_.tensors.items():
        assert torch.equal(tensor, before[name])
    assert model.predict_dist(test).novelty.shape == (300,)  # which is still known


def test_forgetting_follows_data_that_drift():
    keeping, forgetting = fitted(), fitted()
    for step in range(10):
        X, y = rows(40, seed=step, shift=0.2 * step)
        keeping.partial_fit(X, y)
        forgetting.partial_fit(X, y, forget=0.5)
    test, truth = rows(200, seed=99, shift=1.8)
    errors = [np.mean((m.predict(test) - truth) ** 2) for m in (keeping, forgetting)]
    assert errors[1] < 0.5 * errors[0]


def test_what_was_learned_is_saved_and_can_go_on(tmp_path):
    X, y = rows(20, seed=1)
    model = fitted(ensemble_size=2)
    model.partial_fit(X, y)
    loaded = DAKRegressor.load(model.save(tmp_path / "model"))
    for value, truth in zip(moments(loaded, X), moments(model, X), strict=True):
        np.testing.assert_array_equal(value, truth)
    for estimator in (model, loaded):
        estimator.partial_fit(*rows(5, seed=3))
    np.testing.assert_allclose(loaded.predict(X), model.predict(X), rtol=1e-9)
    assert "conditioned" not in json.dumps(model.get_params())


@pytest.mark.parametrize("damage", ["indefinite", "too few"])
def test_damaged_posteriors_are_not_loaded(tmp_path, damage):
    model = fitted()
    model.partial_fit(*rows(20, seed=1))
    path = model.save(tmp_path / "model")
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    name = "conditioned.precision"
    tensors[name] = -tensors[name] if damage == "indefinite" else tensors[name][:0]
    save_file(tensors, file)
    with pytest.raises(CheckpointError):
        DAKRegressor.load(path)


def test_training_drops_what_was_learned():
    X, y = rows(20, seed=1)
    model = fitted()
    model.partial_fit(X, y).partial_fit(X, y, update_network=True)
    assert model.conditioned_ is None
    model.partial_fit(X, y).fit(*rows(60))
    np.testing.assert_allclose(model.predict(X), fitted().predict(X), rtol=1e-6)


@pytest.mark.usefixtures("no_type_checker")
def test_wrong_requests_are_refused():
    X, y = rows(20, seed=1)
    model = fitted()
    with pytest.raises(ValueError, match="count once each"):
        model.partial_fit(X, y, np.full(20, 2.0))
    with pytest.raises(ValueError, match="`forget` must be above 0"):
        model.partial_fit(X, y, forget=0.0)
    with pytest.raises(TypeError, match="`update_network` must be True or False"):
        model.partial_fit(X, y, update_network="yes")
    assert model.conditioned_ is None


def test_a_natural_guide_takes_means_and_precisions():
    member = fitted().ensemble_.to(torch.float64).members()[0][0]
    guide = NaturalGuide(member)
    precision = 3 * torch.eye(guide.num_weights).expand_as(guide.precision)
    guide.set_parameters(torch.ones_like(guide.mean), precision)
    torch.testing.assert_close(guide.scale, torch.full_like(guide.mean, 3**-0.5))
    with pytest.raises(ValueError, match="positive definite"):
        guide.set_parameters(guide.mean, -precision)
    with pytest.raises(ValueError, match="`mean` must have shape"):
        guide.set_parameters(guide.mean[:, 1:], precision)
    with pytest.raises(NotImplementedError, match="diagonal"):
        NaturalGuide(member, "diagonal").set_parameters(guide.mean, precision)
