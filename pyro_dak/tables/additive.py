"""`DAKAdditiveRegressor` and `DAKAdditiveClassifier`: additive Gaussian processes on columns."""

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy.stats import norm
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_array, check_consistent_length, column_or_1d
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from pyro_dak.additive.gaussian import FunctionMoments, sample_marginals
from pyro_dak.additive.quadrature import gauss_hermite
from pyro_dak.model.likelihoods import CategoricalLikelihood
from pyro_dak.tables.additive_files import read_additive, write_additive
from pyro_dak.tables.base import scales
from pyro_dak.tables.estimators import validated_labels
from pyro_dak.tables.exporting import export_estimator, made_up_rows, raw_rows
from pyro_dak.tables.portable import (
    PortableAdditive,
    PortableAdditiveClassifier,
    PortableAdditiveRegressor,
)
from pyro_dak.tables.predictive import Array, ClassMixture, StudentPrediction, fit_student
from pyro_dak.tables.schema import Columns, as_frame, learn_columns, raw_columns
from pyro_dak.tables.shapes import Posterior, Rows, choose_pairs, fit_classes, fit_numbers
from pyro_dak.tables.terms import CategoryTerm, Column, Hats, NumberTerm, PairTerm, Term
from pyro_dak.training.checkpoint import MAX_BYTES
from pyro_dak.training.export import Exported, Format
from pyro_dak.validation import check_integer, check_probability

__all__ = ["DAKAdditiveClassifier", "DAKAdditiveRegressor", "Explanation", "ShapeFunction"]

# Without a level, columns have up to 31 knots, and all together about this many weights at most.
_LEVEL, _MAX_WEIGHTS = 5, 1_200
# Pairs that `pairs="auto"` may take for each column, the columns that are tried at most, and how
# often pairs are chosen, by what earlier ones leave over.
_PAIRS_PER_COLUMN, _MAX_TRIED, _PAIR_ROUNDS = 1.0, 30, 3
# More weights than these, of a pair or of all terms, take too long: the cost is their number cubed.
_MAX_PAIR_WEIGHTS, _MOST_WEIGHTS = 1_000, 6_000
# The number of draws of f in class probabilities, and of terms in the error of importances.
_NUM_DRAWS, _NUM_TERM_DRAWS = 64, 200
# Larger numbers have no squares.
_LARGEST = 1e150
# More rows than this hardly change the tails.
_MAX_ROWS = 20_000

Name = str | int


class ShapeFunction(NamedTuple):
    """A term of an additive model, less its mean over the training rows, in units of y.

    For classes it is in units of log odds, and there is a last axis of the classes, if they are
    more than two.

    Attributes:
        name: the name of the column, or the names of two.
        grid: the values at which it is given: numbers `(G,)`, categories `(G,)`, or the values of
            two columns.
        mean: posterior means `(G,)`, or `(G_a, G_b)` for two columns.
        std: posterior standard deviations.
        lower, upper: the ends of the central band, pointwise.
        missing: mean and standard deviation where the number is missing; None for other columns.
    """

    name: Any
    grid: Any
    mean: Array
    std: Array
    lower: Array
    upper: Array
    missing: tuple[Any, Any] | None


class Explanation(NamedTuple):
    """Predictions taken apart: `intercept + contributions.sum(1)` is `prediction`.

    Attributes:
        names: the names of the T terms; those of pairs are tuples.
        intercept: a number, or `(F,)` for F classes.
        contributions: `(N, T)`, or `(N, T, F)`.
        std: the posterior standard deviation of each contribution.
        prediction: the mean of y, or log odds, `(N,)` or `(N, F)`.
    """

    names: list[Any]
    intercept: Any
    contributions: Array
    std: Array
    prediction: Array


@dataclass(eq=False, repr=False)
class _AdditiveParameters:
    pairs: Any = 0
    level: int | None = None
    pair_level: int = 3
    categorical_features: Any = "from_dtype"


