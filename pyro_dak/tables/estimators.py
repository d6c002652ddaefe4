"""`DAKRegressor` and `DAKClassifier`: deep additive kernels as scikit-learn estimators."""

import math
from typing import Any

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils import assert_all_finite, check_array, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor

from pyro_dak.additive.gaussian import FunctionMoments, sample_marginals
from pyro_dak.model.likelihoods import (
    CategoricalLikelihood,
    GaussianLikelihood,
    HeteroscedasticLikelihood,
    Likelihood,
)
from pyro_dak.tables.ensemble import Ensemble
from pyro_dak.tables.base import TableEstimator
from pyro_dak.tables.predictive import (
    ClassMixture,
    StudentPrediction,
    covering_scale,
    fit_student,
    mixture_factor,
)
from pyro_dak.tables.rows import Array, scales

__all__ = ["DAKClassifier", "DAKRegressor"]

# Draws of f in class probabilities; the same for every row and every call.
_NUM_DRAWS = 32


class DAKRegressor(RegressorMixin, TableEstimator):
    """Regression with error bars: a network whose last layer is an additive Gaussian process.

    Inputs and targets are standardised. The noise may differ from row to row. A part of the rows is
    held out to stop training and to calibrate the width of predictions; with few rows, or a single
    member, a second pass then trains on all of them.

    Args:
        ensemble_size: members, trained in one batched pass.
        hidden_layer_sizes: widths of the network, whose last layer gives the features.
        num_units: one-dimensional Gaussian processes that are added up.
        level: each has 2^level - 1 inducing points.
        heteroscedastic: whether the noise depends on the inputs.
        epochs: passes over the data; by default from 200, for up to 10,000 rows, down to 10.
        batch_size: rows per step; by default 128, 256 or 512, growing with the number of rows.
        learning_rate: at the peak of the one-cycle schedule.
        weight_decay: on the network.
        early_stopping: whether to hold out rows at all.
        validation_fraction: share of the rows held out, a different part for each member.
        refit: whether a second pass trains on all rows; by default for a single member and below
            2,000 rows.
        warm_start: whether `fit` goes on from the last weights and scales.
        random_state: seed, or a `numpy.random.RandomState`.
        device: "auto", "cpu", "cuda" or any other of torch.
        progress: whether to show a bar on stderr for what takes more than two seconds.

    Attributes:
        ensemble_: the members; `ensemble_.members()` gives them as `DAK` and `MeanFieldGuide`.
        calibration_: factor of the squared scale of predictions, found on held-out rows.
        tail_df_: degrees of freedom of the predictive t distribution, found there too; infinite
            for normal tails.
        mixture_factor_: another factor, for what the mean of several members errs less than one.
        history_: losses and held-out scores by epoch.
        n_features_in_: number of columns.
        feature_names_in_: their names, if `fit` was given a data frame.
    """

    _shares_held_out_rows = True

    def __init__(
        self,
        ensemble_size: int = 1,
        hidden_layer_sizes: tuple[int, ...] = (64, 32, 64),
        num_units: int = 16,
        level: int = 5,
        heteroscedastic: bool = True,
        epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float = 2e-2,
        weight_decay: float = 0.0,
        early_stopping: bool = True,
        validation_fraction: float = 0.1,
        refit: bool | None = None,
        warm_start: bool = False,
        random_state: Any = None,
        device: str = "auto",
        progress: bool = True,
    ):
        super().__init__(
            ensemble_size,
            hidden_layer_sizes,
            num_units,
            level,
            epochs,
            batch_size,
            learning_rate,
            weight_decay,
            early_stopping,
            validation_fraction,
            refit,
            warm_start,
            random_state,
            device,
            progress,
        )
        self.heteroscedastic = heteroscedastic

    def _likelihood(self) -> Likelihood:
        kind = HeteroscedasticLikelihood if self.heteroscedastic else GaussianLikelihood
        return kind(0.5)

    def _num_outputs(self) -> int:
        return len(self.y_mean_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """One pass over more rows, after `fit` or from nothing; scales are those of the first call.

        Nothing is held out, so that the calibration stays as `fit` found it, or at 1.
        """
        return self._partial_fit(X, y, sample_weight)

    def _validated_targets(self, y: Any) -> Array:
        y = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")
        if y.ndim > 2:
            raise ValueError(f"`y` must have shape (N,) or (N, C); got {y.shape}.")
        return y

    def _targets(self, y: Array) -> Tensor:
        columns = y.reshape(len(y), -1).astype(np.float64)
        return torch.from_numpy((columns - self.y_mean_) / self.y_scale_).float()

    def _set_targets(self, y: Array, weights: Array) -> None:
        self.y_mean_, self.y_scale_ = scales(y.reshape(len(y), -1).astype(np.float64), weights)
        self.is_multi_output_ = y.ndim == 2

    def _scores(self, y: Tensor, ensemble: Ensemble, moments: FunctionMoments) -> Tensor:
        """-log density of each row under the member's prediction, scaled to fit these rows."""
        mean, var = _normal(ensemble, moments)
        residuals = (y - mean).square() / var  # (E, n, C)
        factor = residuals.mean((-2, -1), keepdim=True).clamp(min=1e-12)
        return 0.5 * ((factor * var).log() + residuals / factor).sum(-1)

    def _calibrate(self, y: Tensor, ensemble: Ensemble, moments: FunctionMoments) -> None:
        """The scale and tails that make the residuals of held-out rows most probable.

        For a single member the scale is raised, if need be, until intervals of 95 % cover that
        share of these rows. That of several is lowered by what their mean errs less.
        """
        mean, var = (part.double().cpu().numpy() for part in _normal(ensemble, moments))
        targets = y.double().cpu().numpy()
        residuals = (targets - mean) / np.sqrt(var)
        self.calibration_, self.tail_df_ = fit_student(residuals)
        if self.ensemble_size == 1:
            covering = covering_scale(residuals, self.tail_df_)
            self.calibration_ = max(self.calibration_, covering)
        overlap = targets.shape[1] // 2
        self.mixture_factor_ = mixture_factor(
            targets, mean, self.calibration_ * var, overlap, self.tail_df_, self.ensemble_size
        )

    def _reset_calibration(self) -> None:
        self.calibration_, self.tail_df_, self.mixture_factor_ = 1.0, math.inf, 1.0

    def predict_dist(self, X: Any) -> StudentPrediction:
        """The predictive distribution of y for each row: mean, variance, intervals, densities."""
        parts = []
        for ensemble, moments in self._moments(X):
            members = ensemble.stacked_likelihood().predictive_moments(moments)
            mean, epistemic, aleatoric = members  # (E, N, C)
            epistemic = self.calibration_ * epistemic.mean(0) + mean.var(0, correction=0)
            aleatoric = self.calibration_ * aleatoric.mean(0)
            parts.append([part.cpu().numpy() for part in (mean.mean(0), epistemic, aleatoric)])
        columns = slice(None) if self.is_multi_output_ else 0
        loc, known, noise = (np.concatenate(part) for part in zip(*parts, strict=True))
        factor = self.mixture_factor_ * self.y_scale_**2
        factor = factor / (1 - 2 / self.tail_df_)  # from squared scale to variance
        return StudentPrediction(
            (self.y_mean_ + self.y_scale_ * loc)[:, columns],
            (factor * known)[:, columns],
            (factor * noise)[:, columns],
            self.tail_df_,
        )

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Mean of y, `(N,)` or `(N, C)`; with `return_std` a pair of mean and deviation."""
        prediction = self.predict_dist(X)
        return (prediction.mean, prediction.std) if return_std else prediction.mean

    def predict_interval(self, X: Any, level: float = 0.9) -> Array:
        """Ends of the central interval with probability `level`, `(N, 2)` or `(N, C, 2)`."""
        return np.stack(self.predict_dist(X).interval(level), -1)


def _normal(ensemble: Ensemble, moments: FunctionMoments) -> tuple[Tensor, Tensor]:
    """Mean and variance of y under each member, `(E, N, C)`."""
    mean, epistemic, aleatoric = ensemble.stacked_likelihood().predictive_moments(moments)
    return mean, epistemic + aleatoric


class DAKClassifier(ClassifierMixin, TableEstimator):
    """Classification with calibrated probabilities: see `DAKRegressor` for the parameters.

    Probabilities are averaged over draws of the functions, over the members, and tempered as
    held-out rows ask for.

    Attributes:
        classes_: labels, sorted; numbers, strings or anything that can be sorted.
        calibration_: temperature of the probabilities, found on held-out rows.
    """

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Any:
        """One pass over more rows, after `fit` or from nothing.

        Args:
            X: `(N, D)`.
            y: labels.
            classes: all labels there will be; needed in a first call, as in scikit-learn.
            sample_weight: how often each row counts.
        """
        if not hasattr(self, "ensemble_"):
            if classes is None:
                raise ValueError("`classes` must be passed on the first call to partial_fit.")
            self.classes_ = np.unique(classes)
        return self._partial_fit(X, y, sample_weight)

    def _validated_targets(self, y: Any) -> Array:
        y = column_or_1d(y, warn=True)
        assert_all_finite(y, input_name="y")
        check_classification_targets(y)
        return y

    def _set_targets(self, y: Array, weights: Array) -> None:
        if not hasattr(self, "num_rows_seen_") and hasattr(self, "classes_"):
            return  # set by `partial_fit`
        self.classes_ = np.unique(y)

    def _targets(self, y: Array) -> Tensor:
        labels = np.searchsorted(self.classes_, y).clip(max=len(self.classes_) - 1)
        is_known = self.classes_[labels] == y
        if not is_known.all():
            unknown = np.unique(y[~is_known])[:5].tolist()
            raise ValueError(f"`y` has labels that are not among the classes: {unknown}.")
        return torch.from_numpy(labels)

    def _likelihood(self) -> Likelihood:
        return CategoricalLikelihood()

    def _num_outputs(self) -> int:
        return len(self.classes_)

    def _scores(self, y: Tensor, ensemble: Ensemble, moments: FunctionMoments) -> Tensor:
        """Brier score of each row."""
        probs = _log_probs(moments, 1.0)[0].exp()
        one_hot = torch.nn.functional.one_hot(y, probs.shape[-1])
        return (probs - one_hot).square().sum(-1)

    def _calibrate(self, y: Tensor, ensemble: Ensemble, moments: FunctionMoments) -> None:
        """The temperature under which the held-out labels are most probable, from a fine grid."""
        temperatures = torch.logspace(-1, 1, 41).tolist()
        losses = [
            -_log_probs(moments, t)[0].gather(-1, y.unsqueeze(-1)).mean() for t in temperatures
        ]
        self.calibration_ = temperatures[int(torch.stack(losses).argmin())]

    def _reset_calibration(self) -> None:
        self.calibration_ = 1.0

    def predict_dist(self, X: Any) -> ClassMixture:
        """Probabilities with their entropy and mutual information, for each row."""
        parts = []
        for _, moments in self._moments(X):
            log_probs, entropies = _log_probs(moments, self.calibration_)  # (E, N, K), (E, N)
            parts.append([p.cpu().numpy() for p in (log_probs.exp().mean(0), entropies.mean(0))])
        probs, expected_entropy = (np.concatenate(part) for part in zip(*parts, strict=True))
        return ClassMixture(probs / probs.sum(-1, keepdims=True), expected_entropy)

    def predict_proba(self, X: Any) -> Array:
        """Class probabilities, `(N, K)`, in the order of `classes_`."""
        return self.predict_dist(X).probs

    def predict(self, X: Any) -> Array:
        """The most probable label of each row, `(N,)`."""
        probs = self.predict_proba(X)
        return self.classes_[probs.argmax(-1)]


def _log_probs(moments: FunctionMoments, temperature: float) -> tuple[Tensor, Tensor]:
    """log of the mean over draws of softmax(f / temperature), and the mean entropy, per member."""
    generator = torch.Generator(moments.mean.device).manual_seed(0)
    draws = sample_marginals(moments, _NUM_DRAWS, generator) / temperature
    return CategoricalLikelihood().class_probabilities(moments, draws)
