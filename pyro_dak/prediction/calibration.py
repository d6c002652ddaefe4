"""`calibrate`: find the width of predictions on rows that the network has not seen."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from pyro_dak.additive.gaussian import FunctionMoments, compact
from pyro_dak.inference.densities import checked_data, with_noise
from pyro_dak.inference.draws import Posterior
from pyro_dak.model.dak import DAK
from pyro_dak.model.inputs import check_model
from pyro_dak.model.likelihoods import CategoricalLikelihood
from pyro_dak.model.rows import Inputs, split, to_device
from pyro_dak.prediction.predict import frozen_functions, with_bar
from pyro_dak.prediction.rescaling import (
    Kind,
    kind_of_number,
    rescaled_likelihood,
    rescaled_moments,
)
from pyro_dak.validation import check_choice, check_finite, check_integer, check_seed

__all__ = ["Calibration", "calibrate"]

_MIN_ROWS = 10
# Twice the logarithms of the temperatures, or those of the factors of the variance, that are tried
# before the search: up to a million in either direction. One of them is 0, no change.
_GRID = tuple(range(-14, 15, 2))
_TOLERANCE = 1e-7  # in the logarithm: rounding of the score hides smaller steps
_CHUNK_ELEMENTS = 4_000_000


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found, and what it is worth.

    Attributes:
        kind: "variance" if the number is a factor of the predictive variance, "temperature" if f is
            divided by it.
        number: above 1 if predictions were too sure, below 1 if they were not sure enough.
        nlpd_before: the negative log predictive density of the held-out rows without the number,
            the mean over rows, in nats.
        nlpd_after: the same with the number.
        num_rows: how many rows there were. A factor found from n rows with Gaussian errors is known
            to about a share sqrt(2 / n) of itself.
    """

    kind: Kind
    number: float
    nlpd_before: float
    nlpd_after: float
    num_rows: int


def calibrate(
    model: DAK,
    posterior: Posterior,
    x_val: Inputs,
    y_val: Tensor,
    *,
    method: Literal["mc", "probit"] = "mc",
    num_samples: int = 100,
    residual_variance: bool = False,
    seed: int | None = None,
    chunk_size: int = 8192,
    progress: bool = True,
) -> Calibration:
    """Find the one number with which held-out rows are most probable, and let `predict` use it.

    The network has fitted its training rows, and no posterior over the last layer knows that. With
    noise (`GaussianLikelihood`, `HeteroscedasticLikelihood`, `StudentTLikelihood`) the number is a
    factor k of the predictive variance, of its epistemic and its aleatoric part. The predictive
    distribution of y is stretched about its mean m, so that the held-out rows have

        NLPD(k) = mean_n [C / 2 log k - log p(m_n + (y_n - m_n) / sqrt(k))]

    with C outputs. If the prediction of each row is normal with variance v_n, this is least at
    k = mean_n (y_n - m_n)^2 / v_n, the mean squared standardised residual. For classes and for
    `BernoulliLikelihood` the number is a temperature T: f has mean m / T and variance v / T^2, and
    NLPD(T) is that of the averaged probabilities. The most probable class hardly ever changes.

    The rows must be held out: on rows that were trained on, the number is too small. The number is
    kept as `model.calibration`, also by `save` and `load`. It is found for the model without any,
    so that a second call gives the same. It belongs to these weights and to this posterior: `fit`
    sets it back to None, which is no change, and after any other training, or for another posterior
    of the same model, calibrate again. It changes `predict` only: `components`, `sample_functions`
    and the diagnostics show the posterior as it is.

    The score is computed in float64. It is looked at for numbers from a millionth to a million (the
    square of the temperature), and then by parabolas around the best of them. No draws are random.

    Args:
        posterior: the posterior that will predict: anything that `predict` takes, apart from draws
            that hold parameters of the likelihood.
        x_val: held-out inputs, `(N, ...)`, at least 10 rows. Some hundreds are better. A tensor,
            or a tuple or dictionary of tensors.
        y_val: their targets.
        method: as it will be in `predict`; so are the next three.
        num_samples: as in `predict`.
        residual_variance: as in `predict`.
        seed: as in `predict`.
        chunk_size: rows at a time.
        progress: show a bar if it takes more than two seconds.

    Raises:
        NotImplementedError: for counts, and for likelihoods of your own.
        ValueError: if there are too few rows, or if they are best predicted by no finite number,
            as they are when every one of them is classified right. The model stays as it was.
    """
    check_choice("method", method, ("mc", "probit"))
    check_integer("num_samples", num_samples, minimum=1)
    check_integer("chunk_size", chunk_size, minimum=1)
    check_seed("seed", seed)
    check_model(model)
    kind = kind_of_number(model.likelihood)
    x, y = checked_data(model, x_val, y_val)
    if len(y) < _MIN_ROWS:
        raise ValueError(
            f"`x_val` must have at least {_MIN_ROWS} rows, from which one number can be found; got "
            f"{len(y)}. Hold out more rows."
        )
    like = model.layer.log_unit_scale
    seed = 0 if seed is None else int(seed)
    options: dict[str, Any] = {"num_samples": num_samples, "seed": seed}
    with frozen_functions(
        model, posterior, x, residual_variance=residual_variance, **options
    ) as frozen:
        frozen.refuse_calibration()
        size = frozen.num_rows(int(chunk_size))
        chunks = with_bar(split(x, size), progress, "calibrate")
        parts = [_kept(model, frozen(to_device(chunk, like.device))[0]) for chunk in chunks]
        rows = [*zip(parts, y.to(like.device).split(size), strict=True)]
        for q in parts:
            check_finite("mean and variance of f", q.mean + q.var)
        draws_fn = partial(frozen.draws, num_samples=num_samples, seed=seed)
        log_prob_fn = _log_prob_fn(model, draws_fn if method == "mc" else None)

        def nlpd_fn(t: float) -> float:
            number = math.exp(t if kind == "variance" else t / 2)
            return -sum(float(log_prob_fn(*row, number).sum()) for row in rows) / len(y)

        t, nlpd_before, nlpd_after = _least(nlpd_fn, kind)
    number = math.exp(t if kind == "variance" else t / 2)
    model.calibration = like.detach().new_tensor(number)
    return Calibration(kind, number, nlpd_before, nlpd_after, len(y))