class _AdditiveEstimator(_AdditiveParameters, BaseEstimator):
    """What both estimators share. A subclass fits the terms and says what a unit of f is."""

    posterior_: Posterior
    columns_: Columns

    def _validated_targets(self, y: Any) -> Array:
        """y as an array, or an error."""
        raise NotImplementedError

    def _learn(
        self, rows: Rows, y: Array, terms: list[Term], start: Posterior | None = None
    ) -> tuple[Array, Array]:
        """Fit the terms, and give residuals and their precisions, `(N, F)` each.

        Hyper-parameters start at those of `start`, for the terms that it has.
        """
        raise NotImplementedError

    def _set_targets(self, y: Array, weights: Array) -> Array:
        """Learn scales or classes; targets as the terms are fitted to."""
        raise NotImplementedError

    def _finish(self, rows: Rows, y: Array) -> None:
        """What comes after the last fit."""

    @property
    def _unit(self) -> float:
        """The size of 1 in f, in units of the target."""
        return 1.0

    def _drop(self, values: Array) -> Any:
        """Values `(..., F)` without the last axis if there is one function only."""
        return values[..., 0] if len(self.posterior_.mean) == 1 else values

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.categorical = True
        return tags

    # Fitting

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Fit a table `(N, D)`, an array of numbers or a data frame, and return the estimator.

        A row counts as often as `sample_weight` says, `(N,)`; by default once. If `fit` fails, the
        estimator stays as it was.
        """
        before = dict(self.__dict__)
        try:
            self._fit(X, y, sample_weight)
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise
        return self

    def _fit(self, X: Any, y: Any, sample_weight: Any) -> None:
        self._check_parameters()
        if y is None:
            raise ValueError(
                f"This {type(self).__name__} estimator requires y to be passed, but the target y "
                "is None."
            )
        table = self._table(X, is_first=True)
        y = self._validated_targets(y)
        check_consistent_length(table, y)
        weights = _check_sample_weight(
            sample_weight, np.empty((len(y), 1)), dtype=np.float64, ensure_non_negative=True
        )
        if not 1e-12 < weights.sum() < 1e15:
            raise ValueError(
                "Sample weights must contain at least one non-zero number, and say how often a row "
                f"counts, so that their sum is a number of rows; got {weights.sum():.3g}."
            )
        is_used = weights > 0
        table, y, weights = table[is_used], y[is_used], weights[is_used]
        y = self._set_targets(y, weights)
        self.columns_ = learn_columns(table, self._categorical(), is_filled=False)
        rows = Rows(self._raw(table), weights)
        columns = [Column(*pair) for pair in zip(rows.columns, self._categories(), strict=True)]
        self._fit_terms(columns, rows, y)
        self._finish(rows, y)
        self._set_importances(rows)

    def _check_parameters(self) -> None:
        if self.level is not None:
            check_integer("level", self.level, minimum=1, maximum=10)
        check_integer("pair_level", self.pair_level, minimum=1, maximum=5)
        if isinstance(self.pairs, str) and self.pairs != "auto":
            raise ValueError(f'`pairs` must be a number, "auto" or a list; got {self.pairs!r}.')
        is_number = isinstance(self.pairs, int | np.integer) and not isinstance(self.pairs, bool)
        if is_number and self.pairs < 0:
            raise ValueError(f"`pairs` must not be negative; got {self.pairs}.")
        is_list = isinstance(self.pairs, Sequence | np.ndarray)
        if not is_number and not is_list and self.pairs is not None:
            raise TypeError(
                '`pairs` must be a number of pairs, "auto", or a list of pairs of columns; got '
                f"{type(self.pairs).__name__}."
            )
        if is_list and not isinstance(self.pairs, str):
            for pair in self.pairs:
                if not isinstance(pair, Sequence | np.ndarray) or isinstance(pair, str | bytes):
                    raise TypeError(
                        f"`pairs` must hold pairs of columns, such as (0, 1); got {pair!r:.80}."
                    )

    def _table(self, X: Any, is_first: bool) -> pd.DataFrame:
        """X as a data frame with the names of the columns."""
        frame, least_rows = as_frame(X), 2 if is_first else 1
        if frame is None:
            checks: dict[str, Any] = {"reset": is_first, "ensure_min_samples": least_rows}
            checks |= {"dtype": np.float64, "ensure_all_finite": "allow-nan"}
            return pd.DataFrame(validate_data(self, X, **checks), columns=self._names(), copy=False)
        if len(frame) < least_rows or frame.shape[1] == 0:
            raise ValueError(
                f"`X` must have {least_rows} row(s) and 1 column at least; got shape {frame.shape}."
            )
        validate_data(self, frame, reset=is_first, skip_check_array=True)
        return frame.set_axis(self._names(), axis=1)

    def _raw(self, table: pd.DataFrame) -> list[Array]:
        """The columns of a table as the terms take them."""
        columns = raw_columns(table, self.columns_)
        for name, values in zip(self._names(), columns, strict=True):
            if np.nanmax(np.abs(values), initial=0.0) > _LARGEST:
                raise ValueError(f"Column `{name}` has values above {_LARGEST:g}. Rescale it.")
        return columns

    def _categories(self) -> list[list[str] | None]:
        """The categories of each column, None for numbers and dates."""
        return [self.columns_.categories.get(name) for name in self.columns_.names]

    def _names(self) -> list[Any]:
        """The names of the columns."""
        names = getattr(self, "feature_names_in_", None)
        return [f"x{j}" for j in range(self.n_features_in_)] if names is None else list(names)

    def _index(self, column: Any) -> int:
        """The number of a column with this name or number."""
        names = self._names()
        if isinstance(column, str) and column in names:
            return names.index(column)
        if isinstance(column, int | np.integer) and -len(names) <= column < len(names):
            return int(column) % len(names)
        shown = ", ".join(map(str, names[:8])) + (", ..." if len(names) > 8 else "")
        raise ValueError(
            f"`{column}` is no column: expected a number below {len(names)}, or one of {shown}."
        )

    def _categorical(self) -> list[str] | None:
        """The names of the columns of categories; None if their types say which they are."""
        given = self.categorical_features
        if isinstance(given, str):
            if given != "from_dtype":
                raise ValueError(
                    '`categorical_features` must be "from_dtype", None or a list of columns; got '
                    f"{given!r}."
                )
            return None
        given = [] if given is None else list(given)
        if given and all(isinstance(entry, bool | np.bool_) for entry in given):
            given = np.flatnonzero(given).tolist()
        names = self._names()
        return [names[self._index(column)] for column in given]

    def _fit_terms(self, columns: list[Column], rows: Rows, y: Array) -> None:
        """Fit a term of each column and of the pairs that are given, or choose pairs then."""
        terms = self._terms(columns, rows.weights)
        is_given = not isinstance(self.pairs, str | int | np.integer | None)
        if is_given:
            pairs = _checked_pairs([[self._index(c) for c in pair] for pair in self.pairs])
            knots = 2**self.pair_level - 1
            terms += [PairTerm.of(pair, columns, rows.weights, knots) for pair in pairs]
        _check_size(terms)
        left_over = self._learn(rows, y, terms)
        if isinstance(self.pairs, str):
            self._add_pairs(
                columns, rows, y, left_over, math.ceil(_PAIRS_PER_COLUMN * len(columns))
            )
        elif not is_given and self.pairs:
            self._add_pairs(columns, rows, y, left_over, int(self.pairs))

    def _terms(self, columns: list[Column], weights: Array) -> list[Term]:
        """A term of each column. By default many columns, or few rows, have fewer knots."""
        level = self.level
        if level is None:
            number = sum(column.categories is None for column in columns)
            level, most = _LEVEL, min(_MAX_WEIGHTS, max(200, weights.sum() / 2))
            while level > 2 and number * (2**level + 1) > most:
                level -= 1
        return [
            NumberTerm.of(j, column.values, weights, 2**level - 1)
            if column.categories is None
            else CategoryTerm.of(j, column, weights)
            for j, column in enumerate(columns)
        ]

    def _add_pairs(
        self,
        columns: list[Column],
        rows: Rows,
        y: Array,
        left_over: tuple[Array, Array],
        number: int,
    ) -> None:
        """Choose pairs by what the terms leave over, and fit them, until there are enough."""
        knots, terms = 2**self.pair_level - 1, list(self.posterior_.terms)
        tried = list(itertools.combinations(self._strongest(rows), 2))
        tried = [pair for pair in tried if _is_small(columns, pair, knots)]
        for _ in range(_PAIR_ROUNDS):
            taken = {term.columns for term in terms}
            wanted = len(columns) + number - len(terms)
            left = [pair for pair in tried if pair not in taken]
            new = choose_pairs(columns, rows, *left_over, left, wanted, knots) if wanted else []
            if not new:
                break
            terms += new
            left_over = self._learn(rows, y, terms, self.posterior_)

    def _strongest(self, rows: Rows) -> list[int]:
        """The columns whose pairs are tried: all, or the most important ones of many."""
        number = self.n_features_in_
        if number <= _MAX_TRIED:
            return list(range(number))
        spread = [self._spread(rows, j, 0)[0].max() for j in range(number)]
        return sorted(np.argsort(spread)[-_MAX_TRIED:].tolist())

    def _spread(self, rows: Rows, index: int, num_draws: int) -> tuple[Array, Array]:
        """The standard deviation of a term over the rows, `(F,)`, and of its draws, `(S, F)`."""
        term, part = self.posterior_.terms[index], self.posterior_.parts()[index]
        gram: Any = 0.0
        for chunk, columns in rows.chunks():
            phi = term.design(columns)
            gram = gram + (phi.multiply(rows.weights[chunk, None]).T.tocsr() @ phi).toarray()
        gram = gram / rows.weights.sum()

        def spread(w: Array) -> Array:
            return np.sqrt(np.maximum(np.einsum("...k,kl,...l->...", w, gram, w), 0))

        draws = self.posterior_.draws(index, num_draws)
        return spread(self.posterior_.mean[:, part]), spread(draws)

    def _set_importances(self, rows: Rows) -> None:
        names, terms = self._names(), self.posterior_.terms
        named = [tuple(names[j] for j in term.columns) for term in terms]
        self.term_names_ = [name[0] if len(name) == 1 else name for name in named]
        pairs = [self._spread(rows, index, _NUM_TERM_DRAWS) for index in range(len(terms))]
        self.importances_ = self._unit * self._drop(np.stack([of_mean for of_mean, _ in pairs]))
        stds = np.stack([draws.std(0) for _, draws in pairs])
        self.importances_std_ = self._unit * self._drop(stds)

    # Looking at the terms

    def shape_function(
        self, column: Any, grid: Any = None, level: float = 0.95, num_points: int = 200
    ) -> ShapeFunction:
        """The term of a column, or of a pair of columns, with its band.

        Args:
            column: the name or the number of a column; two of them for a pair.
            grid: the values to give it at, for a column. By default the range of the training rows
                in `num_points` steps, with all knots; the known categories and "(other)"; for a
                pair, the knots of both.
            level: the probability of the band, pointwise.
            num_points: the number of values.
        """
        check_is_fitted(self)
        check_probability("level", level)
        check_integer("num_points", num_points, minimum=2)
        if isinstance(column, tuple | list):
            return self._pair_function(column, level)
        index = self._index(column)
        term = self.posterior_.terms[index]
        missing = None
        if isinstance(term, NumberTerm):
            if grid is None:
                ends = term.hats.knots[[0, -1]]
                grid = np.unique(
                    np.concatenate([np.linspace(ends[0], ends[1], num_points), term.hats.knots])
                )
            grid = check_array(grid, ensure_2d=False, dtype=np.float64, input_name="grid")
            mean, std = self._term_moments(index, {index: np.append(grid, np.nan)})
            missing = mean[-1], std[-1]
            mean, std = mean[:-1], std[:-1]
        else:
            known = self._categories()[index]
            assert known is not None
            grid = np.array([*known, "(other)"] if grid is None else grid, dtype=object)
            places = {text: place for place, text in enumerate(known)}
            codes = np.array([places.get(str(text), -1) for text in grid], dtype=np.float64)
            mean, std = self._term_moments(index, {index: codes})
        return _with_band(self.term_names_[index], grid, mean, std, level, missing)

    def _pair_function(self, pair: Sequence[Any], level: float) -> ShapeFunction:
        """The term of a pair at all values of its two grids."""
        first, second = _checked_pairs([[self._index(column) for column in pair]])[0]
        found = [k for k, t in enumerate(self.posterior_.terms) if t.columns == (first, second)]
        if not found:
            raise ValueError(f"`{tuple(pair)}` is no pair of this model; set `pairs`.")
        term = self.posterior_.terms[found[0]]
        assert isinstance(term, PairTerm)
        grids = []
        for basis, index in zip(term.bases, term.columns, strict=True):
            known = self._categories()[index]
            numbers = basis.knots if isinstance(basis, Hats) else np.arange(len(known or ())) * 1.0
            grids.append((numbers, numbers if known is None else np.array(known, dtype=object)))
        codes = np.meshgrid(grids[0][0], grids[1][0], indexing="ij")
        values = {first: codes[0].ravel(), second: codes[1].ravel()}
        mean, std = self._term_moments(found[0], values)
        shape = (*codes[0].shape, *mean.shape[1:])
        grid = (grids[0][1], grids[1][1])
        mean, std = mean.reshape(shape), std.reshape(shape)
        return _with_band(self.term_names_[found[0]], grid, mean, std, level, None)

    def _term_moments(self, index: int, values: dict[int, Array]) -> tuple[Any, Any]:
        """Mean and standard deviation of a term in units of the target at columns by number."""
        columns = [values.get(j, np.empty(0)) for j in range(self.n_features_in_)]
        mean, std = self.posterior_.term_moments(index, columns)
        return self._unit * self._drop(mean), self._unit * self._drop(std)

    def explain(self, X: Any) -> Explanation:
        """What each term contributes to the predictions of rows, `(N, D)` or a single row `(D,)`.

        Contributions are differences from the mean over the training rows.
        """
        columns = self._columns(_as_rows(X))
        terms = range(len(self.posterior_.terms))
        parts = [self.posterior_.term_moments(index, columns) for index in terms]
        means = self._unit * np.stack([mean for mean, _ in parts], 1)  # (N, T, F)
        stds = self._unit * np.stack([std for _, std in parts], 1)
        intercept = self._intercept()
        prediction = intercept + means.sum(1)
        arrays = [self._drop(array) for array in (intercept, means, stds, prediction)]
        return Explanation(list(self.term_names_), *arrays)

    def _intercept(self) -> Array:
        """The prediction without all terms, `(F,)`."""
        return self._unit * self.posterior_.mean[:, 0]

    def _columns(self, X: Any) -> list[Array]:
        check_is_fitted(self)
        return self._raw(self._table(X, is_first=False))

    # Files

    def save(self, path: str | os.PathLike[str], overwrite: bool = False) -> Path:
        """Write the fitted estimator to a directory of safetensors and JSON, and return its path.

        An existing directory is replaced only with `overwrite`, and only if it is a saved model.
        """
        check_is_fitted(self)
        return write_additive(self, path, overwrite, None)

    def export(
        self,
        path: str | os.PathLike[str],
        format: Format = "onnx",
        *,
        x: Any = None,
        tolerance: float = 1e-5,
        overwrite: bool = False,
        target: str | None = None,
    ) -> Exported:
        """Write the fitted estimator to one file that predicts without pyro_dak.

        Inputs, outputs and arguments are those of `DAKRegressor.export`; there is no novelty.
        """
        check_is_fitted(self)
        columns = self.columns_
        if x is None:
            terms = dict(zip(columns.names, self.posterior_.terms, strict=False))
            own: list[Any] = [terms[name] for name in columns.medians]
            loc, scale = [term.loc for term in own], [term.scale for term in own]
            x = made_up_rows(columns, loc, scale, hasattr(self, "feature_names_in_"))
        raw = raw_rows(self._columns(x), columns)
        places = (path, format, tolerance, overwrite, target)
        return export_estimator(self, self._portable(), x, raw, columns, *places)

    def _portable(self) -> PortableAdditive:
        """The module from raw rows to predictions."""
        raise NotImplementedError

    @classmethod
    def load(cls, path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> Any:
        """The estimator that `save` wrote. Loading it runs no code from the files.

        Raises:
            CheckpointError: the message names the file and says what is wrong with it.
        """
        return read_additive(path, {cls.__name__: cls}, max_bytes)[0]


class DAKAdditiveRegressor(RegressorMixin, _AdditiveEstimator):
    """Regression by a sum of functions of single columns, each with an exact band.

    y is an intercept, a term of each column, terms of chosen pairs of columns, and normal noise. A
    term of numbers is a straight line and a Gaussian process at the knots of a grid of quantiles,
    partly rough (Laplace kernel of ranks), partly smooth; categories have effects of their own, and
    so has a missing number. The posterior is exact. Scales, lengthscales and noise are where the
    evidence is largest. Terms are centred: each has mean zero over the training rows.

    Rows are seen a few times only, for sums over them, so that a million rows fit into memory.

    Args:
        pairs: which pairs of columns have terms: a list of pairs of names or numbers; or how many
            at most are chosen by evidence; or "auto" for as many as there are columns at most.
        level: a column of numbers has at most 2^level - 1 knots, at quantiles with both ends, or at
            its different values. By default 5, and less for many columns.
        pair_level: the same for either column of a pair.
        categorical_features: numbers, names or a mask of the columns of categories. By default
            those of a data frame that hold text or have a categorical type.

    Attributes:
        importances_: the standard deviation of each term over the training rows, in units of y.
        importances_std_: the posterior standard deviation of these.
        term_names_: the names of the terms: those of columns, and pairs of them.
        noise_scale_: the standard deviation of the noise.
        calibration_: the factor of the squared scale of predictions, from the errors of all rows
            when they are left out, one by one, in closed form.
        tail_df_: the degrees of freedom of the predictive t distribution, from the same errors.
        columns_: what the columns are.
        posterior_: the terms, their hyper-parameters and the posterior of their weights.
        n_features_in_: the number of columns.
        feature_names_in_: the names of the columns, if `fit` was given a data frame.
    """

    noise_scale_: float

    def _validated_targets(self, y: Any) -> Array:
        y = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")
        return column_or_1d(y, warn=True)

    def _set_targets(self, y: Array, weights: Array) -> Array:
        loc, scale = scales("y", y[:, None], weights, smallest=1e-150, largest=1e150)
        self.y_mean_, self.y_scale_ = float(loc[0]), float(scale[0])
        y = (y - self.y_mean_) / self.y_scale_
        return y - weights @ y / weights.sum()

    def _learn(
        self, rows: Rows, y: Array, terms: list[Term], start: Posterior | None = None
    ) -> tuple[Array, Array]:
        self.posterior_, noise = fit_numbers(rows, y, terms, start)
        self.noise_scale_ = noise * self.y_scale_
        residual = (y - self.posterior_.means(rows.columns)[:, 0])[:, None]
        return residual, np.full_like(residual, noise**-2)

    def _finish(self, rows: Rows, y: Array) -> None:
        """Scale and tails of the errors of rows that are left out.

        With h = w phi S phi^T / s^2, the leverage of a row with weight w, the row is predicted from
        the others with the error e / (1 - h), and the variance of this error is s^2 / (1 - h).
        """
        N = len(y)
        some = np.random.default_rng(0).permutation(N)[:_MAX_ROWS] if N > _MAX_ROWS else slice(None)
        mean, var = self.posterior_.moments([column[some] for column in rows.columns])
        s2 = (self.noise_scale_ / self.y_scale_) ** 2
        rest = np.maximum(1 - rows.weights[some] * var[:, 0] / s2, 1e-6)
        r = (y[some] - mean[:, 0]) / np.sqrt(s2 * rest)
        self.calibration_, self.tail_df_ = fit_student(r, rows.weights[some])

    @property
    def _unit(self) -> float:
        return self.y_scale_

    def _intercept(self) -> Array:
        return self.y_mean_ + super()._intercept()

    def predict_dist(self, X: Any) -> StudentPrediction:
        """The predictive distribution of y for each row: mean, variance, intervals, densities."""
        mean, var = self.posterior_moments(X)
        factor = self.calibration_ / (1 - 2 / self.tail_df_)
        aleatoric = np.full_like(var, factor * self.noise_scale_**2)
        return StudentPrediction(mean, factor * var, aleatoric, self.tail_df_)

    def _portable(self) -> PortableAdditive:
        return PortableAdditiveRegressor(self)

    def posterior_moments(self, X: Any) -> tuple[Array, Array]:
        """Mean and variance of the function without noise, `(N,)` each, exact and uncalibrated."""
        columns = self._columns(X)
        mean, var = self.posterior_.moments(columns)
        return self.y_mean_ + self._unit * mean[:, 0], self._unit**2 * var[:, 0]

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean of y, `(N,)`; with `return_std` also its standard deviation."""
        if return_std:
            prediction = self.predict_dist(X)
            return prediction.mean, prediction.std
        columns = self._columns(X)
        return self.y_mean_ + self._unit * self.posterior_.means(columns)[:, 0]

    def predict_interval(self, X: Any, level: float = 0.9) -> Array:
        """Both ends of the central interval with probability `level`, `(N, 2)`."""
        return np.stack(self.predict_dist(X).interval(level), -1)

    def predict_quantiles(self, X: Any, quantiles: Any = (0.05, 0.5, 0.95)) -> Array:
        """The quantiles of y at Q probabilities, `(N, Q)`."""
        prediction = self.predict_dist(X)
        return np.stack([prediction.quantile(q) for q in np.atleast_1d(quantiles).tolist()], -1)


