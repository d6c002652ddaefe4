"""Checkpoints of `fit`: kept, refused where another run or model made them, and resumed."""

import contextlib
import signal
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, Subset, SubsetRandomSampler, TensorDataset

from pyro_dak import (
    CheckpointError,
    GaussianLikelihood,
    LaplaceKernel,
    MaternKernel,
    NormalPrior,
    load,
    predict,
)
from pyro_dak.additive.scaling import Standardize
from pyro_dak.training.checkpoint import Checkpoints, module_tensors
from pyro_dak.training.data import fingerprint, training_data
from pyro_dak.training.loop import Run
from pyro_dak.training.plan import Plan
from tests.training.runs import (
    OWN_OPTIMIZER,
    assert_same,
    edit_config,
    edit_tensors,
    make_data,
    make_model,
    parameters_after,
    train,
)


def stop_after_two(epoch, row):
    if epoch == 2:
        raise KeyboardInterrupt


def test_a_run_with_two_optimizers_resumes_as_if_uninterrupted(tmp_path):
    options = {**OWN_OPTIMIZER, "epochs": 4}
    with pytest.raises(KeyboardInterrupt):
        train(*make_model(), checkpoint_dir=tmp_path, callbacks=[stop_after_two], **options)
    resumed = make_model()
    train(*resumed, checkpoint_dir=tmp_path, resume_from=tmp_path, **options)
    assert_same(module_tensors(*resumed), parameters_after(**options))


def test_a_run_goes_on_from_checkpoints_inside_an_epoch(tmp_path, monkeypatch):
    step, options = Run.train_step, {"epochs": 4, "checkpoint_dir": tmp_path}

    def breaking(self, *arguments):
        step(self, *arguments)
        if self.step == 5:  # of three in an epoch
            raise RuntimeError("no power")

    monkeypatch.setattr(Run, "train_step", breaking)
    with pytest.raises(RuntimeError, match="no power"):
        train(*make_model(), checkpoint_steps=2, checkpoint_every=9, **options)
    assert sorted(path.name[-1] for path in tmp_path.glob("step-*")) == ["2", "4"]
    monkeypatch.setattr(Run, "train_step", step)
    resumed = make_model()
    train(*resumed, resume_from=tmp_path, **options)
    assert_same(module_tensors(*resumed), parameters_after(epochs=4))


def test_a_checkpoint_from_before_there_were_two_optimizers_resumes(tmp_path):
    options = {"epochs": 4, "checkpoint_dir": tmp_path, "callbacks": [stop_after_two]}
    with pytest.raises(KeyboardInterrupt):
        train(*make_model(), **options)
    for path in tmp_path.iterdir():
        edit_config(path, lambda config: config["trainer"]["settings"].pop("last_layer_optimizer"))
    resumed = make_model()
    train(*resumed, epochs=4, resume_from=tmp_path)
    assert_same(module_tensors(*resumed), parameters_after(epochs=4))


def test_only_the_last_checkpoints_are_kept(tmp_path):
    model, guide = make_model()
    train(model, guide, epochs=5, checkpoint_dir=tmp_path, keep_last=3, checkpoint_every=1)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-000000009", "step-000000012", "step-000000015"]


def test_a_checkpoint_whose_last_layer_followed_the_network_says_so(tmp_path):
    network = {"learning_rate": 2e-3, "optimizer": "sgd"}
    followed = {"last_layer_learning_rate": None, "last_layer_optimizer": None}
    train(*make_model(), checkpoint_dir=tmp_path, **network, **followed)
    match = r"last_layer_learning_rate: 0\.002 then, 0\.01 now; last_layer_optimizer: sgd then"
    with pytest.raises(ValueError, match=match):
        train(*make_model(), resume_from=tmp_path, **network)
    train(*make_model(), resume_from=tmp_path, **network, **followed)


