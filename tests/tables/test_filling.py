"""What stands in place of missing numbers: against a naive loop, and against what is known."""

import json
from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest
import torch

from pyro_dak import DAKRegressor
from pyro_dak.tables import filling
from pyro_dak.tables.filling import Filling, learn_filling, tells_of_target
from pyro_dak.tables.portable import EncodedColumns
from pyro_dak.tables.schema import Columns, encode, learn_columns, with_telling_gaps


def with_gaps(num_rows=400, share=0.2, seed=0):
    """Four columns, of which the last is the sum of the others, without and with gaps."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(num_rows, 3)) * [1.0, 10.0, 0.1] + [0.0, 50.0, -3.0]
    x = np.column_stack([x, x @ [1.0, 0.1, 10.0]])
    return x, np.where(random.uniform(size=x.shape) < share, np.nan, x)


def filled_by_loops(x, new):
    """One regression after the other, one row after the other."""
    D = x.shape[1]
    loc, scale = np.nanmean(x, 0), np.nanstd(x, 0)
    old, rows = ((values - loc) / scale for values in (x, new))
    low, high = np.minimum(0, np.nanmin(old, 0)), np.maximum(0, np.nanmax(old, 0))
    z_old, z_new = np.nan_to_num(old), np.nan_to_num(rows)
    for _ in range(3):
        weights = []
        for j in range(D):
            known = ~np.isnan(old[:, j])
            A = np.delete(z_old[known], j, axis=1)
            rest = np.linalg.inv(A.T @ A + 10 * np.eye(D - 1)) @ A.T @ old[known, j]
            weights.append(np.insert(rest, j, 0.0))
        after = []
        for values, z in ((old, z_old), (rows, z_new)):
            next_z = z.copy()
            for i, j in np.argwhere(np.isnan(values)):
                next_z[i, j] = min(max(z[i] @ weights[j], low[j]), high[j])
            after.append(next_z)
        z_old, z_new = after
    return np.where(np.isnan(new), loc + scale * z_new, new)


def test_it_equals_a_naive_loop():
    (_, x), (_, new) = with_gaps(60), with_gaps(30, 0.4, seed=1)
    found = learn_filling(x)
    np.testing.assert_allclose(found(new), filled_by_loops(x, new), rtol=1e-10)
    np.testing.assert_array_equal(found(new)[~np.isnan(new)], new[~np.isnan(new)])


def test_a_sum_is_found_where_one_of_its_parts_is_missing():
    true, x = with_gaps()
    found, is_missing = learn_filling(x)(x), np.isnan(x)
    scale = true.std(0)
    alone = is_missing & (is_missing.sum(1, keepdims=True) == 1)
    error = np.sqrt(np.square((found - true) / scale)[alone].mean())
    by_means = np.sqrt(np.square((np.nanmean(x, 0) - true) / scale)[alone].mean())
    assert error < 0.45 * by_means


def test_rows_without_numbers_get_means_and_far_ones_stay_in_the_range():
    _, x = with_gaps()
    found = learn_filling(x)
    np.testing.assert_allclose(found(np.full((1, 4), np.nan)), [np.nanmean(x, 0)])
    far = found(np.array([[1e300, np.nan, np.nan, np.nan]]))
    assert far[0, 0] == 1e300
    assert (np.nanmin(x, 0) <= far).all(where=[False, True, True, True])
    assert (far <= np.nanmax(x, 0)).all(where=[False, True, True, True])


def test_there_is_none_without_gaps_for_one_column_and_for_very_many(monkeypatch):
    true, x = with_gaps(50)
    assert learn_filling(true) is None
    assert learn_filling(x[:, :1]) is None
    monkeypatch.setattr(filling, "_MAX_COLUMNS", 3)
    assert learn_filling(x) is None


def test_constant_and_empty_columns_are_harmless():
    _, x = with_gaps(50)
    x = np.column_stack([x, np.full(50, 7.0), np.full(50, np.nan), np.full(50, 1e-300)])
    found = learn_filling(x)(np.full((1, 7), np.nan))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[0, 4:], [7.0, 0.0, 1e-300])


def test_many_rows_are_thinned_out(monkeypatch):
    _, x = with_gaps(100)
    monkeypatch.setattr(filling, "_MAX_ROWS", 50)
    thinned = learn_filling(x)
    monkeypatch.undo()
    assert thinned == learn_filling(x[::2])


def test_the_exported_form_fills_the_same():
    _, x = with_gaps()
    frame = pd.DataFrame(x, columns=list("abcd"))
    columns = learn_columns(frame)
    assert columns.filling is not None
    found = EncodedColumns(columns)(torch.from_numpy(x[:50])).numpy()
    np.testing.assert_allclose(found, encode(frame[:50], columns), rtol=1e-12, atol=1e-12)
    assert Columns.from_json(json.loads(json.dumps(columns.to_json()))) == columns
    older = columns.to_json()
    del older["filling"]
    assert Columns.from_json(older) == replace(columns, filling=None)


@pytest.mark.parametrize(
    "change",
    [
        {"loc": [0.0]},
        {"loc": "abcd"},
        {"scale": [1.0, 1.0, 0.0, 1.0]},
        {"high": [1.0, 1.0, float("nan"), 1.0]},
        {"weights": [[[0.0]]]},
        {"weights": [[1.0], [2.0, 3.0]]},
        {"other": 1},
    ],
)
def test_files_with_other_numbers_are_refused(change):
    columns = learn_columns(pd.DataFrame(with_gaps(50)[1], columns=list("abcd")))
    content = columns.to_json() | {"filling": asdict(columns.filling) | change}
    with pytest.raises(ValueError, match="is not the description of a table"):
        Columns.from_json(content)
    assert isinstance(columns.filling, Filling)


def test_the_estimator_learns_more_from_rows_with_gaps():
    true, x = with_gaps(600, 0.25)
    y = true[:, 3]
    model = DAKRegressor(1, epochs=15, progress=False, random_state=0).fit(x[:500, :3], y[:500])
    assert model.columns_.filling is not None
    other = pd.DataFrame(x[:, :3], columns=list("abc"))
    frame_model = DAKRegressor(1, epochs=15, progress=False, random_state=0)
    frame_model.fit(other[:500], y[:500])
    np.testing.assert_allclose(frame_model.predict(other[500:]), model.predict(x[500:, :3]))


def test_gaps_by_chance_hardly_ever_tell_of_the_target():
    random = np.random.default_rng(0)
    tells = [
        any(tells_of_target(random.uniform(size=(200, 5)) < 0.2, random.normal(size=(200, 2))))
        for _ in range(1000)
    ]
    assert 1 <= sum(tells) <= 25  # about 10 of 1,000 are expected


def test_gaps_that_tell_of_the_target_are_seen():
    random = np.random.default_rng(0)
    y = random.normal(size=(300, 1))
    gaps = random.uniform(size=(300, 3)) < [0.2, 0.2, 0.0]
    gaps[:, 1] |= y[:, 0] > 1
    assert tells_of_target(gaps, y) == [False, True, False]
    assert tells_of_target(gaps, np.full((300, 1), 2.0)) == [False] * 3
    assert tells_of_target(gaps, 1e300 * y)[0] is False


@pytest.mark.parametrize("labels", [False, True])
def test_only_telling_gaps_get_an_indicator(labels):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(300, 2)), random.normal(size=300)
    x[random.uniform(size=300) < 0.2, 0] = np.nan
    x[y > 1, 1] = np.nan
    frame = pd.DataFrame(x, columns=["a", "b"])
    columns = learn_columns(frame)
    y = np.where(y > 1, "high", "low") if labels else y
    found = with_telling_gaps(columns, frame, y, labels)
    assert found == replace(columns, with_missing=["b"])
    complete = learn_columns(frame.fillna(0.0))
    assert with_telling_gaps(complete, frame, y, labels) is complete
