import pytest
import torch
from torch.testing import assert_close

from pyro_dak.inference.mcmc.chains import effective_sample_size, split_r_hat
from pyro_dak.validation import import_optional

arviz = import_optional("arviz")


def autoregressive(coefficient, num_chains=4, num_draws=2000):
    """x_t = a x_t-1 + e_t from its stationary start; the sum of its autocorrelations is known."""
    x = torch.empty(num_chains, num_draws)
    x[:, 0] = torch.randn(num_chains) / (1 - coefficient**2) ** 0.5
    for t in range(1, num_draws):
        x[:, t] = coefficient * x[:, t - 1] + torch.randn(num_chains)
    return x


@pytest.mark.parametrize("coefficient", [-0.3, 0.0, 0.6, 0.9])
def test_effective_sample_size_of_an_autoregression(coefficient):
    x = autoregressive(coefficient)
    expected = x.numel() * (1 - coefficient) / (1 + coefficient)
    assert_close(effective_sample_size(x), torch.tensor(expected), rtol=0.2, atol=0)


@pytest.mark.parametrize("num_draws", [100, 101])
def test_chain_statistics_agree_with_arviz(num_draws):
    x = autoregressive(0.5, num_draws=num_draws)
    r_hat = torch.tensor(float(arviz.rhat(x.numpy(), method="split")))
    size = torch.tensor(float(arviz.ess(x.numpy(), method="mean")))
    assert_close(split_r_hat(x), r_hat)
    assert_close(effective_sample_size(x), size, rtol=0.02, atol=0)  # another last term of the sum


def test_chains_that_disagree_have_a_large_r_hat():
    x = torch.randn(2, 1000)
    x[1] += 3
    # Within 1; the means of the four halves are 0, 0, 3, 3, with variance 3.
    assert_close(split_r_hat(x), torch.tensor(2.0), rtol=0.05, atol=0)


def test_a_chain_that_drifts_disagrees_with_itself():
    assert split_r_hat(torch.linspace(0, 1, 100).unsqueeze(0)) > 1.5


def test_a_chain_that_never_moves_is_worth_nothing():
    x = torch.ones(2, 10, 3)
    assert split_r_hat(x).tolist() == [float("inf")] * 3
    assert effective_sample_size(x).tolist() == [0.0] * 3


def test_elements_of_an_event_are_judged_one_by_one():
    x = torch.randn(2, 50, 3, 4)
    assert_close(split_r_hat(x)[1, 2], split_r_hat(x[:, :, 1, 2]))
    assert_close(effective_sample_size(x)[1, 2], effective_sample_size(x[:, :, 1, 2]))
