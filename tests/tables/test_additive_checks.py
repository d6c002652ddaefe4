"""scikit-learn's own checks of estimators, all of them, on both additive estimators."""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from pyro_dak import DAKAdditiveClassifier, DAKAdditiveRegressor


@pytest.mark.usefixtures("no_type_checker")
@parametrize_with_checks([DAKAdditiveRegressor(level=2), DAKAdditiveClassifier(level=2)])
def test_scikit_learn_check(estimator, check):
    check(estimator)
