"""Image experiments end to end on a few images, their data files, metrics and reports."""

import dataclasses
import gzip
import hashlib
import struct

import numpy
import pytest
import torch
from torch.testing import assert_close

from experiments import cifar, image_datasets, images, mnist, paper
from experiments.datasets import DataError
from experiments.image_datasets import load_images, read_idx, read_subset
from experiments.runs import Job, read_runs
from models.shared.recipe import IMAGE_RECIPE
from pyro_dak.additive.gaussian import FunctionMoments
from pyro_dak.diagnostics.scores import expected_calibration_error
from pyro_dak.prediction import ClassPrediction
from pyro_dak.training.checkpoint import Checkpoints
from tests.experiments.command import invoke

# GPyTorch: torch.jit at import, jitter and float32 on tiny data.
gpytorch = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture
def cifar_root(tmp_path, monkeypatch):
    """A data directory with small files in the form of the CIFAR subsets."""
    for name, num_classes in (("cifar10", 10), ("cifar100", 100)):
        rng = numpy.random.default_rng(0)
        parts = {}
        for split, rows in (("train", 240), ("test", 40)):
            parts[f"x_{split}"] = rng.integers(0, 256, (rows, 32, 32, 3), numpy.uint8)
            parts[f"y_{split}"] = rng.integers(0, num_classes, rows)
        path = tmp_path / f"{name}_subset.npz"
        numpy.savez(path, **parts)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        monkeypatch.setitem(image_datasets._SUBSETS, name, sha256)
    return tmp_path


def test_digits_run_end_to_end_and_resume(tmp_path):
    arguments = ("--dataset", "digits", "--quick", "--out", tmp_path)
    assert "2 to make" in invoke(mnist.main, *arguments)
    run = read_runs(tmp_path)[0]
    assert run["config"]["model"] == "dak_mc"
    assert {"experiment", "config", "commit", "metrics", "curve"} == set(run) - {"draft"}
    names = {"accuracy", "nll", "ece", "elbo", "brier", "ood_entropy", "ood_mutual_information"}
    assert names < set(run["metrics"])
    assert [row["epoch"] for row in run["curve"]] == [1]
    assert "2 of 2 runs are recorded already; 0 to make" in invoke(mnist.main, *arguments)
    table = (tmp_path / "table.md").read_text()
    assert "| paper | dak_mc (not converged) | first 200 | 64 | 1 | 1 |" in table
    for name in ("curves.png", "reliability.png"):
        assert (tmp_path / "figures" / name).stat().st_size > 0


def test_small_cnn_with_dak_learns_the_digits(tmp_path):
    options = ("--dataset", "digits", "--model", "dak_mc", "--epochs", "6")
    invoke(mnist.main, *options, "--out", tmp_path)
    (run,) = read_runs(tmp_path)
    assert run["metrics"]["accuracy"] > 0.9


@gpytorch
def test_cifar_runs_end_to_end_with_fine_tuning(tmp_path, cifar_root):
    arguments = ("--quick", "--fine-tune", "--data-root", cifar_root)
    invoke(cifar.main, *arguments, "--model", "dak_mc", "--model", "svdkl", "--out", tmp_path)
    runs = {run["config"]["model"]: run for run in read_runs(tmp_path / "cifar10")}
    assert list(runs) == ["nn", "dak_mc", "svdkl"]
    run = runs["dak_mc"]
    assert run["config"]["recipe"]["fixed_features"]
    assert run["config"]["pretrained"] == "nn"
    assert "dak_mc (fine-tuned)" in (tmp_path / "cifar10/table.md").read_text()


def test_fine_tuning_may_have_epochs_of_its_own(tmp_path, cifar_root):
    options = ("--max-rows", "100", "--data-root", cifar_root)
    epochs = ("--dataset", "cifar10", "--fine-tune", "--epochs", "2", "--tune-epochs", "1")
    invoke(cifar.main, *options, *epochs, "--model", "dak_mc", "--out", tmp_path)
    _, run = read_runs(tmp_path / "cifar10")
    assert len(run["curve"]) == 1
    assert run["config"]["options"]["init_scale"] == 0.05
    assert (
        "| dak_mc (fine-tuned) (not converged) | first 100 | 128 | 2 + 1 |"
        in (tmp_path / "cifar10/table.md").read_text()
    )


@gpytorch
def test_digits_are_fine_tuned_on_the_features_of_the_network(tmp_path):
    options = ("--dataset", "digits", "--quick", "--fine-tune", "--tune-epochs", "2")
    models = ("--model", "dak_natural", "--model", "avdkl")
    invoke(mnist.main, *options, *models, "--out", tmp_path)
    network, *tuned = read_runs(tmp_path)
    assert network["config"]["model"] == "nn"
    assert not network["config"]["recipe"]["fixed_features"]
    for run in tuned:
        assert run["config"]["recipe"]["fixed_features"]
        job = Job.of(run)
        assert images.source(job).key == Job.of(network).key
    assert "| avdkl (fine-tuned)" in (tmp_path / "table.md").read_text()


