"""Kernels with lengthscales of their own and routes in files, and in runs that are resumed."""

import json

import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch.testing import assert_close

from pyro_dak import (
    DAK,
    CheckpointError,
    GammaScalePrior,
    LaplaceKernel,
    MaternKernel,
    RBFKernel,
    load,
    predict,
    save,
)
from pyro_dak.training.checkpoint import module_tensors
from pyro_dak.training.describe import describe, differences
from tests.training.runs import assert_same, edit_config, make_data, make_model, train

KERNELS = {
    "learned": LaplaceKernel(0.5, learn=True),
    "units": LaplaceKernel((0.5, 0.7, 0.9)),
    "learned units": LaplaceKernel(torch.tensor([0.5, 0.7, 0.9]), learn=True),
    "learned rbf": RBFKernel(0.5, learn=True),
    "matern units": MaternKernel((0.5, 0.7, 0.9), nu=1.5),
}


def kernel_of(directory):
    return json.loads((directory / "config.json").read_text())["model"]["kernel"]


@pytest.mark.parametrize("name", KERNELS)
def test_a_saved_model_has_its_lengthscales_again(name, tmp_path):
    model, guide = make_model(kernel=KERNELS[name], route="dense")
    train(model, guide)
    loaded = load(save(model, guide, tmp_path / "model"))
    activation = loaded.model.layer.activation
    assert activation.kernel == KERNELS[name]
    assert activation.route == "dense"
    assert_same(module_tensors(model, guide), module_tensors(loaded.model, loaded.guide))
    x, _ = make_data()
    before, after = predict(model, guide, x), predict(loaded.model, loaded.guide, x)
    assert_close(after.mean, before.mean)
    assert_close(after.variance, before.variance)


def test_a_prior_of_the_lengthscale_is_saved_as_data(tmp_path):
    kernel = LaplaceKernel(GammaScalePrior(3.0, 2.0))
    model, _ = make_model(kernel=kernel)
    x, y = make_data()
    guide = AutoNormal(model)
    guide(x, y)
    loaded = load(save(model, guide, tmp_path / "model"))
    assert loaded.model.layer.activation.kernel == kernel
    assert loaded.model.prior["lengthscale"] == GammaScalePrior(3.0, 2.0)
    assert loaded.guide.median()["lengthscale"].shape == (3,)


def test_a_prior_of_ones_own_is_not_saved(tmp_path):
    model, guide = make_model(kernel=LaplaceKernel(dist.LogNormal(torch.tensor(0.0), 1.0)))
    with pytest.raises(ValueError, match=r"the prior of lengthscale \(LogNormal\) is an object of"):
        save(model, guide, tmp_path / "model")


def test_the_file_of_a_model_with_a_number_says_what_it_always_said(tmp_path):
    model, guide = make_model(kernel=LaplaceKernel(0.5))
    directory = save(model, guide, tmp_path / "model")
    assert kernel_of(directory) == {"name": "LaplaceKernel", "lengthscale": 0.5}
    assert "route" not in json.loads((directory / "config.json").read_text())["model"]
    assert not [name for name in module_tensors(model, guide) if "lengthscale" in name]


def stop_after_two(epoch, row):
    if epoch == 2:
        raise KeyboardInterrupt


def test_a_run_that_learns_lengthscales_resumes_as_if_uninterrupted(tmp_path):
    kernel = LaplaceKernel(0.5, learn=True)
    stopped = make_model(kernel=kernel)
    with pytest.raises(KeyboardInterrupt):
        train(*stopped, epochs=4, checkpoint_dir=tmp_path, callbacks=[stop_after_two])
    resumed, straight = make_model(kernel=kernel), make_model(kernel=kernel)
    train(*resumed, epochs=4, checkpoint_dir=tmp_path, resume_from=tmp_path)
    train(*straight, epochs=4)
    assert_same(module_tensors(*resumed), module_tensors(*straight))


def test_where_a_learned_lengthscale_started_is_no_difference():
    kernels = (LaplaceKernel(0.5, learn=True), LaplaceKernel(0.9, learn=True))
    then, now = (describe(*make_model(kernel=kernel)) for kernel in kernels)
    assert not list(differences(then, now))
    then, now = (describe(*make_model(kernel=LaplaceKernel(t))) for t in (0.5, 0.9))
    assert list(differences(then, now)) == ["model.kernel.lengthscale: 0.5 then, 0.9 now"]


def test_a_run_that_learns_lengthscales_is_not_resumed_without(tmp_path):
    train(*make_model(kernel=LaplaceKernel(0.5, learn=True)), checkpoint_dir=tmp_path)
    with pytest.raises(CheckpointError, match=r"model.kernel.learn: True then, False now"):
        train(*make_model(kernel=LaplaceKernel(0.5)), resume_from=tmp_path)


@pytest.mark.parametrize(
    "kernel",
    [
        {"lengthscale": [0.5, 0.7]},
        {"lengthscale": [0.5, -0.7, 1.0]},
        {"lengthscale": {"name": "os.system"}},
        {"lengthscale": {"name": "NormalPrior"}},
        {"learn": "yes"},
        {"learn": True},
        {"lengthscale": "1"},
    ],
)
def test_files_with_other_lengthscales_than_their_weights_are_refused(kernel, tmp_path):
    directory = save(*make_model(kernel=LaplaceKernel(0.5)), tmp_path / "model")
    edit_config(directory, lambda config: config["model"]["kernel"].update(kernel))
    with pytest.raises(CheckpointError):
        load(directory)


@pytest.mark.usefixtures("no_type_checker")
def test_a_file_with_an_unknown_route_is_refused(tmp_path):
    directory = save(*make_model(), tmp_path / "model")
    edit_config(directory, lambda config: config["model"].update(route="fast"))
    with pytest.raises(CheckpointError, match="`route` must be one of"):
        load(directory)


def test_models_on_the_meta_device_have_the_shapes_of_their_lengthscales():
    with torch.device("meta"):
        model = DAK(torch.nn.Identity(), 3, 3, kernel=LaplaceKernel(0.5, learn=True))
    assert model.layer.activation.log_lengthscale.shape == (3,)
