"""A model and its guide as plain data, and back: what is stored beside the weights.

Only classes listed here, and those that installed packages offer by name (`pyro_dak.registry`), are
ever built from a description, with numbers, strings and lists as arguments: reading one runs no
code of its author. What a description asks for is compared with the weights that are there before
any memory is taken (`check_sizes`).

Of a class of another package the arguments are read from attributes of the same names, as those of
scikit-learn's estimators are, and sequences come back as tuples.
"""

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from types import ModuleType
from typing import Any

import pyro.infer.autoguide as autoguide
import torch
from torch import Tensor, nn

from pyro_dak import registry
from pyro_dak.additive import kernels
from pyro_dak.additive.scaling import SCALINGS
from pyro_dak.inference import guides
from pyro_dak.model import likelihoods, priors
from pyro_dak.model.dak import DAK
from pyro_dak.model.modes import evaluating, local_parameters, with_own_tensors
from pyro_dak.model.rows import (
    Inputs,
    RowShape,
    blank_rows,
    checked_row_shape,
    device_of,
    num_bytes,
    num_rows,
)
from pyro_dak.prediction.novelty import Novelty
from pyro_dak.validation import check_integer, check_positive

__all__ = ["check_sizes", "describe", "differences", "rebuild", "set_up_guide"]

Description = dict[str, Any]


def _classes(module: ModuleType, names: str) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names.split()}


_KERNELS = _classes(kernels, "LaplaceKernel MaternKernel RBFKernel")
_PRIORS = _classes(
    priors, "GammaScalePrior HorseshoePrior LaplacePrior LogNormalPrior NormalPrior StudentTPrior"
)
_LIKELIHOODS = _classes(
    likelihoods,
    "BernoulliLikelihood CategoricalLikelihood GaussianLikelihood HeteroscedasticLikelihood "
    "PoissonLikelihood StudentTLikelihood",
)
_GUIDES = _classes(
    guides, "FullRankGuide LowRankGuide MeanFieldGuide NaturalGuide UnitBlockGuide"
) | _classes(
    autoguide,
    "AutoDelta AutoDiagonalNormal AutoLowRankMultivariateNormal AutoMultivariateNormal AutoNormal",
)
# Bytes of constants per node of a Markov kernel, as measured from level 12 to 20.
_NODE_BYTES = 16 * 1024
_GUIDE_OPTIONS = ("rank", "covariance")
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
# What other packages may offer: in which group of entry points, and as a subclass of what.
_OFFERED: dict[str, tuple[str, type]] = {
    "kernel": ("kernels", kernels.Kernel),
    "likelihood": ("likelihoods", likelihoods.Likelihood),
    "guide": ("guides", nn.Module),
    "model": ("models", DAK),
    "layer": ("models", nn.Module),
}
# Arguments that decide weights at the start only, which the stored ones replace.
_INITIAL = ("init_loc_scale", "init_scale", "prior_scale")


def describe(model: DAK, guide: nn.Module) -> Description:
    """A model and its guide as plain data, from which `rebuild` makes others like them."""
    return {
        "model": _describe_model(model),
        "guide": _describe_guide(guide),
        "dtype": str(model.layer.log_unit_scale.dtype).removeprefix("torch."),
        "input_shape": model.input_shape,
        "novelty": None if model.novelty is None else len(model.novelty.tails.leverage),
    }


