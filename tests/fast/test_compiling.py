"""Compiled functions give what the functions give, also after what they read has changed."""

from tests import scenarios

GLOBALS = """
import torch
from pyro_dak.fast.compiling import Compiled

factor = 2.0

def scaled(x):
    return factor * torch.relu(x)

compiled = Compiled(scaled, backend="eager")
x = torch.randn(5)
assert torch.equal(compiled(x), 2 * torch.relu(x))
factor = 3.0
assert torch.equal(compiled(x), 3 * torch.relu(x))
"""


def test_a_compiled_function_sees_new_values_of_global_data():
    # In a process of its own: the compiler cannot look through the shape checks of the tests.
    scenarios.run_alone(GLOBALS)
