"""From a posterior to predictions.

`freeze` makes q(f) a function of x and is the only caller of the fast path, `predict` turns it into
the objects of `results`, and `novelty` tells how strange a row is.
"""

from pyro_dak.prediction.freeze import freeze
from pyro_dak.prediction.novelty import Novelty, learn_novelty
from pyro_dak.prediction.predict import FunctionDraws, components, predict, sample_functions
from pyro_dak.prediction.results import ClassPrediction, Components, NoveltyScores, Prediction

__all__ = [
    "ClassPrediction",
    "Components",
    "FunctionDraws",
    "Novelty",
    "NoveltyScores",
    "Prediction",
    "components",
    "freeze",
    "learn_novelty",
    "predict",
    "sample_functions",
]