def rebuild(
    description: Description,
    feature_extractor: nn.Module | None = None,
    guide_fn: Callable[[DAK], nn.Module] | None = None,
    features: Callable[[Any], Tensor] | None = None,
) -> tuple[DAK, nn.Module]:
    """The model and the guide that `describe` described, with fresh weights, in eval mode.

    `feature_extractor` and `guide_fn` give those that were stored as weights only, and `features`
    the function that was not stored.
    """
    dtype = _look_up("dtype", description["dtype"], _DTYPES)
    shape = _input_shape(description)
    with torch.random.fork_rng(devices=[]):
        model = _build_model(description["model"], feature_extractor, features)
        model.novelty = _novelty(description, model)
        model.to(dtype).eval()
        guide = _build_guide(description["guide"], model) if guide_fn is None else guide_fn(model)
        if feature_extractor is None and _is_listed(description["model"]["feature_extractor"]):
            with _without_network(model):
                example = torch.zeros(2, model.num_input_units or 1, dtype=dtype)
                set_up_guide(guide, model, example)
        elif shape is not None:
            set_up_guide(guide, model, blank_rows(shape, 2, model.layer.log_unit_scale))
        elif _is_lazy(guide):
            name = type(guide).__name__
            raise ValueError(f"{name} needs the shape of the inputs, which was not stored")
        model.input_shape = shape
    return model, guide.to(dtype).eval()


@contextmanager
def _without_network(model: DAK) -> Iterator[None]:
    """The model with features of zero: listed layers have no latent sites to learn of."""
    network, features_fn = model.feature_extractor, model.features_fn
    model.feature_extractor, model.features_fn = _Zeros(model.feature_dim), None
    try:
        yield
    finally:
        model.feature_extractor, model.features_fn = network, features_fn


class _Zeros(nn.Module):
    """Features `(N, feature_dim)` for any x."""

    def __init__(self, feature_dim: int):
        super().__init__()
        self.feature_dim = feature_dim

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), self.feature_dim)


def check_sizes(
    description: Description,
    shapes: Mapping[str, torch.Size],
    max_bytes: int,
    feature_extractor: nn.Module | None = None,
    has_own_guide: bool = False,
) -> None:
    """Raise if the description asks for other weights than those that are there, or for too much.

    The model is built on the meta device, where tensors have shapes and take no memory, and given
    weights of the stored shapes. (The operations that guides start with take a second to import
    there; the parameters of our own are counted, and guides of other packages are built there too.)
    What has no weights may take `max_bytes` bytes in all: the constants of the kernel, inputs for a
    network of one's own, and latent values for a guide of one's own.

    Args:
        description: what `describe` returned, as a file has it.
        shapes: the shapes of the stored weights by name, "model." and "guide.".
        max_bytes: the memory that the description may ask for beyond the weights.
        feature_extractor: as in `rebuild`.
        has_own_guide: whether the guide is given as a function, so that its size is not known.
    """
    meta = torch.device("meta")
    with meta:
        arguments = _model_arguments(description["model"])
    kernel, (low, high) = arguments["kernel"], arguments["bounds"]
    # Of the kernel, shapes depend on whether its lengthscale is learned or has a prior. This one
    # has no constants yet, and finds no grid too coarse.
    lengthscale = kernel.lengthscale if kernel.has_prior else high - low
    arguments["kernel"] = kernels.LaplaceKernel(lengthscale, learn=kernel.learn)
    with meta:
        network = _network(description["model"], feature_extractor)
        cls = _class_of_model(description["model"])
        model = cls(with_own_tensors(network, meta), **arguments).to(meta)
        model.novelty = _novelty(description, model)
    M, num_latent = model.num_inducing, sum(math.prod(s) for s in model.site_shapes.values())
    num_factors = 1 if kernel.is_fixed_number else model.num_units
    needed = M * (_NODE_BYTES if kernel.is_markov else 5 * 8 * M * num_factors)
    if feature_extractor is not None or not _is_listed(description["model"]["feature_extractor"]):
        needed += 2 * num_bytes(_input_shape(description) or ())
    if has_own_guide:
        needed += 16 * num_latent
    if needed > max_bytes:
        raise ValueError(
            f"the model would take {needed / 2**20:.0f} MiB besides its weights, and `max_bytes` "
            f"allows {max_bytes / 2**20:.0f} MiB; pass more if you trust the file"
        )
    rows = shapes.get("model.novelty.tails.leverage")
    if rows != (None if model.novelty is None else model.novelty.tails.leverage.shape):
        raise ValueError(
            f"`novelty` is {description.get('novelty')}, but the reference rows that are stored "
            f"have shape {None if rows is None else tuple(rows)}"
        )
    stored = {n: torch.empty(s, device=meta) for n, s in shapes.items()}
    nn.ModuleDict({"model": model}).load_state_dict(_of(stored, "model."))
    if not has_own_guide:
        _check_guide_size(description["guide"], model, _of(stored, "guide."), num_latent)


