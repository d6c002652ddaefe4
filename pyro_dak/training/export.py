"""Models as files that run without this library: ONNX, or a program of `torch.export`.

An exported file holds one function, from inputs with any number of rows to predictions, and says
about itself what its numbers mean: names of columns and classes, units, version, a fingerprint. In
an ONNX file this is the entry "pyro_dak" of its metadata, in a program of torch the extra file
"pyro_dak.json", both as JSON.

The last entry of an ONNX file is the checksum of all bytes before it. A file of protocol buffers
may be continued at its end, so that it stays an ordinary ONNX file.
"""

import hashlib
import importlib
import io
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyro
import torch
from torch import Tensor, nn

from pyro_dak.inference.draws import Posterior
from pyro_dak.model.dak import DAK
from pyro_dak.model.inputs import check_inputs
from pyro_dak.model.likelihoods import CategoricalLikelihood
from pyro_dak.model.modes import evaluating, pyro_lock
from pyro_dak.model.rows import Inputs, blank_rows, like_model, parts, take
from pyro_dak.prediction.portable import Method, portable_model
from pyro_dak.prediction.predict import predict
from pyro_dak.training.files import check_place, write_whole
from pyro_dak.validation import (
    check_choice,
    check_integer,
    check_path,
    check_positive,
    check_seed,
)

__all__ = [
    "FACTS",
    "FORMAT_VERSION",
    "ExportError",
    "Exported",
    "Format",
    "Function",
    "check_export",
    "export",
    "import_onnx",
    "sealed",
    "write_function",
]

Format = Literal["onnx", "torch"]

FORMAT_VERSION = 1
# The key of what a file says about itself, and that of its checksum.
FACTS, _SEAL = "pyro_dak", "pyro_dak_sha256"
# An ONNX file of more bytes cannot be made in one piece.
_MAX_ONNX_BYTES = 2**31 - 1
# Marks the names of inputs and outputs, and those of all other values, in a graph.
_OUTER, _INNER = "outer_", "v_"
_NUM_EXAMPLES, _NUM_CHECKED = 4, 64
# Novelty counts reference rows, and rounding moves a score past some of them. In double precision
# it hardly ever does; in single precision, where the entropies of sure rows are rounded, it does.
_SINGLE_NOVELTY = 0.02

_MEANINGS = {
    "mean": "expected value of the target, in its units",
    "epistemic": "variance of the mean that more data could remove, in squared units of the target",
    "aleatoric": "variance of the noise, in squared units of the target",
    "scale": "scale of the Student-t (or normal) distribution of the target, in its units",
    "noise_scale": "scale of the Student-t noise, in units of the target",
    "probs": "probabilities of the classes, in their order",
    "entropy": "entropy of the probabilities, in nats",
    "expected_entropy": "entropy that would remain if the weights were known, in nats",
    "novelty": "share of reference rows that are at least as strange: small for strange rows",
}


class ExportError(RuntimeError):
    """A model cannot be exported, or what was exported does not predict as the model does."""


@dataclass(frozen=True)
class Exported:
    """What `export` has written.

    Attributes:
        path: the file.
        differences: the greatest difference between the file and `predict` over the checked rows,
            by output, relative to the largest value of that output; that of the mean relative to
            the largest mean or standard deviation, and that of novelty as it is.
        num_rows: how many rows were checked.
        fingerprint: 64 hexadecimal digits that two exports have in common only if they compute the
            same function from the same weights.
    """

    path: Path
    differences: dict[str, float]
    num_rows: int
    fingerprint: str

    def __repr__(self) -> str:
        listed = ", ".join(f"{name} {value:.1e}" for name, value in self.differences.items())
        return (
            f"Exported({str(self.path)!r}; greatest differences to `predict` on {self.num_rows} "
            f"rows: {listed}; fingerprint {self.fingerprint[:12]})"
        )


