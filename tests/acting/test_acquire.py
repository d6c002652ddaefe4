"""Rows worth a label, against loops that condition on every row and list every configuration."""

import importlib
import itertools
from typing import get_args

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from pyro_dak import DAK, GaussianLikelihood, NaturalGuide, exact_posterior
from pyro_dak.acting import acquire
from pyro_dak.acting.acquire import Method
from pyro_dak.acting.curvature import expected_curvature
from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.inference.draws import draw_posterior
from tests import scenarios


def gaussian(num_outputs=1, num_pool=60):
    case = scenarios.make(num_outputs=num_outputs, num_rows=5, num_units=3, level=3)
    return case, torch.randn(num_pool, 2)


def classes(num_outputs=3, covariance="joint", likelihood="categorical"):
    case = scenarios.make(likelihood, num_outputs=num_outputs, num_rows=12, num_units=3)
    guide = NaturalGuide(case.model, covariance)
    guide.update(case.model, case.x, case.y)
    return case.model, guide, torch.randn(40, 2)


@pytest.mark.parametrize("num_outputs", [1, 2])
@pytest.mark.parametrize("method", ["variance", "bald", "batch_bald_greedy"])
def test_rows_are_those_of_a_loop_that_conditions_on_each(method, num_outputs):
    case, pool = gaussian(num_outputs)
    posterior = case.exact()
    chosen, expected = acquire(case.model, posterior, pool, 8, method), []
    for _ in range(8):
        h = case.model.unit_inputs(pool)
        share = posterior.guide.moments(case.model.layer, h).var / 0.25
        scores = (share if method == "variance" else share.log1p()).sum(-1)
        scores[expected] = -1
        best = int(scores.argmax())
        expected.append(best)
        row, label = pool[best : best + 1], torch.randn(1, num_outputs)  # any label
        posterior = posterior.update(case.model, row, label)
    assert chosen.tolist() == expected


def test_copies_of_a_row_are_not_chosen_while_others_tell_more():
    case, pool = gaussian()
    posterior = case.exact()
    first = acquire(case.model, posterior, pool, 1)
    copies = torch.cat([pool[first].expand(10, -1), pool])
    chosen = acquire(case.model, posterior, copies, 5)
    assert int((chosen < 10).sum()) + int((chosen == 10 + int(first)).sum()) < 5


def test_variance_of_a_batch_is_less_than_that_of_rows_chosen_alone():
    case, pool = gaussian(num_pool=200)
    posterior, model = case.exact(), case.model
    together = acquire(model, posterior, pool, 10)
    alone = posterior.guide.moments(model.layer, model.unit_inputs(pool)).var[:, 0].topk(10).indices
    left = [
        posterior.update(model, pool[rows], torch.zeros(10, 1))
        .guide.moments(model.layer, model.unit_inputs(pool))
        .var.mean()
        for rows in (together, alone)
    ]
    assert left[0] < left[1]


def weighted_variance(case, posterior, target):
    """The mean over rows of the sum of Var f over that of the noise, which is 0.25."""
    h = case.model.unit_inputs(target)
    return (posterior.guide.moments(case.model.layer, h).var / 0.25).sum(-1).mean()


@pytest.mark.parametrize("num_outputs", [1, 2])
@pytest.mark.parametrize("has_target", [False, True])
def test_integrated_rows_are_those_of_a_loop_over_all_labels(num_outputs, has_target):
    case, pool = gaussian(num_outputs, num_pool=30)
    posterior, target = case.exact(), torch.randn(20, 2) + 1 if has_target else None
    options = {"target": target, "chunk_size": 7}
    chosen, expected = acquire(case.model, posterior, pool, 5, "integrated", **options), []
    for _ in range(5):
        after = [
            posterior.update(case.model, pool[row : row + 1], torch.zeros(1, num_outputs))
            for row in range(30)
        ]
        scores = torch.stack(
            [weighted_variance(case, q, pool if target is None else target) for q in after]
        )
        scores[expected] = torch.inf
        expected.append(int(scores.argmin()))
        posterior = after[expected[-1]]
    assert chosen.tolist() == expected


