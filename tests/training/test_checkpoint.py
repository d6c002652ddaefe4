"""Saving and loading: bit-equal, atomic, and safe against damaged and hostile files."""

import hashlib
import json
import pickle
import shutil
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

import guides
from pyro_dak import (
    DAK,
    CategoricalLikelihood,
    CheckpointError,
    GammaScalePrior,
    GaussianLikelihood,
    HeteroscedasticLikelihood,
    HorseshoePrior,
    LaplacePrior,
    MaternKernel,
    MeanFieldGuide,
    NormalPrior,
    StudentTLikelihood,
    StudentTPrior,
    load,
    predict,
    save,
)
from pyro_dak.training.describe import describe, rebuild, set_up_guide
from tests.training.runs import edit_config, write_sums

FILES = Path(__file__).parents[1] / "data" / "version_0_1"
SCRIPTS = Path(__file__).parents[1] / "scripts"

# Loads the model of every guide in a process that has seen none of them, and predicts.
LOAD_SCRIPT = """
import sys
import threading
from collections import OrderedDict
from pathlib import Path

import torch

import guides
from pyro_dak import load, predict

torch.set_num_threads(1)
root = Path(sys.argv[1])
x = torch.load(root / "x.pt", weights_only=True)
results = {}
for entry in sys.argv[2:]:
    name, is_own = entry.split(":")
    make = (lambda model: guides.build(name, model)) if is_own == "True" else None
    model, guide = load(root / name, guide=make)
    torch.manual_seed(0)
    prediction = predict(model, guide, x)
    results[name] = [prediction.mean, prediction.variance]
torch.save(results, root / "results.pt")
"""


def make_model(dtype: torch.dtype = torch.float32, **options: object) -> tuple[DAK, torch.Tensor]:
    network = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))
    model = DAK(network, 4, **({"num_units": 3, "level": 3} | options)).to(dtype)
    x = torch.randn(20, 3, dtype=dtype)
    model.train()
    model.unit_inputs(x)
    return model.eval(), x


@pytest.fixture
def saved(tmp_path) -> Path:
    model, _ = make_model()
    return save(model, MeanFieldGuide(model).float(), tmp_path / "model")


