"""Descriptions of models: what is stored beside the weights, and what two of them differ in."""

import json
import re

import pytest
from torch import nn

from pyro_dak import DAK, MeanFieldGuide
from pyro_dak.training.describe import describe, differences


class Stack(nn.Sequential):
    """A network that is known by its weights only."""


@pytest.mark.parametrize(
    ("then", "now", "different"),
    [
        (nn.AvgPool2d(2), nn.AvgPool2d((2, 2)), None),
        (nn.AvgPool2d(2), nn.AvgPool2d((3, 3)), "kernel_size"),
        (nn.AvgPool2d(2), nn.AvgPool2d(2, divisor_override=7), "divisor_override: None then, 7"),
        (nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=None), "momentum: 0.1 then, None"),
        (nn.Conv2d(1, 1, 3), nn.Conv2d(1, 1, 3, padding="same"), "padding: .*same"),
        (nn.Sequential(nn.ReLU()), nn.Sequential(nn.Tanh()), "name: ReLU then, Tanh now"),
        (nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU(), nn.ReLU()), "children"),
        (nn.Sequential(nn.ReLU()), Stack(nn.ReLU()), None),
    ],
)
def test_descriptions_of_networks_are_compared_to_the_last_argument(then, now, different):
    models = DAK(then, 1, num_units=1), DAK(now, 1, num_units=1)
    before, after = (
        json.loads(json.dumps(describe(model, MeanFieldGuide(model)))) for model in models
    )
    found = "; ".join(differences(before, after))
    assert re.search(different, found) if different else not found, found
