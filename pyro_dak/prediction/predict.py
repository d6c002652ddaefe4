"""From a posterior to predictions: means, variances, intervals, class probabilities, components."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_dak.additive.gaussian import FunctionMoments, sample_marginals
from pyro_dak.fast.compiling import Compiled
from pyro_dak.inference.draws import draw_sites, has_closed_form
from pyro_dak.inference.guides.base import GaussianGuide
from pyro_dak.model.dak import DAK
from pyro_dak.model.likelihoods import (
    CategoricalLikelihood,
    GaussianLikelihood,
    HeteroscedasticLikelihood,
    Likelihood,
)
from pyro_dak.model.modes import evaluating, with_own_tensors
from pyro_dak.validation import check_choice, check_finite, check_floating, check_integer

__all__ = [
    "ClassPrediction",
    "Components",
    "FunctionDraws",
    "Prediction",
    "components",
    "function_moments",
    "predict",
    "sample_functions",
]


@dataclass(frozen=True)
class Prediction:
    """What is known of y at new inputs; all tensors `(N, C)`.

    `mean` is E y. The variance splits into `epistemic`, what more data could remove, and
    `aleatoric`, the noise. `functions` is the Gaussian q(f), output by output: covariance between
    outputs, which some guides have, is left out of `sample` and `log_prob`.
    """

    mean: Tensor
    epistemic: Tensor
    aleatoric: Tensor
    functions: FunctionMoments
    likelihood: Likelihood

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
        other likelihoods take it from `num_samples` draws.
        """
        if not 0 < q < 1:
            raise ValueError(f"`q` must lie strictly between 0 and 1; got {q}.")
        if isinstance(self.likelihood, GaussianLikelihood | HeteroscedasticLikelihood):
            return (
                self.mean + math.sqrt(2) * torch.erfinv(self.mean.new_tensor(2 * q - 1)) * self.std
            )
        return self.sample(num_samples).quantile(q, 0)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Lower and upper end of the central interval with probability `level`."""
        if not 0 < level < 1:
            raise ValueError(f"`level` must lie strictly between 0 and 1; got {level}.")
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def sample(self, num_samples: int) -> Tensor:
        """Draws of y, `(S, N, C)`, independent over rows."""
        check_integer("num_samples", num_samples, minimum=1)
        with torch.no_grad():
            f = sample_marginals(self.functions, num_samples)
            return self.likelihood.distribution(f).sample()

    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y) of each row under the predictive distribution, `(N,)`, in nats."""
        y = self.likelihood.check_targets(y, self.mean.shape[-1])
        _check_rows(y, self.mean)
        with torch.no_grad():
            return self.likelihood.predictive_log_prob(y, self.functions)


@dataclass(frozen=True)
class ClassPrediction:
    """Class probabilities `(N, C)`, as logarithms, and how sure they are."""

    log_probs: Tensor
    expected_entropy: Tensor
    functions: FunctionMoments

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
        return torch.distributions.Categorical(probs=self.probs).sample((num_samples,))

    def log_prob(self, y: Tensor) -> Tensor:
        """log probability of the labels y `(N,)`."""
        likelihood = CategoricalLikelihood()
        y = likelihood.check_targets(y, self.log_probs.shape[-1])
        likelihood.check_values(y, self.log_probs.shape[-1])
        _check_rows(y, self.log_probs)
        return self.log_probs.gather(-1, y.unsqueeze(-1)).squeeze(-1)


class Components(NamedTuple):
    """Share of every unit in each function, mean and variance `(N, F, P)`; its input `(N, P)`."""

    mean: Tensor
    variance: Tensor
    unit_inputs: Tensor


