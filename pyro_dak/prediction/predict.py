"""From a posterior to predictions at new inputs, to components, and to functions drawn from it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_dak.additive.gaussian import (
    FunctionMoments,
    compact,
    draws_of_moments,
    moments_of_draws,
    sample_marginals,
)
from pyro_dak.additive.layer import Weights
from pyro_dak.inference.densities import draw_functions, likelihood_parameters, seeded
from pyro_dak.inference.draws import Posterior, draw_posterior, resolve_posterior
from pyro_dak.inference.guides import GaussianGuide
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
    row_shape,
    split,
    to_device,
)
from pyro_dak.prediction.freeze import freeze_with_features
from pyro_dak.prediction.rescaling import rescaled_likelihood, rescaled_moments
from pyro_dak.prediction.results import (
    ClassPrediction,
    Components,
    MixturePrediction,
    Prediction,
    concatenated,
    mixture_moments,
    place,
)
from pyro_dak.validation import check_choice, check_finite, check_integer, check_seed

__all__ = [
    "FrozenFunctions",
    "FunctionDraws",
    "components",
    "frozen_functions",
    "predict",
    "sample_functions",
    "with_bar",
]

# So many values of f are computed at a time from draws.
_MAX_ELEMENTS = 2**24


def predict(
    model: DAK,
    posterior: Posterior,
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

    Any posterior predicts. Gaussian guides of this library and the exact posterior know q(f) in
    closed form. All others are known by draws of their sites: mean and covariance of f are those
    over the draws, and with "mc" class probabilities are averages over the draws themselves. Draws
    are cast to the dtype of the model and moved to its device. If they hold parameters of the
    likelihood too, such as `noise_scale`, the prediction is the mixture of p(y | f, parameters)
    over the draws, a `MixturePrediction`.

    Args:
        posterior: a guide of this library, any Pyro guide of the model's sites, an exact posterior,
            a run of `run_nuts` or of Pyro's `MCMC`, or a dictionary of draws by site, tensors or
            arrays `(S, *event)` or `(chains, S, *event)`.
        x: inputs, `(N, ...)`, floating ones in the dtype of the model: a tensor, or a tuple or
            dictionary of tensors, which the network gets as its arguments. Or a loader of them,
            also one that `fit` takes: a batch is x, or a pair (x, y) whose y is not looked at. The
            predictions of all batches are joined, in the order in which they come.
        method: for classes, "mc" averages probabilities over draws of f, "probit" samples nothing.
        num_samples: draws of f for "mc"; draws of the weights for guides without closed form. Of
            a posterior that is a set of draws, all are used.
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
            posterior,
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
    device, own_device = model.layer.log_unit_scale.device, device_of(x)
    own: Any = model.likelihood
    likelihood: Likelihood = with_own_tensors(own, own_device)
    has_classes = isinstance(likelihood, CategoricalLikelihood)
    needs_draws = has_classes and method == "mc"
    calibration = model.calibration
    number = None if calibration is None else float(calibration)
    if number is not None:
        likelihood, own = (rescaled_likelihood(part, number) for part in (likelihood, own))
    parts: list[list[Tensor]] = []
    has_novelty = bool(novelty) and model.novelty is not None
    strange: list[list[Tensor]] = []
    options: dict[str, Any] = {"num_samples": num_samples, "seed": seed, "compile": compile}
    with frozen_functions(
        model,
        posterior,
        x,
        residual_variance=residual_variance,
        with_features=has_novelty,
        **options,
    ) as frozen:
        parameters = frozen.parameters
        is_mixture = bool(parameters)
        if number is not None:
            frozen.refuse_calibration()
        for chunk in with_bar(split(x, frozen.num_rows(int(chunk_size))), progress):
            as_trained, features = frozen(to_device(chunk, device))
            q = as_trained if number is None else rescaled_moments(own, as_trained, number)
            if has_classes:
                draws = None
                if needs_draws:
                    draws = frozen.draws(q, num_samples, seed)
                results: tuple[Tensor, ...] = (*own.class_probabilities(q, draws), *q[:2])
            else:
                q = q if is_mixture else compact(q)
                if is_mixture:
                    f = frozen.draws(q, num_samples, seed)
                    q = moments_of_draws(f)
                    results = (*mixture_moments(own, f, parameters), *q[:2])
                else:
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
        if model.input_shape is None:
            model.input_shape = row_shape(x)
        check_finite("mean and variance of f", torch.add(*joined[3 - has_classes :][:2]))
    found = None
    if has_novelty:
        found = model.novelty.tails.scores(*map(torch.cat, zip(*strange, strict=True)))
    if has_classes:
        return ClassPrediction(joined[0], joined[1], FunctionMoments(*joined[2:]), found)
    mean, epistemic, aleatoric, *functions = joined
    functions[2:] = [root.movedim(-2, 0) for root in functions[2:]]
    parts_of_y = (mean, epistemic, aleatoric, FunctionMoments(*functions), likelihood, found)
    if not is_mixture:
        return Prediction(*parts_of_y)
    return MixturePrediction(*parts_of_y, {n: v.to(own_device) for n, v in parameters.items()})


class FrozenFunctions:
    """q(f) of a posterior as a function of rows of x, and draws from it.

    Args:
        moments_at: gives q(f), and the features or None, at rows of x.
        sites: draws of all sites, `(S, *event)`, or None if q(f) is known in closed form.
        has_residuals: whether q(f) has variance beside that of the draws.
        parameters: draws of what `distribution` of the likelihood takes beside f, `(S, 1, ...)`.
    """

    def __init__(
        self,
        moments_at: Callable[[Inputs], tuple[FunctionMoments, Tensor | None]],
        sites: Mapping[str, Tensor] | None,
        has_residuals: bool,
        parameters: Mapping[str, Tensor],
    ):
        self._moments_at, self._sites, self._has_residuals = moments_at, sites, has_residuals
        self.parameters = parameters

    def __call__(self, x: Inputs) -> tuple[FunctionMoments, Tensor | None]:
        return self._moments_at(x)

    @property
    def num_draws(self) -> int | None:
        """S, or None if q(f) is known in closed form."""
        return None if self._sites is None else len(self._sites["mu"])

    def num_rows(self, chunk_size: int) -> int:
        """How many rows to take at a time, at most `chunk_size`."""
        if self._sites is None:
            return chunk_size
        return max(1, min(chunk_size, _MAX_ELEMENTS // self._sites["mu"].numel()))

    def draws(self, q: FunctionMoments, num_samples: int, seed: int) -> Tensor:
        """Draws of f from moments that this has returned, `(S, N, F)`: the posterior's own, if any.

        Where they come from a closed form, or residual variance is added to them, all rows share
        the standard normals of the seed.
        """
        generator = torch.Generator(q.mean.device).manual_seed(seed)
        if self._sites is None:
            return sample_marginals(q, num_samples, generator)
        f = draws_of_moments(q)
        if not self._has_residuals or q.root is None:
            return f
        noise = torch.randn(len(f), 1, f.shape[-1], generator=generator, device=f.device).to(f)
        return f + (q.var - q.root.square().sum(0)).clamp(min=0).sqrt() * noise

    def refuse_calibration(self) -> None:
        """Raise if the posterior has draws of parameters of the likelihood, such as its noise."""
        if self.parameters:
            names = ", ".join(f"`{name}`" for name in self.parameters)
            raise NotImplementedError(
                f"Predictions are not rescaled where the posterior holds draws of {names}, which "
                "say how wide they are. Set `model.calibration = None`, and do not calibrate."
            )


@contextmanager
def frozen_functions(
    model: DAK,
    posterior: Posterior,
    x: Inputs,
    *,
    num_samples: int,
    residual_variance: bool,
    seed: int,
    compile: bool = False,
    with_features: bool = False,
) -> Iterator[FrozenFunctions]:
    """A context with q(f) as a function of rows of x, as they are without calibration.

    With `with_features`, what `model.features` returns comes with it, else None. Guides without a
    closed form are known by `num_samples` draws from `seed`.
    """
    q = resolve_posterior(model, posterior, num_samples=num_samples, x=x, seed=seed)
    guide, sites = (None, q) if isinstance(q, dict) else (q, None)
    drawn = [n for n in ("shrinkage", "unit_scale", "lengthscale") if sites and n in sites]
    if residual_variance and drawn:
        raise NotImplementedError(
            f"The residual variance is not known for draws of `{drawn[0]}`, on which it depends; "
            "predict without it."
        )
    modules = {} if guide is None else {"guide": guide}
    with (
        explaining(model, x, **modules),
        evaluating(model, *modules.values(), runs_programs=False),
        known_sites(model, given=sites or ()),
    ):
        moments_at = freeze_with_features(
            model,
            guide,
            sites,
            residual_variance,
            num_rows=num_rows(x),
            compile=compile,
            with_features=with_features,
        )
        parameters = {} if sites is None else likelihood_parameters(model, sites)
        yield FrozenFunctions(moments_at, sites, residual_variance, parameters)


def components(
    model: DAK,
    posterior: Posterior,
    x: Inputs,
    *,
    num_samples: int = 100,
    seed: int | None = None,
    chunk_size: int = 1024,
    progress: bool = True,
) -> Components:
    """What each unit adds to f at x: mean and variance of sigma_p g_p(h_p).

    They are exact for posteriors with a closed form, and otherwise those over draws.

    Args:
        posterior: any posterior, as in `predict`.
        x: inputs, `(N, ...)`.
        num_samples: draws of the weights for guides without closed form.
        seed: of these draws; None is 0.
        chunk_size: rows at a time.
        progress: show a bar if it takes more than two seconds.
    """
    check_integer("num_samples", num_samples, minimum=1)
    check_integer("chunk_size", chunk_size, minimum=1)
    check_seed("seed", seed)
    check_inputs(model, x)
    seed = 0 if seed is None else int(seed)
    q = resolve_posterior(model, posterior, num_samples=num_samples, x=x, seed=seed)
    modules = {} if isinstance(q, dict) else {"guide": q}
    parts = []
    with (
        explaining(model, x, **modules),
        evaluating(model, *modules.values()),
        known_sites(model, for_y=False, given=q if isinstance(q, dict) else ()),
    ):
        for chunk in with_bar(split(x, int(chunk_size)), progress):
            h = model.unit_inputs(to_device(chunk, model.layer.log_unit_scale.device))
            mean, var = _component_moments(model, q, h)
            parts.append(tuple(part.to(device_of(x)) for part in (mean, var, h)))
        result = Components(*(torch.cat(part) for part in zip(*parts, strict=True)))
        check_finite("unit_inputs", result.unit_inputs)
        check_finite("mean and variance of the components", result.mean + result.variance)
    return result


def _component_moments(
    model: DAK, q: GaussianGuide | dict[str, Tensor], h: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and variance of the shares of the units at unit inputs h `(N, P)`, `(N, F, P)` each."""
    layer = model.layer
    if not isinstance(q, dict):
        means = layer.component_means(h, q.weight_means())
        return means, layer.component_variances(h, *q.unit_roots())
    ratio = q.get("unit_scale", layer.unit_scale) / layer.unit_scale
    ratio = (ratio * q.get("shrinkage", 1.0)).expand(len(q["mu"]), -1)  # (S, P)
    mean = h.new_zeros(len(h), layer.num_functions, layer.num_units)
    squares = torch.zeros_like(mean)
    for s, factor in enumerate(ratio):  # Welford's sums, in which nothing cancels
        weights = Weights(q["z"][s], q["mu"][s], q["linear"][s] if layer.linear_term else None)
        shares = factor * layer.component_means(h, weights)
        shift = shares - mean
        mean = mean + shift / (s + 1)
        squares = squares + shift * (shares - mean)
    return mean, squares / max(len(ratio) - 1, 1)


