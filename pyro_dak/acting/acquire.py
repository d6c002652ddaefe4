"""Active learning: which rows of a pool are worth a label."""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from pyro_dak.acting.curvature import expected_curvature
from pyro_dak.acting.integrated import IntegratedVariance
from pyro_dak.acting.weights import GaussianWeights
from pyro_dak.additive.gaussian import FunctionMoments, sample_marginals
from pyro_dak.inference.densities import draw_functions, with_noise
from pyro_dak.inference.draws import Posterior, draw_posterior
from pyro_dak.model.dak import DAK
from pyro_dak.model.explaining import explaining
from pyro_dak.model.inputs import check_inputs
from pyro_dak.model.latent_sites import known_sites
from pyro_dak.model.likelihoods import (
    BernoulliLikelihood,
    CategoricalLikelihood,
    GaussianLikelihood,
    Likelihood,
    PoissonLikelihood,
)
from pyro_dak.model.modes import evaluating
from pyro_dak.model.rows import Inputs, num_rows, split, take, to_device
from pyro_dak.prediction.predict import with_bar
from pyro_dak.validation import check_choice, check_finite, check_integer, check_seed

__all__ = ["Method", "acquire"]

Method = Literal["variance", "integrated", "bald", "batch_bald_greedy", "thompson"]

# Rows whose scores are brought up to date at a time, and the most label configurations of a batch.
_BLOCK, _MAX_CONFIGURATIONS = 256, 512


@torch.no_grad()
def acquire(
    model: DAK,
    posterior: Posterior,
    pool: Inputs,
    num: int,
    method: Method = "variance",
    *,
    target: Inputs | None = None,
    output: int = 0,
    num_samples: int = 64,
    chunk_size: int = 4096,
    seed: int | None = None,
    progress: bool = True,
) -> Tensor:
    """Numbers of the rows of a pool that are worth a label, `(num,)`, the best one first.

    Rows are chosen jointly, one after the other: each is the best one given that the labels of
    those before it will be known. How much a label of a row tells does not depend on the label for
    Gaussian noise, and for other likelihoods its expectation is taken: a row adds k Phi^T Phi to
    the precision of the weights, with k the expected curvature of its log-likelihood. So rows that
    tell the same are not chosen twice.

    Scores can only fall as more rows are known, so only the rows that lead are brought up to date,
    and a pool of a million rows is passed over once. Those of "integrated" may also rise; all rows
    are brought up to date for every choice, at a cost of one number for each weight.

    Args:
        model: with `GaussianLikelihood`, `CategoricalLikelihood`, `BernoulliLikelihood` or
            `PoissonLikelihood`.
        posterior: for "variance", "integrated" and "bald" one with a joint covariance within
            functions: `exact_posterior`, a `FullRankGuide`, or a `NaturalGuide` with covariance
            "joint" or "shared". For the other methods any posterior.
        pool: inputs, `(N, ...)`, in the dtype of the model.
        num: rows to choose, at most N.
        method: "variance" takes the largest sum over functions of k Var f, which is the variance of
            f over that of the noise; it goes to the far ends of the pool. "integrated" takes the
            largest expected drop of that sum in the mean over the target rows, so that predictions
            there become sure; rows that are like many others come first. "bald" takes the largest
            mutual information between label and weights: for Gaussian noise the sum of
            log(1 + k Var f) / 2, for classes the entropy of the probabilities minus the expected
            entropy, over draws of f. "batch_bald_greedy" does so for all labels of the batch
            together, over draws of the weights; the labels can tell no more than the logarithm of
            the number of draws. For Gaussian noise it is "bald".
            "thompson" takes, for each row, one function drawn from the posterior and the row where
            it is largest.
        target: for "integrated", inputs `(R, ...)` where predictions matter, if not in the pool.
        output: the function that "thompson" maximises; for classes the probability of this one.
        num_samples: draws for mutual information.
        chunk_size: rows of the pool at a time.
        seed: of the draws; None is 0.
        progress: whether to show a bar if it takes more than two seconds.
    """
    check_choice("method", method, get_args(Method))
    for name, value in (("num", num), ("num_samples", num_samples), ("chunk_size", chunk_size)):
        check_integer(name, value, minimum=1)
    check_seed("seed", seed)
    check_inputs(model, pool, "pool")
    check_integer("output", output, minimum=0, maximum=model.num_functions - 1)
    if num > num_rows(pool):
        raise ValueError(f"`num` must be at most the {num_rows(pool)} rows of the pool; got {num}.")
    if target is not None:
        if method != "integrated":
            raise ValueError(f'`target` is for method="integrated"; got method="{method}".')
        check_inputs(model, target, "target")
    likelihood, seed = _checked_likelihood(model), 0 if seed is None else int(seed)
    is_gaussian = isinstance(likelihood, GaussianLikelihood)
    h, first = _unit_inputs(model, pool, int(chunk_size), progress), take(pool, slice(0, 1))
    if method == "integrated":
        at = h if target is None else _unit_inputs(model, target, int(chunk_size), progress)
        rule = IntegratedVariance(model, posterior, likelihood, at, int(chunk_size))
        return rule.choose(h, num, progress)
    if method == "thompson":
        draws = draw_posterior(model, posterior, num_samples=num, x=first, seed=seed)
        value_fn = _value_fn(likelihood, output)
        some = _some_draws(draws.flat(), num, seed)
        return _best_of_draws(model, h, some, value_fn, num, int(chunk_size), progress)
    scores: _Scores
    if method == "batch_bald_greedy" and not is_gaussian:
        draws = draw_posterior(model, posterior, num_samples=num_samples, x=first, seed=seed)
        scores = _JointInformation(model, likelihood, draws.flat(), seed)
    else:
        by_draws = method == "bald" and not is_gaussian
        scores = _WeightScores(model, likelihood, posterior, method == "variance")
        scores.num_samples = num_samples if by_draws else 0
    return _greedy(scores, h, num, int(chunk_size), progress)


