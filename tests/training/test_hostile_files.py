"""Files of someone who means harm: refused before they take memory, and named."""

import os
import resource
import sys
import time

import pytest
import safetensors.torch
import torch
from pyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from torch import nn

from pyro_dak import (
    DAK,
    CheckpointError,
    FullRankGuide,
    LowRankGuide,
    MaternKernel,
    MeanFieldGuide,
    NaturalGuide,
    UnitBlockGuide,
    learn_novelty,
    load,
    predict,
    save,
)
from pyro_dak.training.describe import set_up_guide
from tests import hostile
from tests.training.runs import edit_config, make_model, train, write_sums

OWN_GUIDES = (MeanFieldGuide, FullRankGuide, LowRankGuide, NaturalGuide, UnitBlockGuide)
AUTOGUIDES = (AutoDelta, AutoNormal, AutoMultivariateNormal)
GUIDES = (*OWN_GUIDES, *AUTOGUIDES)


def save_model(path, guide_class=MeanFieldGuide, has_novelty=False, **options):
    network = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Sequential(nn.Linear(6, 4)))
    model = DAK(network, 4, **({"num_units": 3, "level": 3} | options)).eval()
    model.input_shape = (3,)
    guide = guide_class(model)
    set_up_guide(guide, model, torch.zeros(2, 3))
    if has_novelty:
        learn_novelty(model, guide, torch.randn(50, 3))
    return save(model, guide, path)


@pytest.fixture
def saved(tmp_path):
    return save_model(tmp_path / "model")


def load_and_look(path):
    """Load a model; its weights must be numbers."""
    for part in load(path):
        for name, tensor in part.state_dict().items():
            assert tensor.isfinite().all(), name


