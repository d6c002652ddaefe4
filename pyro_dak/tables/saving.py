"""Fitted estimators on disk, without pickle: arrays as safetensors, everything else as JSON."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pyro_dak.inference.guides import MeanFieldGuide
from pyro_dak.tables.ensemble import Ensemble
from pyro_dak.training.checkpoint import (
    CheckpointError,
    check_replaceable,
    read_directory,
    write_directory,
)
from pyro_dak.training.describe import describe, rebuild
from pyro_dak.training.plan import History

__all__ = ["read_estimator", "write_estimator"]

# The attributes of a fitted estimator that are arrays, and those that are plain values.
_ARRAYS = ("x_mean_", "x_scale_", "y_mean_", "y_scale_")
_VALUES = "calibration_ tail_df_ mixture_factor_ is_multi_output_ n_features_in_ num_rows_seen_"


def write_estimator(
    estimator: Any, path: str | os.PathLike[str], overwrite: bool, extra: dict[str, Any] | None
) -> Path:
    """Write a fitted estimator to the directory `path`; `extra` is stored with it, as JSON."""
    path = Path(path)
    check_replaceable(path, overwrite)
    state = vars(estimator)
    tensors = {f"ensemble.{name}": t for name, t in estimator.ensemble_.tensors.items()}
    tensors |= {name: torch.tensor(state[name]) for name in _ARRAYS if name in state}
    parameters = estimator.get_params()
    if not isinstance(parameters["random_state"], int | None):
        parameters["random_state"] = None  # its state cannot be stored as JSON
    parameters["hidden_layer_sizes"] = list(parameters["hidden_layer_sizes"])
    config = {
        "model": None,  # `pyro_dak.load` reads one model, and here are several
        "estimator": {
            "name": type(estimator).__name__,
            "parameters": parameters,
            "values": {name: state[name] for name in _VALUES.split() if name in state},
            "feature_names": _labels(state.get("feature_names_in_")),
            "classes": _labels(state.get("classes_")),
            "architecture": describe(estimator.ensemble_.model, estimator.ensemble_.guide),
            "history": estimator.history_.rows,
            "best_epoch": estimator.history_.best_epoch,
        },
        "extra": extra,
    }
    write_directory(path, config, tensors)
    return path


def read_estimator(
    path: str | os.PathLike[str], classes: Mapping[str, type]
) -> tuple[Any, dict[str, Any] | None]:
    """A fitted estimator of one of these classes, and the `extra` that was stored with it."""
    path = Path(path)
    config, tensors, _ = read_directory(path)
    content = config.get("estimator")
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a model, not an estimator; use `pyro_dak.load`.")
    try:
        if content["name"] not in classes:
            raise ValueError(f"holds a {content['name']}, expected {' or '.join(classes)}.")
        parameters = dict(content["parameters"])
        parameters["hidden_layer_sizes"] = tuple(parameters["hidden_layer_sizes"])
        estimator = classes[content["name"]](**parameters)
        stored = content["values"]
        state = {name: stored[name] for name in _VALUES.split() if name in stored}
        if "tail_df_" in state:
            state.setdefault("mixture_factor_", 1.0)  # older files do not have it
        state |= {name: tensors[name].numpy() for name in _ARRAYS if name in tensors}
        for name, key in (("feature_names_in_", "feature_names"), ("classes_", "classes")):
            if content[key] is not None:
                state[name] = _from_labels(content[key])
        state["ensemble_"] = _ensemble(content["architecture"], tensors)
        state["history_"] = History(content["history"], "finished", content["best_epoch"])
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path / 'config.json'}: {error}") from error
    vars(estimator).update(state)
    return estimator, config.get("extra")


def _ensemble(architecture: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Ensemble:
    """The ensemble with the stored architecture and the stored weights."""
    model, guide = rebuild(architecture)
    if not isinstance(guide, MeanFieldGuide):
        raise ValueError("the guide is not a MeanFieldGuide.")
    ensemble = Ensemble([(model, guide)])
    stored = {n.removeprefix("ensemble."): t for n, t in tensors.items() if n not in _ARRAYS}
    shapes, wanted = ({n: t.shape[1:] for n, t in s.items()} for s in (stored, ensemble.tensors))
    if shapes != wanted:
        raise ValueError("the weights do not fit the architecture.")
    ensemble.tensors = {
        name: stored[name].clone().requires_grad_(tensor.requires_grad)
        for name, tensor in ensemble.tensors.items()
    }
    return ensemble


def _labels(values: Any) -> dict[str, Any] | None:
    """An array of names or labels as JSON: its dtype and its entries."""
    if values is None:
        return None
    kind = values.dtype.kind
    if kind not in "OUiufb" or (kind == "O" and not all(isinstance(v, str) for v in values)):
        raise ValueError(f"Labels of type {values.dtype} cannot be stored; use strings or numbers.")
    return {"dtype": "O" if kind == "O" else values.dtype.str, "values": values.tolist()}


def _from_labels(content: dict[str, Any]) -> np.ndarray[Any, np.dtype[Any]]:
    dtype = np.dtype(content["dtype"])
    if dtype.kind not in "OUiufb":
        raise ValueError(f"labels of type {dtype} cannot be read.")
    return np.array(content["values"], dtype=dtype)
