"""Checkpoints of `fit`: kept, refused where another run or model made them, and resumed."""

import pytest
import torch
from torch import nn

from pyro_dak import (
    CheckpointError,
    GaussianLikelihood,
    LaplaceKernel,
    MaternKernel,
    NormalPrior,
    load,
    predict,
)
from pyro_dak.additive.scaling import Standardize
from pyro_dak.training.checkpoint import module_tensors
from tests.training.runs import (
    OWN_OPTIMIZER,
    assert_same,
    edit_config,
    make_data,
    make_model,
    parameters_after,
    train,
)


def stop_after_two(epoch, row):
    if epoch == 2:
        raise KeyboardInterrupt


def test_a_run_with_two_optimizers_resumes_as_if_uninterrupted(tmp_path):
    options = {**OWN_OPTIMIZER, "epochs": 4}
    with pytest.raises(KeyboardInterrupt):
        train(*make_model(), checkpoint_dir=tmp_path, callbacks=[stop_after_two], **options)
    resumed = make_model()
    train(*resumed, checkpoint_dir=tmp_path, resume_from=tmp_path, **options)
    assert_same(module_tensors(*resumed), parameters_after(**options))


def test_a_checkpoint_from_before_there_were_two_optimizers_resumes(tmp_path):
    options = {"epochs": 4, "checkpoint_dir": tmp_path, "callbacks": [stop_after_two]}
    with pytest.raises(KeyboardInterrupt):
        train(*make_model(), **options)
    for path in tmp_path.iterdir():
        edit_config(path, lambda config: config["trainer"]["settings"].pop("last_layer_optimizer"))
    resumed = make_model()
    train(*resumed, epochs=4, resume_from=tmp_path)
    assert_same(module_tensors(*resumed), parameters_after(epochs=4))


def test_only_the_last_checkpoints_are_kept(tmp_path):
    model, guide = make_model()
    train(model, guide, epochs=5, checkpoint_dir=tmp_path, keep_last=3, checkpoint_every=1)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-000000009", "step-000000012", "step-000000015"]


def test_resuming_with_other_settings_is_refused(tmp_path):
    model, guide = make_model()
    train(model, guide, checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match="batch_size: 20 then, 10 now"):
        train(*make_model(), batch_size=10, resume_from=tmp_path)
    with pytest.raises(CheckpointError, match="another model or guide"):
        train(*make_model(num_units=2), resume_from=tmp_path)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        train(*make_model(), resume_from=tmp_path / "nothing")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": LaplaceKernel(2.0)}, r"model.kernel.lengthscale: 1.0 then, 2.0 now"),
        ({"kernel": MaternKernel(1.5)}, r"model.kernel.name: LaplaceKernel then, MaternKernel now"),
        ({"bounds": (0.0, 2.0)}, r"model.bounds\[1\]: 1.0 then, 2.0 now"),
        ({"prior": {"z": NormalPrior(0.0, 2.0)}}, r"model.prior.z.scale: 1.0 then, 2.0 now"),
        ({"likelihood": GaussianLikelihood(1.0, learn=False)}, r"noise_scale: 0.2\d* then, 1.0"),
    ],
)
def test_resuming_another_model_is_refused_where_all_weights_fit(tmp_path, options, message):
    fixed_noise = {"likelihood": GaussianLikelihood(0.2, learn=False)}
    train(*make_model(**fixed_noise), checkpoint_dir=tmp_path)
    model, guide = make_model(**(fixed_noise | options))
    before = module_tensors(model, guide)
    with pytest.raises(CheckpointError, match=f"another model or guide .*{message}"):
        train(model, guide, resume_from=tmp_path)
    assert_same(module_tensors(model, guide), before)


def test_resuming_with_another_scaling_is_refused(tmp_path):
    train(*make_model(), checkpoint_dir=tmp_path)
    model, guide = make_model()
    model.scaling.num_std = 8.0
    with pytest.raises(CheckpointError, match=r"scaling_options.num_std: 3.0 then, 8.0 now"):
        train(model, guide, resume_from=tmp_path)