def _checked_likelihood(model: DAK) -> Likelihood:
    """The likelihood in float64, or an error if what a label tells depends on the label."""
    known = (
        GaussianLikelihood,
        CategoricalLikelihood,
        BernoulliLikelihood,
        PoissonLikelihood,
    )
    if not isinstance(model.likelihood, known):
        names = ", ".join(kind.__name__ for kind in known)
        raise NotImplementedError(
            f"`acquire` knows what a label tells for {names}; got "
            f"{type(model.likelihood).__name__}."
        )
    return with_noise(model.likelihood)


def _unit_inputs(model: DAK, pool: Inputs, chunk_size: int, progress: bool) -> Tensor:
    """h of the pool, `(N, P)`, in float64: the one pass of the network over it."""
    device, parts = model.layer.log_unit_scale.device, []
    with explaining(model, pool), evaluating(model), known_sites(model):
        for chunk in with_bar(split(pool, chunk_size), progress, "acquire"):
            parts.append(model.unit_inputs(to_device(chunk, device)).double())
        h = torch.cat(parts)
        check_finite("unit_inputs", h)
    return h


class _Scores:
    """What each row is worth, given the rows chosen so far."""

    def of(self, h: Tensor) -> Tensor:
        """Scores of rows h `(n, P)`, `(n,)`; they fall as rows are chosen."""
        raise NotImplementedError

    def choose(self, h: Tensor) -> None:
        """Take the label of a row `(1, P)` as known."""
        raise NotImplementedError


