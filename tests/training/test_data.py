"""Data of `fit`: tensors and loaders, shares of processes, and what is refused."""

import math

import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pyro_dak import CategoricalLikelihood
from pyro_dak.training.checkpoint import module_tensors
from pyro_dak.training.data import LoaderData, ResidentData
from tests.training.runs import assert_same, make_data, make_model, train


def test_loader_and_iterable_give_the_same_as_tensors_in_one_batch():
    x, y = make_data()

    class Rows(IterableDataset):
        def __iter__(self):
            yield x, y

    results = []
    for data, options in (
        ((x, y), {}),
        (DataLoader(TensorDataset(x, y), batch_size=60), {}),
        (DataLoader(Rows(), batch_size=None), {"num_data": 60}),
    ):
        model, guide = make_model()
        train(model, guide, data, batch_size=60, **options)
        results.append(module_tensors(model, guide))
    for other in results[1:]:
        for name, tensor in results[0].items():
            assert_close(other[name], tensor, atol=1e-6, rtol=1e-6)


def test_batches_are_nearly_equal_and_hold_every_row_once():
    x, y = torch.arange(101.0).unsqueeze(-1), torch.zeros(101, 1)
    for world_size in (1, 2, 3):
        shares = [ResidentData(x, y, 20, rank, world_size) for rank in range(world_size)]
        epochs = [list(s.epoch(torch.Generator().manual_seed(0), 0)) for s in shares]
        rows = torch.cat([batch[0] for epoch in epochs for batch in epoch]).flatten()
        assert rows.sort().values.equal(torch.arange(101.0))
        sizes = [sum(len(e[i][0]) for e in epochs) for i in range(len(epochs[0]))]
        assert max(sizes) - min(sizes) <= 1
        # Averaged over processes, each row counts num_data / batch times.
        assert_close(epochs[0][0][2] / world_size, 101 / sizes[0])


def test_weights_by_row_and_member_come_with_their_rows():
    x, y = torch.arange(10.0).unsqueeze(-1), torch.zeros(10, 1)
    weights = torch.arange(20.0).reshape(2, 10)
    data = ResidentData(x, y, 4, weights=weights)
    assert_close(data.num_data, weights.sum(-1))
    for rows, _, scaled in data.epoch(torch.Generator().manual_seed(0), 0):
        assert_close(scaled, weights[:, rows.flatten().long()] * (10 / len(rows)))


def bad_data() -> dict[str, tuple[object, type[Exception], str]]:
    x, y = make_data()
    nan, inf = x.clone(), y.clone()
    nan[3, 1], inf[5] = math.nan, math.inf
    return {
        "nan in x": ((nan, y), ValueError, "1 NaN"),
        "inf in y": ((x, inf), ValueError, "1 infinite"),
        "no rows": ((x[:0], y[:0]), ValueError, "has no rows"),
        "lengths": ((x, y[:-1]), ValueError, "60 and 59 rows"),
        "integers": ((x.long(), y), TypeError, "floating dtype"),
        "dtype": ((x.float(), y), TypeError, "dtype of the model"),
        "columns": ((x, y.expand(-1, 2)), ValueError, r"shape \(N, 1\)"),
        "no tensor": ((x, [1.0] * 60), TypeError, "must be a torch.Tensor"),
        "one axis": ((x[:, 0], y), ValueError, r"shape \(N, ...\)"),
        "no data": (3, TypeError, "pair"),
    }


@pytest.mark.parametrize("name", list(bad_data()))
def test_bad_data_is_refused(name, no_type_checker):
    data, error, message = bad_data()[name]
    model, guide = make_model()
    with pytest.raises(error, match=message):
        train(model, guide, data)


@pytest.mark.parametrize(("labels", "error", "message"), [
    (torch.full((60,), 2), ValueError, "between 0 and 1"),
    (torch.full((60,), -1), ValueError, "between 0 and 1"),
    (torch.zeros(60), TypeError, "integer dtype"),
    (torch.zeros(60, 1, dtype=torch.long), ValueError, "one label per row"),
])  # fmt: skip
def test_bad_labels_are_refused(labels, error, message):
    model, guide = make_model(likelihood=CategoricalLikelihood(), num_outputs=2)
    with pytest.raises(error, match=message):
        train(model, guide, (make_data()[0], labels))


def test_targets_with_and_without_a_column_axis_are_the_same():
    x, y = make_data()
    with_axis, without = make_model(), make_model()
    train(*with_axis, (x, y))
    train(*without, (x, y.squeeze(-1)))
    assert_same(module_tensors(*with_axis), module_tensors(*without))


def test_the_schedule_of_an_iterable_spans_its_own_batches():
    x, y = make_data(64)

    class Rows(IterableDataset):
        def __iter__(self):
            yield from zip(x, y, strict=True)

    model, guide = make_model()
    loader = DataLoader(Rows(), batch_size=8)
    history = train(model, guide, loader, epochs=4, num_data=64, batch_size=512)
    rates = history.column("learning_rate")
    assert max(rates) > 5e-3
    assert rates[-1] < 1e-6


def test_a_shuffling_loader_gives_all_processes_the_same_batches():
    x, y = make_data(16)
    model, _ = make_model()
    orders = []
    for rank in (0, 1):
        torch.manual_seed(rank)  # as `fit` does for the draws
        loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
        data = LoaderData(loader, None, model, torch.device("cpu"), rank, 2)
        orders.append([batch[0] for batch in data.epoch(torch.Generator().manual_seed(3), 0)])
    seen = torch.cat([batch for order in orders for batch in order])
    assert_close(seen.sort(0).values, x.sort(0).values)


def test_iterators_and_empty_loaders_are_refused():
    with pytest.raises(TypeError, match="iterable anew for each epoch"):
        train(*make_model(), iter([make_data()]), num_data=60)
    model, cpu = make_model()[0], torch.device("cpu")
    small, empty = LoaderData([make_data(1)], 1, model, cpu, 0, 2), LoaderData([], 1, model, cpu)
    with pytest.raises(ValueError, match="every batch needs a row"):
        list(small.epoch(torch.Generator(), 0))
    with pytest.raises(ValueError, match="yields no batch"):
        list(empty.epoch(torch.Generator(), 0))


def test_two_batches_in_a_list_are_batches():
    x, y = make_data(40)
    model, guide = make_model()
    batches = [(x[:20], y[:20]), (x[20:], y[20:])]
    assert len(train(model, guide, batches, num_data=40).rows) == 3
