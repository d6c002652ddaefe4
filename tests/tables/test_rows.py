"""How the rows of a table are held out, and the settings that follow from their number."""

import pytest
import torch

from pyro_dak.tables.rows import (
    Rows,
    default_batch_size,
    default_epochs,
    effective_number,
    held_out_rows,
    rows_kept_apart,
    share_kept_apart,
    without,
)


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


def test_rows_are_kept_apart_by_what_stands_in_them():
    x, y = torch.randn(4000, 3), torch.randint(0, 3, (4000,))
    kept = rows_kept_apart(Rows(x, y, torch.ones(4000)), 0.1, seed=5)
    assert abs(len(kept) - 400) < 4 * (4000 * 0.1 * 0.9) ** 0.5
    order = torch.randperm(4000)[:3000]
    again = rows_kept_apart(Rows(x[order], y[order], torch.ones(3000)), 0.1, seed=5)
    assert set(order[again].tolist()) == set(kept.tolist()) & set(order.tolist())
    other = rows_kept_apart(Rows(x, y, torch.ones(4000)), 0.1, seed=6)
    assert len(set(other.tolist()) & set(kept.tolist())) < 100


def test_equal_rows_are_kept_apart_one_by_one():
    rows = Rows(torch.ones(4000, 2), torch.ones(4000, 1), torch.ones(4000))
    kept = rows_kept_apart(rows, 0.1, seed=0)
    assert abs(len(kept) - 400) < 4 * (4000 * 0.1 * 0.9) ** 0.5


def test_the_share_that_is_kept_apart_gives_5_to_5000_rows():
    shares = [n * share_kept_apart(n, 0.1) for n in (20, 1000, 10**6)]
    assert shares == pytest.approx([5, 100, 5000])


def test_the_effective_number_of_rows_does_not_count_those_of_hardly_any_weight():
    assert effective_number(torch.full((7,), 1e-30)) == pytest.approx(7)
    assert effective_number(torch.tensor([1.0] * 5 + [1e-9] * 100)) == pytest.approx(5)
    assert effective_number(torch.tensor([1.0, 3.0])) == pytest.approx(16 / 10)
