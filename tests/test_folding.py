"""Networks that end in a linear layer."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from pyro_dak import DAK
from pyro_dak.folding import split_last_linear

LINEAR = {
    "linear": lambda: nn.Linear(3, 4),
    "sequence": lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4)),
    "nested": lambda: nn.Sequential(
        nn.Linear(3, 5), nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(5, 4, bias=False)))
    ),
}


def with_hook(network):
    network.register_forward_hook(lambda module, inputs, output: 2 * output)
    return network


def with_hook_on_the_last(network):
    network[-1].register_forward_pre_hook(lambda module, inputs: (inputs[0] / 2,))
    return network


class Doubled(nn.Linear):
    """A layer that does more than its weights say."""

    def forward(self, x):
        return 2 * super().forward(x)


class Reversed(nn.Sequential):
    """A sequence with an order of its own."""

    def forward(self, x):
        for layer in reversed(self):
            x = layer(x)
        return x


OTHERS = {
    "activation last": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU()),
    "hook": lambda: with_hook(LINEAR["sequence"]()),
    "hook on the last": lambda: with_hook_on_the_last(LINEAR["sequence"]()),
    "subclass": lambda: nn.Sequential(nn.Tanh(), Doubled(3, 4)),
    "order": lambda: Reversed(nn.Tanh(), nn.Linear(3, 4)),
    "parametrized": lambda: nn.Sequential(
        nn.Tanh(), nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    ),
}


@pytest.mark.parametrize("name", LINEAR)
def test_parts_and_last_layer_are_the_network(name):
    network = LINEAR[name]()
    parts, last = split_last_linear(network)
    x = torch.randn(6, 3)
    h = x
    for part in parts:
        h = part(h)
    assert type(last) is nn.Linear
    assert_close(last(h), network(x))


@pytest.mark.parametrize("name", OTHERS)
def test_layers_that_do_more_are_left_alone(name):
    network = OTHERS[name]()
    assert split_last_linear(network) == ([network], None)


def test_an_empty_sequence_is_left_alone():
    network = nn.Sequential()
    assert split_last_linear(network) == ([network], None)


@pytest.mark.parametrize("embedding", [True, False])
@pytest.mark.parametrize("scaling", ["standardize", "minmax", "none"])
@pytest.mark.parametrize("name", [*LINEAR, *OTHERS])
def test_unit_inputs_are_the_same_folded_or_not(name, scaling, embedding):
    network = (LINEAR | OTHERS)[name]()
    num_units = 2 if embedding else 4
    model = DAK(network, 4, num_units=num_units, scaling=scaling, embedding=embedding)
    model.unit_inputs(5 + 3 * torch.randn(50, 3))  # running statistics that are not the initial
    model.eval()
    x = torch.randn(20, 3)
    assert_close(model.fixed_unit_inputs()(x), model.unit_inputs(x).detach())


def test_folded_layers_follow_later_weights_when_asked_anew():
    model = DAK(LINEAR["sequence"](), 4, num_units=2).eval()
    x = torch.randn(20, 3)
    before = model.fixed_unit_inputs()
    with torch.no_grad():
        model.feature_extractor[-1].weight.mul_(2)
    assert_close(model.fixed_unit_inputs()(x), model.unit_inputs(x).detach())
    assert not torch.allclose(before(x), model.unit_inputs(x))


@pytest.mark.parametrize("shape", [(20, 6, 3), (3,)])
def test_features_of_another_rank_are_told_apart_from_rows(shape):
    model = DAK(LINEAR["sequence"](), 4, num_units=2).eval()
    with pytest.raises(ValueError, match=r"must return shape \(N, feature_dim=4\)"):
        model.fixed_unit_inputs()(torch.randn(shape))


def test_features_of_another_width_are_told():
    model = DAK(LINEAR["sequence"](), 5, num_units=2).eval()
    with pytest.raises(ValueError, match=r"feature_dim=5\); got \(20, 4\)"):
        model.fixed_unit_inputs()(torch.randn(20, 3))