def feature_weights(job, directory):
    """The tensors of the feature extractor, as a baseline keeps them."""
    tensors = Checkpoints.read_newest(images.checkpoints(job, directory)).contents.tensors
    return {name: value for name, value in tensors.items() if name.startswith("model.0.")}


@gpytorch
def test_fine_tuning_leaves_the_features_as_they_are(tmp_path):
    jobs = [
        mnist.make_job("digits", name, epochs=1, is_tuned=is_tuned, max_rows=50)
        for name, is_tuned in (("nn", False), ("svdkl", True))
    ]
    images.run_jobs(jobs, tmp_path)
    network, tuned = (feature_weights(job, tmp_path) for job in jobs)
    assert network.keys() == tuned.keys()
    assert all(torch.equal(network[name], tuned[name]) for name in network)
    assert len(network) > 2


def test_a_network_that_was_recorded_elsewhere_is_trained_again_for_fine_tuning(tmp_path):
    options = {"epochs": 1, "max_rows": 50}
    network = mnist.make_job("digits", "nn", **options)
    images.run_jobs([network], tmp_path)
    weights = feature_weights(network, tmp_path)
    images.remove_checkpoints([network], tmp_path)
    tuned = mnist.make_job("digits", "dak_natural", is_tuned=True, **options)
    images.run_jobs([network, tuned], tmp_path)
    assert len(read_runs(tmp_path)) == 2
    found = feature_weights(network, tmp_path)
    assert all(torch.equal(weights[name], found[name]) for name in weights)


def test_the_network_under_fine_tuning_has_the_recipe_of_the_network():
    """Also where the network of a model has a rate of its own in full training."""
    job = mnist.make_job("fashion", "dak_natural", is_tuned=True, tune_epochs=3)
    network = mnist.make_job("fashion", "nn")
    assert images.source(job).key == network.key


def test_runs_on_fewer_images_have_rows_of_their_own(tmp_path):
    for rows in (100, 120):
        options = ("--dataset", "digits", "--model", "nn", "--epochs", "1", "--max-rows", rows)
        invoke(mnist.main, *options, "--out", tmp_path)
    table = (tmp_path / "table.md").read_text()
    assert "| nn | first 100 | 64 | 1 | 1 |" in table
    assert "| nn | first 120 | 64 | 1 | 1 |" in table


@pytest.mark.slow
@gpytorch
@pytest.mark.parametrize("model", ["dak_mc", "nn_svgp", "svdkl"])
@pytest.mark.parametrize("dataset", ["cifar10", "cifar100"])
def test_the_full_recipe_runs_an_epoch(dataset, model, tmp_path, cifar_root):
    options = ("--dataset", dataset, "--preset", "paper", "--epochs", "1", "--max-rows", "200")
    arguments = (*options, "--model", model, "--data-root", cifar_root)
    invoke(cifar.main, *arguments, "--out", tmp_path)
    (run,) = read_runs(tmp_path / dataset)
    assert run["config"]["backbone"] == {"cifar10": "resnet18", "cifar100": "resnet34"}[dataset]
    assert run["config"]["recipe"]["augment"]
    assert run["metrics"]["nll"] > 0


def test_a_stopped_run_goes_on_and_keeps_its_curve(tmp_path, monkeypatch):
    recipe = dataclasses.replace(IMAGE_RECIPE, epochs=3, batch_size=64)
    job = images.make_job("digits", "nn", "digits_cnn", recipe, max_rows=100)
    whole = images.run(job, print, tmp_path / "whole")

    class Stop(Exception):
        pass

    call = images.Curve.__call__

    def stop(self, epoch, row):
        call(self, epoch, row)
        if epoch == 2:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(images.Curve, "__call__", stop)
        with pytest.raises(Stop):
            images.run_jobs([job], tmp_path / "part")
    assert read_runs(tmp_path / "part") == []
    (resumed,) = images.run_jobs([job], tmp_path / "part")
    assert resumed["curve"] == whole["curve"]
    assert resumed["metrics"]["nll"] == whole["metrics"]["nll"]


def test_a_result_counts_for_the_settings_it_was_made_with():
    job = mnist_job("dak_mc")
    line = {"experiment": "images", "config": job.config}
    del line["config"]["recipe"]["precision"], line["config"]["pretrained"]  # an older line
    key = Job.of(line).key
    assert job.key == key
    assert with_recipe(job, progress=True, device="cuda").key == key
    assert with_recipe(job, last_layer_optimizer=None).key != key
    other = dataclasses.replace(job, settings=job.settings | {"options": {}})
    assert other.key != key


