"""Rows of Parquet files: every row once in an epoch, in whatever parts, and resumed bit for bit."""

import itertools
import math

import numpy as np
import pandas as pd
import pyarrow
import pytest
import torch
from pyarrow import parquet
from torch.testing import assert_close

from pyro_dak import CategoricalLikelihood, ClosedFormELBO, ParquetRows, fit, predict
from pyro_dak.training.checkpoint import module_tensors
from pyro_dak.training.data import ParquetData
from pyro_dak.training.loop import DAKLoss, Run
from pyro_dak.training.parquet import check_alike, row_groups
from tests.training.runs import assert_same, make_model, train

CPU = torch.device("cpu")
SIZES, STARTS = (101, 64, 7, 130), (0, 101, 165, 172)


def columns_of(num_rows, start=0, seed=0):
    """Rows that one can tell apart: the first column is the number of the row."""
    rng = np.random.default_rng(seed + start)
    others = rng.normal(3.0, 5.0, (2, num_rows))
    number = np.arange(start, start + num_rows)
    y = np.sin(number / 40) + others[0] / 5
    return {"number": number, "a": others[0], "b": others[1], "y": y}


def write(path, columns, group_rows=20):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path, row_group_size=group_rows)


@pytest.fixture
def folder(tmp_path):
    """Four files with row groups of different sizes, 302 rows."""
    start = 0
    for index, size in enumerate(SIZES):
        write(tmp_path / "rows" / f"{index}.parquet", columns_of(size, start), 10 + 9 * index)
        start += size
    return tmp_path / "rows"


def numbers(rows, x):
    """The numbers of standardised rows."""
    scales = rows.scales
    return (x[:, 0] * scales.x_scale[0] + scales.x_mean[0]).round().long()


def epoch(rows, batch_size, rank=0, world_size=1, seed=0, start=0):
    """The batches of an epoch, and their numbers of rows."""
    data = ParquetData(rows, make_model()[0], batch_size, CPU, rank, world_size)
    return [*data.epoch(torch.Generator().manual_seed(seed), start)]


@pytest.mark.parametrize("buffer_rows", [10**6, 90])
@pytest.mark.parametrize(("shards", "world_size"), [(None, 1), (None, 3), (4, 1), (4, 2), (6, 3)])
def test_every_row_comes_once_in_as_many_batches_for_each_process(
    folder, shards, world_size, buffer_rows
):
    num_bytes = 16 * buffer_rows * (shards or 1)
    rows = ParquetRows(folder, "y", shards=shards, buffer_bytes=num_bytes)
    epochs = [epoch(rows, 23, rank, world_size) for rank in range(world_size)]
    seen = torch.cat([numbers(rows, x) for own in epochs for x, _, _ in own])
    assert seen.sort().values.tolist() == list(range(302))
    assert [len(own) for own in epochs] == [14] * world_size  # ceil(302 / 23)
    # The remainder: the parts of an epoch differ by a row, and so do the batches of each.
    parts = shards or world_size
    totals = [sum(len(x) for x, _, _ in own) for own in epochs]
    assert max(totals) - min(totals) <= parts // world_size
    sizes = {len(x) for own in epochs for x, _, _ in own}
    assert max(sizes) - min(sizes) <= parts // world_size
    # Averaged over steps and processes, each row counts once.
    assert {batch[2] for own in epochs for batch in own} == {14.0 * world_size}


def test_with_the_same_parts_batches_are_the_same_for_any_number_of_processes(folder):
    rows = ParquetRows(folder, "y", shards=4)
    alone, *pair = (epoch(rows, 23, *share) for share in ((0, 1), (0, 2), (1, 2)))
    for batch, *own in zip(alone, *pair, strict=True):
        together = torch.cat([numbers(rows, x) for x, _, _ in own])
        assert together.sort().values.equal(numbers(rows, batch[0]).sort().values)


def test_targets_stay_with_their_inputs(folder):
    rows = ParquetRows(folder, "y")
    columns = [columns_of(size, start) for size, start in zip(SIZES, STARTS, strict=True)]
    expected = np.concatenate([part["y"] for part in columns])
    for x, y, _ in epoch(rows, 23):
        assert_close(rows.original(y).squeeze(-1), torch.from_numpy(expected)[numbers(rows, x)])


