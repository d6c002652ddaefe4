"""The training loop: plain losses, early stopping, numbers that are not finite, compilation."""

import math
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.testing import assert_close

from pyro_dak import TrainingError
from pyro_dak.training import loop
from pyro_dak.training.checkpoint import Checkpoints, module_tensors
from pyro_dak.training.data import ResidentData
from pyro_dak.training.loop import Learner, Run, frozen
from pyro_dak.training.plan import Plan
from tests import scenarios
from tests.training.runs import (
    assert_same,
    make_data,
    make_model,
    parameters_after,
    run_script,
    train,
)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Line(nn.Module, Learner):
    """A plain model, as a baseline would be: y = a x + b by least squares."""

    objective = "least squares"

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.offset = (nn.Parameter(torch.zeros(())) for _ in range(2))

    def forward(self, x, y, scale, num_data):
        loss = (self.slope * x + self.offset - y).square().sum() * scale / num_data
        return loss, loss.detach().unsqueeze(0)

    def parameter_groups(self):
        return [self.slope], [self.offset]


def line_run(epochs=50, checkpoints=None, score_fn=None, **options):
    x = torch.linspace(-1, 1, 50).unsqueeze(-1)
    plan = Plan(epochs, batch_size=10, learning_rate=0.1, **options)
    return Run(Line(), ResidentData(x, 3 * x + 1, 10), plan, score_fn, checkpoints)


def test_a_plain_loss_is_trained_by_the_same_loop():
    run = line_run()
    history = run.run()
    assert history.status == "finished"
    assert list(history.rows[0]) == ["loss", "learning_rate"]
    assert_close(run.learner.slope.detach(), torch.tensor(3.0), atol=0.02, rtol=0)
    assert_close(run.learner.offset.detach(), torch.tensor(1.0), atol=0.02, rtol=0)


def test_a_plain_loss_resumes_as_if_uninterrupted(tmp_path):
    whole, first, second = line_run(6), line_run(6, Checkpoints(tmp_path)), line_run(6)
    whole.run()
    with pytest.raises(KeyboardInterrupt):
        first.run([stop_after_two])
    second.resume(tmp_path)
    second.run()
    assert_same(second.learner.state_dict(), whole.learner.state_dict())
    other = Run(Line(), second.data, replace(second.plan, learning_rate=0.2))
    with pytest.raises(ValueError, match=r"learning_rate: 0\.1 then, 0\.2 now"):
        other.resume(tmp_path)


def stop_after_two(epoch, row):
    if epoch == 2:
        raise KeyboardInterrupt


def test_a_second_ctrl_c_raises_at_once_but_not_one_that_a_launcher_repeats(monkeypatch):
    now = 100.0
    monkeypatch.setattr(loop.time, "monotonic", lambda: now)
    before = [signal.getsignal(number) for number in SIGNALS]
    with loop._stop_signals(True) as stop:
        signal.raise_signal(signal.SIGINT)
        now = 100.5
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        now = 101.5
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert stop.number == signal.SIGINT
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_signals_that_somebody_else_handles_or_ignores_are_left_alone(monkeypatch):
    seen = []
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
        with loop._stop_signals(True) as stop:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert seen == [signal.SIGTERM]
    assert stop.number == 0


def test_ctrl_c_returns_where_it_is_asked_to(capsys):
    run = line_run(6)
    history = run.run([lambda *_: signal.raise_signal(signal.SIGINT)], on_interrupt="return")
    assert history.status == "interrupted"
    assert len(history.rows) == 1
    assert "Interrupted after step 5. Give `checkpoint_dir`" in capsys.readouterr().err


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_in_the_last_epoch_is_not_lost(number):
    run = line_run(1)
    message = r"after step 5\. That was the last step, and training is finished"
    with pytest.raises(KeyboardInterrupt, match=message) as raised:
        run.run([lambda *_: signal.raise_signal(number)], on_interrupt="raise")
    assert raised.value.history.status == "finished"