@dataclass(frozen=True)
class Function:
    """A function to export, and what it must give.

    Attributes:
        module: from the inputs to a tuple of outputs.
        inputs: rows of each input, by name.
        expected: the outputs at these rows, by name, in the order of the module.
        facts: what the file says about itself.
        in_front: for ONNX, turns a model with these inputs into one with others, and rows of these
            inputs into rows of the others.
    """

    module: nn.Module
    inputs: Mapping[str, Tensor]
    expected: Mapping[str, Any]
    facts: Mapping[str, Any]
    in_front: tuple[Callable[[Any], Any], Mapping[str, Any]] | None = None


def import_onnx(name: str) -> Any:
    """A module of the extra "onnx", or an error that says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"ONNX needs {name.split('.')[0]}, which is not installed. "
            "Run `pip install 'pyro_dak[onnx]'`."
        ) from error


def export(
    model: DAK,
    posterior: Posterior,
    path: str | os.PathLike[str],
    format: Format = "onnx",
    *,
    x: Inputs | None = None,
    columns: Sequence[str] | None = None,
    classes: Sequence[Any] | None = None,
    method: Method = "mc",
    num_samples: int = 100,
    residual_variance: bool = False,
    seed: int | None = None,
    novelty: bool = True,
    tolerance: float = 1e-5,
    overwrite: bool = False,
) -> Exported:
    """Write a model and its posterior to one file that predicts without pyro_dak.

    The file maps x, with any number of rows, to what `predict` says: `mean`, `epistemic` and
    `aleatoric`, variances `(N, C)`, with Student-t noise `noise_scale` too; for classes `probs`
    `(N, C)`, `entropy` and, with "mc", `expected_entropy`, `(N,)`; and `novelty` `(N,)`, if the
    model has learned it. Calibration is in it. Nothing is drawn when it runs: with "mc" it holds
    the standard normals of the seed, those that `predict` takes.

    ONNX runs in onnxruntime and other runtimes, without Python. A program of torch runs in torch
    alone, `torch.export.load(path).module()(x)`; that function uses pickle, so load such files
    from people that you trust only. Its custom is to end in .pt2.

    The file is compared with `predict` before it is written; if it differs, nothing is.

    Args:
        model: the model.
        posterior: a guide of this library with q(f) in closed form, or the exact posterior.
        path: the file.
        format: "onnx", which needs `pip install pyro_dak[onnx]`, or "torch".
        x: rows to compare at, inputs as in `predict`. By default 64 rows of standard normals; your
            own are better.
        columns: names of the columns of x, which the file keeps; `pyro-dak predict` looks for them.
        classes: names of the classes, likewise.
        method: as in `predict`; so are the next four.
        num_samples: as in `predict`.
        residual_variance: as in `predict`.
        seed: as in `predict`.
        novelty: as in `predict`.
        tolerance: the largest difference to `predict` that is allowed, as `Exported` has it. That
            of novelty is a count of reference rows that rounding may change; it may be 0.02.
        overwrite: whether a file that exists may be replaced.

    Raises:
        ExportError: if the network has an operation that the format does not know, or if what was
            made differs from `predict`.
        FileExistsError: if something stands at `path`, without `overwrite`.
        NotImplementedError: if the posterior is known by draws only.
    """
    check_choice("method", method, ("mc", "probit"))
    check_integer("num_samples", num_samples, minimum=1)
    check_seed("seed", seed)
    options: dict[str, Any] = {
        "method": method,
        "num_samples": num_samples,
        "seed": seed,
        "residual_variance": residual_variance,
        "novelty": novelty,
    }
    check_export(path, format, tolerance, overwrite)
    rows = _default_rows(model) if x is None else x
    check_inputs(model, rows)
    prediction: Any = predict(model, posterior, rows, progress=False, **options)
    module = portable_model(model, posterior, **options)
    likelihood: Any = module.likelihood
    expected = {
        name: likelihood.noise_scale.expand_as(prediction.mean)
        if name == "noise_scale"
        else getattr(prediction, name)
        for name in module.outputs
    }
    cpu = like_model(rows, torch.empty(0, dtype=module.member.moments.dtype))
    named = {"x": cpu} if isinstance(cpu, Tensor) else _named(cpu)
    module.member.coordinates.names = [*cpu] if isinstance(cpu, Mapping) else None
    has_classes = isinstance(model.likelihood, CategoricalLikelihood)
    facts: dict[str, Any] = {
        "kind": "DAK",
        "task": "classification" if has_classes else "regression",
        "likelihood": type(model.likelihood).__name__,
        "columns": _checked_names("columns", columns, named),
        "classes": _checked_classes(model, classes) if has_classes else None,
        **module.facts,
    }
    with evaluating(module):
        return write_function(
            Function(module, named, expected, facts), path, format, tolerance, overwrite
        )


def _default_rows(model: DAK) -> Any:
    """Rows to trace and to check at: standard normals, and ones for what is not floating."""
    if model.input_shape is None:
        raise ValueError("`x` must be given, because the model has not seen inputs yet.")
    like = model.layer.log_unit_scale
    generator = torch.Generator().manual_seed(0)
    blank = blank_rows(model.input_shape, _NUM_CHECKED, like)

    def filled(part: Tensor) -> Tensor:
        if not part.is_floating_point():
            return part
        return torch.randn(part.shape, generator=generator).to(part)

    if isinstance(blank, Tensor):
        return filled(blank)
    if isinstance(blank, dict):
        return {name: filled(part) for name, part in blank.items()}
    return tuple(filled(part) for part in blank)


def _named(x: Inputs) -> dict[str, Tensor]:
    """The parts of x by the names that the inputs of the file get."""
    if isinstance(x, Mapping):
        return dict(x)
    return {f"x{index}": part for index, part in enumerate(parts(x).values())}


def _checked_names(
    name: str, names: Sequence[str] | None, inputs: Mapping[str, Tensor]
) -> list[str] | None:
    if names is None:
        return None
    shapes = [tuple(part.shape[1:]) for part in inputs.values()]
    if shapes != [(len(names),)] or not all(isinstance(n, str) for n in names):
        raise ValueError(
            f"`{name}` must hold a text for each column of one input x (N, D); got {len(names)} "
            f"names for rows of shape {shapes}."
        )
    return [*names]


def _checked_classes(model: DAK, classes: Sequence[Any] | None) -> list[str]:
    if classes is None:
        return [str(index) for index in range(model.num_outputs)]
    if len(classes) != model.num_outputs:
        raise ValueError(
            f"`classes` must hold {model.num_outputs} names, one for each class; got "
            f"{len(classes)}."
        )
    return [str(name) for name in classes]


def check_export(
    path: str | os.PathLike[str], format: str, tolerance: float, overwrite: bool
) -> None:
    """Raise unless a file of this format may be written at `path`. Ask before the work."""
    check_path("path", path)
    check_choice("format", format, ("onnx", "torch"))
    check_positive("tolerance", tolerance)
    if format == "onnx":
        for name in ("onnx", "onnxscript", "onnxruntime"):
            import_onnx(name)
    _check_replaceable(Path(path), overwrite)


def _check_replaceable(path: Path, overwrite: bool) -> None:
    check_place(path)
    if path.is_dir():
        raise FileExistsError(f"`{path}` is a directory, expected a file to write to.")
    if path.exists() and not overwrite:
        raise FileExistsError(f"`{path}` exists; pass overwrite=True to replace it.")


def write_function(
    function: Function,
    path: str | os.PathLike[str],
    format: Format,
    tolerance: float = 1e-5,
    overwrite: bool = False,
) -> Exported:
    """Write a function to one file, if it gives what it must give."""
    check_export(path, format, tolerance, overwrite)
    path, names = Path(path), [*function.expected]
    program = _traced(function)
    fingerprint = _fingerprint(program)
    facts = {
        "format": FORMAT_VERSION,
        "pyro_dak": importlib.import_module("pyro_dak").__version__,
        "fingerprint": fingerprint,
        **function.facts,
        "outputs": {name: _MEANINGS[name] for name in names},
    }
    make, run = (_onnx_bytes, _run_onnx) if format == "onnx" else (_torch_bytes, _run_torch)
    data = make(program, function, facts)
    found = run(data, function)
    expected = {name: _as_array(value) for name, value in function.expected.items()}
    differences = _differences(dict(zip(names, found, strict=True)), expected)
    is_single = any(value.dtype == np.float32 for value in found)
    for name, difference in differences.items():
        allowed = max(tolerance, _SINGLE_NOVELTY if name == "novelty" and is_single else 0.0)
        if not difference <= allowed:
            raise ExportError(
                f"`{name}` of the exported model differs from `predict` by {difference:.2g} "
                f"(relative to its size), more than {allowed:g}; nothing was written. Look at rows "
                "with extreme values, export the model in double precision, or raise `tolerance`."
            )
    write_whole(
        path,
        lambda temporary: temporary.write_bytes(data),
        lambda: _check_replaceable(path, overwrite),
    )
    num_rows = len(next(iter(function.inputs.values())))
    return Exported(path, differences, num_rows, fingerprint)


def _as_array(value: Any) -> np.ndarray[Any, np.dtype[Any]]:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


def _differences(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """The greatest difference of each output, relative to its size, as `Exported` says."""
    differences = {}
    for name, wanted in expected.items():
        if found[name].shape != wanted.shape:
            raise ExportError(
                f"`{name}` of the exported model has shape {found[name].shape}, expected "
                f"{wanted.shape}; nothing was written."
            )
        sizes = [np.abs(wanted)]
        if name == "mean":
            sizes.append(np.sqrt(expected["epistemic"] + expected["aleatoric"]))
        size = max(np.max(part[np.isfinite(part)], initial=0.0) for part in sizes)
        is_same = (found[name] == wanted) | (np.isnan(found[name]) & np.isnan(wanted))
        with np.errstate(invalid="ignore"):
            error = np.where(is_same, 0.0, np.abs(found[name].astype(np.float64) - wanted))
        scale = 1.0 if name == "novelty" or size == 0 else float(size)
        differences[name] = float(error.max(initial=0.0)) / scale
    return differences


def _traced(function: Function) -> Any:
    """The function as a program of torch, for any number of rows."""
    examples = tuple(
        take(part, torch.arange(_NUM_EXAMPLES) % len(part)) for part in function.inputs.values()
    )
    # torch 2.7 takes a slice such as x[:, 1:] for a claim that there are fewer than 2^63 - 1 rows.
    rows = torch.export.Dim("rows", max=2**62)
    shapes = {"x": tuple({0: rows} for _ in examples)}
    # Pyro's distributions look at values, unless they are told not to.
    with _quietly(), pyro_lock, pyro.validation_enabled(False), torch.no_grad():
        try:
            # torch 2.7 would be strict by default, and its compiler knows less of Python.
            module = _Called(function.module)
            return torch.export.export(module, examples, dynamic_shapes=shapes, strict=False)
        except Exception as error:  # of many kinds, some of them private
            raise ExportError(
                f"The model cannot be traced by torch.export: {_first_line(error)} Its network may "
                "not ask what its inputs hold, nor fix the number of rows."
            ) from error


class _Called(nn.Module):
    """A module called with all of its inputs, whatever it calls them."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *x: Tensor) -> Any:
        return self.module(*x)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


