import pytest

from tests.models.tables import build, data


@pytest.fixture(scope="module")
def fitted():
    """Every model, trained when first asked for."""
    known = {}

    def get(name):
        if name not in known:
            known[name] = build(name)
            known[name].fit(*data())
        return known[name]

    return get
