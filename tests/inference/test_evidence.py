import pytest
import torch
from torch.testing import assert_close

from pyro_dak import GaussianLikelihood, NormalPrior
from pyro_dak.inference.evidence import log_evidence
from pyro_dak.inference.exact import exact_posterior
from tests import scenarios


@pytest.mark.parametrize("num_rows", [4, 40])  # fewer and more rows than weights
@pytest.mark.parametrize("residual_variance", [True, False])
def test_log_evidence_is_that_of_the_exact_posterior(num_rows, residual_variance):
    likelihood = GaussianLikelihood(torch.tensor([0.3, 0.6]))
    prior = {"mu": NormalPrior(0.4, 1.5)}
    case = scenarios.make(likelihood, num_rows=num_rows, prior=prior)
    value = log_evidence(case.model, case.h, case.y, residual_variance=residual_variance)
    exact = exact_posterior(case.model, case.x, case.y, residual_variance=residual_variance)
    assert value.shape == (2,)
    assert_close(float(value.detach().sum()), exact.log_evidence)


@pytest.mark.parametrize("num_rows", [4, 20])
def test_log_evidence_is_the_density_of_a_normal_vector(num_rows):
    case = scenarios.make(num_outputs=2, num_rows=num_rows)
    design = case.model.layer.design(case.h)
    covariance = design @ design.mT + 0.25 * torch.eye(num_rows)
    normal = torch.distributions.MultivariateNormal(torch.zeros(num_rows), covariance)
    value = log_evidence(case.model, case.h, case.y)
    assert_close(value, normal.log_prob(case.y.mT))


@pytest.mark.parametrize("num_rows", [4, 20])
def test_log_evidence_has_the_right_gradient(num_rows):
    case = scenarios.make(num_outputs=2, num_rows=num_rows)
    h = case.h.detach().requires_grad_()

    def evidence(h):
        return log_evidence(case.model, h, case.y, residual_variance=True)

    assert torch.autograd.gradcheck(evidence, h)
    evidence(h).sum().backward()
    assert case.model.layer.log_unit_scale.grad is not None
    assert case.model.likelihood.noise.log_scale.grad is not None
