"""Networks that end in a linear layer."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from pyro_dak import DAK
from pyro_dak.fast.folding import split_last_linear
from tests import scenarios

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


def with_patch(network):
    forward = network[-1].forward
    network[-1].forward = lambda x: 2 * forward(x)
    return network


def with_own_weights(network):
    class Weights(nn.Parameter):
        """Weights that may mean something else."""

    network[-1].weight = Weights(network[-1].weight.detach())
    return network


OTHERS = {
    "activation last": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU()),
    "hook": lambda: with_hook(LINEAR["sequence"]()),
    "hook on the last": lambda: with_hook_on_the_last(LINEAR["sequence"]()),
    "patch": lambda: with_patch(LINEAR["sequence"]()),
    "weights": lambda: with_own_weights(LINEAR["sequence"]()),
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


def test_a_compiled_sequence_is_left_alone(monkeypatch):
    network = LINEAR["sequence"]()
    network._compiled_call_impl = network._call_impl  # as `network.compile()` would
    assert split_last_linear(network) == ([network], None)


@pytest.mark.parametrize(
    ("feature_dim", "embedding", "num_rows", "is_folded"),
    [
        (16, True, None, True),
        (16, True, 4, False),  # 4 x 16 x 64 for the product, 832 saved a row
        (16, True, 5, True),
        (2, True, None, False),  # 4 x 64 a row folded, 2 x 64 + 4 x 2 one after the other
        (4, False, None, False),  # no embedding to fold it into
    ],
)
def test_layers_are_folded_where_it_pays(feature_dim, embedding, num_rows, is_folded):
    network = nn.Linear(64, feature_dim)
    model = DAK(network, feature_dim, num_units=4, embedding=embedding).eval()
    unit_inputs = model.fixed_unit_inputs(num_rows)
    x = torch.randn(5, 64)
    before = model.unit_inputs(x).detach()
    assert_close(unit_inputs(x), before)
    with torch.no_grad():
        network.weight.mul_(2)  # what is folded does not see it
    assert torch.allclose(unit_inputs(x), before) == is_folded


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("scaling", ["standardize", "minmax", "none"])
def test_training_has_the_gradients_of_one_layer_after_the_other(name, scaling):
    model = DAK(LINEAR[name](), 4, num_units=2, scaling=scaling)
    x, weights = torch.randn(200, 3), torch.randn(200, 2)
    assert model._fold(200) is not None
    expected = model.embed(model.feature_extractor(x))
    found = model.unit_inputs(x)
    assert_close(found, expected)
    parameters = [*model.feature_extractor.parameters(), model.embedding.weight]
    gradients = [torch.autograd.grad((h * weights).sum(), parameters) for h in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other, rtol=1e-9, atol=1e-9)


class Shifted(DAK):
    """A model with an embedding of its own."""

    def embed(self, features):
        return super().embed(features) + 1


def test_an_embedding_of_ones_own_sees_the_features():
    model = Shifted(LINEAR["sequence"](), 4, num_units=2).eval()
    x = torch.randn(50, 3)
    expected = model.embed(model.feature_extractor(x))
    assert_close(model.unit_inputs(x), expected)
    assert_close(model.fixed_unit_inputs()(x), expected.detach())


def test_an_embedding_put_on_the_instance_sees_the_features():
    model = DAK(LINEAR["sequence"](), 4, num_units=2).eval()
    x, embed = torch.randn(50, 3), model.embed
    expected = model.unit_inputs(x) + 1
    model.embed = lambda features: embed(features) + 1
    assert_close(model.unit_inputs(x), expected)
    assert_close(model.fixed_unit_inputs()(x), expected.detach())


EXPORTED = """
import torch
from torch import nn
from torch.testing import assert_close
from pyro_dak import DAK

class UnitInputs(nn.Module):
    def __init__(self):
        super().__init__()
        network = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4))
        self.model = DAK(network, 4, num_units=2)

    def forward(self, x):
        return self.model.unit_inputs(x)

module = UnitInputs().eval()
module(torch.randn(50, 3))
rows = {0: torch.export.Dim("n", min=2, max=1000)}
exported = torch.export.export(module, (torch.randn(50, 3),), dynamic_shapes=(rows,)).module()
for num_rows in (2, 7, 300):
    x = torch.randn(num_rows, 3)
    assert_close(exported(x), module(x))
"""


@pytest.mark.slow
def test_a_model_is_exported_for_any_number_of_rows():
    # In a process of its own: numbers of rows are symbols there, which the shape checks refuse.
    scenarios.run_alone(EXPORTED)
