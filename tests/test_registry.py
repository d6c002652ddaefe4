"""Classes of another package, saved and loaded by the names that its metadata lists."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import guides
from pyro_dak import DAK, CheckpointError, MeanFieldGuide, load, predict, registry, save
from pyro_dak.training.describe import describe
from tests.training.runs import write_sums

PROJECT = Path(__file__).parent / "data" / "dak_extras"
METADATA = "from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel({!r})"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The package of someone else with its metadata, as an installation leaves them."""
    directory = tmp_path_factory.mktemp("site") / "project"
    shutil.copytree(PROJECT, directory)
    command = [sys.executable, "-c", METADATA.format(str(directory))]
    subprocess.run(command, cwd=directory, capture_output=True, check=True)
    shutil.rmtree(directory / "dak_extras.egg-info")  # which would offer everything again
    return directory


@pytest.fixture
def extras(project, monkeypatch):
    """The package, installed and imported."""
    monkeypatch.syspath_prepend(project)
    yield __import__("dak_extras")
    forget()


def forget():
    for name in [name for name in sys.modules if name.split(".")[0] == "dak_extras"]:
        del sys.modules[name]


def offer(directory, kind, name, value, package="rival"):
    """Metadata of one more package, which offers one name."""
    info = directory / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[pyro_dak.{kind}]\n{name} = {value}\n")


def make_all(extras):
    """A model and a guide of which every part is of the other package."""
    model = extras.MirroredDAK(
        nn.Sequential(extras.WaveNetwork((2, 3)), nn.Tanh()),
        feature_dim=3,
        num_units=2,
        kernel=extras.RationalQuadraticKernel(0.7, alpha=2.5),
        likelihood=extras.LogNormalLikelihood(scale=0.3),
        axis=1,
    )
    return model, extras.LaplaceGuide(model, num_parts=2)


@pytest.fixture
def saved(extras, tmp_path):
    return save(*make_all(extras), tmp_path / "saved")


def change(path, part, **entries):
    """Other entries in a part of a description, with checksums that fit."""
    config = json.loads((path / "config.json").read_text())
    place = config
    for key in part.split("."):
        place = place[key]
    place.update(entries)
    (path / "config.json").write_text(json.dumps(config))
    write_sums(path)


def test_names_are_known_before_anything_is_imported(project, monkeypatch):
    monkeypatch.syspath_prepend(project)
    assert "rational_quadratic" in registry.names("kernels")
    assert "log_normal" in registry.names("likelihoods")
    assert {"laplace", "forgetful"} <= set(registry.names("guides"))
    assert {"wave", "mirrored"} <= set(registry.names("models"))
    assert "dak_extras" not in sys.modules


def test_an_unknown_kind_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"`kind` must be one of 'guides', 'kernels'"):
        registry.names("optimizers")


def test_every_part_is_loaded_by_its_name(extras, tmp_path):
    model, guide = make_all(extras)
    x = torch.randn(5, 2)
    torch.manual_seed(0)
    before = predict(model, guide, x, num_samples=4)
    path = save(model, guide, tmp_path / "saved")
    forget()
    loaded, loaded_guide = load(path)
    torch.manual_seed(0)
    assert_close(predict(loaded, loaded_guide, x, num_samples=4).mean, before.mean)
    new = sys.modules["dak_extras"]
    assert type(loaded) is new.MirroredDAK
    assert loaded.axis == 1
    assert loaded.feature_extractor[0].sizes == (2, 3)
    kernel = loaded.layer.activation.kernel
    assert kernel == new.RationalQuadraticKernel(0.7, alpha=2.5)
    assert loaded.likelihood.scale == 0.3
    assert type(loaded_guide) is new.LaplaceGuide
    assert loaded_guide.num_parts == 2


@pytest.mark.parametrize(("part", "name", "reason"), [
    ("model.kernel", "os:system", "unknown kernel"),
    ("model.kernel", "dak_extras.unrelated:run", "unknown kernel"),
    ("model.kernel", "dak_extras:RationalQuadraticKernel", "unknown kernel"),
    ("model.kernel", "unrelated", "unknown kernel"),
    ("model.kernel", "log_normal", "unknown kernel 'log_normal'; known are .*rational_quadratic"),
    ("model.kernel", ["rational_quadratic"], "unknown kernel"),
    ("model.kernel", "not_a_kernel", "is no class of a kernel"),
    ("model.kernel", "missing", "of dak-extras cannot be imported from dak_extras.nowhere"),
    ("model.likelihood", "laplace", "unknown likelihood"),
    ("model", "wave", "is no class of a model"),
    ("guide", "unrelated", "unknown guide"),
])  # fmt: skip
def test_a_file_imports_only_what_is_offered_by_name(saved, part, name, reason):
    forget()
    change(saved, part, name=name)
    with pytest.raises(CheckpointError, match=rf"config.json: .*{reason}"):
        load(saved)
    assert "dak_extras.unrelated" not in sys.modules


