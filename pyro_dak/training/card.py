"""The model card of a saved model: a README.md that people and model hubs can read."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyro_dak.training.checkpoint import read_directory
from pyro_dak.training.files import check_place, write_whole
from pyro_dak.validation import check_kind, check_path, check_real

__all__ = ["write_card"]

_NAME = "README.md"
_CLASSES = ("CategoricalLikelihood", "BernoulliLikelihood")
# How to load what a directory holds, by whether it is a model or an estimator.
_MODEL = """from pyro_dak import load, predict

model, guide = load("{folder}")
prediction = predict(model, guide, x)  # mean, std, interval; probs for classes"""
_ESTIMATOR = """from pyro_dak import {name}

estimator = {name}.load("{folder}")
prediction = estimator.predict_dist(X)"""


def write_card(
    path: str | os.PathLike[str],
    *,
    title: str = "A deep additive kernel",
    text: str = "",
    license: str | None = None,
    datasets: Sequence[str] = (),
    metrics: Mapping[str, float] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model card, README.md, into the directory of a saved model; returns its path.

    It starts with what model hubs read: library, task, tags. Then it says what the model is and how
    to load it, as far as the files know that, and what you add. `save(..., overwrite=True)` keeps
    it.

    Args:
        path: the directory that `save` of a model or of an estimator wrote.
        title: the heading.
        text: what else a reader should know: the data, the purpose, the limits.
        license: the licence of the weights, such as "mit".
        datasets: names of data sets.
        metrics: scores, by name, as you measured them.
        overwrite: whether to replace a README.md that is there.

    Raises:
        FileExistsError: if there is a README.md, which may be yours.
        CheckpointError: if the directory holds no saved model.
    """
    check_path("path", path)
    for name, value in (("title", title), ("text", text)):
        check_kind(name, value, str, "a text")
    if license is not None:
        check_kind("license", license, str, "a text")
    check_kind("datasets", datasets, list | tuple, "a list of names")
    check_kind("metrics", metrics, Mapping | None, "a dictionary of scores by name")
    for dataset in datasets:
        check_kind("datasets", dataset, str, "names")
    for score in (metrics or {}).values():
        check_real("metrics", score)
    directory = Path(path)
    target = directory / _NAME
    config = read_directory(directory).config
    lines = [*_front_matter(config, license, [*datasets]), "", f"# {title}", ""]
    lines += [text, ""] if text else []
    lines += [*_facts(config), "", *_usage(config, directory.name)]
    lines += [] if not metrics else ["", "## Scores", "", *_table(metrics)]
    content = "\n".join(lines) + "\n"

    def check() -> None:
        check_place(target)
        if target.exists() and not overwrite:
            raise FileExistsError(f"`{target}` exists; pass overwrite=True to replace it.")

    write_whole(target, lambda temporary: temporary.write_text(content, encoding="utf-8"), check)
    return target


def _front_matter(
    config: Mapping[str, Any], license: str | None, datasets: Sequence[str]
) -> Iterator[str]:
    """What hubs read, in YAML; JSON's texts and lists are YAML too."""
    task = "tabular-classification" if _has_classes(config) else "tabular-regression"
    shape = config.get("input_shape")
    is_table = config.get("estimator") is not None or (shape is not None and len(shape) == 1)
    yield "---"
    yield "library_name: pyro_dak"
    if license is not None:
        yield f"license: {json.dumps(license)}"
    yield "tags: " + json.dumps(["bayesian", "gaussian-process", "pyro", "uncertainty"])
    if is_table:
        yield f"pipeline_tag: {task}"
    if datasets:
        yield f"datasets: {json.dumps([*datasets])}"
    yield "---"


def _has_classes(config: Mapping[str, Any]) -> bool:
    estimator = config.get("estimator")
    if estimator is not None:
        return "Classifier" in estimator["name"]
    likelihood = (config.get("model") or {}).get("likelihood") or {}
    return likelihood.get("name") in _CLASSES


def _facts(config: Mapping[str, Any]) -> Iterator[str]:
    """What the files say the model is."""
    estimator, model = config.get("estimator"), config.get("model")
    yield "Deep additive kernels: a network whose last layer is an additive Gaussian process, so "
    yield "that predictions come with their uncertainty."
    facts: dict[str, Any] = {}
    if estimator is not None:
        facts["estimator"] = estimator["name"]
        names = estimator.get("feature_names")
        facts["columns"] = None if names is None else ", ".join(map(str, names["values"]))
    elif model is not None:
        facts["units"] = model["num_units"]
        facts["inducing points per unit"] = 2 ** model["level"] - 1
        facts["kernel"] = model["kernel"]["name"]
        facts["likelihood"] = model["likelihood"]["name"]
        facts["outputs"] = model["num_outputs"]
        facts["posterior"] = (config.get("guide") or {}).get("name")
        facts["inputs"] = f"rows of shape {config.get('input_shape')}, {config['dtype']}"
        if model["feature_extractor"] is None:
            facts["network"] = "not stored; pass it as `feature_extractor` to `load`"
    yield ""
    yield from _table({name: value for name, value in facts.items() if value is not None})


def _table(entries: Mapping[str, Any]) -> Iterator[str]:
    yield "| | |"
    yield "|---|---|"
    for name, value in entries.items():
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        cells = (" ".join(text.split()).replace("|", r"\|") for text in (str(name), shown))
        yield f"| {' | '.join(cells)} |"


def _usage(config: Mapping[str, Any], folder: str) -> list[str]:
    estimator = config.get("estimator")
    code = _MODEL if estimator is None else _ESTIMATOR
    name = "" if estimator is None else estimator["name"]
    return [
        "## How to load it",
        "",
        "```python",
        *code.format(folder=folder, name=name).splitlines(),
        "```",
        "",
        "The files are safetensors and JSON, and loading them runs no code. `sha256sum -c "
        "SHA256SUMS` checks them.",
    ]