@pytest.mark.parametrize("start", [0, 1, 6, 13])
def test_an_epoch_goes_on_where_it_was_left_and_reads_no_more_than_it_must(
    folder, start, monkeypatch
):
    rows = ParquetRows(folder, "y", shards=2, buffer_bytes=2 * 16 * 90)
    whole = epoch(rows, 23)
    read, values = [], ParquetRows.values
    monkeypatch.setattr(ParquetRows, "values", lambda *a: read.append(a[1]) or values(*a))
    rest = epoch(rows, 23, start=start)
    for first, second in zip(whole[start:], rest, strict=True):
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])
    # What is left, and what is read twice: groups at the cuts, and the block of the first batch.
    assert sum(group.num_rows for group in read) < 302 * (1 - start / 14) + 90 + 6 * 37


def test_a_batch_mixes_row_groups_and_epochs_differ(folder):
    rows = ParquetRows(folder, "y", buffer_bytes=16 * 100)
    first, again, other = (epoch(rows, 30, seed=seed)[0][0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    bounds = [group.first for group in rows.groups]
    groups = np.searchsorted(bounds, numbers(rows, first).numpy(), side="right")
    assert len(set(groups)) >= 3


def test_the_buffer_is_never_exceeded(folder, monkeypatch):
    rows = ParquetRows(folder, "y", buffer_bytes=16 * 90)
    blocks, load = [], ParquetRows._loaded
    monkeypatch.setattr(
        ParquetRows, "_loaded", lambda *args: blocks.append(args[3] - args[2]) or load(*args)
    )
    epoch(rows, 23)
    # 14 batches in ceil(302 / 90) blocks: a block may have a batch more than its share.
    assert len(blocks) == 4
    assert max(blocks) <= 90 + 23


def test_scales_are_those_of_all_rows_and_take_one_pass(folder, monkeypatch):
    parts = [columns_of(size, start) for size, start in zip(SIZES, STARTS, strict=True)]
    rows, passes, values = ParquetRows(folder, "y"), [], ParquetRows.values
    monkeypatch.setattr(ParquetRows, "values", lambda *a: passes.append(a[1]) or values(*a))
    scales = rows.scales
    rows.sample(torch.float64)
    assert len(passes) == len(rows.groups)
    for index, name in enumerate(("number", "a", "b")):
        column = np.concatenate([part[name] for part in parts])
        np.testing.assert_allclose(scales.x_mean[index], column.mean(), rtol=1e-12)
        np.testing.assert_allclose(scales.x_scale[index], column.std(), rtol=1e-12)
    y = np.concatenate([part["y"] for part in parts])
    np.testing.assert_allclose([*scales.y_mean, *scales.y_scale], [y.mean(), y.std()], rtol=1e-12)


def test_constant_columns_and_large_offsets_have_scales(tmp_path):
    far = 1e9 + np.arange(50.0)
    columns = {"zero": np.zeros(50), "seven": np.full(50, 7.0), "far": far, "y": np.arange(50.0)}
    write(tmp_path / "a.parquet", columns, 8)
    scales = ParquetRows(tmp_path, "y").scales
    np.testing.assert_allclose(scales.x_mean, [0, 7, far.mean()])
    np.testing.assert_allclose(scales.x_scale, [1, 7, np.arange(50).std()])


def test_a_share_is_held_out_by_the_number_of_the_row(folder):
    rows = ParquetRows(folder, "y")
    rest, held_out = rows.split(0.2, seed=3)
    assert rest.scales is rows.scales
    kept, apart = (
        set(numbers(rows, part.read_all(torch.float64)[0]).tolist()) for part in (rest, held_out)
    )
    assert kept | apart == set(range(302))
    assert kept & apart == set()
    assert (rest.num_rows, held_out.num_rows) == (len(kept), len(apart))
    assert abs(len(apart) - 0.2 * 302) < 4 * math.sqrt(302 * 0.2 * 0.8)
    assert {*numbers(rows, rest.sample(torch.float64)[0]).tolist()} == kept
    seen = torch.cat([numbers(rows, x) for x, _, _ in epoch(rest, 23)])
    assert sorted(seen.tolist()) == sorted(kept)
    smaller = rest.split(0.2, seed=3)[1]  # a part of a part, by the same seed
    assert {*numbers(rows, smaller.read_all(torch.float64)[0]).tolist()} < kept
    assert abs(smaller.num_rows - 0.2 * len(kept)) < 4 * math.sqrt(len(kept) * 0.2 * 0.8)


def test_held_out_rows_are_independent_of_seed_and_place():
    """Over 20,000 rows: the share in every stretch, and the share that two seeds have in common."""
    from pyro_dak.training.parquet import _Choice

    row = np.arange(20_000)
    first, second = (_Choice(seed, 0.0, 0.3).of(row) for seed in (0, 1))
    error = math.sqrt(0.3 * 0.7 / 2000)
    assert all(abs(part.mean() - 0.3) < 4 * error for part in first.reshape(10, -1))
    assert abs((first & second).mean() - 0.09) < 4 * math.sqrt(0.09 * 0.91 / 20_000)


def test_whole_batches_give_the_weights_that_tensors_give(folder):
    rows = ParquetRows(folder, "y")
    x, y = rows.read_all(torch.float64)
    results = []
    for data in (rows, (x, y)):
        model, guide = make_model()
        train(model, guide, data, batch_size=302)
        results.append(
            {k: v for k, v in module_tensors(model, guide).items() if "novelty" not in k}
        )
    for name, tensor in results[0].items():
        assert_close(results[1][name], tensor, atol=1e-9, rtol=1e-9, msg=name)


@pytest.mark.parametrize(("shards", "world_size"), [(1, 1), (4, 2)])
def test_the_mean_gradient_of_the_steps_is_that_of_the_bound(folder, shards, world_size):
    rows = ParquetRows(folder, "y", shards=shards)
    x, y = rows.read_all(torch.float64)
    model, guide = make_model(scaling="none", bounds=(-1.0, 1.0))
    loss = DAKLoss(model, guide, ClosedFormELBO())
    bound = -ClosedFormELBO().terms(model, guide, x, y).elbo / 302
    whole = torch.autograd.grad(bound, [*loss.parameters()], allow_unused=True)
    batches = [batch for rank in range(world_size) for batch in epoch(rows, 40, rank, world_size)]
    mean = sum(loss(*batch, 302)[0] for batch in batches) / len(batches)
    found = torch.autograd.grad(mean, [*loss.parameters()], allow_unused=True)
    for own, expected in zip(found, whole, strict=True):
        assert_close(own, expected)


@pytest.mark.parametrize("kind", ["mean_field", "natural"])
def test_a_run_that_was_stopped_in_an_epoch_goes_on_bit_for_bit(
    folder, tmp_path, monkeypatch, kind
):
    from pyro_dak import NaturalGuide

    def run(**options):
        model, guide = make_model()
        guide = NaturalGuide(model) if kind == "natural" else guide
        rows = ParquetRows(folder, "y", buffer_bytes=16 * 90)
        train(model, guide, rows, batch_size=30, validation=0.1, **options)
        return module_tensors(model, guide)

    whole, step = run(), Run.train_step
    checkpoints = {"checkpoint_dir": tmp_path / "checkpoints"}

    def stopping(self, *arguments):
        step(self, *arguments)
        if self.step == 13:
            raise_interrupt()

    def raise_interrupt():
        import os
        import signal

        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Run, "train_step", stopping)
    with pytest.raises(KeyboardInterrupt, match="after step 13"):
        run(**checkpoints)
    monkeypatch.setattr(Run, "train_step", step)
    resumed = run(resume_from=tmp_path / "checkpoints", **checkpoints)
    assert_same(resumed, whole)


def test_other_files_and_another_order_are_refused_when_a_run_goes_on(folder, tmp_path):
    options = {"checkpoint_dir": tmp_path / "checkpoints", "batch_size": 60}
    train(*make_model(), ParquetRows(folder, "y"), **options)
    options |= {"resume_from": tmp_path / "checkpoints"}
    with pytest.raises(ValueError, match=r"other data .shards: 1 then, 2 now"):
        train(*make_model(), ParquetRows(folder, "y", shards=2), **options)
    write(folder / "2.parquet", columns_of(7, 165, seed=9), 28)
    with pytest.raises(ValueError, match=r"other values of [xy]"):
        train(*make_model(), ParquetRows(folder, "y"), **options)


def test_classes_are_labels_and_predictions_come_from_files_and_frames(tmp_path):
    columns = columns_of(90)
    columns["y"] = (columns["a"] > 3).astype(np.int16)
    write(tmp_path / "rows" / "a.parquet", columns)
    rows = ParquetRows(tmp_path / "rows", "y")
    assert rows.scales.y_scale == [1.0]
    model, guide = make_model(likelihood=CategoricalLikelihood(), num_outputs=2)
    history = train(model, guide, rows, epochs=15, validation=0.2)
    assert history.rows[-1]["val_accuracy"] > 0.8
    from_files = predict(model, guide, rows).probs
    assert_close(predict(model, guide, rows.inputs(columns)).probs, from_files)
    assert_close(predict(model, guide, rows.read_all(torch.float64)[0]).probs, from_files)


def test_missing_targets_count_nothing_where_they_are_allowed(tmp_path):
    columns = columns_of(60)
    columns["y"][::3] = np.nan
    write(tmp_path / "a.parquet", columns)
    rows = ParquetRows(tmp_path, "y")
    np.testing.assert_allclose(rows.scales.y_mean, np.nanmean(columns["y"]))
    with pytest.raises(ValueError, match="NaN"):
        train(*make_model(), rows)
    train(*make_model(), rows, missing="nan")


def test_folders_name_columns_and_lists_keep_their_order(tmp_path):
    for index, year in enumerate((2020, 2021)):
        write(tmp_path / f"year={year}" / "a.parquet", columns_of(10, 10 * index))
    rows = ParquetRows(tmp_path, "y")
    assert rows.columns == ["number", "a", "b", "year"]
    assert {*rows.read_all(torch.float64)[0][:, 3].tolist()} == {-1.0, 1.0}
    files = [tmp_path / f"year={year}" / "a.parquet" for year in (2020, 2021)]
    listed = ParquetRows(files, ["y", "b"], ["number", "a"])
    assert listed.num_rows == 20
    assert [y.shape for _, y in listed] == [(5, 2)] * 0 or all(y.shape[1] == 2 for _, y in listed)


def bad_rows(folder, tmp_path):
    write(tmp_path / "text" / "a.parquet", columns_of(5) | {"town": ["Ulm"] * 5})
    write(tmp_path / "gap" / "a.parquet", columns_of(50) | {"a": [None] + [1.0] * 49})
    write(tmp_path / "none" / "a.parquet", columns_of(0))
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.parquet").write_text("no Parquet")
    return {
        "no folder": (lambda: ParquetRows(tmp_path / "nowhere", "y"), ValueError, "Parquet files"),
        "no files": (lambda: ParquetRows(tmp_path / "empty", "y"), ValueError, "none in"),
        "no rows": (lambda: ParquetRows(tmp_path / "none", "y"), ValueError, "none in"),
        "other files": (lambda: ParquetRows(tmp_path / "other", "y"), ValueError, "Parquet files"),
        "no target": (lambda: ParquetRows(folder, "z"), ValueError, "target"),
        "target twice": (lambda: ParquetRows(folder, "y", ["a", "y"]), ValueError, "different"),
        "text": (lambda: ParquetRows(tmp_path / "text", "y"), TypeError, "column `town`"),
        "gap": (
            lambda: ParquetRows(tmp_path / "gap", "y").scales, ValueError,
            r"column `a` has 1 missing values in .*a.parquet, row group 0, the first in row 0",
        ),
        "buffer": (lambda: ParquetRows(folder, "y", buffer_bytes=99), ValueError, "two largest"),
        "no labels": (
            lambda: ParquetRows(folder, "y", labels=True).scales, ValueError, "whole numbers",
        ),
        "no path": (lambda: ParquetRows(3, "y"), TypeError, "path"),
        "shards": (
            lambda: ParquetData(ParquetRows(folder, "y", shards=3), make_model()[0], 50, CPU, 0, 2),
            ValueError, "multiple of the number of processes, 2; got 3",
        ),
        "batches": (lambda: epoch(ParquetRows(folder, "y", shards=8), 4), ValueError, "a row"),
        "features": (
            lambda: train(*make_model(), ParquetRows(folder, "y"), fixed_features=True),
            ValueError, "not for ParquetRows",
        ),
        "share": (
            lambda: train(*make_model(), ParquetRows(folder, "y"), validation=1.5), ValueError,
            "between 0 and 1",
        ),
    }  # fmt: skip


DIFFERENT = {
    "lacks a column": (lambda c: c.pop("a"), "lacks the column `a`, which the files before it"),
    "lacks the target": (lambda c: c.pop("y"), "lacks the column `y`"),
    "text": (lambda c: c.update(a=["x"] * 30), r"column `a` holds string, and double in the files"),
    "whole": (lambda c: c.update(b=np.arange(30)), "column `b` holds int64, and double"),
    "width": (lambda c: c.update(number=np.arange(30, dtype=np.int32)), "holds int32, and int64"),
    "labels": (lambda c: c.update(y=np.arange(30)), "column `y` holds int64, and double"),
    "more": (lambda c: c.update(z=c["a"]), "has the column `z`, which the files before it lack"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_file_with_other_columns_is_refused_before_any_row_is_read(folder, monkeypatch, name):
    columns, (change, match) = columns_of(30, 302), DIFFERENT[name]
    change(columns)
    write(folder / "3b.parquet", columns)
    write(folder / "4.parquet", columns_of(30, 332))
    monkeypatch.setattr(ParquetRows, "table", lambda *_: pytest.fail("a row was read"))
    with pytest.raises(ValueError, match=rf"rows/3b\.parquet: .*{match}"):
        ParquetRows(folder, "y")
    with pytest.raises(ValueError, match=r"rows/3b\.parquet"):  # in whatever order they are listed
        ParquetRows([folder / f"{n}.parquet" for n in ("4", "3b", "0")], "y")
    others = [n for n in ("number", "a", "b") if f"`{n}`" not in match]
    if "`y`" not in match and "int32" not in match:  # what is left out may differ
        assert ParquetRows(folder, "y", others).num_rows == 362


def test_files_may_store_the_same_values_otherwise(tmp_path):
    columns = columns_of(20)
    text = pyarrow.array(["x"] * 20)
    write(tmp_path / "0.parquet", columns | {"t": text})
    write(tmp_path / "1.parquet", dict(reversed([*columns.items()])) | {"t": pyarrow.nulls(20)})
    write(tmp_path / "2.parquet", columns | {"t": text.dictionary_encode()})
    write(tmp_path / "3.parquet", columns | {"t": text.cast(pyarrow.large_string())})
    rows = ParquetRows(tmp_path, "y", ["number", "a", "b"])
    x, _ = rows.read_all(torch.float64)
    assert_close(x[:20], x[20:40])
    groups, schema = row_groups(tmp_path)
    check_alike(groups, schema)
    read = [group.fragment.to_table(schema=schema)["t"].to_pylist() for group in groups]
    assert read == [["x"] * 20, [None] * 20, ["x"] * 20, ["x"] * 20]


def test_what_a_data_frame_is_indexed_by_is_no_column(tmp_path):
    frame = pd.DataFrame(columns_of(40))
    part = frame[frame["number"] % 5 > 1]  # whose index is stored, unlike 0, 1, ...
    for number, table in enumerate([part, frame, part.rename_axis("place"), frame]):
        table.to_parquet(tmp_path / f"{number}.parquet")
    rows = ParquetRows(tmp_path, "y")
    assert rows.columns == ["number", "a", "b"]
    x, _ = rows.read_all(torch.float64)
    assert numbers(rows, x).tolist() == 2 * [*part["number"], *range(40)]
    with pytest.raises(ValueError, match="`columns` must be one of"):
        ParquetRows(tmp_path / "2.parquet", "y", ["a", "place"])


def test_what_cannot_be_read_is_refused_in_so_many_words(folder, tmp_path, no_type_checker):
    for name, (call, error, match) in bad_rows(folder, tmp_path).items():
        with pytest.raises(error, match=match):
            print(name, call())


def test_many_rows_are_sampled_evenly(tmp_path, monkeypatch):
    from pyro_dak.training import parquet as module

    monkeypatch.setattr(module, "_SAMPLE_ROWS", 500)
    write(tmp_path / "a.parquet", columns_of(4000), 100)
    rows = ParquetRows(tmp_path, "y")
    seen = numbers(rows, rows.sample(torch.float64)[0])
    assert abs(len(seen) - 500) < 4 * math.sqrt(4000 * 0.125 * 0.875)
    assert len(seen.unique()) == len(seen)
    counts = torch.bincount(seen // 1000, minlength=4)
    assert (counts - 125).abs().max() < 4 * math.sqrt(1000 * 0.125 * 0.875)


def test_at_most_so_many_rows_are_held_out(folder, monkeypatch):
    from pyro_dak.training import parquet as module

    monkeypatch.setattr(module, "_MAX_HELD_OUT", 20)
    model, guide = make_model()
    shown = []
    fit(
        model, guide, ParquetRows(folder, "y"), validation=0.5, epochs=1, progress=False,
        accelerator="cpu", callbacks=[lambda *_: shown.append(model)],
    )  # fmt: skip
    share = ParquetRows(folder, "y").held_out_share(0.5)
    assert share == pytest.approx(20 / 302)


def test_numbers_of_all_kinds_are_read(tmp_path):
    from decimal import Decimal

    columns = {
        "flag": [True, False] * 5,
        "whole": np.arange(10, dtype=np.uint8),
        "price": [Decimal("1.25")] * 5 + [Decimal("2.75")] * 5,
        "half": np.linspace(0, 1, 10, dtype=np.float32),
        "y": np.arange(10.0),
    }
    write(tmp_path / "a.parquet", columns)
    x, _ = ParquetRows(tmp_path, "y").values(ParquetRows(tmp_path, "y").groups[0])
    np.testing.assert_allclose(x[:, 0], [1, 0] * 5)
    np.testing.assert_allclose(x[:, 2], [1.25] * 5 + [2.75] * 5)
    assert [*itertools.chain(x[:, 1])] == list(range(10))
