"""The attacks of `make attack`, in small numbers, so that they cannot rot."""

import pytest

from tests.attack import calls, files, kills, tables, threads, writers


def test_a_few_kills_of_a_run_lose_nothing(tmp_path):
    names = ["mean field, closed form", "loader with a generator"]
    outcome = kills.attack(2, 0, tmp_path, names)
    assert (outcome.tried, outcome.failures) == (2, [])


@pytest.mark.slow
def test_two_killed_processes_lose_nothing(tmp_path):
    outcome = kills.attack(2, 0, tmp_path, ["two processes"])
    assert (outcome.tried, outcome.failures) == (2, [])


@pytest.mark.parametrize(
    ("attack", "count"),
    [(files, 6), (tables, 3), (threads, 1), pytest.param(writers, 3, marks=pytest.mark.slow)],
)
def test_small_attacks_find_nothing(attack, count, tmp_path):
    outcome = attack.attack(count, 1, tmp_path)
    assert outcome.tried >= count
    assert outcome.failures == []


@pytest.mark.usefixtures("no_type_checker")
def test_a_few_odd_calls_find_nothing(tmp_path):
    assert calls.attack(20, 1, tmp_path).failures == []


def test_a_run_that_ends_in_other_weights_is_told(tmp_path, monkeypatch):
    names = ["mean field, closed form"]
    whole = kills._whole

    def other_weights(name, folder):
        weights, seconds = whole(name, folder)
        return {key: value + 1 for key, value in weights.items()}, seconds

    monkeypatch.setattr(kills, "_whole", other_weights)
    outcome = kills.attack(1, 0, tmp_path, names)
    assert outcome.failures[0] == "mean field, closed form: run 0 ended in other weights"
