"""Fitted estimators as modules from raw rows of a table to predictions, in double precision.

A raw row is `(D,)`: first the columns of numbers, with NaN where they are missing, and of dates, in
days since 1970, then those of categories, as their places among the categories of training, -1 for
others. The modules do what the estimators do after that, from plain operations alone.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.additive.quadrature import gauss_hermite
from pyro_dak.prediction.portable import ClassProbabilities, PortableTails, entropy, member_of
from pyro_dak.tables.schema import CYCLES, Columns
from pyro_dak.tables.terms import Basis, CategoryTerm, Hats, NumberTerm, PairTerm, Term

__all__ = [
    "EncodedColumns",
    "PortableAdditive",
    "PortableAdditiveClassifier",
    "PortableAdditiveRegressor",
    "PortableClassifier",
    "PortableEnsemble",
    "PortableRegressor",
    "raw_names",
]


def raw_names(columns: Columns) -> list[str]:
    """The names of the columns in the order of a raw row."""
    return [*columns.medians, *columns.categories]


def _double(values: Any) -> Tensor:
    """Numbers as a tensor: exporters keep those of Python in single precision only."""
    return torch.as_tensor(values, dtype=torch.float64)


class EncodedColumns(nn.Module):
    """`encode` of the schema, from raw rows `(N, D)` to numbers `(N, D')`."""

    medians: Tensor
    loc: Tensor
    scale: Tensor
    least_filled: Tensor
    most_filled: Tensor
    weights: Tensor
    with_missing: Tensor
    binned: Tensor
    low: Tensor
    width: Tensor
    least: Tensor
    most: Tensor
    dated: Tensor
    cycle: Tensor
    full_turn: Tensor
    coded: Tensor
    codes: Tensor

    def __init__(self, columns: Columns):
        super().__init__()
        places = {name: place for place, name in enumerate(columns.medians)}
        self.num_numbers = len(places)
        self.register_buffer("medians", _double([*columns.medians.values()]))
        filling = columns.filling
        self.is_filled = filling is not None
        if filling is not None:
            self.register_buffer("loc", _double(filling.loc))
            self.register_buffer("scale", _double(filling.scale))
            self.register_buffer("least_filled", _double(filling.low))
            self.register_buffer("most_filled", _double(filling.high))
            self.register_buffer("weights", _double(filling.weights))
        self.has_gaps, self.has_bins = bool(columns.with_missing), bool(columns.bins)
        self.has_dates = any(columns.dates.values())
        self.has_categories = bool(columns.categories)
        self._index("with_missing", [places[name] for name in columns.with_missing])
        edges = [(places[name], own) for name, own in columns.bins.items()]
        self._index("binned", [place for place, own in edges for _ in own[1:]])
        pairs = [pair for _, own in edges for pair in pairwise(own)]
        self.register_buffer("low", _double([low for low, _ in pairs]))
        self.register_buffer("width", _double([high - low for low, high in pairs]))
        inner = [[0.0] * (len(own) - 2) for _, own in edges]
        self.register_buffer("least", _double([v for own in inner for v in (-math.inf, *own)]))
        ones = [[1.0] * len(own) for own in inner]
        self.register_buffer("most", _double([v for own in ones for v in (*own, math.inf)]))
        cycles = [(places[n], CYCLES[c][0]) for n, own in columns.dates.items() for c in own]
        self._index("dated", [place for place, _ in cycles])
        self.register_buffer("cycle", _double([cycle for _, cycle in cycles]))
        self.register_buffer("full_turn", _double(2 * math.pi))
        known = [
            (self.num_numbers + k, number)
            for k, own in enumerate(columns.categories.values())
            for number in range(len(own))
        ]
        self._index("coded", [place for place, _ in known])
        self.register_buffer("codes", _double([number for _, number in known]))

    def _index(self, name: str, places: list[int]) -> None:
        self.register_buffer(name, torch.tensor(places, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        numbers = x[:, : self.num_numbers]
        is_missing = numbers.isnan()
        if self.is_filled:
            filled = self._filled(numbers, is_missing)
        else:
            filled = torch.where(is_missing, self.medians, numbers)
        parts = [filled] if self.num_numbers else []
        if self.has_gaps:
            parts.append(is_missing.index_select(1, self.with_missing).to(x.dtype))
        if self.has_bins:
            share = (filled.index_select(1, self.binned) - self.low) / self.width
            parts.append(torch.minimum(torch.maximum(share, self.least), self.most))
        if self.has_dates:
            turns = numbers.index_select(1, self.dated) / self.cycle
            # Whole turns are taken off first: the sine of a large angle costs digits elsewhere.
            angle = self.full_turn * (turns - turns.floor())
            # The cosine, a quarter of a turn on: onnxruntime 1.24 has none in double precision.
            waves = torch.stack([angle, angle + self.full_turn / 4], -1).sin().flatten(1)
            is_there = ~is_missing.index_select(1, self.dated).repeat_interleave(2, 1)
            parts.append(torch.where(is_there, waves, 0.0))
        if self.has_categories:
            is_category: Tensor = x.index_select(1, self.coded) == self.codes
            parts.append(is_category.to(x.dtype))
        return torch.cat(parts, 1)

    def _filled(self, numbers: Tensor, is_missing: Tensor) -> Tensor:
        """As `Filling` fills them."""
        known = torch.where(is_missing, 0.0, (numbers - self.loc) / self.scale)
        z = known
        for W in self.weights:
            z = torch.minimum(torch.maximum(z @ W, self.least_filled), self.most_filled)
            z = torch.where(is_missing, z, known)
        return torch.where(is_missing, self.loc + self.scale * z, numbers)


class PortableEnsemble(nn.Module):
    """What the two estimators of networks share: raw rows to q(f) of the members, and novelty.

    Args:
        estimator: a fitted `DAKRegressor` or `DAKClassifier`.
        novelty: whether novelty is wanted, where the estimator has learned it.
    """

    x_mean: Tensor
    x_scale: Tensor
    leverages: nn.ModuleList | None
    tails: PortableTails | None

    def __init__(self, estimator: Any, novelty: bool):
        super().__init__()
        state = vars(estimator)
        columns, learned = state.get("columns_"), state.get("novelty_") if novelty else None
        self.encoded = EncodedColumns(columns) if columns is not None else nn.Identity()
        self.register_buffer("x_mean", _double(estimator.x_mean_))
        self.register_buffer("x_scale", _double(estimator.x_scale_))
        ensemble = estimator.ensemble_.to(torch.device("cpu"), torch.float64)
        pairs: list[Any] = ensemble.members()
        conditioned = state.get("conditioned_")
        if conditioned is not None:
            pairs = [*zip(conditioned.models, conditioned.guides, strict=True)]
        options: dict[str, Any] = {
            "residual_variance": ensemble.model.num_input_units > 0,
            "with_features": learned is not None,
        }
        self.members = nn.ModuleList(member_of(*pair, **options) for pair in pairs)
        self.likelihoods = nn.ModuleList(
            model.likelihood.requires_grad_(False) for model, _ in pairs
        )
        self.leverages = self.tails = None
        if learned is not None:
            learned = learned.cpu()
            self.leverages = nn.ModuleList(type(m)(1).double() for m in learned.members)
            for own, member in zip(self.leverages, learned.members, strict=True):
                own._buffers = {
                    k: None if b is None else b.double() for k, b in member._buffers.items()
                }
            self.tails = PortableTails(learned.tails, torch.float64)

    @property
    def outputs(self) -> list[str]:
        """The names of the outputs."""
        return ["novelty"] * (self.tails is not None)

    def moments(self, x: Tensor) -> tuple[list[FunctionMoments], Tensor | None]:
        """q(f) of every member, and the leverage `(N,)`, if novelty is wanted."""
        x = (self.encoded(x) - self.x_mean) / self.x_scale
        parts = [member(x) for member in self.members]
        q = [moments for moments, _ in parts]
        if self.leverages is None:
            return q, None
        logs = [
            own(features).log() for own, (_, features) in zip(self.leverages, parts, strict=True)
        ]
        return q, torch.stack(logs).mean(0).exp()

    def novelty(self, leverage: Tensor | None, of_mixture: Tensor | None) -> list[Tensor]:
        """The output `novelty`, in a list, which is empty if it is not wanted."""
        if self.tails is None or leverage is None:
            return []
        return [self.tails(leverage, of_mixture)]


class PortableRegressor(PortableEnsemble):
    """A fitted `DAKRegressor`: mean, epistemic and aleatoric variance and scale, `(N, C)` each."""

    factors: Tensor
    y_mean: Tensor
    y_scale: Tensor
    units: Tensor

    def __init__(self, estimator: Any, novelty: bool = True):
        super().__init__(estimator, novelty)
        E = len(self.members)
        factors = _double(estimator.member_factors_ or [1.0] * E) * estimator.calibration_
        self.register_buffer("factors", factors.reshape(-1, 1, 1))
        self.register_buffer("y_mean", _double(estimator.y_mean_))
        self.register_buffer("y_scale", _double(estimator.y_scale_))
        share = 1 - 2 / estimator.tail_df_
        self.register_buffer("units", _double([estimator.mixture_factor_ / share, share**0.5]))

    @property
    def outputs(self) -> list[str]:
        return ["mean", "epistemic", "aleatoric", "scale", *super().outputs]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        all_moments, leverage = self.moments(x)
        likelihoods: Any = self.likelihoods
        pairs = zip(likelihoods, all_moments, strict=True)
        parts = zip(*(own.predictive_moments(q) for own, q in pairs), strict=True)
        means, epistemic, aleatoric = (torch.stack(part) for part in parts)  # (E, N, C)
        mean = means.mean(0)
        between = (means - mean).square().mean(0)
        unit = self.units[0] * self.y_scale.square()
        epistemic = unit * ((self.factors * epistemic).mean(0) + between)
        aleatoric = unit * (self.factors * aleatoric).mean(0)
        scale = (epistemic + aleatoric).sqrt() * self.units[1]
        mean = self.y_mean + self.y_scale * mean
        return mean, epistemic, aleatoric, scale, *self.novelty(leverage, None)


class PortableClassifier(PortableEnsemble):
    """A fitted `DAKClassifier`: probabilities `(N, K)`, entropy and expected entropy `(N,)`."""

    temperature: Tensor
    variance_factor: Tensor

    def __init__(self, estimator: Any, num_draws: int, novelty: bool = True):
        super().__init__(estimator, novelty)
        generator = torch.Generator().manual_seed(0)
        self.classes = ClassProbabilities(
            "mc", num_draws, len(estimator.classes_), 0, generator, torch.float64
        )
        self.register_buffer("temperature", _double(estimator.calibration_))
        self.register_buffer("variance_factor", _double(estimator.variance_factor_))

    @property
    def outputs(self) -> list[str]:
        return ["probs", "entropy", "expected_entropy", *super().outputs]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        all_moments, leverage = self.moments(x)
        T, factor = self.temperature, self.variance_factor
        scaled = [FunctionMoments(q.mean / T, factor * q.var / T**2) for q in all_moments]
        parts = zip(*(self.classes(q) for q in scaled), strict=True)
        probs, expected = (torch.stack(part).mean(0) for part in parts)
        probs = probs / probs.sum(-1, keepdim=True)
        of_mixture = entropy(probs)
        return probs, of_mixture, expected, *self.novelty(leverage, of_mixture)


# Additive estimators


def _hats_at(hats: Hats, values: Tensor) -> Tensor:
    """The basis of a column of numbers at values `(N,)`, NaN where they are missing, `(N, M + 1)`.

    A hat is the smaller of the lines that fall from its knot to its neighbours, above zero.
    """
    knots = _double(hats.knots)
    is_missing = values.isnan().unsqueeze(-1)
    inside = torch.where(values.isnan(), knots[0], values)
    inside = torch.minimum(torch.maximum(inside, knots[0]), knots[-1])
    parts = []
    if len(knots) > 1:
        widths = knots.diff()
        share = (inside.unsqueeze(-1) - knots[:-1]) / widths  # in each gap, from left to right
        ones = torch.ones_like(share[:, :1])
        rising, falling = torch.cat([ones, share], -1), torch.cat([1 - share, ones], -1)
        parts.append(torch.minimum(rising, falling).clamp(0, 1))
    else:
        parts.append(torch.ones_like(inside).unsqueeze(-1))
    known = torch.where(is_missing, 0.0, torch.cat(parts, -1))
    return torch.cat([known, is_missing.to(values.dtype)], -1)


def _basis_at(basis: Basis, values: Tensor) -> Tensor:
    """A basis at the values of its column `(N,)`, `(N, size)`."""
    if isinstance(basis, Hats):
        return _hats_at(basis, values)
    codes = values.unsqueeze(-1)
    known: Tensor = codes == torch.arange(basis.size - 1, dtype=values.dtype)
    return torch.cat([known, codes < 0], -1).to(values.dtype)


def _lost_at(term: NumberTerm, theta: Sequence[float], values: Tensor) -> Tensor:
    """`NumberTerm.lost_variance` at the values of its column `(N,)`."""
    first, last = float(term.hats.knots[0]), float(term.hats.knots[-1])
    beyond = torch.maximum(_double(first) - values, values - _double(last)).clamp(min=0)
    distance = torch.where(values.isnan(), 0.0, beyond)
    a, length, b, smooth_length, _ = (math.exp(t) for t in theta)
    u = distance / _double(length * max(last - first, term.scale))
    r = distance * _double(3**0.5 / (smooth_length * term.scale))
    rough, smooth = _double(2 * a**2), _double(2 * b**2)
    return rough * (1 - (-u).exp()) + smooth * (1 - (1 + r) * (-r).exp())


class PortableAdditive(nn.Module):
    """What the two additive estimators share: raw rows to mean and variance of f, `(N, F)`."""

    mean: Tensor
    root: Tensor

    def __init__(self, estimator: Any):
        super().__init__()
        posterior, columns = estimator.posterior_, estimator.columns_
        places = {name: place for place, name in enumerate(raw_names(columns))}
        self.places = [places[name] for name in columns.names]
        self.terms: list[Term] = posterior.terms
        self.theta = [own.tolist() for own in posterior.own_theta()]
        self.register_buffer("mean", _double(posterior.mean))
        self.register_buffer("root", _double(posterior.root))

    def moments(self, x: Tensor) -> FunctionMoments:
        """Mean and variance of f."""
        parts, lost = [torch.ones_like(x[:, :1])], None
        for term, theta in zip(self.terms, self.theta, strict=True):
            values = [x[:, self.places[index]] for index in term.columns]
            if isinstance(term, NumberTerm):
                line = ((values[0] - _double(term.loc)) / _double(term.scale)).unsqueeze(-1)
                parts += [torch.where(line.isnan(), 0.0, line), _hats_at(term.hats, values[0])]
                own = _lost_at(term, theta, values[0])
                lost = own if lost is None else lost + own
            elif isinstance(term, CategoryTerm):
                parts.append(_basis_at(term.levels, values[0]))
            else:
                assert isinstance(term, PairTerm)
                first, second = (_basis_at(*pair) for pair in zip(term.bases, values, strict=True))
                parts.append((first.unsqueeze(-1) * second.unsqueeze(-2)).flatten(1))
        phi = torch.cat(parts, -1)  # (N, K)
        var = (phi @ self.root.mT).square().sum(-1).mT  # (F, N, Z) -> (N, F)
        var = var if lost is None else var + lost.unsqueeze(-1)
        return FunctionMoments(phi @ self.mean.mT, var)


class PortableAdditiveRegressor(PortableAdditive):
    """A fitted `DAKAdditiveRegressor`: mean, variances and scale, `(N, 1)` each."""

    outputs = ("mean", "epistemic", "aleatoric", "scale")
    units: Tensor

    def __init__(self, estimator: Any):
        super().__init__(estimator)
        y_mean, y_scale = float(estimator.y_mean_), float(estimator.y_scale_)
        share = 1 - 2 / estimator.tail_df_
        factor = estimator.calibration_ / share
        noise_var = factor * estimator.noise_scale_**2
        units = [y_mean, y_scale, factor * y_scale**2, noise_var, share**0.5]
        self.register_buffer("units", _double(units))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        mean, var, _ = self.moments(x)
        y_mean, y_scale, factor, noise_var, share = self.units.unbind()
        epistemic = factor * var
        aleatoric = noise_var.expand_as(var)
        scale = (epistemic + aleatoric).sqrt() * share
        return y_mean + y_scale * mean, epistemic, aleatoric, scale


class PortableAdditiveClassifier(PortableAdditive):
    """A fitted `DAKAdditiveClassifier`: probabilities `(N, C)`, entropies `(N,)`."""

    outputs = ("probs", "entropy", "expected_entropy")
    nodes: Tensor
    node_weights: Tensor

    def __init__(self, estimator: Any, num_draws: int):
        super().__init__(estimator)
        C = len(estimator.classes_)
        self.classes = None
        if C > 2:
            generator = torch.Generator().manual_seed(0)
            self.classes = ClassProbabilities("mc", num_draws, C, 0, generator, torch.float64)
        nodes, weights = gauss_hermite(*_double([[0.0], [1.0]]))
        self.register_buffer("nodes", nodes.squeeze(-1))
        self.register_buffer("node_weights", weights.squeeze(-1))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        q = self.moments(x)
        if self.classes is not None:
            probs, expected = self.classes(q)
            assert expected is not None
            probs = probs / probs.sum(-1, keepdim=True)
            return probs, entropy(probs), expected
        p = (q.mean + q.var.sqrt() * self.nodes).sigmoid()  # (N, Q)
        second = (p * self.node_weights).sum(-1)
        expected = (entropy(torch.stack([p, 1 - p], -1)) * self.node_weights).sum(-1)
        probs = torch.stack([1 - second, second], -1)
        return probs, entropy(probs), expected