@contextmanager
def _quietly() -> Iterator[None]:
    """A context that hides what the exporters of torch say of themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _fingerprint(program: Any) -> str:
    """The checksum of the operations and of all constants."""
    code = hashlib.sha256(program.graph_module.code.encode())
    tensors = {**program.state_dict, **program.constants}
    for name in sorted(tensors):
        if isinstance(value := tensors[name], Tensor):
            value = value.detach().cpu().contiguous()
            code.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            code.update(value.numpy().tobytes())
    return code.hexdigest()


def _torch_bytes(program: Any, function: Function, facts: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    with _quietly():
        files = {f"{FACTS}.json": json.dumps(facts, allow_nan=False)}
        torch.export.save(program, buffer, extra_files=files)
    return buffer.getvalue()


def _run_torch(data: bytes, function: Function) -> list[Any]:
    with _quietly(), torch.no_grad():
        module = torch.export.load(io.BytesIO(data)).module()
        return [_as_array(value) for value in module(*function.inputs.values())]


def _onnx_bytes(program: Any, function: Function, facts: dict[str, Any]) -> bytes:
    """The program as an ONNX file, with facts and checksum."""
    try:
        with _quietly():
            made: Any = torch.onnx.export(
                program,
                (),
                input_names=[f"{_OUTER}{name}" for name in function.inputs],
                output_names=[f"{_OUTER}{name}" for name in function.expected],
                dynamo=True,
                verbose=False,
            )
    except Exception as error:
        raise ExportError(
            f"The model cannot be written as ONNX: {_first_line(error)} Its network may have an "
            'operation that ONNX lacks; format="torch" has all of them.'
        ) from error
    proto = _cleaned(made.model_proto)
    if function.in_front is not None:
        proto = function.in_front[0](proto)
    del proto.metadata_props[:]
    proto.producer_name, proto.producer_version = "pyro_dak", facts["pyro_dak"]
    facts = facts | {"inputs": [value.name for value in proto.graph.input]}
    proto.metadata_props.add(key=FACTS, value=json.dumps(facts, allow_nan=False))
    if proto.ByteSize() > _MAX_ONNX_BYTES:
        raise ExportError('The model has more than 2 GB, too much for ONNX; use format="torch".')
    return sealed(proto.SerializeToString())


def _cleaned(proto: Any) -> Any:
    """The model without notes on how it was made, which name files, and with axes called "rows".

    Inside, the exporter may call other values like the inputs and outputs; these are renamed.
    """
    graph = proto.graph

    def renamed(name: str) -> str:
        if name.startswith(_OUTER):
            return name.removeprefix(_OUTER)
        return f"{_INNER}{name}" if name else name  # without a name, an optional input is left out

    for node in graph.node:
        node.input[:] = map(renamed, node.input)
        node.output[:] = map(renamed, node.output)
    for value in [*graph.input, *graph.output, *graph.initializer]:
        value.name = renamed(value.name)
    del graph.value_info[:]
    del graph.metadata_props[:]
    for part in [*graph.node, *graph.input, *graph.output, *graph.initializer]:
        part.doc_string = ""
        del part.metadata_props[:]
    for value in [*graph.input, *graph.output]:
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param:
                axis.dim_param = "rows"
    return proto


def sealed(body: bytes) -> bytes:
    """An ONNX file with the checksum of its bytes as one more entry of its metadata, at the end."""
    pair = [_SEAL.encode(), hashlib.sha256(body).hexdigest().encode()]
    # Fields 1 and 2 of an entry, and field 14 of a model, all with their lengths in one byte.
    entry = b"".join(bytes([8 * (k + 1) + 2, len(t)]) + t for k, t in enumerate(pair))
    return body + bytes([8 * 14 + 2, len(entry)]) + entry


def _run_onnx(data: bytes, function: Function) -> list[Any]:
    runtime = import_onnx("onnxruntime")
    inputs: Mapping[str, Any] = function.inputs
    if function.in_front is not None:
        inputs = function.in_front[1]
    try:
        session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])
        return session.run(None, {name: _as_array(part) for name, part in inputs.items()})
    except Exception as error:  # those of onnxruntime have no common class
        raise ExportError(f"onnxruntime cannot run the model: {_first_line(error)}") from error
