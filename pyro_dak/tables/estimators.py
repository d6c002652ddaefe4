"""`DAKRegressor` and `DAKClassifier`: deep additive kernels as scikit-learn estimators."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils import assert_all_finite, check_array, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _num_samples
from torch import Tensor

from pyro_dak.additive.gaussian import FunctionMoments, sample_marginals
from pyro_dak.model import likelihoods
from pyro_dak.tables.base import Parameters, TableEstimator, scales, standardized
from pyro_dak.tables.ensemble import Ensemble
from pyro_dak.tables.portable import PortableClassifier, PortableRegressor
from pyro_dak.tables.predictive import Array, ClassMixture, StudentPrediction, calibrate
from pyro_dak.tables.rows import Rows, effective_number
from pyro_dak.validation import check_real

__all__ = ["DAKClassifier", "DAKRegressor", "validated_labels"]

# The number of draws of f in class probabilities. Every row and every call has the same draws.
_NUM_DRAWS = 32
# The factors of the variance of f that a classifier chooses from, and the temperatures.
_FACTORS = (0.01, 0.03, 0.1, 0.3, 1.0)
_TEMPERATURES = torch.logspace(-1, 1, 13).tolist()


@dataclass(eq=False, repr=False)
class _RegressorParameters(Parameters):
    heteroscedastic: bool = True


class DAKRegressor(RegressorMixin, _RegressorParameters, TableEstimator):
    """Regression with error bars: a network whose last layer is an additive Gaussian process.

    Inputs and targets are standardised. The noise may differ from row to row. Several networks are
    trained in one pass, and their predictions are mixed. Each holds out another part of the rows.
    These rows say when to stop, and how wide the predictions of the mixture must be.

    Args:
        ensemble_size: the number of members, which are trained in one batched pass; 1 for a single
            network, which is trained twice, the second time on all rows.
        hidden_layer_sizes: the widths of the network, whose last layer gives the features.
        num_units: the number of one-dimensional Gaussian processes that are added up.
        level: each of these has 2^level - 1 inducing points.
        heteroscedastic: whether the noise depends on the inputs.
        epochs: passes over the data. The default is 200 for up to 10,000 rows and falls to 10.
        batch_size: rows per step. The default is 128, 256 or 512, by the number of rows.
        learning_rate: the rate at the peak of the one-cycle schedule.
        weight_decay: the weight decay of the network.
        early_stopping: whether to hold out rows at all. Without, and with fewer than 20 rows, the
            width of predictions is not calibrated.
        validation_fraction: the share of the rows that is held out from each member. The default
            is a fifth below 2,000 rows, and else a tenth. Neighbouring members share half of these
            rows, so that two members have not seen them.
        refit: whether a second pass trains on all rows. By default it does for a single member,
            unless `warm_start` is set.
        warm_start: whether `fit` continues from the last weights and scales. Rows that one `fit`
            has held out are then held out by all later ones, whatever their order, so that the
            calibration never uses a row that was trained on.
        random_state: a seed, or a `numpy.random.RandomState`.
        device: "auto", "cpu", "cuda" or any other device of torch.
        progress: whether to show a bar on stderr for work that takes more than two seconds.
        input_units: whether the columns, at most 64, are units beside those of the network, and
            the variance that the grids of all units lose is added to predictions. They are then
            wider for rows that are unlike the training rows.
        categorical_features: which columns hold categories: "from_dtype" for those of a data frame
            that hold text or are of pandas's type for categories; None for none; or a list of
            names, of numbers, or of booleans. A category that was not there in training counts as
            none of the known ones, with a warning.
        numeric_embedding: "piecewise" to give the network eight further columns for each column of
            numbers: how much of each of eight bins, between quantiles, lies below the number. Then
            it can learn steps and bends of single columns more easily. "auto" does so for tables of
            at most 128 columns and 100,000 rows, unless `input_units` is set or `partial_fit` comes
            first; None never does.

    Attributes:
        ensemble_: the members; `ensemble_.members()` gives them as `DAK` and `MeanFieldGuide`.
        calibration_: the factor of the squared scale of predictions, found on held-out rows.
        tail_df_: the degrees of freedom of the predictive t distribution, also found there;
            infinite for normal tails.
        mixture_factor_: a further factor of the squared scale. The mean of several members has
            smaller errors than a single member, which makes it smaller than 1; and 95 % intervals
            of the members must cover 95 % of held-out rows, which may make it larger.
        member_factors_: each member's own factor beside `calibration_`, found on its own held-out
            rows; all 1 unless members clearly differ, and None after a refit.
        kept_apart_: with `warm_start`, the share of the rows that is never trained on and the seed
            that chooses them; else None.
        novelty_: what tells how strange a row is, or None after `partial_fit` of the network.
        conditioned_: what `partial_fit` has taught the last layers since then, or None.
        history_: losses and held-out scores by epoch.
        columns_: what was learned about the columns: how categories, dates and missing values
            become numbers.
        n_features_in_: the number of columns.
        feature_names_in_: the names of the columns, if `fit` was given a data frame.
    """

    _uncalibrated: ClassVar[dict[str, Any]] = {
        "calibration_": 1.0,
        "tail_df_": math.inf,
        "mixture_factor_": 1.0,
        "member_factors_": None,
    }

    def _likelihood(self) -> tuple[likelihoods.Likelihood, int]:
        kinds = likelihoods.GaussianLikelihood, likelihoods.HeteroscedasticLikelihood
        return kinds[bool(self.heteroscedastic)](0.5), len(self.y_mean_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def partial_fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        update_network: bool = False,
        forget: float = 1.0,
    ) -> Any:
        """Learn more rows, one or many, after `fit` or without it.

        The last layer of each member is conditioned on them, and the networks stay as they are:
        exactly with `heteroscedastic=False`, so that the order of the rows does not matter, else by
        natural-gradient steps. Scales, calibration and novelty are those of `fit`.

        Args:
            X: rows, `(N, D)`.
            y: their targets.
            sample_weight: for `update_network`.
            update_network: make one pass of training over the rows instead, as if they were a
                sample of all rows seen so far; rows that came without this are forgotten. No rows
                are held out, so that the calibration stays as `fit` found it, or at 1, a later
                `fit` with `warm_start` has no rows to calibrate on, and novelty is not known.
                Without a `fit` before it, the first call does this.
            forget: how much of what the last layer knows is kept, for data that drift.
        """
        if update_network not in (True, False):
            raise TypeError(f"`update_network` must be True or False; got {update_network!r}.")
        check_real("forget", forget)
        if not 0 < forget <= 1:
            raise ValueError(f"`forget` must be above 0 and at most 1; got {forget}.")
        if update_network or not hasattr(self, "ensemble_"):
            return self._partial_fit(X, y, sample_weight)
        return self._condition(X, y, sample_weight, forget)

    def _validated_targets(self, y: Any) -> Array:
        y = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")
        if y.ndim > 2:
            raise ValueError(f"`y` must have shape (N,) or (N, C); got {y.shape}.")
        return y

    def _targets(self, y: Array) -> Tensor:
        columns = y.reshape(len(y), -1)
        if columns.shape[1] != len(self.y_mean_):
            raise ValueError(
                f"`y` has {columns.shape[1]} columns, but this {type(self).__name__} was fitted "
                f"with {len(self.y_mean_)}."
            )
        scaled = standardized("y", columns, self.y_mean_, self.y_scale_, limit=1e15)
        return torch.from_numpy(scaled).float()

    def _set_targets(self, y: Array, weights: Array) -> None:
        columns = y.reshape(len(y), -1)
        # Predictions hold variances, so that the squares of the scales must be numbers too.
        self.y_mean_, self.y_scale_ = scales("y", columns, weights, smallest=1e-150, largest=1e150)
        self.is_multi_output_ = y.ndim == 2

    def _scores(self, held_out: Rows, ensemble: Ensemble) -> Tensor:
        """-log density of each row, up to a constant, with the variance scaled to fit the rows."""
        mean, var = _normal(ensemble, held_out.x)
        squares = (held_out.y - mean).square() / var  # (E, n, C)
        shares = held_out.weights / held_out.weights.sum()
        factor = (shares * squares.mean(-1)).sum().clamp(min=1e-12)
        return 0.5 * ((factor * var).log() + squares / factor).sum(-1)

    def _calibrate(self, held_out: Rows, ensemble: Ensemble, overlap: int, is_refit: bool) -> None:
        parts = (held_out.y, *_normal(ensemble, held_out.x), held_out.weights)
        y, mean, var, weights = (part.double().cpu().numpy() for part in parts)
        found = calibrate(y, mean, var, self.ensemble_size, weights, overlap, is_refit)
        self.calibration_, self.tail_df_, self.mixture_factor_, self.member_factors_ = found

    def predict_dist(self, X: Any) -> StudentPrediction:
        """The predictive distribution of y for each row: mean, variance, intervals, densities.

        It also says how strange each row is: `novelty` and `strangeness`.
        """
        return self._predict_dist(X, novelty=True)

    def _predict_dist(self, X: Any, novelty: bool = False) -> StudentPrediction:
        all_leverages: list[Tensor] = []

        def parts() -> Iterator[Array]:
            for ensemble, moments, leverages in self._moments(X, novelty):
                all_leverages.extend(leverages)
                members = ensemble.stacked_likelihood().predictive_moments(moments)
                mean, epistemic, aleatoric = members  # (E, N, C)
                scales = torch.tensor(self.member_factors_ or [1.0] * len(ensemble)).to(mean)
                scales = self.calibration_ * scales.reshape(-1, 1, 1)  # (E, 1, 1)
                epistemic = (scales * epistemic).mean(0) + mean.var(0, correction=0)
                aleatoric = (scales * aleatoric).mean(0)
                yield torch.stack((mean.mean(0), epistemic, aleatoric)).cpu().numpy()

        mean, epistemic, aleatoric = _joined(parts(), X, axis=1)  # (N, C)
        factor = self.mixture_factor_ * self.y_scale_**2
        factor = factor / (1 - 2 / self.tail_df_)  # from squared scale to variance
        columns = slice(None) if self.is_multi_output_ else 0
        return StudentPrediction(
            (self.y_mean_ + self.y_scale_ * mean)[:, columns],
            (factor * epistemic)[:, columns],
            (factor * aleatoric)[:, columns],
            self.tail_df_,
            self._novelty_scores(all_leverages),
        )

    def _portable(self, novelty: bool) -> PortableRegressor:
        return PortableRegressor(self, novelty)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean of y, `(N,)` or `(N, C)`; with `return_std` also its standard deviation."""
        if not return_std and self.__dict__.get("conditioned_") is None:
            return self._predict_mean(X)
        prediction = self._predict_dist(X)
        return (prediction.mean, prediction.std) if return_std else prediction.mean

    def _predict_mean(self, X: Any) -> Array:
        """The mean of y without variances: those of f are first among the functions."""

        def parts() -> Iterator[Array]:
            for fixed, features in self._features(X):
                with torch.no_grad():
                    yield fixed.mean_from(features, len(self.y_mean_)).cpu().numpy()

        mean = _joined(parts(), X)  # (N, C)
        mean = self.y_mean_ + self.y_scale_ * mean
        return mean if self.is_multi_output_ else mean[:, 0]

    def predict_interval(self, X: Any, level: float = 0.9) -> Array:
        """Both ends of the central interval with probability `level`, `(N, 2)` or `(N, C, 2)`."""
        return np.stack(self._predict_dist(X).interval(level), -1)

    def predict_quantiles(self, X: Any, quantiles: Any = (0.05, 0.5, 0.95)) -> Array:
        """The quantiles of y at Q probabilities, `(N, Q)` or `(N, C, Q)`."""
        prediction = self._predict_dist(X)
        return np.stack([prediction.quantile(q) for q in np.atleast_1d(quantiles).tolist()], -1)