def test_a_run_with_other_settings_starts_anew_and_both_are_kept(tmp_path):
    recipe = dataclasses.replace(IMAGE_RECIPE, epochs=1, batch_size=32)
    jobs = [
        images.make_job("digits", "dak_mc", "digits_cnn", recipe, options, max_rows=64)
        for options in ({"num_units": 4, "init_scale": scale} for scale in (0.05, 0.9))
    ]
    for job in jobs:
        images.run_jobs([job], tmp_path / "both")
    (expected,) = images.run_jobs(jobs[1:], tmp_path / "fresh")
    first, second = read_runs(tmp_path / "both")
    assert second["curve"] == expected["curve"]
    assert first["config"]["options"]["init_scale"] == 0.05
    folders = [images.checkpoints(job, tmp_path / "both") for job in jobs]
    assert folders[0] != folders[1]
    assert all(folder.is_dir() for folder in folders)


def test_runs_on_held_out_images_are_not_in_the_table(tmp_path):
    recipe = dataclasses.replace(IMAGE_RECIPE, epochs=1, batch_size=32)
    job = images.make_job("digits", "nn", "digits_cnn", recipe, max_rows=64, held_out=True)
    images.run_jobs([job], tmp_path)
    assert images.aggregate(read_runs(tmp_path)) == {}


@pytest.mark.parametrize("preset", ["paper", "small"])
@pytest.mark.parametrize("is_tuned", [False, True])
def test_units_that_are_features_have_no_embedding_on_cifar(preset, is_tuned):
    recipe = dataclasses.replace(cifar.PRESETS[preset].recipe, fixed_features=is_tuned)
    for dataset in cifar.DATASETS:
        options = cifar.make_job(preset, dataset, "dak_features", recipe).settings["options"]
        assert not {"num_units", "embedding"} & set(options)


def mnist_job(name):
    options = mnist.options("mnist", name)
    return images.make_job("mnist", name, "cnn", mnist.recipe("mnist", name), options)


def with_recipe(job, **settings):
    recipe = dataclasses.asdict(dataclasses.replace(job.recipe, **settings))
    return dataclasses.replace(job, settings=job.settings | {"recipe": recipe})


def test_variational_last_layers_have_adam_and_the_network_the_optimizer_of_the_paper():
    for name in ("nn", "dak_mc", "dak_jensen", "dak_features", "svdkl"):
        recipes = {
            "adadelta": mnist.recipe("mnist", name),
            "sgd": cifar.make_job("paper", "cifar10", name, cifar.PRESETS["paper"].recipe).recipe,
        }
        for optimizer, recipe in recipes.items():
            assert recipe.optimizer == optimizer
            assert recipe.last_layer_optimizer == (None if name == "nn" else "adam")


@pytest.mark.parametrize(
    ("dataset", "has_embedding", "num_inducing", "num_std"),
    [("cifar10", True, 63, 3.0), ("cifar100", False, 7, 8.0)],
)
def test_dak_has_settings_of_its_own_for_each_set(
    dataset, has_embedding, num_inducing, num_std, cifar_root
):
    recipe = cifar.PRESETS["small"].recipe
    job = cifar.make_job("small", dataset, "dak_mc", recipe)
    model = images.build(job, images.load_job_images(job, str(cifar_root))).model
    assert (model.embedding is not None) == has_embedding
    assert (model.num_inducing, model.scaling.num_std) == (num_inducing, num_std)


def prediction(probs, expected_entropy=None):
    log_probs = probs.log()
    entropy = torch.zeros(len(probs)) if expected_entropy is None else expected_entropy
    return ClassPrediction(log_probs, entropy, FunctionMoments(log_probs, log_probs))


def test_scores_of_known_probabilities():
    probs = torch.tensor([[0.7, 0.3], [0.2, 0.8], [0.6, 0.4], [0.9, 0.1]])
    y = torch.tensor([0, 1, 1, 0])
    ood = prediction(torch.full((3, 2), 0.5))
    scores = images.score(prediction(probs), y, ood)
    picked = torch.tensor([0.7, 0.8, 0.4, 0.9])
    assert scores["accuracy"] == 0.75
    assert scores["nll"] == pytest.approx(-picked.log().mean().item(), rel=1e-5)
    assert scores["brier"] == pytest.approx(2 * (1 - picked).square().mean().item(), rel=1e-5)
    assert scores["ood_entropy"] == 1.0
    assert scores["ood_mutual_information"] == 1.0


