"""`fit`: determinism, resuming, early stopping, fixed features, bad data, interrupts."""

import copy
import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pyro_dak import (
    DAK,
    CategoricalLikelihood,
    CheckpointError,
    ClosedFormELBO,
    GaussianLikelihood,
    HorseshoePrior,
    LaplaceKernel,
    LocalReparamELBO,
    MaternKernel,
    MeanFieldGuide,
    NormalPrior,
    TrainingError,
    fit,
    load,
    predict,
)
from pyro_dak.additive.scaling import Standardize
from pyro_dak.training import loop
from pyro_dak.training.checkpoint import module_tensors
from pyro_dak.training.data import LoaderData
from pyro_dak.training.describe import describe_network, differences
from pyro_dak.training.fit import build_objective
from pyro_dak.training.optimizers import build_optimizer
from tests import scenarios

SCRIPT = Path(__file__).parents[1] / "scripts" / "train.py"


def make_data(num_rows: int = 60) -> tuple[Tensor, Tensor]:
    x = torch.randn(num_rows, 3, generator=torch.Generator().manual_seed(0))
    return x, x.sin().sum(-1, keepdim=True)


def make_model(**options: object) -> tuple[DAK, MeanFieldGuide]:
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
    model = DAK(network, 4, **({"num_units": 3, "level": 3} | options))
    return model, MeanFieldGuide(model)


def train(model: DAK, guide: nn.Module, data: object = None, **options: object) -> object:
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


def run_script(out: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(out), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("objective", ["closed_form", "local", "trace"])
def test_same_seed_gives_the_same_history_and_parameters(objective):
    histories, parameters = [], []
    for _ in range(2):
        model, guide = make_model()
        histories.append(train(model, guide, objective=objective, validation=0.2))
        parameters.append(module_tensors(model, guide))
    assert [repr(row) for row in histories[0].rows] == [repr(row) for row in histories[1].rows]
    assert_same(*parameters)


def test_another_seed_gives_other_parameters():
    first, second = parameters_after(seed=0), parameters_after(seed=1)
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_training_leaves_the_global_random_state_alone():
    model, guide = make_model()
    before = torch.get_rng_state()
    train(model, guide)
    assert torch.equal(before, torch.get_rng_state())


def test_training_raises_the_elbo_and_fits():
    model, guide = make_model(likelihood=GaussianLikelihood(0.3))
    x, y = make_data(200)
    history = train(model, guide, (x, y), epochs=30)
    assert history.rows[-1]["elbo"] > history.rows[0]["elbo"]
    assert (predict(model, guide, x).mean - y).square().mean() < 0.05 * y.var()


def test_history_of_one_full_batch_is_the_elbo_at_the_start():
    model, guide = make_model(scaling="none", bounds=(-1.0, 1.0))
    x, y = make_data()
    terms = ClosedFormELBO().terms(model, guide, x, y)
    row = train(model, guide, (x, y), epochs=1, batch_size=60).rows[0]
    assert_close(row["elbo"], terms.elbo.item())
    assert_close(row["kl"], terms.kl.item())
    assert_close(row["expected_log_lik"], terms.expected_log_lik.item())
    assert_close(row["elbo_per_datum"], terms.elbo.item() / 60)
    assert_close(row["loss"], -terms.elbo.item() / 60)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "adadelta"])
@pytest.mark.parametrize(
    "schedule", ["one_cycle", "cosine", "constant", "step", lambda s, t, e: 0.5]
)
def test_every_optimizer_and_schedule_trains(optimizer, schedule):
    model, guide = make_model()
    history = train(model, guide, optimizer=optimizer, schedule=schedule, learning_rate=1e-3)
    assert all(math.isfinite(row["loss"]) for row in history.rows)


def test_weight_decay_acts_on_the_network_only():
    # With a zero learning rate factor nothing moves; a pure decay step shows where decay acts.
    model, guide = make_model()
    x, y = make_data()
    state = module_tensors(model, guide)
    train(model, guide, (x, y), epochs=1, batch_size=60, optimizer="adamw", weight_decay=50.0,
          learning_rate=1e-2, schedule="constant")  # fmt: skip
    after = module_tensors(model, guide)
    shrunk = "model.feature_extractor.0.weight"
    assert after[shrunk].norm() < 0.7 * state[shrunk].norm()
    assert after["guide.z_loc"].norm() > 0.7 * state["guide.z_loc"].norm()


