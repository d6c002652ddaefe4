"""How the rows of a table are held out, and the settings that follow from their number."""

import pytest
import torch

from pyro_dak.tables.rows import Rows, default_batch_size, default_epochs, held_out_rows, without


def test_every_member_has_held_out_rows_of_its_own():
    held_out = held_out_rows(100, 5, 0.1, seed=0)
    assert held_out.shape == (5, 10)
    assert len(held_out.flatten().unique()) == 50
    assert held_out_rows(10, 5, 0.4, seed=0).shape == (5, 4)
    assert held_out_rows(10**6, 1, 0.1, seed=0).shape == (1, 5000)


@pytest.mark.parametrize("num_rows", [31, 100])
def test_two_members_have_not_seen_the_rows_where_parts_overlap(num_rows):
    held_out = held_out_rows(num_rows, 4, 0.3, seed=0, overlap=True)
    half = held_out.shape[1] // 2
    for member in range(3):
        assert held_out[member, -half:].tolist() == held_out[member + 1, :half].tolist()
        assert len(held_out[member : member + 2].unique()) == 2 * held_out.shape[1] - half


def test_held_out_rows_have_no_weight_and_those_of_all_are_dropped():
    x = torch.arange(4.0).unsqueeze(-1)
    rows = Rows(x, x, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    one = without(rows, torch.tensor([[1]]))
    assert one.x.flatten().tolist() == [0, 2, 3]
    two = without(rows, torch.tensor([[1], [0]]))
    assert two.weights.tolist() == [[1, 0, 3, 4], [0, 2, 3, 4]]


def test_defaults_by_the_number_of_rows():
    assert [default_batch_size(n) for n in (50, 5000, 10**6)] == [128, 256, 512]
    numbers = (50, 10_000, 40_000, 10**6, 10**9)
    assert [default_epochs(n) for n in numbers] == [200, 200, 100, 20, 10]
