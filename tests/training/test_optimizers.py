"""Optimisers and schedules: every one trains, and each group has its own."""

import math

import pytest
import torch
from torch.testing import assert_close

from pyro_dak.training.checkpoint import module_tensors
from pyro_dak.training.optimizers import build_optimizers, load_optimizers, optimizer_state
from pyro_dak.training.plan import Plan
from tests.training.runs import (
    OWN_OPTIMIZER,
    assert_same,
    make_data,
    make_model,
    parameters_after,
    train,
)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "adadelta"])
@pytest.mark.parametrize(
    "schedule", ["one_cycle", "cosine", "constant", "step", lambda s, t, e: 0.5]
)
def test_every_optimizer_and_schedule_trains(optimizer, schedule):
    model, guide = make_model()
    history = train(model, guide, optimizer=optimizer, schedule=schedule, learning_rate=1e-3)
    assert all(math.isfinite(row["loss"]) for row in history.rows)


def test_weight_decay_acts_on_the_network_only():
    # With a zero learning rate factor nothing moves; a pure decay step shows where decay acts.
    model, guide = make_model()
    x, y = make_data()
    state = module_tensors(model, guide)
    train(model, guide, (x, y), epochs=1, batch_size=60, optimizer="adamw", weight_decay=50.0,
          learning_rate=1e-2, schedule="constant")  # fmt: skip
    after = module_tensors(model, guide)
    shrunk = "model.feature_extractor.0.weight"
    assert after[shrunk].norm() < 0.7 * state[shrunk].norm()
    assert after["guide.z_loc"].norm() > 0.7 * state["guide.z_loc"].norm()


def test_last_layer_has_its_own_learning_rate():
    before_model, before_guide = make_model()
    before = module_tensors(before_model, before_guide)
    after = parameters_after(learning_rate=1e-2, last_layer_learning_rate=1e-12)
    assert_close(after["guide.z_loc"], before["guide.z_loc"], atol=1e-9, rtol=0)
    weight = "model.embedding.weight"
    assert (after[weight] - before[weight]).abs().max() > 1e-4


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adadelta"])
def test_the_last_layer_learns_by_default_whatever_the_rate_of_the_network_is(optimizer):
    before = module_tensors(*make_model())
    own = parameters_after(learning_rate=1e-12, optimizer=optimizer)
    said = {"last_layer_learning_rate": 1e-2, "last_layer_optimizer": "adam"}
    assert_same(own, parameters_after(learning_rate=1e-12, optimizer=optimizer, **said))
    assert (own["guide.z_log_scale"] - before["guide.z_log_scale"]).abs().mean() > 1e-2
    none = {"last_layer_learning_rate": None, "last_layer_optimizer": None}
    followed = parameters_after(learning_rate=1e-12, optimizer=optimizer, **none)
    assert_close(followed["guide.z_log_scale"], before["guide.z_log_scale"], atol=1e-9, rtol=0)


def test_last_layer_has_its_own_optimizer():
    """Adadelta hardly moves the scales of q, whose gradients are of order 1 / N; Adam does."""
    before = module_tensors(*make_model())["guide.z_log_scale"]
    none = {"last_layer_learning_rate": None, "last_layer_optimizer": None}
    shared, own = (
        parameters_after(**(OWN_OPTIMIZER | options))["guide.z_log_scale"] for options in (none, {})
    )
    assert (own - before).abs().mean() > 3 * (shared - before).abs().mean()


def test_no_parameters_at_all_are_refused():
    with pytest.raises(ValueError, match="empty parameter list"):
        build_optimizers(Plan().groups([], []), fused=True)


def test_groups_with_the_same_optimizer_share_one():
    network, last_layer = (torch.zeros(1, requires_grad=True) for _ in range(2))
    plan = Plan(learning_rate=0.1, last_layer_learning_rate=0.2, weight_decay=0.3)
    (optimizer,) = build_optimizers(plan.groups([network], [last_layer]), fused=False)
    found = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert found == [(0.1, 0.3), (0.2, 0.0)]


def test_an_optimizer_each_steps_its_own_group_also_from_a_saved_state():
    starts = [torch.randn(3, 2), torch.randn(4)]
    gradients = [[torch.randn_like(start) for start in starts] for _ in range(4)]
    plan = Plan(weight_decay=0.1, **OWN_OPTIMIZER)

    def leaves(values):
        return [value.detach().clone().requires_grad_() for value in values]

    def steps(parameters, optimizers, some, rate):
        for pair in some:
            for parameter, gradient in zip(parameters, pair, strict=True):
                parameter.grad = gradient
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()

    alone, together = leaves(starts), leaves(starts)
    parts = [
        *build_optimizers(plan.groups(alone[:1], []), fused=True),
        *build_optimizers(plan.groups([], alone[1:]), fused=True),
    ]
    kinds = (torch.optim.Adadelta, torch.optim.Adam)
    assert [isinstance(*pair) for pair in zip(parts, kinds, strict=True)] == [True, True]
    both = build_optimizers(plan.groups(together[:1], together[1:]), fused=True)
    for some, rate in ((gradients[:2], 0.5), (gradients[2:], 0.1)):
        steps(alone, parts, some, rate)
        steps(together, both, some, rate)
        assert_close(together, alone)
        state = optimizer_state(both)
        together = leaves(together)
        both = build_optimizers(plan.groups(together[:1], together[1:]), fused=True)
        load_optimizers(both, state)


BAD_STATES = {
    "short": ("0.exp_avg", torch.zeros(2), r"shape \(3, 2\).*got \(2,\)"),
    "one number": ("0.exp_avg_sq", torch.zeros(()), r"shape \(3, 2\).*got \(\)"),
    "no step": ("0.step", torch.zeros(0), r"shape \(\).*got \(0,\)"),
    "dtype": ("0.exp_avg", torch.zeros(3, 2, dtype=torch.float32), "dtype of its parameter"),
    "integers": ("0.exp_avg", torch.zeros(3, 2, dtype=torch.int64), "in a floating dtype"),
    "not a number": ("0.exp_avg", torch.full((3, 2), math.nan, dtype=torch.float64), "holds NaN"),
    "no such parameter": ("7.exp_avg", torch.zeros(3, 2), "`optimizer.7.exp_avg` belongs to no"),
    "no number": ("x.exp_avg", torch.zeros(3, 2), "`optimizer.x.exp_avg` belongs to no"),
    "another optimiser": ("0.square_avg", torch.zeros(3, 2), "0.square_avg` belongs to no"),
    "missing": ("0.exp_avg", None, "got none"),
}


@pytest.mark.parametrize("name", list(BAD_STATES))
@pytest.mark.parametrize("fused", [True, False])
def test_a_state_that_does_not_fit_its_parameter_is_refused_and_nothing_is_loaded(name, fused):
    parameter = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    optimizers = build_optimizers(Plan().groups([parameter], []), fused=fused)
    optimizers[0].step()
    good = {key: value.clone() for key, value in optimizer_state(optimizers).items()}
    key, value, message = BAD_STATES[name]
    bad = {k: v for k, v in (good | {key: value}).items() if v is not None}
    fresh = build_optimizers(Plan().groups([parameter], []), fused=fused)
    with pytest.raises(ValueError, match=message):
        load_optimizers(fresh, bad)
    assert optimizer_state(fresh) == {}
    load_optimizers(fresh, good)
    assert_close(optimizer_state(fresh), good)
    fresh[0].step()