def test_last_layer_has_its_own_learning_rate():
    before_model, before_guide = make_model()
    before = module_tensors(before_model, before_guide)
    after = parameters_after(learning_rate=1e-2, last_layer_learning_rate=1e-12)
    assert_close(after["guide.z_loc"], before["guide.z_loc"], atol=1e-9, rtol=0)
    weight = "model.embedding.weight"
    assert (after[weight] - before[weight]).abs().max() > 1e-4


OWN_OPTIMIZER = {"optimizer": "adadelta", "learning_rate": 1.0, "last_layer_optimizer": "adam",
                 "last_layer_learning_rate": 1e-2}  # fmt: skip


def test_last_layer_has_its_own_optimizer():
    """Adadelta hardly moves the scales of q, whose gradients are of order 1 / N; Adam does."""
    before = module_tensors(*make_model())["guide.z_log_scale"]
    shared, own = (
        parameters_after(**options)["guide.z_log_scale"]
        for options in ({"optimizer": "adadelta", "learning_rate": 1.0}, OWN_OPTIMIZER)
    )
    assert (own - before).abs().mean() > 3 * (shared - before).abs().mean()


def test_no_parameters_at_all_are_refused():
    with pytest.raises(ValueError, match="empty parameter list"):
        build_optimizer("adam", [], [], 1.0, 1.0, 0.0, False, True)


def test_two_optimizers_take_no_group_that_neither_would_step():
    network, last_layer, other = (torch.zeros(1, requires_grad=True) for _ in range(3))
    rates = (1.0, 1e-2)
    both = build_optimizer("sgd", [network], [last_layer], *rates, 0.0, False, False, "adam")
    with pytest.raises(NotImplementedError, match="no further groups"):
        both.add_param_group({"params": [other]})


def test_two_optimizers_are_those_of_their_groups_also_from_a_saved_state():
    starts = [torch.randn(3, 2), torch.randn(4)]
    gradients = [[torch.randn_like(start) for start in starts] for _ in range(4)]

    def leaves():
        return [start.clone().requires_grad_() for start in starts]

    def make(network, last_layer):
        rates = (1.0, 1e-2)
        return build_optimizer(
            "adadelta", network, last_layer, *rates, 0.1, False, True, last_layer_name="adam"
        )

    def steps(parameters, optimizers, some, rate):
        for pair in some:
            for parameter, gradient in zip(parameters, pair, strict=True):
                parameter.grad = gradient
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()

    alone, together = leaves(), leaves()
    parts = [make(alone[:1], []), make([], alone[1:])]
    assert [type(part).__name__ for part in parts] == ["Adadelta", "Adam"]
    whole = make(together[:1], together[1:])
    for some, rate in ((gradients[:2], 0.5), (gradients[2:], 0.1)):
        steps(alone, parts, some, rate)
        steps(together, [whole], some, rate)
        assert_close(together, alone)
        state = whole.state_dict()
        together = [leaf.detach().clone().requires_grad_() for leaf in together]
        whole = make(together[:1], together[1:])
        whole.load_state_dict(state)
    with pytest.raises(NotImplementedError, match="closure"):
        whole.step(lambda: 0.0)
    copied = copy.deepcopy(whole)
    assert all(part.state is copied.state for part in copied.parts)
    copied.step()


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


def test_a_checkpoint_from_before_there_were_two_optimizers_resumes(tmp_path, monkeypatch):
    def without(settings):
        values = dataclasses.asdict(settings)
        del values["last_layer_optimizer"]
        return values

    options = {"epochs": 4, "checkpoint_dir": tmp_path, "callbacks": [stop_after_two]}
    with monkeypatch.context() as patch:
        patch.setattr(loop, "asdict", without)
        with pytest.raises(KeyboardInterrupt):
            train(*make_model(), **options)
    resumed = make_model()
    train(*resumed, epochs=4, resume_from=tmp_path)
    assert_same(module_tensors(*resumed), parameters_after(epochs=4))