class DAKAdditiveClassifier(ClassifierMixin, _AdditiveEstimator):
    """Classification by a sum of functions of single columns, each with a band.

    The log odds of the second of two classes are the sum of terms of `DAKAdditiveRegressor`, whose
    arguments these are. More classes have a sum each, and probabilities are their softmax. The
    posterior is the normal distribution that natural-gradient steps converge to.

    Attributes:
        classes_: the sorted labels.
        importances_: the standard deviation of each term over the training rows in units of log
            odds, `(T,)`, or `(T, C)` for C > 2 classes.
    """

    def _validated_targets(self, y: Any) -> Array:
        return validated_labels(y)

    def _set_targets(self, y: Array, weights: Array) -> Array:
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"`y` must have two classes or more; got one class, {self.classes_[0]!r}."
            )
        return labels

    def _learn(
        self, rows: Rows, y: Array, terms: list[Term], start: Posterior | None = None
    ) -> tuple[Array, Array]:
        self.posterior_, sites = fit_classes(rows, y, len(self.classes_), terms, start)
        return sites

    def predict_dist(self, X: Any) -> ClassMixture:
        """Class probabilities of each row, with their entropy and mutual information."""
        columns = self._columns(X)
        mean, var = map(torch.from_numpy, self.posterior_.moments(columns))
        if mean.shape[1] == 1:
            nodes, weights = gauss_hermite(mean[:, 0], var[:, 0])
            p = nodes.sigmoid()
            entropy = torch.special.entr(p) + torch.special.entr(1 - p)
            second, entropy = (weights * p).sum(0), (weights * entropy).sum(0)
            return ClassMixture(torch.stack([1 - second, second], -1).numpy(), entropy.numpy())
        moments = FunctionMoments(mean, var)
        draws = sample_marginals(moments, _NUM_DRAWS, torch.Generator().manual_seed(0))
        log_probs, entropy = CategoricalLikelihood().class_probabilities(moments, draws)
        probs = log_probs.exp()
        return ClassMixture((probs / probs.sum(-1, keepdim=True)).numpy(), entropy.numpy())

    def _portable(self) -> PortableAdditive:
        return PortableAdditiveClassifier(self, _NUM_DRAWS)

    def predict_proba(self, X: Any) -> Array:
        """Class probabilities, `(N, C)`, in the order of `classes_`."""
        return self.predict_dist(X).probs

    def predict(self, X: Any) -> Array:
        """The most probable label of each row, `(N,)`."""
        probs = self.predict_proba(X)
        return self.classes_[probs.argmax(-1)]


