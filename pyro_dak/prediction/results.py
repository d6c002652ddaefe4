"""What a prediction says: means, variances, intervals, densities, class probabilities."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_dak.additive.gaussian import FunctionMoments, draws_of_moments, sample_marginals
from pyro_dak.inference.densities import seeded
from pyro_dak.model.likelihoods import (
    CategoricalLikelihood,
    GaussianLikelihood,
    HeteroscedasticLikelihood,
    Likelihood,
)
from pyro_dak.model.missing import (
    check_observed_values,
    observed_distribution,
    observed_rows,
)
from pyro_dak.validation import check_choice, check_integer, check_probability

__all__ = [
    "ClassPrediction",
    "Components",
    "MixturePrediction",
    "NoveltyScores",
    "Prediction",
    "WithNovelty",
    "concatenated",
    "mixture_moments",
    "place",
]


class NoveltyScores(NamedTuple):
    """How strange each row is, `(N,)` each.

    `novelty` is the share of reference rows at least as strange. The others are -log tail
    probabilities; `entropy` is None where there are no classes.
    """

    novelty: Any
    combined: Any
    leverage: Any
    entropy: Any


class WithNovelty:
    """A prediction that says how strange its rows are, if what it comes from has learned that."""

    novelty_scores: NoveltyScores | None

    @property
    def novelty(self) -> Any:
        """The share of reference rows that are at least as strange, `(N,)`.

        0.01 is stranger than 99 % of them. They are rows that were held out from training, or else
        training rows, each compared with the others. For rows like them novelty is uniform.
        """
        return self._scores().novelty

    def strangeness(self, score: str = "combined") -> Any:
        """How strange each row is, `(N,)`: larger is stranger, without an upper end.

        -log of the share of reference rows at least as strange by one score, continued beyond the
        strangest of them. "leverage" is large where the features of the network are unlike those of
        the training rows, "entropy" where the classes are uncertain, and "combined" is the sum of
        both: Fisher's product of tail probabilities. Without classes there is only leverage.
        """
        check_choice("score", score, ("combined", "entropy", "leverage"))
        value = getattr(self._scores(), score)
        if value is None:
            raise ValueError(
                '`score` must be "leverage" or "combined" here, because only a prediction of '
                'classes has the entropy of their probabilities; got "entropy".'
            )
        return value

    def _scores(self) -> NoveltyScores:
        if self.novelty_scores is None:
            raise ValueError(
                "This prediction does not know how strange its rows are. `fit` learns that at its "
                "end, unless it is told not to or warns that it cannot; for a model that was "
                "trained otherwise, call `learn_novelty(model, guide, x)` with its training "
                "inputs. Then predict again, with `novelty=True`."
            )
        return self.novelty_scores


# So many draws at a time are sorted for a quantile: torch takes no more than 2^24 numbers.
_MAX_DRAWS = 2**23


def place(value: Tensor) -> str:
    """Dtype and device of a tensor, as in "float32 on cpu"."""
    return f"{str(value.dtype).removeprefix('torch.')} on {value.device}"


@dataclass(frozen=True, repr=False)
class Prediction(WithNovelty):
    """What is known of y at new inputs; all tensors `(N, C)`.

    `mean` is E y. The variance splits into `epistemic`, what more data could remove, and
    `aleatoric`, the noise. `functions` is the Gaussian q(f), with the covariance between functions
    if the guide has any.
    """

    mean: Tensor
    epistemic: Tensor
    aleatoric: Tensor
    functions: FunctionMoments
    likelihood: Likelihood
    novelty_scores: NoveltyScores | None = None

    def __repr__(self) -> str:
        N, C = self.mean.shape
        parts = {
            "mean": self.mean,
            "std": self.std,
            "epistemic std": self.epistemic.sqrt(),
            "aleatoric std": self.aleatoric.sqrt(),
        }
        facts = ", ".join(f"{name} {float(value.mean()):.3g}" for name, value in parts.items())
        return (
            f"{type(self).__name__}({N} rows x {C} outputs, {type(self.likelihood).__name__}; "
            f"averages over rows: {facts}; {place(self.mean)})"
        )

    @property
    def variance(self) -> Tensor:
        """Var y = epistemic + aleatoric."""
        return self.epistemic + self.aleatoric

    @property
    def std(self) -> Tensor:
        """Standard deviation of y."""
        return self.variance.sqrt()

    def quantile(self, q: float, num_samples: int = 1000) -> Tensor:
        """The q-quantile of y, `(N, C)`, of each output by itself.

        With Gaussian noise that of N(mean, variance), exact if the noise is the same everywhere;
        other likelihoods take it from `num_samples` draws, always the same ones. For counts and
        other discrete y it is one of their values: the smallest that y exceeds in at most a share
        1 - q of the draws.
        """
        check_probability("q", q)
        check_integer("num_samples", num_samples, minimum=1)
        if self._is_normal:
            return self.mean + torch.special.ndtri(self.mean.new_tensor(q)) * self.std
        size = max(1, _MAX_DRAWS // (num_samples * self.mean.shape[-1]))
        with seeded(0), torch.no_grad():
            parts = (self._draws(rows, num_samples) for rows in _slices(len(self.mean), size))
            return torch.cat([_quantile(draws, q, self._is_discrete) for draws in parts]).to(
                self.mean.dtype
            )

    @property
    def _is_normal(self) -> bool:
        """Whether quantiles are those of a normal distribution."""
        return isinstance(self.likelihood, GaussianLikelihood | HeteroscedasticLikelihood)

    @property
    def _is_discrete(self) -> bool:
        likelihood: Any = self.likelihood
        support: Any = likelihood.distribution(self._functions_at(slice(1)).mean).support
        return bool(support.is_discrete)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Lower and upper end of the central interval with probability `level`.

        For discrete y both ends belong to the interval, whose probability is at least `level`.
        """
        check_probability("level", level)
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def sample(self, num_samples: int) -> Tensor:
        """Draws of y, `(S, N, C)`, independent over rows and jointly over outputs."""
        check_integer("num_samples", num_samples, minimum=1)
        with torch.no_grad():
            return self._draws(slice(None), num_samples)

    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y) of each row under the predictive distribution, `(N,)`, in nats.

        For Gaussian noise, constant or not, this is the density of all outputs together. For other
        likelihoods it is the sum of the log densities of the outputs, each by itself: covariance
        between several outputs, which some guides have, does not enter; nor does it if targets may
        be missing, which then do not count.
        """
        y = self.likelihood.check_targets(y, self.mean.shape[-1])
        check_observed_values(self.likelihood, y, self.mean.shape[-1])
        _check_rows(y, self.mean)
        with torch.no_grad():
            parts = [
                self._log_prob(y[rows], self._functions_at(rows)) for rows in _slices(len(y), 8192)
            ]
        return torch.cat(parts)

    def _log_prob(self, y: Tensor, functions: FunctionMoments) -> Tensor:
        return observed_rows(_log_prob, self.likelihood, y, functions)

    def _draws(self, rows: slice, num_samples: int) -> Tensor:
        f = sample_marginals(self._functions_at(rows), num_samples)
        return _with_columns(self.likelihood.distribution(f).sample())

    def _functions_at(self, rows: slice) -> FunctionMoments:
        mean, var, root = self.functions
        return FunctionMoments(mean[rows], var[rows], None if root is None else root[:, rows])


@dataclass(frozen=True, repr=False)
class MixturePrediction(Prediction):
    """A prediction by draws of f and of parameters t of the likelihood: p(y) = mean_s p(y|f_s,t_s).

    `functions` holds the mean and the covariance over the draws of f, and its root has a row for
    each draw, which needs S N F numbers. `parameters` are the draws of the parameters by name,
    `(S, 1, 1)` or `(S, 1, C)`.
    """

    parameters: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def _is_normal(self) -> bool:
        return False

    def _log_prob(self, y: Tensor, functions: FunctionMoments) -> Tensor:
        p, filled = observed_distribution(self.likelihood, self._given_draws(functions), y)
        log_probs = p.log_prob(filled)  # (S, N)
        return log_probs.logsumexp(0) - math.log(len(log_probs))

    def _draws(self, rows: slice, num_samples: int) -> Tensor:
        """Draws of y, about as many from each draw of f and of the parameters."""
        functions = self._functions_at(rows)
        p, S = self._given_draws(functions), len(draws_of_moments(functions))
        y = p.sample((math.ceil(num_samples / S),)).flatten(0, 1)
        chosen = torch.linspace(0, len(y) - 1, num_samples).round().long()
        return _with_columns(y[chosen.to(y.device)])

    def _given_draws(self, functions: FunctionMoments) -> Any:
        """p(y | f_s, t_s), batch shape `(S, N)`."""
        likelihood: Any = self.likelihood
        return likelihood.distribution(draws_of_moments(functions), **self.parameters)


def mixture_moments(
    likelihood: Any, f: Tensor, parameters: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean of y, its epistemic and its aleatoric variance, `(N, C)`, over draws of f `(S, N, F)`.

    By the law of total variance these are the mean and the variance over draws of E[y | f_s, t_s],
    and the mean of Var[y | f_s, t_s], with the `parameters` t of the likelihood.
    """
    p = likelihood.distribution(f, **parameters)
    mean, variance = _with_columns(p.mean), _with_columns(p.variance)
    spread = mean.var(0, correction=min(1, len(mean) - 1))
    return mean.mean(0), spread, variance.mean(0)