def test_early_stopping_restores_the_best_weights():
    model, guide = make_model()
    x, y = make_data()
    scores = []

    def watch(epoch, row):
        scores.append((row["val_nlpd"], module_tensors(model, guide)))

    history = train(model, guide, (x, y), epochs=60, learning_rate=0.3, schedule="constant",
                    validation=(x[:20], -y[:20]), patience=2, callbacks=[watch])  # fmt: skip
    assert history.status == "stopped early"
    assert len(history.rows) < 60
    best = min(range(len(scores)), key=lambda i: scores[i][0])
    assert history.best_epoch == best + 1
    assert_same(module_tensors(model, guide), scores[best][1])


class CountingExtractor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.rows = 0

    def forward(self, x: Tensor) -> Tensor:
        self.rows += len(x)
        return self.linear(x)


@pytest.mark.parametrize("as_loader", [False, True])
def test_fixed_features_are_computed_once_per_row_and_extractor_stays(as_loader):
    x, y = make_data()
    extractor = CountingExtractor()
    model = DAK(extractor, 4, num_units=3, level=3)
    guide = MeanFieldGuide(model)
    before = extractor.linear.weight.clone()
    embedding = model.embedding.weight.clone()
    data = DataLoader(TensorDataset(x, y), batch_size=7) if as_loader else (x, y)
    train(model, guide, data, epochs=4, fixed_features=True)
    assert extractor.rows == 60
    assert torch.equal(extractor.linear.weight, before)
    assert extractor.linear.weight.requires_grad
    assert not torch.equal(model.embedding.weight, embedding)


def test_loader_and_iterable_give_the_same_as_tensors_in_one_batch():
    x, y = make_data()

    class Rows(IterableDataset):
        def __iter__(self):
            yield x, y

    results = []
    for data, options in (
        ((x, y), {}),
        (DataLoader(TensorDataset(x, y), batch_size=60), {}),
        (DataLoader(Rows(), batch_size=None), {"num_data": 60}),
    ):
        model, guide = make_model()
        train(model, guide, data, batch_size=60, **options)
        results.append(module_tensors(model, guide))
    for other in results[1:]:
        for name, tensor in results[0].items():
            assert_close(other[name], tensor, atol=1e-6, rtol=1e-6)


def test_batches_are_nearly_equal_and_hold_every_row_once():
    from pyro_dak.training.data import ResidentData

    x, y = torch.arange(101.0).unsqueeze(-1), torch.zeros(101, 1)
    for world_size in (1, 2, 3):
        shares = [ResidentData(x, y, 20, rank, world_size) for rank in range(world_size)]
        epochs = [list(s.epoch(torch.Generator().manual_seed(0), 0)) for s in shares]
        rows = torch.cat([batch[0] for epoch in epochs for batch in epoch]).flatten()
        assert rows.sort().values.equal(torch.arange(101.0))
        sizes = [sum(len(e[i][0]) for e in epochs) for i in range(len(epochs[0]))]
        assert max(sizes) - min(sizes) <= 1
        # Averaged over processes, each row counts num_data / batch times.
        assert_close(epochs[0][0][2] / world_size, 101 / sizes[0])


@pytest.mark.parametrize(("likelihood", "name"), [
    (GaussianLikelihood(), ClosedFormELBO), (CategoricalLikelihood(), LocalReparamELBO),
])  # fmt: skip
def test_auto_objective_fits_the_likelihood(likelihood, name):
    model, guide = make_model(likelihood=likelihood, num_outputs=2)
    assert type(build_objective("auto", model, guide)) is name


def test_auto_objective_is_traced_for_other_guides_and_priors():
    model, _ = make_model()
    assert isinstance(build_objective("auto", model, AutoNormal(model)), Trace_ELBO)
    model, guide = make_model(prior={"shrinkage": HorseshoePrior()})
    assert isinstance(build_objective("auto", model, guide), Trace_ELBO)