def test_integrated_weighs_classes_by_their_curvature():
    model, guide, pool = classes()
    best = int(acquire(model, guide, pool, 1, "integrated"))
    h = model.unit_inputs(pool).detach()
    design, S = model.layer.design(h), guide.precision.inverse()
    q = guide.own_moments(model.layer, h)
    curvature = expected_curvature(model.likelihood, FunctionMoments(*q[:2]))  # (n, F)
    drops = torch.zeros(len(pool))
    for row, k in enumerate(curvature):
        for c in range(3):
            covariances = design @ S[c] @ design[row]
            gain = k[c] / (1 + k[c] * covariances[row])
            drops[row] += (curvature[:, c] * covariances.square()).mean() * gain
    assert best == int(drops.argmax())


def test_integrated_leaves_a_row_that_is_far_from_all_others():
    noise = GaussianLikelihood(0.3)
    options = {"level": 5, "bounds": (-4.0, 4.0), "scaling": "none", "embedding": False}
    model = DAK(nn.Identity(), 1, 1, 1, likelihood=noise, **options).eval()
    posterior = exact_posterior(model, torch.ones(1, 1), torch.zeros(1, 1))
    pool = torch.cat([1.5 + 0.2 * torch.randn(30, 1), torch.tensor([[-3.0]])])
    assert int(acquire(model, posterior, pool, 1, "variance")) == 30
    assert 30 not in acquire(model, posterior, pool, 2, "integrated").tolist()


def information(model, posterior, h, rows, num_samples, seed=0):
    """I(labels of the rows; weights) over draws, by listing all configurations."""
    draws = draw_posterior(model, posterior, num_samples=num_samples, seed=seed).flat()
    f = torch.stack(
        [model.functions(h, {n: v[s] for n, v in draws.items()}) for s in range(num_samples)]
    )
    p = f.softmax(-1)[:, rows]  # (S, b, C)
    joint = []
    for labels in itertools.product(range(p.shape[-1]), repeat=len(rows)):
        likelihoods = torch.stack([p[:, i, label] for i, label in enumerate(labels)]).prod(0)
        joint.append(likelihoods.mean())
    expected = torch.special.entr(p).sum(-1).sum(-1).mean()
    return torch.special.entr(torch.stack(joint)).sum() - expected


def test_a_batch_has_the_most_joint_information_of_its_labels():
    model, guide, pool = classes()
    pool = pool[:12]
    chosen = acquire(model, guide, pool, 3, "batch_bald_greedy", num_samples=16)
    h, expected = model.unit_inputs(pool).detach(), []
    with torch.no_grad():
        for _ in range(3):
            scores = [
                -1.0 if row in expected else information(model, guide, h, [*expected, row], 16)
                for row in range(12)
            ]
            expected.append(int(torch.tensor(scores).argmax()))
    assert chosen.tolist() == expected


def test_drawn_configurations_give_the_information_of_all(monkeypatch):
    model, guide, pool = classes()
    module = importlib.import_module("pyro_dak.acting.acquire")
    draws = draw_posterior(model, guide, num_samples=32, seed=0).flat()
    h = model.unit_inputs(pool).detach()
    values = []
    for limit in (10_000, 2000):
        monkeypatch.setattr(module, "_MAX_CONFIGURATIONS", limit)
        scores = module._JointInformation(model, model.likelihood, draws, 0)
        for row in range(7):  # 3^7 = 2187 configurations
            scores.choose(h[row : row + 1])
        assert len(scores.weights) == (2187 if limit == 10_000 else 2000)
        values.append(scores.of(h[7:]))
    assert_close(values[1], values[0], rtol=0.2, atol=0.01)


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_information_of_a_label_is_entropy_minus_expected_entropy(likelihood):
    num_outputs = 3 if likelihood == "categorical" else 1
    model, guide, pool = classes(num_outputs, likelihood=likelihood)
    best = int(acquire(model, guide, pool, 1, "bald", num_samples=4000))
    h = model.unit_inputs(pool).detach()
    draws = draw_posterior(model, guide, num_samples=4000, seed=1).flat()
    with torch.no_grad():
        f = model.functions(h, {name: value.unsqueeze(1) for name, value in draws.items()})
    p = f.softmax(-1) if num_outputs > 1 else torch.cat([f.sigmoid(), (-f).sigmoid()], -1)
    entropies = torch.special.entr(p.mean(0)).sum(-1) - torch.special.entr(p).sum(-1).mean(0)
    assert entropies[best] > 0.95 * entropies.max()


