"""Fitted estimators on disk, without pickle: arrays as safetensors, everything else as JSON."""

import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import is_classifier

from pyro_dak.inference.guides import MeanFieldGuide
from pyro_dak.model.likelihoods import CategoricalLikelihood
from pyro_dak.tables.conditioning import ConditionedMembers
from pyro_dak.tables.ensemble import Ensemble
from pyro_dak.tables.novelty import EnsembleNovelty
from pyro_dak.tables.schema import Columns
from pyro_dak.training.checkpoint import (
    MAX_BYTES,
    CheckpointError,
    blaming,
    check_history,
    read_directory,
    write_directory,
)
from pyro_dak.training.describe import check_sizes, rebuild
from pyro_dak.training.plan import History
from pyro_dak.validation import check_integer, check_path, check_positive, check_probability

__all__ = [
    "labels_from_json",
    "labels_to_json",
    "read_content",
    "read_estimator",
    "write_estimator",
]

# The attributes of a fitted estimator that are arrays, and those that are plain values.
_ARRAYS = ("x_mean_", "x_scale_", "y_mean_", "y_scale_")
_VALUES = (
    "calibration_ variance_factor_ tail_df_ mixture_factor_ member_factors_ is_multi_output_ "
    "n_features_in_ num_rows_seen_ kept_apart_"
)


def write_estimator(
    estimator: Any, path: str | os.PathLike[str], overwrite: bool, extra: dict[str, Any] | None
) -> Path:
    """Write a fitted estimator to the directory `path`; `extra` is stored with it, as JSON."""
    check_path("path", path)
    path = Path(path)
    state = vars(estimator)
    tensors = {f"ensemble.{name}": t for name, t in estimator.ensemble_.tensors.items()}
    if state.get("novelty_") is not None:
        tensors |= {f"novelty.{name}": t for name, t in state["novelty_"].state_dict().items()}
    if state.get("conditioned_") is not None:
        known = state["conditioned_"].state_dict()
        tensors |= {f"conditioned.{name}": t for name, t in known.items()}
    tensors |= {name: torch.tensor(state[name]) for name in _ARRAYS if name in state}
    parameters = estimator.get_params()
    if not isinstance(parameters["random_state"], int | None):
        parameters["random_state"] = None  # its state cannot be stored as JSON
    parameters["hidden_layer_sizes"] = list(parameters["hidden_layer_sizes"])
    chosen = parameters["categorical_features"]
    if not isinstance(chosen, str | None):
        parameters["categorical_features"] = np.asarray(chosen).tolist()
    config = {
        "model": None,  # `pyro_dak.load` reads one model, and here are several
        "estimator": {
            "name": type(estimator).__name__,
            "parameters": parameters,
            "values": {name: state[name] for name in _VALUES.split() if name in state},
            "feature_names": labels_to_json(state.get("feature_names_in_")),
            "classes": labels_to_json(state.get("classes_")),
            "columns": None if state.get("columns_") is None else state["columns_"].to_json(),
            "architecture": estimator.ensemble_.architecture(),
            "history": estimator.history_.rows,
            "best_epoch": estimator.history_.best_epoch,
        },
        "extra": extra,
    }
    write_directory(path, config, tensors, overwrite=overwrite)
    return path


