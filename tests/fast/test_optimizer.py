"""Steps of Adam in few operations are those of torch."""

import pytest
import torch
from torch.optim import SGD, Adam, AdamW
from torch.testing import assert_close

from pyro_dak.fast.optimizer import few_calls_class, total_norm

SHAPES = [(4, 3), (4,), (), (2, 3, 5)]


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]


def two_groups(kind, own):
    groups = [{"params": own[:2], "weight_decay": 0.1}, {"params": own[2:], "lr": 0.3}]
    return kind(groups, fused=True, lr=0.01, betas=(0.8, 0.95))


def give_gradients(step, *several, missing=()):
    generator = torch.Generator().manual_seed(step)
    for i, same in enumerate(zip(*several, strict=True)):
        gradient = torch.randn(same[0].shape, generator=generator)
        for parameter in same:
            parameter.grad = None if i in missing else gradient.clone()


def assert_equal_states(found, expected):
    found, expected = found.state_dict()["state"], expected.state_dict()["state"]
    assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_steps_and_their_state_equal_those_of_torch(kind):
    own, others = parameters(), parameters()
    found = two_groups(few_calls_class(kind, own), own)
    expected = two_groups(kind, others)
    assert type(found) is not kind
    # In the fourth step some parameters have no gradient, and count fewer steps from then on.
    for step in range(8):
        give_gradients(step, own, others, missing=(1, 3) if step == 3 else ())
        for optimizer in (found, expected):
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
            optimizer.step()
        assert_close(own, others, rtol=0, atol=0)
        assert_equal_states(found, expected)


def test_a_closure_is_called_once_with_gradients():
    own = parameters()
    optimizer = two_groups(few_calls_class(Adam, own), own)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        give_gradients(len(calls), own)
        return 7.0

    give_gradients(0, own)
    optimizer.step()
    assert optimizer.step(closure) == 7.0
    assert calls == [True]


def test_other_optimizers_and_mixed_parameters_are_left_to_torch():
    own = parameters()
    assert few_calls_class(SGD, own) is SGD
    assert few_calls_class(Adam, [own[0], own[1].float()]) is Adam
    assert few_calls_class(Adam, [own[0].to("meta")]) is Adam


@pytest.mark.parametrize("dtypes", [(torch.float64,), (torch.float64, torch.float32)])
def test_total_norm_is_that_of_all_numbers(dtypes):
    tensors = [torch.randn(s, dtype=dtypes[i % len(dtypes)]) for i, s in enumerate(SHAPES)]
    flat = torch.cat([tensor.double().flatten() for tensor in tensors])
    assert_close(total_norm(tensors).double(), flat.norm(), rtol=1e-6, atol=0)


def test_total_norm_of_nothing_is_zero():
    assert total_norm([]) == 0
