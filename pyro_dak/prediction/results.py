"""What a prediction says: means, variances, intervals, densities, class probabilities."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_dak.additive.gaussian import FunctionMoments, sample_marginals
from pyro_dak.inference.densities import seeded
from pyro_dak.model.likelihoods import (
    CategoricalLikelihood,
    GaussianLikelihood,
    HeteroscedasticLikelihood,
    Likelihood,
)
from pyro_dak.model.missing import check_observed_values, observed_rows
from pyro_dak.validation import check_choice, check_integer, check_probability

__all__ = [
    "ClassPrediction",
    "Components",
    "NoveltyScores",
    "Prediction",
    "WithNovelty",
    "concatenated",
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


@dataclass(frozen=True)
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

    @property
    def variance(self) -> Tensor:
        """Var y = epistemic + aleatoric."""
        return self.epistemic + self.aleatoric

    @property
    def std(self) -> Tensor:
        """Standard deviation of y."""
        return self.variance.sqrt()

    def quantile(self, q: float, num_samples: int = 1000) -> Tensor:
        """The q-quantile of y, `(N, C)`.

        With Gaussian noise that of N(mean, variance), exact if the noise is the same everywhere;
        other likelihoods take it from `num_samples` draws, always the same ones.
        """
        check_probability("q", q)
        check_integer("num_samples", num_samples, minimum=1)
        if isinstance(self.likelihood, GaussianLikelihood | HeteroscedasticLikelihood):
            return self.mean + torch.special.ndtri(self.mean.new_tensor(q)) * self.std
        size = max(1, _MAX_DRAWS // (num_samples * self.mean.shape[-1]))
        with seeded(0), torch.no_grad():
            parts = (self._draws(rows, num_samples) for rows in _slices(len(self.mean), size))
            return torch.cat([draws.quantile(q, 0) for draws in parts])

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Lower and upper end of the central interval with probability `level`."""
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
                observed_rows(_log_prob, self.likelihood, y[rows], self._functions_at(rows))
                for rows in _slices(len(y), 8192)
            ]
        return torch.cat(parts)

    def _draws(self, rows: slice, num_samples: int) -> Tensor:
        f = sample_marginals(self._functions_at(rows), num_samples)
        return self.likelihood.distribution(f).sample()

    def _functions_at(self, rows: slice) -> FunctionMoments:
        mean, var, root = self.functions
        return FunctionMoments(mean[rows], var[rows], None if root is None else root[:, rows])


@dataclass(frozen=True)
class ClassPrediction(WithNovelty):
    """Class probabilities `(N, C)`, as logarithms, and how sure they are.

    `functions` holds the mean and the variance of each function under q(f). Covariance between
    functions, which some guides have, is counted in the probabilities by draws, but not kept.
    """

    log_probs: Tensor
    expected_entropy: Tensor
    functions: FunctionMoments
    novelty_scores: NoveltyScores | None = None

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


def _log_prob(likelihood: Likelihood, y: Tensor, moments: FunctionMoments) -> Tensor:
    return likelihood.predictive_log_prob(y, moments)


def _slices(num_rows: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, num_rows, size))


def _check_rows(y: Tensor, like: Tensor) -> None:
    if len(y) != len(like):
        raise ValueError(f"`y` must have {len(like)} rows, as the prediction has; got {len(y)}.")
