"""A Gaussian guide in natural form, which learns by closed updates instead of gradient descent.

`docs/mathematics.md` derives the updates. In short: with the expected gradients g and curvatures k
of the log-likelihood under q (`Likelihood.expected_derivatives`) and the design Phi, a step keeps a
share of what q knows, takes the rest from the prior, and adds a batch, counted `gain` times:

    precision <- keep precision + (1 - keep) prior + gain Phi^T diag(k) Phi
    mean <- mean + precision^{-1} (gain Phi^T g - (1 - keep) prior (mean - prior mean))

keep = 1 - rho and gain = rho N / B is the natural gradient of the bound with step length rho;
keep = gain = 1 conditions q on the batch, and gain = -1 takes it out again.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_dak.additive.gaussian import (
    ExpectedDerivatives,
    FunctionMoments,
    tril_of_inverse,
)
from pyro_dak.additive.layer import AdditiveLayer, FixedNodes
from pyro_dak.inference.densities import unit_data, with_noise
from pyro_dak.inference.guides.base import NormalParameters, check_guide, independent_roots
from pyro_dak.inference.guides.common_shift import CommonShiftNormal
from pyro_dak.inference.guides.joint import TrilGuide, design_moments, flat_priors
from pyro_dak.model.dak import DAK
from pyro_dak.model.inputs import check_model
from pyro_dak.model.likelihoods import GaussianLikelihood, Likelihood
from pyro_dak.model.rows import Inputs
from pyro_dak.validation import (
    check_choice,
    check_finite,
    check_floating,
    check_has_values,
    check_integer,
    check_kind,
    check_real,
)

__all__ = ["Covariance", "NaturalGuide", "RowSums"]

Covariance = Literal["joint", "shared", "diagonal"]

_MAX_WEIGHTS = 2000
_MAX_PRECISION_ELEMENTS = 2**27  # a gigabyte
# The means of independent weights are found jointly for up to so many weights of a function, and
# for up to so many elements in the precisions of all functions.
_MAX_COARSE_WEIGHTS = 512
_MAX_COARSE_ELEMENTS = 2**22
# Up to so many rows at once, and so many times in a row, a root of the covariance is changed by
# them instead of being made anew.
_MAX_FEW_ROWS = 16
_MAX_CHANGES = 1000


class RowSums(NamedTuple):
    """What a batch says about q, in sums over its rows, which several processes can add up.

    With the design Phi `(B, K)` and the expected gradients g and curvatures k `(B, F)`:

    Attributes:
        gradient: Phi^T g, `(F, K)`.
        curvature: Phi^T diag(k) Phi, `(F, K, K)`; `(1, K, K)` with the mean of k over functions if
            they share it; its diagonal, `(F, K)`, for independent weights.
        coarse_curvature: for independent weights, Phi^T diag(k) Phi of the coarsest, `(F, J, J)`.
        steepest: the sum of a bound of the curvature along any direction of the functions, a
            scalar, if they share a precision.
        mean_curvature: the sum of the mean of k over functions, likewise.
        squares: the sum of E_q (y - f)^2, of all outputs or of each, `(C,)`, if a noise scale is to
            be learned from it.
        num_squares: how many squares these are, in the same shape, if targets may be missing.
    """

    gradient: Tensor
    curvature: Tensor
    coarse_curvature: Tensor | None = None
    steepest: Tensor | None = None
    mean_curvature: Tensor | None = None
    squares: Tensor | None = None
    num_squares: Tensor | None = None

    def from_nodes(self, layer: AdditiveLayer, is_diagonal: bool = False) -> "RowSums":
        """The sums for the design of the weights, from those for the design of node values.

        For independent weights, all of them coarse, the curvature has been a matrix till now.
        """
        gradient = layer.from_nodes(self.gradient)
        curvature = layer.from_nodes(layer.from_nodes(self.curvature).mT)
        if is_diagonal:
            own = curvature.diagonal(dim1=-2, dim2=-1)
            return self._replace(gradient=gradient, curvature=own, coarse_curvature=curvature)
        return self._replace(gradient=gradient, curvature=curvature)

    def plus(self, other: "RowSums") -> "RowSums":
        """The sums over the rows of both."""
        values: list[Any] = [
            None if a is None or b is None else a + b for a, b in zip(self, other, strict=True)
        ]
        return RowSums(*values)


class NaturalGuide(TrilGuide):
    """Gaussian q over mu, linear and z, kept as means and precisions and updated in closed form.

    q starts at the prior and has no parameters for an optimiser: `fit` and `NaturalVI` move it by
    natural gradients, and `update` conditions it on more rows. The numbers are kept in float64
    whatever the dtype of the model is, since a posterior is a sum of many small contributions.

    Args:
        model: gives the sites, and their priors, which must be normal.
        covariance: "joint" for a precision among the K = 1 [+ P] + P M weights (mu, linear, z) of
            each function; "shared" for one precision for all functions, so that many functions cost
            no more than a linear layer; "diagonal" for independent weights, of any number. The
            first two take up to 2,000 weights of a function. With classes, whose probabilities do
            not change if one function is added to all, the functions also share a shift.

    Attributes:
        mean: means of the weights, `(F, K)`.
        precision: inverse covariances, `(F, K, K)`, `(1, K, K)` or `(F, K)`.
        num_rows: how many rows q stands for, 0 at the prior.
    """

    mean: Tensor
    precision: Tensor
    coarse_precision: Tensor
    num_rows: Tensor
    prior_mean: Tensor
    prior_precision: Tensor
    _like: Tensor

    def __init__(self, model: DAK, covariance: Covariance = "joint"):
        check_choice("covariance", covariance, ("joint", "shared", "diagonal"))
        check_kind("model", model, DAK, "a DAK, whose sites the guide has")
        priors = _checked_priors(model)
        super().__init__(model)
        self.covariance = covariance
        self._roots: dict[str, _Root] = {}
        self._inverses: dict[str, _Inverse] = {}
        self._moment: _Moment | None = None
        self._of_moment: dict[Any, Any] = {}
        F, K = self.site_shapes["mu"][0], self.num_weights
        self.has_common_shift = F > 1 and model.likelihood.is_shift_invariant
        _check_size(covariance, F, K)
        like = model.layer.log_unit_scale.detach()
        state = like.new_empty(F, K, dtype=_state_dtype(like.device))
        loc, scale = flat_priors(priors, self.site_shapes, state)
        precision = scale.square().reciprocal()
        self.register_buffer("_like", like.new_empty(0), persistent=False)
        self.register_buffer("prior_mean", loc)
        self.register_buffer("prior_precision", precision)
        self.register_buffer("mean", loc.clone())
        self.register_buffer("num_rows", state.new_zeros(()))
        if covariance == "diagonal":
            self._num_levels, self._num_fine = self._coarse_levels()
            self.register_buffer("precision", precision.clone())
        name = "coarse_precision" if covariance == "diagonal" else "precision"
        self.register_buffer(name, torch.diag_embed(self._own_prior()))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move to another device or dtype; what q knows goes along to the device only."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, value in self._buffers.items():
            assert value is not None
            dtype = _state_dtype(value.device)
            if name != "_like" and value.dtype != dtype:
                kept = before[name]
                assert kept is not None
                self._buffers[name] = kept.to(value.device, dtype)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """The state without what follows from mean and precision, which is made when needed."""
        empty = dict[str, Any](_roots={}, _inverses={}, _moment=None, _of_moment={})
        return {**self.__dict__, **empty}

    @torch.no_grad()
    def set_parameters(self, mean: Tensor, precision: Tensor) -> None:
        """Set the means `(F, K)` and the precisions, in the shape of `precision`.

        For covariance "joint" or "shared"; the precisions must be positive definite.
        """
        if self.covariance == "diagonal":
            raise NotImplementedError(
                'With covariance="diagonal" means and precisions belong together; use "joint".'
            )
        for name, value in (("mean", mean), ("precision", precision)):
            own = self._buffers[name]
            assert own is not None
            check_floating(name, value)
            check_has_values(name, value)
            check_finite(name, value)
            if value.shape != own.shape:
                raise ValueError(
                    f"`{name}` must have shape {tuple(own.shape)}; got {tuple(value.shape)}."
                )
        if bool(torch.linalg.cholesky_ex(precision.to(self.precision)).info.any()):
            raise ValueError("`precision` must be positive definite.")
        self.mean.copy_(mean)
        self.precision.copy_(precision)

    # q as a distribution

    @property
    def loc(self) -> Tensor:
        """Means of the weights, `(F, K)`, in the dtype of the guide."""
        return self.mean.to(self._like.dtype)

    @property
    def scale(self) -> Tensor:
        """Standard deviations of the weights, `(F, K)`, in the dtype of the guide."""
        return (self._own_variances() + self._shift_variances()).sqrt().to(self._like.dtype)

    @property
    def scale_tril(self) -> Tensor:
        """Cholesky factors of the inverse precisions, `(F, K, K)` or `(1, K, K)`.

        They are in the dtype of the guide. A shift that all functions share is not in them.
        """
        if self.covariance == "diagonal":
            return torch.diag_embed(self.precision.rsqrt().to(self._like.dtype))
        return self._root("precision", self._like.dtype, is_tril=True)

    def sample_weights(self) -> dict[str, Tensor]:
        """Emit the sites; with a common shift, from one auxiliary site of all weights."""
        if not self.has_common_shift:
            return super().sample_weights()
        if self.covariance == "diagonal":
            q = self._independent_weights()
        else:
            dtype = self._like.dtype
            q = CommonShiftNormal(
                self.loc,
                self.scale_tril,
                self._root("total", dtype, is_tril=True)[0],
                self._prior_total().to(dtype),
                self.shift_root().to(dtype),
            )
        flat = pyro.sample("_natural_weights", q, infer={"is_auxiliary": True})
        flat = flat.mT if self.covariance == "diagonal" else flat
        values = {}
        for name, value in zip(self.weight_sites, flat.split(self._sizes, -1), strict=True):
            shape = self.site_shapes[name]
            value = value.reshape(*flat.shape[:-2], *shape)
            values[name] = pyro.sample(name, dist.Delta(value, event_dim=len(shape)))
        return values

    def _independent_weights(self) -> dist.Distribution:
        """Weights that are independent of one another but for the shift of each, event `(K, F)`."""
        shift = self._shift_variances().sqrt()[:, None, None].expand(-1, len(self.mean), -1)
        parts = (self.mean.mT, shift, self.precision.reciprocal().mT)
        cast = [part.to(self._like.dtype) for part in parts]
        return dist.LowRankMultivariateNormal(*cast).to_event(1)

    def conditional(self, before: Tensor, size: int) -> dist.Distribution:
        if self.covariance != "diagonal":
            return super().conditional(before, size)
        block = slice(before.shape[-1], before.shape[-1] + size)
        return dist.Normal(self.loc[:, block], self.scale[:, block]).to_event(2)

    def moments(self, layer: AdditiveLayer, h: Tensor) -> FunctionMoments:
        """The exact q(f) at unit inputs h `(N, P)`, in the dtype of h."""
        own = self.own_moments(layer, h)
        if not self.has_common_shift:
            return own
        if self.covariance == "diagonal":
            scale = self._shift_variances().sqrt().to(h.dtype).unsqueeze(0)
            var = layer.moments(h, layer.split(torch.zeros_like(scale)), layer.split(scale)).var
        else:
            design = layer.design(h)
            root = self._root("total", h.dtype)[0]
            explained = (design @ root).square().sum(-1, keepdim=True)
            prior_var = self._prior_total().reciprocal().to(h.dtype)
            var = (design.square() @ prior_var.unsqueeze(-1) - explained).clamp(min=0)
        return FunctionMoments(own.mean, own.var + var, var.sqrt().expand_as(own.mean).unsqueeze(0))

    def own_moments(self, layer: AdditiveLayer, h: Tensor) -> FunctionMoments:
        """`moments` without a shift that all functions share, which the likelihood cannot see."""
        mean = self.mean.to(h.dtype)
        if self.covariance != "diagonal":
            return design_moments(layer.design(h), mean, self._root("precision", h.dtype))
        return layer.moments(h, self.split(mean), self.split(self.precision.rsqrt().to(h.dtype)))

    def moments_and_kl(
        self, layer: AdditiveLayer, h: Tensor, priors: NormalParameters
    ) -> tuple[FunctionMoments, Tensor]:
        """`own_moments`, which are all that a bound needs, and `kl_normal`."""
        weights = self.fixed_weights(layer, h.dtype)
        own = layer.joint_moments(h, *weights)[0] if weights else self.own_moments(layer, h)
        return own, self.kl_normal(priors)

    @torch.no_grad()
    def fixed_weights(self, layer: AdditiveLayer, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Means `(F, K)` and covariances `(F, K, K)` or `(1, K, K)` for `layer.joint_moments`.

        They are kept until q changes. Nothing for independent weights, which take another route.
        """
        if self.covariance == "diagonal":
            return ()

        def make() -> tuple[Tensor, ...]:
            covariance = layer.at_nodes(layer.at_nodes(self._inverse("precision")).mT)
            return layer.at_nodes(self.mean).to(dtype), covariance.to(dtype)

        return self.kept(("weights", dtype, layer), make)

    @torch.no_grad()
    def fixed_nodes(self, layer: AdditiveLayer, dtype: torch.dtype) -> FixedNodes | None:
        """q in the form that `layer.gaussian_rows` takes, kept until q changes.

        None where functions are not known from their values at the nodes, and where there are
        weights whose means are not found jointly.
        """
        if layer.activation.node_matrix(self._like) is None or not self.is_joint_in_the_mean:
            return None

        def make() -> FixedNodes:
            if self.covariance == "diagonal":
                var = self.precision.reciprocal()
                return layer.fixed_nodes(self.mean.to(dtype), var.to(dtype))
            loc, covariance = self.fixed_weights(layer, dtype)
            total = covariance.sum(0) if len(covariance) > 1 else covariance[0] * len(loc)
            return FixedNodes(loc, total)

        return self.kept(("nodes", dtype, layer), make)

    @property
    def is_joint_in_the_mean(self) -> bool:
        """Whether the means of all weights of a function are found jointly."""
        return self.covariance != "diagonal" or self._num_fine == 0

    def kept(self, name: Any, make_fn: Callable[[], Any]) -> Any:
        """What `make_fn` returns, kept under a name until q changes."""
        mean, precision = self._buffers["mean"], self._buffers["precision"]
        assert mean is not None
        assert precision is not None
        now = _Moment(mean, mean._version, precision, precision._version)
        if not now.is_same(self._moment):
            self._moment, self._of_moment = now, {}
        if name not in self._of_moment:
            self._of_moment[name] = make_fn()
        return self._of_moment[name]

    def unit_roots(self) -> tuple[Tensor, Tensor | None]:
        if self.covariance == "diagonal":
            scale = self.split(self.scale)
            return independent_roots(torch.diag_embed(scale.z), scale.linear)
        if not self.has_common_shift:
            return super().unit_roots()
        shift = self.shift_root().to(self._like.dtype).unsqueeze(0)
        roots = torch.cat(torch.broadcast_tensors(self.scale_tril, shift), -1)  # (F, K, 2 K)
        _, *linear, z = roots.expand(len(self.mean), -1, -1).split(self._sizes, 1)
        return z.unflatten(1, self.site_shapes["z"][1:]), linear[0] if linear else None

    def weight_covariance(self) -> Tensor:
        covariance = super().weight_covariance()
        if not self.has_common_shift:
            return covariance
        root = self.shift_root().to(self._like.dtype)
        return covariance + (root @ root.mT).repeat(len(self.mean), len(self.mean))

    def kl_normal(self, priors: NormalParameters) -> Tensor:
        loc, scale = flat_priors(priors, self.site_shapes, self.mean)
        variances = self._own_variances() + self._shift_variances()
        squares = (variances + (self.mean - loc).square()) / scale.square() - 1
        return (0.5 * (squares.sum() - self._log_det()) + scale.log().sum()).to(self._like.dtype)

    def _log_det(self) -> Tensor:
        """Log determinant of the covariance of all weights, in float64."""
        if self.covariance == "diagonal":
            logs = -self.precision.log().sum()
        else:
            logs = self._log_det_inverse("precision") * (len(self.mean) / len(self.precision))
        if not self.has_common_shift:
            return logs
        if self.covariance == "diagonal":
            total = self.precision.sum(0).log().sum()
        else:
            total = -self._log_det_inverse("total")
        return logs + total - self._prior_total().log().sum()

    # A shift that all functions share (see `common_shift`)

    def _own_variances(self) -> Tensor:
        """Diagonals of the inverse precisions, `(F, K)`."""
        if self.covariance == "diagonal":
            return self.precision.reciprocal()
        return self._inverse("precision").diagonal(dim1=-2, dim2=-1).expand_as(self.mean)

    def _prior_total(self) -> Tensor:
        """The sum of the precisions of the prior over functions, `(K,)`."""
        return self.prior_precision.sum(0)

    def _shift_variances(self) -> Tensor:
        """Variances of the common shift, `(K,)`; zero if there is none."""
        if not self.has_common_shift:
            return torch.zeros_like(self.mean[0])
        if self.covariance == "diagonal":
            explained = self.precision.sum(0).reciprocal()
        else:
            explained = self._inverse("total")[0].diagonal()
        return (self._prior_total().reciprocal() - explained).clamp(min=0)

    def shift_root(self) -> Tensor:
        """R with R R^T the covariance of the common shift, `(K, K)`, in float64."""
        if self.covariance == "diagonal":
            return torch.diag(self._shift_variances().sqrt())
        root = self._root("total")[0]
        values, vectors = torch.linalg.eigh(
            torch.diag(self._prior_total().reciprocal()) - root @ root.mT
        )
        return vectors * values.clamp(min=0).sqrt()

    # Natural-gradient steps

    @torch.no_grad()
    def row_sums(
        self,
        layer: AdditiveLayer,
        h: Tensor,
        derivatives: ExpectedDerivatives,
        coupling: float = 1.0,
        design: Tensor | None = None,
        may_round: bool = False,
    ) -> RowSums:
        """The sums over rows that a step needs, in the dtype of the precision.

        Args:
            layer: the layer of the model.
            h: inputs of the units, `(B, P)`.
            derivatives: expected gradients and curvatures, `(B, F)` each.
            coupling: that of the likelihood.
            design: the design to sum over, `(B, K)`, if it is there already. For independent
                weights the curvature is then a matrix as for joint ones (see `from_nodes`).
            may_round: whether products of the design may be made in the dtype of the model, which
                takes half the time, where that is accurate enough (`_is_accurate`).
        """
        g, k = derivatives
        if self.has_common_shift:
            # Along the shift there is none, so that the F - 1 contrasts have all of the curvature.
            k = k * (k.shape[-1] / (k.shape[-1] - 1))
        if self.covariance == "diagonal" and design is None:
            gradient, curvature = layer.row_sums(h, g, k)
            coarse, k = (part.to(self.mean) for part in (layer.design(h, self._num_levels), k))
            return RowSums(gradient, curvature, (coarse.mT * k.mT.unsqueeze(-2)) @ coarse)
        design = layer.design(h) if design is None else design
        state = self.mean
        if not (may_round and self._is_accurate(layer, h, k)):
            design, g, k = (part.to(state) for part in (design, g, k))
        gradient = (g.mT @ design).to(state)
        if self.covariance == "shared":
            mean = (k[:1] if k.stride(0) == 0 else k).mean(-1).expand(len(k))
            own = derivatives.curvature
            steepest = torch.minimum(coupling * own.amax(-1), own.sum(-1)).sum()
            curvature = _weighted_squares(design, mean.unsqueeze(-1)).to(state)
            return RowSums(gradient, curvature, None, steepest, mean.sum())
        return RowSums(gradient, _weighted_squares(design, k).to(state))

    def _is_accurate(self, layer: AdditiveLayer, h: Tensor, k: Tensor) -> bool:
        """Whether rounding of Phi^T diag(k) Phi in the dtype of the design is small to the prior.

        A direction of which rows say nothing has the precision of the prior, and the rounding of
        the sums over all other directions: about 2 eps k |phi|^2 B for a batch, by measurement,
        and sqrt(n / B) times that for n rows in batches of B. With little noise k is large, and
        precisions could even become negative. A twentieth of the prior is taken as small.
        """
        if h.dtype == torch.float64 or not h.is_cpu:
            return False  # elsewhere a look at the numbers would wait for the device
        largest = layer.largest_design(h) ** 2 * float(k.amax())
        num_rows, least = self.kept(
            "rows and prior", lambda: (float(self.num_rows), float(self.prior_precision.min()))
        )
        rounding = 2 * torch.finfo(h.dtype).eps * largest
        rounding *= math.sqrt(max(num_rows, len(h)) * len(h))
        return bool(rounding <= 0.05 * least)

    @torch.no_grad()
    def step(
        self,
        sums: RowSums,
        num_rows: float,
        *,
        keep: float = 1.0,
        gain: float = 1.0,
        share: float = 1.0,
        coupling: float = 1.0,
    ) -> None:
        """Keep a share of what q knows, take the rest from the prior, and add a batch.

        The mean moves less than the formula says where steps could overshoot: if functions are
        coupled, if they share a precision, or if weights count as independent, the curvature can be
        some r times what the precision knows of it, and a batch that is a `share` of all that q
        knows then moves it by at most 1 / (share r) of the formula's step.

        Args:
            sums: those of the batch.
            num_rows: rows of the batch.
            keep: how much of what q knows is kept.
            gain: how often each row of the batch counts.
            share: the part of the batch in what q knows after the step.
            coupling: that of the likelihood.
        """
        pull = (1 - keep) * self.prior_precision * (self.mean - self.prior_mean)
        self._forget(keep)
        self._add(sums, gain, pull, share, coupling)
        self.num_rows.mul_(keep).add_(gain * num_rows)

    def _forget(self, keep: float) -> None:
        """Mix the precisions with those of the prior."""
        if keep == 1:
            return
        if self.covariance == "diagonal":
            self.precision.mul_(keep).add_(self.prior_precision, alpha=1 - keep)
        matrix = self._precisions()[-1].mul_(keep)
        matrix.diagonal(dim1=-2, dim2=-1).add_(self._own_prior(), alpha=1 - keep)

    def _add(self, sums: RowSums, gain: float, pull: Tensor, share: float, coupling: float) -> None:
        """Add a batch to the precisions, and move the mean by what it asks for less `pull`."""
        self.precision.add_(sums.curvature, alpha=gain)
        rest = torch.add(-pull, sums.gradient, alpha=gain)  # (F, K)
        if self.has_common_shift:
            coupling = coupling * (len(rest) - 1) / len(rest)
        if self.covariance == "diagonal":
            assert sums.coarse_curvature is not None
            self.coarse_precision.add_(sums.coarse_curvature, alpha=gain)
            # Coarse and fine weights together have at most twice the curvature of each, and the
            # fine weights of a row at most as many times as they are.
            both = 2 * coupling if self._num_fine else coupling
            step = rest / self.precision * min(1.0, 1 / (share * both * max(1, self._num_fine)))
            rest = self._coarse(rest)
            coarse = _solved(self.coarse_precision, rest) * min(1.0, 1 / (share * both))
            if self.has_common_shift:
                coarse += self._common_step(rest, "coarse_total")
            self._set_coarse(step, coarse)
        else:
            step = _times(self._inverse("precision"), rest)
            if sums.steepest is None or sums.mean_curvature is None:
                step.mul_(min(1.0, 1 / (share * coupling)))
            else:
                tiny = torch.finfo(sums.steepest.dtype).tiny
                ratio = (sums.mean_curvature + tiny) / (share * sums.steepest + tiny)
                step.mul_(ratio.clamp(max=1))
            if self.has_common_shift:
                step += self._common_step(rest, "total")
        self.mean.add_(step)

    def _common_step(self, rest: Tensor, name: str) -> Tensor:
        """The covariance of the common shift times what all functions ask for, `(K,)`."""
        total = rest.sum(0)
        prior = self._prior_total()
        prior = self._coarse(prior) if name == "coarse_total" else prior
        return total / prior - self._inverse(name)[0] @ total

    def _inverse(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The inverse of a precision, `(F, K, K)` or `(1, K, K)`, for names as in `_root`.

        Steps take it, because it costs less than a root. It is kept until the precision changes,
        and NaN where that is not positive definite.
        """
        is_total = name.endswith("total")
        precision = self._buffers[name.replace("total", "precision")]
        assert precision is not None
        kept = self._inverses.get(name)
        if kept is None or kept.of is not precision or kept.version != precision._version:
            with torch.no_grad():
                if is_total and self.covariance == "shared":
                    F = len(self.mean)
                    value = self._inverse("precision") / F
                    log_det = self._log_det_inverse("precision") - math.log(F) * value.shape[-1]
                else:
                    matrix = precision.sum(0, keepdim=True) if is_total else precision
                    tril, info = torch.linalg.cholesky_ex(matrix)
                    value = torch.cholesky_inverse(tril)
                    value.masked_fill_((info != 0)[:, None, None], math.nan)
                    log_det = -2 * tril.diagonal(dim1=-2, dim2=-1).log().sum()
            kept = _Inverse(precision, precision._version, {precision.dtype: value}, log_det)
            self._inverses[name] = kept
        dtype = dtype or precision.dtype
        if dtype not in kept.values:
            kept.values[dtype] = kept.values[precision.dtype].to(dtype)
        return kept.values[dtype]

    def _log_det_inverse(self, name: str) -> Tensor:
        """The log determinants of the inverse of a precision, summed over functions."""
        self._inverse(name)
        return self._inverses[name].log_det

    def _root(self, name: str, dtype: torch.dtype | None = None, is_tril: bool = False) -> Tensor:
        """R with R R^T the inverse of a precision, in the dtype of the precision or in this one.

        The name is that of the precision, or "total" and "coarse_total" for its sum over functions.
        It is kept until the precision changes, and NaN where that is not positive definite. After
        `_add_few` it is not triangular; with `is_tril` it is made so.
        """
        is_total = name.endswith("total")
        precision = self._buffers[name.replace("total", "precision")]
        assert precision is not None
        kept = self._roots.get(name)
        is_old = kept is None or kept.of is not precision or kept.version != precision._version
        if kept is None or is_old or (is_tril and kept.num_changes > 0):
            with torch.no_grad():
                if is_total and self.covariance == "shared":
                    root = self._root("precision", is_tril=True) / math.sqrt(len(self.mean))
                else:
                    matrix = precision.sum(0, keepdim=True) if is_total else precision
                    root, is_definite = tril_of_inverse(matrix)
                    root.masked_fill_(~is_definite[:, None, None], math.nan)
            kept = _Root(precision, precision._version, {precision.dtype: root}, 0)
            self._roots[name] = kept
        dtype = dtype or precision.dtype
        if dtype not in kept.values:
            kept.values[dtype] = kept.values[precision.dtype].to(dtype)
        return kept.values[dtype]

    # Conditioning on rows

    @torch.no_grad()
    def update(
        self, model: DAK, x: Inputs, y: Tensor, *, forget: float = 1.0, num_steps: int = 20
    ) -> None:
        """Condition q on more rows, without those that it knows; the features stay as they are.

        For a Gaussian likelihood with the noise as it is, the result is the posterior of all rows,
        as if they had come at once. For other likelihoods q becomes the Gaussian that maximises
        E log p(y | f) - KL(q || q before): the log-likelihood is replaced by a quadratic around q
        `num_steps` times, each time around the q found so far.

        Args:
            model: the model, evaluated in eval mode.
            x: inputs of the rows, `(B, ...)`.
            y: their targets.
            forget: how much of what q knows is kept, the rest goes back to the prior. Below 1, rows
                that came k updates ago count forget^k.
            num_steps: steps for likelihoods that are not Gaussian.
        """
        check_model(model)
        check_guide(model, self)
        check_real("forget", forget)
        if not 0 < forget <= 1:
            raise ValueError(f"`forget` must be above 0 and at most 1; got {forget}.")
        check_integer("num_steps", num_steps, minimum=1)
        likelihood = self._conditioning_likelihood(model)
        h, y = unit_data(model, x, y)
        is_exact = self._is_exact_for(likelihood)
        if is_exact and forget == 1 and len(y) <= _MAX_FEW_ROWS and self.covariance != "diagonal":
            return self._add_few(model.layer, likelihood, h, y)
        known = forget * self._times_precision(self.mean)
        known += (1 - forget) * self.prior_precision * self.prior_mean
        self._forget(forget)
        anchors = [precision.clone() for precision in self._precisions()]
        for _ in range(1 if is_exact else num_steps):
            sums = self._sums_over(model.layer, likelihood, h, y)
            for precision, anchor in zip(self._precisions(), anchors, strict=True):
                precision.copy_(anchor)
            pull = self._times_precision(self.mean) - known
            self._add(sums, 1.0, pull, 1.0, likelihood.coupling)
        self.num_rows.mul_(forget).add_(len(y))

    def _add_few(self, layer: AdditiveLayer, likelihood: Likelihood, h: Tensor, y: Tensor) -> None:
        """Condition q on few rows of a Gaussian likelihood; O(K^2) for each row.

        With U = diag(k)^{1/2} Phi R and the eigenvalues s and vectors E of U U^T, `(B, B)`, the new
        covariance R (I + U^T U)^{-1} R^T has the root R (I - U^T E diag(w) E^T U),
        w = (1 - (1 + s)^{-1/2}) / s.
        """
        design = layer.design(h)
        g, k = likelihood.expected_derivatives(y, self.moments(layer, h))
        sums = self.row_sums(layer, h, ExpectedDerivatives(g, k), likelihood.coupling)
        root = self._root("precision")
        num_changes = self._roots["precision"].num_changes
        k = k.mT[: len(root), :, None]  # one function stands for all if they share a precision
        U = k.sqrt() * (design @ root)  # (F, B, K)
        s, E = torch.linalg.eigh(U @ U.mT)
        s = s.clamp(min=torch.finfo(s.dtype).tiny).unsqueeze(-2)
        w = -torch.expm1(-0.5 * torch.log1p(s)) / s
        projected = E.mT @ U
        root = torch.baddbmm(root, root @ projected.mT * w, projected, alpha=-1)
        self.precision.add_(sums.curvature)
        if num_changes < _MAX_CHANGES:
            version = self.precision._version
            values = {root.dtype: root}
            self._roots["precision"] = _Root(self.precision, version, values, num_changes + 1)
        self.mean.add_(_solve(self._root("precision"), sums.gradient))
        self.num_rows.add_(len(y))

    @torch.no_grad()
    def downdate(self, model: DAK, x: Inputs, y: Tensor) -> None:
        """Take rows out of q again, for a Gaussian likelihood: the inverse of `update`.

        Noise and features must be those with which the rows came in.

        Raises:
            ValueError: if q did not know the rows, so that less than the prior would be left; q is
                then as it was.
        """
        check_model(model)
        check_guide(model, self)
        likelihood = self._conditioning_likelihood(model)
        if not self._is_exact_for(likelihood):
            raise NotImplementedError(
                "Rows can be taken out where they come in exactly, which is so for "
                f"GaussianLikelihood with one noise scale; got {type(likelihood).__name__}. Fit "
                "again without them."
            )
        h, y = unit_data(model, x, y)
        sums = self._sums_over(model.layer, likelihood, h, y)
        curvature = sums.curvature if sums.coarse_curvature is None else sums.coarse_curvature
        left = self._precisions()[-1] - curvature
        left.diagonal(dim1=-2, dim2=-1).sub_((1 - 1e-6) * self._own_prior())
        if bool(torch.linalg.cholesky_ex(left).info.any()):
            raise ValueError(
                "`x` and `y` must be rows that q knows: without these, less than the prior would "
                "be left. Noise and features must be those of the update."
            )
        self._add(sums, -1.0, torch.zeros_like(self.mean), 1.0, 1.0)
        self.num_rows.sub_(len(y))

    def _conditioning_likelihood(self, model: DAK) -> Likelihood:
        """The likelihood of the model in float64, or an error if means are not found jointly."""
        if self.covariance == "diagonal" and self._num_fine:
            raise NotImplementedError(
                f'With covariance="diagonal" q can be conditioned on rows for up to '
                f"{_MAX_COARSE_WEIGHTS} weights of a function; this one has {self.num_weights}. "
                'Use covariance="joint" or "shared", or go on training with NaturalVI.'
            )
        return with_noise(model.likelihood)

    def _is_exact_for(self, likelihood: Likelihood) -> bool:
        """Whether one step gives the posterior: a shared precision needs one noise for all."""
        if not isinstance(likelihood, GaussianLikelihood):
            return False
        return self.covariance != "shared" or 1 in (len(self.mean), likelihood.noise_scale.numel())

    def _sums_over(
        self, layer: AdditiveLayer, likelihood: Likelihood, h: Tensor, y: Tensor
    ) -> RowSums:
        """The sums over all rows, by chunks, at the q of now."""
        parts = []
        for h_part, y_part in zip(h.split(4096), y.split(4096), strict=True):
            q = self.own_moments(layer, h_part)
            derivatives = likelihood.expected_derivatives(y_part, q, num_samples=64)
            parts.append(self.row_sums(layer, h_part, derivatives, likelihood.coupling))
        return functools.reduce(RowSums.plus, parts)

    def _precisions(self) -> list[Tensor]:
        """What q knows of the weights; the last one is that of the means."""
        has_both = self.covariance == "diagonal"
        return [self.precision, self.coarse_precision] if has_both else [self.precision]

    def _own_prior(self) -> Tensor:
        """The diagonal of the last of the precisions at the prior."""
        if self.covariance == "diagonal":
            return self._coarse(self.prior_precision)
        is_shared = self.covariance == "shared"
        return self.prior_precision.mean(0, keepdim=True) if is_shared else self.prior_precision

    def _times_precision(self, mean: Tensor) -> Tensor:
        """The precision of all weights times the mean, `(F, K)`, if means are found jointly.

        With a common shift it is Lambda_c m_c - Lambda_c (A^{-1} - A^{-1} P A^{-1}) v, with v the
        sum of Lambda_c m_c.
        """
        precision = self._precisions()[-1]
        product = (precision @ mean.unsqueeze(-1)).squeeze(-1)
        if not self.has_common_shift:
            return product
        root = self._root("coarse_total" if self.covariance == "diagonal" else "total")[0]
        covariance = root @ root.mT
        shift = covariance @ product.sum(0)
        shift = shift - covariance @ (self._prior_total() * shift)
        return product - precision @ shift

    # The coarsest weights of a diagonal guide, whose means are found jointly

    def _coarse_levels(self) -> tuple[int, int]:
        """How many levels are coarse, and how many finer weights a row touches."""
        F, P, M = self.site_shapes["z"]
        limit = min(_MAX_COARSE_WEIGHTS, math.isqrt(_MAX_COARSE_ELEMENTS // F))
        num_levels = level = M.bit_length()  # M = 2^level - 1
        while num_levels and self.num_weights - P * (M - 2**num_levels + 1) > limit:
            num_levels -= 1
        return num_levels, P * (level - num_levels)

    def _coarse(self, flat: Tensor) -> Tensor:
        """The columns `(..., J)` of coarse weights among all weights `(..., K)`."""
        _, P, M = self.site_shapes["z"]
        others, z = flat.split((self.num_weights - P * M, P * M), -1)
        coarse = z.unflatten(-1, (P, M))[..., : 2**self._num_levels - 1]
        return torch.cat([others, coarse.flatten(-2)], -1)

    def _set_coarse(self, flat: Tensor, values: Tensor) -> None:
        """Write `values` `(F, J)` into the columns of coarse weights of `flat` `(F, K)`."""
        _, P, M = self.site_shapes["z"]
        J = 2**self._num_levels - 1
        others, z = values.split((self.num_weights - P * M, P * J), -1)
        flat[:, : others.shape[-1]] = others
        flat[:, others.shape[-1] :].unflatten(-1, (P, M))[..., :J] = z.unflatten(-1, (P, J))


class _Root(NamedTuple):
    """Roots of the inverse of a precision at one of its versions, by dtype.

    They are Cholesky factors that were changed so many times by a few rows.
    """

    of: Tensor
    version: int
    values: dict[torch.dtype, Tensor]
    num_changes: int


class _Moment(NamedTuple):
    """Mean and precision at one of their versions."""

    mean: Tensor
    mean_version: int
    precision: Tensor
    precision_version: int

    def is_same(self, other: "_Moment | None") -> bool:
        """Whether the other one is of the same tensors, unchanged."""
        return (
            other is not None
            and self.mean is other.mean
            and self.precision is other.precision
            and self[1::2] == other[1::2]
        )


class _Inverse(NamedTuple):
    """The inverse of a precision at one of its versions, by dtype, and its log determinant."""

    of: Tensor
    version: int
    values: dict[torch.dtype, Tensor]
    log_det: Tensor


def _weighted_squares(design: Tensor, k: Tensor) -> Tensor:
    """Phi^T diag(k_c) Phi of each column c of k `(B, C)`, `(C, K, K)`, for Phi `(B, K)`."""
    if k.stride(0) == 0:  # one row stands for all, as with one Gaussian noise
        return (design.mT @ design) * k[0, :, None, None]
    if k.shape[-1] == 1:
        return (design.mT @ (k * design)).unsqueeze(0)
    return (design.mT * k.mT.unsqueeze(-2)) @ design


def _solved(precisions: Tensor, right: Tensor) -> Tensor:
    """A^{-1} b for `(F, K, K)` and rows b `(F, K)`; NaN where A is not positive definite."""
    tril, info = torch.linalg.cholesky_ex(precisions)
    solved = torch.cholesky_solve(right.unsqueeze(-1), tril).squeeze(-1)
    return solved.masked_fill_((info != 0).unsqueeze(-1), math.nan)


def _times(matrices: Tensor, right: Tensor) -> Tensor:
    """A b for symmetric matrices A `(F, K, K)`, or `(1, K, K)` for all, and rows b `(F, K)`."""
    if len(matrices) == 1:
        return right @ matrices[0]
    return (right.unsqueeze(-2) @ matrices).squeeze(-2)


def _solve(root: Tensor, right: Tensor) -> Tensor:
    """R R^T b for roots R `(F, K, K)`, or `(1, K, K)` for all, and rows b `(F, K)`."""
    if len(root) == 1:
        return right @ root[0] @ root[0].mT
    return (right.unsqueeze(-2) @ root @ root.mT).squeeze(-2)


def _state_dtype(device: torch.device) -> torch.dtype:
    """float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def _checked_priors(model: DAK) -> dict[str, tuple[Any, Any]]:
    """(loc, scale) of the prior of each site, or an error if one is not normal."""
    others = "MeanFieldGuide, UnitBlockGuide, LowRankGuide or FullRankGuide"
    priors = {}
    for name in model.site_shapes:
        prior = None if "shrinkage" in name else model.normal_prior(name)
        if prior is None:
            raise NotImplementedError(
                f"NaturalGuide needs normal priors, under which its updates are closed; the site "
                f"`{name}` has {type(model.prior[name]).__name__}. Use {others}."
            )
        priors[name] = prior
    return priors


def _check_size(covariance: str, num_functions: int, num_weights: int) -> None:
    """Raise if the precisions would be too large."""
    if covariance == "diagonal":
        return
    if num_weights > _MAX_WEIGHTS:
        raise ValueError(
            f'`covariance="{covariance}"` is for up to {_MAX_WEIGHTS} weights of a function, since '
            f"a step costs their number cubed; this model has {num_weights}. Lower `num_units` or "
            '`level`, or use covariance="diagonal", MeanFieldGuide or UnitBlockGuide.'
        )
    if covariance == "joint" and num_functions * num_weights**2 > _MAX_PRECISION_ELEMENTS:
        raise ValueError(
            f'`covariance="joint"` would keep {num_functions} matrices of {num_weights} x '
            f'{num_weights}, more than a gigabyte. Use covariance="shared", which keeps one.'
        )