def _greedy(scores: _Scores, h: Tensor, num: int, chunk_size: int, progress: bool) -> Tensor:
    """The best row, then the best one given the first, and so on, `(num,)`.

    A score that was computed before the last choice is an upper bound. The row with the largest
    bound is chosen if it is up to date; else it and those behind it are brought up to date.
    """
    parts = [scores.of(part) for part in with_bar(h.split(chunk_size), progress, "acquire")]
    bounds, chosen = torch.cat(parts), []
    is_fresh = torch.ones_like(bounds, dtype=torch.bool)
    for _ in range(num):
        best = int(bounds.argmax())
        while not is_fresh[best]:
            leaders = bounds.topk(min(_BLOCK, len(bounds))).indices
            leaders = leaders[~is_fresh[leaders] & bounds[leaders].isfinite()]
            bounds[leaders] = scores.of(h[leaders])
            is_fresh[leaders] = True
            best = int(bounds.argmax())
        chosen.append(best)
        scores.choose(h[best : best + 1])
        bounds[best] = -torch.inf
        is_fresh.fill_(False)
    return torch.tensor(chosen, device=h.device)


class _WeightScores(_Scores):
    """Scores from the moments of f, with the covariance of the weights given the chosen rows."""

    num_samples = 0  # draws of f for mutual information; 0 for closed forms

    def __init__(self, model: DAK, likelihood: Likelihood, posterior: Posterior, by_variance: bool):
        weights = GaussianWeights.of(posterior, model, with_shift=False)
        self.model, self.likelihood, self.by_variance = model, likelihood, by_variance
        self.loc = weights.loc.double()
        root = weights.root.double()
        self.covariance = root @ root.mT  # (F, K, K)

    def _moments(self, h: Tensor) -> tuple[Tensor, FunctionMoments]:
        design = self.model.layer.design(h)
        var = ((design @ self.covariance) * design).sum(-1).mT.clamp(min=0)  # (n, F)
        return design, FunctionMoments(design @ self.loc.mT, var)

    def of(self, h: Tensor) -> Tensor:
        moments = self._moments(h)[1]
        if self.num_samples > 0:
            return _mutual_information(self.likelihood, moments, self.num_samples)
        share = expected_curvature(self.likelihood, moments) * moments.var
        return (share if self.by_variance else 0.5 * share.log1p()).sum(-1)

    def choose(self, h: Tensor) -> None:
        """S - k S Phi^T Phi S / (1 + k Phi S Phi^T), for each function."""
        design, moments = self._moments(h)
        k = expected_curvature(self.likelihood, moments)
        gain = (k / (1 + k * moments.var)).reshape(-1, 1, 1)
        column = self.covariance @ design.mT  # (F, K, 1)
        self.covariance -= gain * column @ column.mT


def _mutual_information(
    likelihood: Likelihood, moments: FunctionMoments, num_samples: int
) -> Tensor:
    """I(y; f) of each row, `(n,)`; every row has the same standard normals."""
    if isinstance(likelihood, PoissonLikelihood):  # in the Gaussian approximation
        share = expected_curvature(likelihood, moments) * moments.var
        return 0.5 * share.log1p().sum(-1)
    generator = torch.Generator(moments.mean.device).manual_seed(0)
    p = _label_probs(likelihood, sample_marginals(moments, num_samples, generator))
    return (_entropy(p.mean(0)) - _entropy(p).mean(0)).sum(-1)


def _label_probs(likelihood: Likelihood, f: Tensor) -> Tensor:
    """Probabilities of the labels, `(S, n, G, C)`: G = 1 group of C classes, or one of two each."""
    if isinstance(likelihood, CategoricalLikelihood):
        return f.softmax(-1).unsqueeze(-2)
    if isinstance(likelihood, BernoulliLikelihood):
        return torch.stack([(-f).sigmoid(), f.sigmoid()], -1)
    raise NotImplementedError(
        f'Labels of {type(likelihood).__name__} are not among a few; use method="bald".'
    )


def _entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p).sum(-1)


