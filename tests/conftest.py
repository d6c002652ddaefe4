"""Every test runs with shapes checked, in float64, with a fixed seed and warnings as errors."""

import signal
from collections.abc import Iterator

import jaxtyping
import pyro
import pytest
import torch

# Before anything imports the package: annotated shapes and types are executed in tests.
# An int is accepted where a float is asked for, as Python's typing has it (PEP 484).
jaxtyping.install_import_hook(
    "pyro_dak", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
)
torch.set_num_threads(1)
# A shell starts what runs in the background with Ctrl-C ignored; tests send it to themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Let pass what the type checker says of Pyro's own annotations; all else stays an error."""
    category = "beartype.roar.BeartypeDecorHintPep585DeprecationWarning"
    config.addinivalue_line("filterwarnings", f"ignore::{category}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the files that take longest, so that no worker waits for them at the end."""
    items.sort(key=lambda item: "tests/training/" not in item.nodeid)


@pytest.fixture(autouse=True)
def _reproducible() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    pyro.enable_validation(True)
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture
def no_type_checker() -> Iterator[None]:
    """The package as users meet it: wrong kinds of arguments reach our own checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