def test_resuming_with_other_settings_is_refused(tmp_path):
    model, guide = make_model()
    train(model, guide, checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match="batch_size: 20 then, 10 now"):
        train(*make_model(), batch_size=10, resume_from=tmp_path)
    with pytest.raises(CheckpointError, match="another model or guide"):
        train(*make_model(num_units=2), resume_from=tmp_path)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        train(*make_model(), resume_from=tmp_path / "nothing")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": LaplaceKernel(2.0)}, r"model.kernel.lengthscale: 1.0 then, 2.0 now"),
        ({"kernel": MaternKernel(1.5)}, r"model.kernel.name: LaplaceKernel then, MaternKernel now"),
        ({"bounds": (0.0, 2.0)}, r"model.bounds\[1\]: 1.0 then, 2.0 now"),
        ({"prior": {"z": NormalPrior(0.0, 2.0)}}, r"model.prior.z.scale: 1.0 then, 2.0 now"),
        ({"likelihood": GaussianLikelihood(1.0, learn=False)}, r"noise_scale: 0.2\d* then, 1.0"),
    ],
)
def test_resuming_another_model_is_refused_where_all_weights_fit(tmp_path, options, message):
    fixed_noise = {"likelihood": GaussianLikelihood(0.2, learn=False)}
    train(*make_model(**fixed_noise), checkpoint_dir=tmp_path)
    model, guide = make_model(**(fixed_noise | options))
    before = module_tensors(model, guide)
    with pytest.raises(CheckpointError, match=f"another model or guide .*{message}"):
        train(model, guide, resume_from=tmp_path)
    assert_same(module_tensors(model, guide), before)


def test_resuming_with_another_scaling_is_refused(tmp_path):
    train(*make_model(), checkpoint_dir=tmp_path)
    model, guide = make_model()
    model.scaling.num_std = 8.0
    with pytest.raises(CheckpointError, match=r"scaling_options.num_std: 3.0 then, 8.0 now"):
        train(model, guide, resume_from=tmp_path)


class Stack(nn.Sequential):
    """A network that is known by its weights only."""


class Half(Standardize):
    """A scaling of one's own."""


@pytest.mark.parametrize("change", ["network", "scaling", "dtype of the noise"])
def test_resuming_goes_on_where_descriptions_say_nothing_else(tmp_path, change):
    options = {"likelihood": GaussianLikelihood(0.2, learn=False)}
    first, resumed = make_model(**options), make_model(**options)
    if change == "network":
        resumed[0].feature_extractor = Stack(*resumed[0].feature_extractor)
    elif change == "scaling":
        for model, _ in (first, resumed):
            model.scaling = Half(3, (0.0, 1.0))
    else:
        resumed[0].likelihood.noise.log_scale *= 1 + 1e-8
    train(*first, epochs=4, checkpoint_dir=tmp_path)
    train(*resumed, epochs=4, resume_from=tmp_path)
    assert_same(module_tensors(*resumed), module_tensors(*first))


def test_a_learned_noise_may_start_elsewhere_when_resuming(tmp_path):
    train(*make_model(), epochs=4, checkpoint_dir=tmp_path)
    resumed = make_model(likelihood=GaussianLikelihood(0.7))
    train(*resumed, epochs=4, resume_from=tmp_path)
    assert_same(module_tensors(*resumed), parameters_after(epochs=4))


def test_a_directory_with_checkpoints_is_for_resuming_only(tmp_path):
    train(*make_model(), checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match="holds checkpoints of an earlier run"):
        train(*make_model(), checkpoint_dir=tmp_path)


def test_foreign_directories_beside_checkpoints_are_left_alone(tmp_path):
    for name in ("step-0-rawdata", "step-000000001", ".step-notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").write_text("data")
    train(*make_model(), epochs=5, checkpoint_dir=tmp_path, keep_last=1)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == [".step-notes", "step-0-rawdata", "step-000000001", "step-000000015"]


def test_a_run_that_stopped_early_stays_stopped(tmp_path):
    x, y = make_data()
    options = {"epochs": 60, "learning_rate": 0.3, "schedule": "constant", "patience": 2,
               "validation": (x[:20], -y[:20])}  # fmt: skip
    first, second = make_model(), make_model()
    history = train(*first, (x, y), checkpoint_dir=tmp_path, **options)
    resumed = train(*second, (x, y), resume_from=tmp_path, **options)
    assert history.status == resumed.status == "stopped early"
    assert history.rows == resumed.rows
    assert_same(module_tensors(*first), module_tensors(*second))


