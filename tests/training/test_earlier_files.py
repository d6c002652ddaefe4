"""What earlier versions saved still loads and predicts the same."""

import csv
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from pyro_dak import (
    DAK,
    DAKClassifier,
    DAKRegressor,
    LowRankGuide,
    fit,
    load,
    predict,
)
from pyro_dak.tables.cli import app

FILES = Path(__file__).parents[1] / "data" / "version_0_1"
EXPECTED = safetensors.torch.load_file(FILES / "expected.safetensors")


def assert_as_before(name, actual):
    """Equal to the stored prediction up to rounding in the precision it was made in."""
    tolerance = 1e-9 if actual.dtype == torch.float64 else 2e-5
    torch.testing.assert_close(actual, EXPECTED[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["regression", "autoguide"])
def test_a_saved_regression_predicts_as_before(name):
    model, guide = load(FILES / name)
    x = EXPECTED["new"].to(model.unit_scale.dtype)
    prediction = predict(model, guide, x, seed=3)
    assert_as_before(f"{name}.mean", prediction.mean)
    assert_as_before(f"{name}.std", prediction.std)


def test_a_saved_classifier_predicts_as_before():
    model, guide = load(FILES / "classes")
    prediction = predict(model, guide, EXPECTED["new"], method="probit")
    assert_as_before("classes.probs", prediction.probs)


def test_a_checkpoint_resumes_to_the_same_result(tmp_path):
    shutil.copytree(FILES / "checkpoints", tmp_path / "run")
    network = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 6))
    model = DAK(network, 6, num_units=3, level=3).float()
    guide = LowRankGuide(model, rank=2).float()
    history = fit(
        model,
        guide,
        (EXPECTED["x"], EXPECTED["y"]),
        epochs=3,
        batch_size=20,
        learning_rate=5e-3,
        optimizer="sgd",
        last_layer_learning_rate=5e-3,
        last_layer_optimizer="adam",
        validation=0.2,
        patience=3,
        seed=0,
        resume_from=tmp_path / "run",
        progress=False,
    )
    losses = torch.tensor(history.column("loss"), dtype=torch.float64)
    torch.testing.assert_close(losses, EXPECTED["checkpoints.loss"], rtol=1e-5, atol=1e-5)
    prediction = predict(model, guide, EXPECTED["new"])
    assert_as_before("checkpoints.mean", prediction.mean)
    assert_as_before("checkpoints.std", prediction.std)


def test_a_saved_regressor_predicts_as_before():
    regressor = DAKRegressor.load(FILES / "regressor")
    mean, std = regressor.predict(EXPECTED["new"].numpy(), return_std=True)
    assert_as_before("regressor.mean", torch.from_numpy(mean))
    assert_as_before("regressor.std", torch.from_numpy(std))


def test_a_saved_table_classifier_predicts_as_before():
    classifier = DAKClassifier.load(FILES / "classifier")
    probs = classifier.predict_proba(EXPECTED["new"].numpy())
    assert classifier.classes_.tolist() == ["a", "b", "c"]
    assert_as_before("classifier.probs", torch.from_numpy(probs))


def test_a_model_of_the_command_line_predicts_as_before(tmp_path):
    out = tmp_path / "predictions.csv"
    arguments = ["predict", str(FILES / "table"), str(FILES / "table.csv"), "--out", str(out)]
    result = CliRunner().invoke(app, [*arguments, "--quiet"])
    assert result.exit_code == 0, result.output
    then, now = (_numbers(path) for path in (FILES / "table_predictions.csv", out))
    torch.testing.assert_close(now, then, rtol=1e-9, atol=1e-9)


def _numbers(path):
    with open(path, newline="") as file:
        rows = list(csv.reader(file))
    return torch.tensor([[float(value) for value in row] for row in rows[1:]], dtype=torch.float64)
