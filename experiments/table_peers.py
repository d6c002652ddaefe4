"""What else people use on tables, behind the interface of `DAKRegressor`: `fit` and `predict_dist`.

Boosted trees need the extra `peers` (`pip install -e '.[peers]'`). They stop early on a tenth of
the rows. Networks are in `table_networks`.
"""

import math
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, KFold, StratifiedKFold, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from experiments.table_networks import InputColumns
from pyro_dak.tables.predictive import StudentPrediction
from pyro_dak.tables.rows import FEW_ROWS
from pyro_dak.validation import import_optional

__all__ = ["CLASSIFIERS", "PEERS"]

# The most trees, and after how many without a better score no more are added.
_TREES, _PATIENCE = 2000, 200
# Tables of more rows are large, for LightGBM, and of more cells, for NGBoost.
_MANY_ROWS, _MANY_CELLS = 10_000, 100_000


def _normal(mean: Any, var: Any) -> StudentPrediction:
    mean, var = np.asarray(mean, dtype=np.float64), np.asarray(var, dtype=np.float64)
    return StudentPrediction(mean, np.zeros_like(mean), np.maximum(var, 1e-12))


def _boosted_trees(model: Any, train: Any, held_out: Any, objective: dict[str, Any]) -> Any:
    """A model of LightGBM with the trees and the seed of `model`, stopped by the held-out rows."""
    lightgbm = import_optional("lightgbm")
    num_leaves = 31 if len(train[0]) >= FEW_ROWS else 15
    settings = {"learning_rate": 0.05, "num_leaves": num_leaves, "num_threads": 1, "verbose": -1}
    return lightgbm.train(
        settings | {"seed": model.seed} | objective,
        lightgbm.Dataset(*train),
        model.trees,
        valid_sets=[lightgbm.Dataset(*held_out)],
        callbacks=[lightgbm.early_stopping(_PATIENCE, verbose=False)],
    )