def refuse(path, match, **options):
    """Loading is refused with these words, at once and without memory; returns the message."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    with pytest.raises(CheckpointError, match=match) as raised:
        load(path, **options)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert kilobytes < 200_000
    assert time.perf_counter() - start < 10
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("guide_class", [MeanFieldGuide, LowRankGuide, AutoNormal])
def test_hostile_models_are_refused_or_read(tmp_path, guide_class):
    kernel = MaternKernel(0.5) if guide_class is LowRankGuide else None
    has_novelty = guide_class is MeanFieldGuide
    path = save_model(tmp_path / "model", guide_class, has_novelty, kernel=kernel)
    assert hostile.failures(path, tmp_path, load_and_look, seed=0, count=60) == []


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_hostile_checkpoints_are_refused_or_resumed(tmp_path, optimizer):
    options = {"epochs": 3, "validation": 0.2, "patience": 2, "optimizer": optimizer}

    def stop(epoch, row):
        if epoch == 2:
            raise KeyError("power cut")

    with pytest.raises(KeyError, match="power cut"):
        train(*make_model(), checkpoint_dir=tmp_path / "run", callbacks=[stop], **options)

    def resume(path):
        try:
            train(*make_model(), resume_from=path, **options)
        except ValueError as error:  # it says that settings or data differ
            if "was made with other" not in str(error):
                raise

    newest = tmp_path / "run" / "step-000000006"
    assert hostile.failures(newest, tmp_path, resume, seed=0, count=40) == []


@pytest.mark.parametrize("edit", [
    lambda config: config["model"].update(num_units=10**8),
    lambda config: config["model"].update(num_units=10**8, embedding=False, feature_dim=10**8),
    lambda config: config["model"].update(feature_dim=10**9),
    lambda config: config["model"].update(num_units=10**18),
    lambda config: config["model"]["feature_extractor"]["children"][0][1].update(
        in_features=10**6, out_features=10**6),
    lambda config: config["model"].update(feature_extractor={
        "name": "Conv2d", "in_channels": 10**4, "out_channels": 10**4, "kernel_size": [99, 99],
        "stride": 1, "padding": 0, "dilation": 1, "groups": 1, "bias": True,
        "padding_mode": "zeros"}),
    lambda config: config["model"].update(feature_extractor={
        "name": "LayerNorm", "normalized_shape": [10**5, 10**5], "eps": 1e-5,
        "elementwise_affine": True, "bias": True}),
], ids=range(7))  # fmt: skip
def test_a_model_that_is_larger_than_its_weights_is_not_built(saved, edit):
    edit_config(saved, edit)
    refuse(saved, r"(?s)config\.json: .*(size mismatch|Unexpected key|overflow)")


@pytest.mark.parametrize(("number", "match"), [
    (10**9, "`novelty` is 10+, but"), (51, "`novelty` is 51, but"), (None, "`novelty` is None"),
    (10**18, "between 1 and"), (0, "between 1 and"), ("50", "must be an integer"),
])  # fmt: skip
def test_novelty_that_is_larger_than_its_statistics_is_not_built(tmp_path, number, match):
    path = save_model(tmp_path / "model", has_novelty=True)
    edit_config(path, lambda config: config.update(novelty=number))
    refuse(path, rf"(?s)config\.json: .*{match}")


@pytest.mark.parametrize("guide_class", GUIDES)
@pytest.mark.parametrize("entry", [{"num_outputs": 10**7}, {"level": 18}, {"num_outputs": 10**12}])
def test_a_guide_that_is_larger_than_its_weights_is_not_built(tmp_path, guide_class, entry):
    path = save_model(tmp_path / "model", guide_class)
    edit_config(path, lambda config: config["model"].update(entry))
    refuse(path, r"config\.json: the guide has \d+ parameters or more, but \d+ are stored")


@pytest.mark.parametrize(("name", "rank"), [
    ("FullRankGuide", None), ("UnitBlockGuide", None), ("AutoMultivariateNormal", None),
    ("NaturalGuide", None),
    ("LowRankGuide", 10**9), ("AutoLowRankMultivariateNormal", 10**9),
    ("AutoLowRankMultivariateNormal", None),
])  # fmt: skip
def test_a_guide_with_matrices_is_not_built_from_vectors(tmp_path, name, rank):
    path = save_model(tmp_path / "model", level=10)
    guide = {"name": name} | ({} if rank is None else {"rank": rank})
    edit_config(path, lambda config: config.update(guide=guide))
    refuse(path, r"the guide has \d+ parameters or more, but \d+ are stored")


@pytest.mark.parametrize("name", ["MaternKernel", "RBFKernel"])
def test_matrices_of_kernels_stay_within_the_budget(tmp_path, name):
    path = save_model(tmp_path / "model", level=14)
    kernel = {"name": name, "lengthscale": 0.01}
    edit_config(path, lambda config: config["model"].update(kernel=kernel))
    refuse(path, r"config\.json: the model would take \d+ MiB besides its weights.*`max_bytes`")


def test_constants_of_markov_kernels_stay_within_the_budget(tmp_path):
    path = save_model(tmp_path / "model", level=16, num_units=1)
    load(path)
    refuse(path, "besides its weights", max_bytes=2**29)


def test_a_shape_of_inputs_takes_no_memory(tmp_path):
    """The dry run of an autoguide does not go through a network that was described."""
    path = save_model(tmp_path / "model", AutoNormal)
    edit_config(path, lambda config: config.update(input_shape=[10**9, 10**9]))
    model, guide = load(path)
    assert model.input_shape == (10**9, 10**9)
    assert predict(model, guide, torch.zeros(2, 3), seed=0).mean.isfinite().all()
    network = load(path).model.feature_extractor
    refuse(path, "besides its weights", feature_extractor=network)
    edit_config(path, lambda config: config.update(input_shape=[0.5]))
    refuse(path, r"config\.json: `input_shape` must be an integer")


def test_a_guide_of_ones_own_is_not_asked_to_build_what_is_too_large(saved):
    edit_config(saved, lambda config: config["model"].update(num_outputs=10**9))
    refuse(saved, "besides its weights", guide=lambda model: pytest.fail("it was built"))


@pytest.mark.parametrize("text", ["[" * 10**5, "[" * 10**5 + "]" * 10**5, '{"a":' * 10**5])
def test_deep_json_is_refused(saved, text):
    (saved / "config.json").write_text(text)
    write_sums(saved)
    refuse(saved, r"config\.json: is not JSON, so it is damaged or foreign")
    model, guide = make_model()
    with pytest.raises(FileExistsError, match="is not a saved model"):
        save(model, guide, saved, overwrite=True)


def test_deep_networks_are_refused(saved):
    def nest(config):
        for _ in range(sys.getrecursionlimit() // 4):
            network = config["model"]["feature_extractor"]
            config["model"]["feature_extractor"] = {
                "name": "Sequential", "children": [["0", network]]}  # fmt: skip

    edit_config(saved, nest)
    refuse(saved, r"config\.json: ")


@pytest.mark.parametrize("name", ["config.json", "SHA256SUMS", "model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_only_regular_files_are_opened(saved, name, kind):
    path = saved / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    refuse(saved, rf"{name}: cannot be read: it is a .*, not a regular file")


def test_links_to_regular_files_are_read(saved, tmp_path):
    (saved / "model.safetensors").rename(tmp_path / "weights")
    (saved / "model.safetensors").symlink_to(tmp_path / "weights")
    load(saved)


def test_files_stay_within_the_budget(saved):
    size = (saved / "model.safetensors").stat().st_size
    refuse(saved, "bytes, and only .* may be read.*`max_bytes`", max_bytes=size - 1)
    os.truncate(saved / "model.safetensors", 2**40)
    refuse(saved, rf"model\.safetensors: .*has {2**40} bytes, and only {2**32} may be read")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_numbers_are_refused(saved, value):
    path = saved / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["guide.z_loc"][0, 0, 0] = value
    safetensors.torch.save_file(tensors, path)
    write_sums(saved)
    refuse(saved, r"model\.safetensors: `guide\.z_loc` holds NaN or infinite numbers")


def test_weights_that_are_not_numbers_are_not_written(saved, tmp_path):
    model, guide = load(saved)
    nn.init.constant_(guide.z_loc, float("nan"))
    with pytest.raises(ValueError, match=r"`guide\.z_loc` holds NaN.*refused when it is loaded"):
        save(model, guide, tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(("name", "shape"), [
    ("optimizer.0.exp_avg", (1,)), ("optimizer.0.exp_avg_sq", (8, 2)), ("optimizer.0.step", (3,)),
    ("optimizer.0.exp_avg", None), ("optimizer.99.exp_avg", (1,)), ("optimizer.-1.step", ()),
    ("totals", (1,)), ("generator", (7,)), ("rng", (1, 7)), ("best.guide.z_loc", (1,)),
    ("best.guide.z_loc", None),
])  # fmt: skip
def test_a_checkpoint_with_wrong_tensors_is_not_resumed(tmp_path, name, shape):
    """Fused optimisers would read beyond the end of a tensor that is too short."""
    options = {"validation": 0.2, "patience": 2}
    train(*make_model(), checkpoint_dir=tmp_path, keep_last=1, **options)
    (checkpoint,) = tmp_path.iterdir()
    path = checkpoint / "trainer.safetensors"
    tensors = safetensors.torch.load_file(path)
    like = tensors.pop(name, torch.zeros(()))
    if shape is not None:
        tensors[name] = torch.ones(shape, dtype=like.dtype)
    safetensors.torch.save_file(tensors, path)
    write_sums(checkpoint)
    with pytest.raises(CheckpointError, match=str(checkpoint)):
        train(*make_model(), resume_from=tmp_path, **options)
