"""How much the label of a row tells about each function, before it is known."""

import torch
from torch import Tensor

from pyro_dak.additive.gaussian import FunctionMoments, sample_marginals
from pyro_dak.additive.quadrature import expected_sigmoid
from pyro_dak.model.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    Likelihood,
    PoissonLikelihood,
)

__all__ = ["expected_curvature"]


def expected_curvature(likelihood: Likelihood, moments: FunctionMoments) -> Tensor:
    """-E_q d^2 log p(y | f) / d f^2 where it does not depend on y, `(n, F)`; for classes by draws.

    Gaussian: 1 / noise variance. Classes: E p (1 - p). Counts: E exp f.
    """
    if isinstance(likelihood, GaussianLikelihood):
        return likelihood.noise_scale.square().reciprocal().expand_as(moments.mean)
    if isinstance(likelihood, BernoulliLikelihood):
        return expected_sigmoid(*moments[:2])[1]
    if isinstance(likelihood, PoissonLikelihood):
        return (moments.mean + 0.5 * moments.var).exp()
    generator = torch.Generator(moments.mean.device).manual_seed(0)
    p = sample_marginals(moments, 64, generator).softmax(-1)
    return (p * (1 - p)).mean(0)
