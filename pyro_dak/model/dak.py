"""DAK: a neural network whose last layer is an additive Gaussian process, as a Pyro model."""

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.nn import PyroModule, pyro_method
from pyro.poutine.runtime import get_plates
from torch import Tensor, nn

from pyro_dak.additive.activation import KernelActivation
from pyro_dak.additive.grid import DyadicGrid
from pyro_dak.additive.kernels import Kernel
from pyro_dak.additive.layer import AdditiveLayer, Weights
from pyro_dak.additive.scaling import build_scaling
from pyro_dak.model.explaining import explaining
from pyro_dak.model.handlers import check_store, warn_if_weights_are_given
from pyro_dak.model.likelihoods import GaussianLikelihood, Likelihood
from pyro_dak.model.modes import local_parameters, own_precision
from pyro_dak.model.priors import (
    HorseshoePrior,
    NormalPrior,
    Prior,
    PriorLike,
    resolve_priors,
    site_prior,
    sites_inside,
)
from pyro_dak.validation import (
    check_finite,
    check_floating,
    check_has_values,
    check_integer,
    check_kind,
    check_positive,
    check_shape,
    check_tensor,
)

__all__ = ["DAK"]

# Input units are for few inputs: each is a process more, and far from the data each adds variance.
_MAX_INPUT_UNITS = 64


