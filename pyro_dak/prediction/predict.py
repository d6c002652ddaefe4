"""From a posterior to predictions at new inputs, to components, and to functions drawn from it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_dak.additive.gaussian import FunctionMoments, compact, sample_marginals
from pyro_dak.inference.densities import seeded
from pyro_dak.inference.draws import check_draws, draw_sites
from pyro_dak.inference.guides import GaussianGuide
from pyro_dak.inference.guides.base import check_guide
from pyro_dak.model.batches import Unpacking, is_loader
from pyro_dak.model.dak import DAK
from pyro_dak.model.explaining import explaining
from pyro_dak.model.inputs import check_inputs, check_model
from pyro_dak.model.latent_sites import known_sites
from pyro_dak.model.likelihoods import CategoricalLikelihood, Likelihood
from pyro_dak.model.modes import evaluating, own_precision, with_own_tensors
from pyro_dak.model.rows import (
    Inputs,
    blank_rows,
    device_of,
    num_rows,
    split,
    take,
    to_device,
)
from pyro_dak.prediction.freeze import freeze_with_features
from pyro_dak.prediction.rescaling import rescaled_likelihood, rescaled_moments
from pyro_dak.prediction.results import ClassPrediction, Components, Prediction, concatenated
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
    x: Any,
    *,
    method: Literal["mc", "probit"] = "mc",
    num_samples: int = 100,
    residual_variance: bool = False,
    seed: int | None = None,
    chunk_size: int = 8192,
    compile: bool = False,
    novelty: bool = True,
    progress: bool = True,
    target: str | None = None,
    unpack: Callable[[Any], Any] | None = None,
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
        x: inputs, `(N, ...)`, floating ones in the dtype of the model: a tensor, or a tuple or
            dictionary of tensors, which the network gets as its arguments. Or a loader of them,
            also one that `fit` takes: a batch is x, or a pair (x, y) whose y is not looked at. The
            predictions of all batches are joined, in the order in which they come.
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
        target: for a loader of dictionaries, the entry that is y and not x.
        unpack: for a loader of other batches, a function from a batch to (x, y).
    """
    if is_loader(x):
        of_batch = partial(
            predict,
            model,
            guide,
            method=method,
            num_samples=num_samples,
            residual_variance=residual_variance,
            seed=seed,
            chunk_size=chunk_size,
            compile=compile,
            novelty=novelty,
            progress=False,
        )
        unpacking = Unpacking(target, unpack)
        return concatenated([of_batch(unpacking.inputs(b)) for b in with_bar(x, progress)])
    if target is not None:
        x = Unpacking(target).inputs(x)
    check_choice("method", method, ("mc", "probit"))
    check_integer("num_samples", num_samples, minimum=1)
    check_integer("chunk_size", chunk_size, minimum=1)
    check_seed("seed", seed)
    seed = 0 if seed is None else int(seed)
    check_inputs(model, x)
    check_guide(model, guide)
    device, own_device = model.layer.log_unit_scale.device, device_of(x)
    likelihood: Likelihood = with_own_tensors(model.likelihood, own_device)
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
        for chunk in with_bar(split(x, int(chunk_size)), progress):
            as_trained, features = moments_at(to_device(chunk, device))
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
            parts.append([part.to(own_device) for part in results])
            if features is not None:
                with own_precision(features):  # mixed precision is for the network
                    scores = [model.novelty.leverage(features)]
                if has_classes:  # a temperature is not to change what is strange
                    log_probs = results[0]
                    if number is not None:
                        draws = None if draws is None else draws * number
                        log_probs = own.class_probabilities(as_trained, draws)[0]
                    scores.append(torch.special.entr(log_probs.exp()).sum(-1))
                strange.append([score.to(own_device) for score in scores])
        joined = [torch.cat(part) for part in zip(*parts, strict=True)]
        model.remember_inputs(x)
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
    x: Inputs,
    *,
    num_samples: int,
    residual_variance: bool,
    seed: int,
    compile: bool = False,
    with_features: bool = False,
) -> Iterator[Callable[[Inputs], tuple[FunctionMoments, Tensor | None]]]:
    """A context with q(f) as a function of rows of x, as they are without calibration.

    With `with_features`, what `model.features` returns comes with it, else None. Guides without a
    closed form are known by `num_samples` draws from `seed`.
    """
    sites, device = None, model.layer.log_unit_scale.device
    if not getattr(guide, "has_closed_form", False):
        with explaining(model, x, guide=guide), evaluating(model, guide), seeded(seed):
            sites = draw_sites(guide, num_samples, to_device(take(x, slice(1)), device))
        check_draws(model, sites)
    with explaining(model, x, guide=guide), evaluating(model, guide), known_sites(model):
        yield freeze_with_features(
            model,
            guide,
            sites,
            residual_variance,
            num_rows=num_rows(x),
            compile=compile,
            with_features=with_features,
        )


def components(
    model: DAK, guide: GaussianGuide, x: Inputs, *, chunk_size: int = 1024, progress: bool = True
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
        for chunk in with_bar(split(x, int(chunk_size)), progress):
            h = model.unit_inputs(to_device(chunk, model.layer.log_unit_scale.device))
            mean = model.layer.component_means(h, guide.weight_means())
            var = model.layer.component_variances(h, *roots)
            parts.append(tuple(part.to(device_of(x)) for part in (mean, var, h)))
        result = Components(*(torch.cat(part) for part in zip(*parts, strict=True)))
        check_finite("unit_inputs", result.unit_inputs)
        check_finite("mean and variance of the components", result.mean + result.variance)
    return result


class FunctionDraws(Sequence[Callable[[Inputs], Tensor]]):
    """Functions drawn from a posterior: `draws(x)` is `(S, N, F)`, `draws[i](x)` is `(N, F)`."""

    def __init__(self, model: DAK, sites: dict[str, Tensor]):
        self.model, self.sites = model, sites

    def __len__(self) -> int:
        return len(self.sites["z"])

    def __call__(self, x: Inputs) -> Tensor:
        check_inputs(self.model, x)
        with (
            explaining(self.model, x),
            evaluating(self.model),
            known_sites(self.model, for_y=False),
        ):
            h = self.model.unit_inputs(x)
            check_finite("unit_inputs", h)
            f = self.model.functions(h, self.sites)
            check_finite("f", f)
        return f

    def __getitem__(self, index: int) -> "Callable[[Inputs], Tensor]":  # type: ignore[override]
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
    x = None if shape is None else blank_rows(shape, 1, model.layer.log_unit_scale)
    with explaining(model, guide=guide), evaluating(model, guide):
        sites = draw_sites(guide, num_samples, x)
    check_draws(model, sites)
    return FunctionDraws(model, sites)


def with_bar(chunks: Iterable[Any], progress: bool, name: str = "predict") -> Iterable[Any]:
    """The chunks, behind a bar that shows after two seconds."""
    return tqdm(chunks, desc=name, delay=2.0, leave=False) if progress else chunks
