import pytest
import torch


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)