class DAK(PyroModule):
    """Deep additive kernel: extractor -> embedding -> scaling -> additive layer -> likelihood.

    `f_c(x) = sum_p sigma_p phi(h_p(x)) . z[c, p] + mu[c]` (paper, eq. 8). Sites, all outside the
    data plate: `z` with event `(F, P, M)`, `mu` `(F,)`, with a linear term `linear` `(F, P)`, with
    a prior over the scales of the units `shrinkage` `(P,)`; then `y` in the plate `data`. F is the
    number of functions: one per output, two with `HeteroscedasticLikelihood`.

    With input units, the D columns of x are further units after those of the network, scaled like
    them. Sites, scales and the attribute `num_units` then count all P + D units. A network may take
    strange inputs for known ones; the inputs themselves leave the grid, where the residual variance
    gives their units the prior variance back, whatever the network does.

    Args:
        feature_extractor: any module from x to features `(N, feature_dim)`.
        feature_dim: D_w.
        num_units: P, of the network; the attribute `num_units` counts the input units too.
        num_outputs: C, outputs or classes.
        level: L of the grid; M = 2^L - 1.
        bounds: bounds of the grid.
        kernel: kernel of the units; the default is `LaplaceKernel(1.0)`.
        likelihood: observation model; the default is `GaussianLikelihood()`.
        scaling: "standardize", "minmax" or "none".
        embedding: whether a linear map takes the features to the units; if not, P = D_w.
        prior: priors of some sites by name (see `pyro_dak.model.priors`); the rest are N(0, 1).
        linear_term: whether every unit has a Bayesian linear term beside its process.
        input_units: whether the columns of x `(N, D)` are units too. True takes D from the linear
            layer that the network starts with; else give D itself, at most 64.
        prior_scale: standard deviation of f in the prior at the start, before the scales of the
            units are learned; by default 3 for classes and 1 for the rest.

    Attributes:
        calibration: the number that `pyro_dak.calibrate` found, a scalar that `predict` uses, or
            None before. It is part of the state, and belongs to the weights beside it.
    """

    calibration: Tensor | None
    # Makes the module `novelty` for so many reference rows; the room that predicts sets it.
    novelty_factory: ClassVar[Callable[["DAK", int], nn.Module] | None] = None

    def __init__(
        self,
        feature_extractor: nn.Module,
        feature_dim: int,
        num_units: int = 16,
        num_outputs: int = 1,
        level: int = 3,
        bounds: tuple[float, float] = (0.0, 1.0),
        kernel: Kernel | None = None,
        likelihood: Likelihood | None = None,
        scaling: str = "standardize",
        embedding: bool = True,
        prior: Mapping[str, PriorLike] | None = None,
        linear_term: bool = False,
        input_units: bool | int = False,
        prior_scale: float | None = None,
    ):
        # A context made under this setting can run with local and with global parameters.
        with local_parameters():
            super().__init__()
        check_kind("feature_extractor", feature_extractor, nn.Module, "a module from x to features")
        check_integer("feature_dim", feature_dim, minimum=1)
        check_integer("num_units", num_units, minimum=1)
        check_integer("num_outputs", num_outputs, minimum=1)
        if likelihood is not None:
            check_kind("likelihood", likelihood, Likelihood, "a likelihood of pyro_dak")
        if prior is not None:
            check_kind("prior", prior, Mapping, "a dictionary of priors by site")
        if not embedding and feature_dim != num_units:
            raise ValueError(
                f"`num_units` must equal `feature_dim`={feature_dim} without an embedding, one "
                f"unit per feature; got {num_units}. Set one to the other, or `embedding=True`."
            )
        self.num_input_units = _num_input_units(input_units, feature_extractor)
        self.input_shape: tuple[int, ...] | None = None
        self.register_buffer("calibration", None)
        self.novelty: Any = None  # what `learn_novelty` learns: a module
        self.feature_extractor = feature_extractor
        self.embedding = nn.Linear(feature_dim, num_units, bias=False) if embedding else None
        num_units += self.num_input_units
        self.feature_dim, self.num_units, self.num_outputs = feature_dim, num_units, num_outputs
        self.scaling = build_scaling(scaling, num_units, bounds)
        self.likelihood = GaussianLikelihood() if likelihood is None else likelihood
        activation = KernelActivation(DyadicGrid(level, bounds), kernel)
        num_functions = self.likelihood.num_functions(num_outputs)
        scale = self.likelihood.prior_scale if prior_scale is None else prior_scale
        self.layer = AdditiveLayer(activation, num_units, num_functions, linear_term, scale)
        self.site_shapes = self._site_shapes(prior or {})
        self.prior = resolve_priors(prior, self.site_shapes)
        inside = {n: sites_inside(self.prior[n], shape) for n, shape in self.site_shapes.items()}
        self.sites_in_priors = {name: sites for name, sites in inside.items() if sites}

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Load weights with their calibration and novelty; those that come without, with none."""
        name = f"{prefix}calibration"
        one = self.layer.log_unit_scale.detach().new_ones(())
        self.calibration = one if name in state_dict else None
        self._make_room_for_novelty(state_dict.get(f"{prefix}novelty.tails.leverage"))
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        value = self.calibration
        if value is not None and not value.is_meta and not 0 < float(value) < math.inf:
            self.calibration = None
            arguments[-1].append(f"`{name}` must be positive and finite; got {float(value)}.")

    def _make_room_for_novelty(self, reference: Any) -> None:
        """Let `novelty` be a module that takes these reference rows `(n,)`, or None if it is."""
        make = type(self).novelty_factory
        if make is None or not isinstance(reference, Tensor) or reference.dim() != 1:
            self.novelty = None
        elif self.novelty is None or len(self.novelty.tails.leverage) != len(reference):
            self.novelty = make(self, len(reference)).to(self.layer.log_unit_scale)

    def _site_shapes(self, prior: Mapping[str, PriorLike]) -> dict[str, torch.Size]:
        F, P, M = self.num_functions, self.num_units, self.num_inducing
        shapes: dict[str, tuple[int, ...]] = {"mu": (F,)}
        if self.layer.linear_term:
            shapes["linear"] = (F, P)
        shapes["z"] = (F, P, M)
        if isinstance(prior.get("shrinkage"), HorseshoePrior):
            shapes["global_shrinkage"] = ()
        if "shrinkage" in prior:
            shapes["shrinkage"] = (P,)
        return {name: torch.Size(shape) for name, shape in shapes.items()}

    @property
    def num_functions(self) -> int:
        """F."""
        return self.layer.num_functions

    @property
    def num_inducing(self) -> int:
        """M."""
        return self.layer.activation.num_inducing

    @property
    def unit_scale(self) -> Tensor:
        """sigma, `(P,)`."""
        return self.layer.unit_scale

    @property
    def has_shrinkage(self) -> bool:
        """Whether the scales of the units have a prior of their own."""
        return "shrinkage" in self.site_shapes

    def unit_inputs(self, x: Tensor) -> Tensor:
        """h(x): what the units see, `(N, P)`, in the coordinates of the grid."""
        return self.embed(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        """What `embed` takes: the features of x, `(N, feature_dim)`, and x beside them.

        Without input units they are the features alone, else `(N, feature_dim + D)`.
        """
        features = self.feature_extractor(x)
        if self.num_input_units == 0:
            return features
        self._check_features(features, self.feature_dim)
        if x.dim() != 2 or x.shape[-1] != self.num_input_units:
            raise ValueError(
                f"`x` must have shape (N, {self.num_input_units}), a column for each input unit; "
                f"got {tuple(x.shape)}. Set `input_units` to the number of columns, or to False."
            )
        return torch.cat([features, x], -1)  # (N, feature_dim + D)

    def embed(self, features: Tensor) -> Tensor:
        """h from what `features` returns, `(N, P)`: embedding of the features, and scaling."""
        D = self.num_input_units
        self._check_features(features, self.feature_dim + D)
        if self.embedding is None:
            return self.scaling(features)
        if D == 0:
            return self.scaling(self.embedding(features))
        features, x = features.split((self.feature_dim, D), -1)
        return self.scaling(torch.cat([self.embedding(features), x], -1))

    def _check_features(self, features: Tensor, num_columns: int) -> None:
        if features.dim() != 2 or features.shape[-1] != num_columns:
            beside = "" if num_columns == self.feature_dim else f" + {self.num_input_units} inputs"
            raise ValueError(
                f"`feature_extractor` must return shape (N, feature_dim={self.feature_dim}"
                f"{beside}); got {tuple(features.shape)}. Flatten its output or set `feature_dim`."
            )

    def forward(self, x: Tensor, y: Tensor | None = None, num_data: float | None = None) -> Tensor:
        """The generative program; returns y.

        Args:
            x: inputs, `(N, ...)`.
            y: targets, or None to sample them.
            num_data: size of the data set if x is a minibatch: log-likelihoods count
                num_data / N times.
        """
        check_tensor("x", x)
        check_store(self)
        if self.training and torch.is_grad_enabled():
            warn_if_weights_are_given(self.site_shapes)
        with explaining(self, x, y):
            h = self.unit_inputs(x)
            self.input_shape = self.input_shape or tuple(x.shape[1:])
            return self.observe(h, y, num_data)

    @pyro_method
    def announce_parameters(self) -> None:
        """Emit Pyro's param statements, for `SVI` with objectives that trace nothing."""
        for name in [*self._parameters, *self._modules]:
            getattr(self, name)

    def observe(self, h: Tensor, y: Tensor | None = None, num_data: float | None = None) -> Tensor:
        """The program from the unit inputs on: priors, f, likelihood; for features held fixed."""
        _check_plates()
        check_floating("h", h)
        check_has_values("h", h)
        check_shape("h", h, ("N", self.num_units), "rows x units")
        if h.shape[-2] == 0:
            raise ValueError("`h` must have at least one row; got none.")
        if num_data is not None:
            check_positive("num_data", num_data)
        N = h.shape[-2]
        h = h.to(self.layer.log_unit_scale.dtype)
        with own_precision(h):  # mixed precision is for the network
            f = self.functions(h, self.sample_weights(h))
        if y is not None:
            y = self.likelihood.check_targets(y, self.num_outputs)
        scale = 1.0 if num_data is None else num_data / N
        with pyro.plate("data", N), poutine.scale(scale=scale):
            try:
                y_given_f = self.likelihood.distribution(f)
            except ValueError:
                check_finite("h", h)
                raise
            y = pyro.sample("y", y_given_f, obs=y)
        _check_observed(y, (N, *y_given_f.event_shape), self.likelihood)
        return y

    def sample_weights(self, like: Tensor) -> dict[str, Tensor]:
        """Sample every latent site from its prior."""
        values: dict[str, Tensor] = {}
        for name, shape in self.site_shapes.items():
            if name in self.sites_in_priors:
                prior = site_prior(name, self.prior[name], shape, like)
            else:
                prior = self.conditional_prior(name, values, like)
            values[name] = pyro.sample(name, prior)
        return values

    def conditional_prior(
        self, name: str, values: Mapping[str, Tensor], like: Tensor
    ) -> dist.Distribution:
        """Prior of a site given the sites before it; only the horseshoe's depends on one."""
        if name != "shrinkage" or "global_shrinkage" not in values:
            return self.prior_distribution(name, like)
        scale = values["global_shrinkage"].unsqueeze(-1)
        return dist.HalfCauchy(scale.expand(*scale.shape[:-1], self.num_units)).to_event(1)

    def prior_distribution(self, name: str, like: Tensor) -> dist.Distribution:
        """Prior of a site, in the dtype and on the device of `like`, for closed forms."""
        if name in self.sites_in_priors:
            raise NotImplementedError(
                f"The prior of `{name}` samples `{self.sites_in_priors[name][0]}`, and closed "
                f"forms know no sites but {', '.join(f'`{site}`' for site in self.site_shapes)}: "
                "they would take one random draw of it as given. Train by Trace_ELBO of Pyro with "
                "an autoguide, or sample by NUTS of Pyro; `predict` works with such a guide."
            )
        return site_prior(name, self.prior[name], self.site_shapes[name], like)

    def normal_prior(self, name: str) -> tuple[Any, Any] | None:
        """(loc, scale) of a site's prior if it is a product of normals, else None."""
        value = self.prior[name]
        if not isinstance(value, Prior | torch.distributions.Distribution):
            value = self.prior_distribution(name, self.layer.log_unit_scale)
        while isinstance(value, torch.distributions.Independent):
            value = value.base_dist
        is_normal = isinstance(value, NormalPrior | torch.distributions.Normal)
        return (value.loc, value.scale) if is_normal else None

    def residual_variance(self, h: Tensor) -> Tensor:
        """Prior variance of each function that the grid loses at h `(..., N, P)`, `(..., N, F)`.

        sum_p sigma_p^2 Var(z) (1 - phi phi^T), for a prior of z that is the same at every node.
        """
        return self.layer.unit_residuals(h) @ self._node_variances(h).mT  # (N, P) @ (P, F)

    def residual_covariance(self, h: Tensor) -> Tensor:
        """Prior covariance between rows that the grid loses, `(..., F, N, N)`.

        sum_p sigma_p^2 Var(z) (k(h, h') - phi phi'^T), with `residual_variance` on the diagonal.
        """
        var, lost = self._node_variances(h), self.layer.unit_residual_covariances(h)
        return torch.einsum("fp,...pnm->...fnm", var, lost)

    def _node_variances(self, like: Tensor) -> Tensor:
        """Prior variance of z, the same at every node of a unit, `(F, P)`."""
        if self.has_shrinkage:
            raise NotImplementedError(
                "The residual variance is not known with a prior on `shrinkage`; predict without."
            )
        F, P, _ = self.site_shapes["z"]
        prior = self.prior["z"]
        if isinstance(prior, NormalPrior):  # without a distribution, which cannot be compiled
            return like.new_full((F, P), prior.scale**2)
        var = self.prior_distribution("z", like).variance.expand(self.site_shapes["z"])
        if not bool(torch.isfinite(var).all()) or not bool((var == var[..., :1]).all()):
            raise NotImplementedError(
                "The residual variance needs a prior of `z` with finite variance, the same at "
                "every node of a unit; predict without it."
            )
        return var[..., 0].to(like)

    def functions(self, h: Tensor, sites: Mapping[str, Tensor]) -> Tensor:
        """f at unit inputs h for values of the sites, `(..., N, F)`.

        A batch in front of the events is one of draws. Under vectorised particles Pyro gives
        `(S, 1, *event)`, where 1 is the data plate, which is dropped, since weights never vary over
        the data; from posterior samples `Predictive` gives `(S, *event)`.
        """
        values: dict[str, Tensor] = {}
        for name, event_dim in {"z": 3, "mu": 1, "linear": 2, "shrinkage": 1}.items():
            if name in sites:
                value = sites[name]
                has_data_dim = value.dim() > event_dim and value.shape[-event_dim - 1] == 1
                values[name] = value.squeeze(-event_dim - 1) if has_data_dim else value
        weights = Weights(values["z"], values["mu"], values.get("linear"))
        return self.layer(h, weights, values.get("shrinkage"))