def test_objectives_of_pyro_and_autoguides_train():
    model, _ = make_model()
    guide = AutoNormal(model)
    train(model, guide)
    assert predict(model, guide, make_data()[0]).std.shape == (60, 1)
    model, guide = make_model()
    history = train(model, guide, objective=TraceMeanField_ELBO())
    assert math.isfinite(history.rows[-1]["loss"])


def test_classes_train_and_validate():
    x, _ = make_data(120)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    model, guide = make_model(likelihood=CategoricalLikelihood(), num_outputs=3)
    history = train(model, guide, (x, y), epochs=40, validation=(x, y))
    assert history.rows[-1]["val_accuracy"] > 0.9


def test_two_models_trained_alternately_equal_each_alone():
    alone = parameters_after(epochs=2)
    first, second = make_model(), make_model(num_units=2)
    train(*first, epochs=2)
    train(*second, epochs=2)
    assert_same(module_tensors(*first), alone)


@pytest.mark.slow
def test_compiled_training_equals_eager(tmp_path):
    # In a process of its own: the compiler cannot look through the shape checks of the tests.
    eager, compiled = tmp_path / "eager.safetensors", tmp_path / "compiled.safetensors"
    assert run_script(eager, "--objective", "closed_form").returncode == 0
    result = run_script(compiled, "--objective", "closed_form", "--compile")
    assert result.returncode == 0, result.stderr
    assert "going on without it" not in result.stderr
    first, second = (safetensors.torch.load_file(path) for path in (eager, compiled))
    for name, tensor in first.items():
        assert_close(second[name], tensor, atol=1e-6, rtol=1e-6)


FAILING_BACKWARD = """
import functools, warnings, torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from pyro_dak import DAK, ClosedFormELBO, MeanFieldGuide
from pyro_dak.training.loss import Loss, use_compiled

def broken(graph, inputs):
    raise RuntimeError("no backward pass here")

backend = aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=broken)
torch.compile = functools.partial(torch.compile, backend=backend)
model = DAK(nn.Identity(), 3, num_units=2)
loss = Loss(model, MeanFieldGuide(model), ClosedFormELBO(), from_features=False)
use_compiled(loss)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    loss(torch.randn(5, 3), torch.randn(5, 1), 1.0, 5)[0].backward()
assert any("going on without it" in str(w.message) for w in caught), caught
assert model.layer.log_unit_scale.grad is not None
"""


@pytest.mark.slow
def test_a_compiler_that_fails_in_the_backward_pass_falls_back_too():
    # In a process of its own: the compiler cannot look through the shape checks of the tests.
    scenarios.run_alone(FAILING_BACKWARD)


COMPILED_ONCE = """
import functools, torch
from torch import nn
from pyro_dak import DAK, ClosedFormELBO, MeanFieldGuide
from pyro_dak.training.loss import Loss, use_compiled

torch.compile = functools.partial(torch.compile, backend="aot_eager")
network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
model = DAK(network, 4, num_units=2)
loss = Loss(model, MeanFieldGuide(model), ClosedFormELBO(), from_features=False).train()
use_compiled(loss)
for _ in range(3):
    loss(torch.randn(50, 3), torch.randn(50, 1), 1.0, 50)[0].backward()
assert dict(torch._dynamo.utils.counters["frames"]) == {"total": 1, "ok": 1}
assert not torch._dynamo.utils.counters["graph_break"]
"""


@pytest.mark.slow
def test_a_step_is_compiled_once():
    # In a process of its own: the compiler cannot look through the shape checks of the tests.
    scenarios.run_alone(COMPILED_ONCE)


def test_a_failing_compiler_falls_back_with_a_warning(monkeypatch):
    def broken(fn):
        def fail(*args):
            raise RuntimeError("no compiler here")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    model, guide = make_model()
    with pytest.warns(UserWarning, match="going on without it: no compiler here"):
        train(model, guide, compile=True)
    assert_same(module_tensors(model, guide), parameters_after())


