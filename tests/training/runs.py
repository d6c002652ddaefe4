"""Small runs of `fit` that the tests of training share."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from pyro_dak import DAK, MeanFieldGuide, fit
from pyro_dak.training.checkpoint import module_tensors
from pyro_dak.training.plan import History

SCRIPT = Path(__file__).parents[1] / "scripts" / "train.py"

# Another optimiser for the last layer than for the network.
OWN_OPTIMIZER = {
    "optimizer": "adadelta",
    "learning_rate": 1.0,
    "last_layer_optimizer": "adam",
    "last_layer_learning_rate": 1e-2,
}


def make_data(num_rows: int = 60) -> tuple[Tensor, Tensor]:
    x = torch.randn(num_rows, 3, generator=torch.Generator().manual_seed(0))
    return x, x.sin().sum(-1, keepdim=True)


def make_model(**options: object) -> tuple[DAK, MeanFieldGuide]:
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
    model = DAK(network, 4, **({"num_units": 3, "level": 3} | options))
    return model, MeanFieldGuide(model)


def train(model: DAK, guide: nn.Module, data: object = None, **options: object) -> History:
    data = make_data() if data is None else data
    settings = {"epochs": 3, "batch_size": 20, "seed": 0, "progress": False, "accelerator": "cpu"}
    return fit(model, guide, data, **(settings | options))


def parameters_after(**options: object) -> dict[str, Tensor]:
    model, guide = make_model()
    train(model, guide, **options)
    return module_tensors(model, guide)


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def run_script(out: Path, *arguments: object, launch: tuple[str, ...] = ()) -> Any:
    """Run `scripts/train.py` in a process of its own, or in several with a launcher."""
    command = [*(launch or (sys.executable,)), str(SCRIPT), str(out), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def edit_config(directory: Path, edit_fn: Any) -> None:
    """Change the configuration of a saved model, with checksums that fit, as an author could."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    edit_fn(config)
    path.write_text(json.dumps(config))
    write_sums(directory)


def edit_tensors(path: Path, edit_fn: Any) -> None:
    """Change a file of tensors of a saved model, likewise."""
    tensors = safetensors.torch.load_file(path)
    edit_fn(tensors)
    safetensors.torch.save_file(tensors, path)
    write_sums(path.parent)


def write_sums(directory: Path) -> None:
    files = [path for path in directory.iterdir() if path.name != "SHA256SUMS"]
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (directory / "SHA256SUMS").write_text("".join(lines))
