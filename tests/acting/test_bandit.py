import pytest
import torch
from torch.testing import assert_close

from pyro_dak import exact_posterior
from pyro_dak.acting import ThompsonBandit


def played(num_rounds=40, **options):
    """A bandit whose second arm pays for large first columns; the rewards are its own."""
    bandit = ThompsonBandit(2, 2, **({"refresh_every": 15, "num_directions": 3} | options))
    arms, rewards = [], []
    contexts = torch.rand(num_rounds, 2)
    for context in contexts:
        arms.append(bandit.choose(context))
        rewards.append(float(context[0] - 0.5 if arms[-1] else 0.5 - context[0]))
        bandit.update(context, arms[-1], rewards[-1])
    return bandit, contexts, torch.tensor(arms), torch.tensor(rewards)


def test_after_every_round_the_posterior_is_that_of_all_rewards():
    bandit, contexts, arms, rewards = played()
    assert bandit.num_rounds == 40
    scaled = ((rewards - bandit._loc) / bandit._scale).unsqueeze(-1)
    for arm in range(2):
        rows = arms == arm
        exact = exact_posterior(bandit.models[arm], contexts[rows], scaled[rows])
        assert_close(bandit.guides[arm].loc, exact.guide.loc, rtol=1e-6, atol=1e-8)
    x = torch.rand(2)
    moments = bandit.moments(x)
    for arm in range(2):
        model, guide = bandit.models[arm], bandit.guides[arm]
        h = model.unit_inputs(x.unsqueeze(0)).detach()
        q = guide.moments(model.layer, h)
        assert_close(moments.mean[arm], bandit._loc + bandit._scale * q.mean[0, 0])
        var = q.var[0, 0] + model.residual_variance(h)[0, 0]
        assert_close(moments.var[arm], bandit._scale**2 * var)


def test_the_better_arm_is_found():
    _, contexts, arms, _ = played(150)
    is_right = arms[100:] == (contexts[100:, 0] > 0.5)
    assert float(is_right.double().mean()) > 0.85


def test_arms_take_turns_at_first_and_draws_follow_the_seed():
    first = played(12, seed=1)[2]
    assert first[:6].tolist() == [0, 1, 0, 1, 0, 1]
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        runs.append(played(30, seed=1)[2].tolist())
    assert runs[0] == runs[1]


def test_a_reward_far_outside_is_learned_from_at_once():
    bandit = played(20, refresh_every=10_000)[0]
    bandit.update(torch.tensor([0.2, 0.2]), 0, 500.0)
    assert bandit._num_since == 0
    assert bandit._scale > 50


def test_an_arm_that_paid_the_same_may_pay_more_elsewhere():
    bandit = ThompsonBandit(1, 1, num_trials=20)
    for context in torch.linspace(0, 0.3, 20):
        bandit.update(context.reshape(1), 0, float(1 + 0.1 * (context > 0.15)))
    near, far = (float(bandit.moments(torch.tensor([x])).var) for x in (0.15, 1.0))
    assert far > 10 * near


def test_wrong_contexts_and_arms_are_refused():
    bandit = ThompsonBandit(2, 2)
    with pytest.raises(ValueError, match=r"`context` must have shape \(2,\)"):
        bandit.choose(torch.rand(1, 2))
    with pytest.raises(ValueError, match="arm"):
        bandit.update(torch.rand(2), 2, 1.0)
    with pytest.raises(ValueError, match="reward"):
        bandit.update(torch.rand(2), 1, float("nan"))


def test_values_at_corners_are_as_alike_for_many_columns_as_for_two():
    spans = []
    for D in (2, 8, 32):
        features = ThompsonBandit(D, 1, num_directions=4).models[0].feature_extractor
        corners = torch.stack([torch.zeros(D), torch.ones(D)]).double()
        low, high = features(corners)[:, 0].detach()  # of a column
        spans.append(float(high - low) * D**0.5)  # of the diagonal, in lengthscales
    assert spans == pytest.approx([spans[0]] * 3)