def test_a_loader_whose_workers_a_signal_has_ended_stops_the_run(tmp_path):
    run = line_run(6, Checkpoints(tmp_path))
    epoch = run.data.epoch

    def ended(*arguments):
        yield next(epoch(*arguments))
        signal.raise_signal(signal.SIGTERM)
        raise RuntimeError("DataLoader worker exited unexpectedly")

    run.data.epoch = ended
    with pytest.raises(KeyboardInterrupt, match="Stopped by SIGTERM after step 1") as raised:
        run.run(on_interrupt="return")
    assert raised.value.history.status == "interrupted"
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000000001"]


def test_training_ends_where_the_plan_says_and_the_schedule_does_not():
    whole, half = line_run(10), line_run(10, stop_after=5)
    rates = half.run().column("learning_rate")
    assert rates == whole.run().column("learning_rate")[:5]


def test_held_out_rows_are_scored_as_often_as_the_plan_says():
    epochs = []

    def score_fn():
        epochs.append(run.epoch)
        return torch.zeros(1, 1), {"val_score": 0.0}

    run = line_run(10, score_fn=score_fn, num_scorings=3)
    history = run.run()
    assert epochs == [3, 6, 9, 10]
    assert ["val_score" in row for row in history.rows] == [e in epochs for e in range(1, 11)]


def test_one_gradient_is_clipped_by_one_norm():
    line = Line()
    line.slope.grad, line.offset.grad = torch.tensor(30.0), torch.tensor(40.0)
    assert_close(line.clip_gradients([*line.parameters()], 5.0), torch.tensor(50.0))
    assert_close(line.slope.grad, torch.tensor(3.0))
    assert_close(line.clip_gradients([*line.parameters()], None), torch.tensor(5.0))
    assert_close(line.offset.grad, torch.tensor(4.0))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_scaled_loss_makes_the_same_steps(optimizer):
    """As in half precision, whose gradients are scaled up, with one optimiser or two."""
    plain = line_run(3, optimizer="sgd", last_layer_optimizer=optimizer, clip_norm=0.5)
    scaled = line_run(3, optimizer="sgd", last_layer_optimizer=optimizer, clip_norm=0.5)
    scaled.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaled.fabric.backward = lambda loss: scaled.scaler.scale(loss).backward()
    assert_close(plain.run().column("loss"), scaled.run().column("loss"))
    for name, tensor in plain.learner.state_dict().items():
        assert_close(scaled.learner.state_dict()[name], tensor)


def test_a_frozen_module_has_gradients_again_after():
    line = Line()
    with frozen(line, True):
        assert not any(p.requires_grad for p in line.parameters())
    with frozen(line, False):
        assert all(p.requires_grad for p in line.parameters())


def test_early_stopping_restores_the_best_weights():
    model, guide = make_model()
    x, y = make_data()
    scores = []

    def watch(epoch, row):
        scores.append((row["val_nlpd"], module_tensors(model, guide)))

    history = train(model, guide, (x, y), epochs=60, learning_rate=0.3, schedule="constant",
                    validation=(x[:20], -y[:20]), patience=2, callbacks=[watch],
                    novelty=False)  # fmt: skip
    assert history.status == "stopped early"
    assert len(history.rows) < 60
    best = min(range(len(scores)), key=lambda i: scores[i][0])
    assert history.best_epoch == best + 1
    assert_same(module_tensors(model, guide), scores[best][1])


def test_nan_in_the_loss_stops_with_the_last_good_checkpoint(tmp_path):
    model, guide = make_model()
    x, y = make_data()

    def poison(epoch, row):
        if epoch == 2:
            with torch.no_grad():
                guide.z_loc.fill_(math.nan)

    with pytest.raises(TrainingError, match=r"nan in epoch 3, step 7.*step-000000006") as raised:
        train(model, guide, (x, y), epochs=4, checkpoint_dir=tmp_path, callbacks=[poison])
    assert len(raised.value.history.rows) == 2
    fresh = make_model()
    train(*fresh, (x, y), epochs=4, checkpoint_dir=tmp_path, resume_from=tmp_path)
    assert_same(module_tensors(*fresh), parameters_after(epochs=4))


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


@scenarios.compiles_training
def test_a_failing_compiler_falls_back_with_a_warning(monkeypatch):
    def broken(fn, **options):
        def fail(*args):
            raise RuntimeError("no compiler here")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    model, guide = make_model()
    with pytest.warns(UserWarning, match="going on without it: no compiler here"):
        train(model, guide, compile=True)
    assert_same(module_tensors(model, guide), parameters_after())


