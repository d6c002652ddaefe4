"""A BoTorch model: DAK as a surrogate with a joint posterior, gradients and exact conditioning."""

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from botorch.exceptions.warnings import InputDataWarning
from botorch.models.model import FantasizeMixin, Model
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform, Standardize
from botorch.posteriors import GPyTorchPosterior, Posterior
from gpytorch.constraints import GreaterThan
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood as NoiseLikelihood
from linear_operator.operators import DenseLinearOperator
from torch import Tensor

from pyro_dak.acting.surrogate import build_surrogate, maximize_evidence
from pyro_dak.acting.weights import GaussianWeights
from pyro_dak.inference import draws
from pyro_dak.inference.densities import noise_scale
from pyro_dak.inference.evidence import log_evidence
from pyro_dak.inference.exact import checked_normal_priors
from pyro_dak.model.dak import DAK
from pyro_dak.model.modes import local_parameters
from pyro_dak.validation import check_finite, check_floating, check_integer

__all__ = ["DAKModel"]

# How far the log scales of the columns, and of the directions, go from their start together, and
# how far each goes by itself. If each goes its own way, the evidence of few rows is overfitted. So
# do the log lengthscales of D columns, which go 1 / sqrt(D) by themselves: their squared distance
# from their level is expected to be 1, however many columns there are.
_LEVEL_DEVIATION, _DEVIATION = 1.0, 0.03
_WEIGHTS = ("loc", "root", "rows")  # what the posterior of the weights consists of


