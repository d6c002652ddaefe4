"""The UCI experiment: it runs and resumes, no test row leaks, its scores and table are right."""

import pytest
import torch
from torch.testing import assert_close

import models
from experiments import paper, uci
from experiments.datasets import load_regression
from experiments.runs import Job, read_runs
from pyro_dak import GaussianLikelihood
from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.prediction import Prediction
from tests.experiments.command import invoke


def test_uci_runs_end_to_end_and_resumes(tmp_path):
    output = invoke(uci.main, "--quick", "--out", tmp_path)
    assert "4 to make" in output
    run = read_runs(tmp_path)[0]
    assert run["metrics"]["rmse"] > 0
    assert {"experiment", "config", "metrics", "commit"} == set(run) - {"draft"}
    assert run["config"]["recipe"]["epochs"] == 2
    assert "4 of 4 runs are recorded already; 0 to make" in invoke(
        uci.main, "--quick", "--out", tmp_path
    )
    table = (tmp_path / "table.md").read_text()
    assert "| best | diabetes | 64 | dak_cf | 2 |" in table
    for name in ("scores-best.png", "time-best.png", "calibration-best.png"):
        assert (tmp_path / "figures" / name).stat().st_size > 0


@pytest.mark.slow
def test_two_processes_make_the_same_runs(tmp_path):
    for number in (1, 2):
        invoke(uci.main, "--quick", "--jobs", number, "--out", tmp_path / str(number))
    one, two = (
        {Job.of(run).key: run["metrics"]["rmse"] for run in read_runs(tmp_path / str(number))}
        for number in (1, 2)
    )
    assert one == two


def test_runs_of_other_budgets_have_rows_of_their_own(tmp_path):
    for epochs in (1, 2):
        options = ("--epochs", epochs, "--model", "nn", "--only-folds", 1)
        invoke(uci.main, "--quick", *options, "--out", tmp_path)
    assert [run["config"]["recipe"]["epochs"] for run in read_runs(tmp_path)] == [1, 2]
    table = (tmp_path / "table.md").read_text()
    assert "| nn | 1 | 1 |" in table
    assert "| nn | 1 | 2 |" in table


def carried_job(fold, **others):
    options = {"max_rows": 100, "epochs": 2, "carry_over": True} | others
    return uci.make_job("diabetes", "dak_cf", "paper", fold, 3, **options)


def test_a_model_that_is_carried_over_goes_on_from_the_fold_before():
    trainer = uci.Trainer()
    scores = [uci.run(carried_job(fold), print, trainer=trainer)["metrics"] for fold in range(2)]
    # By hand: one model, the training rows of fold 0 and then those of fold 1.
    jobs = [carried_job(fold) for fold in range(2)]
    options = jobs[0].settings["options"]
    model = models.build("dak_cf", 10, recipe=jobs[0].recipe, **options)
    for job in jobs:
        rows, scale = uci.rows_of(job)
        model.recipe = job.recipe
        model.fit(rows["x"], rows["y"], keep_weights=True)
    expected = uci.score(model.predict(rows["x_test"]), rows["y_test"], scale)
    assert scores[1]["rmse"] == expected["rmse"]
    fresh = uci.run(carried_job(1, carry_over=False), print)["metrics"]
    assert fresh["rmse"] != scores[1]["rmse"]


def test_a_carried_over_fold_is_the_same_alone_and_after_the_others():
    alone = uci.run(carried_job(2), print)["metrics"]["rmse"]
    trainer = uci.Trainer()
    for fold in (1, 2):  # fold 0 is trained within fold 1
        last = uci.run(carried_job(fold), print, trainer=trainer)["metrics"]["rmse"]
    assert last == alone


def test_fresh_runs_have_the_key_that_they_had_before():
    job = uci.make_job("wine", "nn", "best", 0, 5)
    older = {k: v for k, v in job.settings.items() if k not in ("carry_over", "held_out")}
    assert Job("uci", "wine", "nn", 0, older).key == job.key
    assert carried_job(0).key != carried_job(0, carry_over=False).key


def test_settings_are_chosen_without_the_test_rows():
    x, _ = load_regression("diabetes")
    test_rows = uci.folds(len(x), 5)[1]
    rows, _ = uci.rows_of(uci.make_job("diabetes", "nn", "paper", 1, 5, held_out=True))
    used = torch.cat([rows["x"], rows["x_test"]])
    assert len(used) == len(x) - len(test_rows)
    known = {row.numpy().tobytes() for row in x[test_rows].float()}
    assert not any(row.numpy().tobytes() in known for row in used)
    line = {"experiment": "uci", "commit": "a", "metrics": {"rmse": 1.0}}
    job = uci.make_job("diabetes", "nn", "best", 0, 5, held_out=True, head_rate=0.1)
    assert job.recipe.last_layer_learning_rate == 0.1
    assert uci.aggregate([line | {"config": job.config}]) == {}