def _num_input_units(input_units: bool | int, network: nn.Module) -> int:
    """D: 0 for False, and for True the inputs of the linear layer that the network starts with."""
    if input_units is False:
        return 0
    if input_units is True:
        first = next((m for m in network.modules() if m._parameters), None)
        if not isinstance(first, nn.Linear) or first.in_features < 1:
            raise ValueError(
                "`input_units=True` needs a `feature_extractor` whose first layer is linear, which "
                "tells the number of columns of x. Set `input_units` to that number."
            )
        input_units = first.in_features
    check_integer("input_units", input_units, minimum=0)
    if input_units > _MAX_INPUT_UNITS:
        raise ValueError(
            f"`input_units` are for inputs of few dimensions, at most {_MAX_INPUT_UNITS}; got "
            f"{input_units}. Set `input_units=False`, or give the network fewer inputs."
        )
    return int(input_units)


def _check_plates() -> None:
    """Raise inside a plate over the rows; draws have plates further to the left."""
    for frame in get_plates():
        if frame.dim == -1:
            raise ValueError(
                f"The model was called inside the plate `{frame.name}`, which would give every row "
                "weights of its own. Call it outside: it has a plate `data` over the rows, and "
                "takes minibatches with `num_data`. A plate of draws needs `dim=-2`."
            )


def _check_observed(y: Tensor, shape: tuple[int, ...], likelihood: Likelihood) -> None:
    if y.shape[-len(shape) :] != shape:
        raise ValueError(
            f"`y` must have shape {shape}, that of `{type(likelihood).__name__}.distribution(f)`; "
            f"got {tuple(y.shape)}. Reshape what you give to `pyro.condition`, or call the model "
            "with `y` as its second argument. A site that `distribution` samples itself has one "
            "value per row, and fits f `(..., N, F)` after `.unsqueeze(-1)`."
        )