def test_resuming_takes_the_seed_of_the_run_and_notices_other_settings(tmp_path):
    model, guide = make_model()

    def stop(epoch, row):
        if epoch == 2:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        train(model, guide, seed=5, epochs=4, checkpoint_dir=tmp_path, callbacks=[stop])
    resumed = make_model()
    train(*resumed, seed=None, epochs=4, resume_from=tmp_path)
    assert_same(module_tensors(*resumed), parameters_after(seed=5, epochs=4))
    with pytest.raises(ValueError, match="objective: ClosedFormELBO then, LocalReparamELBO now"):
        train(*make_model(), seed=5, epochs=4, objective="local", resume_from=tmp_path)
    with pytest.raises(ValueError, match="schedule: one_cycle then, custom"):
        train(*make_model(), seed=5, epochs=4, schedule=lambda *_: 1.0, resume_from=tmp_path)


def test_a_checkpoint_can_be_loaded_as_a_model(tmp_path):
    model, guide = make_model()
    train(model, guide, checkpoint_dir=tmp_path)
    x, _ = make_data()
    loaded = load(tmp_path / "step-000000009")
    expected = predict(model, guide, x, novelty=False)
    assert torch.equal(predict(*loaded, x).mean, expected.mean)


def test_a_second_run_in_a_directory_raises_at_its_start(tmp_path):
    def start_another(epoch, row):
        with pytest.raises(BlockingIOError, match=r"in use by another run of `fit`.*name another"):
            train(*make_model(), checkpoint_dir=tmp_path, resume_from=tmp_path)

    first = make_model()
    train(*first, checkpoint_dir=tmp_path, callbacks=[start_another])
    assert_same(module_tensors(*first), parameters_after())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000006", "step-000000009"]


def test_a_checkpoint_that_a_killed_run_moved_away_is_found_and_leftovers_are_removed(tmp_path):
    train(*make_model(), epochs=2, checkpoint_dir=tmp_path)
    (tmp_path / "step-000000006").rename(tmp_path / ".step-000000006.old-01234567")
    (tmp_path / ".step-000000003.lock").touch()
    (tmp_path / ".lock").touch()
    assert Checkpoints.found(tmp_path)[-1].name == "step-000000006"
    Checkpoints(tmp_path, keep_last=1).prune()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {".lock", "step-000000006"}


def changed_data(change):
    x, y = make_data()
    return {
        "nothing": (x, y),
        "rounding": (x.float().double(), y * (1 + 1e-9)),
        "values": (x, -y),
        "one row": (torch.cat([x[:59], -x[59:]]), y),
        "order": (x.flip(0), y.flip(0)),
        "columns": (x[:, [1, 0, 2]], y),
        "scale": (2 * x, y),
    }[change]


@pytest.mark.parametrize(
    "change", ["nothing", "rounding", "values", "one row", "order", "columns", "scale"]
)
@pytest.mark.parametrize("kind", ["tensors", "validation", "loader", "subset", "list"])
def test_resuming_with_other_data_is_refused(tmp_path, kind, change):
    def run(data, **options):
        x, y = data
        every = torch.arange(60)
        given = {
            "tensors": (x, y),
            "validation": make_data(),
            "loader": DataLoader(TensorDataset(x, y), 20),
            "subset": DataLoader(Subset(TensorDataset(x, y), every), 20),
            "list": [(x[:40], y[:40]), (x[40:], y[40:])],
        }[kind]
        model, guide = make_model()
        before = module_tensors(model, guide)
        options |= {"validation": (x, y)} if kind == "validation" else {}
        try:
            train(model, guide, given, epochs=2, evaluate=False, **options)
        except ValueError:
            assert_same(module_tensors(model, guide), before)
            raise

    run(make_data(), checkpoint_dir=tmp_path)
    if change in ("nothing", "rounding"):
        run(changed_data(change), resume_from=tmp_path)
    else:
        with pytest.raises(ValueError, match=r"was made with other data \(other values of"):
            run(changed_data(change), resume_from=tmp_path)


def test_other_rows_of_a_sampler_are_other_data(tmp_path):
    def loader(first):
        return DataLoader(
            TensorDataset(*make_data()), 20, sampler=SubsetRandomSampler(range(first, first + 40))
        )

    train(*make_model(), loader(0), checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match="other values of sampled rows"):
        train(*make_model(), loader(20), resume_from=tmp_path)


