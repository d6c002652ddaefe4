"""Evidence lower bounds that sample no weights, each a `pyro.infer.ELBO`.

All are in nats for the whole data set: (num_data / N) sum_rows E_q log p(y | f) - KL(q || prior).
`SVI(model, guide, optim, loss=ClosedFormELBO())` and the module form
`ClosedFormELBO()(model, guide)` both work; the loss is minus the bound. Nothing is traced: the unit
inputs are computed once, q(f) is exact, and the KL is closed where (q, prior) has a closed form.
Other priors cost a single-draw Monte Carlo estimate of the KL.
"""

import math
import warnings
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from pyro import poutine
from pyro.infer import ELBO
from pyro.infer.util import torch_item
from torch import Tensor

from pyro_dak.additive.gaussian import FunctionMoments, sample_marginals
from pyro_dak.inference.guides import GaussianGuide, MeanFieldGuide
from pyro_dak.inference.guides.base import check_guide
from pyro_dak.model.dak import DAK
from pyro_dak.model.explaining import explaining
from pyro_dak.model.handlers import refuse_store
from pyro_dak.model.inputs import check_model
from pyro_dak.model.latent_sites import check_sites
from pyro_dak.model.likelihoods import GaussianLikelihood, Likelihood
from pyro_dak.model.missing import observed_rows
from pyro_dak.model.modes import own_precision
from pyro_dak.model.rows import Inputs, check_parts
from pyro_dak.validation import check_integer, check_positive

__all__ = [
    "AnalyticELBO",
    "ClosedFormELBO",
    "ELBOTerms",
    "JensenELBO",
    "LocalReparamELBO",
    "announced_parameters",
    "kl",
    "normal_priors",
    "one_gaussian_noise",
]


class ELBOTerms(NamedTuple):
    """The two terms of a bound, scalars in nats for the whole data set."""

    expected_log_lik: Tensor
    kl: Tensor

    @property
    def elbo(self) -> Tensor:
        """expected_log_lik - kl."""
        return self.expected_log_lik - self.kl


def kl(model: DAK, guide: GaussianGuide) -> Tensor:
    """KL(q || prior) over the weights, a scalar.

    Exact for normal priors, and for mean-field q wherever torch knows the pair; otherwise the
    unbiased estimate log q(w) - log p(w) at one draw w.
    """
    priors = normal_priors(model, guide.weight_sites)
    if priors is not None:
        return guide.kl_normal(priors)
    like = model.layer.log_unit_scale
    distributions = {n: model.prior_distribution(n, like) for n in guide.weight_sites}
    if isinstance(guide, MeanFieldGuide):
        try:
            parts = [
                torch.distributions.kl_divergence(guide.site_distribution(name), prior)
                for name, prior in distributions.items()
            ]
            return torch.stack(parts).sum()
        except NotImplementedError:
            pass
    trace = poutine.trace(guide).get_trace()
    trace.compute_log_prob()
    ratios = [
        trace.nodes[name]["log_prob_sum"] - prior.log_prob(trace.nodes[name]["value"])
        for name, prior in distributions.items()
    ]
    return torch.stack(ratios).sum()


def normal_priors(model: DAK, names: Iterable[str]) -> dict[str, tuple[Any, Any]] | None:
    """(loc, scale) of the priors of these sites, or None if some are not normal."""
    priors = {}
    for name in names:
        prior = model.normal_prior(name)
        if prior is None:
            return None
        priors[name] = prior
    return priors


def announced_parameters(model: DAK, guide: GaussianGuide) -> list[Tensor]:
    """Emit the param statements that `SVI` looks for, and see that they are these parameters.

    Returns all parameters, in the form in which Pyro's optimisers take them.
    """
    with poutine.trace(param_only=True) as capture:
        model.announce_parameters()
        guide.announce_parameters()
    announced = [site["value"].unconstrained() for site in capture.trace.nodes.values()]
    known = {id(parameter) for parameter in announced}
    for name, parameter in [*model.named_parameters(), *guide.named_parameters()]:
        if id(parameter) not in known:
            refuse_store(name)
    return announced