def test_bins_of_the_reliability_diagram_give_the_calibration_error():
    probs = (3 * torch.randn(500, 4)).softmax(-1)
    y = torch.randint(4, (500,))
    bins = images.score(prediction(probs), y, None)["reliability"]
    bins = {name: torch.tensor(values) for name, values in bins.items()}
    assert bins["count"].sum() == 500
    gap = (bins["count"] * (bins["accuracy"] - bins["confidence"]).abs()).sum() / 500
    assert_close(gap.float(), expected_calibration_error(y, probs), rtol=1e-5, atol=1e-6)


def test_bins_are_pooled_over_runs_and_empty_ones_are_left_out():
    one = {"count": [0, 2], "confidence": [0.0, 0.99], "accuracy": [0.0, 1.0]}
    other = {"count": [1, 2], "confidence": [0.5, 0.97], "accuracy": [1.0, 0.5]}
    pooled = sorted(images._pooled_bins([one, other]))
    assert pooled == [pytest.approx((1, 0.5, 1.0)), pytest.approx((4, 0.98, 0.75))]


def test_held_out_images_are_training_images_that_are_not_trained_on():
    loaded = load_images("digits")
    split = loaded.hold_out(100)
    assert len(split.x_train) + 100 == len(loaded.x_train)
    both = torch.cat([split.x_train, split.x_test]).flatten(1)
    assert_close(both.sum(0), loaded.x_train.flatten(1).sum(0), rtol=1e-5, atol=1e-3)
    assert torch.equal(split.hold_out(0).x_train.sort(0).values, split.x_train.sort(0).values)


def idx_bytes(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def test_idx_files_are_read_as_written(tmp_path):
    array = numpy.arange(24, dtype=numpy.uint8).reshape(2, 3, 4)
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(idx_bytes(array)))
    assert torch.equal(read_idx(path), torch.from_numpy(array))


def test_fashion_is_split_and_the_digits_are_its_strange_images(tmp_path, monkeypatch):
    arrays = {
        "fashion-x_test": numpy.arange(10 * 784).reshape(10, 28, 28) % 256,
        "fashion-y_test": numpy.arange(10),
        "mnist-x_test": numpy.full((3, 28, 28), 255),
    }
    for name, array in arrays.items():
        content = gzip.compress(idx_bytes(array.astype(numpy.uint8)))
        relative, url, _ = image_datasets._IDX[name]
        path = tmp_path / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        monkeypatch.setitem(image_datasets._IDX, name, (relative, url, sha256))
    loaded = load_images("fashion", tmp_path)
    assert loaded.x_train.shape == (8, 1, 28, 28)
    assert sorted([*loaded.y_train.tolist(), *loaded.y_test.tolist()]) == list(range(10))
    assert torch.equal(loaded.x_ood, torch.ones(3, 1, 28, 28))


@pytest.mark.parametrize("damage", ["truncated", "garbage", "short", "float", "empty"])
def test_damaged_idx_files_are_named(damage, tmp_path):
    array = numpy.arange(240, dtype=numpy.uint8).reshape(20, 12)
    content = gzip.compress(idx_bytes(array))
    content = {
        "truncated": content[:-20],
        "garbage": b"no gzip file at all",
        "short": gzip.compress(idx_bytes(array)[:-7]),
        "float": gzip.compress(idx_bytes(array).replace(b"\x08", b"\x0d", 1)),
        "empty": gzip.compress(b""),
    }[damage]
    path = tmp_path / "images.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"images.gz: is (damaged|no idx file)"):
        read_idx(path)
    assert path.read_bytes() == content


def test_a_changed_mnist_file_is_refused(tmp_path):
    path = tmp_path / "MNIST/raw/train-images-idx3-ubyte.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress(idx_bytes(numpy.zeros((1, 28, 28), numpy.uint8))))
    with pytest.raises(DataError, match="damaged or another version"):
        load_images("mnist", tmp_path)


def test_a_changed_or_damaged_subset_is_refused(cifar_root):
    path = cifar_root / "cifar10_subset.npz"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match="damaged or another version"):
        load_images("cifar10", cifar_root)
    with pytest.raises(DataError, match="damaged or no subset"):
        read_subset(path)
    numpy.savez(path, **{n: numpy.zeros(3) for n in ("x_train", "y_train", "x_test", "y_test")})
    with pytest.raises(DataError, match="train has shapes"):
        read_subset(path)


def test_the_papers_numbers_are_read():
    assert paper.SCORES["mnist", "dak_mc", 128, "accuracy"] == pytest.approx(0.9926)
    assert paper.SCORES["cifar100", "avdkl", 1024, "ece"] == 0.175
    assert paper.COST["cifar100", "dak_mc"]["parameters"] == 1.68


def test_another_backbone_can_be_chosen():
    recipe = cifar.PRESETS["small"].recipe
    settings = [
        cifar.make_job("small", "cifar10", "nn", recipe, name).settings["backbone"]
        for name in (None, "distance_resnet")
    ]
    assert settings == ["small_resnet", "distance_resnet"]
