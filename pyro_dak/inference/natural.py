"""Natural-gradient variational inference: the schedule of its steps, and `NaturalVI`."""

import math
from typing import NamedTuple

import torch
from pyro.infer.util import torch_item, zero_grads
from pyro.optim import PyroOptim
from torch import Tensor

from pyro_dak.additive.gaussian import ExpectedDerivatives, FunctionMoments
from pyro_dak.inference.guides import NaturalGuide
from pyro_dak.inference.guides.base import check_guide
from pyro_dak.inference.guides.natural import RowSums
from pyro_dak.inference.objectives import (
    AnalyticELBO,
    ClosedFormELBO,
    LocalReparamELBO,
    announced_parameters,
    normal_priors,
    one_gaussian_noise,
)
from pyro_dak.model.dak import DAK
from pyro_dak.model.explaining import explaining
from pyro_dak.model.inputs import check_model
from pyro_dak.model.latent_sites import check_sites
from pyro_dak.model.likelihoods import Likelihood
from pyro_dak.model.missing import observed_derivatives, observed_rows, observed_squares
from pyro_dak.model.modes import own_precision
from pyro_dak.model.rows import Inputs, check_parts
from pyro_dak.validation import check_kind, check_positive

__all__ = [
    "BatchRows",
    "Gathering",
    "NaturalVI",
    "Rates",
    "divergence",
    "expected_and_rows",
    "learn_noise",
    "of_weights",
    "rates",
]

# The statistics of pass p count about p^(_POWER - 1).
_POWER = 5.0
_ROUNDING = 1e-6  # of a sum of fractions
# Rows of so many batches, or of this part of what q knows, are gathered for a step.
_MAX_BATCHES, _LARGE_SHARE = 8, 1 / 16
# The least noise variance over the number of rows: with less, rounding of the precision, which is
# about rows over variance, would hide the prior.
_LEAST_NOISE = 100 * torch.finfo(torch.float64).eps


class Rates(NamedTuple):
    """How a natural-gradient step mixes what q knows with a batch (see `NaturalGuide.step`)."""

    keep: float
    gain: float
    share: float


def rates(passes: float, fraction: float) -> Rates:
    """The rates of a step on a batch that is a `fraction` of the data set.

    In the first pass the rows of a batch are added to what q knows: from the prior this is Bayes'
    rule, batch by batch. After p passes a further pass counts r = min(1, c / p) times what q knows,
    c = 5, and all its rows the same, so that the batch that brings it to a share u has length
    rho = r fraction / (1 + r u): keep = 1 - rho and gain = rho / fraction. The result is an average
    in which pass p counts about p^4. It forgets the first passes, with other features and another
    q to linearise the log-likelihood around, and in the end it is over about the last fifth of
    them. Rows never count more than once each, which keeps the noise of batches small.

    Args:
        passes: passes over the data before this step; q at the prior has made none.
        fraction: rows of the batch over rows of the data set.
    """
    after = passes + fraction
    if after <= 1 + _ROUNDING:
        return Rates(1.0, 1.0, fraction / after)
    finished = max(1, math.floor(passes + _ROUNDING))
    weight = min(1.0, _POWER / finished)
    gain = weight / (1 + weight * (after - finished))
    return Rates(1 - gain * fraction, gain, gain * fraction)


def divergence(model: DAK, guide: NaturalGuide) -> Tensor:
    """KL(q || prior), a scalar; it is computed once for each q."""

    def make() -> Tensor:
        priors = normal_priors(model, guide.weight_sites)
        assert priors is not None  # the guide has refused all others
        return guide.kl_normal(priors)

    return guide.kept(("divergence", model), make)