def _with_band(
    name: Any, grid: Any, mean: Array, std: Array, level: float, missing: Any
) -> ShapeFunction:
    half = float(norm.ppf((1 + level) / 2)) * std
    return ShapeFunction(name, grid, mean, std, mean - half, mean + half, missing)


def _checked_pairs(pairs: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Pairs of numbers of columns, the smaller one first; or an error."""
    checked = []
    for pair in pairs:
        if len(pair) != 2 or pair[0] == pair[1]:
            raise ValueError(f"`pairs` must hold pairs of different columns; got {list(pair)}.")
        checked.append((min(pair), max(pair)))
    if len(set(checked)) < len(checked):
        raise ValueError("`pairs` holds the same pair twice.")
    return checked


def _is_small(columns: Sequence[Column], pair: tuple[int, int], num_knots: int) -> bool:
    """Whether the term of a pair has few enough weights to be tried."""
    known = [columns[index].categories for index in pair]
    sizes = [num_knots + 1 if names is None else len(names) + 1 for names in known]
    return sizes[0] * sizes[1] <= _MAX_PAIR_WEIGHTS


def _check_size(terms: Sequence[Term]) -> None:
    """Raise if the terms have too many weights."""
    number = sum(term.size for term in terms)
    if number > _MOST_WEIGHTS:
        raise ValueError(
            f"The terms have {number} weights, more than {_MOST_WEIGHTS}, and the time grows as "
            "their number cubed. Leave out columns, lower `level` or `pair_level`, or name fewer "
            "`pairs`."
        )


def _as_rows(X: Any) -> Any:
    """A table, also if X is a single row: an array `(D,)`, or a row of a frame."""
    if hasattr(X, "to_frame") and not hasattr(X, "__dataframe__"):
        return X.to_frame().T.infer_objects()
    return X[None] if isinstance(X, np.ndarray) and X.ndim == 1 else X
