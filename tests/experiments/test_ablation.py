"""Each row of the ablation differs from its base in one choice, and all of them run."""

import pytest

from experiments import ablation, mnist, uci
from experiments.runs import read_runs
from models.shared.recipe import Recipe
from tests.experiments.command import invoke

BUDGET = {"epochs": 3, "max_rows": 50}


def test_every_choice_runs_on_a_few_rows(tmp_path):
    options = ("--quick", "--dataset", "wine")
    invoke(ablation.main, *options, "--out", tmp_path)
    runs = read_runs(tmp_path)
    places = {(run["config"]["axis"], run["config"]["value"]) for run in runs}
    assert places == {(axis, v) for axis, values in ablation.AXES.items() for v in values}
    assert (tmp_path / "figures" / "ablation.png").stat().st_size > 0
    table = (tmp_path / "table.md").read_text()
    assert "| wine | M | 255 | dak_cf | 1 | 1 |" in table
    parameters = {place_of(run): run["metrics"]["parameters"] for run in runs}
    # P units have M weights with mean and scale, a scale sigma_p, and D_w weights of the embedding.
    assert parameters["M", 255] - parameters["M", 7] == 16 * 2 * (255 - 7)
    assert parameters["P", 64] - parameters["P", 4] == 60 * (2 * 31 + 1 + 64)


def place_of(run):
    return run["config"]["axis"], run["config"]["value"]


@pytest.mark.parametrize("dataset", ["wine", "mnist"])
@pytest.mark.parametrize(("axis", "value"), [("M", 15), ("P", 4), ("S", 32), ("kernel", "rbf")])
def test_one_choice_differs_from_the_base(dataset, axis, value):
    job = ablation.make_job(dataset, axis, value, 1, BUDGET)
    if dataset == "mnist":
        base = mnist.make_job("mnist", job.model, 1, epochs=3, max_rows=50)
    else:
        base = uci.make_job(dataset, job.model, "best", 1, 5, epochs=3, max_rows=50)
    settings = dict(job.settings)
    assert (settings.pop("axis"), settings.pop("value")) == (axis, value)
    changed = {name for name in settings if settings[name] != base.settings[name]}
    assert changed == {"recipe" if axis == "S" else "options"}
    if axis == "S":
        assert job.recipe == Recipe(**base.settings["recipe"] | {"num_samples_train": 32})
    else:
        name = {"M": "level", "P": "num_units", "kernel": "kernel"}[axis]
        expected = base.settings["options"] | {name: 4 if axis in "MP" else value}
        assert settings["options"] == expected


def test_images_are_tested_too(tmp_path, monkeypatch):
    monkeypatch.setattr(ablation, "IMAGE_SET", "digits")
    monkeypatch.setattr(ablation, "DATASETS", ("digits",))
    monkeypatch.setitem(ablation.BUDGETS, "digits", {"runs": 1, "epochs": 1, "max_rows": 60})
    invoke(ablation.main, "--axis", "P", "--axis", "kernel", "--out", tmp_path)
    table = (tmp_path / "table.md").read_text()
    assert "| digits | P | 64 | dak_mc | 1 | 1 |" in table
    assert "| digits | kernel | matern52 |" in table
    assert not (tmp_path / "checkpoints").exists() or not any((tmp_path / "checkpoints").iterdir())