@pytest.mark.slow
@scenarios.compiles_training
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


def test_a_torch_that_compiles_backward_passes_too_late_trains_without_a_compiler(monkeypatch):
    monkeypatch.setattr(torch._functorch, "config", SimpleNamespace())
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    model, guide = make_model()
    with pytest.warns(UserWarning, match="going on without it: torch .* is too old to compile"):
        train(model, guide, compile=True)
    assert_same(module_tensors(model, guide), parameters_after())


FAILING_BACKWARD = """
import functools, warnings, torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from pyro_dak import DAK, ClosedFormELBO, MeanFieldGuide
from pyro_dak.training.loop import DAKLoss

def broken(graph, inputs):
    raise RuntimeError("no backward pass here")

backend = aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=broken)
torch.compile = functools.partial(torch.compile, backend=backend)
model = DAK(nn.Identity(), 3, num_units=2)
loss = DAKLoss(model, MeanFieldGuide(model), ClosedFormELBO(), compile=True)
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
from pyro_dak import (
    DAK, BernoulliLikelihood, CategoricalLikelihood, GaussianLikelihood, MeanFieldGuide,
    StudentTLikelihood,
)
from pyro_dak.training import build_objective
from pyro_dak.training.loop import DAKLoss

torch.compile = functools.partial(torch.compile, backend="aot_eager")
targets = {
    GaussianLikelihood: torch.randn(50, 1),
    StudentTLikelihood: torch.randn(50, 1),
    BernoulliLikelihood: torch.randint(0, 2, (50, 1)).float(),
    CategoricalLikelihood: torch.randint(0, 3, (50,)),
}
for number, (kind, y) in enumerate(targets.items(), start=1):
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
    num_outputs = 3 if kind is CategoricalLikelihood else 1
    model = DAK(network, 4, num_units=2, num_outputs=num_outputs, likelihood=kind())
    guide = MeanFieldGuide(model)
    loss = DAKLoss(model, guide, build_objective("auto", model, guide), compile=True).train()
    for _ in range(3):
        loss(torch.randn(50, 3), y, 1.0, 50)[0].backward()
    assert dict(torch._dynamo.utils.counters["frames"]) == {"total": number, "ok": number}, kind
assert not torch._dynamo.utils.counters["graph_break"]
"""


@pytest.mark.slow
@scenarios.compiles_training
def test_a_step_is_compiled_once():
    # In a process of its own: the compiler cannot look through the shape checks of the tests.
    scenarios.run_alone(COMPILED_ONCE)


MANY_MODELS = """
import functools, torch
from torch import nn
from pyro_dak import DAK, ClosedFormELBO, MeanFieldGuide
from pyro_dak.training.loop import DAKLoss

torch.compile = functools.partial(torch.compile, backend="aot_eager")
losses = []
for num_units in range(1, 11):
    model = DAK(nn.Identity(), 3, num_units=num_units)
    losses.append(DAKLoss(model, MeanFieldGuide(model), ClosedFormELBO(), compile=True).train())
for loss in [*losses, *losses]:
    loss(torch.randn(50, 3), torch.randn(50, 1), 1.0, 50)[0].backward()
assert dict(torch._dynamo.utils.counters["frames"]) == {"total": 10, "ok": 10}
"""


@pytest.mark.slow
@scenarios.compiles_training
def test_more_models_than_the_compiler_allows_by_itself_are_all_compiled():
    # In a process of its own: the compiler cannot look through the shape checks of the tests.
    scenarios.run_alone(MANY_MODELS)


@pytest.mark.parametrize("objective", ["closed_form", "local", "trace"])
def test_training_that_diverges_is_a_training_error_whatever_the_objective(objective):
    options = {"learning_rate": 1e10, "optimizer": "sgd", "clip_norm": None, "epochs": 20}
    options |= {"last_layer_learning_rate": None, "last_layer_optimizer": None}
    with pytest.raises(TrainingError, match=r"in epoch \d+, step \d+. Lower the learning rate"):
        train(*make_model(), objective=objective, **options)
