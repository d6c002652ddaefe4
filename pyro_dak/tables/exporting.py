"""`export` of the estimators: their modules, what the file says, and rows to compare at."""

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from pyro_dak.tables.portable import raw_names
from pyro_dak.tables.predictive import Array
from pyro_dak.tables.saving import labels_to_json
from pyro_dak.tables.schema import Columns
from pyro_dak.training.export import (
    Exported,
    Format,
    Function,
    check_export,
    import_onnx,
    write_function,
)

__all__ = [
    "CATEGORIES",
    "NUMBERS",
    "export_estimator",
    "made_up_rows",
    "raw_rows",
    "split_inputs",
]

# The names of the inputs: raw rows, or their numbers; and, in ONNX, texts of categories.
NUMBERS, CATEGORIES = "x", "categories"
_NUM_ROWS = 64


def export_estimator(
    estimator: Any,
    module: nn.Module,
    X: Any,
    raw: Array,
    columns: Columns,
    path: str | os.PathLike[str],
    format: Format,
    tolerance: float,
    overwrite: bool,
    target: str | None,
) -> Exported:
    """Write a fitted estimator to a file, if it predicts rows X, `raw` `(N, D)`, as it does."""
    check_export(path, format, tolerance, overwrite)
    prediction = estimator.predict_dist(X)
    outputs: Any = module.outputs
    expected = {name: np.asarray(getattr(prediction, name)) for name in outputs}
    num_rows = len(raw)
    for name in ("mean", "epistemic", "aleatoric", "scale"):
        if name in expected:
            expected[name] = expected[name].reshape(num_rows, -1)
    is_text = format == "onnx" and bool(columns.categories)
    facts: dict[str, Any] = {
        "kind": type(estimator).__name__,
        "task": "classification" if "probs" in expected else "regression",
        "target": target,
        "columns": columns.to_json(),
        "inputs_of_columns": _inputs_of_columns(columns, is_text),
        "dates": "days since 1970-01-01 UTC" if columns.dates else None,
        "missing": "NaN for numbers and dates, '(missing)' for categories",
        "classes": labels_to_json(vars(estimator).get("classes_")),
        "df": _finite(getattr(prediction, "df", math.inf)),
        "is_multi_output": bool(vars(estimator).get("is_multi_output_", False)),
    }
    rows = torch.from_numpy(raw)
    in_front = None
    if is_text:
        in_front = (_with_texts(columns), split_inputs(raw, columns))
    elif columns.categories:
        facts["codes"] = {
            name: {text: place for place, text in enumerate(known)}
            for name, known in columns.categories.items()
        }
    function = Function(module.eval(), {NUMBERS: rows}, expected, facts, in_front)
    return write_function(function, path, format, tolerance, overwrite)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _inputs_of_columns(columns: Columns, is_text: bool) -> dict[str, list[str]]:
    """The names of the columns of each input."""
    if not is_text:
        return {NUMBERS: raw_names(columns)}
    inputs = {NUMBERS: [*columns.medians], CATEGORIES: [*columns.categories]}
    return {name: own for name, own in inputs.items() if own}


def raw_rows(values: Sequence[Array], columns: Columns) -> Array:
    """Raw rows `(N, D)`, from columns in the order of the table, as `raw_columns` gives them."""
    by_name = dict(zip(columns.names, values, strict=True))
    return np.column_stack([by_name[name] for name in raw_names(columns)])


def split_inputs(raw: Array, columns: Columns) -> dict[str, Array]:
    """Raw rows `(N, D)` as the inputs of an ONNX file with texts."""
    D = len(columns.medians)
    texts = np.empty((len(raw), len(columns.categories)), dtype=object)
    for k, known in enumerate(columns.categories.values()):
        other = "".join(known) + "?"  # which is none of them
        codes = raw[:, D + k].astype(np.int64)
        texts[:, k] = np.array([*known, other], dtype=object)[codes]
    inputs = {NUMBERS: raw[:, :D], CATEGORIES: texts}
    return {name: own for name, own in inputs.items() if own.shape[1]}


def _with_texts(columns: Columns) -> Any:
    """A function that puts a step in front of an ONNX model, from texts of categories to places."""

    def put_in_front(proto: Any) -> Any:
        onnx = import_onnx("onnx")
        make, double = onnx.helper.make_node, onnx.TensorProto.DOUBLE
        own, D = [*columns.categories.items()], len(columns.medians)
        texts = [f"text_{k}" for k in range(len(own))]
        nodes = [make("Split", [CATEGORIES], texts, axis=1, num_outputs=len(own))]
        for k, (_, known) in enumerate(own):
            places = {
                "keys_strings": known,
                "values_int64s": [*range(len(known))],
                "default_int64": -1,
            }
            nodes.append(
                make("LabelEncoder", [texts[k]], [f"place_{k}"], domain="ai.onnx.ml", **places)
            )
            nodes.append(make("Cast", [f"place_{k}"], [f"code_{k}"], to=double))
        parts = [NUMBERS] if D else []
        codes = [f"code_{k}" for k in range(len(own))]
        nodes.append(make("Concat", [*parts, *codes], ["raw"], axis=1))
        graph = proto.graph
        for node in graph.node:
            node.input[:] = ["raw" if name == NUMBERS else name for name in node.input]
        nodes += [*graph.node]
        del graph.node[:]
        graph.node.extend(nodes)
        del graph.input[:]
        kinds = ((NUMBERS, double, D), (CATEGORIES, onnx.TensorProto.STRING, len(own)))
        for name, kind, width in kinds:
            if width:
                value = onnx.helper.make_tensor_value_info(name, kind, ["rows", width])
                graph.input.append(value)
        proto.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 3))
        onnx.checker.check_model(proto)
        return proto

    return put_in_front


def made_up_rows(columns: Columns, loc: Any, scale: Any, has_names: bool) -> Any:
    """Rows to trace and to compare at, where there are no others: normal numbers, any category.

    A tenth of the numbers is missing. `loc` and `scale` are those of the columns of numbers.
    """
    rng = np.random.default_rng(0)
    table: dict[str, Any] = {}
    for name, own_loc, own_scale in zip(columns.medians, loc, scale, strict=True):
        numbers = own_loc + own_scale * rng.standard_normal(_NUM_ROWS)
        numbers[rng.random(_NUM_ROWS) < 0.1] = np.nan
        table[name] = numbers
        if name in columns.dates:
            table[name] = pd.to_datetime(np.round(numbers * 86400), unit="s", utc=True)
    for name, known in columns.categories.items():
        table[name] = rng.choice(np.array(known, dtype=object), _NUM_ROWS)
    frame = pd.DataFrame({name: table[name] for name in columns.names})
    return frame if has_names else frame.to_numpy()
