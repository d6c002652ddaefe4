"""From a posterior to predictions at new inputs, to components, and to functions drawn from it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_dak.additive.gaussian import FunctionMoments, sample_marginals
from pyro_dak.inference.draws import draw_sites
from pyro_dak.inference.guides import GaussianGuide
from pyro_dak.model.dak import DAK
from pyro_dak.model.likelihoods import CategoricalLikelihood, Likelihood
from pyro_dak.model.modes import evaluating, with_own_tensors
from pyro_dak.prediction.freeze import freeze
from pyro_dak.prediction.results import ClassPrediction, Components, Prediction
from pyro_dak.validation import check_choice, check_finite, check_floating, check_integer

__all__ = ["FunctionDraws", "components", "predict", "sample_functions"]


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
    has_classes = isinstance(likelihood, CategoricalLikelihood)
    needs_draws = has_classes and method == "mc"
    parts: list[list[Tensor]] = []
    with evaluating(model, guide):
        sites = None
        if not getattr(guide, "has_closed_form", False):
            with torch.random.fork_rng(enabled=seed is not None):
                if seed is not None:
                    torch.manual_seed(seed)
                sites = draw_sites(guide, num_samples, x[:1].to(device))
        seed = int(torch.randint(2**31, ())) if needs_draws and seed is None else seed
        moments_at = freeze(
            model, guide, sites, residual_variance, num_rows=len(x), compile=compile
        )
        model.input_shape = model.input_shape or tuple(x.shape[1:])
        own: Any = model.likelihood
        for chunk in _with_bar(x.split(chunk_size), progress):
            q = moments_at(chunk.to(device))
            if has_classes:
                draws = None
                if needs_draws:
                    generator = torch.Generator(device).manual_seed(seed or 0)
                    draws = sample_marginals(q, num_samples, generator)
                results: tuple[Tensor, ...] = own.class_probabilities(q, draws)
            else:
                results = own.predictive_moments(q)
            parts.append([part.to(x.device) for part in (*results, q.mean, q.var)])
    joined = [torch.cat(part) for part in zip(*parts, strict=True)]
    functions = FunctionMoments(joined[-2], joined[-1])
    if has_classes:
        return ClassPrediction(joined[0], joined[1], functions)
    return Prediction(joined[0], joined[1], joined[2], functions, likelihood)


def components(
    model: DAK, guide: GaussianGuide, x: Tensor, *, chunk_size: int = 1024, progress: bool = True
) -> Components:
    """What each unit adds to f at x: mean and variance of sigma_p g_p(h_p), for Gaussian guides."""
    if not getattr(guide, "has_closed_form", False):
        raise NotImplementedError(
            f"Components need a Gaussian guide of pyro_dak and no shrinkage; got "
            f"{type(guide).__name__}. Use sample_functions instead."
        )
    _check_inputs(model, x)
    parts = []
    with evaluating(model, guide):
        roots = guide.unit_roots()
        for chunk in _with_bar(x.split(chunk_size), progress):
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


def _with_bar(chunks: Sequence[Tensor], progress: bool) -> Iterable[Tensor]:
    """The chunks, behind a bar that shows after two seconds."""
    return tqdm(chunks, desc="predict", delay=2.0, leave=False) if progress else chunks
