"""Bases and priors of terms, against loops and limits."""

import numpy as np
import pytest
import torch

from pyro_dak.tables.terms import CategoryTerm, Column, Hats, NumberTerm, PairTerm, rank_knots

RNG = np.random.default_rng(0)
N = 60
NUMBERS = np.where(RNG.uniform(size=N) < 0.1, np.nan, RNG.normal(size=N))
FEW = RNG.choice([1.0, 2.0, 5.0], N)
CODES = RNG.choice([0.0, 1.0, 2.0], N)
WEIGHTS = RNG.choice([1.0, 2.0], N)
TABLE = [Column(NUMBERS), Column(FEW), Column(CODES, ["a", "b", "c"])]
COLUMNS = [column.values for column in TABLE]


def terms():
    return {
        "number": NumberTerm.of(0, NUMBERS, WEIGHTS, 7),
        "few": NumberTerm.of(1, FEW, WEIGHTS, 7),
        "category": CategoryTerm.of(2, TABLE[2], WEIGHTS),
        "pair": PairTerm.of((0, 1), TABLE, WEIGHTS, 5),
        "mixed": PairTerm.of((1, 2), TABLE, WEIGHTS, 5),
    }


def theta_of(term):
    return torch.tensor([prior.mean for prior in term.priors]) + 0.3


@pytest.mark.parametrize("name", terms())
def test_root_is_one_of_the_covariance(name):
    term = terms()[name]
    root, covariance = term.root(theta_of(term)), term.covariance(theta_of(term))
    torch.testing.assert_close(root @ root.mT, covariance, rtol=1e-5, atol=1e-5)
    assert covariance.shape == (term.size, term.size)


@pytest.mark.parametrize("name", terms())
def test_terms_have_mean_zero_over_weighted_rows(name):
    term = terms()[name]
    values = term.design(COLUMNS) @ term.root(theta_of(term)).numpy()
    np.testing.assert_allclose(WEIGHTS @ values, 0, atol=1e-12)


def test_pairs_have_mean_zero_over_either_column():
    term = terms()["mixed"]
    root = term.root(theta_of(term)).numpy()
    rows = [np.repeat(FEW, 3), np.tile([0.0, 1.0, 2.0], N)]
    shares = np.repeat(WEIGHTS, 3)[:, None]
    values = term.design([rows[0] * 0, *rows]) @ root
    by_category = [(shares * values)[rows[1] == c].sum(0) for c in range(3)]
    # What is left is one number, the mean over all rows of the table.
    np.testing.assert_allclose(by_category[0], by_category[1], atol=1e-12)
    np.testing.assert_allclose(by_category[0], by_category[2], atol=1e-12)


def test_covariance_of_numbers_is_that_of_the_formula():
    term = terms()["few"]
    a, length, b, smooth, c = np.exp(theta_of(term).numpy())
    knots, ranks = term.hats
    x = (knots - term.loc) / term.scale
    C = np.zeros((4, 4))
    for i in range(3):
        for k in range(3):
            d = np.sqrt(3) * abs(x[i] - x[k]) / smooth
            C[i, k] = a**2 * np.exp(-abs(ranks[i] - ranks[k]) / length)
            C[i, k] += b**2 * (1 + d) * np.exp(-d)
    C[3, 3] = a**2 + b**2 + c**2
    J = np.eye(4) - np.ones((4, 1)) * term.means
    found = term.covariance(theta_of(term)).numpy()
    np.testing.assert_allclose(found[1:, 1:], J @ C @ J.T, rtol=1e-5, atol=1e-6)
    assert found[0, 0] == pytest.approx(c**2)
    np.testing.assert_array_equal(found[0, 1:], 0)


def test_hats_are_linear_interpolation_and_add_up_to_one():
    hats = Hats(np.array([0.0, 1.0, 4.0]), np.array([0.1, 0.5, 0.9]))
    values = np.array([-3.0, 0.0, 0.5, 1.0, 3.0, 4.0, 9.0])
    design = hats.design(values).toarray()
    g = np.array([2.0, 5.0, -1.0, 100.0])
    np.testing.assert_allclose(design @ g, np.interp(values, [0, 1, 4], g[:3]))
    np.testing.assert_allclose(design.sum(1), 1)
    np.testing.assert_array_equal(hats.design(np.array([np.nan])).toarray(), [[0, 0, 0, 1]])


def test_a_row_of_weight_two_gives_the_knots_of_two_rows():
    values = RNG.normal(size=200).round(1)
    weights = RNG.choice([1, 2, 3], 200)
    one = rank_knots(values, weights.astype(float), 15)
    other = rank_knots(np.repeat(values, weights), np.ones(weights.sum()), 15)
    np.testing.assert_allclose(one, other)
    assert len(one[0]) <= 15
    assert one[0][0] == values.min()
    assert one[0][-1] == values.max()


def test_a_value_that_most_rows_have_leaves_knots_for_the_others():
    values = np.concatenate([np.zeros(900), RNG.uniform(1, 2, 100)])
    knots, _ = rank_knots(values, np.ones(1000), 15)
    assert (knots > 1).sum() >= 6


def test_a_category_that_is_not_known_has_the_prior():
    term = terms()["category"]
    unknown = term.design([*COLUMNS[:2], np.array([-1.0])])
    np.testing.assert_array_equal(unknown.toarray(), [[0, 0, 0, 1]])
    assert term.means[-1] == 0


def test_variance_beyond_the_knots_is_that_of_the_increment():
    term = terms()["number"]
    theta = theta_of(term).numpy()
    a, _, b, _, _ = np.exp(theta)
    ends = term.hats.knots[[0, -1]]
    lost = term.lost_variance([np.array([ends[0], ends.mean(), ends[1], np.nan, 1e9])], theta)
    np.testing.assert_allclose(lost[:4], 0, atol=1e-12)
    assert lost[4] == pytest.approx(2 * (a**2 + b**2))


@pytest.mark.parametrize("values", [np.full(N, 3.0), np.full(N, np.nan)], ids=["constant", "empty"])
def test_columns_without_information_have_terms_without_effect(values):
    term = NumberTerm.of(0, values, np.ones(N), 7)
    variance = term.design([values]) @ term.root(theta_of(term)).numpy()
    np.testing.assert_allclose(variance, 0, atol=1e-12)
