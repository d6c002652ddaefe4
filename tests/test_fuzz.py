"""Public functions answer odd arguments with a right result or with an error of our own."""

import pytest
import torch

from tests import fuzz

pytestmark = pytest.mark.usefixtures("no_type_checker")


def test_every_public_function_and_method_is_attacked():
    attacked = {name.split(": ")[0] for name in fuzz.TARGETS}
    assert attacked == fuzz.public_callables()


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_right_arguments_get_a_right_answer(name):
    assert fuzz.run_call(0, 0, name, num_odd=0) is None


@pytest.mark.parametrize("seed", range(4))
def test_odd_arguments_get_a_right_answer_or_an_error_of_our_own(seed):
    assert fuzz.fuzz(1500, seed, progress=False) == []


def test_the_judge_knows_errors_of_torch_and_numbers_that_are_not_finite():
    def answer(call_fn):
        case = fuzz.Target(
            "a call", lambda: None, lambda result, _: result is not None, 1, "finite", ()
        )
        return fuzz.answer(case, call_fn, {})

    assert answer(lambda: torch.ones(2) @ torch.ones(3)).startswith("RuntimeError: ")
    assert answer(lambda: [].missing).startswith("AttributeError: ")
    assert answer(lambda: {"a": (torch.tensor([0.0, torch.nan]),)}) == "is not finite"
    assert answer(lambda: None) == "is not right"
    assert answer(lambda: fuzz.DAK(None, 3)) is None
    assert answer(lambda: torch.ones(2)) is None