class _JointInformation(_Scores):
    """How much a label adds to what the labels of the batch tell of the weights (BatchBALD).

    I(y; w | labels of the batch) = E_q H(sum_s omega_qs p_s(y)) - mean_s H(p_s(y)), where q counts
    configurations of the labels of the batch, and omega_qs is the posterior of draw s given one of
    them. All configurations are listed while there are few; then they are drawn.
    """

    def __init__(self, model: DAK, likelihood: Likelihood, draws: dict[str, Tensor], seed: int):
        self.model, self.likelihood, self.draws = model, likelihood, draws
        S, like = len(draws["mu"]), draws["mu"]
        self.omega, self.weights = like.new_full((1, S), 1 / S), like.new_ones(1)
        self.generator = torch.Generator(like.device).manual_seed(seed)

    def _probs(self, h: Tensor) -> Tensor:
        """`(S, n, C)`, for one label a row."""
        probs = _label_probs(self.likelihood, draw_functions(self.model, h, self.draws))
        if probs.shape[-2] > 1:
            raise NotImplementedError(
                '`method="batch_bald_greedy"` takes one label a row; use "bald" for several.'
            )
        return probs.squeeze(-2)

    def of(self, h: Tensor) -> Tensor:
        p = self._probs(h)
        S, n, C = p.shape
        given = (self.omega @ p.reshape(S, -1)).reshape(-1, n, C)  # (Q, n, C)
        joint = (self.weights.unsqueeze(-1) * _entropy(given)).sum(0)
        return joint - _entropy(p).mean(0)

    def choose(self, h: Tensor) -> None:
        p = self._probs(h).squeeze(1)  # (S, C)
        given = self.omega @ p  # (Q, C)
        Q, C = given.shape
        if Q * C <= _MAX_CONFIGURATIONS:
            omega = self.omega.unsqueeze(1) * p.mT / given.unsqueeze(-1)  # (Q, C, S)
            self.omega = omega.flatten(0, 1)
            self.weights = (self.weights.unsqueeze(-1) * given).flatten()
            return
        size = _MAX_CONFIGURATIONS
        q = torch.multinomial(self.weights, size, True, generator=self.generator)
        y = torch.multinomial(given[q], 1, generator=self.generator).squeeze(-1)
        self.omega = self.omega[q] * p.mT[y] / given[q, y].unsqueeze(-1)
        self.weights = self.weights.new_full((size,), 1 / size)


def _value_fn(likelihood: Likelihood, output: int) -> Callable[[Tensor], Tensor]:
    """What Thompson sampling maximises, from f `(..., F)`."""
    has_classes = isinstance(likelihood, CategoricalLikelihood)
    return lambda f: (f.log_softmax(-1) if has_classes else f)[..., output]


def _some_draws(draws: dict[str, Tensor], num: int, seed: int) -> dict[str, Tensor]:
    """As many draws as are asked for; of samples that are not as many, some at random."""
    size = len(draws["mu"])
    if size == num:
        return draws
    rows = torch.randint(size, (num,), generator=torch.Generator().manual_seed(seed))
    return {name: value[rows.to(value.device)] for name, value in draws.items()}


def _best_of_draws(
    model: DAK,
    h: Tensor,
    draws: dict[str, Tensor],
    value_fn: Callable[[Tensor], Tensor],
    num: int,
    chunk_size: int,
    progress: bool,
) -> Tensor:
    """For each draw the best row that no draw before it has taken, `(num,)`."""
    size = max(1, min(chunk_size, 4_000_000 // (num * model.num_functions)))
    best = rows = None
    start = 0
    for part in with_bar(h.split(size), progress, "acquire"):
        values = value_fn(draw_functions(model, part, draws))  # (num, n)
        index = torch.arange(start, start + len(part), device=h.device).expand(num, -1)
        start += len(part)
        if best is not None and rows is not None:
            values, index = torch.cat([best, values], -1), torch.cat([rows, index], -1)
        best, order = values.topk(min(num, values.shape[-1]), -1)
        rows = index.gather(-1, order)
    assert rows is not None
    chosen: dict[int, None] = {}
    for row in rows.tolist():
        chosen[next(number for number in row if number not in chosen)] = None
    return torch.tensor([*chosen], device=h.device)