def function_moments(
    model: DAK,
    guide: nn.Module,
    sites: dict[str, Tensor] | None = None,
    residual_variance: bool = False,
) -> Callable[[Tensor], FunctionMoments]:
    """q(f) as a function of unit inputs h `(N, P)`: exact for a `GaussianGuide` without shrinkage.

    For any other guide mean and covariance are those over `sites`, draws of all sites. For many
    calls with the same q; do not ask for gradients.
    """
    if has_closed_form(guide, model):
        of_weights = guide.fixed_moments(model.layer)
    else:
        assert sites is not None
        of_weights = partial(_moments_of_draws, model, sites)
    if not residual_variance:
        return of_weights
    residual = model.fixed_residual_variance(model.layer.log_unit_scale)

    def moments(h: Tensor) -> FunctionMoments:
        q = of_weights(h)
        return q._replace(var=q.var + residual(h))

    return moments


def _moments_of_draws(model: DAK, sites: dict[str, Tensor], h: Tensor) -> FunctionMoments:
    f = model.functions(h, sites)  # (S, N, F)
    mean = f.mean(0)
    root = (f - mean) / math.sqrt(max(len(f) - 1, 1))
    return FunctionMoments(mean, root.square().sum(0), root)


def predict(
    model: DAK,
    guide: nn.Module,
    x: Tensor,
    *,
    method: Literal["mc", "probit"] = "mc",
    num_samples: int = 100,
    residual_variance: bool = False,
    seed: int | None = None,
    chunk_size: int = 8192,
    compile: bool = False,
    progress: bool = True,
) -> Prediction | ClassPrediction:
    """Predictive distribution at new inputs.

    Each row is predicted by itself, in eval mode and without gradients: with the same seed it gets
    the same prediction, up to rounding, whatever rows are beside it. Features are computed once per
    row, and rows stream through in chunks, so that memory beyond the result is bounded.

    Args:
        model: the model.
        guide: a guide of this library or any Pyro guide of the model's sites.
        x: inputs, `(N, ...)`, in the dtype of the model.
        method: for classes, "mc" averages probabilities over draws of f, "probit" samples nothing.
        num_samples: draws of f for "mc"; draws of the weights for guides without closed form.
        residual_variance: add the prior variance that the grid loses between and outside its nodes,
            so that far from the data the uncertainty returns to the prior's.
        seed: of the draws, where there are any; by default from torch's global state.
        chunk_size: rows at a time; few thousands fit the cache of a processor.
        compile: compile network and last layer: ten seconds at the first call for a model, then
            faster ones; goes on without, with a warning, where that fails.
        progress: show a bar if it takes more than two seconds.
    """
    check_choice("method", method, ("mc", "probit"))
    check_integer("num_samples", num_samples, minimum=1)
    check_integer("chunk_size", chunk_size, minimum=1)
    _check_inputs(model, x)
    device = model.layer.log_unit_scale.device
    likelihood: Likelihood = with_own_tensors(model.likelihood, x.device)
    needs_draws = method == "mc" if isinstance(likelihood, CategoricalLikelihood) else False
    parts: list[tuple[Tensor, ...]] = []
    with evaluating(model, guide):
        sites = None
        if not has_closed_form(guide, model):
            with _seeded(seed):
                sites = draw_sites(guide, num_samples, x[:1].to(device))
        seed = int(torch.randint(2**31, ())) if needs_draws and seed is None else seed
        moments = function_moments(model, guide, sites, residual_variance)
        unit_inputs = model.fixed_unit_inputs(len(x))
        model.input_shape = model.input_shape or tuple(x.shape[1:])
        moments_at = _compiled_moments(model) if compile else _moments_at
        for chunk in _chunks(x, chunk_size, progress):
            q = moments_at(chunk.to(device), unit_inputs, moments)
            if isinstance(model.likelihood, CategoricalLikelihood):
                draws = None
                if needs_draws:
                    generator = torch.Generator(device).manual_seed(seed or 0)
                    draws = sample_marginals(q, num_samples, generator)
                results: tuple[Tensor, ...] = model.likelihood.class_probabilities(q, draws)
            else:
                results = model.likelihood.predictive_moments(q)
            parts.append(tuple(part.to(x.device) for part in (*results, q.mean, q.var)))
    joined = [torch.cat(part) for part in zip(*parts, strict=True)]
    functions = FunctionMoments(joined[-2], joined[-1])
    if isinstance(likelihood, CategoricalLikelihood):
        return ClassPrediction(joined[0], joined[1], functions)
    return Prediction(joined[0], joined[1], joined[2], functions, likelihood)