@pytest.fixture(scope="module")
def predictions(tmp_path_factory) -> dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Mean and variance by guide, from the process that saved it and from one that loaded it."""
    root = tmp_path_factory.mktemp("saved")
    here, entries = {}, []
    for name in guides.names():
        torch.manual_seed(3)
        model, x = make_model()
        guide = guides.build(name, model).float()
        set_up_guide(guide, model, x)
        guide.float()
        save(model, guide, root / name)
        torch.manual_seed(0)
        prediction = predict(model, guide, x)
        here[name] = [prediction.mean, prediction.variance]
        entries.append(f"{name}:{describe(model, guide)['guide']['name'] is None}")
    torch.save(x, root / "x.pt")
    command = [sys.executable, "-c", LOAD_SCRIPT, str(root), *entries]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    there = torch.load(root / "results.pt", weights_only=True)
    return {name: (here[name], there[name]) for name in here}


@pytest.mark.parametrize("twice", [nn.ReLU, lambda: nn.Linear(3, 3)])
def test_a_layer_that_stands_twice_comes_back_twice(tmp_path, twice):
    layer = twice()
    model = DAK(nn.Sequential(nn.Linear(3, 3), layer, nn.Linear(3, 3), layer), 3, num_units=2)
    guide, x = MeanFieldGuide(model), torch.randn(50, 3)
    model(x)
    loaded, loaded_guide = load(save(model, guide, tmp_path / "model"))
    assert len(loaded.feature_extractor) == 4
    expected, found = predict(model, guide, x), predict(loaded, loaded_guide, x)
    assert torch.equal(found.mean, expected.mean)
    assert torch.equal(found.variance, expected.variance)


@pytest.mark.parametrize("name", guides.names())
def test_a_fresh_process_predicts_bit_for_bit_the_same(predictions, name):
    here, there = predictions[name]
    assert torch.equal(here[0], there[0])
    assert torch.equal(here[1], there[1])


@pytest.mark.parametrize("options", [
    {"likelihood": GaussianLikelihood(torch.tensor([0.1, 0.2]), learn=False), "num_outputs": 2},
    {"likelihood": HeteroscedasticLikelihood(0.3), "linear_term": True},
    {"likelihood": StudentTLikelihood(3.0)},
    {"likelihood": CategoricalLikelihood(), "num_outputs": 3, "scaling": "minmax"},
    {"kernel": MaternKernel(0.5, nu=1.5), "bounds": (-1.0, 1.0)},
    {"prior": {"z": StudentTPrior(3.0), "mu": NormalPrior(1.0, 2.0)}},
    {"prior": {"z": LaplacePrior(), "shrinkage": HorseshoePrior(0.2)}},
    {"prior": {"shrinkage": GammaScalePrior(2.0, 3.0)}},
    {"embedding": False, "num_units": 4, "scaling": "none"},
], ids=lambda options: "-".join(options))  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_kind_of_model_comes_back(tmp_path, options, dtype):
    model, x = make_model(dtype, **options)
    guide = MeanFieldGuide(model).to(dtype)
    save(model, guide, tmp_path / "model")
    loaded = load(tmp_path / "model")
    assert loaded.model.prior == model.prior
    assert loaded.model.layer.activation.kernel == model.layer.activation.kernel
    for seed in (0, 1):
        torch.manual_seed(seed)
        here = predict(model, guide, x)
        torch.manual_seed(seed)
        there = predict(*loaded, x)
        for first, second in zip(here.functions[:2], there.functions[:2], strict=True):
            assert torch.equal(first, second)


def test_scaling_options_come_back(tmp_path):
    model, _ = make_model()
    model.scaling.num_std = 3.5
    save(model, MeanFieldGuide(model).float(), tmp_path / "model")
    assert load(tmp_path / "model").model.scaling.num_std == 3.5


def test_every_listed_layer_can_be_described():
    network = nn.Sequential(
        nn.Conv2d(1, 2, (3, 2), stride=2, padding=1, bias=False), nn.BatchNorm2d(2), nn.ELU(),
        nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Dropout2d(0.2), nn.Flatten(),
        nn.Linear(2, 3, bias=False), nn.LayerNorm(3), nn.GELU(), nn.LeakyReLU(0.3), nn.SiLU(),
        nn.Sigmoid(), nn.Softplus(), nn.Tanh(), nn.Dropout(0.1), nn.Identity(),
    )  # fmt: skip
    network.append(nn.AvgPool2d(2, ceil_mode=True, count_include_pad=False, divisor_override=3))
    network.append(nn.MaxPool2d(2, dilation=2, ceil_mode=True))
    network.append(nn.LayerNorm(3, bias=False))
    model = DAK(network, 3, num_units=2)
    description = json.loads(json.dumps(describe(model, MeanFieldGuide(model))))
    twin = rebuild(description)[0].feature_extractor
    assert repr(twin) == repr(network)
    assert twin[-3].count_include_pad is False
    assert twin[-3].divisor_override == 3
    assert twin[-2].dilation == 2
    assert twin.state_dict().keys() == network.state_dict().keys()


def test_named_layers_keep_their_names(tmp_path):
    network = nn.Sequential(OrderedDict(first=nn.Linear(3, 4), second=nn.ReLU()))
    model = DAK(network, 4, num_units=2, level=2).eval()
    guide = MeanFieldGuide(model)
    save(model, guide, tmp_path / "model")
    x = torch.randn(5, 3)
    assert torch.equal(predict(*load(tmp_path / "model"), x).mean, predict(model, guide, x).mean)


@pytest.mark.parametrize("config", ["{}", '{"format": "pyro_dak"}'])
def test_a_directory_with_other_files_is_never_replaced(tmp_path, config):
    model, _ = make_model()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(config)
    (tmp_path / "mine" / "precious").write_text("data")
    with pytest.raises(FileExistsError, match="not a saved model"):
        save(model, MeanFieldGuide(model).float(), tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "precious").read_text() == "data"


@pytest.mark.parametrize(("key", "value"), [
    ("model", []), ("guide", 3), ("dtype", "object"), ("input_shape", "x"),
])  # fmt: skip
def test_a_crafted_config_gives_a_checkpoint_error(saved, key, value):
    edit_config(saved, lambda config: config.update({key: value}))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(saved)


def test_options_of_the_scaling_cannot_replace_its_methods(saved):
    edit_config(saved, lambda config: config["model"]["scaling_options"].update(forward=1.0))
    with pytest.raises(CheckpointError, match="unknown option of the scaling 'forward'"):
        load(saved)


class OwnExtractor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_an_extractor_of_ones_own_is_given_back_at_loading(tmp_path):
    model = DAK(OwnExtractor(), 4, num_units=2, level=2).eval()
    guide = MeanFieldGuide(model)
    save(model, guide, tmp_path / "model")
    with pytest.raises(CheckpointError, match="pass one of the same architecture"):
        load(tmp_path / "model")
    loaded = load(tmp_path / "model", feature_extractor=OwnExtractor())
    x = torch.randn(5, 3)
    assert torch.equal(predict(*loaded, x).mean, predict(model, guide, x).mean)
    with pytest.raises(CheckpointError, match=r"(?s)config\.json.*Missing key"):
        load(tmp_path / "model", feature_extractor=nn.Sequential(nn.Linear(2, 4)))


def test_a_prior_of_ones_own_cannot_be_stored(tmp_path):
    model = DAK(nn.Identity(), 2, num_units=2, prior={"mu": torch.distributions.Normal(0.0, 1.0)})
    with pytest.raises(ValueError, match=r"prior of mu \(Normal\) is an object of your own"):
        save(model, MeanFieldGuide(model), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_an_existing_directory_is_replaced_only_if_asked_and_ours(tmp_path, saved):
    model, x = make_model()
    guide = MeanFieldGuide(model).float()
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save(model, guide, saved)
    save(model, guide, saved, overwrite=True)
    assert torch.equal(predict(*load(saved), x).mean, predict(model, guide, x).mean)
    foreign = tmp_path / "thesis"
    foreign.mkdir()
    (foreign / "chapter.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="not a saved model"):
        save(model, guide, foreign, overwrite=True)
    assert (foreign / "chapter.txt").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "thesis"]


def test_a_failed_write_leaves_the_old_model_and_no_rubbish(saved, monkeypatch):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    model, _ = make_model()
    with pytest.raises(OSError, match="No space left"):
        save(model, MeanFieldGuide(model).float(), saved, overwrite=True)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert [path.name for path in saved.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("options", [[], ["--without-exchange"]])
def test_a_save_killed_at_any_point_leaves_the_old_or_the_new(tmp_path, options):
    """Without an exchange in one step, there is a moment when nothing has the name."""
    command = [sys.executable, SCRIPTS / "kill_saves.py", tmp_path, *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    *lines, last = result.stdout.splitlines()
    points, found = zip(*(line.split(": ", 1) for line in lines), strict=True)
    assert set(found) == {"old", "new"}
    assert len(points) > 20
    assert {"exchange", "fsync", "open", "os.remove"} <= set(points)
    assert ("os.rename" in points) == bool(options)
    assert last == "at the end: model"


@pytest.mark.parametrize("options", [[], ["--without-exchange"]])
def test_a_reader_finds_one_model_while_two_writers_replace_it(tmp_path, options):
    path = tmp_path / "model"
    command = [sys.executable, SCRIPTS / "save_again.py", path, "25", *options]
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for writer in writers:
        assert writer.stdout.readline() == "started\n"
    found = set()
    while any(writer.poll() is None for writer in writers):
        model, guide = load(path)
        assert torch.equal(model.feature_extractor.weight.flatten(), guide.z_loc.flatten())
        found.add(guide.z_loc.item())
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    assert len(found) > 1
    assert list(tmp_path.iterdir()) == [path]


def test_one_of_two_saves_at_the_same_time_is_refused(tmp_path):
    model, _ = make_model()
    guide, start, results = MeanFieldGuide(model).float(), threading.Barrier(4), []

    def work():
        start.wait()
        try:
            results.append(save(model, guide, tmp_path / "model").name)
        except FileExistsError:
            results.append("refused")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["model", "refused", "refused", "refused"]
    load(tmp_path / "model")


def test_what_a_killed_save_moved_away_is_not_overwritten_unasked(tmp_path, saved):
    saved.rename(tmp_path / ".model.old-01234567")
    model, _ = make_model()
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save(model, MeanFieldGuide(model).float(), saved)
    load(saved)


def test_a_directory_that_is_replaced_all_the_time_is_told_of(saved, monkeypatch):
    identities = iter(range(1000))
    monkeypatch.setattr("pyro_dak.training.checkpoint._identity", lambda path: next(identities))
    (saved / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="was replaced 100 times while it was being read"):
        load(saved)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("position", [0.01, 0.3, 0.6, 0.99])
def test_a_flipped_byte_is_noticed(saved, name, position):
    data = bytearray((saved / name).read_bytes())
    data[int(position * len(data))] ^= 1
    (saved / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load(saved)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("kept", [0, 10, 200])
def test_a_truncated_file_is_noticed(saved, name, kept):
    (saved / name).write_bytes((saved / name).read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load(saved)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "SHA256SUMS"])
def test_a_missing_file_is_named(saved, name):
    (saved / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name}: cannot be read: No such file"):
        load(saved)


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: no such directory"):
        load(tmp_path / "nowhere")


def test_a_newer_format_asks_for_a_newer_library(saved):
    config = json.loads((saved / "config.json").read_text())
    config["format_version"] = 99
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"format version 99.*newer pyro_dak"):
        load(saved)


def test_checksums_are_those_of_sha256sum(saved):
    lines = (saved / "SHA256SUMS").read_text().splitlines()
    assert {line.split("  ")[1] for line in lines} == {"config.json", "model.safetensors"}
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=saved, check=True)


@pytest.mark.parametrize(("name", "position"), [
    ("model.safetensors", 0.9), ("config.json", 0.3), ("config.json", 0.9)
])  # fmt: skip
def test_a_flipped_byte_is_noticed_in_directories_of_version_1(tmp_path, name, position):
    directory = Path(shutil.copytree(FILES / "regression", tmp_path / "model"))
    load(directory)
    data = bytearray((directory / name).read_bytes())
    data[int(position * len(data))] ^= 1
    (directory / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load(directory)


def test_checksums_of_version_1_must_be_there(tmp_path):
    directory = Path(shutil.copytree(FILES / "regression", tmp_path / "model"))
    config = json.loads((directory / "config.json").read_text())
    config.pop("checksum")
    config["sha256"] = None
    body = json.dumps(config, sort_keys=True).encode()
    config["checksum"] = hashlib.sha256(body).hexdigest()
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json: lists no checksum"):
        load(directory)


def test_foreign_json_is_refused(saved):
    (saved / "config.json").write_text('{"hello": 1}')
    with pytest.raises(CheckpointError, match="not written by pyro_dak"):
        load(saved)


class Hostile:
    """Unpickling this creates the file `owned`."""

    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("fix_checksum", [False, True])
def test_a_pickle_in_disguise_is_refused_and_not_run(saved, name, fix_checksum):
    owned = saved.parent / "owned"
    hostile = pickle.dumps(Hostile(owned))
    pickle.loads(hostile)  # it would work
    owned.unlink()
    (saved / name).write_bytes(hostile)
    if fix_checksum:
        write_sums(saved)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load(saved)
    assert not owned.exists()


def test_a_description_builds_listed_classes_only(saved):
    system = {"name": "system", "command": "true"}
    edit_config(saved, lambda config: config["model"].update(feature_extractor=system))
    with pytest.raises(CheckpointError, match="unknown layer 'system'"):
        load(saved)


def test_a_saved_model_is_not_a_checkpoint_of_a_run(saved):
    from pyro_dak import fit

    model, x = make_model()
    with pytest.raises(CheckpointError, match="not a checkpoint of a training run"):
        fit(model, MeanFieldGuide(model).float(), (x, torch.zeros(20, 1)), epochs=1,
            resume_from=saved, progress=False, accelerator="cpu")  # fmt: skip


def test_another_dtype_is_reported_at_prediction(saved):
    model, guide = load(saved)
    with pytest.raises(TypeError, match=r"dtype of the model, torch\.float32; got torch\.float64"):
        predict(model, guide, torch.zeros(2, 3, dtype=torch.float64))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_loading_onto_cuda_gives_the_same(saved):
    x = torch.randn(7, 3, dtype=torch.float32)
    cpu, cuda = predict(*load(saved), x), predict(*load(saved, device="cuda"), x)
    torch.testing.assert_close(cpu.mean, cuda.mean)


def test_a_model_that_cannot_be_put_back_is_named(saved, monkeypatch):
    def refuse(first, second):
        raise OSError(30, "Read-only file system")

    saved.rename(saved.with_name(".model.old-01234567"))
    monkeypatch.setattr("os.rename", refuse)
    with pytest.raises(CheckpointError, match=r"model\.old-01234567.*Read-only.*by hand"):
        load(saved)
