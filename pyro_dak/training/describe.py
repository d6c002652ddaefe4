"""A model and its guide as plain data, and back: what is stored beside the weights.

Only classes listed here are ever built from a description, with numbers, strings and lists as
arguments: reading one runs no code of its author.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from types import ModuleType
from typing import Any

import pyro.infer.autoguide as autoguide
import torch
from torch import Tensor, nn

from pyro_dak.additive import kernels
from pyro_dak.additive.scaling import SCALINGS
from pyro_dak.inference import guides
from pyro_dak.model import likelihoods, priors
from pyro_dak.model.dak import DAK
from pyro_dak.model.modes import evaluating, local_parameters

__all__ = ["describe", "differences", "rebuild", "set_up_guide"]

Description = dict[str, Any]


def _classes(module: ModuleType, names: str) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names.split()}


_KERNELS = _classes(kernels, "LaplaceKernel MaternKernel RBFKernel")
_PRIORS = _classes(priors, "GammaScalePrior HorseshoePrior LaplacePrior NormalPrior StudentTPrior")
_LIKELIHOODS = _classes(
    likelihoods,
    "BernoulliLikelihood CategoricalLikelihood GaussianLikelihood HeteroscedasticLikelihood "
    "PoissonLikelihood StudentTLikelihood",
)
_GUIDES = _classes(guides, "FullRankGuide LowRankGuide MeanFieldGuide UnitBlockGuide") | _classes(
    autoguide,
    "AutoDelta AutoDiagonalNormal AutoLowRankMultivariateNormal AutoMultivariateNormal AutoNormal",
)
_SCALING_OPTIONS = ("momentum", "num_std", "eps")
# Parts of a description that are None where they cannot be described.
_PARTS = ("model", "guide", "model.feature_extractor", "guide.name")
_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
# Layers of networks that can be described, with the names of the arguments that make them.
_POOL = "kernel_size stride padding"
_LAYERS: dict[type[nn.Module], str] = {
    **dict.fromkeys((nn.Identity, nn.ReLU, nn.SiLU, nn.Sigmoid, nn.Tanh), ""),
    **dict.fromkeys((nn.Dropout, nn.Dropout2d), "p"),
    **dict.fromkeys(
        (nn.BatchNorm1d, nn.BatchNorm2d), "num_features eps momentum affine track_running_stats"
    ),
    nn.AdaptiveAvgPool2d: "output_size",
    nn.AvgPool2d: f"{_POOL} ceil_mode count_include_pad divisor_override",
    nn.Conv2d: f"in_channels out_channels {_POOL} dilation groups bias padding_mode",
    nn.ELU: "alpha",
    nn.Flatten: "start_dim end_dim",
    nn.GELU: "approximate",
    nn.LayerNorm: "normalized_shape eps elementwise_affine bias",
    nn.LeakyReLU: "negative_slope",
    nn.Linear: "in_features out_features bias",
    nn.MaxPool2d: f"{_POOL} dilation return_indices ceil_mode",
    nn.Softplus: "beta threshold",
}
_LAYERS_BY_NAME = {cls.__name__: cls for cls in _LAYERS}


def describe(model: DAK, guide: nn.Module) -> Description:
    """A model and its guide as plain data, from which `rebuild` makes others like them."""
    return {
        "model": _describe_model(model),
        "guide": _describe_guide(guide),
        "dtype": str(model.layer.log_unit_scale.dtype).removeprefix("torch."),
        "input_shape": model.input_shape,
    }


def rebuild(
    description: Description,
    feature_extractor: nn.Module | None = None,
    guide_fn: Callable[[DAK], nn.Module] | None = None,
) -> tuple[DAK, nn.Module]:
    """The model and the guide that `describe` described, with fresh weights, in eval mode.

    `feature_extractor` and `guide_fn` give those that were stored as weights only.
    """
    dtype = _look_up("dtype", description["dtype"], _DTYPES)
    shape = description["input_shape"]
    with torch.random.fork_rng(devices=[]):
        model = _build_model(description["model"], feature_extractor).to(dtype).eval()
        model.input_shape = None if shape is None else tuple(shape)
        guide = _build_guide(description["guide"], model) if guide_fn is None else guide_fn(model)
        if shape is not None:
            set_up_guide(guide, model, torch.zeros(2, *shape, dtype=dtype))
        elif getattr(guide, "prototype_trace", 0) is None:
            name = type(guide).__name__
            raise ValueError(f"{name} needs the shape of the inputs, which was not stored")
    return model, guide.to(dtype).eval()


def _describe_network(network: nn.Module) -> Description | None:
    """A network made of listed layers as data, or None if it has any other part."""
    if type(network) is nn.Sequential:
        # Not `named_children`, which names a module that stands twice, a ReLU say, only once.
        children = [[name, _describe_network(child)] for name, child in network._modules.items()]
        if any(child is None for _, child in children):
            return None
        return {"name": "Sequential", "children": children}
    if type(network) not in _LAYERS:
        return None
    arguments = {name: getattr(network, name) for name in _LAYERS[type(network)].split()}
    if "bias" in arguments:
        arguments["bias"] = arguments["bias"] is not None
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in arguments.items()}
    return {"name": type(network).__name__} | plain


def _build_network(description: Description) -> nn.Module:
    """The network that `_describe_network` described, with fresh weights."""
    if description["name"] == "Sequential":
        children = ((str(name), _build_network(child)) for name, child in description["children"])
        return nn.Sequential(OrderedDict(children))
    arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in description.items()}
    return _build("layer", arguments, _LAYERS_BY_NAME)


def _describe_model(model: DAK) -> Description:
    """Everything that made a model, as data; the extractor is None if it cannot be described."""
    activation, scaling = model.layer.activation, model.scaling
    _named("scaling", scaling, {cls.__name__: cls for cls in SCALINGS.values()})
    return {
        "feature_extractor": _describe_network(model.feature_extractor),
        "feature_dim": model.feature_dim,
        "num_units": model.num_units,
        "num_outputs": model.num_outputs,
        "level": activation.grid.level,
        "bounds": list(activation.grid.bounds),
        "kernel": _named("kernel", activation.kernel, _KERNELS) | asdict(activation.kernel),
        "likelihood": _describe_likelihood(model.likelihood),
        "scaling": next(name for name, cls in SCALINGS.items() if cls is type(scaling)),
        "scaling_options": {
            name: getattr(scaling, name) for name in _SCALING_OPTIONS if hasattr(scaling, name)
        },
        "embedding": model.embedding is not None,
        "prior": {
            name: _named(f"prior of {name}", prior, _PRIORS) | asdict(prior)
            for name, prior in model.prior.items()
            if name != "global_shrinkage"
        },
        "linear_term": model.layer.linear_term,
    }


def _build_model(description: Description, feature_extractor: nn.Module | None = None) -> DAK:
    """The model of a description, with fresh weights."""
    arguments = dict(description)
    network = arguments.pop("feature_extractor")
    if feature_extractor is None:
        if network is None:
            raise ValueError(
                "the feature extractor is a class of its own and was stored as weights only; "
                "pass one of the same architecture as `feature_extractor`"
            )
        feature_extractor = _build_network(network)
    options = arguments.pop("scaling_options")
    for name in options:
        _look_up("option of the scaling", name, dict.fromkeys(_SCALING_OPTIONS))
    arguments["bounds"] = tuple(arguments["bounds"])
    arguments["kernel"] = _build("kernel", arguments["kernel"], _KERNELS)
    likelihood = dict(arguments["likelihood"])
    if isinstance(likelihood.get("noise_scale"), list):
        likelihood["noise_scale"] = torch.tensor(likelihood["noise_scale"])
    arguments["likelihood"] = _build("likelihood", likelihood, _LIKELIHOODS)
    arguments["prior"] = {k: _build("prior", v, _PRIORS) for k, v in arguments["prior"].items()}
    model = DAK(feature_extractor, **arguments)
    for name, value in options.items():
        setattr(model.scaling, name, float(value))
    return model


def _describe_guide(guide: nn.Module) -> Description:
    """The class of a guide and its rank, if it has one; the name is None for an unknown class."""
    name = type(guide).__name__
    if _GUIDES.get(name) is not type(guide):
        return {"name": None, "class": name}
    rank = getattr(guide, "rank", None)
    return {"name": name} | ({} if rank is None else {"rank": rank})


def _build_guide(description: Description, model: DAK) -> nn.Module:
    arguments = dict(description)
    name = arguments.pop("name")
    if name is None:
        raise ValueError(
            f"the guide is a class of its own ({arguments.get('class')}) and was stored as weights "
            "only; pass a function from the model to such a guide as `guide`"
        )
    return _look_up("guide", name, _GUIDES)(model, **arguments)


def set_up_guide(guide: nn.Module, model: DAK, example: Tensor) -> None:
    """Let an autoguide of Pyro, which is built lazily, learn the latent sites from a dry run.

    The targets must be given: an unobserved `y` would count as one more latent site.
    """
    if getattr(guide, "prototype_trace", 0) is not None:
        return
    y = model.likelihood.placeholder_targets(len(example), model.num_outputs)
    with evaluating(model), local_parameters(guide), torch.enable_grad():
        guide(example, y.to(example.device))
    guide.to(example.device)


def differences(then: Any, now: Any, name: str = "") -> Iterator[str]:
    """The entries that two descriptions both have with different values.

    None for a whole part means that it cannot be described. A list in place of a dictionary is of
    another format. A number in place of a list stands for each of its entries.
    """
    if isinstance(then, list) and isinstance(now, int | float):
        now = [now] * len(then)
    elif isinstance(now, list) and isinstance(then, int | float):
        then = [then] * len(now)
    if isinstance(then, dict) and isinstance(now, dict):
        is_learned = then.get("learn") is True and now.get("learn") is True
        for key in sorted((then.keys() & now.keys()) - ({"noise_scale"} if is_learned else set())):
            yield from differences(then[key], now[key], f"{name}.{key}" if name else key)
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for i, pair in enumerate(zip(then, now, strict=True)):
            yield from differences(*pair, f"{name}[{i}]")
    elif isinstance(then, int | float) and isinstance(now, int | float):
        if not math.isclose(then, now, rel_tol=1e-6):  # a logarithm and back, on another device
            yield f"{name}: {then} then, {now} now"
    elif then != now and {type(then), type(now)} != {dict, list}:
        if name not in _PARTS or (then is not None and now is not None):
            yield f"{name}: {then} then, {now} now"


def _describe_likelihood(likelihood: likelihoods.Likelihood) -> Description:
    description = _named("likelihood", likelihood, _LIKELIHOODS)
    noise = getattr(likelihood, "noise", None)
    if noise is not None:
        description["noise_scale"] = noise().detach().double().cpu().tolist()
        description["learn"] = isinstance(noise.log_scale, nn.Parameter)
    if isinstance(likelihood, likelihoods.StudentTLikelihood):
        description["df"] = likelihood.df
    return description


def _named(kind: str, value: Any, known: Mapping[str, Any]) -> Description:
    """The name of the class of a value, which must be known."""
    name = type(value).__name__
    if known.get(name) is not type(value):
        raise ValueError(
            f"the {kind} ({name}) is an object of your own: it cannot be stored as data. Use one "
            f"of {', '.join(sorted(known))}, or store the state_dict of the model instead."
        )
    return {"name": name}


def _look_up(kind: str, name: object, known: Mapping[str, Any]) -> Any:
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}; known are {', '.join(sorted(known))}")
    return known[name]  # type: ignore[index]


def _build(kind: str, description: Description, known: Mapping[str, Any]) -> Any:
    arguments = dict(description)
    return _look_up(kind, arguments.pop("name"), known)(**arguments)
