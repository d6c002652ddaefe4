"""Read damaged and hostile copies of a model, a checkpoint and an estimator."""

from pathlib import Path

import numpy
from tqdm import tqdm

from pyro_dak import DAKRegressor, load, save
from pyro_dak.training.checkpoint import Checkpoints
from tests.attack import Outcome
from tests.hostile import attempt, hostile_copies
from tests.training.runs import make_model, train

__all__ = ["attack"]


def _resume(path: Path) -> None:
    try:
        train(*make_model(), resume_from=path)
    except ValueError as error:  # it says that settings or data differ
        if "was made with other" not in str(error):
            raise


def attack(count: int, seed: int, folder: Path) -> Outcome:
    """So many damaged directories in all, each refused in our own words or read."""
    model = save(*make_model(), folder / "model")
    train(*make_model(), checkpoint_dir=folder / "checkpoints")
    checkpoint = Checkpoints.found(folder / "checkpoints")[-1]
    estimator = folder / "estimator"
    rng = numpy.random.default_rng(0)
    regressor = DAKRegressor(epochs=2, hidden_layer_sizes=(8,), num_units=2, progress=False)
    regressor.fit(rng.normal(size=(60, 3)), rng.normal(size=60)).save(estimator)
    readers = {
        model: load,
        checkpoint: _resume,
        estimator: DAKRegressor.load,
    }
    failures = []
    with tqdm(total=count, desc="files") as bar:
        for number, (source, read_fn) in enumerate(readers.items()):
            share = count // 3 + (number < count % 3)
            scratch = folder / f"hostile-{number}"
            scratch.mkdir()
            for name, directory in hostile_copies(source, scratch, seed + number, share):
                if problem := attempt(read_fn, directory):
                    failures.append(f"{source.name} {name}: {problem}"[:500])
                bar.update()
    return Outcome(count, failures)
