"""One table of each kind of odd ones: refused clearly, or read as it is meant."""

import pytest
import torch

from tests.odd_tables import kinds, odd_tables, problems

TABLES = list(odd_tables(len(kinds())))


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_an_odd_table_is_refused_clearly_or_read_as_it_is_meant(table, tmp_path):
    assert problems(table, tmp_path) == []


def test_every_table_of_a_seed_is_another(tmp_path):
    again = list(odd_tables(2 * len(TABLES)))
    assert again[: len(TABLES)] == TABLES
    assert len({table.content for table in again}) > 1.9 * len(TABLES) - 10