class Stack(nn.Sequential):
    """A network that is known by its weights only."""


class Half(Standardize):
    """A scaling of one's own."""


@pytest.mark.parametrize("change", ["network", "scaling", "dtype of the noise"])
def test_resuming_goes_on_where_descriptions_say_nothing_else(tmp_path, change):
    options = {"likelihood": GaussianLikelihood(0.2, learn=False)}
    first, resumed = make_model(**options), make_model(**options)
    if change == "network":
        resumed[0].feature_extractor = Stack(*resumed[0].feature_extractor)
    elif change == "scaling":
        for model, _ in (first, resumed):
            model.scaling = Half(3, (0.0, 1.0))
    else:
        resumed[0].likelihood.noise.log_scale *= 1 + 1e-8
    train(*first, epochs=4, checkpoint_dir=tmp_path)
    train(*resumed, epochs=4, resume_from=tmp_path)
    assert_same(module_tensors(*resumed), module_tensors(*first))


def test_a_learned_noise_may_start_elsewhere_when_resuming(tmp_path):
    train(*make_model(), epochs=4, checkpoint_dir=tmp_path)
    resumed = make_model(likelihood=GaussianLikelihood(0.7))
    train(*resumed, epochs=4, resume_from=tmp_path)
    assert_same(module_tensors(*resumed), parameters_after(epochs=4))


def test_a_directory_with_checkpoints_is_for_resuming_only(tmp_path):
    train(*make_model(), checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match="holds checkpoints of an earlier run"):
        train(*make_model(), checkpoint_dir=tmp_path)


def test_foreign_directories_beside_checkpoints_are_left_alone(tmp_path):
    for name in ("step-0-rawdata", "step-000000001", ".step-notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").write_text("data")
    train(*make_model(), epochs=5, checkpoint_dir=tmp_path, keep_last=1)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == [".step-notes", "step-0-rawdata", "step-000000001", "step-000000015"]


def test_a_run_that_stopped_early_stays_stopped(tmp_path):
    x, y = make_data()
    options = {"epochs": 60, "learning_rate": 0.3, "schedule": "constant", "patience": 2,
               "validation": (x[:20], -y[:20])}  # fmt: skip
    first, second = make_model(), make_model()
    history = train(*first, (x, y), checkpoint_dir=tmp_path, **options)
    resumed = train(*second, (x, y), resume_from=tmp_path, **options)
    assert history.status == resumed.status == "stopped early"
    assert history.rows == resumed.rows
    assert_same(module_tensors(*first), module_tensors(*second))


def test_resuming_takes_the_seed_of_the_run_and_notices_other_settings(tmp_path):
    model, guide = make_model()

    def stop(epoch, row):
        if epoch == 2:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        train(model, guide, seed=5, epochs=4, checkpoint_dir=tmp_path, callbacks=[stop])
    resumed = make_model()
    train(*resumed, seed=None, epochs=4, resume_from=tmp_path)
    assert_same(module_tensors(*resumed), parameters_after(seed=5, epochs=4))
    with pytest.raises(ValueError, match="objective: ClosedFormELBO then, LocalReparamELBO now"):
        train(*make_model(), seed=5, epochs=4, objective="local", resume_from=tmp_path)
    with pytest.raises(ValueError, match="schedule: one_cycle then, custom"):
        train(*make_model(), seed=5, epochs=4, schedule=lambda *_: 1.0, resume_from=tmp_path)


def test_a_checkpoint_can_be_loaded_as_a_model(tmp_path):
    model, guide = make_model()
    train(model, guide, checkpoint_dir=tmp_path)
    x, _ = make_data()
    loaded = load(tmp_path / "step-000000009")
    assert torch.equal(predict(*loaded, x).mean, predict(model, guide, x).mean)