def bad_data() -> dict[str, tuple[object, type[Exception], str]]:
    x, y = make_data()
    nan, inf = x.clone(), y.clone()
    nan[3, 1], inf[5] = math.nan, math.inf
    return {
        "nan in x": ((nan, y), ValueError, "1 NaN"),
        "inf in y": ((x, inf), ValueError, "1 infinite"),
        "no rows": ((x[:0], y[:0]), ValueError, "has no rows"),
        "lengths": ((x, y[:-1]), ValueError, "60 and 59 rows"),
        "integers": ((x.long(), y), TypeError, "floating dtype"),
        "dtype": ((x.float(), y), TypeError, "dtype of the model"),
        "columns": ((x, y.expand(-1, 2)), ValueError, r"shape \(N, 1\)"),
        "no tensor": ((x, [1.0] * 60), TypeError, "must be a torch.Tensor"),
        "one axis": ((x[:, 0], y), ValueError, r"shape \(N, ...\)"),
        "no data": (3, TypeError, "pair"),
    }


@pytest.mark.parametrize("name", list(bad_data()))
def test_bad_data_is_refused(name, no_type_checker):
    data, error, message = bad_data()[name]
    model, guide = make_model()
    with pytest.raises(error, match=message):
        train(model, guide, data)


@pytest.mark.parametrize(("labels", "error", "message"), [
    (torch.full((60,), 2), ValueError, "between 0 and 1"),
    (torch.full((60,), -1), ValueError, "between 0 and 1"),
    (torch.zeros(60), TypeError, "integer dtype"),
    (torch.zeros(60, 1, dtype=torch.long), ValueError, "one label per row"),
])  # fmt: skip
def test_bad_labels_are_refused(labels, error, message):
    model, guide = make_model(likelihood=CategoricalLikelihood(), num_outputs=2)
    with pytest.raises(error, match=message):
        train(model, guide, (make_data()[0], labels))


def test_targets_with_and_without_a_column_axis_are_the_same():
    x, y = make_data()
    with_axis, without = make_model(), make_model()
    train(*with_axis, (x, y))
    train(*without, (x, y.squeeze(-1)))
    assert_same(module_tensors(*with_axis), module_tensors(*without))


def test_one_row_trains():
    model, guide = make_model()
    x, y = make_data(1)
    assert math.isfinite(train(model, guide, (x, y)).rows[-1]["loss"])


def test_training_has_gradients_where_the_caller_has_none():
    with torch.no_grad():
        found = parameters_after(epochs=2)
    assert_same(found, parameters_after(epochs=2))


def test_wrong_settings_are_refused():
    model, guide = make_model()
    with pytest.raises(ValueError, match="`patience` needs `validation`"):
        train(model, guide, patience=3)
    with pytest.raises(ValueError, match="'adam'"):
        train(model, guide, optimizer="adm")
    with pytest.raises(ValueError, match="'one_cycle'"):
        train(model, guide, schedule="two_cycle")
    with pytest.raises(ValueError, match="'closed_form'"):
        train(model, guide, objective="exact")
    with pytest.raises(ValueError, match="share between 0 and 1"):
        train(model, guide, validation=1.5)
    with pytest.raises(ValueError, match="`num_data` must be given"):
        train(model, guide, [make_data()])


def test_nan_in_the_loss_stops_with_the_last_good_checkpoint(tmp_path):
    model, guide = make_model()
    x, y = make_data()

    def poison(epoch, row):
        if epoch == 2:
            with torch.no_grad():
                guide.z_loc.fill_(math.nan)

    with pytest.raises(TrainingError, match=r"nan in epoch 3, step 7.*step-000000006"):
        train(model, guide, (x, y), epochs=4, checkpoint_dir=tmp_path, callbacks=[poison])
    fresh = make_model()
    train(*fresh, (x, y), epochs=4, checkpoint_dir=tmp_path, resume_from=tmp_path)
    assert_same(module_tensors(*fresh), parameters_after(epochs=4))


def test_only_the_last_checkpoints_are_kept(tmp_path):
    model, guide = make_model()
    train(model, guide, epochs=5, checkpoint_dir=tmp_path, keep_last=3, checkpoint_every=1)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-000000009", "step-000000012", "step-000000015"]


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