class AnalyticELBO(ELBO):
    """Base: a bound from the exact q(f) of a `GaussianGuide`; subclasses give the expectation."""

    @abstractmethod
    def expected_log_prob(self, likelihood: Likelihood, y: Tensor, q: FunctionMoments) -> Tensor:
        """E_q log p(y | f), or its bound or estimate, of each row `(N,)`, with q(f) as moments."""

    def terms(
        self, model: DAK, guide: GaussianGuide, x: Inputs, y: Tensor, num_data: float | None = None
    ) -> ELBOTerms:
        """The terms of the bound for a minibatch of a data set of `num_data` rows.

        A bound that is not finite comes with a warning.
        """
        self._check(guide)
        check_model(model)
        check_parts("x", x)
        check_guide(model, guide)
        if num_data is not None:
            check_positive("num_data", num_data)
        with explaining(model, x, y, guide=guide):
            check_sites(model, x)
            terms = self.terms_from_units(model, guide, model.unit_inputs(x), y, num_data)
        with torch.no_grad():
            elbo = terms.elbo
        if elbo.is_cpu and not math.isfinite(value := float(elbo)):
            warnings.warn(
                f"The ELBO is {value}, not finite: look at the weights of model and guide, and at "
                "the scale of `x` and `y`.",
                stacklevel=2,
            )
        return terms

    def terms_from_units(
        self, model: DAK, guide: GaussianGuide, h: Tensor, y: Tensor, num_data: float | None = None
    ) -> ELBOTerms:
        """The terms of the bound from unit inputs h `(N, P)`, for features held fixed."""
        terms = self._terms_at_once(model, guide, h, y, num_data)
        return self.terms_and_moments(model, guide, h, y, num_data)[0] if terms is None else terms

    def _terms_at_once(
        self, model: DAK, guide: GaussianGuide, h: Tensor, y: Tensor, num_data: float | None
    ) -> ELBOTerms | None:
        """The terms as one operation, which has no q(f) to show, or None if there is no such."""
        return None

    def terms_and_moments(
        self, model: DAK, guide: GaussianGuide, h: Tensor, y: Tensor, num_data: float | None = None
    ) -> tuple[ELBOTerms, FunctionMoments]:
        """`terms_from_units`, and the q(f) that they come from."""
        self._check(guide)
        y = model.likelihood.check_targets(y, model.num_outputs)
        if len(y) != len(h):
            raise ValueError(
                f"`x` and `y` must have one row each per datum; got {len(h)}, {len(y)}."
            )
        scale = 1.0 if num_data is None else num_data / len(y)
        # Mixed precision is for the network; the last layer is cheap and keeps its own.
        with own_precision(h):
            layer, priors = model.layer, normal_priors(model, guide.weight_sites)
            h = h.to(layer.log_unit_scale.dtype)
            if priors is None:
                moments, divergence = guide.moments(layer, h), kl(model, guide)
            else:
                moments, divergence = guide.moments_and_kl(layer, h, priors)
            rows = observed_rows(self.expected_log_prob, model.likelihood, y, moments)
            return ELBOTerms(scale * rows.sum(), divergence), moments

    def differentiable_loss(
        self, model: DAK, guide: GaussianGuide, x: Inputs, y: Tensor, num_data: float | None = None
    ) -> Tensor:
        """Minus the bound, a scalar that can be differentiated."""
        terms = self.terms(model, guide, x, y, num_data)
        return terms.kl - terms.expected_log_lik

    def loss(self, model: DAK, guide: GaussianGuide, *args: Any, **kwargs: Any) -> float:
        """Minus the bound, a number."""
        with torch.no_grad():
            return torch_item(self.differentiable_loss(model, guide, *args, **kwargs))

    def loss_and_grads(self, model: DAK, guide: GaussianGuide, *args: Any, **kwargs: Any) -> float:
        """Minus the bound, a number; its gradient is added to the parameters. Called by `SVI`."""
        check_model(model)
        self._check(guide)
        announced_parameters(model, guide)
        loss = self.differentiable_loss(model, guide, *args, **kwargs)
        loss.backward(retain_graph=self.retain_graph)
        return torch_item(loss)

    def _get_trace(self, model: DAK, guide: GaussianGuide, args: object, kwargs: object) -> None:
        raise NotImplementedError(f"{type(self).__name__} traces nothing.")

    def _check(self, guide: GaussianGuide) -> None:
        if not isinstance(guide, GaussianGuide):
            raise TypeError(
                f"{type(self).__name__} needs one of pyro_dak's Gaussian guides, whose q(f) is "
                f"known; got {type(guide).__name__}. Use Trace_ELBO of Pyro for other guides."
            )
        if not guide.has_all_sites:
            others = [f"`{n}`" for n in guide.site_shapes if n not in guide.latent_sites]
            raise NotImplementedError(
                f"{type(self).__name__} needs a guide of all weights, and this one does not have "
                f"{', '.join(others)}, hidden or given when it was made. Use Trace_ELBO of Pyro."
            )
        if not guide.has_closed_form:
            raise NotImplementedError(
                f"{type(self).__name__} needs Gaussian f under q, and a prior on `shrinkage` "
                "breaks it. Use Trace_ELBO of Pyro."
            )


