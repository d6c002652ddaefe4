"""The one seam to the fast path: q(f) as a function of x, for weights that stay as they are."""

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pyro_dak.additive.activation import KernelActivation, dense_is_faster
from pyro_dak.additive.gaussian import FunctionMoments, moments_of_draws
from pyro_dak.additive.layer import AdditiveLayer
from pyro_dak.additive.scaling import SCALINGS
from pyro_dak.fast.compiling import Compiled
from pyro_dak.fast.serving import KeptResults, affine_units, are_plain
from pyro_dak.inference.densities import draw_functions
from pyro_dak.inference.guides import MeanFieldGuide
from pyro_dak.inference.guides.base import check_guide
from pyro_dak.model.dak import DAK
from pyro_dak.model.inputs import check_model
from pyro_dak.model.modes import is_mixed, own_precision
from pyro_dak.model.rows import Inputs, call
from pyro_dak.validation import check_integer

__all__ = ["affine_parts", "freeze", "freeze_with_features"]

_COMPILED: WeakKeyDictionary[DAK, Compiled] = WeakKeyDictionary()
_FROM_NODES = KeptResults()  # moments as functions of h, by guide
# The arguments of `_moments_from_nodes`.
_WEIGHTS = ("z_loc", "z_log_scale", "mu_loc", "mu_log_scale")
_SCALES = KeptResults()  # gains and shifts, by scaling


@torch.no_grad()
def freeze(
    model: DAK,
    guide: Any,
    sites: dict[str, Tensor] | None = None,
    residual_variance: bool = False,
    *,
    num_rows: int = 1,
    compile: bool = False,
) -> Callable[[Inputs], FunctionMoments]:
    """q(f) as a function of inputs x `(N, ...)`, in eval mode and without gradients.

    In its plain form this is `guide.moments(model.layer, model.unit_inputs(x))`. For the exact
    classes that it knows, with nothing hooked to them, it takes the weights as they are now and
    returns the same numbers with fewer operations.

    Args:
        model: the model, in eval mode.
        guide: a guide with a closed form; it is not looked at if there are `sites`.
        sites: draws of all sites, `(S, *event)` or `(S, 1, *event)`, for a posterior without a
            closed form (see `pyro_dak.inference.draws`). Mean and covariance of f are then those
            over the draws.
        residual_variance: whether to add the prior variance that the grid loses.
        num_rows: how many inputs there will be; preparations that pay only for many depend on it.
        compile: whether to compile network and last layer, once for each model.
    """
    check_model(model)
    check_integer("num_rows", num_rows, minimum=0)
    if sites is None:
        check_guide(model, guide)
    both = freeze_with_features(
        model,
        guide,
        sites,
        residual_variance,
        num_rows=num_rows,
        compile=compile,
        with_features=False,
    )
    return torch.no_grad()(lambda x: both(x)[0])


def freeze_with_features(
    model: DAK,
    guide: Any,
    sites: dict[str, Tensor] | None = None,
    residual_variance: bool = False,
    *,
    num_rows: int = 1,
    compile: bool = False,
    with_features: bool = True,
) -> Callable[[Inputs], tuple[FunctionMoments, Tensor | None]]:
    """q(f), and with `with_features` what `model.features` returns, from one pass.

    The other arguments are those of `freeze`. The network runs once for each row, unless the class
    of the model is not `DAK` itself, whose unit inputs may come from anywhere. Model and guide are
    not checked here, and gradients have to be off, here and in the calls of the result.
    """
    layer = model.layer
    mixed = is_mixed(layer.log_unit_scale)
    # Without rows, no layer of the network is folded into the map to the units.
    network, units = _frozen_units(model, 0 if mixed or with_features else num_rows)
    features_fn = embed_fn = None
    if with_features and units is None:
        features_fn, embed_fn = model.features, model.embed if are_plain((model, DAK)) else None
    if sites is None:
        moments = partial(guide.moments, layer) if mixed else _frozen_moments(layer, guide)
    else:
        moments = partial(_moments_of_draws, model, sites)
    residual = model.residual_variance if residual_variance else None
    steps = (network, units, moments, residual, with_features, features_fn, embed_fn)
    if not compile:
        return lambda x: _moments_at(x, *steps)
    if model not in _COMPILED:
        _COMPILED[model] = Compiled(_moments_at, dynamic=True)
    compiled = _COMPILED[model]
    return lambda x: compiled(x, *steps)


