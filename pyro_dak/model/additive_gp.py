"""AdditiveGP: a network that feeds an additive Gaussian process, as a part of any program."""

from collections.abc import Callable, Mapping
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, pyro_method
from pyro.poutine import runtime
from torch import Tensor, nn

from pyro_dak.additive.activation import KernelActivation, Route
from pyro_dak.additive.grid import DyadicGrid
from pyro_dak.additive.kernels import Kernel
from pyro_dak.additive.layer import AdditiveLayer, Weights
from pyro_dak.additive.scaling import build_scaling
from pyro_dak.model.explaining import explaining
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
from pyro_dak.model.rows import Inputs, call, check_parts, shown
from pyro_dak.validation import check_floating, check_has_values, check_integer, check_kind

__all__ = ["AdditiveGP", "DrawnFunction", "plate_of_rows"]

# Input units are for few inputs: each is a process more, and far from the data each adds variance.
_MAX_INPUT_UNITS = 64
# Numbers of event dimensions of the sites that f is a function of.
_EVENT_DIMS = {"z": 3, "mu": 1, "linear": 2, "shrinkage": 1, "unit_scale": 1, "lengthscale": 1}
# The plates of vectorised particles and of parallel draws, which may be the only ones.
_PLATES_OF_DRAWS = ("num_particles_vectorized", "_num_predictive_samples")


