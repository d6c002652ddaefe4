"""How strange a row is to an ensemble.

Each member has features of its own, and so a leverage of its own, here in units of that of its
median training row; a row's score is their geometric mean. For classes the entropy of the averaged
probabilities joins it (see `pyro_dak.prediction.novelty`).

Rows are compared with held-out rows, as that member saw them that was not trained on them. A small
table may be known by heart, and then any other row looks strange beside the training rows: on the
digits of scikit-learn 20 to 30 % of the test rows would have a novelty below 0.05, and have 2 to
3 % this way.

A held-out row is seen by one or two members, and a new row by the mean of all E, which is less
extreme. For two members that have not seen a row, let p be the mean of their log leverages, which
has variance A + B/2 over rows, where B is the variance of a member around what all have in common:
twice the mean square of half their difference. The mean of E members has variance A + B/E. So p is
moved towards its mean by the factor sqrt((A + B/E) / (A + B/2)).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.prediction.novelty import MAX_NUMBERS, MAX_REFERENCE_ROWS, Leverage, Tails
from pyro_dak.tables.ensemble import Ensemble

__all__ = ["EnsembleNovelty", "EntropyFn", "Reference", "learn_novelty", "reference_of"]

# More rows than this hardly change what is usual.
_MAX_ROWS = 20_000
# Fewer held-out rows than this are worse to compare with than the training rows.
_LEAST_HELD_OUT = 100
_CHUNK = 8192

# Entropies of the members, `(E, N)`, and of their mixture, `(N,)`; None without classes.
EntropyFn = Callable[[FunctionMoments], tuple[Tensor, Tensor] | None]


class Reference(NamedTuple):
    """Scores of rows that the member was not trained on, `(n,)` each; entropy only of classes.

    `members` are the leverages of the members that the scores come from.
    """

    leverage: Tensor
    entropy: Tensor | None
    members: list[Leverage]


class EnsembleNovelty(nn.Module):
    """What an ensemble knows of its training rows, to tell how strange others are.

    Args:
        num_members: E.
        feature_dim: D_w.
        num_rows: the number of reference rows.
        has_entropy: whether the members predict classes.
    """

    def __init__(self, num_members: int, feature_dim: int, num_rows: int, has_entropy: bool):
        super().__init__()
        self.members = nn.ModuleList(Leverage(feature_dim) for _ in range(num_members))
        self.tails = Tails(num_rows, has_entropy)

    def leverage(self, features: Tensor) -> Tensor:
        """The geometric mean of the members' leverages, `(N,)`, for features `(E, D_w, N)`."""
        logs = [member(own.mT).log() for member, own in zip(self.members, features, strict=True)]
        return torch.stack(logs).mean(0).exp()