class BatchRows(NamedTuple):
    """What a step of q needs to know of the rows of a batch, without gradients.

    Attributes:
        h: inputs of the units, `(B, P)`.
        design: the design of node values, `(B, K)`; None for independent weights whose sums take
            another route.
        derivatives: expected gradients and curvatures, `(B, F)` each.
        squares: as in `RowSums`.
        num_squares: likewise.
    """

    h: Tensor
    design: Tensor | None
    derivatives: ExpectedDerivatives
    squares: Tensor | None
    num_squares: Tensor | None = None

    def sums(self, model: DAK, guide: NaturalGuide, may_round: bool = True) -> RowSums:
        """The sums over the rows; for the design of node values if there is one."""
        coupling = model.likelihood.coupling
        sums = guide.row_sums(
            model.layer, self.h, self.derivatives, coupling, self.design, may_round
        )
        return sums._replace(squares=self.squares, num_squares=self.num_squares)


def expected_and_rows(
    objective: AnalyticELBO,
    model: DAK,
    guide: NaturalGuide,
    h: Tensor,
    y: Tensor,
    *weights: Tensor,
) -> tuple[Tensor, BatchRows]:
    """E_q log p(y | f), summed over the rows of a batch, and what these say about q.

    `weights` are the `fixed_weights` of the guide. With them this is a function of tensors alone,
    unless weights are independent, and can be compiled. q is held fixed in the gradient.
    """
    likelihood, layer = model.likelihood, model.layer
    y = likelihood.check_targets(y, model.num_outputs)
    if len(y) != len(h):
        raise ValueError(f"`x` and `y` must have one row each per datum; got {len(h)}, {len(y)}.")
    with own_precision(h):
        h = h.to(layer.log_unit_scale.dtype)
        log_noise = one_gaussian_noise(objective, likelihood, y)
        if log_noise is not None:
            found = _gaussian_rows(model, guide, h, y, log_noise)
            if found is not None:
                return found
        if weights:
            q, design = layer.joint_moments(h, *weights)
        else:
            q, design = guide.own_moments(layer, h), None
        expected = observed_rows(objective.expected_log_prob, likelihood, y, q).sum()
        with torch.no_grad():
            q = FunctionMoments(q.mean.detach(), q.var.detach(), q.root)
            derivatives = observed_derivatives(likelihood, y, q)
            squares = num_squares = None
            if likelihood.closed_noise is not None:
                squares, num_squares = observed_squares(likelihood, y, q)
    return expected, BatchRows(h.detach(), design, derivatives, squares, num_squares)


def _gaussian_rows(
    model: DAK, guide: NaturalGuide, h: Tensor, y: Tensor, log_noise: Tensor
) -> tuple[Tensor, BatchRows] | None:
    """`expected_and_rows` with one Gaussian noise, as one operation, or None if there is none."""
    layer = model.layer
    found = layer.gaussian_rows(h, y, log_noise, lambda: guide.fixed_nodes(layer, h.dtype))
    if found is None:
        return None
    expected, r, squares, design = found
    with torch.no_grad():
        precision = (-2 * log_noise).exp()
        derivatives = ExpectedDerivatives(r * precision, precision.expand_as(r))
        has_noise = model.likelihood.closed_noise is not None
        own = (squares / y.shape[-1]).view(log_noise.shape) if has_noise else None
    return expected, BatchRows(h.detach(), design, derivatives, own)


@torch.no_grad()
def learn_noise(likelihood: Likelihood, sums: RowSums, num_rows: float, share: float) -> None:
    """Move a noise variance in closed form towards the best one of a batch, if there is one.

    With the fraction of the data set as `share`, and with that of the rows seen so far in the first
    pass, the variance is an average over about the last pass: noise that was averaged over as many
    passes as q would lag behind a network that still learns. The variance stays above the rounding
    of q, also where targets are constant and the best one is 0.
    """
    parameter = likelihood.closed_noise
    if parameter is None or sums.squares is None:
        return
    before = (2 * parameter).exp()
    best = (sums.squares / num_rows).to(parameter.dtype)
    if sums.num_squares is not None:  # an output without any target says nothing
        best = torch.where(sums.num_squares > 0, sums.squares / sums.num_squares, before)
    variance = torch.lerp(before, best.to(before), share)
    parameter.copy_(0.5 * variance.clamp(min=_LEAST_NOISE * num_rows / share).log())


