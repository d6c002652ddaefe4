"""The networks that keep distances do so, within the bounds that they state."""

import pytest
import torch

import models
from models.shared.backbones import backbone, residual_mlp
from models.shared.image_backbones import build_backbone
from tests.models.tables import build, data


def ratios(network, x):
    """Distances of all pairs after the network over those before it."""
    with torch.no_grad():
        before, after = torch.pdist(x.flatten(1)), torch.pdist(network(x).flatten(1))
    return after / before


def train_a_little(network, x):
    """Steps that pull the features together, which a network without bounds would follow."""
    optimizer = torch.optim.SGD(network.parameters(), 1.0)
    for _ in range(50):
        network.zero_grad()
        (network(x) - network(x[:1])).square().mean().backward()
        optimizer.step()
    with torch.no_grad():  # the norms are found by iteration, a step of which each pass takes
        for _ in range(100):
            network(x[:1])
    return network.eval()


@pytest.mark.parametrize(("num_blocks", "factor"), [(3, 0.5), (2, 0.9)])
def test_a_residual_network_keeps_distances(num_blocks, factor):
    x = torch.randn(40, 5)
    network = train_a_little(residual_mlp(5, 8, num_blocks, factor), x)
    for scale in (1e-3, 1.0, 100.0):
        found = ratios(network, scale * x)
        assert found.min() >= (1 - factor) ** num_blocks * (1 - 1e-3)
        assert found.max() <= (1 + factor) ** num_blocks * (1 + 1e-3)
    plain = train_a_little(backbone(5, 8), x)
    assert ratios(plain, x).min() < 0.02  # it does collapse what is apart


def test_a_small_resnet_keeps_distances_up_to_its_pooling():
    network, feature_dim = build_backbone("distance_resnet", (0.0,) * 3, (1.0,) * 3)
    x = torch.rand(10, 3, 32, 32, dtype=torch.get_default_dtype())
    body = train_a_little(network[1][:-2], x)
    found = ratios(body, x)
    assert found.min() >= (1 / 8) * (1 - 1e-3)
    assert found.max() <= (27 / 8) * (1 + 1e-3)
    assert network(x).shape == (10, feature_dim)


def test_fewer_features_than_inputs_are_refused():
    with pytest.raises(ValueError, match="`feature_dim` must be at least `input_dim`"):
        residual_mlp(8, 5)


def test_an_unknown_backbone_lists_the_known_ones():
    with pytest.raises(ValueError, match="residual_mlp"):
        models.build("nn", 3, backbone="transformer")


@pytest.mark.parametrize("name", ["dak_cf", "nn", "nn_bn"])
def test_models_train_on_a_residual_backbone(name):
    model = build(name, backbone="residual_mlp")
    model.fit(*data())
    x, y = data(100, seed=1)
    assert (model.predict(x).mean - y).square().mean() < 0.5 * y.var()
