"""Chains in processes of their own have the draws, and the errors, of chains in this one."""

import multiprocessing

import pyro.distributions as dist
import pytest
import torch

from pyro_dak import GaussianLikelihood, run_nuts
from pyro_dak.inference.mcmc.nuts import run_hmc
from pyro_dak.model.likelihoods import Likelihood
from tests import scenarios

pytestmark = pytest.mark.filterwarnings("ignore:.*(diverged|r-hat).*:UserWarning")


class FailsElsewhere(Likelihood):
    """A likelihood that can be sent to other processes, and works in the first one only."""

    def distribution(self, f):
        if multiprocessing.parent_process() is not None:
            raise ArithmeticError("the seventh number is odd")
        return dist.Laplace(f, 1.0).to_event(1)


@pytest.mark.slow
def test_draws_are_those_of_the_sequential_run_and_the_network_is_not_sent(capsys):
    case = scenarios.make(num_rows=20, num_outputs=1)
    case.model.feature_extractor.hook = lambda: None  # which cannot be pickled
    prior = dist.LogNormal(torch.tensor(-0.5), torch.tensor(0.5))
    options = {"num_samples": 8, "warmup_steps": 8, "num_chains": 2, "seed": 3}
    runs = [
        run_nuts(case.model, case.x, case.y, **options, noise_prior=prior, parallel=p, progress=p)
        for p in (False, True)
    ]
    shown = capsys.readouterr().err
    assert "chain 1/2: 100%" in shown
    assert "chain 2/2: 100%" in shown
    for group in ("sites", "stats"):
        first, second = (getattr(run, group) for run in runs)
        assert set(first) == set(second)
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert runs[0].acceptance == runs[1].acceptance


@pytest.mark.slow
def test_an_error_of_a_chain_reaches_the_caller():
    case = scenarios.make(FailsElsewhere(), num_outputs=1)
    with pytest.raises(ArithmeticError, match="the seventh number is odd"):
        run_hmc(case.model, case.x, case.y, 4, 0, 2, parallel=True, progress=False)


def test_what_cannot_be_sent_is_named():
    case = scenarios.make(
        GaussianLikelihood(0.5), prior={"mu": lambda shape: dist.Normal(0.0, 1.0)}
    )
    with pytest.raises(TypeError, match=r"`parallel=True` sends .* cannot be sent: .*lambda"):
        run_nuts(case.model, case.x, case.y, 4, 0, 2, parallel=True, progress=False)