class FunctionDraws(Sequence[Callable[[Tensor], Tensor]]):
    """Functions drawn from a posterior: `draws(x)` is `(S, N, F)`, `draws[i](x)` is `(N, F)`.

    Values have gradients in x if x asks for them. Inputs may have a batch in front, `(*b, N, ...)`,
    if the model knows the shape of a row; values are then `(S, *b, N, F)`. `sites` holds the draws,
    `(S, *event)`, in the dtype of the model.
    """

    def __init__(self, model: DAK, sites: dict[str, Tensor], is_single: bool = False):
        self.model, self.sites, self._is_single = model, sites, is_single

    def __len__(self) -> int:
        return len(self.sites["z"])

    def __repr__(self) -> str:
        mu = self.sites["mu"]
        return f"FunctionDraws({len(self)} draws of {mu.shape[-1]} functions; {place(mu)})"

    def __call__(self, x: Inputs) -> Tensor:
        check_inputs(self.model, x)
        batch, shape = torch.Size((num_rows(x),)), self.model.input_shape
        if isinstance(x, Tensor) and isinstance(shape, tuple):
            batch = x.shape[: max(1, x.dim() - len(shape))]  # (*b, N)
            x = x.reshape(-1, *x.shape[len(batch) :])
        has_gradients = torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad
        with (
            explaining(self.model, x),
            evaluating(self.model),
            known_sites(self.model, for_y=False, given=self.sites),
            torch.set_grad_enabled(has_gradients),
        ):
            h = self.model.unit_inputs(x)
            check_finite("unit_inputs", h)
            f = draw_functions(self.model, h, self.sites)
            check_finite("f", f)
        f = f.unflatten(-2, batch)
        return f.squeeze(0) if self._is_single else f

    def __getitem__(self, index: int | slice) -> "FunctionDraws":
        chosen: Any = index
        is_single = not isinstance(index, slice)
        if not isinstance(index, slice):
            check_integer("index", index, minimum=-(2**63))
            if not -len(self) <= index < len(self):
                raise IndexError(f"`index` must count one of {len(self)} draws; got {index}.")
            chosen = [int(index)]
        sites = {name: value[chosen] for name, value in self.sites.items()}
        return FunctionDraws(self.model, sites, is_single)