@pytest.mark.parametrize(("part", "entries"), [
    ("guide", {"num_parts": 10**12}),
    ("model.feature_extractor", {"children": [["0", {"name": "wave", "sizes": [10**6, 10**6]}]]}),
])  # fmt: skip
def test_memory_follows_the_weights_that_are_there(saved, part, entries):
    change(saved, part, **entries)
    with pytest.raises(CheckpointError, match="size mismatch"):
        load(saved)


def test_an_argument_that_the_class_does_not_have_is_an_error(saved):
    change(saved, "model.likelihood", command="rm")
    with pytest.raises(CheckpointError, match="unexpected keyword argument 'command'"):
        load(saved)


def test_without_the_package_its_name_is_unknown(saved, project, monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(project)])
    forget()
    with pytest.raises(CheckpointError, match=r"unknown kernel 'rational_quadratic'.*installed"):
        load(saved)


def test_a_name_that_two_packages_offer_is_refused(saved, tmp_path, monkeypatch):
    offer(tmp_path / "more", "kernels", "rational_quadratic", "rival:Kernel")
    monkeypatch.syspath_prepend(tmp_path / "more")
    with pytest.raises(CheckpointError, match=r"ambiguous: .*rival \(rival:Kernel\)"):
        load(saved)


def test_a_class_that_is_offered_under_a_name_of_ours_is_not_saved(extras, tmp_path, monkeypatch):
    class Impostor(extras.RationalQuadraticKernel):
        pass

    extras.Impostor, Impostor.__module__ = Impostor, "dak_extras"
    offer(tmp_path / "more", "kernels", "RBFKernel", "dak_extras:Impostor")
    monkeypatch.syspath_prepend(tmp_path / "more")
    model = DAK(nn.Identity(), feature_dim=2, num_units=2, kernel=Impostor(0.5))
    with pytest.raises(ValueError, match="as 'RBFKernel', which is a class of pyro_dak"):
        save(model, MeanFieldGuide(model), tmp_path / "saved")


def test_a_network_that_is_offered_under_a_name_of_ours_is_stored_as_weights_only(
    extras, tmp_path, monkeypatch
):
    extras.Other = type("Other", (extras.WaveNetwork,), {"__module__": "dak_extras"})
    offer(tmp_path / "more", "models", "Sequential", "dak_extras:Other")
    monkeypatch.syspath_prepend(tmp_path / "more")
    model = DAK(extras.Other((2, 3)), feature_dim=3, num_units=2)
    assert describe(model, MeanFieldGuide(model))["model"]["feature_extractor"] is None


def test_a_class_that_is_not_offered_is_no_data(extras, tmp_path):
    class Unlisted(extras.RationalQuadraticKernel):
        pass

    model = DAK(nn.Identity(), feature_dim=2, num_units=2, kernel=Unlisted(0.5))
    with pytest.raises(ValueError, match=r"the kernel \(Unlisted\) is an object of your own"):
        save(model, MeanFieldGuide(model), tmp_path / "saved")


def test_a_guide_that_forgets_an_argument_is_stored_as_weights_only(extras, tmp_path):
    model = DAK(nn.Identity(), feature_dim=2, num_units=2)
    guide = extras.ForgetfulGuide(model, 0.2)
    assert describe(model, guide)["guide"] == {"name": None, "class": "ForgetfulGuide"}
    path = save(model, guide, tmp_path / "saved")
    again = load(path, guide=extras.ForgetfulGuide).guide
    assert_close(dict(again.state_dict()), dict(guide.state_dict()))


@pytest.mark.parametrize("value", [torch.ones(2), {"a": 1}, [object()]])
def test_arguments_that_are_no_data_are_refused(extras, value, tmp_path):
    model = DAK(nn.Identity(), 2, num_units=2, likelihood=extras.LogNormalLikelihood(value))
    with pytest.raises(ValueError, match="`scale` of LogNormalLikelihood must be a number"):
        save(model, MeanFieldGuide(model), tmp_path / "saved")


def test_the_board_builds_guides_of_other_packages(extras):
    assert "laplace" in guides.names()
    guide = guides.build("laplace", DAK(nn.Identity(), 2, num_units=2), num_parts=3)
    assert type(guide) is extras.LaplaceGuide
    assert guide.num_parts == 3