class Gathering:
    """Takes the steps of q on the rows of several batches at a time.

    A step costs an inverse and products with all weights, whatever the number of its rows is. Where
    a batch is a small part of what q knows, q hardly changes from batch to batch, and the rows of
    up to eight batches are gathered as long as they are less than a sixteenth of what q knows. Then
    q takes the step of one large batch. So no row is lost, a step is the same mixture of natural
    parameters as before, and q is a posterior of its own at any time. A pass over the data ends
    with a step.

    Attributes:
        passes: passes over the data in the steps taken, which the schedule counts; None before the
            first batch. It starts at the share of the data that the guide knows already, at most 1.
        sums: those of the rows that wait for the next step, or None.
        num_rows: how many rows these are.
        fraction: how many rows these are over those of the data set.
        num_batches: of how many batches they are.
    """

    def __init__(self) -> None:
        self.passes: float | None = None
        self._clear()

    def _clear(self) -> None:
        self.sums: RowSums | None = None
        self.num_rows = self.fraction = 0.0
        self.num_batches = 0

    def add(
        self,
        model: DAK,
        guide: NaturalGuide,
        sums: RowSums,
        num_rows: float,
        num_data: float,
        has_fixed_noise: bool = False,
    ) -> None:
        """Add a batch, and take a step if it is time for one.

        Args:
            model: the model.
            guide: its guide.
            sums: what the batch says about q (`BatchRows.sums`).
            num_rows: rows of the batch.
            num_data: rows of the data set.
            has_fixed_noise: whether the noise stays as it is.
        """
        if self.passes is None:
            self.passes = min(1.0, float(guide.num_rows) / num_data)
        self.sums = sums if self.sums is None else self.sums.plus(sums)
        self.num_rows += num_rows
        self.fraction += num_rows / num_data
        self.num_batches += 1
        after = self.passes + self.fraction
        is_pass = math.floor(after + _ROUNDING) > math.floor(self.passes + _ROUNDING)
        share = rates(self.passes, self.fraction).share
        if is_pass or self.num_batches == _MAX_BATCHES or share >= _LARGE_SHARE:
            self.step(model, guide, has_fixed_noise)

    def skip(self, guide: NaturalGuide, num_rows: float, num_data: float) -> None:
        """Count a batch whose rows are left out."""
        if self.passes is None:
            self.passes = min(1.0, float(guide.num_rows) / num_data)
        self.passes += num_rows / num_data

    @torch.no_grad()
    def step(self, model: DAK, guide: NaturalGuide, has_fixed_noise: bool = False) -> None:
        """Learn from the rows that wait, if there are any: the noise, where it is closed, and q."""
        if self.sums is None or self.passes is None:
            return
        chosen = rates(self.passes, self.fraction)
        if not has_fixed_noise:
            share = max(chosen.share, self.fraction)
            learn_noise(model.likelihood, self.sums, self.num_rows, share)
        sums = of_weights(model, guide, self.sums)
        coupling = model.likelihood.coupling
        guide.step(sums, self.num_rows, **chosen._asdict(), coupling=coupling)
        self.passes += self.fraction
        self._clear()


def of_weights(model: DAK, guide: NaturalGuide, sums: RowSums) -> RowSums:
    """The sums of `BatchRows.sums` in the form that `NaturalGuide.step` takes."""
    is_diagonal = guide.covariance == "diagonal"
    if is_diagonal and sums.coarse_curvature is not None:
        return sums
    return sums.from_nodes(model.layer, is_diagonal)


