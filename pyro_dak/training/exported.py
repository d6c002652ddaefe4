"""Exported ONNX files, read with checks and run by onnxruntime. Reading one runs no code from it.

All numbers of such a file are in the file itself: a tensor whose data are elsewhere names a path,
which would be read as part of the weights, and is refused. A program of torch is never read here:
`torch.export.load` uses pickle.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pyro_dak.training.checkpoint import MAX_BYTES, CheckpointError, blaming
from pyro_dak.training.export import FACTS, FORMAT_VERSION, import_onnx, sealed
from pyro_dak.training.files import read_regular
from pyro_dak.validation import check_integer, check_path

__all__ = ["ExportedFunction", "read_exported"]

_Array = np.ndarray[Any, np.dtype[Any]]
_LENGTH_OF_SEAL = len(sealed(b""))


class ExportedFunction:
    """A function from inputs to outputs, by name, arrays with a row for each row.

    Attributes:
        facts: what the file says about itself.
        inputs: the number of columns of each input and the dtype of its numbers, "str" for texts;
            the number is None where a row is no vector.
        outputs: the names of the outputs.
    """

    def __init__(self, session: Any, facts: dict[str, Any]):
        self._session, self.facts = session, facts
        dtypes = {"tensor(double)": "float64", "tensor(float)": "float32", "tensor(string)": "str"}
        self.inputs: dict[str, tuple[int | None, str]] = {}
        for own in session.get_inputs():
            is_vector = len(own.shape) == 2 and isinstance(own.shape[1], int)
            dtype = dtypes.get(own.type, own.type.removeprefix("tensor(").removesuffix(")"))
            self.inputs[own.name] = (own.shape[1] if is_vector else None, dtype)
        self.outputs = [own.name for own in session.get_outputs()]

    def __call__(self, inputs: Mapping[str, _Array]) -> dict[str, _Array]:
        """The outputs at rows of the inputs."""
        found = self._session.run(None, dict(inputs))
        return dict(zip(self.outputs, found, strict=True))


def read_exported(
    path: str | os.PathLike[str], max_bytes: int = MAX_BYTES, num_threads: int | None = None
) -> ExportedFunction:
    """The function in an ONNX file that this library has exported.

    Args:
        path: the file.
        max_bytes: the most bytes that it may have.
        num_threads: how many threads run it; by default those that onnxruntime takes.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
    """
    check_path("path", path)
    path = Path(path)
    try:
        data = read_regular(path, max_bytes)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}.") from error
    if data.startswith(b"PK"):
        raise CheckpointError(
            f"{path}: is an archive, perhaps a program of torch, whose loading could run code; "
            "expected an ONNX file."
        )
    body = data[:-_LENGTH_OF_SEAL]
    if len(data) <= _LENGTH_OF_SEAL or sealed(body) != data:
        raise CheckpointError(
            f"{path}: is not an ONNX file that pyro_dak has exported, or it was damaged or changed "
            "since: it does not end in the checksum of its content."
        )
    onnx, runtime = import_onnx("onnx"), import_onnx("onnxruntime")
    options = runtime.SessionOptions()
    # Never onnxruntime's own format, in which nobody has looked for data that are elsewhere.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    options.log_severity_level = 4  # what is wrong is in the error
    if num_threads is not None:
        check_integer("num_threads", num_threads, minimum=1)
        options.intra_op_num_threads = num_threads
    with blaming(path):
        _check_complete(onnx, body)
        session = runtime.InferenceSession(body, options, providers=["CPUExecutionProvider"])
        facts = json.loads(session.get_modelmeta().custom_metadata_map[FACTS])
        if not isinstance(facts, dict):
            raise TypeError("its description is not a dictionary.")
        if facts["format"] != FORMAT_VERSION:
            raise ValueError(
                f"has format {facts['format']}, and this version reads {FORMAT_VERSION} only."
            )
        return ExportedFunction(session, facts)


def _check_complete(onnx: Any, body: bytes) -> None:
    """Raise unless all tensors of an ONNX model hold their numbers themselves."""
    for tensor in _messages(onnx.load_model_from_string(body), onnx.TensorProto):
        if tensor.data_location != onnx.TensorProto.DEFAULT or tensor.external_data:
            where = {entry.key: entry.value for entry in tensor.external_data}.get("location")
            raise ValueError(
                f"the data of its tensor {tensor.name!r:.60} are in another file, {where!r:.60}; "
                "only files that hold all of their numbers are read."
            )


def _messages(message: Any, kind: type) -> Iterator[Any]:
    """All parts of a kind in a message of protocol buffers, wherever they stand."""
    if isinstance(message, kind):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in (value,) if hasattr(value, "ListFields") else value:
                yield from _messages(part, kind)
