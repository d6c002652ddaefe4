"""From a posterior to predictions.

`freeze` makes q(f) a function of x and is the only caller of the fast path, `predict` turns it into
the objects of `results`. `calibrate` finds one number on held-out rows, by which `predict` then
rescales predictions, and `novelty` tells how strange a row is.
"""

from pyro_dak.prediction.calibration import Calibration, calibrate
from pyro_dak.prediction.freeze import freeze
from pyro_dak.prediction.novelty import Novelty, learn_novelty
from pyro_dak.prediction.predict import FunctionDraws, components, predict, sample_functions
from pyro_dak.prediction.results import (
    ClassPrediction,
    Components,
    MixturePrediction,
    NoveltyScores,
    Prediction,
)

__all__ = [
    "Calibration",
    "ClassPrediction",
    "Components",
    "FunctionDraws",
    "MixturePrediction",
    "Novelty",
    "NoveltyScores",
    "Prediction",
    "calibrate",
    "components",
    "freeze",
    "learn_novelty",
    "predict",
    "sample_functions",
]