@pytest.mark.parametrize("method", get_args(Method))
@pytest.mark.parametrize("covariance", ["joint", "shared"])
def test_rows_of_a_batch_are_different_and_do_not_depend_on_chunks(method, covariance):
    model, guide, pool = classes(covariance=covariance)
    whole = acquire(model, guide, pool, 20, method)
    assert len(set(whole.tolist())) == 20
    assert whole.tolist() == acquire(model, guide, pool, 20, method, chunk_size=7).tolist()


@pytest.mark.parametrize("likelihood", ["poisson", "bernoulli"])
@pytest.mark.parametrize("method", ["variance", "integrated", "bald"])
def test_other_likelihoods_have_curvatures(likelihood, method):
    model, guide, pool = classes(2, likelihood=likelihood)
    assert len(set(acquire(model, guide, pool, 5, method).tolist())) == 5


def test_thompson_takes_the_best_row_of_each_draw():
    case, pool = gaussian(2)
    posterior = case.exact()
    chosen = acquire(case.model, posterior, pool, 4, "thompson", output=1, seed=3)
    draws = draw_posterior(case.model, posterior, num_samples=4, seed=3).flat()
    h, taken = case.model.unit_inputs(pool), []
    for s in range(4):
        f = case.model.functions(h, {name: value[s] for name, value in draws.items()})[:, 1]
        f[taken] = -torch.inf
        taken.append(int(f.argmax()))
    assert chosen.tolist() == taken


def test_a_whole_pool_can_be_ordered():
    case, pool = gaussian()
    posterior = exact_posterior(case.model, case.x, case.y)
    assert acquire(case.model, posterior, pool, 60).sort().values.tolist() == list(range(60))


@pytest.mark.parametrize("method", ["thompson", "batch_bald_greedy"])
@pytest.mark.parametrize("num_samples", [3, 50])
def test_samples_of_the_weights_are_a_posterior_too(method, num_samples):
    model, guide, pool = classes()
    samples = draw_posterior(model, guide, num_samples=num_samples, seed=0).flat()
    assert len(set(acquire(model, samples, pool, 8, method).tolist())) == 8


def test_wrong_requests_are_refused():
    case, pool = gaussian()
    posterior = case.exact()
    with pytest.raises(ValueError, match="`num` must be at most the 60 rows"):
        acquire(case.model, posterior, pool, 61)
    with pytest.raises(NotImplementedError, match="joint covariance"):
        acquire(case.model, case.guide, pool, 3)
    with pytest.raises(ValueError, match='`target` is for method="integrated"'):
        acquire(case.model, posterior, pool, 3, target=pool)
    other = scenarios.make("student_t", guide="natural_joint")
    with pytest.raises(NotImplementedError, match="StudentTLikelihood"):
        acquire(other.model, other.guide, pool, 3)
    model, guide, pool = classes(2, likelihood="poisson")
    with pytest.raises(NotImplementedError, match="are not among a few"):
        acquire(model, guide, pool, 3, "batch_bald_greedy")


@pytest.mark.usefixtures("no_type_checker")
def test_an_unknown_method_is_refused():
    case, pool = gaussian()
    with pytest.raises(ValueError, match="method"):
        acquire(case.model, case.exact(), pool, 3, "entropy")
