"""DAK: a neural network whose last layer is an additive Gaussian process, as a Pyro model."""

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pyro
import torch
from pyro import poutine
from torch import Tensor, nn

from pyro_dak.additive.activation import Route
from pyro_dak.additive.kernels import Kernel
from pyro_dak.model.additive_gp import AdditiveGP, DrawnFunction, plate_of_rows
from pyro_dak.model.explaining import explaining
from pyro_dak.model.handlers import check_store, warn_if_weights_are_given
from pyro_dak.model.likelihoods import GaussianLikelihood, Likelihood
from pyro_dak.model.missing import observed_distribution
from pyro_dak.model.priors import PriorLike
from pyro_dak.model.rows import Inputs, RowShape, check_parts, row_shape
from pyro_dak.validation import (
    check_finite,
    check_floating,
    check_has_values,
    check_integer,
    check_kind,
    check_positive,
    check_shape,
)

__all__ = ["DAK"]


class DAK(AdditiveGP):
    """Deep additive kernel: an `AdditiveGP` and a likelihood.

    The program is extractor -> embedding -> scaling -> additive layer -> likelihood. Sites, all
    outside the data plate: those of `AdditiveGP`, without a name in front, and those of the
    likelihood if its parameters have priors; then the deterministic `f` `(F,)` and `y` in the plate
    `data`. F is the number of functions: one per output, two with `HeteroscedasticLikelihood`.

    Args:
        feature_extractor: any module from x to features `(N, feature_dim)`.
        feature_dim: D_w.
        num_units: P, of the network; the attribute `num_units` counts the input units too.
        num_outputs: C, outputs or classes.
        level: L of the grid; M = 2^L - 1.
        bounds: bounds of the grid.
        kernel: kernel of the units; the default is `LaplaceKernel(1.0)` (see `AdditiveGP`).
        likelihood: observation model; the default is `GaussianLikelihood()`.
        scaling: "standardize", "minmax" or "none".
        embedding: whether a linear map takes the features to the units; if not, P = D_w.
        prior: priors of some sites by name (see `AdditiveGP`); the weights are N(0, 1) otherwise.
        linear_term: whether every unit has a Bayesian linear term beside its process.
        input_units: whether the columns of x `(N, D)` are units too (see `AdditiveGP`). True takes
            D from the linear layer that the network starts with; else give D itself, at most 64.
        prior_scale: standard deviation of f in the prior at the start, before the scales of the
            units are learned; by default 3 for classes and 1 for the rest.
        route: "auto", "local" or "dense"; with "dense" everything has second derivatives (see
            `AdditiveGP`).
        features: a function from what the extractor returns to the features, for extractors that
            return tuples, dictionaries or objects (see `AdditiveGP`). `save` does not keep it.

    Attributes:
        input_shape: the shape of a row of x, as plain data (see `pyro_dak.model.rows`), or None
            before the first x.
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
        route: Route = "auto",
        features: Callable[[Any], Tensor] | None = None,
    ):
        check_integer("num_outputs", num_outputs, minimum=1)
        if likelihood is None:
            likelihood = GaussianLikelihood()
        check_kind("likelihood", likelihood, Likelihood, "a likelihood of pyro_dak")
        super().__init__(
            feature_extractor,
            feature_dim,
            num_units,
            likelihood.num_functions(num_outputs),
            level,
            bounds,
            kernel,
            scaling,
            embedding,
            prior,
            linear_term,
            input_units,
            likelihood.prior_scale if prior_scale is None else prior_scale,
            name="",
            route=route,
            features=features,
        )
        self.num_outputs = num_outputs
        self.likelihood = likelihood
        self.input_shape: RowShape | None = None
        self.register_buffer("calibration", None)
        self.novelty: Any = None  # what `learn_novelty` learns: a module

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

    def _check_features(self, features: Tensor, num_columns: int) -> None:
        is_floating = isinstance(features, Tensor) and features.is_floating_point()
        if not is_floating or features.dim() != 2 or features.shape[-1] != num_columns:
            self._refuse_features(features, num_columns)

    def _check_plates(self) -> None:
        plate = plate_of_rows()
        if plate is not None:
            raise ValueError(
                f"The model was called inside the plate `{plate}`, which would give every row "
                "weights of its own. Call it outside: it has a plate `data` over the rows, and "
                "takes minibatches with `num_data`. A plate of draws needs `dim=-2`."
            )

    def forward(self, x: Inputs, y: Tensor | None = None, num_data: float | None = None) -> Tensor:
        """The generative program; returns y.

        Args:
            x: inputs, `(N, ...)`: a tensor, or a tuple or dictionary of tensors.
            y: targets, or None to sample them.
            num_data: size of the data set if x is a minibatch: log-likelihoods count
                num_data / N times.
        """
        check_parts("x", x)
        check_store(self)
        if self.training and torch.is_grad_enabled():
            warn_if_weights_are_given(self.site_shapes)
        with explaining(self, x, y):
            h = self.unit_inputs(x)
            self.input_shape = self.input_shape or row_shape(x)
            return self.observe(h, y, num_data)

    def observe(self, h: Tensor, y: Tensor | None = None, num_data: float | None = None) -> Tensor:
        """The program from the unit inputs on: priors, f, likelihood; for features held fixed."""
        self._check_plates()
        check_floating("h", h)
        check_has_values("h", h)
        check_shape("h", h, ("N", self.num_units), "rows x units")
        if h.shape[-2] == 0:
            raise ValueError("`h` must have at least one row; got none.")
        if num_data is not None:
            check_positive("num_data", num_data)
        N = h.shape[-2]
        f = DrawnFunction(self, self.sample_weights(self.layer.log_unit_scale)).at_units(h)
        parameters = self.likelihood.sample_parameters()
        if y is not None:
            y = self.likelihood.check_targets(y, self.num_outputs)
        scale = 1.0 if num_data is None else num_data / N
        with pyro.plate("data", N), poutine.scale(scale=scale):
            f = pyro.deterministic("f", f, event_dim=1)
            try:
                y_given_f = self.likelihood.distribution(f, **parameters)
            except ValueError:
                check_finite("h", h)
                raise
            y_given_f, y = observed_distribution(self.likelihood, y_given_f, y)
            y = pyro.sample("y", y_given_f, obs=y)
        _check_observed(y, (N, *y_given_f.event_shape), self.likelihood)
        return y


def _check_observed(y: Tensor, shape: tuple[int, ...], likelihood: Likelihood) -> None:
    if y.shape[-len(shape) :] != shape:
        raise ValueError(
            f"`y` must have shape {shape}, that of `{type(likelihood).__name__}.distribution(f)`; "
            f"got {tuple(y.shape)}. Reshape what you give to `pyro.condition`, or call the model "
            "with `y` as its second argument. Sites of a likelihood belong into "
            "`sample_parameters`: those that `distribution` samples have one value per row."
        )