class DAKModel(Model, FantasizeMixin):
    """A surrogate for BoTorch from data: `DAKModel(train_X, train_Y)` is fitted and ready.

    The posterior of f at q points is jointly Gaussian, with mean Phi m and covariance Phi S Phi^T
    from the exact posterior N(m, S) of the last layer, and with the covariance that the grids of
    the units lose, which brings the prior back away from the data. It has gradients in X, and
    conditioning on more rows is exact. Network, scales and noise maximise the evidence
    (`maximize_evidence`), and conditioning leaves them as they are. The scales of columns go up and
    down together, so do those of directions, and the lengthscales of columns nearly so.

    Args:
        train_X: inputs, `(n, d)`, in the unit cube after `input_transform`, in double precision.
        train_Y: outcomes, `(n, m)`.
        model: a DAK with `GaussianLikelihood` and normal priors; by default that of
            `build_surrogate`. It is changed in place by the fit.
        start: a `DAKModel` of the same architecture whose parameters are those to start from, for
            instance that of the previous round.
        input_transform: of BoTorch.
        outcome_transform: of BoTorch; `Standardize` by default, None for none.
        residual_variance: whether the covariance that the grids lose is added.
        max_steps: steps of the fit; 0 leaves the parameters as they are.
        options: further arguments of `build_surrogate`.

    Attributes:
        dak: a copy of the DAK, which holds no gradients.
        weights: the posterior of its weights.
        log_evidence: log p(train_Y), in nats, of the outcomes after `outcome_transform`.
        noise_var: variances of the noise, `(m,)`, of the outcomes after `outcome_transform`.
    """

    noise_var: Tensor
    outcome_transform: OutcomeTransform

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        *,
        model: DAK | None = None,
        start: "DAKModel | None" = None,
        input_transform: InputTransform | None = None,
        outcome_transform: OutcomeTransform | str | None = "standardize",
        residual_variance: bool = True,
        max_steps: int = 60,
        **options: Any,
    ):
        _check_data(train_X, train_Y)
        super().__init__()
        self._set_transforms(input_transform, outcome_transform, train_Y.shape[-1])
        x, y = self._training_data(train_X, train_Y)
        if model is None:
            deviations = {
                "log_deviation": x.shape[-1] ** -0.5,
                "level_deviation": _LEVEL_DEVIATION,
            }
            model = build_surrogate(x.shape[-1], y.shape[-1], **deviations | options)
        elif options:
            raise TypeError(f"`model` is given, so {sorted(options)} have nothing to say.")
        model = model.to(x)
        centre = model.layer.log_unit_scale.detach().clone()
        if start is not None:
            _copy_parameters(start.dak, model)
        maximize_evidence(
            model,
            x,
            y,
            residual_variance=residual_variance,
            log_unit_scale=centre,
            log_deviation=_DEVIATION,
            level_deviation=_LEVEL_DEVIATION,
            max_steps=max_steps,
        )
        self._finish(model, GaussianWeights.of_prior(model), residual_variance)
        self.weights = self._conditioned(x, y).compact()
        with torch.no_grad():
            h = self.dak.unit_inputs(x)
            evidence = log_evidence(self.dak, h, y, residual_variance=residual_variance)
        self.log_evidence = float(evidence.sum())

    @classmethod
    def of(
        cls,
        model: DAK,
        posterior: draws.Posterior,
        *,
        input_transform: InputTransform | None = None,
        outcome_transform: OutcomeTransform | None = None,
        residual_variance: bool = True,
    ) -> "DAKModel":
        """The surrogate of a model that is fitted already, with a joint Gaussian posterior.

        The posterior is that of `exact_posterior`, a `FullRankGuide`, or a `NaturalGuide` with
        covariance "joint" or "shared".
        """
        checked_normal_priors(model)
        self = cls.__new__(cls)
        Model.__init__(self)
        self._set_transforms(input_transform, outcome_transform, model.num_outputs)
        self._finish(model, GaussianWeights.of(posterior, model), residual_variance)
        return self

    def _set_transforms(
        self,
        input_transform: InputTransform | None,
        outcome_transform: OutcomeTransform | str | None,
        num_outputs: int,
    ) -> None:
        if outcome_transform == "standardize":
            outcome_transform = Standardize(num_outputs)
        if input_transform is not None:
            self.input_transform = input_transform
        if isinstance(outcome_transform, OutcomeTransform):
            self.outcome_transform = outcome_transform
        elif outcome_transform is not None:
            raise TypeError(
                "`outcome_transform` must be a transform of BoTorch, None, or left out for "
                f"Standardize; got {outcome_transform!r}."
            )

    def _training_data(self, train_X: Tensor, train_Y: Tensor) -> tuple[Tensor, Tensor]:
        """The data as the DAK sees them; the transforms learn from them."""
        x, y = self.transform_inputs(train_X), train_Y
        if hasattr(self, "outcome_transform"):
            y, _ = self.outcome_transform(train_Y, X=train_X)
        if bool((x < -1e-3).any()) or bool((x > 1 + 1e-3).any()):
            warnings.warn(
                "Inputs lie outside of the unit cube, for which the priors are made. Pass "
                "`input_transform=Normalize(d, bounds=...)`.",
                InputDataWarning,
                stacklevel=3,
            )
        return x.detach(), y.detach()

    def _finish(self, model: DAK, weights: GaussianWeights, residual_variance: bool) -> None:
        # A copy, which later training of the model leaves alone, with gradients in X alone.
        self.dak = copy.deepcopy(model).eval().requires_grad_(False)
        self.weights = weights
        self._outputs = list(range(self.dak.num_outputs))
        self._residual_variance = residual_variance
        noise = noise_scale(self.dak.likelihood)
        assert noise is not None
        noise = noise.square().expand(self.num_outputs).to(self.weights.loc)
        self.register_buffer("noise_var", noise.clone())
        self.eval()

    @property
    def num_outputs(self) -> int:
        """m."""
        return len(self._outputs)

    @property
    def batch_shape(self) -> torch.Size:
        """The batch of posteriors, which `fantasize` makes."""
        return self.weights.batch_shape

    @property
    def likelihood(self) -> NoiseLikelihood:
        """The noise, as GPyTorch has it, in the units of the transformed outcomes."""
        m = self.num_outputs
        shape = torch.Size() if m == 1 else torch.Size([m])
        likelihood = NoiseLikelihood(noise_constraint=GreaterThan(0.0), batch_shape=shape)
        likelihood.to(self.noise_var)
        likelihood.noise = self.noise_var.reshape(*shape, 1)
        return likelihood.eval()

    def posterior(
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Callable[..., Posterior] | None = None,
    ) -> Posterior:
        """The joint posterior at q points, for X `(*batch, q, d)`.

        Args:
            X: inputs.
            output_indices: the outputs to have; all by default.
            observation_noise: whether to add the noise; or its variances, in the units of the
                transformed outcomes, broadcasting with `(*batch, q, m)`.
            posterior_transform: of BoTorch.
        """
        self.eval()
        X = self.transform_inputs(X)
        h, design = self._design(X)
        mean, covariance = self.weights.mean(design), self.weights.covariance(design)
        if self._residual_variance:
            lost = self.dak.residual_covariance(h)
            covariance = covariance + lost[..., self._outputs, :, :]
        if observation_noise is not False:
            var = observation_noise if isinstance(observation_noise, Tensor) else self.noise_var
            var = var.expand(torch.broadcast_shapes(var.shape, mean.shape))  # (*batch, q, m)
            covariance = covariance + torch.diag_embed(var.mT)
        indices = range(self.num_outputs) if output_indices is None else output_indices
        posterior: Posterior = GPyTorchPosterior(_normal(mean, covariance, list(indices)))
        if hasattr(self, "outcome_transform"):
            transform = self.outcome_transform
            if output_indices is not None:
                transform = transform.subset_output(output_indices)
            posterior = transform.untransform_posterior(posterior, X=X)
        if posterior_transform is None:
            return posterior
        return posterior_transform(posterior=posterior, X=X)

    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> "DAKModel":
        """The model given more rows, exactly, with features, scales and noise as they are.

        The result is `exact_posterior` of all rows. Of a single posterior, memory does not grow
        beyond K^2 numbers an output; batches, such as those of fantasies, keep K for each new row.

        Args:
            X: inputs, `(*batch, n, d)`.
            Y: outcomes, `(*batch', n, m)`, where batch' may have more dimensions in front.
            noise: variances of the noise of these outcomes, in the units of the transformed ones,
                broadcasting with `(*batch, n, m)`; by default that of the model.
            kwargs: ignored; BoTorch passes some to other models.
        """
        m = self.num_outputs
        if Y.dim() < 2 or Y.shape[-2:] != (X.shape[-2], m):
            raise ValueError(
                f"`Y` must have shape (..., {X.shape[-2]}, {m}), a row for each of X and a column "
                f"for each output; got {tuple(Y.shape)}."
            )
        X = self.transform_inputs(X)
        if hasattr(self, "outcome_transform"):
            Y, _ = self.outcome_transform.eval()(Y, X=X)  # in eval mode it learns nothing
        return self._with(self._conditioned(X, Y, noise).compact())

    def _conditioned(self, x: Tensor, y: Tensor, noise: Tensor | None = None) -> GaussianWeights:
        """The weights given more rows, as the DAK sees them."""
        h, design = self._design(x)
        var = self.noise_var if noise is None else noise
        if self._residual_variance:
            var = var + self.dak.residual_variance(h)[..., self._outputs]
        return self.weights.conditioned(design, y, var)

    def subset_output(self, idcs: Sequence[int]) -> "DAKModel":
        """The model of some outputs."""
        other = self._with(self.weights.subset(list(idcs)))
        other._outputs = [self._outputs[index] for index in idcs]
        other.noise_var = self.noise_var[list(idcs)]
        if hasattr(self, "outcome_transform"):
            other.outcome_transform = self.outcome_transform.subset_output(list(idcs))
        return other

    def sample_functions(self, num_samples: int) -> Callable[[Tensor], Tensor]:
        """Functions drawn from the posterior, for Thompson sampling.

        The result takes X `(*batch, q, d)` to values `(S, *batch, q, m)`, with gradients in X.
        A draw is that of the weights: what the grids lose is not in it.
        """
        check_integer("num_samples", num_samples, minimum=1)
        if self.batch_shape:
            raise NotImplementedError("Functions are drawn from one posterior, not from a batch.")
        flat = self.weights.sample(num_samples)  # (S, m, K)

        def functions(X: Tensor) -> Tensor:
            X = self.transform_inputs(X)
            design = self._design(X)[1]
            values = torch.einsum("...k,smk->s...m", design, flat)
            if hasattr(self, "outcome_transform"):
                values, _ = self.outcome_transform.untransform(values, X=X)
            return values

        return functions

    def _design(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Unit inputs `(*batch, q, P)` and design `(*batch, q, K)` of transformed inputs."""
        shape = self.dak.input_shape
        if X.dim() < 2 or (shape is not None and X.shape[-1:] != shape):
            columns = "d" if shape is None else shape[-1]
            raise ValueError(f"`X` must have shape (..., q, {columns}); got {tuple(X.shape)}.")
        with local_parameters(self.dak):
            h = self.dak.unit_inputs(X.reshape(-1, X.shape[-1]))
            h = h.reshape(*X.shape[:-1], h.shape[-1])
            return h, self.dak.layer.design(h)

    def _with(self, weights: GaussianWeights) -> "DAKModel":
        """The same model with other weights; network and transforms are shared."""
        other = copy.copy(self)
        other._modules, other._buffers = dict(self._modules), dict(self._buffers)
        other.weights = weights
        return other

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.weights = self.weights.to(fn(self.weights.loc))
        return self

    def get_extra_state(self) -> dict[str, Any]:
        """The posterior of the weights, which belongs to the parameters in `state_dict`."""
        parts = {name: getattr(self.weights, name) for name in _WEIGHTS}
        return parts | {"log_evidence": getattr(self, "log_evidence", None)}

    def set_extra_state(self, state: Any) -> None:
        """Take over the posterior of the weights, of a model with as many outputs and weights."""
        own = self.weights.loc
        expected = (self.num_outputs, own.shape[-1])
        shapes = {name: tuple(state[name].shape) for name in _WEIGHTS}
        if shapes["loc"][-2:] != expected:
            raise ValueError(
                f"The state must be that of a model with (outputs, weights) {expected}; got means "
                f"of shape {shapes['loc']}."
            )
        self.weights = GaussianWeights(*(state[name].to(own, copy=True) for name in _WEIGHTS))
        self.log_evidence = state["log_evidence"]

    # BoTorch keeps transformed training inputs in its own models; here they are in the weights.

    def _set_transformed_inputs(self) -> None:
        pass

    def _revert_to_original_inputs(self) -> None:
        pass


def _normal(mean: Tensor, covariance: Tensor, outputs: list[int]) -> MultivariateNormal:
    """Independent outputs of `(*batch, q, m)` means and `(*batch, m, q, q)` covariances."""
    batch = torch.broadcast_shapes(mean.shape[:-2], covariance.shape[:-3])
    mean = mean.expand(*batch, *mean.shape[-2:])
    covariance = covariance.expand(*batch, *covariance.shape[-3:])
    # A linear operator is factorised when it is needed, with jitter where rounding asks for it.
    matrices = [DenseLinearOperator(covariance[..., i, :, :]) for i in outputs]
    parts = [
        MultivariateNormal(mean[..., i], own) for i, own in zip(outputs, matrices, strict=True)
    ]
    return parts[0] if len(parts) == 1 else MultitaskMultivariateNormal.from_independent_mvns(parts)


def _copy_parameters(start: DAK, model: DAK) -> None:
    """Let the model have the parameters of another one, or raise if it is of another kind."""
    values = start.state_dict()
    shapes = [
        {name: v.shape for name, v in state.items()} for state in (values, model.state_dict())
    ]
    if shapes[0] != shapes[1]:
        raise ValueError(
            "`start` must be a surrogate with the same columns, outputs and units as this one."
        )
    model.load_state_dict(values)


def _check_data(train_X: Tensor, train_Y: Tensor) -> None:
    for name, value in (("train_X", train_X), ("train_Y", train_Y)):
        check_floating(name, value)
        if value.dim() != 2:
            raise ValueError(
                f"`{name}` must have shape (n, {'d' if name[-1] == 'X' else 'm'}); got "
                f"{tuple(value.shape)}. Batches of data sets are not supported: fit a model each."
            )
        check_finite(name, value)
    if len(train_X) != len(train_Y) or len(train_X) == 0 or train_X.dtype != train_Y.dtype:
        raise ValueError(
            "`train_X` and `train_Y` must have one row each per evaluation, in one dtype; got "
            f"{len(train_X)} of {train_X.dtype} and {len(train_Y)} of {train_Y.dtype}."
        )