class AdditiveGP(PyroModule):
    """f(x), a deep additive Gaussian process, for use inside any Pyro program.

    `f_c(x) = sum_p sigma_p phi(h_p(x)) . z[c, p] + mu[c]` (paper, eq. 8), where the unit inputs
    h(x) come from extractor -> embedding -> scaling. Calling it samples its weights and returns f:

        gp = AdditiveGP(network, feature_dim=32, name="trend")

        def program(x, y=None):
            f = gp(x)  # (N, F)
            noise = pyro.sample("noise", dist.HalfNormal(1.0))
            with pyro.plate("data", len(x)):
                return pyro.sample("y", dist.Normal(f[:, 0], noise), obs=y)

    Sites, all with `name` and a dot in front: `z` with event `(F, P, M)`, `mu` `(F,)`, with a
    linear term `linear` `(F, P)`, with a prior over the scales of the units `shrinkage` `(P,)` or
    `unit_scale` `(P,)`, with a prior in the kernel `lengthscale` `(P,)`. Weights belong to all
    rows, so they are sampled outside of plates over rows; `sample` draws them once, for use at
    several x and inside of plates.

    With input units, the D columns of x are further units after those of the network, scaled like
    them. Sites, scales and the attribute `num_units` then count all P + D units. A network may take
    strange inputs for known ones; the inputs themselves leave the grid, where the residual variance
    gives their units the prior variance back, whatever the network does.

    An x is a tensor, a tuple of tensors, which the network gets as positional arguments, or a
    dictionary of tensors, which it gets as keyword arguments (see `pyro_dak.model.rows`).

    Args:
        feature_extractor: any module from x to features `(..., N, feature_dim)`.
        feature_dim: D_w.
        num_units: P, of the network; the attribute `num_units` counts the input units too.
        num_functions: F.
        level: L of the grid; M = 2^L - 1.
        bounds: bounds of the grid.
        kernel: kernel of the units; the default is `LaplaceKernel(1.0)`. Its lengthscale is a
            number, one for each unit, learned (`LaplaceKernel(1.0, learn=True)`), or has a prior.
        scaling: "standardize", "minmax" or "none".
        embedding: whether a linear map takes the features to the units; if not, P = D_w.
        prior: priors of some sites by name, without the name of the module (see
            `pyro_dak.model.priors`). Weights without one are N(0, 1); the scales of the units are
            parameters, unless "unit_scale" has a prior.
        linear_term: whether every unit has a Bayesian linear term beside its process.
        input_units: whether the columns of x `(..., N, D)` are units too. True takes D from the
            linear layer that the network starts with; else give D itself, at most 64.
        prior_scale: standard deviation of f in the prior at the start, before the scales of the
            units are learned.
        name: stands in front of the names of the sites, so that a program can have several.
        route: how sums over kernel features are computed: "local", through the two nodes around an
            input; "dense", which has derivatives of any order; or "auto" for the faster one.
        features: a function from what the extractor returns to the features, for extractors that
            return tuples, dictionaries or objects, such as `lambda out: out.pooler_output`.
    """

    def __init__(
        self,
        feature_extractor: nn.Module,
        feature_dim: int,
        num_units: int = 16,
        num_functions: int = 1,
        level: int = 3,
        bounds: tuple[float, float] = (0.0, 1.0),
        kernel: Kernel | None = None,
        scaling: str = "standardize",
        embedding: bool = True,
        prior: Mapping[str, PriorLike] | None = None,
        linear_term: bool = False,
        input_units: bool | int = False,
        prior_scale: float = 1.0,
        name: str = "gp",
        route: Route = "auto",
        features: Callable[[Any], Tensor] | None = None,
    ):
        # A context made under this setting can run with local and with global parameters.
        with local_parameters():
            super().__init__()
        check_kind("feature_extractor", feature_extractor, nn.Module, "a module from x to features")
        check_integer("feature_dim", feature_dim, minimum=1)
        check_integer("num_units", num_units, minimum=1)
        check_kind("name", name, str, "a word for the names of the sites")
        if prior is not None:
            check_kind("prior", prior, Mapping, "a dictionary of priors by site")
        if features is not None:
            check_kind("features", features, Callable, "a function from an output to features")
        if isinstance(features, nn.Module):
            raise TypeError(
                "`features` must be a function without weights, which nothing would train; got a "
                "module. Make it the last part of `feature_extractor`."
            )
        if not embedding and feature_dim != num_units:
            raise ValueError(
                f"`num_units` must equal `feature_dim`={feature_dim} without an embedding, one "
                f"unit per feature; got {num_units}. Set one to the other, or `embedding=True`."
            )
        self.name = name
        self.num_input_units = _num_input_units(input_units, feature_extractor)
        self.feature_extractor, self.features_fn = feature_extractor, features
        self.embedding = nn.Linear(feature_dim, num_units, bias=False) if embedding else None
        num_units += self.num_input_units
        self.feature_dim, self.num_units = feature_dim, num_units
        self.scaling = build_scaling(scaling, num_units, bounds)
        grid = DyadicGrid(level, bounds)
        activation = KernelActivation(grid, kernel, num_units=num_units, route=route)
        self.layer = AdditiveLayer(activation, num_units, num_functions, linear_term, prior_scale)
        self._set_priors(prior or {})

    def _set_priors(self, prior: Mapping[str, PriorLike]) -> None:
        if "lengthscale" in prior:
            raise ValueError(
                "`prior` must not have the lengthscale, which belongs to the kernel: give it the "
                "prior, as in kernel=LaplaceKernel(pyro.distributions.LogNormal(0.0, 1.0))."
            )
        kernel = self.layer.activation.kernel
        if kernel.has_prior:
            prior = {**prior, "lengthscale": kernel.lengthscale}
        self.site_shapes = self._weight_shapes(prior)
        self.scale_shapes = self._scale_shapes(prior)
        self.prior = resolve_priors(prior, self.site_shapes, self.scale_shapes)
        shapes = {**self.site_shapes, **self.scale_shapes}
        inside = {name: sites_inside(self.prior[name], shape) for name, shape in shapes.items()}
        self.sites_in_priors = {name: sites for name, sites in inside.items() if sites}
        if "unit_scale" in self.scale_shapes:  # the site takes its place
            log_unit_scale = self.layer.log_unit_scale.detach()
            del self.layer.log_unit_scale
            self.layer.register_buffer("log_unit_scale", log_unit_scale)

    def _weight_shapes(self, prior: Mapping[str, PriorLike]) -> dict[str, torch.Size]:
        """Event shapes of the sites that the guides of this library have."""
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

    def _scale_shapes(self, prior: Mapping[str, PriorLike]) -> dict[str, torch.Size]:
        """Event shapes of the hyper-parameters that have priors, and so are sites."""
        shape = torch.Size((self.num_units,))
        return {name: shape for name in ("lengthscale", "unit_scale") if name in prior}

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
        """Whether the scales of the units have a factor with a prior of its own."""
        return "shrinkage" in self.site_shapes

    def site_name(self, name: str) -> str:
        """The name that a site has in a program, such as "gp.z" for "z"."""
        return f"{self.name}.{name}" if self.name else name

    # From x to the inputs of the units

    def unit_inputs(self, x: Inputs) -> Tensor:
        """h(x): what the units see, `(..., N, P)`, in the coordinates of the grid."""
        return self.embed(self.features(x))

    def features(self, x: Inputs) -> Tensor:
        """What `embed` takes: the features of x, `(..., N, feature_dim)`, and x beside them.

        Without input units they are the features alone, else `(..., N, feature_dim + D)`.
        """
        features = call(self.feature_extractor, x)
        if self.features_fn is not None:
            features = self.features_fn(features)
        if self.num_input_units == 0:
            return features
        self._check_features(features, self.feature_dim)
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(
                "`x` must be one floating tensor with a column for each input unit; got "
                f"{shown(x)}. Set `input_units=False`."
            )
        if x.shape != (*features.shape[:-1], self.num_input_units):
            rows = ", ".join(map(str, features.shape[:-1])) if features.dim() > 2 else "N"
            raise ValueError(
                f"`x` must have shape ({rows}, {self.num_input_units}), a column for each input "
                f"unit; got {tuple(x.shape)}. Set `input_units` to the number of columns, or to "
                "False."
            )
        return torch.cat([features, x], -1)  # (..., N, feature_dim + D)

    def embed(self, features: Tensor) -> Tensor:
        """h from what `features` returns, `(..., N, P)`: embedding of the features, and scaling."""
        D = self.num_input_units
        self._check_features(features, self.feature_dim + D)
        if self.embedding is None:
            return self.scaling(features)
        if D == 0:
            return self.scaling(self.embedding(features))
        features, x = features.split((self.feature_dim, D), -1)
        return self.scaling(torch.cat([self.embedding(features), x], -1))

    def _check_features(self, features: Tensor, num_columns: int) -> None:
        is_floating = isinstance(features, Tensor) and features.is_floating_point()
        if not is_floating or features.dim() < 2 or features.shape[-1] != num_columns:
            self._refuse_features(features, num_columns)

    def _refuse_features(self, features: object, num_columns: int) -> None:
        if not isinstance(features, Tensor):
            raise TypeError(
                f"`feature_extractor` must return a tensor (N, feature_dim={self.feature_dim}); "
                f"got {shown(features)}. Pass `features`, a function from that to the features, "
                "such as `features=lambda out: out[0]`."
            )
        if not features.is_floating_point():
            raise TypeError(
                f"`feature_extractor` must return floating features; got {features.dtype}. Convert "
                "x, or let the network do so."
            )
        beside = "" if num_columns == self.feature_dim else f" + {self.num_input_units} inputs"
        raise ValueError(
            f"`feature_extractor` must return shape (N, feature_dim={self.feature_dim}"
            f"{beside}); got {tuple(features.shape)}. Flatten its output or set `feature_dim`."
        )

    # The program

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program; outside of Pyro's handlers its global store of parameters is not used.

        Inside of them, as in `SVI.step`, parameters are announced to the store as Pyro does it.
        """
        if runtime.am_i_wrapped():
            return super().__call__(*args, **kwargs)
        with local_parameters(self):
            return super().__call__(*args, **kwargs)

    def forward(self, x: Inputs) -> Tensor:
        """f at x, `(..., N, F)`, for weights that are sampled here.

        Args:
            x: inputs, `(N, ...)`, or with batch dimensions in front if the extractor takes them.
        """
        check_parts("x", x)
        with explaining(self, x):
            return self.sample()(x)

    @pyro_method
    def sample(self) -> "DrawnFunction":
        """Sample the weights, and return f as a function of x.

        One draw can be used several times, at different x, inside and outside of plates.
        """
        self._check_plates()
        return DrawnFunction(self, self.sample_weights(self.layer.log_unit_scale))

    def _check_plates(self) -> None:
        """Raise inside a plate over the rows; draws have plates further to the left."""
        frame = plate_of_rows()
        if frame is not None:
            name = self.name or "gp"
            raise ValueError(
                f"The weights of `{name}` were sampled inside the plate `{frame}`, which would "
                f"give every row weights of its own. Write `draw = {name}.sample()` before the "
                "plate, and `draw(x)` inside of it."
            )

    @pyro_method
    def announce_parameters(self) -> None:
        """Emit Pyro's param statements, for `SVI` with objectives that trace nothing."""
        for name in [*self._parameters, *self._modules]:
            getattr(self, name)

    def sample_weights(self, like: Tensor) -> dict[str, Tensor]:
        """Sample every latent site from its prior; the values come by the names of the sites."""
        values: dict[str, Tensor] = {}
        for name, shape in {**self.scale_shapes, **self.site_shapes}.items():
            if name in self.sites_in_priors:
                prior = site_prior(name, self.prior[name], shape, like, is_batched=True)
            else:
                prior = self.conditional_prior(name, values, like)
            values[self.site_name(name)] = pyro.sample(self.site_name(name), prior)
        return values

    def conditional_prior(
        self, name: str, values: Mapping[str, Tensor], like: Tensor
    ) -> dist.Distribution:
        """Prior of a site given the sites before it; only the horseshoe's depends on one."""
        scale = values.get(self.site_name("global_shrinkage"))
        if name != "shrinkage" or scale is None:
            return self.prior_distribution(name, like)
        scale = scale.unsqueeze(-1)
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
        shape = self.scale_shapes.get(name) or self.site_shapes[name]
        return site_prior(name, self.prior[name], shape, like)

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
        return self.layer.unit_residuals(h) @ self.node_variances(h).mT  # (N, P) @ (P, F)

    def residual_covariance(self, h: Tensor) -> Tensor:
        """Prior covariance between rows that the grid loses, `(..., F, N, N)`.

        sum_p sigma_p^2 Var(z) (k(h, h') - phi phi'^T), with `residual_variance` on the diagonal.
        """
        var, lost = self.node_variances(h), self.layer.unit_residual_covariances(h)
        return torch.einsum("fp,...pnm->...fnm", var, lost)

    def node_variances(self, like: Tensor) -> Tensor:
        """Prior variance of z, the same at every node of a unit, `(F, P)`."""
        if self.has_shrinkage or self.scale_shapes:
            site = "shrinkage" if self.has_shrinkage else next(iter(self.scale_shapes))
            raise NotImplementedError(
                f"The residual variance is not known with a prior on `{site}`; predict without."
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
        """f at unit inputs h for values of the sites by their names, `(..., N, F)`.

        A batch in front of the events is one of draws. Under vectorised particles Pyro gives
        `(S, 1, *event)`, where 1 is the data plate, which is dropped, since weights never vary over
        the data; from posterior samples `Predictive` gives `(S, *event)`.
        """
        values: dict[str, Tensor] = {}
        for name, event_dim in _EVENT_DIMS.items():
            value = sites.get(self.site_name(name))
            if value is not None:
                has_data_dim = value.dim() > event_dim and value.shape[-event_dim - 1] == 1
                values[name] = value.squeeze(-event_dim - 1) if has_data_dim else value
        self._check_batches(h, values["mu"].shape[:-1])
        weights = Weights(values["z"], values["mu"], values.get("linear"))
        scales = (values.get(name) for name in ("shrinkage", "unit_scale", "lengthscale"))
        return self.layer(h, weights, *scales)

    def _check_batches(self, h: Tensor, draws: tuple[int, ...]) -> None:
        """Raise if draws of the weights would be taken for leading dimensions of the inputs."""
        num_leading = h.dim() - 2
        if num_leading > 0 and any(size != 1 for size in draws[-num_leading:]):
            raise ValueError(
                f"Leading dimensions {tuple(h.shape[:-2])} of inputs cannot be told from draws of "
                f"the weights, {tuple(draws)}. Put a plate around each leading dimension, so that "
                "vectorised particles lie to the left of them (`max_plate_nesting`), and use "
                "`Predictive` with `parallel=False`."
            )


class DrawnFunction:
    """One draw of an `AdditiveGP`, or a batch of them: a function from x to f `(..., N, F)`.

    Attributes:
        sites: values of the sites by their names.
    """

    def __init__(self, gp: AdditiveGP, sites: dict[str, Tensor]):
        self.gp, self.sites = gp, sites

    def __call__(self, x: Inputs) -> Tensor:
        return self.at_units(self.gp.unit_inputs(x))

    def at_units(self, h: Tensor) -> Tensor:
        """f at unit inputs h `(..., N, P)`, for features held fixed."""
        check_floating("h", h)
        check_has_values("h", h)
        h = h.to(self.gp.layer.log_unit_scale.dtype)
        with own_precision(h):  # mixed precision is for the network
            return self.gp.functions(h, self.sites)


def plate_of_rows() -> str | None:
    """The name of the plate over rows that the program is in now, or None."""
    for frame in runtime.get_plates():
        if frame.dim == -1 and frame.name not in _PLATES_OF_DRAWS:
            return frame.name
    return None


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
