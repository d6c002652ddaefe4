"""Exported files predict as the model does, say what they are, and are refused when damaged."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import pyro_dak
from pyro_dak import CheckpointError, ExportError, export, learn_novelty, predict
from pyro_dak.training import export as exporting
from pyro_dak.training.exported import read_exported
from tests import scenarios

RUN_ALONE = """
import json, sys
import numpy as np
import onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
x = np.load(sys.argv[2])
names = [out.name for out in session.get_outputs()]
values = [value.tolist() for value in session.run(None, {"x": x})]
print(json.dumps(dict(zip(names, values))))
assert not {"torch", "pyro", "pyro_dak"} & set(sys.modules)
"""


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    own = scenarios.make("heteroscedastic", num_outputs=1, level=4, num_rows=300)
    torch.set_default_dtype(dtype)
    learn_novelty(own.model, own.guide, own.x, progress=False)
    own.model.input_shape = (2,)
    return own


@pytest.fixture(scope="module")
def file(case, tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "model.onnx"
    return export(case.model, case.guide, path, x=case.x, columns=["a", "b"])


def test_an_onnx_file_runs_without_torch_and_predicts_the_same(case, file, tmp_path):
    np.save(tmp_path / "x.npy", case.x.numpy())
    command = [sys.executable, "-c", RUN_ALONE, str(file.path), str(tmp_path / "x.npy")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = {name: torch.tensor(value) for name, value in json.loads(run.stdout).items()}
    wanted = predict(case.model, case.guide, case.x)
    for name in ("mean", "epistemic", "aleatoric"):
        value = getattr(wanted, name).double()
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)
    assert max(file.differences.values()) < 1e-5
    assert (found["novelty"] - wanted.novelty.double()).abs().max() < 2 / 300
    assert file.num_rows == 300


@pytest.mark.parametrize("num_rows", [1, 7])
def test_the_number_of_rows_is_free_and_rows_do_not_see_each_other(case, file, num_rows):
    function = read_exported(file.path)
    found = function({"x": case.x[:num_rows].numpy()})
    everything = function({"x": case.x.numpy()})
    for name, value in found.items():
        np.testing.assert_allclose(value, everything[name][:num_rows], rtol=1e-5, atol=1e-6)


def test_the_file_says_what_it_is(case, file):
    function = read_exported(file.path)
    assert function.facts["columns"] == ["a", "b"]
    assert function.facts["task"] == "regression"
    assert function.facts["pyro_dak"] == pyro_dak.__version__
    assert function.facts["fingerprint"] == file.fingerprint
    assert "squared units" in function.facts["outputs"]["epistemic"]
    assert function.inputs == {"x": (2, "float32")}
    assert list(function.outputs) == ["mean", "epistemic", "aleatoric", "novelty"]
    model = onnx.load(file.path)
    onnx.checker.check_model(model, full_check=True)
    assert b"site-packages" not in file.path.read_bytes()  # no paths of this machine
    assert [v.type.tensor_type.shape.dim[0].dim_param for v in model.graph.input] == ["rows"]


# What torch 2.7 says of the constants that it loads.
@pytest.mark.filterwarnings("ignore:Node .* target .* does not reference an nn.Module:UserWarning")
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
def test_a_torch_program_predicts_the_same_and_says_the_same(case, file, tmp_path):
    report = export(case.model, case.guide, tmp_path / "model.pt2", "torch", x=case.x)
    kept = {"pyro_dak.json": ""}
    program = torch.export.load(report.path, extra_files=kept)
    assert json.loads(kept["pyro_dak.json"])["fingerprint"] == report.fingerprint
    assert report.fingerprint == file.fingerprint
    for rows in (case.x, case.x[:1]):
        found, wanted = program.module()(rows), predict(case.model, case.guide, rows)
        torch.testing.assert_close(found[0], wanted.mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[2], wanted.aleatoric, rtol=1e-5, atol=1e-6)
    assert max(report.differences.values()) < 1e-5


def values_of(path, format, x):
    """The outputs of an exported file at rows that its export has not seen, by name."""
    if format == "onnx":
        return read_exported(path)({"x": x.numpy()})
    kept = {"pyro_dak.json": ""}
    program = torch.export.load(path, extra_files=kept)
    names = json.loads(kept["pyro_dak.json"])["outputs"]
    return {n: v.detach().numpy() for n, v in zip(names, program.module()(x), strict=True)}


@pytest.mark.parametrize("format", ["onnx", "torch"])
@pytest.mark.parametrize("likelihood", ["gaussian", "heteroscedastic", "student_t", "categorical"])
def test_both_formats_equal_predict(likelihood, format, tmp_path):
    own = scenarios.make(likelihood, num_outputs=3, level=4)
    report = export(own.model, own.guide, tmp_path / "model", format, x=own.x)
    x = 2 * torch.randn(50, 2)
    wanted = predict(own.model, own.guide, x)
    found = values_of(report.path, format, x)
    compared = {"probs", "entropy"} if likelihood == "categorical" else {"mean", "epistemic"}
    assert compared <= found.keys()
    for name, value in found.items():
        if name != "noise_scale":
            np.testing.assert_allclose(value, getattr(wanted, name), rtol=1e-5, atol=1e-8)


def test_classes_and_inputs_with_names(tmp_path):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.embedding = nn.Linear(2, 4), nn.Embedding(5, 4)

        def forward(self, numbers, token):
            return self.table(numbers) + self.embedding(token)

    torch.set_default_dtype(torch.float32)
    own = scenarios.classification(guide="low_rank")
    model = pyro_dak.DAK(Network(), 4, 2, 3, 2, likelihood=own.model.likelihood)
    x = {"numbers": torch.randn(40, 2), "token": torch.randint(0, 5, (40,))}
    model.unit_inputs(x)
    guide = own.guide
    report = export(model.eval(), guide, tmp_path / "m.onnx", x=x, classes=["a", "b", "c"])
    assert set(report.differences) == {"probs", "entropy", "expected_entropy"}
    assert max(report.differences.values()) < 1e-5
    function = read_exported(report.path)
    assert function.facts["classes"] == ["a", "b", "c"]
    found = function({name: part[:1].numpy() for name, part in x.items()})
    wanted = predict(model, guide, {name: part[:1] for name, part in x.items()})
    np.testing.assert_allclose(found["probs"], wanted.probs, rtol=1e-5, atol=1e-6)


def test_a_difference_to_predict_is_an_error_and_leaves_no_file(case, tmp_path, monkeypatch):
    def spoilt(*arguments, **options):
        prediction = predict(*arguments, **options)
        return replace(prediction, mean=prediction.mean + 1e-3)

    monkeypatch.setattr(exporting, "predict", spoilt)
    with pytest.raises(ExportError, match=r"`mean` .* differs from `predict`"):
        export(case.model, case.guide, tmp_path / "model.pt2", "torch", x=case.x)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_only_on_request(case, tmp_path):
    path = tmp_path / "model.pt2"
    path.write_text("precious")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        export(case.model, case.guide, path, "torch")
    assert path.read_text() == "precious"
    export(case.model, case.guide, path, "torch", overwrite=True)
    assert path.stat().st_size > 1000


def test_a_network_that_looks_at_values_is_refused_in_our_words(tmp_path):
    class Fickle(nn.Module):
        def forward(self, x):
            return torch.cat([x, x], -1) if x.sum() > 0 else torch.cat([x, -x], -1)

    own = scenarios.gaussian_regression()
    own.model.feature_extractor = Fickle()
    with pytest.raises(ExportError, match="cannot be traced"):
        export(own.model, own.guide, tmp_path / "model.pt2", "torch", x=own.x)


@pytest.mark.usefixtures("no_type_checker")
def test_arguments_are_checked(case, tmp_path):
    with pytest.raises(ValueError, match="`format`"):
        export(case.model, case.guide, tmp_path / "m", "tflite")
    with pytest.raises(ValueError, match="`columns` must hold a text for each column"):
        export(case.model, case.guide, tmp_path / "m", "torch", columns=["a"])
    blind = scenarios.gaussian_regression()
    blind.model.input_shape = None
    with pytest.raises(ValueError, match="`x` must be given"):
        export(blind.model, blind.guide, tmp_path / "m", "torch")
    with pytest.raises(NotADirectoryError):
        export(case.model, case.guide, tmp_path / "nowhere" / "m", "torch")


def test_every_changed_byte_is_noticed(file, tmp_path):
    data, path = file.path.read_bytes(), tmp_path / "damaged.onnx"
    rng = np.random.default_rng(0)
    for place in [0, 1, len(data) - 1, len(data) - 80, *rng.integers(0, len(data), 60).tolist()]:
        changed = bytearray(data)
        changed[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match="damaged"):
            read_exported(path)
    for size in (0, 1, 84, 85, 86, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match="damaged"):
            read_exported(path)


def test_other_files_are_refused(tmp_path, file):
    other = tmp_path / "other.onnx"
    model = onnx.load(file.path)
    del model.metadata_props[:]
    other.write_bytes(model.SerializeToString())
    with pytest.raises(CheckpointError, match="is not an ONNX file that pyro_dak has exported"):
        read_exported(other)
    other.write_bytes(exporting.sealed(model.SerializeToString()))  # sealed, but says nothing
    with pytest.raises(CheckpointError, match=r"other\.onnx"):
        read_exported(other)
    other.write_bytes(exporting.sealed(b"\x08\x0aNonsense"))
    with pytest.raises(CheckpointError, match=r"other\.onnx"):
        read_exported(other)
    other.write_bytes(b"PK\x03\x04 a zip file" * 20)
    with pytest.raises(CheckpointError, match="expected an ONNX file"):
        read_exported(other)
    with pytest.raises(CheckpointError, match="only 10 may be read"):
        read_exported(file.path, max_bytes=10)
    with pytest.raises(CheckpointError, match="No such file"):
        read_exported(tmp_path / "nothing.onnx")


def outside(tensor):
    """Let the data of a tensor be in another file, which is there."""
    np.zeros(4096, np.float32).tofile("secret.bin")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="secret.bin")


def in_a_subgraph(model):
    inner = onnx.GraphProto(name="inner")
    inner.node.append(onnx.helper.make_node("Constant", [], ["c"]))
    inner.node[0].attribute.append(in_an_attribute(onnx.NodeProto()))
    node = model.graph.node.add(op_type="If")
    node.attribute.append(onnx.helper.make_attribute("then_branch", inner))


def in_an_attribute(node):
    value = onnx.numpy_helper.from_array(np.zeros(3, np.float32), "value")
    outside(value)
    node.attribute.append(onnx.helper.make_attribute("value", value))
    return node.attribute[-1]


def in_a_function(model):
    in_an_attribute(model.functions.add(name="f", domain="other").node.add(op_type="Constant"))


PLACES = {
    "weights": lambda model: outside(model.graph.initializer[0]),
    "sparse weights": lambda model: outside(model.graph.sparse_initializer.add().values),
    "attribute": lambda model: in_an_attribute(model.graph.node[0]),
    "subgraph": in_a_subgraph,
    "function": in_a_function,
    "no location": lambda model: setattr(model.graph.initializer[0], "data_location", 1),
    "location of data that are there": lambda model: model.graph.initializer[0].external_data.add(
        key="location", value="secret.bin"
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_file_whose_numbers_are_in_another_one_is_refused(file, tmp_path, monkeypatch, place):
    """Whoever can write a file can seal it; it must not read what its reader may read."""
    monkeypatch.chdir(tmp_path)
    model = onnx.load(file.path)
    PLACES[place](model)
    path = tmp_path / "outside.onnx"
    path.write_bytes(exporting.sealed(model.SerializeToString()))
    with pytest.raises(CheckpointError, match=r"outside\.onnx: the data of its tensor '.*' are in"):
        read_exported(path)


def test_no_other_format_of_onnxruntime_is_read(file, tmp_path):
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "model.ort")
    options.add_session_config_entry("session.save_model_format", "ORT")
    onnxruntime.InferenceSession(str(file.path), options, providers=["CPUExecutionProvider"])
    other = tmp_path / "sealed.onnx"
    other.write_bytes(exporting.sealed((tmp_path / "model.ort").read_bytes()))
    with pytest.raises(CheckpointError, match=r"sealed\.onnx"):
        read_exported(other)


def test_a_sealed_file_is_an_ordinary_onnx_file(file):
    session = onnxruntime.InferenceSession(str(file.path))
    kept = session.get_modelmeta().custom_metadata_map
    assert {"pyro_dak", "pyro_dak_sha256"} == set(kept)


def test_without_onnx_the_error_says_what_to_install(case, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"pip install 'pyro_dak\[onnx\]'"):
        export(case.model, case.guide, tmp_path / "model.onnx")
