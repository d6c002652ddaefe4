"""The comparisons of epochs run on a few rows and images."""

import pytest

from experiments import cost
from experiments.runs import read_runs
from tests.experiments.command import invoke


# GPyTorch: torch.jit at import, jitter and float32 on tiny data.
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_epochs_are_timed_for_every_candidate_and_set(tmp_path):
    arguments = ("--dataset", "diabetes", "--rows", 32, "--repetitions", 1, "--out", tmp_path)
    output = invoke(cost.main, *arguments)
    (run,) = read_runs(tmp_path)
    assert list(run["seconds"]) == list(cost.CANDIDATES)
    assert all(value > 0 for value in run["seconds"].values())
    assert "diabetes" in output
    row = (tmp_path / "table.md").read_text().splitlines()[-1].split("|")
    assert row[1].strip() == "diabetes"
    assert float(row[3]) == 1  # DAK-CF to itself


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_classifiers_are_timed_and_what_they_add_is_counted(tmp_path):
    models = ("--model", "nn", "--model", "nn_svgp", "--model", "dak_mc")
    arguments = ("--dataset", "digits", "--rows", 40, "--repetitions", 1, "--out", tmp_path)
    invoke(cost.main, *arguments, *models)
    (run,) = read_runs(tmp_path)
    assert run["added"]["nn"] == 10 * 65  # a linear output on 64 features
    assert run["added"]["dak_mc"] > 16 * 64 + 2 * 10 * 16 * 63
    assert run["parameters"]["nn"] - run["added"]["nn"] == (
        run["parameters"]["dak_mc"] - run["added"]["dak_mc"]
    )
    assert "| digits | nn |" in (tmp_path / "table.md").read_text()


def test_the_papers_epochs_are_compared_as_multiples_of_its_network():
    config = {"dataset": "mnist", "model": "all", "seed": 0, "rows": 1, "repetitions": 1}
    numbers = {"nn": 2.0, "svdkl": 3.0}
    run = {"config": config, "seconds": numbers, "added": numbers, "parameters": numbers}
    network, svdkl = cost._image_rows([run])
    assert network[-2:] == ["1.00", "1.00"]
    assert svdkl[-2:] == ["1.50", f"{1 + 4.35 / 6.18:.2f}"]
