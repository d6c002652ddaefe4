"""A step asks its device for no value: on a GPU that would wait until the device has caught up.

Tensors on the meta device have no values, so that there every question for one is an error.
"""

import pytest
import torch
from torch import nn

from pyro_dak import (
    DAK,
    CategoricalLikelihood,
    ClosedFormELBO,
    FullRankGuide,
    GaussianLikelihood,
    HeteroscedasticLikelihood,
    JensenELBO,
    LocalReparamELBO,
    MeanFieldGuide,
    NaturalGuide,
    UnitBlockGuide,
)
from pyro_dak.training.natural import build_learner

GUIDES = {
    "mean field": MeanFieldGuide,
    "unit block": UnitBlockGuide,
    "full rank": FullRankGuide,
    **{
        f"natural, {form}": lambda model, form=form: NaturalGuide(model, form)
        for form in ("joint", "shared", "diagonal")
    },
}
LIKELIHOODS = {
    "Gaussian": (GaussianLikelihood, ClosedFormELBO),
    "heteroscedastic": (HeteroscedasticLikelihood, ClosedFormELBO),
    "classes": (CategoricalLikelihood, JensenELBO),
    "classes by draws": (CategoricalLikelihood, LocalReparamELBO),
}


def test_a_value_on_the_meta_device_cannot_be_read():
    with pytest.raises((RuntimeError, NotImplementedError)):
        float(torch.zeros((), device="meta"))


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("guide", GUIDES)
def test_a_step_reads_no_value(guide, likelihood):
    likelihood_class, elbo_class = LIKELIHOODS[likelihood]
    num_outputs = 3 if likelihood_class is CategoricalLikelihood else 1
    model = DAK(nn.Linear(3, 4), 4, 2, num_outputs, likelihood=likelihood_class())
    learner = build_learner(model, GUIDES[guide](model), elbo_class())
    learner.to("meta").train()
    x = torch.zeros(8, 3, device="meta")
    y = torch.zeros(8, 1, device="meta") if num_outputs == 1 else x[:, 0].long()
    loss, terms, *_ = learner(x, y, 10.0, 80)
    loss.backward()
    norms = learner.clip_gradients([*learner.parameters()], 1.0)
    assert all(tensor.is_meta for tensor in (loss, terms, norms))