@dataclass(frozen=True, repr=False)
class ClassPrediction(WithNovelty):
    """Class probabilities `(N, C)`, as logarithms, and how sure they are.

    `functions` holds the mean and the variance of each function under q(f). Covariance between
    functions, which some guides have, is counted in the probabilities by draws, but not kept.
    """

    log_probs: Tensor
    expected_entropy: Tensor
    functions: FunctionMoments
    novelty_scores: NoveltyScores | None = None

    def __repr__(self) -> str:
        N, C = self.log_probs.shape
        return (
            f"ClassPrediction({N} rows x {C} classes; averages over rows: largest probability "
            f"{float(self.probs.amax(-1).mean()):.3g}, entropy {float(self.entropy.mean()):.3g} "
            f"nats; {place(self.log_probs)})"
        )

    @property
    def probs(self) -> Tensor:
        """Class probabilities, `(N, C)`."""
        return self.log_probs.exp()

    @property
    def label(self) -> Tensor:
        """The most probable class, `(N,)`."""
        return self.probs.argmax(-1)

    @property
    def entropy(self) -> Tensor:
        """Entropy of the probabilities, total uncertainty, `(N,)`, in nats."""
        return torch.special.entr(self.probs).sum(-1)

    @property
    def mutual_information(self) -> Tensor:
        """Entropy minus expected entropy: what the posterior does not know, `(N,)`, in nats."""
        if bool(self.expected_entropy.isnan().all()):
            raise NotImplementedError('The probit method samples nothing; use method="mc".')
        return self.entropy - self.expected_entropy

    def sample(self, num_samples: int) -> Tensor:
        """Draws of the label, `(S, N)`."""
        check_integer("num_samples", num_samples, minimum=1)
        return torch.distributions.Categorical(probs=self.probs).sample((num_samples,))

    def log_prob(self, y: Tensor) -> Tensor:
        """log probability of the labels y `(N,)`."""
        likelihood = CategoricalLikelihood()
        y = likelihood.check_targets(y, self.log_probs.shape[-1])
        likelihood.check_values(y, self.log_probs.shape[-1])
        _check_rows(y, self.log_probs)
        return self.log_probs.gather(-1, y.unsqueeze(-1)).squeeze(-1)