def test_the_leak_has_a_table_of_its_own(tmp_path):
    for options in ((), ("--carry-over",)):
        arguments = ("--quick", "--preset", "paper", "--model", "nn", *options)
        invoke(uci.main, *arguments, "--out", tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert "| paper, carried over | diabetes | 64 | nn | 2 | 2 |" in text
    leak = text.split("from fold to fold:")[1]
    assert "| diabetes | 64 | nn | 2 |" in leak
    assert (tmp_path / "figures" / "scores-paper-carried-over.png").is_file()


@pytest.mark.parametrize("preset", list(uci.PRESETS))
def test_targets_of_the_test_rows_change_nothing_in_training(preset, monkeypatch):
    fitted = []

    class Recorder:
        num_parameters, epoch_seconds = 0, [0.0]

        def __init__(self, *args, **options):
            pass

        def fit(self, x, y):
            fitted.append((x.clone(), y.clone()))

        def predict(self, x):
            one = torch.ones(len(x), 1)
            return Prediction(one, one, one, FunctionMoments(one, one), GaussianLikelihood())

    monkeypatch.setattr(uci.models, "build", Recorder)
    x, y = load_regression("diabetes")
    test_rows = uci.folds(len(x), 5)[1]
    shuffled = y.clone()
    shuffled[test_rows] = shuffled[test_rows].flip(0) * 100
    for target in (y, shuffled):
        monkeypatch.setattr(uci, "load_regression", lambda *_, target=target: (x, target))
        uci.run(uci.make_job("diabetes", "nn", preset, 1, 5, epochs=1), print)
    assert torch.equal(fitted[0][0], fitted[1][0])
    assert torch.equal(fitted[0][1], fitted[1][1])


def test_a_residual_backbone_can_be_chosen(monkeypatch):
    built = []
    monkeypatch.setattr(uci.models, "build", lambda *_, **options: built.append(options) or 1 / 0)
    for backbone in ("mlp", "residual_mlp"):
        with pytest.raises(ZeroDivisionError):
            uci.run(uci.make_job("diabetes", "nn_bn", "best", 0, 5, backbone=backbone), print)
    assert "backbone" not in built[0]  # runs of the paper's backbone are recorded without it
    assert built[1]["backbone"] == "residual_mlp"


def test_folds_cover_every_row_once():
    parts = uci.folds(103, 5)
    assert torch.cat(parts).sort().values.equal(torch.arange(103))
    assert {len(part) for part in parts} == {20, 21}


def test_scores_are_in_the_units_of_the_data():
    mean, y = torch.zeros(50, 1), torch.randn(50, 1)
    functions = FunctionMoments(mean, torch.full_like(mean, 0.4))
    prediction = Prediction(
        mean, functions.var, torch.full_like(mean, 0.6), functions, GaussianLikelihood()
    )
    scores = uci.score(prediction, y, 3.0)
    normal = torch.distributions.Normal(0.0, 3.0)
    assert scores["rmse"] == pytest.approx(3 * y.square().mean().sqrt().item(), rel=1e-5)
    assert scores["nlpd"] == pytest.approx(-normal.log_prob(3 * y).mean().item(), rel=1e-5)
    noise = torch.distributions.Normal(0.0, (9 * 0.4 + 0.6932) ** 0.5)
    assert scores["nlpd_paper"] == pytest.approx(-noise.log_prob(3 * y).mean().item(), rel=1e-5)
    twice = torch.distributions.Normal(0.0, (9 * 1.0 + 0.6932) ** 0.5)
    expected = -twice.log_prob(3 * y).mean().item()
    assert scores["nlpd_paper_twice"] == pytest.approx(expected, rel=1e-5)


def test_twins_are_exact_copies_in_the_training_rows():
    x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
    x_test, y_test = torch.tensor([[1.0], [1.0], [2.0]]), torch.tensor([[3.0], [4.0], [4.0]])
    assert uci.has_twin(x, y, x_test, y_test).tolist() == [True, False, True]


def test_the_table_says_what_a_dak_misses():
    def row(rmse, nlpd, coverage):
        return {"rmse": rmse, "nlpd": nlpd, "coverage_95": coverage}

    def key(model, epochs=100):
        return uci.Key("best", "wine", model, 64, epochs)

    printed = paper.REGRESSION["wine", "dak_cf", 64]["rmse"]
    summaries = {key("nn"): row(printed, 1.0, 0.5), key("dak_cf"): row(printed - 0.1, 0.9, 0.95)}
    assert uci.misses(key("dak_cf"), summaries) == []
    assert uci.misses(key("nn"), summaries) == []
    summaries[key("dak_cf")] = row(printed + 0.1, 1.1, 0.99)
    assert uci.misses(key("dak_cf"), summaries) == [
        "RMSE above the paper's",
        "coverage not in 0.90-0.98",
        "RMSE of nn is lower",
        "NLPD of nn is lower",
    ]
    del summaries[key("nn")]
    summaries |= {key("avdkl", 40): row(0, 0, 1), key("svdkl", 200): row(0, 0, 1)}
    assert "RMSE of avdkl is lower" in uci.misses(key("dak_cf"), summaries)


def test_the_papers_table_is_there():
    assert paper.REGRESSION["kin40k", "dak_cf", 64]["rmse"] == 0.069
    assert len(paper.REGRESSION) == 6 * 6 * 3


def test_standardising_uses_the_training_rows():
    x, y = load_regression("diabetes")
    test_rows = uci.folds(len(x), 5)[0]
    rows, scale = uci.prepare(x, y, test_rows, standardize=True)
    assert_close(rows["x"].mean(0), torch.zeros(10), atol=1e-5, rtol=0)
    assert_close(rows["y"].std().item(), 1.0, atol=1e-5, rtol=0)
    kept = torch.ones(len(x), dtype=torch.bool)
    kept[test_rows] = False
    assert scale == pytest.approx(y[kept].std().item())


def test_learned_lengthscales_differ_from_the_best_settings_in_that_alone():
    jobs = {name: uci.make_job("wine", "dak_cf", name, 0, 5) for name in ("best", "lengthscale")}
    best, learned = (jobs[name].settings for name in ("best", "lengthscale"))
    assert learned["options"] == best["options"] | {"learn_lengthscale": True}
    assert learned["recipe"] == best["recipe"]
    model = models.build("dak_cf", 3, feature_dim=4, **learned["options"])
    assert model.model.layer.activation.log_lengthscale.shape == (16,)
