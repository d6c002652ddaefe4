"""scikit-learn's own checks of estimators, all of them, on both estimators."""

import pytest
import torch
from sklearn.ensemble import RandomForestRegressor
from sklearn.utils.estimator_checks import parametrize_with_checks

from pyro_dak import DAKClassifier, DAKRegressor

# scikit-learn lists this failure for its own estimators that draw rows, such as random forests.
# Rows of weight zero are as none; tests/tables/test_columns.py holds that.
_REASON = (
    "batches and held-out parts are drawn by row, so that a row of weight two is not trained on "
    "as two rows are"
)
EXPECTED_FAILURES = {
    "check_sample_weight_equivalence_on_dense_data": _REASON,
}
SMALL = {
    "hidden_layer_sizes": (16, 16),
    "num_units": 4,
    "level": 3,
    "epochs": 20,
    "batch_size": 64,
    "refit": False,
    "progress": False,
}


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


def test_scikit_learn_expects_the_same_failures_of_its_own_estimators():
    lists = pytest.importorskip("sklearn.utils._test_common.instance_generator")
    of_forests = lists.PER_ESTIMATOR_XFAIL_CHECKS[RandomForestRegressor]
    assert EXPECTED_FAILURES.keys() <= of_forests.keys()


@pytest.mark.usefixtures("no_type_checker")
@parametrize_with_checks(
    [DAKRegressor(**SMALL), DAKClassifier(**SMALL)],
    expected_failed_checks=lambda estimator: EXPECTED_FAILURES,
)
def test_scikit_learn_check(estimator, check):
    check(estimator)
