"""Fitted additive estimators on disk, without pickle: arrays as safetensors, the rest as JSON."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import is_classifier

from pyro_dak.tables.predictive import Array
from pyro_dak.tables.saving import labels_from_json, labels_to_json, read_content
from pyro_dak.tables.schema import Columns
from pyro_dak.tables.shapes import Posterior
from pyro_dak.tables.terms import Basis, CategoryTerm, Hats, Levels, NumberTerm, PairTerm, Term
from pyro_dak.training.checkpoint import (
    MAX_BYTES,
    blaming,
    read_directory,
    write_directory,
)
from pyro_dak.validation import check_integer, check_path, check_positive

__all__ = ["read_additive", "stored_name", "write_additive"]

# The attributes of a fitted estimator that are plain values, and those that are arrays.
_VALUES = "n_features_in_ y_mean_ y_scale_ noise_scale_ calibration_ tail_df_".split()
_ARRAYS = "importances_ importances_std_".split()
_POSTERIOR = "theta mean root".split()
# Logarithms of hyper-parameters are smaller, so that predictions are numbers.
_LARGEST_LOG = 20.0


def stored_name(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> str | None:
    """The name of the class of the estimator in a directory, or None if it holds none."""
    check_path("path", path)
    content = read_directory(Path(path), max_bytes).config.get("estimator")
    name = content.get("name") if isinstance(content, dict) else None
    return name if isinstance(name, str) else None


def write_additive(
    estimator: Any, path: str | os.PathLike[str], overwrite: bool, extra: dict[str, Any] | None
) -> Path:
    """Write a fitted estimator to the directory `path`; `extra` is stored with it, as JSON."""
    check_path("path", path)
    path, state, posterior = Path(path), vars(estimator), estimator.posterior_
    arrays = {f"posterior.{name}": getattr(posterior, name) for name in _POSTERIOR}
    arrays |= {name: state[name] for name in _ARRAYS}
    descriptions = []
    for index, term in enumerate(posterior.terms):
        description, own = _describe(term)
        descriptions.append(description)
        arrays |= {f"term.{index}.{name}": values for name, values in own.items()}
    content = {
        "name": type(estimator).__name__,
        "parameters": _plain(estimator.get_params()),
        "values": {name: state[name] for name in _VALUES if name in state},
        "feature_names": labels_to_json(state.get("feature_names_in_")),
        "classes": labels_to_json(state.get("classes_")),
        "columns": state["columns_"].to_json(),
        "terms": descriptions,
    }
    tensors = {name: torch.tensor(np.asarray(values)) for name, values in arrays.items()}
    config = {"model": None, "estimator": content, "extra": extra}
    write_directory(path, config, tensors, overwrite=overwrite)
    return path


def _plain(parameters: dict[str, Any]) -> dict[str, Any]:
    """Parameters as JSON has them."""

    def plain(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray | list | tuple):
            return [plain(entry) for entry in value]
        return value

    return {name: plain(value) for name, value in parameters.items()}


def _describe(term: Term) -> tuple[dict[str, Any], dict[str, Array]]:
    """A term as plain values and arrays."""
    values: dict[str, Any]
    if isinstance(term, NumberTerm):
        values = {"kind": "number", "columns": list(term.columns)}
        values |= {"loc": term.loc, "scale": term.scale}
        arrays = {"knots": term.hats.knots, "ranks": term.hats.ranks, "means": term.means}
        return values, arrays
    if isinstance(term, CategoryTerm):
        values = {"kind": "category", "columns": list(term.columns)}
        return values | {"categories": term.levels.categories}, {"means": term.means}
    assert isinstance(term, PairTerm)
    values = {"kind": "pair", "columns": list(term.columns), "categories": [None, None]}
    arrays = {f"means_{k}": means for k, means in enumerate(term.means)}
    for k, basis in enumerate(term.bases):
        if isinstance(basis, Hats):
            arrays |= {f"knots_{k}": basis.knots, f"ranks_{k}": basis.ranks}
        else:
            values["categories"][k] = basis.categories
    return values, arrays


def read_additive(
    path: str | os.PathLike[str], classes: Mapping[str, type], max_bytes: int = MAX_BYTES
) -> tuple[Any, dict[str, Any] | None]:
    """A fitted estimator of one of these classes, and the `extra` that was stored with it.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
    """
    content, tensors, extra = read_content(path, classes, max_bytes)
    with blaming(Path(path) / "config.json"):
        estimator = classes[content["name"]](**content["parameters"])
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        state = {name: v for name, v in content["values"].items() if name in _VALUES}
        for name, key in (("feature_names_in_", "feature_names"), ("classes_", "classes")):
            if content[key] is not None:
                state[name] = labels_from_json(content[key], max_bytes)
        state["columns_"] = Columns.from_json(content["columns"])
        terms = [_term(d, index, arrays, state) for index, d in enumerate(content["terms"])]
        parts = [arrays[f"posterior.{name}"] for name in _POSTERIOR]
        state["posterior_"] = Posterior(terms, *parts)
        state |= {name: arrays[name] for name in _ARRAYS}
        names = state.get("feature_names_in_", [f"x{j}" for j in range(state["n_features_in_"])])
        named = [tuple(names[j] for j in term.columns) for term in terms]
        state["term_names_"] = [name[0] if len(name) == 1 else name for name in named]
        _check(state, is_classifier(estimator))
    vars(estimator).update(state)
    return estimator, extra


def _term(
    description: dict[str, Any], index: int, arrays: dict[str, Array], state: dict[str, Any]
) -> Term:
    """The term that was described, or an error if its parts do not fit each other."""
    prefix, columns = f"term.{index}.", tuple(description["columns"])
    own = {n.removeprefix(prefix): v for n, v in arrays.items() if n.startswith(prefix)}
    D = state["n_features_in_"]
    check_integer("n_features_in_", D, minimum=1)
    for column in columns:
        check_integer("columns", column, minimum=0, maximum=D - 1)
    if len(columns) != (2 if description["kind"] == "pair" else 1):
        raise ValueError(f"term {index} has {len(columns)} columns.")
    if description["kind"] == "number":
        hats = _hats(own["knots"], own["ranks"])
        check_positive("scale", description["scale"])
        loc, scale = float(description["loc"]), float(description["scale"])
        return NumberTerm(columns, hats, loc, scale, _means(own["means"], hats.size))
    if description["kind"] == "category":
        levels = _levels(description["categories"])
        return CategoryTerm(columns, levels, _means(own["means"], levels.size))
    if description["kind"] != "pair":
        raise ValueError(f"term {index} is of no known kind.")
    bases: list[Basis] = []
    for k, known in enumerate(description["categories"]):
        is_number = known is None
        bases.append(_hats(own[f"knots_{k}"], own[f"ranks_{k}"]) if is_number else _levels(known))
    first, second = bases
    sizes = (first.size, second.size, first.size * second.size)
    means = [_means(own[f"means_{k}"], size) for k, size in enumerate(sizes)]
    return PairTerm(columns, (first, second), (means[0], means[1], means[2]))


def _hats(knots: Array, ranks: Array) -> Hats:
    is_sorted = knots.ndim == 1 and len(knots) > 0 and bool((np.diff(knots) > 0).all())
    if not is_sorted or ranks.shape != knots.shape:
        raise ValueError("knots must increase, and have one rank each.")
    return Hats(knots, ranks)


def _levels(categories: Any) -> Levels:
    if not isinstance(categories, list) or not all(isinstance(c, str) for c in categories):
        raise TypeError("categories must be texts.")
    return Levels(categories)


def _means(means: Array, size: int) -> Array:
    if means.shape != (size,):
        raise ValueError(f"the means of a basis have shape {means.shape}, expected {(size,)}.")
    return means


def _check(state: dict[str, Any], has_classes: bool) -> None:
    """Raise unless the parts of a fitted estimator fit each other, so that it can predict."""
    posterior, D = state["posterior_"], state["n_features_in_"]
    if [term.columns for term in posterior.terms[:D]] != [(j,) for j in range(D)]:
        raise ValueError(f"the first {D} terms must be those of the columns.")
    C = len(state["classes_"]) if has_classes else 1
    F = C if C > 2 else 1
    K = 1 + sum(term.size for term in posterior.terms)
    H = sum(len(term.priors) for term in posterior.terms)
    Z = posterior.root.shape[1] if posterior.root.ndim == 3 else 0
    T = len(posterior.terms)
    of_terms = (T,) if F == 1 else (T, F)
    wanted = {"theta": (H,), "mean": (F, K), "root": (F, Z, K)}
    shapes = {name: (getattr(posterior, name).shape, wanted[name]) for name in _POSTERIOR}
    shapes |= {name: (state[name].shape, of_terms) for name in _ARRAYS}
    if "feature_names_in_" in state:
        shapes["feature_names_in_"] = (state["feature_names_in_"].shape, (D,))
    for name, (shape, expected) in shapes.items():
        if shape != expected:
            raise ValueError(f"`{name}` has shape {shape}, expected {expected}.")
    if np.abs(posterior.theta).max() > _LARGEST_LOG:
        raise ValueError("hyper-parameters are far from those of any table.")
    columns, names = state["columns_"], list(state.get("feature_names_in_", ()))
    own = [t.levels.categories if isinstance(t, CategoryTerm) else None for t in posterior.terms]
    if [columns.categories.get(name) for name in columns.names] != own[:D]:
        raise ValueError("the categories of the columns are not those of the terms.")
    if names and names != columns.names:
        raise ValueError("the names of the columns are not those of the table.")
    for name in () if has_classes else ("y_scale_", "noise_scale_", "calibration_", "tail_df_"):
        if state[name] != math.inf or name != "tail_df_":
            check_positive(name, state[name])