def _check_guide_size(
    description: Description, model: DAK, stored: dict[str, Tensor], num_latent: int
) -> None:
    """Raise if the guide has other parameters than those stored; all is on the meta device."""
    if description["name"] not in (None, *_GUIDES):
        with torch.device("meta"):
            guide = _build_guide(description, model)
        if not _is_lazy(guide):
            nn.ModuleDict({"guide": guide}).load_state_dict(stored)
        return
    least = _least_parameters(description, model, num_latent)
    total = sum(tensor.numel() for tensor in stored.values())
    if least > total:
        raise ValueError(f"the guide has {least} parameters or more, but {total} are stored")


def _of(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _is_lazy(guide: nn.Module) -> bool:
    """Whether a guide is an autoguide of Pyro before its first run, without parameters."""
    return getattr(guide, "prototype_trace", 0) is None


def _least_parameters(description: Description, model: DAK, num_latent: int) -> int:
    """A number of parameters that a guide for the model has at least; most are in its matrices."""
    _, options = _guide_arguments(description)
    rank = options.get("rank", math.isqrt(num_latent))  # the default in Pyro
    F, K, z = model.num_functions, model.layer.num_weights, math.prod(model.site_shapes["z"])
    natural = {"joint": F * K**2, "shared": max(F * K, K**2)}
    matrices = {
        "AutoLowRankMultivariateNormal": num_latent * rank,
        "AutoMultivariateNormal": num_latent**2,
        "FullRankGuide": F * K**2,
        "LowRankGuide": F * K * rank,
        "NaturalGuide": natural.get(options.get("covariance", "joint"), F * K),
        "UnitBlockGuide": z * model.num_inducing,
    }
    return matrices.get(description["name"], z)


def _novelty(description: Description, model: DAK) -> Novelty | None:
    """The statistics of a model's training rows, not yet filled in; the number of them is stored.

    Files of earlier versions say nothing of them.
    """
    num_rows = description.get("novelty")
    if num_rows is None:
        return None
    check_integer("novelty", num_rows, minimum=1, maximum=2**32)
    return Novelty.room_for(model, num_rows)


def _input_shape(description: Description) -> RowShape | None:
    shape = description["input_shape"]
    return None if shape is None else checked_row_shape("input_shape", shape)


def _describe_network(network: nn.Module) -> Description | None:
    """A network made of listed layers as data, or None if it has any other part."""
    if type(network) is nn.Sequential:
        # Not `named_children`, which names a module that stands twice, a ReLU say, only once.
        children = [[name, _describe_network(child)] for name, child in network._modules.items()]
        if any(child is None for _, child in children):
            return None
        return {"name": "Sequential", "children": children}
    if type(network) not in _LAYERS:
        known = {**_LAYERS_BY_NAME, "Sequential": nn.Sequential}
        return _describe_offered("layer", network, known)
    arguments = {name: getattr(network, name) for name in _LAYERS[type(network)].split()}
    if "bias" in arguments:
        arguments["bias"] = arguments["bias"] is not None
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in arguments.items()}
    return {"name": type(network).__name__} | plain