def _joined(parts: Iterator[Array], X: Any, axis: int = 0) -> Array:
    """What parts of the rows of X have along an axis, in one array.

    It is made when the first part is there: small arrays made in between, from part to part, would
    keep the memory of what each part was computed from.
    """
    joined, start = None, 0
    for part in parts:
        if joined is None:
            shape = list(part.shape)
            shape[axis] = _num_samples(X)
            joined = np.empty(shape, part.dtype)
        stop = start + part.shape[axis]
        np.moveaxis(joined, axis, 0)[start:stop] = np.moveaxis(part, axis, 0)
        start = stop
    assert joined is not None  # there is a row
    return joined


def _normal(ensemble: Ensemble, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of y under each member, `(E, N, C)` each."""
    likelihood = ensemble.stacked_likelihood()
    mean, epistemic, aleatoric = likelihood.predictive_moments(ensemble.moments(x))
    return mean, epistemic + aleatoric


class DAKClassifier(ClassifierMixin, TableEstimator):
    """Classification with calibrated probabilities.

    The arguments mean what they mean in `DAKRegressor`. Probabilities are averaged over draws of
    the functions and over the members. When to stop, the temperature, and how far the draws scatter
    are chosen by how probable the labels of held-out rows become.

    Attributes:
        classes_: the sorted labels: numbers, strings or anything else that can be sorted.
        calibration_: the temperature of the probabilities, found on held-out rows.
        variance_factor_: the factor of the variance of the functions, also found there; at most 1.
    """

    _uncalibrated: ClassVar = {"calibration_": 1.0, "variance_factor_": 1.0}

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Any:
        """Make one pass over more rows, after `fit` or without it.

        The first call needs all `classes` that will ever occur, as in scikit-learn.
        """
        if classes is None and not hasattr(self, "ensemble_"):
            raise ValueError("`classes` must be passed on the first call to partial_fit.")
        return self._partial_fit(X, y, sample_weight, classes)

    def _validated_targets(self, y: Any) -> Array:
        return validated_labels(y)

    def _set_targets(self, y: Array, weights: Array) -> None:
        self.classes_ = np.unique(y)

    def _targets(self, y: Array) -> Tensor:
        labels = np.searchsorted(self.classes_, y).clip(max=len(self.classes_) - 1)
        is_known = self.classes_[labels] == y
        if not is_known.all():
            unknown = np.unique(y[~is_known])[:5].tolist()
            raise ValueError(f"`y` has labels that are not among the classes: {unknown}.")
        return torch.from_numpy(labels)

    def _likelihood(self) -> tuple[likelihoods.Likelihood, int]:
        return likelihoods.CategoricalLikelihood(), len(self.classes_)

    def _scores(self, held_out: Rows, ensemble: Ensemble) -> Tensor:
        """-log probability of each row's label, calibrated for the rows."""
        return _suited(ensemble.moments(held_out.x), held_out)[0]

    def _calibrate(self, held_out: Rows, ensemble: Ensemble, overlap: int, is_refit: bool) -> None:
        """Choose how far draws of f scatter, and the temperature of the mixture's probabilities.

        The factor of the variance of f is that of `_suited`. T_1 is the temperature under which
        single members make the labels most probable of the rows that they have not seen. A mixture
        is less certain than its members, so that it needs a lower temperature. On rows that two
        members have not seen, log r is by how much log T of the average of the two is lower than
        that of each alone. The variance of the mean of E members is linear in 1/E, and so is
        log T_E taken to be:

            log T_E = log T_1 + 2 (1 - 1/E) log r, at most log T_1.

        A few rows that are all predicted rightly would ask for certainty. So log T has a standard
        normal prior, and one more row is counted in (see `_label_scores`).
        """
        moments, y, w = ensemble.moments(held_out.x), held_out.y, held_out.weights
        factor = _suited(moments, held_out)[1]
        last, first = (slice(None, -1), slice(-overlap, None)), (slice(1, None), slice(overlap))
        temperatures = torch.logspace(-1, 1, 41).tolist()
        num_rows = y.numel() - overlap * (len(y) - 1)  # those of two members count once
        losses = []  # of single members, on all of their rows and on shared ones, and of pairs
        for temperature in temperatures:
            log_probs, _ = _log_probs(moments, temperature, factor)  # (E, n, K)
            row = [num_rows / y.numel() * _loss_of_labels(log_probs, y, w)]
            if overlap > 0 and self.ensemble_size > 1:
                two = [log_probs[last], log_probs[first]]
                row.append(sum(_loss_of_labels(one, y[first], w[first]) / 2 for one in two))
                mixed = torch.stack(two).logsumexp(0) - math.log(2)
                row.append(_loss_of_labels(mixed, y[first], w[first]))
            losses.append([loss + 0.5 * math.log(temperature) ** 2 for loss in row])
        found = [temperatures[index] for index in np.argmin(losses, 0)]
        self.calibration_, self.variance_factor_ = found[0], factor
        if len(found) > 1:
            power = 2 - 2 / self.ensemble_size
            self.calibration_ *= min(1.0, found[2] / found[1]) ** power

    def predict_dist(self, X: Any) -> ClassMixture:
        """Class probabilities of each row, with their entropy and mutual information.

        It also says how strange each row is: `novelty` and `strangeness`.
        """
        mixture, leverages = self._mixture(X, novelty=True)
        return replace(mixture, novelty_scores=self._novelty_scores(leverages, mixture.entropy))

    def _mixture(self, X: Any, novelty: bool = False) -> tuple[ClassMixture, list[Tensor]]:
        all_leverages: list[Tensor] = []

        def parts() -> Iterator[Array]:
            for _, moments, leverages in self._moments(X, novelty):
                all_leverages.extend(leverages)
                log_probs, entropies = self._member_log_probs(moments)  # (E, N, K), (E, N)
                found = log_probs.exp().mean(0), entropies.mean(0).unsqueeze(-1)
                yield torch.cat(found, -1).cpu().numpy()

        joined = _joined(parts(), X)  # (N, K + 1)
        probs, expected_entropy = joined[:, :-1], joined[:, -1]
        mixture = ClassMixture(probs / probs.sum(-1, keepdims=True), expected_entropy)
        return mixture, all_leverages

    def _member_log_probs(self, moments: FunctionMoments) -> tuple[Tensor, Tensor]:
        """Calibrated log probabilities of the members, `(E, N, K)`, and entropies `(E, N)`."""
        return _log_probs(moments, self.calibration_, self.variance_factor_)

    def _entropies(self, moments: FunctionMoments) -> tuple[Tensor, Tensor]:
        probs = self._member_log_probs(moments)[0].exp()  # (E, N, K)
        mixture = torch.special.entr(probs.mean(0)).sum(-1)
        return torch.special.entr(probs).sum(-1), mixture

    def _portable(self, novelty: bool) -> PortableClassifier:
        return PortableClassifier(self, _NUM_DRAWS, novelty)

    def predict_proba(self, X: Any) -> Array:
        """Class probabilities, `(N, K)`, in the order of `classes_`."""
        return self._mixture(X)[0].probs

    def predict(self, X: Any) -> Array:
        """The most probable label of each row, `(N,)`."""
        probs = self.predict_proba(X)
        return self.classes_[probs.argmax(-1)]


def _label_scores(log_probs: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """-log probability of each of the labels `(E, n)`, in nats.

    One more row, which has every class with the same probability, is counted in, and divided among
    the others as if these all counted the same.
    """
    at_label = log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return -(at_label + log_probs.mean(-1) / effective_number(weights))


def _loss_of_labels(log_probs: Tensor, labels: Tensor, weights: Tensor) -> float:
    """The sum of `_label_scores` over the labels, as if all rows counted the same."""
    shares = effective_number(weights) * weights / weights.sum()
    return float((shares * _label_scores(log_probs, labels, weights)).sum())


def _suited(moments: FunctionMoments, held_out: Rows) -> tuple[Tensor, float]:
    """Scores of held-out rows, `(E, n)`, and the factor of the variance of f that suits them best.

    A guide with independent weights may give f a variance that no other temperature mends: some
    rows are certain, and their draws scatter all the same. So the variance has a factor of its own,
    at most 1. Factor and temperature T are those under which single members make the labels most
    probable, with standard normal priors of their logarithms, which the scores contain.
    Probabilities are those of the probit approximation here, which needs no draws.
    """
    found = []
    number = effective_number(held_out.weights)
    shares = held_out.weights / held_out.weights.sum()
    for factor, temperature in product(_FACTORS, _TEMPERATURES):
        scaled = _scaled(moments, temperature, factor)
        log_probs, _ = likelihoods.CategoricalLikelihood().class_probabilities(scaled, None)
        scores = _label_scores(log_probs, held_out.y, held_out.weights)
        prior = 0.5 * (math.log(temperature) ** 2 + math.log(factor) ** 2)
        scores = scores + prior / number
        found.append((float((shares * scores).sum()), scores, factor))
    return min(found, key=lambda one: one[0])[1:]


def _scaled(moments: FunctionMoments, temperature: float, factor: float) -> FunctionMoments:
    """The moments of f / temperature, where the variance of f has this factor."""
    return FunctionMoments(moments.mean / temperature, factor * moments.var / temperature**2)


def _log_probs(
    moments: FunctionMoments, temperature: float, factor: float
) -> tuple[Tensor, Tensor]:
    """For each member: log of the mean of softmax(f / temperature) over draws, and mean entropy."""
    generator = torch.Generator(moments.mean.device).manual_seed(0)
    draws = sample_marginals(_scaled(moments, temperature, factor), _NUM_DRAWS, generator)
    return likelihoods.CategoricalLikelihood().class_probabilities(moments, draws)


def validated_labels(y: Any) -> Array:
    """Labels of classes as an array `(N,)`, or an error."""
    y = column_or_1d(y, warn=True)
    assert_all_finite(y, input_name="y")
    check_classification_targets(y)
    return y