class LightGBM:
    """Two boosted models: one of the mean, and one of the logarithm of the squared residual.

    The residuals are out of fold, and so are the variances that are scaled to have their size. Of
    large tables one fold of five is enough for that.
    """

    def __init__(self, seed: int, trees: int = _TREES):
        self.seed, self.trees = seed, trees

    def fit(self, x: np.ndarray, y: np.ndarray) -> None:
        """Train on all rows, and on folds for the residuals and for the size of variances."""
        rows, predictions = self._out_of_fold(x, y)
        squares = (y[rows] - predictions) ** 2
        logs = np.log(squares + 1e-6 * np.mean(squares) + 1e-300)
        again, log_var = self._out_of_fold(x[rows], logs)
        self.factor = np.mean(squares[again] / np.exp(log_var))
        self.mean, self.log_var = self._boosted(x, y), self._boosted(x[rows], logs)

    def _out_of_fold(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of rows, and predictions of them by models that have not seen them."""
        folds = [*KFold(5, shuffle=True, random_state=self.seed).split(x)]
        folds = folds[: 1 if len(x) > _MANY_ROWS else 5]
        parts = [self._boosted(x[train], y[train]).predict(x[test]) for train, test in folds]
        return np.concatenate([test for _, test in folds]), np.concatenate(parts)

    def _boosted(self, x: np.ndarray, y: np.ndarray) -> Any:
        x, x_val, y, y_val = train_test_split(x, y, test_size=0.1, random_state=self.seed)
        return _boosted_trees(self, (x, y), (x_val, y_val), {"objective": "regression"})

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
    """Boosted trees of the parameters of a normal distribution, by natural gradients.

    It is slow. For large tables it has a fifth of the trees, and five times the learning rate.
    """

    def __init__(self, seed: int, trees: int = _TREES):
        self.seed, self.trees = seed, trees

    def fit(self, x: np.ndarray, y: np.ndarray) -> None:
        """Train on nine tenths of the rows; the others say when to stop."""
        x, x_val, y, y_val = train_test_split(x, y, test_size=0.1, random_state=self.seed)
        share = 5 if x.size > _MANY_CELLS else 1
        self.model = import_optional("ngboost").NGBRegressor(
            n_estimators=max(1, self.trees // share),
            learning_rate=0.01 * share,
            random_state=self.seed,
            verbose=False,
        )
        self.model.fit(x, y, X_val=x_val, Y_val=y_val, early_stopping_rounds=_PATIENCE)

    def predict_dist(self, x: np.ndarray) -> StudentPrediction:
        """A normal distribution for each row."""
        parameters = self.model.pred_dist(x).params
        return _normal(parameters["loc"], parameters["scale"] ** 2)


class ExactGP:
    """An exact Gaussian process of GPyTorch: Matern 5/2 kernel with a lengthscale for each column.

    Lengthscales, scale and noise maximise the marginal likelihood, by L-BFGS in double precision.
    """

    def __init__(self, seed: int, iterations: int = 60):
        self.seed, self.iterations = seed, iterations

    def fit(self, x: np.ndarray, y: np.ndarray) -> None:
        """Train on all rows."""
        gpytorch = import_optional("gpytorch")
        self.inputs, self.mean, self.scale = InputColumns(x), y.mean(), y.std()
        rows = self.inputs(x).double(), torch.from_numpy((y - self.mean) / self.scale).double()

        class Process(gpytorch.models.ExactGP):  # type: ignore[misc, name-defined]
            """y ~ GP(constant, s^2 k) with noise."""

            def __init__(self) -> None:
                super().__init__(*rows, gpytorch.likelihoods.GaussianLikelihood())
                kernel = gpytorch.kernels.MaternKernel(2.5, ard_num_dims=x.shape[1])
                self.mean, self.kernel = gpytorch.means.ConstantMean(), kernel
                self.scaled = gpytorch.kernels.ScaleKernel(kernel)

            def forward(self, x: Tensor) -> Any:
                """The prior at x."""
                return gpytorch.distributions.MultivariateNormal(self.mean(x), self.scaled(x))

        self.process = Process().double()
        self.process.kernel.lengthscale = math.sqrt(x.shape[1])
        evidence = gpytorch.mlls.ExactMarginalLogLikelihood(self.process.likelihood, self.process)
        optimizer = torch.optim.LBFGS(
            self.process.parameters(), max_iter=self.iterations, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = -evidence(self.process(rows[0]), rows[1])
            loss.backward()
            return loss

        with gpytorch.settings.fast_computations(False, False, False):
            optimizer.step(closure)
        self.process.eval()

    def predict_dist(self, x: np.ndarray) -> StudentPrediction:
        """A normal distribution for each row, noise included."""
        settings = import_optional("gpytorch").settings
        with torch.no_grad(), settings.fast_computations(False, False, False):
            moments = self.process.likelihood(self.process(self.inputs(x).double()))
            mean, var = moments.mean.numpy(), moments.variance.numpy()
        return _normal(self.mean + self.scale * mean, self.scale**2 * var)


class _Trees:
    """Boosted trees of classes, which stop early on a tenth of the rows."""

    model: Any

    def __init__(self, seed: int, trees: int = _TREES):
        self.seed, self.trees = seed, trees

    def _parts(self, x: np.ndarray, labels: np.ndarray) -> list[np.ndarray]:
        return train_test_split(
            x, labels, test_size=0.1, random_state=self.seed, stratify=_stratified(labels)
        )

    def predict_proba(self, x: np.ndarray) -> np.ndarray:
        """Probabilities of the classes, `(N, K)`."""
        return self.model.predict_proba(x)


def _stratified(labels: np.ndarray) -> np.ndarray | None:
    """The labels, if each has a row for the part that is held out."""
    return labels if np.bincount(labels).min() >= 10 else None


class LightGBMClassifier(_Trees):
    """The loss `multiclass` of LightGBM."""

    def fit(self, x: np.ndarray, labels: np.ndarray) -> None:
        """Train on nine tenths of the rows; the others say when to stop."""
        x, x_val, labels, labels_val = self._parts(x, labels)
        objective = {"objective": "multiclass", "num_class": 1 + int(labels.max())}
        self.model = _boosted_trees(self, (x, labels), (x_val, labels_val), objective)

    def predict_proba(self, x: np.ndarray) -> np.ndarray:
        """Probabilities of the classes, `(N, K)`."""
        return self.model.predict(x)


class CatBoostClassifier(_Trees):
    """`CatBoostClassifier`."""

    def fit(self, x: np.ndarray, labels: np.ndarray) -> None:
        """Train on nine tenths of the rows; the others say when to stop."""
        x, x_val, labels, labels_val = self._parts(x, labels)
        self.model = import_optional("catboost").CatBoostClassifier(
            loss_function="MultiClass",
            iterations=self.trees,
            random_seed=self.seed,
            thread_count=1,
            verbose=False,
            allow_writing_files=False,
        )
        self.model.fit(x, labels, eval_set=(x_val, labels_val), early_stopping_rounds=_PATIENCE)


class Logistic:
    """Logistic regression on standardised columns, whose penalty five folds choose by the loss."""

    def __init__(self, seed: int, iterations: int = 1000):
        self.seed, self.iterations = seed, iterations

    def fit(self, x: np.ndarray, labels: np.ndarray) -> None:
        """Train on all rows."""
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=self.iterations))
        penalties = {"logisticregression__C": np.logspace(-3, 2, 6)}
        folds = StratifiedKFold(5, shuffle=True, random_state=self.seed)
        self.model = GridSearchCV(model, penalties, scoring="neg_log_loss", cv=folds)
        self.model.fit(x, labels)

    def predict_proba(self, x: np.ndarray) -> np.ndarray:
        """Probabilities of the classes, `(N, K)`."""
        return self.model.predict_proba(x)


# By the names that the comparison gives them.
PEERS = {"lightgbm": LightGBM, "catboost": CatBoost, "ngboost": NGBoost, "gp": ExactGP}
CLASSIFIERS = {
    "lightgbm": LightGBMClassifier,
    "catboost": CatBoostClassifier,
    "logistic": Logistic,
}