def _is_listed(description: Description) -> bool:
    """Whether a network has no parts of other packages."""
    if description["name"] == "Sequential":
        return all(_is_listed(child) for _, child in description["children"])
    return description["name"] in _LAYERS_BY_NAME


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
    route = {} if activation.route == "auto" else {"route": activation.route}
    offered = _offered_name("model", model, {"DAK": DAK})
    own = {} if offered is None else {"name": offered} | _arguments(model, _names_of_arguments(DAK))
    return own | {
        "feature_extractor": _describe_network(model.feature_extractor),
        "feature_dim": model.feature_dim,
        "num_units": model.num_units - model.num_input_units,
        "num_outputs": model.num_outputs,
        "level": activation.grid.level,
        "bounds": list(activation.grid.bounds),
        "kernel": _describe_kernel(activation.kernel),
        "likelihood": _describe_likelihood(model.likelihood),
        "scaling": next(name for name, cls in SCALINGS.items() if cls is type(scaling)),
        "scaling_options": {
            name: getattr(scaling, name) for name in _SCALING_OPTIONS if hasattr(scaling, name)
        },
        "embedding": model.embedding is not None,
        "prior": {
            name: _describe_prior(name, prior)
            for name, prior in model.prior.items()
            if name not in ("global_shrinkage", "lengthscale")
        },
        "linear_term": model.layer.linear_term,
        "input_units": model.num_input_units,
        "has_features_fn": model.features_fn is not None,
        **route,
    }


def _describe_kernel(kernel: kernels.Kernel) -> Description:
    """The kernel as data. That it learns its lengthscale, from the value here, is said if it does.

    So the description of a kernel with a number is what it was in earlier versions.
    """
    description = _named("kernel", kernel, _KERNELS)
    description |= _arguments(kernel, ("lengthscale",)) | {"lengthscale": kernel.lengthscale}
    if not kernel.learn:
        del description["learn"]
    if kernel.has_prior:
        description["lengthscale"] = _describe_prior("lengthscale", kernel.lengthscale)
    elif isinstance(kernel.lengthscale, tuple):
        description["lengthscale"] = list(kernel.lengthscale)
    return description


def _build_model(
    description: Description,
    feature_extractor: nn.Module | None = None,
    features: Callable[[Any], Tensor] | None = None,
) -> DAK:
    """The model of a description, with fresh weights."""
    network = _network(description, feature_extractor)
    if description.get("has_features_fn") and features is None:
        raise ValueError(
            "the model has a function from the output of its network to features, which was not "
            "stored; pass it as `features`"
        )
    model = _class_of_model(description)(
        network, **_model_arguments(description), features=features
    )
    for name, value in description["scaling_options"].items():
        _look_up("option of the scaling", name, dict.fromkeys(_SCALING_OPTIONS))
        if name != "eps" or value != 0:
            check_positive(name, value)
        setattr(model.scaling, name, float(value))
    return model


def _class_of_model(description: Description) -> type[DAK]:
    cls: type[DAK] = _class_of("model", description.get("name", "DAK"), {"DAK": DAK})
    return cls


def _network(description: Description, feature_extractor: nn.Module | None) -> nn.Module:
    """The network that is given, or that of the description, with fresh weights."""
    network = description["feature_extractor"]
    if feature_extractor is not None:
        return feature_extractor
    if network is None:
        raise ValueError(
            "the feature extractor is a class of its own and was stored as weights only; "
            "pass one of the same architecture as `feature_extractor`"
        )
    return _build_network(network)


def _model_arguments(description: Description) -> dict[str, Any]:
    """The arguments of a model but its network."""
    arguments = dict(description)
    for name in ("feature_extractor", "scaling_options"):
        del arguments[name]
    for name in ("has_features_fn", "name"):  # earlier versions had none
        arguments.pop(name, None)
    arguments["bounds"] = tuple(arguments["bounds"])
    kernel = dict(arguments["kernel"])
    if isinstance(kernel.get("lengthscale"), dict):
        kernel["lengthscale"] = _build("prior", kernel["lengthscale"], _PRIORS)
    arguments["kernel"] = _build("kernel", kernel, _KERNELS)
    likelihood = dict(arguments["likelihood"])
    if isinstance(likelihood.get("noise_scale"), list):
        likelihood["noise_scale"] = torch.tensor(likelihood["noise_scale"])
    for name, value in likelihood.items():
        if isinstance(value, dict):
            likelihood[name] = _build(f"prior of {name}", value, _PRIORS)
    arguments["likelihood"] = _build("likelihood", likelihood, _LIKELIHOODS)
    arguments["prior"] = {k: _build("prior", v, _PRIORS) for k, v in arguments["prior"].items()}
    return arguments