class ClosedFormELBO(AnalyticELBO):
    """The exact bound without sampling (paper, eq. 23 and KL): the DAK-CF objective.

    For likelihoods whose expectation is closed: Gaussian, heteroscedastic Gaussian, Poisson.
    """

    def expected_log_prob(self, likelihood: Likelihood, y: Tensor, q: FunctionMoments) -> Tensor:
        return likelihood.expected_log_prob(y, q)

    def _terms_at_once(
        self, model: DAK, guide: GaussianGuide, h: Tensor, y: Tensor, num_data: float | None
    ) -> ELBOTerms | None:
        """It is known for these very classes, one noise for all of y, and no missing y."""
        y = model.likelihood.check_targets(y, model.num_outputs)
        log_noise = one_gaussian_noise(self, model.likelihood, y)
        if log_noise is None:
            return None
        self._check(guide)
        priors = normal_priors(model, guide.weight_sites)
        if priors is None or len(y) != len(h):
            return None
        with own_precision(h):
            layer, scale = model.layer, 1.0 if num_data is None else num_data / len(y)
            h = h.to(layer.log_unit_scale.dtype)
            terms = guide.gaussian_bound(layer, h, y, log_noise, priors, scale)
            return None if terms is None else ELBOTerms(*terms)


def one_gaussian_noise(objective: AnalyticELBO, likelihood: Likelihood, y: Tensor) -> Tensor | None:
    """The logarithm of the noise scale if it is one for all of y, and the objective is closed.

    These must be the very classes of this library, and no y may be missing; else None.
    """
    if type(objective) is not ClosedFormELBO or type(likelihood) is not GaussianLikelihood:
        return None
    log_noise = likelihood.noise.log_scale
    is_one = log_noise.numel() == 1 and likelihood.missing is None
    return log_noise if is_one and y.dtype == log_noise.dtype else None


class JensenELBO(AnalyticELBO):
    """A lower bound of the ELBO without sampling, for classes: Jensen on the log-normalizer.

    The normalizer is shifted first so that less is lost (`gaussian.log_normalizer_bound`).
    """

    def expected_log_prob(self, likelihood: Likelihood, y: Tensor, q: FunctionMoments) -> Tensor:
        return likelihood.expected_log_prob_bound(y, q)


class LocalReparamELBO(AnalyticELBO):
    """Monte Carlo over f (N x F) instead of the weights, for any likelihood: DAK-MC.

    Each row has its own draws of f from the exact marginal, so that rows are independent and the
    gradient is less noisy than with draws of the weights, which all rows share.

    Args:
        num_samples: S, draws of f per row.
    """

    def __init__(self, num_samples: int = 8, **kwargs: int):
        super().__init__(**kwargs)
        check_integer("num_samples", num_samples, minimum=1)
        self.num_samples = num_samples

    def expected_log_prob(self, likelihood: Likelihood, y: Tensor, q: FunctionMoments) -> Tensor:
        f = sample_marginals(q, self.num_samples)  # (S, N, F)
        return likelihood.log_prob(y, f).mean(0)
