"""Public functions with odd arguments: each call gives a right answer or says what is wrong.

A target is a public function or method, with arguments that are right. A call replaces one or two
of these by something odd: another kind, shape, dtype or device, NaN, infinities, nothing at all. A
call is well answered by an error that the library raises itself, in its own words, or by a result
of the right form without NaN and infinities.

`python -m tests.fuzz [--calls 5000] [--seed 0] [--target NAME]` prints the calls that are not.
"""

import argparse
import contextlib
import copy
import dataclasses
import fnmatch
import functools
import importlib
import inspect
import math
import opcode
import os
import random
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import torch
from pyarrow import parquet
from pyro.infer.autoguide import AutoNormal
from torch import Tensor, nn
from tqdm import tqdm

import pyro_dak
from pyro_dak import (
    DAK,
    DAKClassifier,
    DAKRegressor,
    GaussianLikelihood,
    HeteroscedasticLikelihood,
    LaplaceKernel,
    MeanFieldGuide,
    NormalPrior,
)
from pyro_dak.additive import AdditiveLayer
from pyro_dak.diagnostics import calibration, checks, plots, scores
from pyro_dak.inference.mcmc import MCMCRun
from pyro_dak.model.explaining import explaining
from pyro_dak.prediction import freeze
from pyro_dak.training.plan import History

PACKAGE = str(Path(pyro_dak.__file__).parent)
# The rooms whose public names are attacked, beside those of the package itself.
ROOMS = (
    "additive",
    "model",
    "inference.guides",
    "inference.mcmc",
    "prediction",
    "training",
    "diagnostics",
    "diagnostics.scores",
    "diagnostics.calibration",
    "diagnostics.checks",
    "diagnostics.plots",
)
# The methods of these classes that are attacked. Their other ones run in every training step or for
# every chunk of rows, on tensors that their caller has made or checked: a check there would be paid
# for by all who call them rightly. Of other classes all public methods are attacked.
METHODS = {
    "AdditiveGP": "forward",
    "AdditiveLayer": "",
    "DAK": "forward observe",
    "DAKHead": "finish forward freeze_statistics loss",
    "KernelActivation": "forward",
    "MixturePrediction": "",  # as those of Prediction
    "Novelty": "",
    "ParquetRows": "inputs original split",
    "Summary": "",
    "*ELBO": "differentiable_loss loss loss_and_grads terms",
    "*Guide": "downdate forward set_parameters update",
    "*Kernel": "",
    "*Likelihood": "check_targets check_values",
    "*Prior": "",
}
# Results of functions that are attacked, and errors; nobody makes them by hand.
RESULTS = (
    "Calibration CheckpointError ClassPrediction Components ConfidenceBins Dispersion ExportError "
    "Finding "
    "FunctionDraws GaussianGuide History Kernel LeaveOneOut MCMCRun MixturePrediction Novelty "
    "NoveltyScores PosteriorComparison Prediction PredictiveCheck SBCResult Summary TrainingError "
    "TrilGuide Weights evaluating local_parameters log_ratios"
).split()

Arguments = dict[str, Any]


class Target(NamedTuple):
    """A function with right arguments, both made anew by `make`, and what a right answer is."""

    name: str
    make: Callable[[], tuple[Callable[..., Any], Arguments]]
    is_right: Callable[[Any, Arguments], bool]
    cost: int
    numbers: str
    words_of: tuple[str, ...]


class Fault(NamedTuple):
    """A call that was not well answered."""

    index: int
    target: str
    arguments: str
    answer: str


TARGETS: dict[str, Target] = {}