def test_features_of_another_network_are_other_data(tmp_path):
    train(*make_model(), fixed_features=True, checkpoint_dir=tmp_path)
    model, guide = make_model()
    nn.init.normal_(model.feature_extractor[0].weight)
    with pytest.raises(ValueError, match=r"other values of x.*fixed features the same network"):
        train(model, guide, fixed_features=True, resume_from=tmp_path)


def test_a_fingerprint_is_quick_and_small_for_large_data():
    x = torch.zeros(1, 3, 64, 64).expand(100_000, -1, -1, -1)  # 10 GB, if it were read
    entries = fingerprint(x=x)
    assert entries["shape of x"] == [100_000, 3, 64, 64]
    assert entries["values of x"] == [0.0] * 5


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "trainer.safetensors"])
@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(tmp_path, name, keep_last):
    stop = {"epochs": 4, "checkpoint_dir": tmp_path, "callbacks": [stop_after_two]}
    with pytest.raises(KeyboardInterrupt):
        train(*make_model(), **stop)
    cut(tmp_path / "step-000000006" / name)
    resumed = make_model()
    options = {"epochs": 4, "checkpoint_dir": tmp_path, "resume_from": tmp_path}
    message = r"step-000000006.* An older checkpoint is used instead: .*step-000000003"
    with pytest.warns(UserWarning, match=message):
        train(*resumed, keep_last=keep_last, **options)
    assert_same(module_tensors(*resumed), parameters_after(epochs=4))
    kept = ["step-000000009", "step-000000012"][-keep_last:]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[1:] == kept
    assert names[0].startswith("damaged-step-000000006-")


def test_a_directory_whose_checkpoints_are_all_damaged_is_refused(tmp_path):
    train(*make_model(), checkpoint_dir=tmp_path, keep_last=1)
    cut(tmp_path / "step-000000009" / "config.json")
    message = r"holds no undamaged checkpoint\. .*step-000000009/config.json: is not JSON"
    with pytest.raises(CheckpointError, match=message):
        train(*make_model(), checkpoint_dir=tmp_path, resume_from=tmp_path)
    with pytest.raises(ValueError, match="holds checkpoints of an earlier run"):
        train(*make_model(), checkpoint_dir=tmp_path)


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_run_that_is_to_go_on_starts_where_there_is_no_checkpoint_yet(tmp_path, name):
    place, model = tmp_path / name, make_model()
    train(*model, checkpoint_dir=place, resume_from=str(place))
    assert_same(module_tensors(*model), parameters_after())
    again = make_model()
    train(*again, checkpoint_dir=place, resume_from=place)
    assert_same(module_tensors(*again), module_tensors(*model))


class Shuffled(Sampler):
    """A sampler with a generator of its own."""

    def __init__(self, num_rows, generator):
        self.num_rows, self.generator = num_rows, generator

    def __iter__(self):
        return iter(torch.randperm(self.num_rows, generator=self.generator).tolist())

    def __len__(self):
        return self.num_rows


def shuffling_loader(kind):
    data, own = TensorDataset(*make_data()), torch.Generator().manual_seed(5)
    if kind == "loader":
        return DataLoader(data, 25, shuffle=True, generator=own)
    return DataLoader(data, 25, sampler=Shuffled(60, own))


@pytest.mark.parametrize("step", [6, 7, 8], ids=["end of epoch", "first batch", "second batch"])
@pytest.mark.parametrize("kind", ["loader", "sampler"])
def test_a_loader_with_a_generator_of_its_own_goes_on_with_the_same_batches(
    tmp_path, kind, step, monkeypatch
):
    def stop_at(run, *arguments):
        train_step(run, *arguments)
        if run.step == step:
            signal.raise_signal(signal.SIGINT)

    whole, resumed = make_model(), make_model()
    history = train(*whole, shuffling_loader(kind), epochs=4)
    train_step = Run.train_step
    with monkeypatch.context() as patch:
        patch.setattr(Run, "train_step", stop_at)
        with pytest.raises(KeyboardInterrupt):
            train(*make_model(), shuffling_loader(kind), epochs=4, checkpoint_dir=tmp_path)
    second = train(*resumed, shuffling_loader(kind), epochs=4, resume_from=tmp_path)
    assert second.rows == history.rows
    assert_same(module_tensors(*resumed), module_tensors(*whole))


