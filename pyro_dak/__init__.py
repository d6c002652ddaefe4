"""Deep additive kernels in Pyro: a network whose last layer is an additive Gaussian process."""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pyro_dak.acting import ThompsonBandit, acquire
from pyro_dak.additive.activation import KernelActivation
from pyro_dak.additive.grid import DyadicGrid
from pyro_dak.additive.kernels import LaplaceKernel, MaternKernel, RBFKernel
from pyro_dak.diagnostics.arviz import to_arviz
from pyro_dak.diagnostics.comparison import compare_posteriors
from pyro_dak.inference.exact import exact_posterior
from pyro_dak.inference.guides import (
    FullRankGuide,
    LowRankGuide,
    MeanFieldGuide,
    NaturalGuide,
    UnitBlockGuide,
)
from pyro_dak.inference.mcmc.nuts import run_nuts
from pyro_dak.inference.natural import NaturalVI
from pyro_dak.inference.objectives import ClosedFormELBO, JensenELBO, LocalReparamELBO
from pyro_dak.model.additive_gp import AdditiveGP
from pyro_dak.model.dak import DAK
from pyro_dak.model.likelihoods import (
    BernoulliLikelihood,
    CategoricalLikelihood,
    GaussianLikelihood,
    HeteroscedasticLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)
from pyro_dak.model.priors import (
    GammaScalePrior,
    HorseshoePrior,
    LaplacePrior,
    LogNormalPrior,
    NormalPrior,
    StudentTPrior,
)
from pyro_dak.prediction import (
    calibrate,
    components,
    learn_novelty,
    predict,
    sample_functions,
)
from pyro_dak.training.card import write_card
from pyro_dak.training.checkpoint import CheckpointError, load, save
from pyro_dak.training.export import ExportError, export
from pyro_dak.training.fit import TrainingError, fit
from pyro_dak.training.head import DAKHead
from pyro_dak.training.parquet import ParquetRows

if TYPE_CHECKING:
    from pyro_dak.tables.additive import DAKAdditiveClassifier, DAKAdditiveRegressor
    from pyro_dak.tables.estimators import DAKClassifier, DAKRegressor

__all__ = [
    "DAK",
    "AdditiveGP",
    "BernoulliLikelihood",
    "CategoricalLikelihood",
    "CheckpointError",
    "ClosedFormELBO",
    "DAKAdditiveClassifier",
    "DAKAdditiveRegressor",
    "DAKClassifier",
    "DAKHead",
    "DAKRegressor",
    "DyadicGrid",
    "ExportError",
    "FullRankGuide",
    "GammaScalePrior",
    "GaussianLikelihood",
    "HeteroscedasticLikelihood",
    "HorseshoePrior",
    "JensenELBO",
    "KernelActivation",
    "LaplaceKernel",
    "LaplacePrior",
    "LocalReparamELBO",
    "LogNormalPrior",
    "LowRankGuide",
    "MaternKernel",
    "MeanFieldGuide",
    "NaturalGuide",
    "NaturalVI",
    "NormalPrior",
    "ParquetRows",
    "PoissonLikelihood",
    "RBFKernel",
    "StudentTLikelihood",
    "StudentTPrior",
    "ThompsonBandit",
    "TrainingError",
    "UnitBlockGuide",
    "acquire",
    "calibrate",
    "compare_posteriors",
    "components",
    "exact_posterior",
    "export",
    "fit",
    "learn_novelty",
    "load",
    "predict",
    "run_nuts",
    "sample_functions",
    "save",
    "to_arviz",
    "write_card",
]

# The estimators, and the modules that they are in.
_ESTIMATORS = {
    "DAKAdditiveClassifier": "pyro_dak.tables.additive",
    "DAKAdditiveRegressor": "pyro_dak.tables.additive",
    "DAKClassifier": "pyro_dak.tables.estimators",
    "DAKRegressor": "pyro_dak.tables.estimators",
}
if find_spec("sklearn") is None:  # then `from pyro_dak import *` gives all but the estimators
    __all__ = [name for name in __all__ if name not in _ESTIMATORS]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The estimators, on first use: they need scikit-learn, the rest of the package does not."""
    if name not in _ESTIMATORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_ESTIMATORS[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("sklearn", "scipy"):
            raise
        raise ImportError(
            f"{name} needs scikit-learn, which is not installed. "
            "Install it with `pip install pyro_dak[sklearn]`."
        ) from error