def read_estimator(
    path: str | os.PathLike[str], classes: Mapping[str, type], max_bytes: int = MAX_BYTES
) -> tuple[Any, dict[str, Any] | None]:
    """A fitted estimator of one of these classes, and the `extra` that was stored with it.

    Raises:
        CheckpointError: naming the file and what is wrong with it. `max_bytes` is that of `load`.
    """
    content, tensors, extra = read_content(path, classes, max_bytes)
    with blaming(Path(path) / "config.json"):
        parameters = dict(content["parameters"])
        parameters["hidden_layer_sizes"] = tuple(parameters["hidden_layer_sizes"])
        estimator = classes[content["name"]](**parameters)
        stored = content["values"]
        state = {name: stored[name] for name in _VALUES.split() if name in stored}
        if "tail_df_" in state:
            state.setdefault("mixture_factor_", 1.0)  # older files do not have them
            state.setdefault("member_factors_", None)
        if is_classifier(estimator):
            state.setdefault("variance_factor_", 1.0)
        state |= {name: tensors[name].numpy() for name in _ARRAYS if name in tensors}
        for name, key in (("feature_names_in_", "feature_names"), ("classes_", "classes")):
            if content[key] is not None:
                state[name] = labels_from_json(content[key], max_bytes)
        columns = content.get("columns")  # older files have none: all columns are numbers
        state["columns_"] = None if columns is None else Columns.from_json(columns)
        state["ensemble_"] = _ensemble(content["architecture"], tensors, max_bytes)
        state["novelty_"] = _novelty(state["ensemble_"], tensors)
        state["conditioned_"] = _conditioned(state["ensemble_"], tensors)
        check_history(content["history"], content["best_epoch"])
        state["history_"] = History(content["history"], "finished", content["best_epoch"])
        _check_state(state, is_classifier(estimator))
    vars(estimator).update(state)
    return estimator, extra


def read_content(
    path: str | os.PathLike[str], names: Collection[str], max_bytes: int = MAX_BYTES
) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, Any] | None]:
    """What a directory says of an estimator of one of these names, its tensors, and `extra`.

    Raises:
        CheckpointError: naming the file and what is wrong with it. `max_bytes` is that of `load`.
    """
    check_path("path", path)
    path = Path(path)
    config, tensors, _ = read_directory(path, max_bytes)
    content, extra = config.get("estimator"), config.get("extra")
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a model, not an estimator; use `pyro_dak.load`.")
    with blaming(path / "config.json"):
        if content["name"] not in names:
            raise ValueError(f"holds a {content['name']}, expected {' or '.join(names)}.")
        if not isinstance(extra, dict | None):
            raise TypeError("`extra` is not a dictionary.")
    return content, tensors, extra


def _ensemble(
    architecture: dict[str, Any], tensors: dict[str, torch.Tensor], max_bytes: int
) -> Ensemble:
    """The ensemble with the stored architecture and the stored weights."""
    others = ("novelty.", "conditioned.")
    names = [n for n in tensors if n not in _ARRAYS and not n.startswith(others)]
    stored = {n.removeprefix("ensemble."): tensors[n] for n in names}
    check_sizes(architecture, {name: t.shape[1:] for name, t in stored.items()}, max_bytes)
    model, guide = rebuild(architecture)
    if not isinstance(guide, MeanFieldGuide):
        raise ValueError("the guide is not a MeanFieldGuide.")
    ensemble = Ensemble([(model, guide)])
    E = len(next(iter(stored.values())))
    wanted = {name: (E, *t.shape[1:]) for name, t in ensemble.tensors.items()}
    if E < 1 or {name: tuple(t.shape) for name, t in stored.items()} != wanted:
        raise ValueError("the weights do not fit the architecture.")
    ensemble.tensors = {
        name: stored[name].clone().requires_grad_(tensor.requires_grad)
        for name, tensor in ensemble.tensors.items()
    }
    return ensemble


def _novelty(ensemble: Ensemble, tensors: dict[str, torch.Tensor]) -> EnsembleNovelty | None:
    """What the ensemble knows of its training rows, if the file says anything about them."""
    names = [name for name in tensors if name.startswith("novelty.")]
    stored = {name.removeprefix("novelty."): tensors[name].clone() for name in names}
    if not stored:
        return None
    has_classes = isinstance(ensemble.model.likelihood, CategoricalLikelihood)
    width = ensemble.model.feature_dim + ensemble.model.num_input_units
    sizes = (len(ensemble), width, len(stored["tails.leverage"]))
    if sizes[-1] == 0:
        raise ValueError("there are no rows to compare others with.")
    with torch.device("meta"):  # where nothing is allocated that the file does not have
        novelty = EnsembleNovelty(*sizes, has_classes)
    novelty.load_state_dict(stored, assign=True)
    return novelty.float()


