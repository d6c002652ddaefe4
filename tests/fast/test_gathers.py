import pytest
import torch
from torch.testing import assert_close

from pyro_dak.fast.gathers import gather_sum


@pytest.mark.parametrize("num_columns", [1, 3])
def test_gather_sum_is_the_loop(num_columns):
    weights, table = torch.randn(4, 5), torch.randn(6, num_columns)
    index = torch.randint(6, (4, 5))
    expected = torch.stack(
        [sum(weights[n, k] * table[index[n, k]] for k in range(5)) for n in range(4)]
    )
    assert_close(gather_sum(weights, index, table), expected)


@pytest.mark.parametrize("num_columns", [1, 3])
def test_gather_sum_has_the_gradient_of_finite_differences(num_columns):
    weights = torch.randn(4, 5, requires_grad=True)
    table = torch.randn(6, num_columns, requires_grad=True)
    index = torch.randint(6, (4, 5))
    assert torch.autograd.gradcheck(lambda w, t: gather_sum(w, index, t), (weights, table))