@torch.no_grad()
def reference_of(
    ensemble: Ensemble,
    x: Tensor,
    held_out: Tensor,
    entropy_fn: EntropyFn,
    overlap: int = 0,
    size: int = 1,
) -> Reference | None:
    """The scores of held-out rows, each by the members that were not trained on it.

    The inputs are `(N, D)`, and `held_out` has the numbers of each member's rows, `(E, n)`, of
    which the first `overlap` are the last ones of the member before. `size` is the number of
    members that will predict. The result is None if there are too few rows.
    """
    rows = held_out if overlap == 0 else held_out[1:, :overlap]
    if rows.numel() < _LEAST_HELD_OUT:
        return None
    number = -(-MAX_REFERENCE_ROWS // len(rows))
    chosen = torch.randperm(rows.shape[1], generator=_generator())[:number]
    rows = rows[:, chosen.to(rows.device)]
    members = [member for member, _ in _leverages(ensemble, x, held_out)]
    if overlap > 0:
        return _of_pairs(ensemble, x, rows, members, entropy_fn, size)
    features = ensemble.features(x[rows])  # (E, D_w, n)
    scores = torch.cat([member(own.mT) for member, own in zip(members, features, strict=True)])
    entropies = entropy_fn(ensemble.moments_from(features))
    return Reference(scores, None if entropies is None else entropies[0].flatten(), members)


def _of_pairs(
    ensemble: Ensemble,
    x: Tensor,
    rows: Tensor,
    members: list[Leverage],
    entropy_fn: EntropyFn,
    size: int,
) -> Reference:
    """The scores of rows `(E - 1, n)`, which a member and the next one have not seen."""
    logs, entropies = [], []
    for index, own in enumerate(rows):
        features = ensemble.features(x[own])  # (E, D_w, n)
        pair = slice(index, index + 2)
        both = zip(members[pair], features[pair], strict=True)
        logs.append(torch.stack([member(part.mT).log() for member, part in both]))  # (2, n)
        moments = ensemble.moments_from(features)
        found = entropy_fn(FunctionMoments(moments.mean[pair], moments.var[pair]))
        entropies += [] if found is None else [found[1]]
    first, second = torch.cat(logs, -1)
    p, B = (first + second) / 2, 2 * ((first - second) / 2).square().mean()
    ratio = 1 - B * (1 / 2 - 1 / size) / p.var().clamp(min=1e-12)
    scores = p.mean() + (p - p.mean()) * ratio.clamp(0, 1).sqrt()
    return Reference(scores.exp(), torch.cat(entropies) if entropies else None, members)


@torch.no_grad()
def learn_novelty(
    ensemble: Ensemble,
    x: Tensor,
    held_out: Tensor,
    reference: Reference | None,
    entropy_fn: EntropyFn,
    is_refit: bool = False,
) -> EnsembleNovelty:
    """The statistics of an ensemble for the inputs x `(N, D)` of its training rows.

    With a reference from other members, after a refit, the leverage of member e is among the rows
    without `held_out[e]`, although it was trained on all, so that there are as many as for the
    reference. Without one the training rows serve, each without itself.
    """
    if reference is None:
        pairs = _leverages(ensemble, x, held_out[:, :0])
        leverage = torch.stack([scores.log() for _, scores in pairs]).mean(0).exp()
        rows = x[_some_rows(ensemble, x)[: len(leverage)]]
        entropies = entropy_fn(ensemble.moments(rows))
        members = [member for member, _ in pairs]
        reference = Reference(leverage, None if entropies is None else entropies[1], members)
    elif is_refit:
        members = [member for member, _ in _leverages(ensemble, x, held_out)]
        reference = reference._replace(members=members)
    novelty = EnsembleNovelty(0, 1, 1, False)
    novelty.members = nn.ModuleList(reference.members)
    novelty.tails = Tails.of(reference.leverage, reference.entropy)
    return novelty.float()


def _leverages(ensemble: Ensemble, x: Tensor, held_out: Tensor) -> list[tuple[Leverage, Tensor]]:
    """The leverage of each member among the rows that are not held out from it.

    With it comes that of the first of these rows, at most 2,000, each without itself. Both are in
    units of the median of these.
    """
    chosen = _some_rows(ensemble, x)
    parts = [ensemble.features(x[part]) for part in chosen.split(_CHUNK)]
    pairs = []
    for features, apart in zip(torch.cat(parts, -1), held_out, strict=False):
        own = features.mT[~torch.isin(chosen, apart)]  # (n, D_w)
        leverage = Leverage.of(own)
        scores = leverage.without_itself(own[:MAX_REFERENCE_ROWS])
        unit = scores.median()
        leverage.root = leverage.root / unit.sqrt()
        pairs.append((leverage, scores / unit))
    return pairs


def _some_rows(ensemble: Ensemble, x: Tensor) -> Tensor:
    """The numbers of all rows, or of some of many, in an order that is always the same."""
    width = ensemble.model.feature_dim + ensemble.model.num_input_units
    number = min(_MAX_ROWS, MAX_NUMBERS // (len(ensemble) * width))
    return torch.randperm(len(x), generator=_generator())[:number].to(x.device)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