def _kept(model: DAK, q: FunctionMoments) -> FunctionMoments:
    """q(f) as the score takes it: draws of classes are made in the precision of the model."""
    if isinstance(model.likelihood, CategoricalLikelihood):
        return q
    mean, var, root = compact(q)
    return FunctionMoments(mean.double(), var.double(), None if root is None else root.double())


def _rows(q: FunctionMoments, rows: slice) -> FunctionMoments:
    root = None if q.root is None else q.root[:, rows]
    return FunctionMoments(q.mean[rows], q.var[rows], root)


def _log_prob_fn(
    model: DAK, draws_fn: Callable[[FunctionMoments], Tensor] | None
) -> Callable[[FunctionMoments, Tensor, float], Tensor]:
    """The function from q(f), y and a number to the log density that `predict` gives to y."""
    likelihood: Any = with_noise(model.likelihood)

    def of_targets(q: FunctionMoments, y: Tensor, number: float) -> Tensor:
        moments = rescaled_moments(likelihood, q, number)
        return rescaled_likelihood(likelihood, number).predictive_log_prob(y, moments)

    def of_labels(q: FunctionMoments, y: Tensor, number: float) -> Tensor:
        num_rows = 1 if draws_fn is None else len(draws_fn(_rows(q, slice(1))))
        size = max(1, _CHUNK_ELEMENTS // (num_rows * q.mean.shape[-1]))
        parts = []
        for start in range(0, len(y), size):
            own = slice(start, start + size)
            part = _rows(q, own)
            if draws_fn is None:
                double = FunctionMoments(part.mean.double(), part.var.double())
                moments = rescaled_moments(likelihood, double, number)
                logits, _ = likelihood.class_probabilities(moments, None)
            else:
                logits = draws_fn(part).double() / number
            log_probs = likelihood.distribution(logits).log_prob(y[own])  # (S, N) or (N,)
            if draws_fn is not None:
                log_probs = torch.logsumexp(log_probs, 0) - math.log(len(log_probs))
            parts.append(log_probs)
        return torch.cat(parts)

    return of_labels if isinstance(likelihood, CategoricalLikelihood) else of_targets


def _least(nlpd_fn: Callable[[float], float], kind: Kind) -> tuple[float, float, float]:
    """Where the score is least, and the score at 0 and there.

    Around the best point of the grid the score is taken to have one minimum.
    """
    seen: dict[float, float] = {}

    def score(t: float) -> float:
        value = nlpd_fn(t)
        seen[t] = value if math.isfinite(value) else math.inf
        return seen[t]

    best = min(_GRID, key=score)
    if best in (_GRID[0], _GRID[-1]):
        what = "factor of the variance" if kind == "variance" else "squared temperature"
        why = "every row is predicted right" if best < 0 else "the predictions are far from them"
        towards = f"{0 if best < 0 else 'infinity'}: {why}"
        raise ValueError(
            f"`x_val` and `y_val` do not determine a number: they are most probable with a {what} "
            f"near {towards}. Hold out more rows, look at whether they are in the units of the "
            "training rows, or go on without calibration."
        )
    points = [(float(t), seen[t]) for t in (best - 2, best, best + 2)]
    is_slow = False
    while (width := points[2][0] - points[0][0]) > 4 * _TOLERANCE:
        t = _next_point(points, is_slow)
        points = sorted([*points, (t, score(t))])
        lowest = min((1, 2), key=lambda i: points[i][1])
        points = points[lowest - 1 : lowest + 2]
        is_slow = not is_slow and points[2][0] - points[0][0] > width / 2
    return points[1][0], seen[0], points[1][1]


def _next_point(points: list[tuple[float, float]], is_slow: bool) -> float:
    """Where to look next, between three points of which the middle one is lowest.

    It is the vertex of the parabola through them, a little off the middle point, so that the
    interval shrinks; or, where that was slow, a golden section of the longer side.
    """
    (a, at_a), (b, at_b), (c, at_c) = points
    longer = c - b if c - b > b - a else a - b
    left, right = (at_a - at_b) / (b - a), (at_c - at_b) / (c - b)
    if is_slow or not 0 < left + right < math.inf:
        return b + 0.382 * longer
    t = b + 0.5 * (left * (c - b) - right * (b - a)) / (left + right)
    return t if abs(t - b) > _TOLERANCE else b + math.copysign(_TOLERANCE, longer)