def _describe_guide(guide: nn.Module) -> Description:
    """The class of a guide and what made it; the name is None for an unknown class."""
    name = type(guide).__name__
    is_partial = isinstance(guide, guides.GaussianGuide) and not guide.has_all_sites
    if _GUIDES.get(name) is not type(guide) or is_partial:
        model = _names_of_arguments(type(guide))[:1]
        offered = None if is_partial else _describe_offered("guide", guide, _GUIDES, model)
        return offered or {"name": None, "class": name}
    options = {key: getattr(guide, key, None) for key in _GUIDE_OPTIONS}
    return {"name": name} | {key: value for key, value in options.items() if value is not None}


def _build_guide(description: Description, model: DAK) -> nn.Module:
    cls, options = _guide_arguments(description)
    return cls(model, **options)


def _guide_arguments(description: Description) -> tuple[Any, dict[str, Any]]:
    """The class of a guide, and the options that made it."""
    options = dict(description)
    name = options.pop("name")
    if name is None:
        raise ValueError(
            f"the guide is a class of its own ({options.get('class')}) and was stored as weights "
            "only; pass a function from the model to such a guide as `guide`"
        )
    cls = _class_of("guide", name, _GUIDES)
    if name not in _GUIDES:
        return cls, _with_tuples(options)
    for option in options:
        _look_up("option of the guide", option, dict.fromkeys(_GUIDE_OPTIONS))
    if "rank" in options:
        check_integer("rank", options["rank"], minimum=1)
    return cls, options


def set_up_guide(guide: nn.Module, model: DAK, example: Inputs) -> None:
    """Let an autoguide of Pyro, which is built lazily, learn the latent sites from a dry run.

    The targets must be given: an unobserved `y` would count as one more latent site.
    """
    if not _is_lazy(guide):
        return
    y = model.likelihood.placeholder_targets(num_rows(example), model.num_outputs)
    with evaluating(model), local_parameters(guide), torch.enable_grad():
        guide(example, y.to(device_of(example)))
    guide.to(device_of(example))


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
        starts = {"lengthscale", "noise_scale"} if is_learned else set()
        for key in sorted((then.keys() & now.keys()) - starts):
            yield from differences(then[key], now[key], f"{name}.{key}" if name else key)
        if "lengthscale" in then and bool(then.get("learn")) != bool(now.get("learn")):
            yield f"{name}.learn: {bool(then.get('learn'))} then, {bool(now.get('learn'))} now"
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for i, pair in enumerate(zip(then, now, strict=True)):
            yield from differences(*pair, f"{name}[{i}]")
    elif isinstance(then, int | float) and isinstance(now, int | float):
        if then != now and not _is_close(then, now):
            yield f"{name}: {then} then, {now} now"
    elif then != now and {type(then), type(now)} != {dict, list}:
        if name not in _PARTS or (then is not None and now is not None):
            yield f"{name}: {then} then, {now} now"


def _is_close(then: float, now: float) -> bool:
    """Whether two numbers differ as little as after a logarithm and back, on another device."""
    try:
        return math.isclose(then, now, rel_tol=1e-6)
    except OverflowError:  # an integer beyond all floating-point numbers
        return False


def _describe_likelihood(likelihood: likelihoods.Likelihood) -> Description:
    description = _named("likelihood", likelihood, _LIKELIHOODS)
    noise = getattr(likelihood, "noise", None)
    if noise is not None:
        description["noise_scale"] = noise().detach().double().cpu().tolist()
        description["learn"] = isinstance(noise.log_scale, nn.Parameter)
    if isinstance(likelihood, likelihoods.StudentTLikelihood):
        description["df"] = likelihood.df
    for name, prior in getattr(likelihood, "parameter_priors", {}).items():
        description[name] = _describe_prior(name, prior)
    if type(likelihood) not in _LIKELIHOODS.values():
        description |= _arguments(likelihood, description)
    return description


