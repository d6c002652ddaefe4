"""From a posterior to predictions."""

from pyro_dak.prediction.predict import (
    ClassPrediction,
    Components,
    FunctionDraws,
    Prediction,
    components,
    predict,
    sample_functions,
)

__all__ = [
    "ClassPrediction",
    "Components",
    "FunctionDraws",
    "Prediction",
    "components",
    "predict",
    "sample_functions",
]