def _moments_at(
    x: Tensor,
    unit_inputs: Callable[[Tensor], Tensor],
    moments: Callable[[Tensor], FunctionMoments],
) -> FunctionMoments:
    return moments(unit_inputs(x))


_COMPILED: WeakKeyDictionary[DAK, Compiled] = WeakKeyDictionary()


def _compiled_moments(model: DAK) -> Compiled:
    """`_moments_at` for the inputs of this model, for any number of rows."""
    if model not in _COMPILED:
        _COMPILED[model] = Compiled(_moments_at, dynamic=True)
    return _COMPILED[model]


def components(
    model: DAK, guide: GaussianGuide, x: Tensor, *, chunk_size: int = 1024, progress: bool = True
) -> Components:
    """What each unit adds to f at x: mean and variance of sigma_p g_p(h_p), for Gaussian guides."""
    if not isinstance(guide, GaussianGuide) or model.has_shrinkage:
        raise NotImplementedError(
            f"Components need a Gaussian guide of pyro_dak and no shrinkage; got "
            f"{type(guide).__name__}. Use sample_functions instead."
        )
    _check_inputs(model, x)
    parts = []
    with evaluating(model, guide):
        roots = guide.unit_roots()
        for chunk in _chunks(x, chunk_size, progress):
            h = model.unit_inputs(chunk.to(model.layer.log_unit_scale.device))
            mean = model.layer.component_means(h, guide.weight_means())
            var = model.layer.component_variances(h, *roots)
            parts.append(tuple(part.to(x.device) for part in (mean, var, h)))
    return Components(*(torch.cat(part) for part in zip(*parts, strict=True)))


class FunctionDraws(Sequence[Callable[[Tensor], Tensor]]):
    """Functions drawn from a posterior: `draws(x)` is `(S, N, F)`, `draws[i](x)` is `(N, F)`."""

    def __init__(self, model: DAK, sites: dict[str, Tensor]):
        self.model, self.sites = model, sites

    def __len__(self) -> int:
        return len(self.sites["z"])

    def __call__(self, x: Tensor) -> Tensor:
        _check_inputs(self.model, x)
        with evaluating(self.model):
            return self.model.functions(self.model.unit_inputs(x), self.sites)

    def __getitem__(self, index: int) -> "Callable[[Tensor], Tensor]":  # type: ignore[override]
        one = {name: value[index] for name, value in self.sites.items()}
        return FunctionDraws(self.model, one)


def sample_functions(model: DAK, guide: nn.Module, num_samples: int) -> FunctionDraws:
    """Functions drawn from the posterior: a draw of the weights is a whole function of x."""
    check_integer("num_samples", num_samples, minimum=1)
    shape = model.input_shape
    like = model.layer.log_unit_scale
    x = None if shape is None else torch.zeros(1, *shape, dtype=like.dtype, device=like.device)
    with evaluating(model, guide):
        return FunctionDraws(model, draw_sites(guide, num_samples, x))


def _check_rows(y: Tensor, like: Tensor) -> None:
    if len(y) != len(like):
        raise ValueError(f"`y` must have {len(like)} rows, as the prediction has; got {len(y)}.")


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """torch's global random state from `seed` on inside, if given."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def _check_inputs(model: DAK, x: Tensor) -> None:
    check_floating("x", x)
    if x.dim() < 2 or len(x) == 0:
        raise ValueError(
            f"`x` must have at least one row and one feature, (N, ...); got {tuple(x.shape)}."
        )
    dtype = model.layer.log_unit_scale.dtype
    if x.dtype != dtype:
        raise TypeError(
            f"`x` must have the dtype of the model, {dtype}; got {x.dtype}. Convert it."
        )
    check_finite("x", x)


def _chunks(x: Tensor, chunk_size: int, progress: bool) -> Iterator[Tensor]:
    starts = range(0, len(x), chunk_size)
    for start in tqdm(starts, desc="predict", delay=2.0, leave=False) if progress else starts:
        yield x[start : start + chunk_size]
