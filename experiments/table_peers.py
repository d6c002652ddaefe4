"""What else people use on tables, behind the interface of `DAKRegressor`: `fit` and `predict_dist`.

They need the extra `peers` (`pip install -e '.[peers]'`), except the deep ensemble. Boosted trees
stop early on a tenth of the rows, and so do the members of the deep ensemble, each on another.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.model_selection import KFold, train_test_split
from torch import Tensor

from pyro_dak.tables.ensemble import Stack, ensemble_plan, train
from pyro_dak.tables.predictive import StudentPrediction
from pyro_dak.tables.rows import (
    Rows,
    default_batch_size,
    default_epochs,
    held_out_rows,
    without,
)
from pyro_dak.validation import import_optional

__all__ = ["PEERS", "CatBoost", "EarlyStoppedEnsemble", "LightGBM", "NGBoost"]

# The most trees, and after how many without a better score no more are added.
_TREES, _PATIENCE = 2000, 50


def _normal(mean: Any, var: Any) -> StudentPrediction:
    mean, var = np.asarray(mean, dtype=np.float64), np.asarray(var, dtype=np.float64)
    return StudentPrediction(mean, np.zeros_like(mean), np.maximum(var, 1e-12))


class LightGBM:
    """Two boosted models: one of the mean, and one of the logarithm of the squared residual.

    The residuals are out of fold. The variance is scaled so that they have the right size.
    """

    def __init__(self, seed: int, trees: int = _TREES):
        self.seed, self.trees = seed, trees

    def fit(self, x: np.ndarray, y: np.ndarray) -> None:
        """Train on all rows, and on five folds for the residuals."""
        residuals = np.empty(len(y))
        for rows, test in KFold(5, shuffle=True, random_state=self.seed).split(x):
            residuals[test] = y[test] - self._boosted(x[rows], y[rows]).predict(x[test])
        self.mean = self._boosted(x, y)
        floor = 1e-6 * np.mean(residuals**2) + 1e-300
        self.log_var = self._boosted(x, np.log(residuals**2 + floor))
        self.factor = np.mean(residuals**2 / np.exp(self.log_var.predict(x)))

    def _boosted(self, x: np.ndarray, y: np.ndarray) -> Any:
        lightgbm = import_optional("lightgbm")
        x, x_val, y, y_val = train_test_split(x, y, test_size=0.1, random_state=self.seed)
        settings = {"objective": "regression", "learning_rate": 0.05, "num_leaves": 15}
        settings |= {"seed": self.seed, "num_threads": 1, "verbose": -1}
        return lightgbm.train(
            settings,
            lightgbm.Dataset(x, y),
            self.trees,
            valid_sets=[lightgbm.Dataset(x_val, y_val)],
            callbacks=[lightgbm.early_stopping(_PATIENCE, verbose=False)],
        )

    def predict_dist(self, x: np.ndarray) -> StudentPrediction:
        """A normal distribution for each row."""
        return _normal(self.mean.predict(x), self.factor * np.exp(self.log_var.predict(x)))


class CatBoost:
    """Boosted trees of mean and variance: the loss `RMSEWithUncertainty`."""

    def __init__(self, seed: int, trees: int = _TREES):
        self.seed, self.trees = seed, trees

    def fit(self, x: np.ndarray, y: np.ndarray) -> None:
        """Train on nine tenths of the rows; the others say when to stop."""
        x, x_val, y, y_val = train_test_split(x, y, test_size=0.1, random_state=self.seed)
        self.model = import_optional("catboost").CatBoostRegressor(
            loss_function="RMSEWithUncertainty",
            iterations=self.trees,
            random_seed=self.seed,
            thread_count=1,
            verbose=False,
            allow_writing_files=False,
        )
        self.model.fit(x, y, eval_set=(x_val, y_val), early_stopping_rounds=_PATIENCE)

    def predict_dist(self, x: np.ndarray) -> StudentPrediction:
        """A normal distribution for each row."""
        mean, var = self.model.predict(x).T
        return _normal(mean, var)


class NGBoost:
    """Boosted trees of the parameters of a normal distribution, by natural gradients."""

    def __init__(self, seed: int, trees: int = _TREES):
        self.seed, self.trees = seed, trees

    def fit(self, x: np.ndarray, y: np.ndarray) -> None:
        """Train on nine tenths of the rows; the others say when to stop."""
        x, x_val, y, y_val = train_test_split(x, y, test_size=0.1, random_state=self.seed)
        self.model = import_optional("ngboost").NGBRegressor(
            n_estimators=self.trees, random_state=self.seed, verbose=False
        )
        self.model.fit(x, y, X_val=x_val, Y_val=y_val, early_stopping_rounds=_PATIENCE)

    def predict_dist(self, x: np.ndarray) -> StudentPrediction:
        """A normal distribution for each row."""
        parameters = self.model.pred_dist(x).params
        return _normal(parameters["loc"], parameters["scale"] ** 2)


class EarlyStoppedEnsemble:
    """A deep ensemble of networks of mean and variance, each of which stops at its own best epoch.

    `make_network` gives a stack of networks from the number of inputs and a seed, whose `moments`
    are the mean and the log variance of y.
    """

    def __init__(
        self, make_network: Callable[[int, int], Any], seed: int, epochs: int | None = None
    ):
        self.make_network, self.seed, self.epochs = make_network, seed, epochs

    def fit(self, x: np.ndarray, y: np.ndarray) -> None:
        """Train each network without another tenth of the rows."""
        self.scale = x.mean(0), np.where(x.std(0) > 0, x.std(0), 1), y.mean(), y.std()
        target = torch.from_numpy((y - self.scale[2]) / self.scale[3]).float().unsqueeze(-1)
        rows = Rows(self._inputs(x), target, torch.ones(len(x)))
        self.network: Stack = self.make_network(x.shape[1], self.seed)
        held_out = held_out_rows(len(x), len(self.network), 0.1, self.seed)
        epochs = self.epochs or default_epochs(len(x))
        plan = ensemble_plan(epochs, default_batch_size(len(x)), seed=self.seed)

        @torch.no_grad()
        def score_fn() -> Tensor:
            mean, log_var = (part.gather(1, held_out) for part in self._moments(rows.x))
            return 0.5 * (log_var + (target[held_out, 0] - mean).square() * (-log_var).exp())

        train(self.network, without(rows, held_out), plan, score_fn)

    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        network: Any = self.network
        return network.moments(x)

    def _inputs(self, x: np.ndarray) -> Tensor:
        return torch.from_numpy((x - self.scale[0]) / self.scale[1]).float()

    def predict_dist(self, x: np.ndarray) -> StudentPrediction:
        """A normal distribution with the moments of the mixture."""
        with torch.no_grad():
            mean, log_var = (part.double().numpy() for part in self._moments(self._inputs(x)))
        mean, var = self.scale[2] + self.scale[3] * mean, self.scale[3] ** 2 * np.exp(log_var)
        return StudentPrediction(mean.mean(0), mean.var(0), var.mean(0))


# Those that need a package of their own, by the name of the package.
PEERS = {"lightgbm": LightGBM, "catboost": CatBoost, "ngboost": NGBoost}