def sample_functions(
    model: DAK, posterior: Posterior, num_samples: int, *, seed: int | None = None
) -> FunctionDraws:
    """Functions drawn from the posterior: a draw of the weights is a whole function of x.

    Args:
        posterior: any posterior, as in `predict`.
        num_samples: how many functions. A guide is sampled. Of a set of draws, so many are taken
            at random, each at most once.
        seed: of the draws; by default torch's global state is used.
    """
    check_model(model)
    check_integer("num_samples", num_samples, minimum=1)
    shape = model.input_shape
    like = model.layer.log_unit_scale
    x = None if shape is None else blank_rows(shape, 1, like)
    draws = draw_posterior(model, posterior, num_samples=num_samples, x=x, seed=seed)
    sites = {name: value.to(like) for name, value in draws.flat().items()}
    if len(sites["mu"]) < num_samples:
        raise ValueError(
            f"`num_samples` must be at most {len(sites['mu'])}, the draws that the posterior has; "
            f"got {num_samples}."
        )
    if len(sites["mu"]) > num_samples:
        with seeded(seed):
            chosen = torch.randperm(len(sites["mu"]))[:num_samples].to(like.device)
        sites = {name: value[chosen] for name, value in sites.items()}
    return FunctionDraws(model, sites)


def with_bar(chunks: Iterable[Any], progress: bool, name: str = "predict") -> Iterable[Any]:
    """The chunks, behind a bar that shows after two seconds, if there may be several of them."""
    is_one = isinstance(chunks, Sequence) and len(chunks) == 1
    return tqdm(chunks, desc=name, delay=2.0, leave=False) if progress and not is_one else chunks
