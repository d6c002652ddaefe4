"""From a posterior to predictions at new inputs, to components, and to functions drawn from it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_dak.additive.gaussian import FunctionMoments, compact, sample_marginals
from pyro_dak.inference.densities import seeded
from pyro_dak.inference.draws import check_draws, draw_sites
from pyro_dak.inference.guides import GaussianGuide
from pyro_dak.inference.guides.base import check_guide
from pyro_dak.model.dak import DAK
from pyro_dak.model.explaining import explaining
from pyro_dak.model.inputs import check_inputs, check_model
from pyro_dak.model.latent_sites import known_sites
from pyro_dak.model.likelihoods import CategoricalLikelihood, Likelihood
from pyro_dak.model.modes import evaluating, own_precision, with_own_tensors
from pyro_dak.prediction.freeze import freeze_with_features
from pyro_dak.prediction.rescaling import rescaled_likelihood, rescaled_moments
from pyro_dak.prediction.results import ClassPrediction, Components, Prediction
from pyro_dak.validation import check_choice, check_finite, check_integer, check_seed

__all__ = [
    "FunctionDraws",
    "components",
    "frozen_functions",
    "predict",
    "sample_functions",
    "with_bar",
]


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
    novelty: bool = True,
    progress: bool = True,
) -> Prediction | ClassPrediction:
    """Predictive distribution at new inputs.

    Each row is predicted by itself, in eval mode and without gradients: it gets the same prediction
    at every call, up to rounding, whatever rows are beside it. Where draws are needed, they come
    from `seed`, and torch's global random state stays as it is. Features are computed once per row,
    and rows stream through in chunks, so that memory beyond the result is bounded. Threads may
    share model and guide; those that draw from a guide of Pyro wait for each other. A model that
    was calibrated (see `calibrate`) predicts with the number that was found.

    Args:
        guide: a guide of this library or any Pyro guide of the model's sites.
        x: inputs, `(N, ...)`, in the dtype of the model.
        method: for classes, "mc" averages probabilities over draws of f, "probit" samples nothing.
        num_samples: draws of f for "mc"; draws of the weights for guides without closed form.
        residual_variance: add the prior variance that the grid loses between and outside its nodes,
            so that far from the data the uncertainty returns to the prior's.
        seed: of the draws, where there are any; None is 0. Another seed gives other draws.
        chunk_size: rows at a time; few thousands fit the cache of a processor.
        compile: compile network and last layer: ten seconds at the first call for a model, then
            faster ones; goes on without, with a warning, where that fails.
        novelty: say how strange each row is, if the model has learned that (`learn_novelty`). It
            takes about (1 + 3 D_w)^2 multiplications a row, which a small network notices.
        progress: show a bar if it takes more than two seconds.
    """
    check_choice("method", method, ("mc", "probit"))
    check_integer("num_samples", num_samples, minimum=1)
    check_integer("chunk_size", chunk_size, minimum=1)
    check_seed("seed", seed)
    seed = 0 if seed is None else int(seed)
    check_inputs(model, x)
    check_guide(model, guide)
    device = model.layer.log_unit_scale.device
    likelihood: Likelihood = with_own_tensors(model.likelihood, x.device)
    has_classes = isinstance(likelihood, CategoricalLikelihood)
    needs_draws = has_classes and method == "mc"
    own: Any = model.likelihood
    number = None if model.calibration is None else float(model.calibration)
    if number is not None:
        likelihood, own = (rescaled_likelihood(part, number) for part in (likelihood, own))
    parts: list[list[Tensor]] = []
    has_novelty = bool(novelty) and model.novelty is not None
    strange: list[list[Tensor]] = []
    options: dict[str, Any] = {"num_samples": num_samples, "seed": seed, "compile": compile}
    with frozen_functions(
        model,
        guide,
        x,
        residual_variance=residual_variance,
        with_features=has_novelty,
        **options,
    ) as moments_at:
        for chunk in with_bar(x.split(int(chunk_size)), progress):
            as_trained, features = moments_at(chunk.to(device))
            q = as_trained if number is None else rescaled_moments(own, as_trained, number)
            if has_classes:
                draws = None
                if needs_draws:
                    generator = torch.Generator(device).manual_seed(seed)
                    draws = sample_marginals(q, num_samples, generator)
                results: tuple[Tensor, ...] = (*own.class_probabilities(q, draws), *q[:2])
            else:
                q = compact(q)
                results = (*own.predictive_moments(q), *q[:2])
                results += () if q.root is None else (q.root.movedim(0, -2),)
            parts.append([part.to(x.device) for part in results])
            if features is not None:
                with own_precision(features):  # mixed precision is for the network
                    scores = [model.novelty.leverage(features)]
                if has_classes:  # a temperature is not to change what is strange
                    log_probs = results[0]
                    if number is not None:
                        draws = None if draws is None else draws * number
                        log_probs = own.class_probabilities(as_trained, draws)[0]
                    scores.append(torch.special.entr(log_probs.exp()).sum(-1))
                strange.append([score.to(x.device) for score in scores])
        joined = [torch.cat(part) for part in zip(*parts, strict=True)]
        model.input_shape = model.input_shape or tuple(x.shape[1:])
        check_finite("mean and variance of f", torch.add(*joined[3 - has_classes :][:2]))
    found = None
    if has_novelty:
        found = model.novelty.tails.scores(*map(torch.cat, zip(*strange, strict=True)))
    if has_classes:
        return ClassPrediction(joined[0], joined[1], FunctionMoments(*joined[2:]), found)
    mean, epistemic, aleatoric, *functions = joined
    functions[2:] = [root.movedim(-2, 0) for root in functions[2:]]
    return Prediction(mean, epistemic, aleatoric, FunctionMoments(*functions), likelihood, found)


@contextmanager
def frozen_functions(
    model: DAK,
    guide: nn.Module,
    x: Tensor,
    *,
    num_samples: int,
    residual_variance: bool,
    seed: int,
    compile: bool = False,
    with_features: bool = False,
) -> Iterator[Callable[[Tensor], tuple[FunctionMoments, Tensor | None]]]:
    """A context with q(f) as a function of rows of x, as they are without calibration.

    With `with_features`, what `model.features` returns comes with it, else None. Guides without a
    closed form are known by `num_samples` draws from `seed`.
    """
    sites, device = None, model.layer.log_unit_scale.device
    if not getattr(guide, "has_closed_form", False):
        with explaining(model, x, guide=guide), evaluating(model, guide), seeded(seed):
            sites = draw_sites(guide, num_samples, x[:1].to(device))
        check_draws(model, sites)
    with explaining(model, x, guide=guide), evaluating(model, guide), known_sites(model):
        yield freeze_with_features(
            model,
            guide,
            sites,
            residual_variance,
            num_rows=len(x),
            compile=compile,
            with_features=with_features,
        )


def components(
    model: DAK, guide: GaussianGuide, x: Tensor, *, chunk_size: int = 1024, progress: bool = True
) -> Components:
    """What each unit adds to f at x: mean and variance of sigma_p g_p(h_p), for Gaussian guides."""
    if not getattr(guide, "has_closed_form", False):
        raise NotImplementedError(
            f"Components need a Gaussian guide of pyro_dak and no shrinkage; got "
            f"{type(guide).__name__}. Use sample_functions instead."
        )
    check_integer("chunk_size", chunk_size, minimum=1)
    check_inputs(model, x)
    check_guide(model, guide)
    parts = []
    with (
        explaining(model, x, guide=guide),
        evaluating(model, guide),
        known_sites(model, for_y=False),
    ):
        roots = guide.unit_roots()
        for chunk in with_bar(x.split(int(chunk_size)), progress):
            h = model.unit_inputs(chunk.to(model.layer.log_unit_scale.device))
            mean = model.layer.component_means(h, guide.weight_means())
            var = model.layer.component_variances(h, *roots)
            parts.append(tuple(part.to(x.device) for part in (mean, var, h)))
        result = Components(*(torch.cat(part) for part in zip(*parts, strict=True)))
        check_finite("unit_inputs", result.unit_inputs)
        check_finite("mean and variance of the components", result.mean + result.variance)
    return result


class FunctionDraws(Sequence[Callable[[Tensor], Tensor]]):
    """Functions drawn from a posterior: `draws(x)` is `(S, N, F)`, `draws[i](x)` is `(N, F)`.

    Values have gradients in x if x asks for them. Inputs may have a batch in front, `(*b, N, ...)`,
    if the model knows the shape of a row; values are then `(S, *b, N, F)`.
    """

    def __init__(self, model: DAK, sites: dict[str, Tensor]):
        self.model, self.sites = model, sites

    def __len__(self) -> int:
        return len(self.sites["z"])

    def __call__(self, x: Tensor) -> Tensor:
        check_inputs(self.model, x)
        shape = self.model.input_shape or tuple(x.shape[1:])
        batch = x.shape[: max(1, x.dim() - len(shape))]  # (*b, N)
        x = x.reshape(-1, *x.shape[len(batch) :])
        has_gradients = torch.is_grad_enabled() and x.requires_grad
        with (
            explaining(self.model, x),
            evaluating(self.model),
            known_sites(self.model, for_y=False),
            torch.set_grad_enabled(has_gradients),
        ):
            h = self.model.unit_inputs(x)
            check_finite("unit_inputs", h)
            f = self.model.functions(h, self.sites)
            check_finite("f", f)
        return f.unflatten(-2, batch)

    def __getitem__(self, index: int) -> "Callable[[Tensor], Tensor]":  # type: ignore[override]
        if not isinstance(index, slice):
            check_integer("index", index, minimum=-(2**63))
            if not -len(self) <= index < len(self):
                raise IndexError(f"`index` must count one of {len(self)} draws; got {index}.")
        one = {name: value[index] for name, value in self.sites.items()}
        return FunctionDraws(self.model, one)


def sample_functions(model: DAK, guide: nn.Module, num_samples: int) -> FunctionDraws:
    """Functions drawn from the posterior: a draw of the weights is a whole function of x."""
    check_model(model)
    check_guide(model, guide)
    check_integer("num_samples", num_samples, minimum=1)
    shape = model.input_shape
    like = model.layer.log_unit_scale
    x = None if shape is None else torch.zeros(1, *shape, dtype=like.dtype, device=like.device)
    with explaining(model, guide=guide), evaluating(model, guide):
        sites = draw_sites(guide, num_samples, x)
    check_draws(model, sites)
    return FunctionDraws(model, sites)


def with_bar(chunks: Sequence[Tensor], progress: bool, name: str = "predict") -> Iterable[Tensor]:
    """The chunks, behind a bar that shows after two seconds."""
    return tqdm(chunks, desc=name, delay=2.0, leave=False) if progress else chunks
