"""How strange a row is: its leverage among the training rows, and the entropy of its classes.

**Leverage.** Take the features of the network, standardise each over the training rows, and give
each a unit of its own on a grid of M = 3 points. With `Phi(x) = (1, phi of all features)`, K = 1 +
3 D_w numbers, the Bayesian linear model `f = Phi(x) w`, `w ~ N(0, I / lambda)`, `y ~ N(f, 1)` has
posterior precision `A = lambda I + sum_n Phi_n^T Phi_n`, and f has the posterior variance

    l(x) = Phi(x) A^{-1} Phi(x)^T.

It needs no targets. The posterior of a classifier weights each row by its curvature p (1 - p),
which vanishes where the classifier is sure, and so finds those rows uncertain that are near a
boundary; here each row counts once, and l(x) is large where no training row has such features.

**A training row without itself.** With `A_n = A - Phi_n^T Phi_n`, Sherman and Morrison give
`A_n^{-1} = A^{-1} + A^{-1} Phi_n^T Phi_n A^{-1} / (1 - l_n)`, hence

    Phi_n A_n^{-1} Phi_n^T = l_n + l_n^2 / (1 - l_n) = l_n / (1 - l_n).

So the leverage that a training row would have, were it new, takes no second fit.

**Tails.** A score says something by comparison: `novelty` is the share of reference rows, training
rows or better held-out ones, that are at least as strange. For classes the entropy of the predicted
probabilities tells of other strange rows than the leverage does, and Fisher's product of the two
tail probabilities combines both.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_dak.inference.draws import Posterior, as_guide, check_posterior
from pyro_dak.model.dak import DAK
from pyro_dak.model.explaining import explaining
from pyro_dak.model.inputs import check_inputs, check_network
from pyro_dak.model.latent_sites import known_sites
from pyro_dak.model.likelihoods import CategoricalLikelihood
from pyro_dak.model.modes import evaluating
from pyro_dak.model.rows import (
    Inputs,
    concatenate,
    device_of,
    like_model,
    num_numbers,
    num_rows,
    row_shape,
    split,
    take,
)
from pyro_dak.prediction.predict import frozen_functions
from pyro_dak.prediction.results import NoveltyScores
from pyro_dak.validation import check_finite

__all__ = [
    "MAX_NUMBERS",
    "MAX_REFERENCE_ROWS",
    "MIN_HELD_OUT_ROWS",
    "Leverage",
    "Novelty",
    "Tails",
    "features_of",
    "in_random_order",
    "learn_novelty",
    "minus_log_tail",
    "novelty_of_features",
    "tail_share",
    "tail_spread",
]

# The most numbers of features that are kept in memory, and of inputs.
MAX_NUMBERS = 2**27
# The most rows that others are compared with.
MAX_REFERENCE_ROWS = 2000
# Fewer held-out rows than this are worse to compare with than many training rows.
MIN_HELD_OUT_ROWS = 200
# U, the points of a grid of level 2 on (0, 1); the kernel there is exp(-|h - h'|).
_NODES = (0.25, 0.5, 0.75)
# More features than this are projected to as many, so that K stays below 1,540.
_MAX_UNITS = 512
_PRIOR_PRECISION = 0.1  # lambda
# The share of the reference rows that the tail beyond them continues, and their least number.
_TAIL_SHARE, _TAIL_ROWS = 0.05, 5
_CHUNK, _CHUNK_NUMBERS = 1024, 2**21
# So many columns of the root at a time.
_COLUMNS = 64


class _Statistics(nn.Module):
    """A module of buffers that stay in float32 where a model is in half precision."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or cast the buffers."""

        def at_least_single(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            is_half = moved.is_floating_point() and moved.itemsize < 4
            return tensor.to(moved.device, torch.float32) if is_half else moved

        return super()._apply(at_least_single, recurse)


class Leverage(_Statistics):
    """l(x) = Phi(x) (lambda I + sum_n Phi_n^T Phi_n)^{-1} Phi(x)^T, of features `(N, D_w)`.

    Feature d enters the unit d as h = 1/2 + (feature - mean) / (6 std), so that three standard
    deviations reach either bound of (0, 1), as in `Standardize`. More than 512 features are first
    standardised and projected to 512 random orthogonal directions, always the same.

    Instead of phi = k(h, U) L_U^{-T} the code takes the kernel values k(h, U) themselves, which is
    faster: with v = (1, k of all units) and Phi = v B, B = diag(1, L_U^{-T}, ..., L_U^{-T}),

        l = v (lambda diag(1, K_UU, ..., K_UU) + sum_n v_n^T v_n)^{-1} v^T = |v root|^2,

    since (B B^T)^{-1} = diag(1, K_UU, ..., K_UU). The columns of v are 1, the values of all units
    at the first node, at the second and at the third.

    Args:
        feature_dim: D_w.

    Attributes:
        feature_mean: means of the features over the training rows, `(D_w,)`.
        feature_scale: their standard deviations, `(D_w,)`.
        projection: orthogonal directions, `(512, D_w)`, or None.
        root: the matrix above, `(K, K)`, upper triangular.
    """

    feature_mean: Tensor
    feature_scale: Tensor
    projection: Tensor | None
    root: Tensor

    def __init__(self, feature_dim: int):
        super().__init__()
        num_units = min(feature_dim, _MAX_UNITS)
        K = 1 + len(_NODES) * num_units
        self.register_buffer("feature_mean", torch.zeros(feature_dim))
        self.register_buffer("feature_scale", torch.ones(feature_dim))
        is_wide = feature_dim > num_units
        self.register_buffer("projection", torch.zeros(num_units, feature_dim) if is_wide else None)
        self.register_buffer("root", torch.zeros(K, K))

    def forward(self, features: Tensor) -> Tensor:
        """l of each row, `(N,)`, for features `(N, D_w)`."""
        values = self.kernel_values(features)
        leverage = values.new_zeros(values.shape[0])  # not `len`, which exporting takes for fixed
        # The root is upper triangular: its first columns need the first values alone.
        for low in range(0, len(self.root), _COLUMNS):
            high = min(low + _COLUMNS, len(self.root))
            root = self.root[:high, low:high]
            leverage += torch.addmm(root[0], values[:, : high - 1], root[1:]).square().sum(-1)
        return leverage

    def kernel_values(self, features: Tensor) -> Tensor:
        """k(h, U) at each node of each unit, `(N, K - 1)`: v without its first column."""
        h = (features.to(self.root.dtype) - self.feature_mean) / (6 * self.feature_scale)
        if self.projection is not None:
            h = h @ self.projection.mT
        h = h.contiguous()  # rows first, or what is thrice as large would be copied
        from_middle = h.new_tensor(_NODES).unsqueeze(-1) - 0.5
        return (h.unsqueeze(-2) - from_middle).abs_().neg_().exp_().flatten(-2)

    @classmethod
    @torch.no_grad()
    def of(cls, features: Tensor) -> "Leverage":
        """The leverage among these training rows, `(N, D_w)`, with statistics in float64."""
        if features.device.type == "mps":  # it has no float64
            features = features.cpu()
        N, D = features.shape
        own = cls(D).to(features.device, torch.float64)
        mean = features.sum(0, dtype=torch.float64) / N
        chunks = features.split(max(64, _CHUNK_NUMBERS // len(own.root)))
        squares = torch.stack([(c.double() - mean).square().sum(0) for c in chunks]).sum(0)
        if not bool((squares.isfinite() & mean.square().isfinite()).all()):
            raise ValueError(
                "`x` gives features that are not finite: scale the inputs, or look for a layer "
                "that overflows."
            )
        own.feature_mean = mean
        # The rounding of a constant is no spread, whatever its size.
        own.feature_scale = (squares / N + 1e-10 + (1e-6 * mean).square()).sqrt()
        if own.projection is not None:
            own.projection = _orthogonal_rows(*own.projection.shape).to(features.device)
        own.root = _upper_root(_prior_precision(min(D, _MAX_UNITS)).to(mean), own, chunks)
        return own

    def without_itself(self, features: Tensor) -> Tensor:
        """l / (1 - l), `(N,)`: the leverage of a training row among the other training rows."""
        leverage = self(features)
        return leverage / (1 - leverage)


def _prior_precision(num_units: int) -> Tensor:
    """lambda diag(1, K_UU, ..., K_UU) in the order of the kernel values, `(K, K)`, float64."""
    nodes = torch.tensor(_NODES, dtype=torch.float64)
    K_UU = (nodes - nodes.unsqueeze(-1)).abs().neg().exp()
    one, identity = torch.ones(1, 1, dtype=torch.float64), torch.eye(num_units, dtype=torch.float64)
    return _PRIOR_PRECISION * torch.block_diag(one, torch.kron(K_UU, identity))


def _upper_root(A: Tensor, leverage: Leverage, chunks: Iterable[Tensor]) -> Tensor:
    """L^{-T} with L L^T = A + sum_n v_n^T v_n, `(K, K)`; A is changed in place."""
    for chunk in chunks:
        values = leverage.kernel_values(chunk)
        A[1:, 1:].addmm_(values.mT, values)
        A[0, 0] += len(values)
        A[0, 1:] += values.sum(0)
    A[1:, 0] = A[0, 1:]
    L = torch.linalg.cholesky(A)
    return torch.linalg.solve_triangular(L.mT, torch.eye(len(L)).to(L), upper=True).contiguous()


def _orthogonal_rows(num_rows: int, num_columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(num_columns, num_rows, dtype=torch.float64, generator=generator)
    return torch.linalg.qr(normal).Q.mT.contiguous()


class Tails(_Statistics):
    """Sorted scores of n reference rows, and how far in their tails other scores are.

    Args:
        num_rows: n.
        has_entropy: whether there are entropies beside leverages.

    Attributes:
        leverage: `(n,)`, in increasing order.
        entropy: likewise, or None.
        combined: -log tail(entropy) - log tail(leverage) of these rows, likewise, or None.
    """

    leverage: Tensor
    entropy: Tensor | None
    combined: Tensor | None

    def __init__(self, num_rows: int, has_entropy: bool):
        super().__init__()
        self.register_buffer("leverage", torch.zeros(num_rows))
        self.register_buffer("entropy", torch.zeros(num_rows) if has_entropy else None)
        self.register_buffer("combined", torch.zeros(num_rows) if has_entropy else None)

    @classmethod
    def of(cls, leverage: Tensor, entropy: Tensor | None = None) -> "Tails":
        """The tails of reference rows with these scores, `(n,)` each."""
        own = cls(len(leverage), entropy is not None).to(leverage.device, leverage.dtype)
        own.leverage = leverage.sort().values
        if entropy is not None:
            own.entropy = entropy.to(leverage).sort().values
            own.combined = own.scores(leverage, entropy).combined.sort().values
        return own

    def scores(self, leverage: Tensor, entropy: Tensor | None = None) -> NoveltyScores:
        """What `Prediction` says of rows with these scores, `(N,)` each."""
        by_leverage = minus_log_tail(leverage, self.leverage.to(leverage))
        if self.entropy is None or self.combined is None or entropy is None:
            share = tail_share(leverage, self.leverage.to(leverage))
            return NoveltyScores(share, by_leverage, by_leverage, None)
        by_entropy = minus_log_tail(entropy.to(leverage), self.entropy.to(leverage))
        combined = by_leverage + by_entropy
        share = tail_share(combined, self.combined.to(leverage))
        return NoveltyScores(share, combined, by_leverage, by_entropy)


def tail_share(score: Tensor, reference: Tensor) -> Tensor:
    """(1 + number of reference scores >= score) / (n + 1), like `score`.

    Over a row that comes from where the n reference rows come from it is uniform, up to steps of
    1 / (n + 1). The reference is sorted, `(n,)`.
    """
    n = len(reference)
    return (1 + n - torch.searchsorted(reference, score)).to(score) / (n + 1)


def minus_log_tail(score: Tensor, reference: Tensor) -> Tensor:
    """-log of the tail probability of each score, like `score`, without steps and without an end.

    At a reference score it is -log `tail_share`, and between two of them it is interpolated.
    Beyond the largest, r, it goes on as a log(score / r): the tail of a Pareto distribution whose
    index a is Hill's estimate from the largest 5 % of the reference scores. So it is larger for the
    larger of any two scores above the smallest reference score. Scores are not negative, and the
    reference is sorted, `(n,)`.
    """
    n, largest = len(reference), reference[-1]
    at_reference = -tail_share(reference, reference).log()  # increases from 0 on
    nodes, values = (torch.cat([part.new_zeros(1), part]) for part in (reference, at_reference))
    right = torch.searchsorted(reference, score).clamp(max=n - 1)
    low, high = nodes[right], reference[right]
    part = ((score - low) / (high - low)).nan_to_num(0.0).clamp(0, 1)
    inside = torch.lerp(values[right], at_reference[right], part)
    tiny = torch.finfo(score.dtype).tiny
    beyond = score.clamp(min=tiny).log() - largest.clamp(min=tiny).log()
    return inside + (beyond / tail_spread(reference)).clamp(min=0)


def tail_spread(reference: Tensor) -> Tensor:
    """1 / a of `minus_log_tail`, for a sorted reference `(n,)`; a scalar."""
    number = min(len(reference), max(_TAIL_ROWS, round(_TAIL_SHARE * len(reference))))
    logs = reference[-number:].clamp(min=torch.finfo(reference.dtype).tiny).log()
    return (logs.mean() - logs[0]).clamp(min=1e-3)


class Novelty(nn.Module):
    """What a model knows of its training rows, to tell how strange others are: `model.novelty`.

    Its buffers are saved and loaded with the model.

    Args:
        feature_dim: D_w.
        num_rows: the number of reference rows.
        has_entropy: whether the model predicts classes.
    """

    def __init__(self, feature_dim: int, num_rows: int, has_entropy: bool):
        super().__init__()
        self.leverage = Leverage(feature_dim)
        self.tails = Tails(num_rows, has_entropy)

    @classmethod
    def of(cls, leverage: Leverage, tails: Tails) -> "Novelty":
        """The two parts as one module."""
        own = cls(1, 1, False)
        own.leverage, own.tails = leverage, tails
        return own

    @classmethod
    def room_for(cls, model: DAK, num_rows: int) -> "Novelty":
        """A module for the statistics of a model, not yet filled in."""
        has_classes = isinstance(model.likelihood, CategoricalLikelihood)
        return cls(model.feature_dim + model.num_input_units, num_rows, has_classes)


DAK.novelty_factory = Novelty.room_for


def learn_novelty(
    model: DAK,
    posterior: Posterior,
    x: Inputs,
    held_out: Inputs | None = None,
    *,
    progress: bool = True,
) -> None:
    """Learn how training rows look, so that predictions say how strange other rows are.

    `model.novelty` then holds the statistics, predictions have `novelty` and `strangeness`, and
    `save` keeps them. `fit` does this at its end; call it for a model that was trained otherwise,
    and again when its network has changed. The features of all rows are computed once and kept
    meanwhile, at most 2^27 numbers: of more rows a random part is taken.

    Args:
        model: the model, with its trained network.
        posterior: the posterior that it predicts with, anything that `predict` takes; for classes
            its entropies are looked at.
        x: training inputs, `(N, ...)`: a tensor, or a tuple or dictionary of tensors.
        held_out: inputs that the network was not trained on. From 200 rows on they are the rows
            that others are compared with, which is fairer than a comparison with training rows.
        progress: show a bar if it takes more than two seconds.
    """
    check_inputs(model, x)
    check_posterior(model, posterior)
    if held_out is not None:
        check_inputs(model, held_out, "held_out")
        if row_shape(held_out) != row_shape(x):
            raise ValueError(
                f"`held_out` must have rows like those of `x`, of shape {row_shape(x)}; got "
                f"{row_shape(held_out)}."
            )
    check_network(model, x)
    guide = as_guide(posterior)
    modules = {} if guide is None else {"guide": guide}
    with explaining(model, x, y=None, **modules):
        features, rows = features_of(model, in_random_order(x), progress)
        model.novelty = novelty_of_features(model, posterior, features, rows, held_out)


def in_random_order(x: Inputs) -> Iterator[Inputs]:
    """All rows of x in chunks, in an order that is the same at every call."""
    order = torch.randperm(num_rows(x), generator=torch.Generator().manual_seed(0))
    yield from (take(x, part) for part in order.to(device_of(x)).split(_CHUNK))


@torch.no_grad()
def features_of(
    model: DAK, batches: Iterable[Inputs], progress: bool = False
) -> tuple[Tensor, Inputs]:
    """The features of the rows in these batches, `(N, D_w)`, and the inputs of the first of them.

    They are what `model.features` returns: with input units the inputs are among them. There are
    at most 2^27 numbers of them, and further batches are not looked at.
    """
    like = model.layer.log_unit_scale
    width = model.feature_dim + model.num_input_units
    num_left, num_rows_left = MAX_NUMBERS // width, MAX_REFERENCE_ROWS
    features, rows = [], []
    bar = tqdm(batches, "novelty", delay=2, leave=False, disable=not progress)
    with bar, evaluating(model), known_sites(model, for_y=False):
        for batch in bar:
            x = like_model(take(batch, slice(num_left)), like)
            num_rows_left = min(num_rows_left, MAX_NUMBERS // num_numbers(x))
            features.append(model.features(x))
            rows.append(concatenate([take(x, slice(num_rows_left))]))  # a copy
            num_left -= num_rows(x)
            num_rows_left -= num_rows(rows[-1])
            if num_left <= 0:
                break
    return torch.cat(features), concatenate(rows)


def novelty_of_features(
    model: DAK,
    posterior: Posterior,
    features: Tensor,
    rows: Inputs,
    held_out: Inputs | None = None,
) -> Novelty:
    """The statistics of training rows with these features, `(N, D_w)`.

    The reference rows are held-out inputs, if there are enough of them, or else training rows:
    `rows` are the inputs of the first rows of the features.
    """
    leverage = Leverage.of(features)
    if held_out is not None and num_rows(held_out) >= MIN_HELD_OUT_ROWS:
        at_rows, rows = features_of(model, in_random_order(held_out))
        scores = leverage(at_rows[: num_rows(rows)])
    else:
        rows = take(rows, slice(MAX_REFERENCE_ROWS))
        scores = leverage.without_itself(features[: num_rows(rows)])
    has_classes = isinstance(model.likelihood, CategoricalLikelihood)
    entropy = _entropies(model, posterior, rows) if has_classes else None
    like = model.layer.log_unit_scale
    return Novelty.of(leverage, Tails.of(scores, entropy)).to(like.device, like.dtype)


def _entropies(model: DAK, posterior: Posterior, rows: Inputs, num_samples: int = 100) -> Tensor:
    """The entropies of the probabilities that `predict` gives to rows, without calibration."""
    likelihood: Any = model.likelihood
    options: dict[str, Any] = {"num_samples": num_samples, "residual_variance": False, "seed": 0}
    entropies = []
    with frozen_functions(model, posterior, rows, **options) as frozen:
        for chunk in split(rows, frozen.num_rows(_CHUNK)):
            q, _ = frozen(chunk)
            check_finite("mean and variance of f", q.mean + q.var)
            log_probs, _ = likelihood.class_probabilities(q, frozen.draws(q, num_samples, seed=0))
            entropies.append(torch.special.entr(log_probs.exp()).sum(-1))
    return torch.cat(entropies)