@pytest.mark.parametrize(
    ("then", "now", "different"),
    [
        (nn.AvgPool2d(2), nn.AvgPool2d((2, 2)), None),
        (nn.AvgPool2d(2), nn.AvgPool2d((3, 3)), "kernel_size"),
        (nn.AvgPool2d(2), nn.AvgPool2d(2, divisor_override=7), "divisor_override: None then, 7"),
        (nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=None), "momentum: 0.1 then, None"),
        (nn.Conv2d(1, 1, 3), nn.Conv2d(1, 1, 3, padding="same"), "padding: .*same"),
        (nn.Sequential(nn.ReLU()), nn.Sequential(nn.Tanh()), "name: ReLU then, Tanh now"),
        (nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU(), nn.ReLU()), "children"),
        (nn.Sequential(nn.ReLU()), Stack(nn.ReLU()), None),
    ],
)
def test_descriptions_of_networks_are_compared_to_the_last_argument(then, now, different):
    before, after = (
        json.loads(json.dumps({"model": {"feature_extractor": describe_network(network)}}))
        for network in (then, now)
    )
    found = "; ".join(differences(before, after))
    assert re.search(different, found) if different else not found, found


def test_a_learned_noise_may_start_elsewhere_when_resuming(tmp_path):
    train(*make_model(), epochs=4, checkpoint_dir=tmp_path)
    resumed = make_model(likelihood=GaussianLikelihood(0.7))
    train(*resumed, epochs=4, resume_from=tmp_path)
    assert_same(module_tensors(*resumed), parameters_after(epochs=4))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[str, Tensor]:
    out = tmp_path_factory.mktemp("whole") / "out.safetensors"
    result = run_script(out)
    assert result.returncode == 0, result.stderr
    return safetensors.torch.load_file(out)


