"""DAK: a neural network whose last layer is an additive Gaussian process, as a Pyro model."""

from collections.abc import Mapping
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.nn import PyroModule, pyro_method
from torch import Tensor, nn

from pyro_dak.additive.activation import KernelActivation
from pyro_dak.additive.grid import DyadicGrid
from pyro_dak.additive.kernels import Kernel
from pyro_dak.additive.layer import AdditiveLayer, Weights
from pyro_dak.additive.scaling import build_scaling
from pyro_dak.model.likelihoods import GaussianLikelihood, Likelihood
from pyro_dak.model.modes import own_precision
from pyro_dak.model.priors import (
    HorseshoePrior,
    NormalPrior,
    Prior,
    PriorLike,
    resolve_priors,
    site_prior,
)
from pyro_dak.validation import check_integer

__all__ = ["DAK"]


class DAK(PyroModule):
    """Deep additive kernel: extractor -> embedding -> scaling -> additive layer -> likelihood.

    `f_c(x) = sum_p sigma_p phi(h_p(x)) . z[c, p] + mu[c]` (paper, eq. 8). Sites, all outside the
    data plate: `z` with event `(F, P, M)`, `mu` `(F,)`, with a linear term `linear` `(F, P)`, with
    a prior over the scales of the units `shrinkage` `(P,)`; then `y` in the plate `data`. F is the
    number of functions: one per output, two with `HeteroscedasticLikelihood`.

    Args:
        feature_extractor: any module from x to features `(N, feature_dim)`.
        feature_dim: D_w.
        num_units: P.
        num_outputs: C, outputs or classes.
        level: L of the grid; M = 2^L - 1.
        bounds: bounds of the grid.
        kernel: kernel of the units; the default is `LaplaceKernel(1.0)`.
        likelihood: observation model; the default is `GaussianLikelihood()`.
        scaling: "standardize", "minmax" or "none".
        embedding: whether a linear map takes the features to the units; if not, P = D_w.
        prior: priors of some sites by name (see `pyro_dak.model.priors`); the rest are N(0, 1).
        linear_term: whether every unit has a Bayesian linear term beside its process.
    """

    def __init__(
        self,
        feature_extractor: nn.Module,
        feature_dim: int,
        num_units: int = 16,
        num_outputs: int = 1,
        level: int = 5,
        bounds: tuple[float, float] = (0.0, 1.0),
        kernel: Kernel | None = None,
        likelihood: Likelihood | None = None,
        scaling: str = "standardize",
        embedding: bool = True,
        prior: Mapping[str, PriorLike] | None = None,
        linear_term: bool = False,
    ):
        # A context made under this setting can run with local and with global parameters.
        with pyro.settings.context(module_local_params=True):
            super().__init__()
        check_integer("feature_dim", feature_dim, minimum=1)
        check_integer("num_units", num_units, minimum=1)
        check_integer("num_outputs", num_outputs, minimum=1)
        if not embedding and feature_dim != num_units:
            raise ValueError(
                f"`num_units` must equal `feature_dim`={feature_dim} without an embedding, one "
                f"unit per feature; got {num_units}. Set one to the other, or `embedding=True`."
            )
        self.feature_dim, self.num_units, self.num_outputs = feature_dim, num_units, num_outputs
        self.input_shape: tuple[int, ...] | None = None
        self.feature_extractor = feature_extractor
        self.embedding = nn.Linear(feature_dim, num_units, bias=False) if embedding else None
        self.scaling = build_scaling(scaling, num_units, bounds)
        self.likelihood = GaussianLikelihood() if likelihood is None else likelihood
        activation = KernelActivation(DyadicGrid(level, bounds), kernel)
        num_functions = self.likelihood.num_functions(num_outputs)
        self.layer = AdditiveLayer(activation, num_units, num_functions, linear_term)
        self.site_shapes = self._site_shapes(prior or {})
        self.prior = resolve_priors(prior, self.site_shapes)

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
        return self.embed(self.feature_extractor(x))

    def embed(self, features: Tensor) -> Tensor:
        """h from the features `(N, feature_dim)`, `(N, P)`: embedding and scaling."""
        if features.dim() != 2 or features.shape[-1] != self.feature_dim:
            raise ValueError(
                f"`feature_extractor` must return shape (N, feature_dim={self.feature_dim}); got "
                f"{tuple(features.shape)}. Flatten its output or set `feature_dim`."
            )
        return self.scaling(features if self.embedding is None else self.embedding(features))

    def forward(self, x: Tensor, y: Tensor | None = None, num_data: float | None = None) -> Tensor:
        """The generative program; returns y.

        Args:
            x: inputs, `(N, ...)`.
            y: targets, or None to sample them.
            num_data: size of the data set if x is a minibatch: log-likelihoods count
                num_data / N times.
        """
        self.input_shape = self.input_shape or tuple(x.shape[1:])
        return self.observe(self.unit_inputs(x), y, num_data)

    @pyro_method
    def announce_parameters(self) -> None:
        """Emit Pyro's param statements, for `SVI` with objectives that trace nothing."""
        for name in [*self._parameters, *self._modules]:
            getattr(self, name)

    def observe(self, h: Tensor, y: Tensor | None = None, num_data: float | None = None) -> Tensor:
        """The program from the unit inputs on: priors, f, likelihood; for features held fixed."""
        N = h.shape[-2]
        h = h.to(self.layer.log_unit_scale.dtype)
        with own_precision(h):  # mixed precision is for the network
            f = self.functions(h, self.sample_weights(h))
        if y is not None:
            y = self.likelihood.check_targets(y, self.num_outputs)
        scale = 1.0 if num_data is None else num_data / N
        with pyro.plate("data", N), poutine.scale(scale=scale):
            return pyro.sample("y", self.likelihood.distribution(f), obs=y)

    def sample_weights(self, like: Tensor) -> dict[str, Tensor]:
        """Sample every latent site from its prior."""
        values: dict[str, Tensor] = {}
        for name in self.site_shapes:
            values[name] = pyro.sample(name, self.conditional_prior(name, values, like))
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
        """Prior of a site, in the dtype and on the device of `like`."""
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
        """Prior variance of each function that the grid loses at h `(N, P)`, `(N, F)`.

        sum_p sigma_p^2 Var(z) (1 - phi phi^T), for a prior of z that is the same at every node.
        """
        if self.has_shrinkage:
            raise NotImplementedError(
                "The residual variance is not known with a prior on `shrinkage`; predict without."
            )
        var = self.prior_distribution("z", h).variance.expand(self.site_shapes["z"])
        if not bool(torch.isfinite(var).all()) or not bool((var == var[..., :1]).all()):
            raise NotImplementedError(
                "The residual variance needs a prior of `z` with finite variance, the same at "
                "every node of a unit; predict without it."
            )
        return self.layer.unit_residuals(h) @ var[..., 0].to(h).mT  # (N, P) @ (P, F)

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
