"""Plans: what they refuse, what a resumed run compares, and the schedules."""

import math
from itertools import islice

import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import DataLoader

from pyro_dak.training.plan import Plan
from tests.training.runs import make_data, make_model, train


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"epochs": 0}, ValueError, "`epochs` must be at least 1"),
    ({"batch_size": 2.5}, TypeError, "`batch_size` must be an integer"),
    ({"learning_rate": -1.0}, ValueError, "`learning_rate` must be positive"),
    ({"clip_norm": 0.0}, ValueError, "`clip_norm` must be positive"),
    ({"patience": -1}, ValueError, "`patience` must be at least 0"),
    ({"weight_decay": -0.1}, ValueError, "`weight_decay` must not be negative"),
    ({"optimizer": "adm"}, ValueError, "'adam'"),
    ({"last_layer_optimizer": "adm"}, ValueError, "`last_layer_optimizer` must be"),
    ({"schedule": "two_cycle"}, ValueError, "'one_cycle'"),
    ({"stop_after": 0}, ValueError, "`stop_after` must be at least 1"),
    ({"num_scorings": 0}, ValueError, "`num_scorings` must be at least 1"),
])  # fmt: skip
def test_a_plan_checks_its_values(options, error, message, no_type_checker):
    with pytest.raises(error, match=message):
        Plan(**options)


def test_settings_say_what_the_last_layer_takes_from_the_network():
    settings = Plan(learning_rate=0.3, optimizer="sgd", schedule=math.hypot).settings()
    assert settings["last_layer_learning_rate"] == 0.3
    assert settings["last_layer_optimizer"] == "sgd"
    assert settings["schedule"] == "custom hypot"


@pytest.mark.parametrize(("schedule", "expected"), [
    ("constant", [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ("step", [1.0, 1.0, 1.0, 0.7, 0.7, 0.7]),
    ("cosine", [(1 + math.cos(math.pi * step / 6)) / 2 for step in range(6)]),
    (lambda step, total, per_epoch: step * total + per_epoch, [3, 9, 15, 21, 27, 33]),
])  # fmt: skip
def test_factors_follow_the_schedule_and_stay_at_its_end(schedule, expected):
    plan = Plan(epochs=2, schedule=schedule)
    found = torch.tensor([*islice(plan.factors(0, 3), 8)], dtype=torch.float64)
    assert_close(found, torch.tensor([*expected, expected[-1], expected[-1]], dtype=torch.float64))


def test_one_cycle_rises_to_its_peak_and_falls_to_almost_nothing():
    factors = [*islice(Plan(epochs=10).factors(0, 10), 101)]
    assert_close(factors[0], 1 / 25)
    assert 28 <= factors.index(max(factors)) <= 31
    assert_close(factors[-1], 4e-6)


def test_wrong_settings_are_refused():
    model, guide = make_model()
    with pytest.raises(ValueError, match="`patience` needs `validation`"):
        train(model, guide, patience=3)
    with pytest.raises(ValueError, match="'adam'"):
        train(model, guide, optimizer="adm")
    with pytest.raises(ValueError, match="'one_cycle'"):
        train(model, guide, schedule="two_cycle")
    with pytest.raises(ValueError, match="'closed_form'"):
        train(model, guide, objective="exact")
    with pytest.raises(ValueError, match="share between 0 and 1"):
        train(model, guide, validation=1.5)
    with pytest.raises(ValueError, match="`num_data` must be given"):
        train(model, guide, DataLoader([make_data()], batch_size=None))


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"clip_norm": 0.0}, ValueError, "`clip_norm` must be positive"),
    ({"last_layer_learning_rate": -1.0}, ValueError, "must be positive"),
    ({"last_layer_optimizer": "adm"}, ValueError, "`last_layer_optimizer` must be"),
    ({"num_data": 60}, ValueError, "`num_data` is for iterables"),
    ({"validation": "some"}, TypeError, "must be a pair"),
    ({"validation": 1}, ValueError, "share between 0 and 1"),
])  # fmt: skip
def test_more_wrong_settings_are_refused(options, error, message, no_type_checker):
    with pytest.raises(error, match=message):
        train(*make_model(), **options)
