"""Sums of terms: exact Gaussian processes, the fixed point of classes, and the choice of pairs."""

import itertools

import numpy as np
import pytest
import torch

from pyro_dak.additive.quadrature import expected_sigmoid
from pyro_dak.tables.shapes import Rows, choose_pairs, fit_classes, fit_numbers
from pyro_dak.tables.terms import Column, NumberTerm


def gridded(num_rows, num_columns=2, seed=0):
    """Columns whose values all are knots, so that nothing lies between knots."""
    rng = np.random.default_rng(seed)
    return [rng.choice(np.arange(9.0), num_rows) for _ in range(num_columns)]


def kernel(term, x, theta):
    """The covariance of a term at values x, without centring, by the formula of its docstring."""
    a, length, b, smooth, c = np.exp(theta)
    u = term.hats.ranks[np.searchsorted(term.hats.knots, x)]
    z = (x - term.loc) / term.scale
    d = np.sqrt(3) * np.abs(z[:, None] - z) / smooth
    rough = a**2 * np.exp(-np.abs(u[:, None] - u) / length)
    return rough + b**2 * (1 + d) * np.exp(-d) + c**2 * np.outer(z, z)


def test_posterior_is_that_of_the_exact_additive_process_with_a_flat_intercept():
    columns = gridded(40)
    y = np.sin(columns[0]) + 0.1 * columns[1] + 0.2 * np.random.default_rng(1).normal(size=40)
    y = (y - y.mean()) / y.std()
    terms = [NumberTerm.of(j, column, np.ones(40), 31) for j, column in enumerate(columns)]
    posterior, noise = fit_numbers(Rows(columns, np.ones(40)), y, terms)
    mean, var = posterior.moments(columns)
    thetas = posterior.own_theta()
    K = sum(kernel(t, x, o) for t, x, o in zip(terms, columns, thetas, strict=True))
    far = 1e3  # the variance of an intercept that is as good as flat
    full = K + far
    gain = full @ np.linalg.inv(full + noise**2 * np.eye(40))
    np.testing.assert_allclose(mean[:, 0], gain @ y, atol=1e-4)
    np.testing.assert_allclose(var[:, 0], np.diag(full - gain @ full), atol=1e-4)


def test_rows_of_weight_two_are_two_rows():
    columns = gridded(30)
    y = np.cos(columns[0])
    y = y - y.mean()
    weights = np.random.default_rng(2).choice([1, 2], 30)
    y = y - weights @ y / weights.sum()

    def fitted(columns, y, weights):
        terms = [NumberTerm.of(j, column, weights, 15) for j, column in enumerate(columns)]
        return fit_numbers(Rows(columns, weights), y, terms)[0]

    one = fitted(columns, y, weights.astype(float))
    repeated = [np.repeat(column, weights) for column in columns]
    two = fitted(repeated, np.repeat(y, weights), np.ones(weights.sum()))
    np.testing.assert_array_equal(one.theta, two.theta)
    np.testing.assert_allclose(one.mean, two.mean, atol=1e-9)


def test_chunks_of_rows_add_up(monkeypatch):
    columns = gridded(50)
    y = np.sin(columns[0])
    y = y - y.mean()
    rows = Rows(columns, np.ones(50))
    terms = [NumberTerm.of(j, column, rows.weights, 15) for j, column in enumerate(columns)]
    whole = fit_numbers(rows, y, terms)[0]
    monkeypatch.setattr("pyro_dak.tables.shapes._CHUNK", 7)
    parts = fit_numbers(rows, y, terms)[0]
    np.testing.assert_allclose(whole.mean, parts.mean, atol=1e-8)
    np.testing.assert_allclose(whole.moments(columns), parts.moments(columns), atol=1e-8)


def test_classes_end_where_the_expected_gradient_is_that_of_the_prior():
    """At the optimum of a normal q, sum phi^T E[dlog p / df] = C^{-1} m."""
    columns = gridded(80, 1)
    rng = np.random.default_rng(3)
    labels = (np.sin(columns[0]) + rng.logistic(size=80) > 0).astype(np.int64)
    term = NumberTerm.of(0, columns[0], np.ones(80), 15)
    q, _ = fit_classes(Rows(columns, np.ones(80)), labels, 2, [term], None)
    mean, var = map(torch.from_numpy, q.moments(columns))
    residual = labels - expected_sigmoid(mean, var)[0].numpy()[:, 0]
    root = term.root(torch.from_numpy(q.theta)).numpy()
    phi = term.design(columns)
    # In whitened weights z, with w = R z, the condition is R^T phi^T residual = z.
    z = np.linalg.lstsq(root, q.mean[0, 1:], rcond=1e-12)[0]
    np.testing.assert_allclose(root.T @ (phi.T @ residual), z, atol=2e-3)


def test_classes_are_invariant_to_their_order():
    columns = gridded(90, 1)
    labels = np.digitize(columns[0] + np.random.default_rng(4).normal(size=90), [3, 6])
    rows, term = Rows(columns, np.ones(90)), NumberTerm.of(0, columns[0], np.ones(90), 15)
    one, _ = fit_classes(rows, labels, 3, [term], None)
    other, _ = fit_classes(rows, 2 - labels, 3, [term], None)
    first, second = (q.moments(columns)[0] for q in (one, other))
    assert np.abs(first - second[:, ::-1]).mean() < 0.3 * first.std()
    assert (first.argmax(1) == second[:, ::-1].argmax(1)).mean() > 0.9


def test_the_pair_that_interacts_is_chosen_first_and_noise_is_not():
    rng = np.random.default_rng(5)
    values = [rng.normal(size=300) for _ in range(5)]
    residual = (values[1] * values[3] + 0.5 * rng.normal(size=300))[:, None]
    residual /= residual.std()
    table = [Column(column) for column in values]
    rows = Rows(values, np.ones(300))
    pairs = list(itertools.combinations(range(5), 2))
    precision = np.full((300, 1), 1 / 0.5**2)
    chosen = choose_pairs(table, rows, residual, precision, pairs, 1, 7)
    assert [term.columns for term in chosen] == [(1, 3)]
    noise = rng.normal(size=(300, 1))
    assert len(choose_pairs(table, rows, noise, np.ones((300, 1)), pairs, 5, 7)) <= 1


@pytest.mark.parametrize("number", [2, 5])
def test_no_more_pairs_are_chosen_than_asked_for(number):
    rng = np.random.default_rng(6)
    values = [rng.normal(size=200) for _ in range(4)]
    f = sum(a * b for a, b in itertools.combinations(values, 2))
    pairs = list(itertools.combinations(range(4), 2))
    rows, table = Rows(values, np.ones(200)), [Column(column) for column in values]
    residual, precision = (f / f.std())[:, None], np.full((200, 1), 9.0)
    assert len(choose_pairs(table, rows, residual, precision, pairs, number, 5)) == number
