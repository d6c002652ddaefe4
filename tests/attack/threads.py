"""Predict and fit in eight threads at once; compare with one after the other."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import torch
from pyro.infer.autoguide import AutoNormal
from torch import Tensor
from tqdm import tqdm

from pyro_dak import (
    CategoricalLikelihood,
    DAKClassifier,
    DAKRegressor,
    FullRankGuide,
    LowRankGuide,
    MeanFieldGuide,
    UnitBlockGuide,
    predict,
)
from tests.attack import Outcome
from tests.training.runs import make_data, make_model, train

__all__ = ["attack"]

_NUM_THREADS = 8
_GUIDES = (MeanFieldGuide, UnitBlockGuide, FullRankGuide, LowRankGuide, AutoNormal)


def _predictions(guide_class: Any, is_training: bool) -> Callable[[int | None], Tensor]:
    """A function from a seed to predictions of a model in this mode, and from None to the mode."""
    x, y = make_data()
    labels = (y[:, 0] > 0).long()
    model, _ = make_model(num_outputs=2, likelihood=CategoricalLikelihood())
    guide = guide_class(model)
    train(model, guide, (x, labels), epochs=1)
    model.train(is_training)
    guide.train(is_training)

    def call(seed: int | None) -> Tensor:
        if seed is None:
            return torch.tensor([part.training for part in model.modules()])
        return predict(model, guide, x, seed=seed, num_samples=10, progress=False).log_probs

    return call


def _fitted(estimator_class: Any) -> Callable[[int | None], Tensor]:
    """A function from a seed to predictions of an estimator that was fitted with it."""
    rng = numpy.random.default_rng(0)
    X, y = rng.normal(size=(60, 3)), rng.integers(0, 2, 60)
    options = {"epochs": 2, "hidden_layer_sizes": (8,), "num_units": 2, "progress": False}

    def call(seed: int | None) -> Tensor:
        estimator = estimator_class(**options, random_state=seed or 0).fit(X, y)
        return torch.as_tensor(estimator.predict(X))

    return call


def attack(count: int, seed: int, folder: Path) -> Outcome:
    """So many calls of each kind, in eight threads at once."""
    kinds = {f"{c.__name__}, training={t}": (c, t) for c in _GUIDES for t in (False, True)}
    calls = {name: _predictions(*kind) for name, kind in kinds.items()}
    estimators = {c.__name__: _fitted(c) for c in (DAKRegressor, DAKClassifier)}
    failures, tried = [], 0
    for name, call in tqdm((calls | estimators).items(), desc="threads"):
        seeds = range(seed, seed + (max(_NUM_THREADS, count // 8) if name in estimators else count))
        alone, mode = [call(number) for number in seeds], call(None)
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            together = [pool.submit(call, number) for number in seeds]
        if not torch.equal(mode, call(None)):
            failures.append(f"{name}: the mode of the model was changed")
        for number, one, other in zip(seeds, alone, together, strict=True):
            tried += 1
            if error := other.exception():
                failures.append(f"{name}, seed {number}: {error!r}")
            elif not torch.equal(one, other.result()):
                failures.append(f"{name}, seed {number}: differs from one after the other")
    return Outcome(tried, failures)