def concatenated(pieces: Sequence[Any]) -> Any:
    """The prediction of the rows of all pieces, each a prediction by the same model."""
    if len(pieces) == 0:
        raise ValueError("`x` yields no batch, so that there is nothing to predict.")
    means, variances, roots = zip(*(piece.functions for piece in pieces), strict=True)
    root = None if roots[0] is None else torch.cat(roots, 1)
    joined: dict[str, Any] = {
        "functions": FunctionMoments(torch.cat(means), torch.cat(variances), root)
    }
    is_classes = isinstance(pieces[0], ClassPrediction)
    names = ("log_probs", "expected_entropy") if is_classes else ("mean", "epistemic", "aleatoric")
    joined |= {name: torch.cat([getattr(piece, name) for piece in pieces]) for name in names}
    if pieces[0].novelty_scores is not None:
        scores = zip(*(piece.novelty_scores for piece in pieces), strict=True)
        together = [None if part[0] is None else torch.cat(part) for part in scores]
        joined["novelty_scores"] = NoveltyScores(*together)
    return replace(pieces[0], **joined)


class Components(NamedTuple):
    """Share of every unit in each function, mean and variance `(N, F, P)`; its input `(N, P)`."""

    mean: Tensor
    variance: Tensor
    unit_inputs: Tensor

    def __repr__(self) -> str:
        N, F, P = self.mean.shape
        return (
            f"Components({N} rows x {F} functions x {P} units; averages: |mean| "
            f"{float(self.mean.abs().mean()):.3g}, std {float(self.variance.sqrt().mean()):.3g}; "
            f"{place(self.mean)})"
        )


def _quantile(draws: Tensor, q: float, is_discrete: bool) -> Tensor:
    """The q-quantile over the first axis; of discrete draws the least v with P(y <= v) >= q."""
    if not is_discrete:
        return draws.quantile(q, 0)
    rank = min(max(math.ceil(q * len(draws)), 1), len(draws))
    return draws.sort(0).values[rank - 1]


def _with_columns(y: Tensor) -> Tensor:
    """y `(S, N, C)`, also where its distribution has one number for each row."""
    return y if y.dim() == 3 else y.unsqueeze(-1)


def _log_prob(likelihood: Likelihood, y: Tensor, moments: FunctionMoments) -> Tensor:
    return likelihood.predictive_log_prob(y, moments)


def _slices(num_rows: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, num_rows, size))


def _check_rows(y: Tensor, like: Tensor) -> None:
    if len(y) != len(like):
        raise ValueError(f"`y` must have {len(like)} rows, as the prediction has; got {len(y)}.")