class NaturalVI:
    """Variational inference like Pyro's `SVI`, in which q moves by natural gradients.

    Each step computes the unit inputs once. q takes a natural-gradient step, whose length needs no
    tuning (see `rates`), and the network and the scales of the units follow the gradient of the
    expected log-likelihood, on which alone they act. So does the noise, unless its best value is
    closed, as for `GaussianLikelihood`: then it is an average over the last pass.

        vi = NaturalVI(model, NaturalGuide(model), torch.optim.Adam(model.parameters(), 1e-3))
        for x, y in loader:
            loss = vi.step(x, y, num_data=len(loader.dataset))

    Args:
        model: the model; put it into train mode for training.
        guide: a `NaturalGuide` of the model.
        optim: an optimiser of torch over parameters of the model, or one of Pyro; None for
            features, scales and noise held fixed.
        loss: the objective; by default the closed form where there is one, else draws of f.

    Attributes:
        gathering: takes the steps of q, on rows of several batches where each is a small part of
            the data. Call `vi.gathering.step(model, guide)` to have all of them in q before the end
            of a pass.
    """

    def __init__(
        self,
        model: DAK,
        guide: NaturalGuide,
        optim: torch.optim.Optimizer | PyroOptim | None = None,
        loss: AnalyticELBO | None = None,
    ):
        check_model(model)
        if not isinstance(guide, NaturalGuide):
            raise TypeError(
                f"`guide` must be a NaturalGuide, whose updates are closed; got "
                f"{type(guide).__name__}. Use SVI of Pyro for other guides."
            )
        check_guide(model, guide)
        if loss is not None:
            check_kind("loss", loss, AnalyticELBO, "an objective of pyro_dak, such as JensenELBO()")
        if not isinstance(optim, torch.optim.Optimizer | PyroOptim | None):
            raise TypeError(
                "`optim` must be an optimiser of torch or of Pyro, or None; got "
                f"{type(optim).__name__}."
            )
        if loss is None:
            loss = ClosedFormELBO() if model.likelihood.has_closed_form else LocalReparamELBO()
        self.model, self.guide, self.optim, self.loss = model, guide, optim, loss
        self.gathering = Gathering()

    def step(self, x: Inputs, y: Tensor, num_data: float | None = None) -> float:
        """Take a step on a batch of a data set of `num_data` rows; returns minus the bound.

        Args:
            x: inputs, `(B, ...)`: a tensor, or a tuple or dictionary of tensors.
            y: targets.
            num_data: rows of the data set, by default those of the batch.
        """
        model, guide, optim = self.model, self.guide, self.optim
        check_parts("x", x)
        if num_data is not None:
            check_positive("num_data", num_data)
        with explaining(model, x, y, guide=guide):
            check_sites(model, x)
        parameters = announced_parameters(model, guide) if isinstance(optim, PyroOptim) else []
        # In training mode the scaling follows the batches, as it does where gradients are on.
        with (
            torch.set_grad_enabled(optim is not None or model.training),
            explaining(model, x, y, guide=guide),
        ):
            h = model.unit_inputs(x)
            weights = guide.fixed_weights(model.layer, model.layer.log_unit_scale.dtype)
            expected, rows = expected_and_rows(self.loss, model, guide, h, y, *weights)
            num_data = len(y) if num_data is None else num_data
            loss = divergence(model, guide) - expected * (num_data / len(y))
            value = torch_item(loss.detach())
            if not math.isfinite(value):
                raise ValueError(
                    f"The bound is {-value}, and q stays as it was: look at the weights of the "
                    "model, and at the scale of `x` and `y`."
                )
        sums, noise = rows.sums(model, guide), model.likelihood.closed_noise
        if optim is not None:
            loss.backward()  # q is held fixed, so that this is the expected log-likelihood's
            if noise is not None:
                noise.grad = None  # no optimiser's
                parameters = [p for p in parameters if p is not noise]
        if isinstance(optim, PyroOptim):
            optim(parameters)
            zero_grads(parameters)
        elif optim is not None:
            optim.step()
            optim.zero_grad()
        self.gathering.add(model, guide, sums, len(y), num_data, has_fixed_noise=optim is None)
        return value

    def evaluate_loss(self, x: Inputs, y: Tensor, num_data: float | None = None) -> float:
        """Minus the bound, without a step."""
        return self.loss.loss(self.model, self.guide, x, y, num_data)
