"""An ensemble in one pass is its members: loss, gradients, predictions, training."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from pyro_dak import (
    DAK,
    CategoricalLikelihood,
    GaussianLikelihood,
    HeteroscedasticLikelihood,
    LaplaceKernel,
    LowRankGuide,
    MeanFieldGuide,
    RBFKernel,
    TrainingError,
    fit,
    predict,
)
from pyro_dak.inference.objectives import ClosedFormELBO, LocalReparamELBO
from pyro_dak.tables.ensemble import Ensemble, FixedEnsemble, Stack, ensemble_plan, train
from pyro_dak.tables.rows import Rows

LIKELIHOODS = {
    "gaussian": lambda: GaussianLikelihood(0.3),
    "heteroscedastic": lambda: HeteroscedasticLikelihood(0.3),
    "classes": CategoricalLikelihood,
}


def member(seed, likelihood="heteroscedastic", num_outputs=2, **options):
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU())
    model = DAK(
        network, 6, 4, num_outputs, level=3, likelihood=LIKELIHOODS[likelihood](), **options
    )
    guide = MeanFieldGuide(model, init_scale=0.3, init_loc_scale=0.5)
    if likelihood != "classes":
        with torch.no_grad():
            model.likelihood.noise.log_scale.add_(0.1 * seed)
    return model, guide


def data(num_rows=30, num_outputs=2):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num_rows, 3, generator=generator)
    return x, torch.randn(num_rows, num_outputs, generator=generator)


@pytest.mark.parametrize("likelihood", ["gaussian", "heteroscedastic"])
def test_loss_and_gradients_are_those_of_the_members(likelihood):
    members = [member(seed, likelihood) for seed in range(3)]
    ensemble = Ensemble(members)
    x, y = data()
    loss = ensemble.loss(x, y, torch.full((30,), 4.0), torch.full((3,), 120.0))
    loss.backward()
    total = 0.0
    for model, guide in members:
        model.train()
        single = ClosedFormELBO().differentiable_loss(model, guide, x, y, num_data=120) / 120
        single.backward()
        total = total + single.detach()
    assert_close(loss.detach(), total)
    for index, (model, guide) in enumerate(members):
        for prefix, module in (("model", model), ("guide", guide)):
            for name, parameter in module.named_parameters():
                grad = ensemble.tensors[f"{prefix}.{name}"].grad[index]
                assert_close(grad, parameter.grad, msg=name)


def test_weights_by_member_leave_rows_out():
    members = [member(seed) for seed in range(2)]
    ensemble = Ensemble(members)
    x, y = data()
    # In eval mode the units are scaled by what was seen before, so rows do not touch each other.
    rows = ensemble.expected_log_prob(y, ensemble.moments(x))
    weights = torch.ones(2, 30)
    weights[0, :10] = 0
    expected = -(rows[0, 10:].sum() - ensemble.kl()[0]) / 20
    expected = expected - (rows[1].sum() - ensemble.kl()[1]) / 30
    found = -(((rows * weights).sum(-1) - ensemble.kl()) / torch.tensor([20.0, 30.0])).sum()
    assert_close(found, expected)


def test_expected_log_prob_of_classes_is_that_of_the_members():
    members = [member(seed, "classes", 3) for seed in range(2)]
    ensemble = Ensemble(members)
    x, _ = data()
    y = torch.randint(0, 3, (30,))
    draws = torch.stack([ensemble.expected_log_prob(y, ensemble.moments(x)) for _ in range(200)])
    for index, (model, guide) in enumerate(members):
        model.eval()
        singles = torch.stack(
            [LocalReparamELBO(8).terms(model, guide, x, y)[0].detach() for _ in range(200)]
        )
        found = draws[:, index].sum(-1).detach()
        standard_error = ((found.var() + singles.var()) / 200).sqrt()
        assert (found.mean() - singles.mean()).abs() < 4 * standard_error


@pytest.mark.parametrize("num_outputs", [1, 20])
def test_predictions_are_those_of_the_members(num_outputs):
    ensemble = Ensemble([member(seed, "gaussian", num_outputs) for seed in range(2)])
    x, y = data(num_outputs=num_outputs)
    ensemble.loss(x, y, torch.ones(30), torch.full((2,), 30.0))  # running statistics
    mean, epistemic, aleatoric = ensemble.stacked_likelihood().predictive_moments(
        ensemble.moments(x)
    )
    for index, (model, guide) in enumerate(ensemble.members()):
        single = predict(model, guide, x)
        assert_close(mean[index], single.mean)
        assert_close(epistemic[index], single.epistemic)
        assert_close(aleatoric[index], single.aleatoric)


@pytest.mark.parametrize("num_outputs", [2, 7])
@pytest.mark.parametrize("options", [{}, {"input_units": 3}])
@pytest.mark.parametrize("num_rows", [30, 3000])
def test_fixed_weights_have_the_moments_of_others(options, num_outputs, num_rows):
    """Seven outputs have fourteen functions, which are too many for gathers."""
    members = [member(seed, num_outputs=num_outputs, **options) for seed in range(3)]
    ensemble = Ensemble(members)
    x, _ = data(num_rows)
    ensemble.training_terms(2 * x[:30] + 1)  # running statistics that are not the initial ones
    with torch.no_grad():
        features = ensemble.features(x)
        fixed = FixedEnsemble(ensemble)
        expected = ensemble.moments_from(features)
        found = fixed.moments_from(features)
        means = fixed.mean_from(features, num_outputs)
    assert_close(found.mean, expected.mean, rtol=1e-12, atol=1e-12)
    assert_close(found.var, expected.var, rtol=1e-12, atol=1e-12)
    assert_close(means, expected.mean[..., :num_outputs].mean(0), rtol=1e-12, atol=1e-12)


def test_training_is_that_of_fit():
    model, guide = member(0)
    ensemble = Ensemble([(model, guide), member(1)])
    x, y = data()
    plan = ensemble_plan(epochs=3, batch_size=10, learning_rate=1e-2, seed=7)
    history = train(ensemble, Rows(x, y, torch.ones(30)), plan)
    expected = fit(
        model, guide, (x, y), epochs=3, batch_size=10, learning_rate=1e-2, seed=7, progress=False
    )
    trained = ensemble.members()[0]
    assert trained[0].novelty is None
    again = Ensemble([(model, guide)]).members()[0]
    model.novelty = None
    for found, wanted in zip((*trained, *again), (model, guide) * 2, strict=True):
        for name, value in wanted.state_dict().items():
            assert_close(found.state_dict()[name], value, msg=name)
    assert len(history.rows) == len(expected.rows)


def test_members_go_back_to_their_best_and_stop_early_only_if_all_are_clearly_worse():
    ensemble = Ensemble([member(seed) for seed in range(2)])
    x, y = data()
    seen = []

    def score_fn():
        epoch = len(seen) + 1
        seen.append(ensemble.tensors["guide.mu_loc"].detach().clone())
        noise = torch.linspace(-1, 1, 50)
        worse = torch.zeros(50) if epoch == 2 else 1 + 0.01 * noise  # best at 2, clearly
        unsure = torch.zeros(50) if epoch == 3 else 0.01 + noise  # best at 3, perhaps by chance
        return torch.stack([worse, unsure])

    plan = ensemble_plan(8, 10, patience=2)
    history = train(ensemble, Rows(x, y, torch.ones(30)), plan, score_fn)
    assert_close(ensemble.tensors["guide.mu_loc"][0].detach(), seen[1][0])
    assert_close(ensemble.tensors["guide.mu_loc"][1].detach(), seen[2][1])
    assert (history.status, len(history.rows)) == ("finished", 8)


def test_members_that_share_one_row_of_scores_go_back_together():
    ensemble = Ensemble([member(seed) for seed in range(2)])
    x, y = data()
    seen = []

    def score_fn():
        seen.append(ensemble.tensors["guide.mu_loc"].detach().clone())
        return (len(seen) - 2.0) ** 2 + 0.01 * torch.linspace(-1, 1, 50).unsqueeze(0)  # best at 2

    history = train(ensemble, Rows(x, y, torch.ones(30)), ensemble_plan(4, 10), score_fn)
    assert_close(ensemble.tensors["guide.mu_loc"].detach(), seen[1])
    assert history.best_epoch == 2


def test_training_stops_when_all_members_have_long_been_worse():
    ensemble = Ensemble([member(0)])
    x, y = data()
    scores = iter(range(100))

    def score_fn():
        return float(next(scores)) + 0.01 * torch.linspace(0, 1, 20).unsqueeze(0)

    plan = ensemble_plan(epochs=20, batch_size=30, patience=3)
    history = train(ensemble, Rows(x, y, torch.ones(30)), plan, score_fn)
    assert (history.status, len(history.rows), history.best_epoch) == ("stopped early", 4, 1)


def test_gradients_are_clipped_member_by_member():
    parameters = [torch.zeros(2, 3, requires_grad=True), torch.zeros(2, requires_grad=True)]
    parameters[0].grad = torch.tensor([[3.0, 0, 0], [30.0, 0, 0]])
    parameters[1].grad = torch.tensor([4.0, 40.0])
    assert_close(Stack().clip_gradients(parameters, 10.0), torch.tensor([5.0, 50.0]))
    assert_close(parameters[0].grad, torch.tensor([[3.0, 0, 0], [6.0, 0, 0]]))
    assert_close(parameters[1].grad, torch.tensor([4.0, 8.0]))


def test_training_says_so_when_it_diverges():
    ensemble = Ensemble([member(0)])
    x, y = data()
    with pytest.raises(TrainingError, match="Lower `learning_rate`"):
        train(ensemble, Rows(x, y * float("inf"), torch.ones(30)), ensemble_plan(1, 30))


@pytest.mark.parametrize(
    "options",
    [
        {"linear_term": True},
        {"kernel": RBFKernel(0.3)},
        {"kernel": LaplaceKernel(1.0, learn=True)},
        {"scaling": "minmax"},
    ],
)
def test_other_architectures_are_refused(options):
    with pytest.raises(NotImplementedError, match="one by one"):
        Ensemble([member(0, **options)])


def test_other_guides_networks_and_mixed_members_are_refused(no_type_checker):
    model, guide = member(0)
    with pytest.raises(NotImplementedError, match="MeanFieldGuide"):
        Ensemble([(model, LowRankGuide(model))])
    with pytest.raises(ValueError, match="same architecture"):
        Ensemble([(model, guide), member(0, num_outputs=1)])
    with pytest.raises(ValueError, match="at least one"):
        Ensemble([])
    tanh = DAK(nn.Sequential(nn.Linear(3, 6), nn.Tanh()), 6, 4)
    with pytest.raises(NotImplementedError, match="Tanh"):
        Ensemble([(tanh, MeanFieldGuide(tanh))])


@pytest.mark.parametrize("num_outputs", [1, 20])
def test_input_units_have_loss_gradients_and_predictions_of_the_members(num_outputs):
    members = [member(seed, "gaussian", num_outputs, input_units=True) for seed in range(2)]
    ensemble, (x, y) = Ensemble(members), data(num_outputs=num_outputs)
    loss = ensemble.loss(x, y, torch.ones(30), torch.full((2,), 30.0))
    loss.backward()
    singles = []
    for index, (model, guide) in enumerate(members):
        single = ClosedFormELBO().differentiable_loss(model.train(), guide, x, y) / 30
        single.backward()
        singles.append(single.detach())
        for name, parameter in model.named_parameters():
            grad = ensemble.tensors[f"model.{name}"].grad[index]
            assert_close(grad, parameter.grad, msg=name)
    assert_close(loss.detach(), torch.stack(singles).sum())
    x = torch.cat([x, 20 * x])
    moments = ensemble.moments(x)
    for index, (model, guide) in enumerate(ensemble.members()):
        single = predict(model, guide, x, residual_variance=True)
        assert_close(moments.mean[index], single.mean)
        assert_close(moments.var[index], single.epistemic)