def _describe_prior(name: str, prior: Any) -> Description:
    return _named(f"prior of {name}", prior, _PRIORS) | asdict(prior)


def _named(kind: str, value: Any, known: Mapping[str, Any]) -> Description:
    """The name of the class of a value, which must be known or offered by another package."""
    name = type(value).__name__
    if known.get(name) is type(value):
        return {"name": name}
    offered = _offered_name(kind, value, known)
    if offered is None:
        raise ValueError(
            f"the {kind} ({name}) is an object of your own: it cannot be stored as data. Use one "
            f"of {', '.join(sorted(known))}, or store the state_dict of the model instead. A "
            "package can offer its classes by name: see `pyro_dak.registry`."
        )
    return {"name": offered}


def _offered_name(kind: str, value: Any, known: Mapping[str, Any]) -> str | None:
    """The name under which another package offers the class of a value, or None."""
    if kind not in _OFFERED or type(value) in known.values():
        return None
    name = registry.name_of(_OFFERED[kind][0], type(value))
    if name in known:
        raise ValueError(
            f"the {kind} {type(value).__name__} is offered by its package as {name!r}, which is a "
            "class of pyro_dak. Offer it under another name."
        )
    return name


def _describe_offered(
    kind: str, value: Any, known: Mapping[str, Any], given: Iterable[str] = ()
) -> Description | None:
    """A part that may be stored as weights only, by the name that it is offered under, or None.

    It is None too where its arguments are no data, so that training does not stop at a checkpoint.
    """
    try:
        name = _offered_name(kind, value, known)
        return None if name is None else {"name": name} | _arguments(value, given)
    except ValueError:
        return None


def _class_of(kind: str, name: object, known: Mapping[str, Any]) -> Any:
    """The class of a name that is known, or that an installed package offers."""
    if kind not in _OFFERED or (isinstance(name, str) and name in known):
        return _look_up(kind, name, known)
    group, base = _OFFERED[kind]
    names = registry.names(group)
    if not isinstance(name, str) or name not in names:
        raise ValueError(
            f"unknown {kind} {name!r:.80}; known are {', '.join(sorted({*known, *names}))}. Any "
            "other must be offered by a package that is installed (see `pyro_dak.registry`)"
        )
    cls = registry.find(group, name)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise TypeError(f"{name!r} in `pyro_dak.{group}` is no class of a {kind}")
    return cls


def _names_of_arguments(cls: type) -> list[str]:
    """The names of the arguments that make an object of a class, but for * and **."""
    many = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in inspect.signature(cls).parameters.values() if p.kind not in many]


def _arguments(value: Any, known: Iterable[str] = ()) -> Description:
    """The arguments that made an object, but for those known, from attributes of the same names."""
    cls, found = type(value).__name__, Description()
    for name in _names_of_arguments(type(value)):
        if name in known or name in _INITIAL:
            continue
        if not hasattr(value, name) or name == "name":
            raise ValueError(
                f"the argument `{name}` of {cls} cannot be stored: it must be an attribute of the "
                "same name, and not be called `name`. Keep it as `self.<argument>`."
            )
        found[name] = getattr(value, name)
        if not _is_plain(found[name]):
            raise ValueError(
                f"`{name}` of {cls} must be a number, a string, True, False, None, or a list of "
                f"these to be stored as data; got {type(found[name]).__name__}."
            )
    return {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _with_tuples(arguments: Description) -> Description:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in arguments.items()}


def _look_up(kind: str, name: object, known: Mapping[str, Any]) -> Any:
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}; known are {', '.join(sorted(known))}")
    return known[name]  # type: ignore[index]


def _build(kind: str, description: Description, known: Mapping[str, Any]) -> Any:
    arguments = dict(description)
    name = arguments.pop("name")
    cls = _class_of(kind, name, known)
    return cls(**(arguments if name in known else _with_tuples(arguments)))