def _moments_at(
    x: Inputs,
    network: Callable[[Inputs], Tensor],
    units: Callable[[Tensor], Tensor] | None,
    moments: Callable[[Tensor], FunctionMoments],
    residual: Callable[[Tensor], Tensor] | None,
    with_features: bool,
    features_fn: Callable[[Inputs], Tensor] | None,
    embed_fn: Callable[[Tensor], Tensor] | None,
) -> tuple[FunctionMoments, Tensor | None]:
    """q(f), and the features if they are asked for: those that `units` or `embed_fn` starts from.

    If neither is known, they are computed beside the network.
    """
    features = None if features_fn is None else features_fn(x)
    h = network(x) if features is None or embed_fn is None else embed_fn(features)
    if with_features and features is None:
        features = h
    with own_precision(h):  # mixed precision is for the network
        if units is not None:
            h = units(h)
        q = moments(h)
        # Far outside the grid f is its bias, also at infinity; NaN shows that something overflowed.
        mean = q.mean + 0 * h.sum(-1, keepdim=True)
        var = q.var if residual is None else q.var + residual(h)
        return FunctionMoments(mean, var, q.root), features


def affine_parts(model: DAK, num_rows: int) -> tuple[list[nn.Module], Tensor, Tensor] | None:
    """Layers of the network, and the affine map from what they return to the unit inputs.

    The map is embedding and scaling, and a linear layer at the end of the network too, where this
    pays for so many rows. It is a matrix `(P, K)`, or `(P, 1)` of gains without an embedding, and a
    shift `(P, 1)`. The result is None where embedding, scaling or model are not the plain ones.
    """
    embedding, scaling = model.embedding, model.scaling
    parts: list[tuple[nn.Module, type]] = [(model, DAK), (scaling, type(scaling))]
    parts += [] if embedding is None else [(embedding, nn.Linear)]
    is_other = model.num_input_units > 0 or model.features_fn is not None
    is_other = is_other or (embedding is not None and embedding.bias is not None)
    if is_other or type(scaling) not in SCALINGS.values() or not are_plain(*parts):
        return None
    statistics = scaling.first, scaling.second
    gain, shift = _SCALES(scaling, scaling.affine, scaling.options, *statistics)
    matrix = None if embedding is None else embedding.weight
    return affine_units(model.feature_extractor, matrix, gain, shift, num_rows)


def _frozen_units(
    model: DAK, num_rows: int
) -> tuple[Callable[[Inputs], Tensor], Callable[[Tensor], Tensor] | None]:
    """`model.unit_inputs` in two steps: the network, and the affine map from there to the units.

    Where there is no such map, the first step is all of `model.unit_inputs`.
    """
    found = affine_parts(model, num_rows)
    if found is None:
        return model.unit_inputs, None
    layers, weight, shift = found
    has_embedding = model.embedding is not None
    width = weight.shape[1] if has_embedding else model.feature_dim
    apply_map = torch.addmm if has_embedding else torch.addcmul
    first, *others = layers or [nn.Identity()]

    def network(x: Inputs) -> Tensor:
        b = call(first, x)
        for layer in others:
            b = layer(b)
        if not isinstance(b, Tensor) or b.dim() != 2 or b.shape[1] != width:
            model.unit_inputs(x)  # raises, and says what is wrong with the features
        return b

    def units(b: Tensor) -> Tensor:
        if b.dtype in (torch.float16, torch.bfloat16):
            b = b.to(weight.dtype)
        return apply_map(shift, weight, b.mT).mT

    return network, units


def _frozen_moments(layer: AdditiveLayer, guide: Any) -> Callable[[Tensor], FunctionMoments]:
    """`guide.moments` as a function of h; from tables of the nodes for a plain mean-field guide."""
    activation = layer.activation
    kinds = ((guide, MeanFieldGuide), (layer, AdditiveLayer), (activation, KernelActivation))
    is_known = (
        are_plain(*kinds)
        and guide._parameters.keys() >= {*_WEIGHTS}
        and activation.has_local_route
        and activation.kernel.is_fixed_number
        and activation.route != "dense"
        and not layer.linear_term
        and not dense_is_faster(activation.num_inducing, layer.num_functions)
    )
    if not is_known:
        return partial(guide.moments, layer)
    # Not by attributes, for which modules of Pyro look in many places.
    weights = [guide._parameters[name] for name in _WEIGHTS]
    constants = activation.local_constants(weights[0])
    make = partial(_moments_from_nodes, activation)
    return _FROM_NODES(guide, make, constants, *weights, layer.log_unit_scale)


def _moments_from_nodes(
    activation: KernelActivation,
    z_loc: Tensor,
    z_log_scale: Tensor,
    mu: Tensor,
    mu_log_scale: Tensor,
    log_sigma: Tensor,
) -> Callable[[Tensor], FunctionMoments]:
    sigma = log_sigma.exp().unsqueeze(-1)
    of_units = activation.fixed_moments(sigma * z_loc, (sigma * z_log_scale.exp()).square())
    mu_var = (2 * mu_log_scale).exp()

    def moments(h: Tensor) -> FunctionMoments:
        mean, var = of_units(h)
        return FunctionMoments(mean + mu, var + mu_var)

    return moments


def _moments_of_draws(model: DAK, sites: dict[str, Tensor], h: Tensor) -> FunctionMoments:
    return moments_of_draws(draw_functions(model, h, sites))