def target(
    *names: str,
    is_right: Callable[[Any, Arguments], bool] = lambda result, arguments: True,
    cost: int = 1,
    numbers: str = "finite",
    words_of: tuple[str, ...] = (),
) -> Callable[[Any], Any]:
    """Register a function that makes a call, once for each name; it gets the name if several.

    A call of cost 10 is made a tenth as often. `numbers` is the kind that a result may hold:
    "finite"; "infinite", for densities of zero and normal tails; or "any", for what may be unknown
    by its definition (k-hat, r-hat, entropies that were not estimated). `words_of` names packages
    beside our own whose errors are well said, for interfaces that follow their rules.
    """

    def register(make: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            TARGETS[name] = Target(
                name, functools.partial(make, name), is_right, cost, numbers, words_of
            )
        return make

    return register


# ------------------------------------------------------------------------------ odd arguments


class Odd(NamedTuple):
    """A value, and what is odd about it."""

    value: Any
    label: str


def _set(t: Tensor, number: float) -> Tensor:
    t = t.detach().clone() if t.is_floating_point() else t.double()
    t.flatten()[: max(1, t.numel() // 3)] = number
    return t


TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "one dimension less": lambda t: t[0],
    "one dimension more": lambda t: t.unsqueeze(0),
    "a last dimension more": lambda t: t.unsqueeze(-1),
    "transposed": lambda t: torch.atleast_2d(t).mT,
    "no rows": lambda t: t[:0],
    "one row": lambda t: t[:1],
    "a row less": lambda t: t[:-1],
    "a column more": lambda t: torch.cat([t, t[..., :1]], -1),
    "a column less": lambda t: t[..., :-1],
    "no columns": lambda t: t[..., :0],
    "a scalar": lambda t: t.flatten()[0],
    "empty": lambda t: t.new_empty(0),
    "NaN": lambda t: _set(t, math.nan),
    "infinite": lambda t: _set(t, math.inf),
    "minus infinite": lambda t: _set(t, -math.inf),
    "huge": lambda t: _set(t, 1e300),
    "large": lambda t: _set(t, 1e30),
    "tiny": lambda t: _set(t, 1e-300),
    "zero": torch.zeros_like,
    "negative": lambda t: -t.abs() - 1,
    "constant": lambda t: t[:1].expand_as(t),
    "float16": lambda t: t.to(torch.float16),
    "bfloat16": lambda t: t.to(torch.bfloat16),
    "float32": lambda t: t.to(torch.float32),
    "float64": lambda t: t.to(torch.float64),
    "int64": lambda t: t.to(torch.int64),
    "uint8": lambda t: t.to(torch.uint8),
    "bool": lambda t: t > 0,
    "complex": lambda t: t.to(torch.complex128),
    "without values": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "with a gradient": lambda t: t.double().requires_grad_(),
    "not contiguous": lambda t: t.repeat_interleave(2, 0)[::2],
    "an array": lambda t: t.numpy(),
    "a list": lambda t: t.tolist(),
}
ARRAYS: dict[str, Callable[[Any], Any]] = {
    "one dimension less": lambda a: a[0],
    "one dimension more": lambda a: a[None],
    "a last dimension more": lambda a: a[..., None],
    "transposed": lambda a: a.T,
    "no rows": lambda a: a[:0],
    "one row": lambda a: a[:1],
    "a row less": lambda a: a[:-1],
    "a column less": lambda a: a[..., :-1],
    "no columns": lambda a: a[..., :0],
    "a scalar": lambda a: a.flat[0],
    "NaN": lambda a: np.where(a > np.median(a), np.nan, a),
    "infinite": lambda a: np.where(a > np.median(a), np.inf, a),
    "huge": lambda a: np.where(a > np.median(a), 1e300, a),
    "tiny": lambda a: a * 1e-300,
    "zero": np.zeros_like,
    "constant": lambda a: np.broadcast_to(a[:1], a.shape),
    "float32": lambda a: a.astype(np.float32),
    "int64": lambda a: a.astype(np.int64),
    "bool": lambda a: a > 0,
    "complex": lambda a: a.astype(complex),
    "text": lambda a: a.astype(str),
    "objects": lambda a: a.astype(object),
    "dates": lambda a: a.astype("datetime64[s]"),
    "Fortran order": np.asfortranarray,
    "a list": lambda a: a.tolist(),
    "a tensor": torch.as_tensor,
    "masked": lambda a: np.ma.masked_greater(a, 0),
}
NUMBERS: list[Any] = [
    0, 1, 2, -1, 2**70, -(2**70), 10**400, 0.0, -1.0, 0.5, 1.5, 1e300, 1e-300, 1e-30, math.nan,
    math.inf, -math.inf, True, np.int64(2), np.float32(0.5), np.nan, 1j, "3",
]  # fmt: skip
KINDS: list[Any] = [
    None, "text", "", b"bytes", object(), [], {}, (), set(), 3, 3.5, math.nan, DAK, print,
    torch.ones(()), torch.ones(2, 2), np.ones(3), nn.Linear(2, 2), range(3), "\0", ...,
]  # fmt: skip


def _label(value: Any) -> str:
    return " ".join(f"{value!r:.30}".split())


def odd_value(value: Any, rng: random.Random) -> Odd:
    """Something to pass in the place of a value."""
    if rng.random() < 0.25 and not isinstance(value, bool):  # whose truth is Python's to tell
        kind = rng.choice([kind for kind in KINDS if not (callable(value) and callable(kind))])
        return Odd(copy.deepcopy(kind), _label(kind))
    if isinstance(value, Tensor | np.ndarray):
        changes = TENSORS if isinstance(value, Tensor) else ARRAYS
        label = rng.choice(list(changes))
        try:
            return Odd(changes[label](value), label)
        except (RuntimeError, IndexError, TypeError, ValueError):  # there is no such change
            return Odd(None, "None")
    if isinstance(value, bool | int | float):
        number = rng.choice(NUMBERS)
        return Odd(number, _label(number))
    if isinstance(value, DAK):
        return odd_model(value, rng)
    if isinstance(value, nn.Module):
        return odd_module(value, rng)
    if isinstance(value, Mapping) and value:
        return odd_entry(value, rng)
    if isinstance(value, tuple | list) and value:
        return odd_item(value, rng)
    kind = rng.choice([kind for kind in KINDS if not (callable(value) and callable(kind))])
    return Odd(copy.deepcopy(kind), _label(kind))


def odd_entry(value: Mapping[Any, Any], rng: random.Random) -> Odd:
    """A dictionary with an entry less, an entry more, or an odd entry."""
    key, change = rng.choice(list(value)), rng.randrange(4)
    if change == 0:
        return Odd({k: v for k, v in value.items() if k != key}, f"without {key}")
    if change == 1:
        return Odd({**value, rng.choice(["other", 3, None]): value[key]}, "with one more")
    odd = odd_value(value[key], rng)
    return Odd({**value, key: odd.value}, f"{key}: {odd.label}")


def odd_item(value: Any, rng: random.Random) -> Odd:
    """A sequence with an item less, an item more, or an odd item."""
    items, change, i = list(value), rng.randrange(4), rng.randrange(len(value))
    kind = list if hasattr(value, "_fields") else type(value)
    if change == 0:
        return Odd(kind(items[:-1]), "without the last")
    if change == 1:
        return Odd(kind([*items, items[0]]), "with one more")
    odd = odd_value(items[i], rng)
    return Odd(kind([*items[:i], odd.value, *items[i + 1 :]]), f"[{i}]: {odd.label}")


def odd_module(value: nn.Module, rng: random.Random) -> Odd:
    """A module with other weights, or another one."""
    other = copy.deepcopy(value)
    change = rng.choice(["float32", "float16", "meta", "NaN", "infinite", "huge", "training"])
    if change == "meta":
        other.to("meta")
    elif change == "training":
        other.train()
    elif change.startswith("float"):
        other.to(getattr(torch, change))
    else:
        number = {"NaN": math.nan, "infinite": math.inf, "huge": 1e300}[change]
        for parameter in other.parameters():
            nn.init.constant_(parameter, number)
    return Odd(other, f"{type(value).__name__} of {change}")


def odd_model(value: DAK, rng: random.Random) -> Odd:
    """A model of other shapes, with other weights, or something close to a model."""
    change = rng.choice(["units", "outputs", "level", "inputs", "likelihood", "guide", "module"])
    if change == "module":
        return odd_module(value, rng)
    if change == "guide":
        return Odd(rng.choice([MeanFieldGuide, AutoNormal])(value), "a guide")
    options: dict[str, Any] = {
        "units": {"num_units": 3},
        "outputs": {"num_outputs": 3},
        "level": {"level": 3},
        "inputs": {"num_inputs": 5},
        "likelihood": {"likelihood": "categorical" if value.num_outputs == 1 else "gaussian"},
    }[change]
    return Odd(make_model(**options), f"a model of other {change}")


# ------------------------------------------------------------------------------ right arguments

N, D = 6, 2


def make_model(likelihood: str = "gaussian", num_inputs: int = D, **options: Any) -> DAK:
    """A small model in eval mode with settled scaling."""
    kinds = {"gaussian": "GaussianLikelihood", "categorical": "CategoricalLikelihood"}
    kind = getattr(pyro_dak, kinds.get(likelihood, likelihood))
    has_classes = kind is pyro_dak.CategoricalLikelihood
    settings: Arguments = {"num_units": 2, "level": 2, "num_outputs": 3 if has_classes else 1}
    network = nn.Sequential(nn.Linear(num_inputs, 4), nn.ReLU())
    model = DAK(network, 4, likelihood=kind(), **(settings | options))
    model.unit_inputs(torch.randn(8, num_inputs))
    return model.eval()


def make_data(model: DAK) -> Arguments:
    """Inputs and targets of a model of two inputs."""
    y = torch.rand(N, model.num_outputs)
    if isinstance(model.likelihood, pyro_dak.CategoricalLikelihood):
        y = torch.arange(N) % model.num_outputs
    elif not isinstance(model.likelihood, GaussianLikelihood | HeteroscedasticLikelihood):
        y = y.round()
    return {"x": torch.randn(N, D), "y": y}


def case(likelihood: str = "gaussian", **options: Any) -> Arguments:
    """Model, guide, x and y."""
    model = make_model(likelihood, **options)
    return {"model": model, "guide": MeanFieldGuide(model), **make_data(model)}


def some_samples(model: DAK, num_samples: int = 30) -> dict[str, Tensor]:
    """Samples of the sites of a model."""
    return {n: torch.randn(num_samples, *shape) for n, shape in model.site_shapes.items()}


def with_posterior(arguments: Arguments) -> Arguments:
    """Arguments of functions that take any posterior: the guide under that name."""
    return {**without(arguments, "guide"), "posterior": arguments["guide"]}


def without(arguments: Arguments, *names: str) -> Arguments:
    return {name: value for name, value in arguments.items() if name not in names}


@target("DyadicGrid")
def _(name: str) -> Any:
    return pyro_dak.DyadicGrid, {"level": 3, "bounds": (-1.0, 2.0)}


@target("LaplaceKernel", "RBFKernel", "MaternKernel")
def _(name: str) -> Any:
    nu = {"nu": 1.5} if name == "MaternKernel" else {}
    return getattr(pyro_dak, name), {"lengthscale": 0.7, **nu}


@target("KernelActivation")
def _(name: str) -> Any:
    grid, kernel = pyro_dak.DyadicGrid(2), pyro_dak.RBFKernel()
    return pyro_dak.KernelActivation, {"grid": grid, "kernel": kernel, "jitter": 1e-6}


def _is_phi(phi: Any, arguments: Arguments) -> bool:
    return phi.shape == (*arguments["h"].shape, 3)


@target("KernelActivation.forward", is_right=_is_phi)
def _(name: str) -> Any:
    activation = pyro_dak.KernelActivation(pyro_dak.DyadicGrid(2))
    return activation, {"h": torch.rand(N, 2)}


@target("AdditiveLayer")
def _(name: str) -> Any:
    activation = pyro_dak.KernelActivation(pyro_dak.DyadicGrid(2))
    sizes = {"num_units": 2, "num_functions": 3, "linear_term": True}
    return AdditiveLayer, {"activation": activation, **sizes}


@target(
    "NormalPrior",
    "LaplacePrior",
    "StudentTPrior",
    "HorseshoePrior",
    "GammaScalePrior",
    "LogNormalPrior",
)
def _(name: str) -> Any:
    kind = getattr(pyro_dak, name)
    return kind, {field.name: field.default for field in dataclasses.fields(kind)}


@target("GaussianLikelihood", "HeteroscedasticLikelihood", "StudentTLikelihood")
def _(name: str) -> Any:
    df = {"df": 4.0} if name == "StudentTLikelihood" else {}
    return getattr(pyro_dak, name), {"noise_scale": torch.ones(2), "learn": True, **df}


LIKELIHOODS = [name for name in pyro_dak.__all__ if name.endswith("Likelihood")]


@target("BernoulliLikelihood", "CategoricalLikelihood", "PoissonLikelihood")
def _(name: str) -> Any:
    return getattr(pyro_dak, name), {}


@target(*[f"{name}.check_targets" for name in LIKELIHOODS], numbers="any")
def _(name: str) -> Any:
    model = make_model(name.split(".")[0])
    check_fn = functools.partial(model.likelihood.check_targets, num_outputs=model.num_outputs)
    return check_fn, {"y": make_data(model)["y"]}


@target(*[f"{name}.check_values" for name in LIKELIHOODS])
def _(name: str) -> Any:
    model = make_model(name.split(".")[0])
    y, likelihood = make_data(model)["y"], model.likelihood

    def check_fn(y: Any) -> Any:  # as entry points do
        likelihood.check_values(likelihood.check_targets(y, model.num_outputs), model.num_outputs)

    return check_fn, {"y": y}


@target("DAK", "AdditiveGP", numbers="any")
def _(name: str) -> Any:
    own: Arguments = {"num_outputs": 2, "likelihood": GaussianLikelihood()}
    if name == "AdditiveGP":
        own = {"num_functions": 2, "name": "gp"}
    return getattr(pyro_dak, name), own | {
        "feature_extractor": nn.Linear(D, 4),
        "feature_dim": 4,
        "num_units": 4,
        "level": 2,
        "bounds": (0.0, 1.0),
        "kernel": LaplaceKernel(),
        "scaling": "minmax",
        "embedding": False,
        "prior": {"z": NormalPrior(0.0, 2.0)},
        "linear_term": True,
    }


def _is_target(y: Any, arguments: Arguments) -> bool:
    return len(y) == len(arguments["x"])


@target("AdditiveGP.forward", is_right=_is_target, numbers="any")
def _(name: str) -> Any:
    gp = pyro_dak.AdditiveGP(nn.Linear(D, 4), 4, num_units=2, level=2)
    return gp, {"x": torch.rand(N, D)}


@target("DAK.forward", is_right=_is_target, numbers="any")
def _(name: str) -> Any:
    model = make_model()
    return model, {**make_data(model), "num_data": 12.0}


@target(
    "DAK.observe", numbers="any", is_right=lambda y, arguments: len(y) == arguments["h"].shape[-2]
)
def _(name: str) -> Any:
    model = make_model()
    return model.observe, {"h": torch.rand(N, 2), "y": torch.randn(N, 1), "num_data": 12.0}


@target("DAKHead")
def _(name: str) -> Any:
    return pyro_dak.DAKHead, {"feature_dim": 3, "num_outputs": 2, "num_data": 12, "num_units": 2}


def a_head() -> tuple[pyro_dak.DAKHead, Tensor, Tensor]:
    """A head for two classes that has seen a batch, with features and labels."""
    head = pyro_dak.DAKHead(3, 2, num_data=2 * N, num_units=2, level=2)
    features, y = torch.randn(N, 3), torch.randint(0, 2, (N,))
    head.loss(features, y).backward()
    return head, features, y


@target("DAKHead.loss", numbers="any")  # features that overflow are for a GradScaler to skip
def _(name: str) -> Any:
    head, features, y = a_head()
    return head.loss, {"features": features, "y": y}


@target("DAKHead.forward", "DAKHead.freeze_statistics", numbers="any")
def _(name: str) -> Any:
    head, features, _ = a_head()
    return getattr(head, name.split(".")[1]), {"features": features}


@target("DAKHead.finish", cost=5)
def _(name: str) -> Any:
    head, features, y = a_head()
    return head.finish, {"batches": [(features, y)]}


GUIDES = ("FullRankGuide", "LowRankGuide", "MeanFieldGuide", "UnitBlockGuide")


@target(*GUIDES)
def _(name: str) -> Any:
    rank = {"rank": 2} if name == "LowRankGuide" else {}
    scales = {"init_scale": 0.1, "init_loc_scale": 0.1}
    return getattr(pyro_dak, name), {"model": make_model(), **scales, **rank}


@target(*[f"{name}.forward" for name in GUIDES])
def _(name: str) -> Any:
    return getattr(pyro_dak, name.split(".")[0])(make_model()), {}


@target("FullRankGuide.set_parameters")
def _(name: str) -> Any:
    guide = pyro_dak.FullRankGuide(make_model())
    return guide.set_parameters, {"loc": torch.randn(1, 7), "scale_tril": torch.eye(7)[None]}


@target("NaturalGuide")
def _(name: str) -> Any:
    return pyro_dak.NaturalGuide, {"model": make_model(), "covariance": "diagonal"}


@target("NaturalGuide.forward")
def _(name: str) -> Any:
    return pyro_dak.NaturalGuide(make_model()), {}


@target("NaturalGuide.set_parameters")
def _(name: str) -> Any:
    guide = pyro_dak.NaturalGuide(make_model())
    return guide.set_parameters, {"mean": torch.randn(1, 7), "precision": 2 * torch.eye(7)[None]}


@target("NaturalGuide.update", "NaturalGuide.downdate")
def _(name: str) -> Any:
    arguments = without(case(), "guide")
    guide = pyro_dak.NaturalGuide(arguments["model"])
    guide.update(**arguments)
    if name.endswith("downdate"):
        return guide.downdate, arguments
    return guide.update, {**arguments, "forget": 0.9, "num_steps": 2}


@target("NaturalVI")
def _(name: str) -> Any:
    model = make_model()
    optim = torch.optim.SGD(model.parameters(), 0.01)
    arguments = {"model": model, "guide": pyro_dak.NaturalGuide(model), "optim": optim}
    return pyro_dak.NaturalVI, {**arguments, "loss": pyro_dak.ClosedFormELBO()}


@target("NaturalVI.step", "NaturalVI.evaluate_loss")
def _(name: str) -> Any:
    model = make_model()
    inference = pyro_dak.NaturalVI(model, pyro_dak.NaturalGuide(model))
    method = getattr(inference, name.split(".")[1])
    return method, {**make_data(model), "num_data": 12.0}


@target("ClosedFormELBO", "JensenELBO")
def _(name: str) -> Any:
    return getattr(pyro_dak, name), {}


@target("LocalReparamELBO")
def _(name: str) -> Any:
    return pyro_dak.LocalReparamELBO, {"num_samples": 3}


BOUNDS = METHODS["*ELBO"].split()


@target(*[f"{kind}.{m}" for kind in ("ClosedFormELBO", "LocalReparamELBO") for m in BOUNDS])
def _(name: str) -> Any:
    kind, method = name.split(".")
    return getattr(getattr(pyro_dak, kind)(), method), {**case(), "num_data": 12.0}


@target(*[f"JensenELBO.{method}" for method in BOUNDS])
def _(name: str) -> Any:
    method = getattr(pyro_dak.JensenELBO(), name.split(".")[1])
    return method, {**case("categorical"), "num_data": 12.0}


def _is_posterior(result: Any, arguments: Arguments) -> bool:
    return result.guide.loc.shape[0] == arguments["model"].num_outputs


@target("exact_posterior", is_right=_is_posterior)
def _(name: str) -> Any:
    arguments = without(case(), "guide")
    return pyro_dak.exact_posterior, {**arguments, "residual_variance": True, "chunk_size": 4}


def _is_run(run: Any, arguments: Arguments) -> bool:
    return run.num_samples == arguments["num_samples"]


@target("run_nuts", "run_hmc", is_right=_is_run, cost=15)
def _(name: str) -> Any:
    arguments = {**without(case(), "guide"), "num_samples": 8, "warmup_steps": 4, "num_chains": 1}
    arguments |= {"noise_prior": pyro_dak.GammaScalePrior(), "target_accept_prob": 0.7}
    arguments |= {"seed": 1, "whiten": True, "progress": False}
    arguments |= {"max_tree_depth": 2} if name == "run_nuts" else {"trajectory_length": 0.5}
    return getattr(pyro_dak.inference.mcmc, name), arguments


def make_run(num_samples: int = 8) -> MCMCRun:
    """A run as a sampler returns it."""
    model = make_model()
    sites = {n: v.unsqueeze(0) for n, v in some_samples(model, num_samples).items()}
    zeros = torch.zeros(1, num_samples)
    stats = {"diverging": zeros.bool(), "n_steps": zeros.long(), "step_size": zeros, "lp": zeros}
    return MCMCRun(sites, None, stats, [0.8], [1.0])


RUN_METHODS = (
    "effective_sample_size", "flat", "max_r_hat", "r_hat", "report", "standard_error"
)  # fmt: skip


@target(*[f"MCMCRun.{method}" for method in RUN_METHODS], numbers="any")
def _(name: str) -> Any:
    return getattr(make_run(), name.split(".")[1]), {}


@target("MCMCRun.get_samples")
def _(name: str) -> Any:
    return make_run().get_samples, {"group_by_chain": True}


def _is_prediction(prediction: Any, arguments: Arguments) -> bool:
    shape = (len(arguments["x"]), arguments["model"].num_outputs)
    if hasattr(prediction, "probs"):
        sums = prediction.probs.sum(-1)
        return prediction.probs.shape == shape and bool((sums - 1).abs().max() < 1e-3)
    parts = (prediction.epistemic, prediction.aleatoric)
    return prediction.mean.shape == shape and all(bool((part >= 0).all()) for part in parts)


@target("predict", is_right=_is_prediction)
def _(name: str) -> Any:
    options = {"num_samples": 5, "residual_variance": False, "seed": 2, "chunk_size": 4}
    return pyro_dak.predict, {**with_posterior(without(case(), "y")), **options, "progress": False}


@target("predict: classes", is_right=_is_prediction, numbers="any")
def _(name: str) -> Any:
    options = {"method": "mc", "num_samples": 5, "residual_variance": True, "seed": 2}
    arguments = with_posterior(without(case("categorical"), "y"))
    return pyro_dak.predict, {**arguments, **options, "progress": False}


@target("predict: autoguide", is_right=_is_prediction, cost=4)
def _(name: str) -> Any:
    arguments = without(case(), "y")
    guide = AutoNormal(arguments["model"])
    with torch.no_grad():
        guide(arguments["x"], None)
    arguments = {**without(arguments, "guide"), "posterior": guide}
    return pyro_dak.predict, {**arguments, "num_samples": 4, "progress": False}


def _is_calibration(result: Any, arguments: Arguments) -> bool:
    is_better = result.nlpd_after <= result.nlpd_before
    return result.num_rows == len(arguments["x_val"]) and result.number > 0 and is_better


@target("calibrate", is_right=_is_calibration, cost=4, numbers="any")
def _(name: str) -> Any:
    rows = {"x_val": torch.randn(2 * N, D), "y_val": torch.randn(2 * N, 1)}
    options = {"num_samples": 5, "residual_variance": False, "seed": 2, "chunk_size": 5}
    arguments = with_posterior(without(case(), "x", "y"))
    return pyro_dak.calibrate, {**arguments, **rows, **options, "progress": False}


@target("calibrate: classes", is_right=_is_calibration, cost=4, numbers="any")
def _(name: str) -> Any:
    arguments = with_posterior(without(case("categorical"), "x", "y"))
    x = torch.randn(4 * N, D)
    y = pyro_dak.predict(**arguments, x=x).label
    y[:3] = (y[:3] + 1) % 3
    options = {"method": "mc", "num_samples": 5, "seed": 2, "progress": False}
    return pyro_dak.calibrate, {**arguments, "x_val": x, "y_val": y, **options}


@target("learn_novelty", "learn_novelty: classes", cost=4)
def _(name: str) -> Any:
    arguments = with_posterior(case("categorical" if "classes" in name else "gaussian"))

    def learn_and_look(**options: Any) -> Any:
        pyro_dak.learn_novelty(**options)
        return options["model"].novelty.state_dict()

    held_out = torch.randn(300, D)
    return learn_and_look, {**without(arguments, "y"), "held_out": held_out, "progress": False}


@target("Prediction.strangeness", "ClassPrediction.strangeness",
        is_right=lambda scores, arguments: scores.shape == (N,))  # fmt: skip
def _(name: str) -> Any:
    kind = "categorical" if "Class" in name else "gaussian"
    arguments = with_posterior(without(case(kind), "y"))
    pyro_dak.learn_novelty(**arguments, progress=False)
    prediction = pyro_dak.predict(**arguments, num_samples=5, seed=0, progress=False)
    return prediction.strangeness, {"score": "leverage"}


def _are_components(result: Any, arguments: Arguments) -> bool:
    return result.mean.shape == (len(arguments["x"]), 1, arguments["model"].num_units)


@target("components", is_right=_are_components)
def _(name: str) -> Any:
    arguments = with_posterior(without(case(), "y"))
    return pyro_dak.components, {**arguments, "chunk_size": 4, "progress": False}


@target(
    "sample_functions", is_right=lambda draws, arguments: len(draws) == arguments["num_samples"]
)
def _(name: str) -> Any:
    arguments = with_posterior(without(case(), "x", "y"))
    return pyro_dak.sample_functions, {**arguments, "num_samples": 3}


@target(
    "FunctionDraws.__call__", is_right=lambda f, arguments: f.shape == (3, len(arguments["x"]), 1)
)
def _(name: str) -> Any:
    arguments = case()
    draws = pyro_dak.sample_functions(arguments["model"], arguments["guide"], 3)
    return draws, {"x": arguments["x"]}


@target("FunctionDraws.__getitem__")
def _(name: str) -> Any:
    arguments = case()
    draws = pyro_dak.sample_functions(arguments["model"], arguments["guide"], 3)
    return draws.__getitem__, {"index": 1}


@target("acquire", is_right=lambda rows, arguments: rows.shape == (arguments["num"],))
def _(name: str) -> Any:
    arguments = case()
    posterior = pyro_dak.exact_posterior(**without(arguments, "guide"))
    pool = {"pool": arguments["x"], "num": 2, "method": "variance", "num_samples": 3}
    more = {"output": 0, "chunk_size": 5, "seed": 0, "progress": False}
    return pyro_dak.acquire, {"model": arguments["model"], "posterior": posterior, **pool, **more}


@target("ThompsonBandit")
def _(name: str) -> Any:
    more = {"refresh_every": 5, "num_trials": 1, "seed": 0}
    return pyro_dak.ThompsonBandit, {"num_inputs": 2, "num_arms": 2, **more}


@target(*[f"ThompsonBandit.{name}" for name in ("choose", "moments", "refresh", "update")])
def _(name: str) -> Any:
    bandit = pyro_dak.ThompsonBandit(2, 2, num_trials=1, num_directions=1)
    for arm in range(2):
        bandit.update(torch.rand(2), arm, 1.0)
    context = {} if name.endswith("refresh") else {"context": torch.rand(2)}
    reward = {"arm": 1, "reward": 0.5} if name.endswith("update") else {}
    return getattr(bandit, name.split(".")[1]), context | reward


@target("freeze", numbers="any")
def _(name: str) -> Any:
    x = torch.randn(N, D)

    def freeze_and_call(**options: Any) -> Any:  # what it returns takes inputs that were checked
        moments_at = freeze(**options)
        with explaining(options["model"], x):
            return moments_at(x)

    return freeze_and_call, {**without(case(), "x", "y"), "residual_variance": True, "num_rows": 5}


def make_prediction(likelihood: str = "gaussian") -> Any:
    """A prediction of N rows."""
    arguments = with_posterior(without(case(likelihood), "y"))
    return pyro_dak.predict(**arguments, num_samples=5, seed=0, progress=False)


@target("Prediction.quantile", is_right=lambda q, arguments: q.shape == (N, 1))
def _(name: str) -> Any:
    return make_prediction("StudentTLikelihood").quantile, {"q": 0.3, "num_samples": 20}


@target("Prediction.interval", is_right=lambda ends, arguments: bool((ends[0] <= ends[1]).all()))
def _(name: str) -> Any:
    return make_prediction().interval, {"level": 0.8}


@target("Prediction.sample", is_right=lambda y, arguments: len(y) == arguments["num_samples"])
def _(name: str) -> Any:
    return make_prediction().sample, {"num_samples": 4}


@target("ClassPrediction.sample", is_right=lambda y, arguments: len(y) == arguments["num_samples"])
def _(name: str) -> Any:
    return make_prediction("categorical").sample, {"num_samples": 4}


def _is_log_prob(log_prob: Any, arguments: Arguments) -> bool:
    return log_prob.shape == (N,)


NOT_CLASSES = [name for name in LIKELIHOODS if name != "CategoricalLikelihood"]


@target(*[f"Prediction.log_prob: {name}" for name in NOT_CLASSES], is_right=_is_log_prob,
        numbers="infinite")  # fmt: skip
def _(name: str) -> Any:
    model = make_model(name.split(": ")[1])
    return make_prediction(name.split(": ")[1]).log_prob, {"y": make_data(model)["y"]}


@target(
    "ClassPrediction.log_prob",
    numbers="infinite",
    is_right=lambda log_prob, arguments: log_prob.shape == (N,),
)
def _(name: str) -> Any:
    return make_prediction("categorical").log_prob, {"y": torch.arange(N) % 3}


@target("build_objective")
def _(name: str) -> Any:
    return pyro_dak.training.build_objective, {**without(case(), "x", "y"), "objective": "local"}


FABRIC = ("lightning_fabric",)


def _is_history(history: Any, arguments: Arguments) -> bool:
    losses = history.column("loss")
    return 1 <= len(losses) <= arguments["epochs"] and all(map(math.isfinite, losses))


@target("fit", is_right=_is_history, cost=6, numbers="any", words_of=FABRIC)
def _(name: str) -> Any:
    arguments = case()
    data = (arguments.pop("x"), arguments.pop("y"))
    return pyro_dak.fit, {
        **arguments,
        "data": data,
        "validation": data,
        "objective": "closed_form",
        "epochs": 2,
        "batch_size": 3,
        "learning_rate": 0.01,
        "last_layer_learning_rate": 0.02,
        "optimizer": "sgd",
        "last_layer_optimizer": "adam",
        "schedule": "constant",
        "weight_decay": 0.01,
        "decay_last_layer": True,
        "clip_norm": 1.0,
        "patience": 3,
        "fixed_features": True,
        "callbacks": [lambda epoch, row: None],
        "seed": 3,
        "accelerator": "cpu",
        "progress": False,
    }


@target("fit: loader", is_right=_is_history, cost=6, numbers="any", words_of=FABRIC)
def _(name: str) -> Any:
    arguments = case("categorical")
    x, y = arguments.pop("x"), arguments.pop("y")
    settings = {"epochs": 2, "seed": 3, "accelerator": "cpu", "progress": False}
    return pyro_dak.fit, {**arguments, "data": [(x, y), (x, y)], "num_data": 12, **settings}


@target("fit: files", is_right=_is_history, cost=8, numbers="any", words_of=FABRIC)
def _(name: str) -> Any:
    arguments = case()
    data = (arguments.pop("x"), arguments.pop("y"))
    files = {"checkpoint_dir": "run", "checkpoint_every": 1, "checkpoint_steps": 1, "keep_last": 2}
    settings = {
        "timeout": 9.0,
        "loggers": (),
        "epochs": 2,
        "seed": 3,
        "accelerator": "cpu",
        "progress": False,
    }
    pyro_dak.fit(**copy.deepcopy(arguments), data=data, **(files | settings))
    return pyro_dak.fit, {**arguments, "data": data, **files, "resume_from": "run", **settings}


@target("save", cost=2)
def _(name: str) -> Any:
    return pyro_dak.save, {**without(case(), "x", "y"), "path": "model", "overwrite": False}


@target("export", cost=40)
def _(name: str) -> Any:
    arguments = with_posterior(without(case(), "y"))
    return pyro_dak.export, {**arguments, "path": "model.onnx", "overwrite": False}


@target("load", cost=3)
def _(name: str) -> Any:
    arguments = without(case(), "x", "y")
    path = pyro_dak.save(**arguments, path="model")
    network = arguments["model"].feature_extractor
    options = {"feature_extractor": network, "guide": MeanFieldGuide, "device": "cpu"}
    return pyro_dak.load, {"path": path, **options}


def _is_card(path: Any, arguments: Arguments) -> bool:
    return path.read_text().startswith("---\nlibrary_name: pyro_dak\n")


@target("write_card", is_right=_is_card, cost=2)
def _(name: str) -> Any:
    path = pyro_dak.save(**without(case(), "x", "y"), path="model")
    more = {"license": "mit", "datasets": ["a"], "metrics": {"nlpd": 1.5}, "overwrite": True}
    return pyro_dak.write_card, {"path": path, "title": "A", "text": "b", **more}


def some_rows() -> Any:
    """Rows of a Parquet file in the working directory."""
    table = pyarrow.table({name: torch.randn(20).numpy() for name in "aby"})
    parquet.write_table(table, "rows.parquet", row_group_size=7)
    return pyro_dak.ParquetRows("rows.parquet", "y", progress=False)


@target("ParquetRows", cost=2)
def _(name: str) -> Any:
    some_rows()
    more = {"columns": ["a"], "labels": False, "shards": 2, "buffer_bytes": 10_000}
    return pyro_dak.ParquetRows, {"path": "rows.parquet", "target": ["y", "b"], **more}


@target("ParquetRows.split", cost=2)
def _(name: str) -> Any:
    return some_rows().split, {"share": 0.4, "seed": 3}


@target("ParquetRows.inputs", is_right=lambda x, _: x.shape[1:] == (2,), cost=2)
def _(name: str) -> Any:
    return some_rows().inputs, {"table": {"a": torch.randn(4).numpy(), "b": torch.randn(4).numpy()}}


@target("ParquetRows.original", is_right=lambda y, own: y.shape == own["y"].shape, cost=2)
def _(name: str) -> Any:
    return some_rows().original, {"y": torch.randn(4, 1)}


@target("History.plot")
def _(name: str) -> Any:
    return History([{"loss": 1.0}, {"loss": 0.5}]).plot, {}


@target("History.column")
def _(name: str) -> Any:
    return History([{"loss": 1.0}, {"loss": 0.5}]).column, {"name": "loss"}


POSTERIORS: dict[str, Callable[[Arguments], Any]] = {
    "guide": lambda arguments: arguments["guide"],
    "samples": lambda arguments: some_samples(arguments["model"]),
}


def judged(name: str, **options: Any) -> Arguments:
    """Model, posterior, x and y, with the kind of posterior after the colon of the name."""
    arguments = case()
    posterior = POSTERIORS[name.rpartition(": ")[2]](arguments)
    return {**without(arguments, "guide"), "posterior": posterior, **options}


@target("k_hat", cost=2, numbers="any")
def _(name: str) -> Any:
    return checks.k_hat, {**case(), "num_samples": 30, "seed": 1}


@target("loo: guide", "loo: samples", cost=3, numbers="any")
def _(name: str) -> Any:
    options = {"num_samples": 30, "efficiency": 0.9, "seed": 1, "chunk_size": 4}
    return checks.loo, judged(name, **options)


@target("pit_values: guide", "pit_values: samples", cost=2)
def _(name: str) -> Any:
    return checks.pit_values, judged(name, num_samples=30, seed=1)


@target("posterior_predictive_check: guide", "posterior_predictive_check: samples", cost=2)
def _(name: str) -> Any:
    statistics = {"mean": lambda y: y.mean(-1)}
    options = {"statistics": statistics, "num_samples": 30, "seed": 1}
    return checks.posterior_predictive_check, judged(name, **options)


@target("summary: guide", "summary: samples", cost=4, numbers="any")
def _(name: str) -> Any:
    return pyro_dak.diagnostics.summary, judged(name, num_samples=30, seed=1)


@target("compare_posteriors", cost=6)
def _(name: str) -> Any:
    arguments = case()
    guide = arguments.pop("guide")
    posteriors = {"guide": guide, "samples": some_samples(arguments["model"])}
    options = {"x_new": torch.randn(3, D), "reference": "guide", "num_samples": 30, "seed": 1}
    return pyro_dak.compare_posteriors, {**arguments, "posteriors": posteriors, **options}


@functools.cache
def a_comparison() -> Any:
    make, arguments = TARGETS["compare_posteriors"].make()
    return make(**arguments)


@target("PosteriorComparison.by_unit", "PosteriorComparison.weights")
def _(name: str) -> Any:
    return getattr(a_comparison(), name.split(".")[1]), {"name": "samples"}


@target("PosteriorComparison.summary", "PosteriorComparison.to_markdown")
def _(name: str) -> Any:
    return getattr(a_comparison(), name.split(".")[1]), {}


@target("simulation_based_calibration", cost=10)
def _(name: str) -> Any:
    arguments = without(case(), "guide", "y")
    options = {"posterior_fn": pyro_dak.exact_posterior, "num_simulations": 3, "num_samples": 9}
    options |= {"num_function_rows": 2, "seed": 1, "progress": False}
    return pyro_dak.diagnostics.simulation_based_calibration, {**arguments, **options}


@functools.cache
def a_calibration() -> Any:
    make, arguments = TARGETS["simulation_based_calibration"].make()
    return make(**arguments)


@target("SBCResult.counts", "SBCResult.p_values", "SBCResult.p_value")
def _(name: str) -> Any:
    return getattr(a_calibration(), name.split(".")[1]), {"num_bins": 5}


@target("to_arviz: guide", "to_arviz: samples", cost=20)
def _(name: str) -> Any:
    options = {"num_samples": 6, "num_chains": 2, "posterior_predictive": True, "seed": 1}
    return pyro_dak.to_arviz, judged(name, **options)


def normals() -> dict[str, Tensor]:
    return {"y": torch.randn(N, 1), "mean": torch.randn(N, 1), "var": torch.rand(N, 1) + 0.1}


def labels() -> dict[str, Tensor]:
    return {"y": torch.arange(N) % 3, "probs": torch.rand(N, 3).softmax(-1)}


@target("gaussian_nlpd", "gaussian_crps", numbers="infinite")
def _(name: str) -> Any:
    return getattr(scores, name), normals()


@target("rmse")
def _(name: str) -> Any:
    return scores.rmse, without(normals(), "var")


@target("interval_coverage", "interval_width")
def _(name: str) -> Any:
    ends = {"lower": torch.randn(N), "upper": torch.randn(N) + 3}
    y = {} if name == "interval_width" else {"y": torch.randn(N)}
    return getattr(scores, name), {**y, **ends}


@target("accuracy", "brier_score", is_right=lambda score, arguments: 0 <= score <= 2)
def _(name: str) -> Any:
    return getattr(scores, name), labels()


@target("expected_calibration_error", is_right=lambda score, arguments: 0 <= score <= 1)
def _(name: str) -> Any:
    return scores.expected_calibration_error, {**labels(), "num_bins": 4}


@target("auroc", is_right=lambda score, arguments: 0 <= score <= 1)
def _(name: str) -> Any:
    return scores.auroc, {"negative": torch.randn(5), "positive": torch.randn(4)}


@target("confidence_bins", "reliability_curve")
def _(name: str) -> Any:
    return getattr(calibration, name), {**labels(), "num_bins": 4}


@target("gaussian_pit", is_right=lambda pit, arguments: bool(((pit >= 0) & (pit <= 1)).all()))
def _(name: str) -> Any:
    return calibration.gaussian_pit, normals()


@target("rank_pit", is_right=lambda pit, arguments: bool(((pit >= 0) & (pit <= 1)).all()))
def _(name: str) -> Any:
    return calibration.rank_pit, {"y": torch.randn(N, 1), "draws": torch.randn(7, N, 1)}


@target("coverage_curve")
def _(name: str) -> Any:
    return calibration.coverage_curve, {"pit": torch.rand(N), "levels": torch.tensor([0.5, 0.9])}


@target("dispersion")
def _(name: str) -> Any:
    return calibration.dispersion, {"pit": torch.rand(N)}


@target("chi_square_p_value")
def _(name: str) -> Any:
    return calibration.chi_square_p_value, {"counts": torch.tensor([4, 5, 3])}


def plotted(plot_fn: Callable[..., Any], arguments: Arguments) -> Any:
    """A plot into axes that are closed again."""
    pyplot = importlib.import_module("matplotlib.pyplot")

    def plot(**arguments: Any) -> None:
        try:
            plot_fn(**arguments)
        finally:
            pyplot.close("all")

    return plot, arguments


@target("plot_predictive_band", cost=40)
def _(name: str) -> Any:
    model = make_model(num_inputs=1)
    x, guide = torch.linspace(-1, 1, 7).unsqueeze(-1), MeanFieldGuide(model)
    options = {"data": (x, x), "truth": x, "level": 0.8, "output": 0, "noise": True}
    return plotted(
        plots.plot_predictive_band, {"model": model, "posteriors": guide, "x": x, **options}
    )


@target("plot_components", cost=40)
def _(name: str) -> Any:
    arguments = without(judged("guide"), "y")
    return plotted(plots.plot_components, {**arguments, "units": [0, 1], "output": 0, "level": 0.8})


@target("plot_learning_curves", cost=40)
def _(name: str) -> Any:
    history = History([{"loss": 1.0, "val_loss": 2.0}] * 3, best_epoch=2)
    return plotted(plots.plot_learning_curves, {"history": history})


@target("plot_reliability", cost=40)
def _(name: str) -> Any:
    return plotted(plots.plot_reliability, {**labels(), "num_bins": 4})


@target("plot_pit", cost=40)
def _(name: str) -> Any:
    return plotted(plots.plot_pit, {"pit": torch.rand(N), "num_bins": 4})


@target("plot_coverage", cost=40)
def _(name: str) -> Any:
    return plotted(plots.plot_coverage, {"pit": {"a": torch.rand(N), "b": torch.rand(N)}})


@target("plot_comparison", cost=40)
def _(name: str) -> Any:
    return plotted(plots.plot_comparison, {"comparison": a_comparison()})


@target("plot_sbc", cost=40)
def _(name: str) -> Any:
    result = a_calibration()
    return plotted(plots.plot_sbc, {"result": result, "names": result.names[:2], "num_bins": 5})


@target("plot_k_hat", cost=40)
def _(name: str) -> Any:
    left_out = checks.LeaveOneOut(0.0, 1.0, 1.0, torch.rand(N), torch.rand(N))
    return plotted(plots.plot_k_hat, {"left_out": left_out})


SKLEARN = ("sklearn", "numpy", "scipy", "pandas")
ESTIMATORS = {"DAKRegressor": DAKRegressor, "DAKClassifier": DAKClassifier}
ADDITIVE = {
    "DAKAdditiveRegressor": pyro_dak.DAKAdditiveRegressor,
    "DAKAdditiveClassifier": pyro_dak.DAKAdditiveClassifier,
}
QUICK: Arguments = {
    "hidden_layer_sizes": (4,), "num_units": 2, "level": 2, "epochs": 1, "batch_size": 16,
    "early_stopping": False, "random_state": 0, "device": "cpu", "progress": False,
}  # fmt: skip


def a_table(name: str) -> Arguments:
    X = np.random.default_rng(0).normal(size=(24, 3))
    return {"X": X, "y": np.arange(24) % 3 if "Classifier" in name else X[:, 0]}


@functools.cache
def a_fitted_estimator(name: str) -> Any:
    return an_estimator(name).fit(**a_table(name))


def an_estimator(name: str) -> Any:
    return ADDITIVE[name](level=3) if name in ADDITIVE else ESTIMATORS[name](**QUICK)


@target(*ESTIMATORS, *ADDITIVE, cost=12, words_of=SKLEARN)
def _(name: str) -> Any:
    table = a_table(name)

    def make_and_fit(**arguments: Any) -> Any:
        return (ESTIMATORS | ADDITIVE)[name](**arguments).fit(**table).predict(table["X"])

    if name in ADDITIVE:
        return make_and_fit, {"pairs": 1, "level": 3}
    options = {"ensemble_size": 2, "learning_rate": 0.01, "weight_decay": 0.1, "refit": True}
    options |= {"early_stopping": True, "validation_fraction": 0.3, "warm_start": False}
    options |= {"heteroscedastic": True} if name == "DAKRegressor" else {}
    return make_and_fit, QUICK | options


@target(*[f"{name}.{method}" for name in ESTIMATORS for method in ("fit", "partial_fit")],
        *[f"{name}.fit" for name in ADDITIVE], cost=8, words_of=SKLEARN)  # fmt: skip
def _(name: str) -> Any:
    kind, method = name.split(".")
    arguments = {**a_table(kind), "sample_weight": np.ones(24)}
    if name == "DAKClassifier.partial_fit":
        arguments["classes"] = np.arange(3)
    elif method == "partial_fit":
        arguments |= {"update_network": False, "forget": 0.9}
    return getattr(an_estimator(kind), method), arguments


def _has_rows(result: Any, arguments: Arguments) -> bool:
    return len(result) == len(arguments["X"])


@target("DAKRegressor.predict", "DAKRegressor.predict_interval", "DAKRegressor.predict_quantiles",
        "DAKClassifier.predict", "DAKClassifier.predict_proba", "DAKAdditiveRegressor.predict",
        "DAKAdditiveRegressor.predict_interval", "DAKAdditiveRegressor.predict_quantiles",
        "DAKAdditiveClassifier.predict", "DAKAdditiveClassifier.predict_proba",
        is_right=_has_rows, words_of=SKLEARN)  # fmt: skip
def _(name: str) -> Any:
    kind, method = name.split(".")
    own = {"predict_interval": {"level": 0.8}, "predict_quantiles": {"quantiles": [0.1, 0.5]}}
    return getattr(a_fitted_estimator(kind), method), {"X": a_table(kind)["X"]} | own.get(
        method, {}
    )


ALL_ESTIMATORS = [*ESTIMATORS, *ADDITIVE]


@target(*[f"{name}.predict_dist" for name in ALL_ESTIMATORS], numbers="infinite", words_of=SKLEARN)
def _(name: str) -> Any:
    kind = name.split(".")[0]
    return a_fitted_estimator(kind).predict_dist, {"X": a_table(kind)["X"]}


@target(*[f"{name}.export" for name in ALL_ESTIMATORS], cost=80, words_of=SKLEARN)
def _(name: str) -> Any:
    kind = name.split(".")[0]
    arguments = {"path": "model.onnx", "x": a_table(kind)["X"], "overwrite": False}
    return a_fitted_estimator(kind).export, arguments


@target(*[f"{name}.save" for name in ALL_ESTIMATORS], cost=2)
def _(name: str) -> Any:
    arguments = {"path": "estimator", "overwrite": True}
    return a_fitted_estimator(name.split(".")[0]).save, arguments


@target(*[f"{name}.load" for name in ALL_ESTIMATORS], cost=3)
def _(name: str) -> Any:
    kind = name.split(".")[0]
    return (ESTIMATORS | ADDITIVE)[kind].load, {"path": a_fitted_estimator(kind).save("estimator")}


@target(*[f"{name}.explain" for name in ADDITIVE], "DAKAdditiveRegressor.posterior_moments",
        numbers="infinite", words_of=SKLEARN)  # fmt: skip
def _(name: str) -> Any:
    kind, method = name.split(".")
    return getattr(a_fitted_estimator(kind), method), {"X": a_table(kind)["X"]}


@target(*[f"{name}.shape_function" for name in ADDITIVE], words_of=SKLEARN)
def _(name: str) -> Any:
    return a_fitted_estimator(name.split(".")[0]).shape_function, {"column": "x1"}


# ------------------------------------------------------------------------------ judgement


class TookTooLong(BaseException):
    """A call did not end."""


def _stop(*_: object) -> None:
    raise TookTooLong


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TookTooLong` after some CPU seconds, or ten times as many on the clock.

    In the main thread. A call that waits ends by the clock; one that computes beside busy
    neighbours is not judged by them.
    """
    timers = [
        (signal.ITIMER_PROF, signal.SIGPROF, seconds),
        (signal.ITIMER_REAL, signal.SIGALRM, 10 * seconds),
    ]
    previous = [signal.signal(number, _stop) for _, number, _ in timers]
    for timer, _, limit in timers:
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for (timer, number, _), handler in zip(timers, previous, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def is_well_said(error: BaseException, words_of: tuple[str, ...]) -> bool:
    """Whether the library raised the error by a `raise` statement of its own.

    Or whether one of the packages in `words_of` said that a type or value is wrong.
    """
    traceback = error.__traceback__
    assert traceback is not None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code
    if any(f"{package}{os.sep}" in code.co_filename for package in words_of):
        return isinstance(error, TypeError | ValueError)
    is_raise = opcode.opname[code.co_code[traceback.tb_lasti]] == "RAISE_VARARGS"
    is_ours = code.co_filename.startswith(PACKAGE)
    return is_raise and is_ours and not isinstance(error, AssertionError)


def numbers(result: Any) -> Iterator[Any]:
    """All tensors, arrays and floats in a result."""
    if isinstance(result, Tensor | np.ndarray | float):
        yield result
    elif isinstance(result, nn.Module):
        yield from result.state_dict().values()
    elif isinstance(result, Mapping):
        yield from (number for part in result.values() for number in numbers(part))
    elif isinstance(result, tuple | list):
        yield from (number for part in result for number in numbers(part))
    elif dataclasses.is_dataclass(result):
        yield from numbers([getattr(result, f.name) for f in dataclasses.fields(result)])


def are_allowed(result: Any, kind: str) -> bool:
    """Whether all numbers in a result are of a kind: "finite", "infinite" too, or "any" at all."""
    for number in numbers(result):
        if kind == "any" or (isinstance(number, np.ndarray) and number.dtype.kind not in "fc"):
            continue
        if isinstance(number, Tensor) and number.is_meta:
            continue
        value = number.detach() if isinstance(number, Tensor) else torch.as_tensor(number)
        value = value.to_dense() if value.layout != torch.strided else value
        is_bad = value.isnan() if kind == "infinite" else ~value.isfinite()
        if bool(is_bad.any()):
            return False
    return True


def answer(case: Target, call_fn: Callable[..., Any], arguments: Arguments) -> str | None:
    """What is wrong with the answer to a call, or None."""
    try:
        with warnings.catch_warnings(record=True) as caught, torch.enable_grad():
            warnings.simplefilter("always")
            with time_limit(20.0), contextlib.redirect_stdout(None):
                result = call_fn(**arguments)
    except TookTooLong:
        return "took more than 20 s of CPU time"
    except Exception as error:
        if is_well_said(error, case.words_of):
            return None
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    is_told = any("not finite" in str(warning.message) for warning in caught)
    if not is_told and not are_allowed(result, case.numbers):
        return "is not finite"
    if not case.is_right(result, arguments):
        return "is not right"
    return None


def run_call(
    index: int, seed: int, name: str | None = None, num_odd: int | None = None
) -> Fault | None:
    """Make call number `index`; the same number and seed give the same call."""
    rng = random.Random(f"{seed} {index} {name}")
    weights = [1 / case.cost for case in TARGETS.values()]
    case = TARGETS[name] if name else rng.choices(list(TARGETS.values()), weights)[0]
    home = os.getcwd()
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        os.chdir(folder)
        try:
            torch.manual_seed(rng.randrange(2**31))
            call_fn, arguments = case.make()
            count = rng.choice((1, 1, 2)) if num_odd is None else num_odd
            odd = {}
            for key in rng.sample(sorted(arguments), min(count, len(arguments))):
                odd[key] = odd_value(arguments[key], rng)
            arguments |= {key: value for key, (value, _) in odd.items()}
            wrong = answer(case, call_fn, arguments)
        finally:
            os.chdir(home)
    if wrong is None:
        return None
    label = ", ".join(f"{key}: {what}" for key, (_, what) in odd.items())
    return Fault(index, case.name, label, wrong)


def public_callables() -> set[str]:
    """Names of all public functions, classes and methods that are to be attacked."""
    names = {"FunctionDraws.__call__", "FunctionDraws.__getitem__"}
    for room in ("", *ROOMS):
        module = importlib.import_module(f"pyro_dak.{room}".rstrip("."))
        for name in module.__all__:
            value = getattr(module, name)
            if name not in RESULTS and callable(value):
                names.add(name)
            if inspect.isclass(value) and name not in ("GaussianGuide", "TrilGuide"):
                names |= {f"{name}.{method}" for method in _methods(value)}
    return names


def _methods(kind: type) -> set[str]:
    own = [base for base in kind.__mro__ if base.__module__.startswith("pyro_dak")]
    methods = {
        name
        for base in own
        for name, value in vars(base).items()
        if inspect.isfunction(value) or isinstance(value, classmethod)
    }
    for pattern, names in METHODS.items():
        if fnmatch.fnmatchcase(kind.__name__, pattern):
            return methods & set(names.split())
    return {name for name in methods if not name.startswith("_")}


def fuzz(
    num_calls: int, seed: int = 0, name: str | None = None, progress: bool = True
) -> list[Fault]:
    """The faults among a number of calls."""
    calls = tqdm(range(num_calls), desc="calls", disable=not progress)
    return [fault for index in calls if (fault := run_call(index, seed, name)) is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=sorted(TARGETS))
    args = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    faults = fuzz(args.calls, args.seed, args.target)
    for fault in faults:
        print(f"{fault.index:>6} {fault.target}({fault.arguments}): {fault.answer}")
    print(f"{len(faults)} of {args.calls} calls were not well answered")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
