"""Data of `fit`: tensors and loaders, shares of processes, and what is refused."""

import math

import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from pyro_dak import CategoricalLikelihood, ClosedFormELBO
from pyro_dak.training.checkpoint import module_tensors
from pyro_dak.training.data import LoaderData, ResidentData, data_differences
from pyro_dak.training.loop import DAKLoss
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
        # Averaged over steps and processes, each row counts once, whatever its batch.
        assert {batch[2] for epoch in epochs for batch in epoch} == {6.0 * world_size}


def test_weights_by_row_and_member_come_with_their_rows():
    x, y = torch.arange(10.0).unsqueeze(-1), torch.zeros(10, 1)
    weights = torch.arange(20.0).reshape(2, 10)
    data = ResidentData(x, y, 4, weights=weights)
    assert_close(data.num_data, weights.sum(-1))
    for rows, _, scaled in data.epoch(torch.Generator().manual_seed(0), 0):
        assert_close(scaled, weights[:, rows.flatten().long()] * 3)


def bad_data() -> dict[str, tuple[object, type[Exception], str]]:
    x, y = make_data()
    nan, inf = x.clone(), y.clone()
    nan[3, 1], inf[5] = math.nan, math.inf
    return {
        "nan in x": ((nan, y), ValueError, "1 NaN"),
        "inf in y": ((x, inf), ValueError, "1 infinite"),
        "no rows": ((x[:0], y[:0]), ValueError, "has no rows"),
        "lengths": ((x, y[:-1]), ValueError, "60 and 59 rows"),
        "integers": ((x.long(), y), ValueError, "must fit `feature_extractor`.*int64 on cpu"),
        "complex": ((x.cfloat(), y), TypeError, "dtype of the model.*complex64"),
        "dtype": ((x.float(), y), TypeError, "dtype of the model"),
        "columns": ((x, y.expand(-1, 2)), ValueError, r"shape \(N, 1\)"),
        "no tensor": ((x, [1.0] * 60), TypeError, "must be a torch.Tensor"),
        "one axis": ((x[:, 0], y), ValueError, r"shape \(N, ...\)"),
        "one number as x": ((x[0, 0], y), ValueError, "got 0 and 60 rows"),
        "one number as y": ((x, y[0, 0]), TypeError, "an entry per row; got a single number"),
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


CPU = torch.device("cpu")


def rows_of(num_rows):
    """A data set of so many rows."""
    return TensorDataset(*make_data(num_rows))


class Every(BatchSampler):
    """A batch sampler of one's own: every third row, in batches of two."""

    def __init__(self, num_rows):
        self.num_rows = num_rows

    def __iter__(self):
        rows = range(0, self.num_rows, 3)
        yield from ([*rows[i : i + 2]] for i in range(0, len(rows), 2))

    def __len__(self):
        return -(-len(range(0, self.num_rows, 3)) // 2)


class Sized(IterableDataset):
    """An iterable data set that says how many rows it has."""

    def __len__(self):
        return 50

    def __iter__(self):
        yield from zip(*make_data(50), strict=True)


def loaders():
    """Loaders of 50 rows, with N and R that belong to them."""
    data, first = rows_of(50), range(20)
    return {
        "plain": (DataLoader(data, 8), 50, 50),
        "subset": (DataLoader(data, 8, sampler=SubsetRandomSampler(first)), 20, 20),
        "subset of data": (DataLoader(torch.utils.data.Subset(data, first), 8), 20, 20),
        "weighted": (DataLoader(data, 8, sampler=WeightedRandomSampler([1.0] * 50, 30)), 30, 30),
        "distributed": (DataLoader(data, 8, sampler=DistributedSampler(data, 3, 0)), 17, 17),
        "dropped": (DataLoader(data, 8, drop_last=True), 48, 48),
        "shuffled and dropped": (DataLoader(data, 8, shuffle=True, drop_last=True), 50, 48),
        "a few at random": (
            DataLoader(data, 8, sampler=RandomSampler(data, num_samples=24)),
            50,
            24,
        ),
        "often": (DataLoader(data, 8, sampler=RandomSampler(data, True, 200)), 50, 200),
        "own batches": (DataLoader(data, batch_sampler=Every(50)), 17, 17),
        "listed batches": (DataLoader(data, batch_sampler=[[0, 1, 2], [3]]), 4, 4),
        "iterable": (DataLoader(Sized(), 8), 50, 50),
        "iterable and dropped": (DataLoader(Sized(), 8, drop_last=True), 48, 48),
        "list": ([make_data(8), make_data(3)], 11, 11),
    }


@pytest.mark.parametrize("name", list(loaders()))
def test_the_number_of_rows_is_what_the_loader_yields(name):
    loader, num_data, per_epoch = loaders()[name]
    data = LoaderData(loader, None, make_model()[0], CPU)
    assert (data.num_data, data.rows_per_epoch) == (num_data, per_epoch)
    batches = list(data.epoch(torch.Generator().manual_seed(0), 0))
    assert sum(len(x) for x, _, _ in batches) == per_epoch
    # Averaged over the steps of an epoch, each row counts num_data / per_epoch times.
    assert_close(batches[0][2] / len(batches), num_data / per_epoch)


class Endless(SequentialSampler):
    """A sampler that does not say how many rows it yields."""

    __len__ = None


class Unsized(Every):
    """A batch sampler that does not say how many batches it yields."""

    __len__ = None


@pytest.mark.parametrize(("loader", "reason"), [
    (DataLoader(rows_of(9), 3, sampler=Endless(rows_of(9))), r"its sampler \(Endless\) has no"),
    (DataLoader(rows_of(9), batch_sampler=Unsized(9)), r"its batch sampler \(Unsized\) has no"),
    (DataLoader([make_data(8)], batch_size=None), "the items of its data set are whole batches"),
    (zip, "its data set has no length"),
], ids=["sampler", "batch sampler", "whole batches", "no data set"])  # fmt: skip
def test_the_number_of_rows_is_asked_for_with_the_reason_where_nobody_knows_it(loader, reason):
    class Batches:
        def __iter__(self):
            yield make_data(8)

    loader = Batches() if loader is zip else loader
    with pytest.raises(ValueError, match=f"`num_data` must be given for this loader.*: {reason}"):
        train(*make_model(), loader)


def test_counting_rows_draws_nothing_from_the_generators():
    class Random(Every):
        generator = None

        def __iter__(self):
            yield torch.randperm(self.num_rows, generator=self.generator).tolist()

        def __len__(self):
            return 1

    sampler, (model, _) = Random(20), make_model()
    sampler.generator, own = torch.Generator(), torch.Generator()
    generators = [sampler.generator, own, torch.default_generator]
    before = [generator.get_state() for generator in generators]
    loader = DataLoader(rows_of(20), batch_sampler=sampler, generator=own)
    data = LoaderData(loader, None, model, CPU)
    data.first()
    assert data.num_data == 20
    assert_close([generator.get_state() for generator in generators], before)


def gradient(loss, batches, num_data):
    """The mean over the batches of the gradient of the loss."""
    parts = [loss(*batch, num_data)[0] for batch in batches]
    return torch.autograd.grad(sum(parts) / len(parts), [*loss.parameters()], allow_unused=True)


@pytest.mark.parametrize("kind", ["tensors", "loader", "two processes"])
def test_the_mean_gradient_of_the_steps_is_that_of_the_bound(kind):
    x, y = make_data(129)
    model, guide = make_model(scaling="none", bounds=(-1.0, 1.0))
    loss = DAKLoss(model, guide, ClosedFormELBO())
    bound = -ClosedFormELBO().terms(model, guide, x, y).elbo / 129
    whole = torch.autograd.grad(bound, [*loss.parameters()], allow_unused=True)
    if kind == "tensors":
        parts = [ResidentData(x, y, 40)]
    elif kind == "loader":
        parts = [LoaderData(DataLoader(TensorDataset(x, y), 64), None, model, CPU)]
    else:
        loader = DataLoader(TensorDataset(x, y), 50)
        parts = [LoaderData(loader, None, model, CPU, rank, 2) for rank in range(2)]
    batches = [batch for part in parts for batch in part.epoch(torch.Generator(), 0)]
    for found, expected in zip(gradient(loss, batches, 129), whole, strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("objective", ["closed_form", "local"])
@pytest.mark.parametrize("batch_size", [64, 50, 129])
def test_a_loader_and_its_rows_as_tensors_have_the_same_bound(batch_size, objective):
    x, y = make_data(129)
    rows = []
    for data in ((x, y), DataLoader(TensorDataset(x, y), batch_size)):
        model, guide = make_model(scaling="none", bounds=(-1.0, 1.0))
        with torch.no_grad():  # of no width, so that all draws are the same
            for site in ("z", "mu"):
                getattr(guide, f"{site}_log_scale").fill_(-30.0)
        rates = {"learning_rate": 1e-30, "last_layer_learning_rate": None}
        options = {"batch_size": batch_size, "objective": objective} | rates
        history = train(model, guide, data, epochs=1, **options)
        terms = ClosedFormELBO().terms(model, guide, x, y)
        rows.append(history.rows[0])
        assert_close(rows[-1]["elbo"], terms.elbo.item())
    assert_close(rows[0]["elbo_per_datum"], rows[1]["elbo_per_datum"])


def test_a_loader_over_some_rows_gives_the_posterior_of_these():
    x, y = make_data(200)
    chosen = torch.randperm(200)[:40]
    options = {"epochs": 30, "batch_size": 40, "seed": 0}
    loader = DataLoader(TensorDataset(x, y), 40, sampler=SubsetRandomSampler(chosen))
    results = []
    for data in ((x[chosen], y[chosen]), loader):
        model, guide = make_model()
        history = train(model, guide, data, **options)
        results.append((history.rows[-1]["elbo"], guide.z_log_scale.detach()))
    assert_close(results[1], results[0])


class Growing:
    """Batches of ten rows, one more in each pass; the first pass is a look at a first batch."""

    def __init__(self):
        self.num_batches = 0

    def __iter__(self):
        self.num_batches += 1
        yield from [make_data(10)] * max(1, self.num_batches - 1)

    @property
    def dataset(self):
        return range(10)


def test_a_loader_that_changes_between_epochs_is_told():
    data = Growing()
    with pytest.raises(
        ValueError, match=r"an epoch of `data` had 20 rows in 2 batches, where 10.*num_data"
    ):
        train(*make_model(), data)
    data.num_batches = 0
    message = "had 20 rows in 2 batches, where 10 rows in 1 batches were expected.* 0.5 times"
    with pytest.warns(UserWarning, match=message) as told:
        train(*make_model(), data, num_data=10, epochs=4)
    assert len(told) == 1


def test_several_processes_need_the_same_batches_in_each():
    data = rows_of(20)
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, 2, 0))
    with pytest.raises(ValueError, match=r"the same batches in every process.*DistributedSampler"):
        LoaderData(loader, None, make_model()[0], CPU, 0, 2)


def test_fixed_features_count_the_rows_that_they_have():
    loader = DataLoader(rows_of(50), 8, sampler=SubsetRandomSampler(range(20)))
    model, guide = make_model()
    with pytest.raises(ValueError, match=r"rows that `data` yields.*: 20; got 50"):
        train(model, guide, loader, fixed_features=True, num_data=50)
    train(model, guide, loader, fixed_features=True, num_data=20)


@pytest.mark.parametrize("value", [10**400, "1.0", None, [], float("nan"), 2.0])
def test_a_fingerprint_of_other_values_differs_whatever_they_are(value):
    now = {"values of x": [1.0, 0.5]}
    assert list(data_differences({"values of x": [value, 0.5]}, now)) == ["other values of x"]
    assert list(data_differences({"values of x": [1.0, 0.5]}, now)) == []