def _conditioned(ensemble: Ensemble, tensors: dict[str, torch.Tensor]) -> ConditionedMembers | None:
    """What the last layers have learned since training; None if there is nothing stored."""
    stored = {n.removeprefix("conditioned."): t for n, t in tensors.items() if "conditioned." in n}
    if not stored:
        return None
    if {len(value) for value in stored.values()} != {len(ensemble)}:
        raise ValueError("what the last layers have learned is not that of these members.")
    return ConditionedMembers.load(ensemble, stored)


def _check_state(state: dict[str, Any], has_classes: bool) -> None:
    """Raise unless the parts of a fitted estimator fit each other, so that it can predict."""
    ensemble = state["ensemble_"]
    D = ensemble.tensors[f"{ensemble.layers[0][0]}.weight"].shape[-1]
    C = ensemble.model.num_outputs
    shapes = {"x_mean_": (D,), "x_scale_": (D,)}
    shapes |= {"classes_": (C,)} if has_classes else {"y_mean_": (C,), "y_scale_": (C,)}
    if not has_classes and state["is_multi_output_"] not in ((True,) if C > 1 else (True, False)):
        raise ValueError(f"`is_multi_output_` is {state['is_multi_output_']!r}, with {C} targets.")
    columns, num_columns = state["columns_"], D
    if columns is not None:
        num_columns = len(columns.names)
        if len(columns.encoded_names) != D:
            raise ValueError(f"the columns become {len(columns.encoded_names)}, expected {D}.")
    if "feature_names_in_" in state:
        shapes["feature_names_in_"] = (num_columns,)
    for name, shape in shapes.items():
        if state[name].shape != shape:
            raise ValueError(f"`{name}` has shape {state[name].shape}, expected {shape}.")
        if name.endswith("_scale_") and not (state[name] > 0).all():
            raise ValueError(f"`{name}` is not positive.")
    if state.get("kept_apart_") is not None:
        share, seed = state["kept_apart_"]
        check_probability("kept_apart_", share)
        check_integer("kept_apart_", seed, minimum=0, maximum=2**32)
    if state["n_features_in_"] != num_columns:
        raise ValueError(f"`n_features_in_` is {state['n_features_in_']}, expected {num_columns}.")
    of_numbers = ("calibration_", "tail_df_", "mixture_factor_")
    names = ("calibration_", "variance_factor_") if has_classes else of_numbers
    factors = state.get("member_factors_")
    if factors is not None and len(factors) != len(ensemble):
        raise ValueError(f"`member_factors_` has {len(factors)} entries, expected {len(ensemble)}.")
    for factor in factors or ():
        check_positive("member_factors_", factor)
    for name in names:
        if state[name] != math.inf or name != "tail_df_":
            check_positive(name, state[name])


def labels_to_json(values: Any) -> dict[str, Any] | None:
    """An array of names or labels as JSON: its dtype and its entries."""
    if values is None:
        return None
    kind = values.dtype.kind
    if kind not in "OUiufb" or (kind == "O" and not all(isinstance(v, str) for v in values)):
        raise ValueError(f"Labels of type {values.dtype} cannot be stored; use strings or numbers.")
    return {"dtype": "O" if kind == "O" else values.dtype.str, "values": values.tolist()}


def labels_from_json(content: dict[str, Any], max_bytes: int) -> np.ndarray[Any, np.dtype[Any]]:
    """The array that `labels_to_json` described, of at most so many bytes."""
    dtype, values = np.dtype(content["dtype"]), content["values"]
    is_text = dtype.kind in "OU" and all(isinstance(value, str) for value in values)
    is_number = dtype.kind in "iufb" and all(isinstance(v, int | float) for v in values)
    if not (is_text or is_number):
        raise ValueError(f"labels of type {dtype} cannot be read.")
    if dtype.itemsize * len(values) > max_bytes:
        raise ValueError(f"{len(values)} labels of type {dtype} are more than `max_bytes` allows.")
    return np.array(values, dtype=dtype)