def test_a_loader_that_has_lost_its_generator_is_refused(tmp_path):
    train(*make_model(), shuffling_loader("loader"), checkpoint_dir=tmp_path)
    plain = DataLoader(TensorDataset(*make_data()), 25, shuffle=True)
    with pytest.raises(
        ValueError, match="a loader that had 1 generators of its own; this one has 0"
    ):
        train(*make_model(), plain, resume_from=tmp_path)


def test_an_earlier_checkpoint_without_the_generator_of_a_loader_goes_on_with_a_warning(tmp_path):
    train(*make_model(), shuffling_loader("loader"), epochs=2, checkpoint_dir=tmp_path)
    for path in tmp_path.glob("step-*"):
        edit_config(path, lambda config: config["trainer"].pop("data"))
        edit_tensors(
            path / "trainer.safetensors", lambda tensors: tensors.pop("loader_generator.0")
        )
    with pytest.warns(UserWarning, match="did not keep the generators of loaders"):
        train(*make_model(), shuffling_loader("loader"), epochs=2, resume_from=tmp_path)


def test_processes_share_the_state_of_the_generators():
    loader = shuffling_loader("sampler")
    first = torch.Generator().manual_seed(11).get_state()
    fabric = SimpleNamespace(
        device=torch.device("cpu"), global_rank=1, world_size=2, broadcast=lambda state: first
    )
    training_data(make_model()[0], loader, Plan(), None, fabric)
    assert torch.equal(loader.sampler.generator.get_state(), first)


DAMAGES = {
    "short optimiser": lambda t: t.update({"optimizer.0.exp_avg": torch.zeros(1)}),
    "no optimiser step": lambda t: t.pop("optimizer.0.step"),
    "totals": lambda t: t.update({"totals": torch.zeros(2)}),
    "no totals": lambda t: t.pop("totals"),
    "random state": lambda t: t.update({"rng": torch.zeros(1, 3, dtype=torch.uint8)}),
    "no processes": lambda t: t.update({"rng": t["rng"][:0]}),
    "generator": lambda t: t.update({"generator": torch.zeros(7, dtype=torch.uint8)}),
    "best weights": lambda t: t.update({"best.guide.z_loc": torch.zeros(1)}),
    "no best weights": lambda t: t.pop("best.guide.z_loc"),
}


@pytest.mark.parametrize("name", list(DAMAGES))
def test_a_state_that_is_not_that_of_the_run_is_refused_and_nothing_changes(tmp_path, name):
    x, y = make_data()
    options = {"validation": (x[:20], y[:20]), "patience": 3, "epochs": 2}
    train(*make_model(), checkpoint_dir=tmp_path, **options)
    path = tmp_path / "step-000000006"
    edit_tensors(path / "trainer.safetensors", DAMAGES[name])
    model, guide = make_model()
    before = module_tensors(model, guide)
    with pytest.raises(CheckpointError, match="step-000000006: "):
        train(model, guide, resume_from=path, **options)
    assert_same(module_tensors(model, guide), before)


@pytest.mark.parametrize("entry", ["step", "rows", "settings", "best_epoch", "num_data", "data"])
@pytest.mark.parametrize("value", [None, "x", [1], {"x": 2}], ids=str)
def test_an_odd_entry_of_a_checkpoint_is_refused_or_harmless(tmp_path, entry, value):
    train(*make_model(), epochs=1, checkpoint_dir=tmp_path)
    path = tmp_path / "step-000000003"
    edit_config(path, lambda config: config["trainer"].update({entry: value}))
    model, guide = make_model()
    with contextlib.suppress(CheckpointError, ValueError):
        train(model, guide, epochs=1, seed=None, resume_from=path)


def test_weights_of_another_shape_leave_the_model_as_it_was(tmp_path):
    train(*make_model(), checkpoint_dir=tmp_path, epochs=1)
    path = tmp_path / "step-000000003"
    edit_tensors(path / "model.safetensors", lambda t: t.update({"guide.mu_loc": torch.zeros(7)}))
    model, guide = make_model()
    before = module_tensors(model, guide)
    with pytest.raises(CheckpointError, match="another model or guide"):
        train(model, guide, epochs=1, resume_from=path)
    assert_same(module_tensors(model, guide), before)