@pytest.mark.parametrize("arguments", [
    ("--kill-at-step", 8), ("--kill-at-step", 21), ("--kill-in-write", 5)
])  # fmt: skip
def test_a_killed_and_resumed_run_equals_the_uninterrupted_one(tmp_path, uninterrupted, arguments):
    out, checkpoints = tmp_path / "out.safetensors", tmp_path / "checkpoints"
    killed = run_script(out, "--checkpoints", checkpoints, *arguments)
    assert killed.returncode == -9
    assert not out.exists()
    resumed = run_script(out, "--checkpoints", checkpoints, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert_same(safetensors.torch.load_file(out), uninterrupted)
    assert not list(checkpoints.glob(".*"))


def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(tmp_path, uninterrupted):
    out, checkpoints = tmp_path / "out.safetensors", tmp_path / "checkpoints"
    stopped = run_script(out, "--checkpoints", checkpoints, "--interrupt-at-step", 9)
    assert stopped.returncode == 0
    assert stopped.stdout.startswith("interrupted")
    assert "Interrupted after step 9. Go on with fit(..., resume_from=" in stopped.stderr
    resumed = run_script(out, "--checkpoints", checkpoints, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert_same(safetensors.torch.load_file(out), uninterrupted)


def test_ctrl_c_in_one_process_stops_all_at_the_same_step(tmp_path):
    out, checkpoints = tmp_path / "out.safetensors", tmp_path / "checkpoints"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += [str(SCRIPT), str(out), "--objective", "closed_form"]
    command += ["--checkpoints", str(checkpoints), "--interrupt-at-step", "9", "--only-rank", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("interrupted") == 2
    assert max(path.name for path in checkpoints.iterdir()) == "step-000000009"


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("fabric", marks=pytest.mark.slow)])
def test_two_processes_equal_one(tmp_path, launcher):
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    assert run_script(one, "--objective", "closed_form").returncode == 0
    arguments = [str(SCRIPT), str(two), "--objective", "closed_form"]
    if launcher == "torchrun":
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            "--standalone",
        ]
    else:
        launch = [str(Path(sys.executable).with_name("fabric")), "run", "--accelerator=cpu"]
        launch += ["--devices=2", "--strategy=ddp"]
    result = subprocess.run(
        launch + arguments, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    first, second = (safetensors.torch.load_file(path) for path in (one, two))
    for name, tensor in first.items():
        assert_close(second[name], tensor, atol=1e-8, rtol=1e-8)


def test_a_nan_gradient_stops_before_it_is_applied_or_saved(tmp_path):
    model, guide = make_model()

    def poison(epoch, row):
        if epoch == 2:
            guide.z_loc.register_hook(lambda grad: grad * math.nan)

    with pytest.raises(TrainingError, match=r"gradient is nan in epoch 3.*step-000000006"):
        train(model, guide, epochs=4, checkpoint_dir=tmp_path, keep_last=1, callbacks=[poison])
    assert torch.isfinite(guide.z_loc).all()
    fresh = make_model()
    train(*fresh, epochs=4, resume_from=tmp_path)
    assert_same(module_tensors(*fresh), parameters_after(epochs=4))


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
    assert torch.equal(predict(*loaded, x).mean, predict(model, guide, x).mean)


def test_the_schedule_of_an_iterable_spans_its_own_batches():
    x, y = make_data(64)

    class Rows(IterableDataset):
        def __iter__(self):
            yield from zip(x, y, strict=True)

    model, guide = make_model()
    loader = DataLoader(Rows(), batch_size=8)
    history = train(model, guide, loader, epochs=4, num_data=64, batch_size=512)
    rates = history.column("learning_rate")
    assert max(rates) > 5e-3
    assert rates[-1] < 1e-6


def test_a_shuffling_loader_gives_all_processes_the_same_batches():
    x, y = make_data(16)
    model, _ = make_model()
    orders = []
    for rank in (0, 1):
        torch.manual_seed(rank)  # as `fit` does for the draws
        loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
        data = LoaderData(loader, None, model, torch.device("cpu"), rank, 2)
        orders.append([batch[0] for batch in data.epoch(torch.Generator().manual_seed(3), 0)])
    seen = torch.cat([batch for order in orders for batch in order])
    assert_close(seen.sort(0).values, x.sort(0).values)


def test_iterators_and_empty_loaders_are_refused():
    with pytest.raises(TypeError, match="iterable anew for each epoch"):
        train(*make_model(), iter([make_data()]), num_data=60)
    model, cpu = make_model()[0], torch.device("cpu")
    small, empty = LoaderData([make_data(1)], 1, model, cpu, 0, 2), LoaderData([], 1, model, cpu)
    with pytest.raises(ValueError, match="every batch needs a row"):
        list(small.epoch(torch.Generator(), 0))
    with pytest.raises(ValueError, match="yields no batch"):
        list(empty.epoch(torch.Generator(), 0))


def test_two_batches_in_a_list_are_batches():
    x, y = make_data(40)
    model, guide = make_model()
    batches = [(x[:20], y[:20]), (x[20:], y[20:])]
    assert len(train(model, guide, batches, num_data=40).rows) == 3


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true", "32-true"])
def test_precision_passes_through(precision):
    torch.set_default_dtype(torch.float32)
    x, y = make_data()
    model, guide = make_model()
    history = train(model, guide, (x, y), precision=precision, validation=(x, y))
    assert math.isfinite(history.rows[-1]["val_nlpd"])


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"clip_norm": 0.0}, ValueError, "`clip_norm` must be positive"),
    ({"last_layer_learning_rate": -1.0}, ValueError, "must be positive"),
    ({"last_layer_optimizer": "adm"}, ValueError, "`last_layer_optimizer` must be"),
    ({"num_data": 60}, ValueError, "`num_data` is for iterables"),
    ({"validation": "some"}, TypeError, "must be a pair"),
    ({"validation": 1}, ValueError, "share between 0 and 1"),
])  # fmt: skip
def test_more_wrong_settings_are_refused(options, error, message, no_type_checker):
    with pytest.raises(error, match=message):
        train(*make_model(), **options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_training_on_cuda_agrees_with_the_cpu():
    cpu = parameters_after()
    model, guide = make_model()
    train(model, guide, accelerator="cuda")
    for name, tensor in module_tensors(model, guide).items():
        assert_close(tensor, cpu[name], atol=1e-6, rtol=1e-6)
