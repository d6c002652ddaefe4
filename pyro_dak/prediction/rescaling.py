"""One number that makes predictions wider or narrower, and nothing else.

For y = f + noise the number is a factor k of the predictive variance: the distribution of y is
stretched about its mean m,

    y' = m + sqrt(k) (y - m).

Both parts of the variance have the same factor. f has its variance times k, and so has the noise:
`GaussianLikelihood` and `StudentTLikelihood` have their noise scale times sqrt(k), and for
`HeteroscedasticLikelihood` log k is added to eta, whose own variance stays. Hence y' has a
likelihood of the same class and a Gaussian q(f), and its moments, density, quantiles and draws all
belong to one distribution, which is exactly that of the formula.

For classes and for log odds the number is a temperature T: f / T stands in the place of f.
"""

import math
from typing import Any, Literal

from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.model.likelihoods import (
    BernoulliLikelihood,
    CategoricalLikelihood,
    GaussianLikelihood,
    HeteroscedasticLikelihood,
    Likelihood,
    StudentTLikelihood,
)

__all__ = ["Kind", "kind_of_number", "rescaled_likelihood", "rescaled_moments"]

Kind = Literal["variance", "temperature"]

_KINDS: dict[type[Likelihood], Kind] = {
    GaussianLikelihood: "variance",
    HeteroscedasticLikelihood: "variance",
    StudentTLikelihood: "variance",
    BernoulliLikelihood: "temperature",
    CategoricalLikelihood: "temperature",
}


def kind_of_number(likelihood: Likelihood) -> Kind:
    """What the number of a likelihood is: a factor of the variance of y, or a temperature of f."""
    if type(likelihood) not in _KINDS:
        known = ", ".join(sorted(cls.__name__ for cls in _KINDS))
        raise NotImplementedError(
            f"{type(likelihood).__name__} has no number to calibrate: a factor of the variance "
            f"would not leave it a distribution that it knows. Calibrate one of {known}; or go on "
            "without (`model.calibration = None`), and let a parameter of the likelihood itself "
            "take up the dispersion."
        )
    return _KINDS[type(likelihood)]


def rescaled_moments(
    likelihood: Likelihood, moments: FunctionMoments, number: float
) -> FunctionMoments:
    """q(f) of the predictions that are rescaled by the number."""
    mean, var, root = moments
    if kind_of_number(likelihood) == "temperature":
        scale: Any = 1 / number
        mean = mean * scale
    else:
        scale = math.sqrt(number)
        if type(likelihood) is HeteroscedasticLikelihood:  # the second half of the functions is eta
            scale = mean.new_ones(mean.shape[-1])
            scale[: len(scale) // 2] = math.sqrt(number)
    return FunctionMoments(mean, var * scale**2, None if root is None else root * scale)


def rescaled_likelihood(likelihood: Likelihood, number: float) -> Likelihood:
    """The likelihood of the predictions that are rescaled by the number."""
    if kind_of_number(likelihood) == "temperature":
        return likelihood
    noise: Any = likelihood.noise
    return likelihood.with_noise(noise.log_scale.detach() + 0.5 * math.log(number))
