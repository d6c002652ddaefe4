"""A model and its guide as plain data, and back: what is stored beside the weights.

Only classes listed here are ever built from a description, with numbers, strings and lists as
arguments: reading one runs no code of its author.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import pyro.infer.autoguide as autoguide
import torch
from torch import Tensor, nn

from pyro_dak.additive import kernels
from pyro_dak.additive.scaling import SCALINGS, MinMax, Standardize
from pyro_dak.inference.guides import base as guides
from pyro_dak.inference.guides import joint as joint_guides
from pyro_dak.model import likelihoods, priors
from pyro_dak.model.dak import DAK
from pyro_dak.model.modes import evaluating, local_parameters

__all__ = [
    "build_guide",
    "build_likelihood",
    "build_model",
    "build_network",
    "describe_guide",
    "describe_likelihood",
    "describe_model",
    "describe_network",
    "differences",
    "set_up_guide",
]

Description = dict[str, Any]


def _by_name(*classes: type) -> dict[str, Any]:
    return {c.__name__: c for c in classes}


_KERNELS = _by_name(kernels.LaplaceKernel, kernels.MaternKernel, kernels.RBFKernel)
_PRIORS = _by_name(
    priors.GammaScalePrior,
    priors.HorseshoePrior,
    priors.LaplacePrior,
    priors.NormalPrior,
    priors.StudentTPrior,
)
_LIKELIHOODS = _by_name(
    likelihoods.BernoulliLikelihood,
    likelihoods.CategoricalLikelihood,
    likelihoods.GaussianLikelihood,
    likelihoods.HeteroscedasticLikelihood,
    likelihoods.PoissonLikelihood,
    likelihoods.StudentTLikelihood,
)
_GUIDES = _by_name(
    joint_guides.FullRankGuide,
    joint_guides.LowRankGuide,
    guides.MeanFieldGuide,
    guides.UnitBlockGuide,
)
_AUTOGUIDES = _by_name(
    autoguide.AutoDelta,
    autoguide.AutoDiagonalNormal,
    autoguide.AutoLowRankMultivariateNormal,
    autoguide.AutoMultivariateNormal,
    autoguide.AutoNormal,
)
# Layers of networks that can be described, with the names of the arguments that make them.
_POOL = "kernel_size stride padding"
_NORM = "num_features eps momentum affine track_running_stats"
_LAYERS: dict[type[nn.Module], str] = {
    nn.AdaptiveAvgPool2d: "output_size",
    nn.AvgPool2d: f"{_POOL} ceil_mode count_include_pad divisor_override",
    nn.BatchNorm1d: _NORM,
    nn.BatchNorm2d: _NORM,
    nn.Conv2d: f"in_channels out_channels {_POOL} dilation groups bias padding_mode",
    nn.Dropout: "p",
    nn.Dropout2d: "p",
    nn.ELU: "alpha",
    nn.Flatten: "start_dim end_dim",
    nn.GELU: "approximate",
    nn.Identity: "",
    nn.LayerNorm: "normalized_shape eps elementwise_affine bias",
    nn.LeakyReLU: "negative_slope",
    nn.Linear: "in_features out_features bias",
    nn.MaxPool2d: f"{_POOL} dilation return_indices ceil_mode",
    nn.ReLU: "",
    nn.SiLU: "",
    nn.Sigmoid: "",
    nn.Softplus: "beta threshold",
    nn.Tanh: "",
}
_LAYERS_BY_NAME = _by_name(*_LAYERS)


def _plain(value: Any) -> Any:
    """Tensors and tuples as lists; a bias as whether there is one."""
    if isinstance(value, nn.Parameter):
        return True
    if isinstance(value, Tensor):
        return value.detach().double().cpu().tolist()
    return list(value) if isinstance(value, tuple) else value


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _look_up(kind: str, name: object, known: Mapping[str, Any]) -> Any:
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}; known are {', '.join(sorted(known))}")
    return known[name]  # type: ignore[index]


def describe_network(network: nn.Module) -> Description | None:
    """A network made of listed layers as data, or None if it has any other part."""
    if type(network) is nn.Sequential:
        # Not `named_children`, which names a module that stands twice, a ReLU say, only once.
        children = [[name, describe_network(child)] for name, child in network._modules.items()]
        if any(child is None for _, child in children):
            return None
        return {"name": "Sequential", "children": children}
    if type(network) not in _LAYERS:
        return None
    arguments = {name: getattr(network, name) for name in _LAYERS[type(network)].split()}
    if "bias" in arguments:
        arguments["bias"] = arguments["bias"] is not None
    return {"name": type(network).__name__} | {k: _plain(v) for k, v in arguments.items()}


def build_network(description: Description) -> nn.Module:
    """The network that `describe_network` described, with fresh weights."""
    if description["name"] == "Sequential":
        children = ((str(name), build_network(child)) for name, child in description["children"])
        return nn.Sequential(OrderedDict(children))
    arguments = {key: _tuples(value) for key, value in description.items()}
    return _build("layer", arguments, _LAYERS_BY_NAME)


def describe_model(model: DAK) -> Description:
    """Everything that made a model, as data; the extractor is None if it cannot be described."""
    grid = model.layer.activation.grid
    scaling = model.scaling
    _named("scaling", scaling, _by_name(*SCALINGS.values()))
    names = {cls: name for name, cls in SCALINGS.items()}
    scaling_arguments: tuple[str, ...] = {
        Standardize: ("momentum", "num_std", "eps"),
        MinMax: ("momentum", "eps"),
    }.get(type(scaling), ())
    return {
        "feature_extractor": describe_network(model.feature_extractor),
        "feature_dim": model.feature_dim,
        "num_units": model.num_units,
        "num_outputs": model.num_outputs,
        "level": grid.level,
        "bounds": list(grid.bounds),
        "kernel": _describe_dataclass("kernel", model.layer.activation.kernel, _KERNELS),
        "likelihood": describe_likelihood(model.likelihood),
        "scaling": names[type(scaling)],
        "scaling_options": {name: getattr(scaling, name) for name in scaling_arguments},
        "embedding": model.embedding is not None,
        "prior": {
            name: _describe_dataclass(f"prior of {name}", prior, _PRIORS)
            for name, prior in model.prior.items()
            if name != "global_shrinkage"
        },
        "linear_term": model.layer.linear_term,
    }


def build_model(description: Description, feature_extractor: nn.Module | None = None) -> DAK:
    """The model that `describe_model` described, with fresh weights."""
    arguments = dict(description)
    network = arguments.pop("feature_extractor")
    if feature_extractor is None:
        if network is None:
            raise ValueError(
                "the feature extractor is a class of its own and was stored as weights only; "
                "pass one of the same architecture as `feature_extractor`"
            )
        feature_extractor = build_network(network)
    options = arguments.pop("scaling_options")
    for name in options:
        _look_up("option of the scaling", name, dict.fromkeys(("momentum", "num_std", "eps")))
    arguments["bounds"] = tuple(arguments["bounds"])
    arguments["kernel"] = _build("kernel", arguments["kernel"], _KERNELS)
    arguments["likelihood"] = build_likelihood(arguments["likelihood"])
    arguments["prior"] = {k: _build("prior", v, _PRIORS) for k, v in arguments["prior"].items()}
    model = DAK(feature_extractor, **arguments)
    for name, value in options.items():
        setattr(model.scaling, name, float(value))
    return model


def describe_guide(guide: nn.Module) -> Description:
    """The class of a guide and its rank, if it has one; the name is None for an unknown class."""
    name = type(guide).__name__
    if (_GUIDES | _AUTOGUIDES).get(name) is not type(guide):
        return {"name": None, "class": name}
    rank = getattr(guide, "rank", None)
    return {"name": name} | ({} if rank is None else {"rank": rank})


def build_guide(description: Description, model: DAK, example: Tensor | None) -> nn.Module:
    """The guide that `describe_guide` described, with fresh weights.

    Args:
        description: from `describe_guide`.
        model: the model.
        example: inputs of the right shape, from which Pyro's autoguides learn their sites.
    """
    arguments = dict(description)
    name = arguments.pop("name")
    if name is None:
        raise ValueError(
            f"the guide is a class of its own ({arguments.get('class')}) and was stored as weights "
            "only; pass a function from the model to such a guide as `guide`"
        )
    if name in _GUIDES:
        return _GUIDES[name](model, **arguments)
    guide: nn.Module = _look_up("guide", name, _AUTOGUIDES)(model, **arguments)
    if example is None:
        raise ValueError(f"{name} needs the shape of the inputs, which was not stored")
    set_up_guide(guide, model, example)
    return guide


def set_up_guide(guide: nn.Module, model: DAK, example: Tensor) -> None:
    """Let an autoguide of Pyro, which is built lazily, learn the latent sites from a dry run.

    The targets must be given: an unobserved `y` would count as one more latent site.
    """
    if isinstance(guide, guides.GaussianGuide) or getattr(guide, "prototype_trace", 0) is not None:
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
    elif then != now and not _is_unknown(then, now, name):
        yield f"{name}: {then} then, {now} now"


def _is_unknown(then: Any, now: Any, name: str) -> bool:
    """Whether one side cannot be described, or is of another format."""
    parts = ("model", "guide", "model.feature_extractor", "guide.name")
    is_missing = (then is None or now is None) and name in parts
    return is_missing or {type(then), type(now)} == {dict, list}


def describe_likelihood(likelihood: likelihoods.Likelihood) -> Description:
    """The class of a likelihood and the arguments that make it, as data."""
    description = _named("likelihood", likelihood, _LIKELIHOODS)
    noise = getattr(likelihood, "noise", None)
    if noise is not None:
        description["noise_scale"] = _plain(noise().detach())
        description["learn"] = isinstance(noise.log_scale, nn.Parameter)
    if isinstance(likelihood, likelihoods.StudentTLikelihood):
        description["df"] = likelihood.df
    return description


def build_likelihood(description: Description) -> likelihoods.Likelihood:
    """The likelihood that `describe_likelihood` described."""
    arguments = dict(description)
    if isinstance(arguments.get("noise_scale"), list):
        arguments["noise_scale"] = torch.tensor(arguments["noise_scale"])
    return _build("likelihood", arguments, _LIKELIHOODS)


def _named(kind: str, value: Any, known: Mapping[str, Any]) -> Description:
    """The name of the class of a value, which must be known."""
    name = type(value).__name__
    if known.get(name) is not type(value):
        raise ValueError(
            f"the {kind} ({name}) is an object of your own: it cannot be stored as data. Use one "
            f"of {', '.join(sorted(known))}, or store the state_dict of the model instead."
        )
    return {"name": name}


def _describe_dataclass(kind: str, value: Any, known: Mapping[str, Any]) -> Description:
    return _named(kind, value, known) | asdict(value)


def _build(kind: str, description: Description, known: Mapping[str, Any]) -> Any:
    arguments = dict(description)
    return _look_up(kind, arguments.pop("name"), known)(**arguments)
