"""The state of a training run, its loop, and its checkpoints; `fit` is the way in."""

import json
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_dak.prediction import ClassPrediction, predict
from pyro_dak.training.checkpoint import (
    CheckpointError,
    describe,
    load_module_tensors,
    module_tensors,
    read_directory,
    write_directory,
)
from pyro_dak.training.data import LoaderData, ResidentData
from pyro_dak.training.describe import differences
from pyro_dak.training.optimizers import Schedule
from pyro_dak.training.plan import Checkpoints, History, Settings, TrainingError

__all__ = ["Run"]

Callback = Callable[[int, dict[str, float]], None]


def _flatten(state: dict[int, dict[str, Any]]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Optimiser state as named tensors and plain numbers, "index.name" each."""
    entries = {f"{i}.{name}": v for i, entry in state.items() for name, v in entry.items()}
    tensors = {
        k: v.detach().cpu().clone().contiguous()
        for k, v in entries.items()
        if isinstance(v, Tensor)
    }
    return tensors, {k: v for k, v in entries.items() if not isinstance(v, Tensor)}


def _unflatten(tensors: dict[str, Tensor], numbers: dict[str, Any]) -> dict[int, dict[str, Any]]:
    state: dict[int, dict[str, Any]] = {}
    for key, value in (tensors | numbers).items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    return state


def _match_layout(optimizer: torch.optim.Optimizer) -> None:
    """Lay out the state of each parameter in memory as the parameter is.

    A fused optimiser walks through memory: with channels last in a parameter and not in its state
    it would pair the wrong entries.
    """
    for parameter, entry in optimizer.state.items():
        for name, value in entry.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                entry[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


class Run:
    """A training run: everything that changes from step to step, and the loop over the steps.

    The loss is a `Loss`, or any module like it: with `model` and `guide`, which are what is kept,
    and (x, y, scale, num_data) to the loss and, without gradient, its three terms.
    """

    def __init__(
        self,
        fabric: Any,
        loss: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: ResidentData | LoaderData,
        validation: tuple[Tensor, Tensor] | None,
        schedule: Schedule,
        batches_per_epoch: int,
        settings: Settings,
        checkpoints: Checkpoints | None,
    ):
        self.fabric, self.settings, self.schedule = fabric, settings, schedule
        self.raw_loss, self.raw_optimizer = loss, optimizer
        self.model: Any = loss.model
        self.guide: Any = loss.guide
        self.data, self.validation, self.checkpoints = data, validation, checkpoints
        self.rates = [group["lr"] for group in optimizer.param_groups]
        self.loss, self.optimizer = fabric.setup(loss, optimizer)
        self.batches_per_epoch = batches_per_epoch
        self.history = History()
        self.step = self.epoch = self.batch = 0
        self.totals = torch.zeros(3, dtype=torch.float64, device=fabric.device)
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.generator_state = self.generator.get_state()  # at the start of the epoch
        self.best: dict[str, Tensor] = {}
        self.best_score = math.inf

    def run(self, callbacks: Sequence[Callback], progress: bool) -> History:
        """Train to the end, to early stopping, or to an interrupt."""
        total = self.settings.epochs * self.batches_per_epoch
        show = progress and self.fabric.is_global_zero
        with (
            tqdm(total=total, initial=self.step, desc="fit", unit="step", disable=not show) as bar,
            _catch_interrupt() as interrupt,
        ):
            while self.epoch < self.settings.epochs and self.history.status == "running":
                start = time.perf_counter()
                if not self._train_epoch(bar, interrupt):
                    return self._interrupted()
                row = self._finish_epoch()
                self.history.seconds.append(time.perf_counter() - start)
                bar.set_postfix({k: f"{v:.4g}" for k, v in row.items() if k in _SHOWN})
                for callback in callbacks:
                    callback(self.epoch, row)
        if self.history.status == "running":
            self.history.status = "finished"
        if self.best:
            load_module_tensors(self.model, self.guide, self.best)
        return self.history

    def _train_epoch(self, bar: Any, interrupt: threading.Event) -> bool:
        """The remaining batches of this epoch; False if interrupted."""
        self.raw_loss.train()
        self.generator.set_state(self.generator_state)
        for x, y, scale in self.data.epoch(self.generator, self.batch):
            self._train_step(x, y, scale)
            bar.update()
            if self._any_process(interrupt.is_set()):
                return False
        return True

    def _any_process(self, flag: bool) -> bool:
        """Whether the flag is set in any process, so that all of them stop at the same step."""
        if self.fabric.world_size == 1:
            return flag
        value = torch.tensor(float(flag), device=self.fabric.device)
        return bool(self.fabric.all_reduce(value, reduce_op="sum") > 0)

    def _factor(self, step: int) -> float:
        """Factor of the learning rates at a step."""
        total = self.settings.epochs * self.batches_per_epoch
        return self.schedule(min(step, total - 1), total, self.batches_per_epoch)

    def _train_step(self, x: Tensor, y: Tensor, scale: float) -> None:
        factor = self._factor(self.step)
        for group, rate in zip(self.raw_optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.zero_grad()
        loss, terms = self.loss(x, y, scale, self.data.num_data)
        self.fabric.backward(loss)
        norm = self.fabric.clip_gradients(
            self.loss,
            self.optimizer,
            max_norm=self.settings.clip_norm or math.inf,
            error_if_nonfinite=False,
        )
        # Elsewhere a look at the values would wait for the device; there `save` looks at them.
        if self.fabric.device.type == "cpu":
            self._check_finite(float(terms[0]), "loss")
            self._check_finite(float(norm), "gradient")
        self.optimizer.step()
        self.totals += terms.double()
        self.step += 1
        self.batch += 1

    def _check_finite(self, value: float, name: str) -> None:
        if math.isfinite(value):
            return
        kept = self._newest_checkpoint()
        where = f"The last good checkpoint is {kept}." if kept else "No checkpoint was written."
        raise TrainingError(
            f"The {name} is {value} in epoch {self.epoch + 1}, step {self.step + 1}. Lower the "
            f"learning rate, scale the inputs, or look for a layer that overflows. {where}"
        )

    def _finish_epoch(self) -> dict[str, float]:
        """Close the epoch: its row of the history, early stopping, checkpoint."""
        means = self.fabric.all_reduce(self.totals / self.batch, reduce_op="mean")
        loss, expected_log_lik, kl = (float(value) for value in means)
        self._check_finite(loss, "loss")
        N = self.data.num_data
        row = {
            "loss": loss,
            "elbo": -loss * N,
            "elbo_per_datum": -loss,
            "expected_log_lik": expected_log_lik * N,
            "kl": kl * N,
            "learning_rate": self.rates[0] * self._factor(self.step - 1),
        }
        if self.validation is not None:
            row |= self._validate(*self.validation)
        self.history.rows.append(row)
        self.epoch += 1
        self.batch = 0
        self.totals.zero_()
        self.generator_state = self.generator.get_state()
        if self.settings.patience is not None:
            self._keep_best(row["val_nlpd"], self.settings.patience)
        is_last = self.epoch == self.settings.epochs or self.history.status != "running"
        if self.checkpoints and (is_last or self.epoch % self.checkpoints.every == 0):
            self.save()
        return row

    def _keep_best(self, score: float, patience: int) -> None:
        if score < self.best_score:
            self.best_score, self.history.best_epoch = score, self.epoch
            self.best = module_tensors(self.model, self.guide)
        elif self.epoch - (self.history.best_epoch or 0) >= patience:
            self.history.status = "stopped early"

    def _validate(self, x: Tensor, y: Tensor) -> dict[str, float]:
        """Scores on held-out rows, each process taking its share of them."""
        own = slice(self.fabric.global_rank, None, self.fabric.world_size)
        x, y = x[own].to(self.model.layer.log_unit_scale.dtype), y[own]
        prediction = predict(self.model, self.guide, x, progress=False)
        if isinstance(prediction, ClassPrediction):
            fit = (prediction.label == y).double()
        else:
            fit = (prediction.mean - y).double().square().mean(-1)
        log_prob = prediction.log_prob(y).double()
        sums = torch.stack([log_prob.sum(), fit.sum(), torch.ones_like(fit).sum()])
        total_log_prob, total_fit, count = self.fabric.all_reduce(sums, reduce_op="sum").tolist()
        scores = {"val_nlpd": -total_log_prob / count}
        if isinstance(prediction, ClassPrediction):
            return scores | {"val_accuracy": total_fit / count}
        return scores | {"val_rmse": math.sqrt(total_fit / count)}

    def _interrupted(self) -> History:
        self.history.status = "interrupted"
        if self.checkpoints:
            self.save()
        if self.fabric.is_global_zero:
            kept = self._newest_checkpoint()
            remedy = (
                f"Go on with fit(..., resume_from={str(kept)!r})."
                if kept
                else "Give `checkpoint_dir` to be able to go on from here."
            )
            print(f"Interrupted after step {self.step}. {remedy}", file=sys.stderr)
        return self.history

    def _newest_checkpoint(self) -> Path | None:
        found = Checkpoints.found(self.checkpoints.directory) if self.checkpoints else []
        return found[-1] if found else None

    def save(self) -> None:
        """Write a checkpoint; all processes call it, the first writes. Never one with NaNs."""
        assert self.checkpoints is not None
        weights = module_tensors(self.model, self.guide)
        for name, tensor in weights.items():
            self._check_finite(float(tensor.double().abs().sum()), f"sum of |{name}|")
        rng_states = self.fabric.all_gather(torch.get_rng_state().to(self.fabric.device))
        if self.fabric.is_global_zero:
            tensors, numbers = _flatten(self.raw_optimizer.state_dict()["state"])
            trainer = {f"optimizer.{name}": tensor for name, tensor in tensors.items()}
            trainer |= {f"best.{name}": tensor for name, tensor in self.best.items()}
            trainer["totals"] = self.totals.cpu().clone()
            trainer["generator"] = self.generator_state
            trainer["rng"] = rng_states.cpu().reshape(self.fabric.world_size, -1).clone()
            if self.fabric.device.type == "cuda":
                trainer["cuda_rng"] = torch.cuda.get_rng_state(self.fabric.device)
            config = self._description() | {
                "trainer": {
                    "settings": asdict(self.settings),
                    "num_data": self.data.num_data,
                    "step": self.step,
                    "epoch": self.epoch,
                    "batch": self.batch,
                    "rows": self.history.rows,
                    "status": self.history.status,
                    "best_epoch": self.history.best_epoch,
                    "best_score": self.best_score,
                    "optimizer": numbers,
                }
            }
            path = self.checkpoints.directory / f"step-{self.step:09d}"
            write_directory(path, config, weights, trainer)
            self.checkpoints.prune()
        self.fabric.barrier()

    def _description(self) -> dict[str, Any]:
        """What lets `load` read a checkpoint; nothing for parts that cannot be described."""
        try:
            return describe(self.model, self.guide)
        except ValueError:
            return {"model": None}

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint: weights, optimiser, random state, history."""
        path = Checkpoints.newest(path)
        config, tensors, trainer = read_directory(path)
        state = config.get("trainer")
        if state is None or trainer is None:
            raise CheckpointError(f"{path}: is a saved model, not a checkpoint of a training run.")
        self._check_settings(path, state)
        self._check_description(path, config)
        try:
            load_module_tensors(self.model, self.guide, tensors)
        except RuntimeError as error:
            raise CheckpointError(f"{path}: is of another model or guide: {error}") from error
        self.step, self.epoch, self.batch = state["step"], state["epoch"], state["batch"]
        self.history.rows, self.history.best_epoch = state["rows"], state["best_epoch"]
        if state["status"] == "stopped early":
            self.history.status = "stopped early"
        self.best_score = state["best_score"]
        self.best = _with_prefix(trainer, "best.")
        self.totals.copy_(trainer["totals"])
        self.generator_state = trainer["generator"]
        current = self.raw_optimizer.state_dict()
        optimizer_tensors = _with_prefix(trainer, "optimizer.")
        current["state"] = _unflatten(optimizer_tensors, state["optimizer"])
        self.raw_optimizer.load_state_dict(current)
        _match_layout(self.raw_optimizer)
        if len(trainer["rng"]) == self.fabric.world_size:
            torch.set_rng_state(trainer["rng"][self.fabric.global_rank].clone())
        if "cuda_rng" in trainer and self.fabric.device.type == "cuda":
            torch.cuda.set_rng_state(trainer["cuda_rng"], self.fabric.device)

    def _check_settings(self, path: Path, state: dict[str, Any]) -> None:
        now = asdict(self.settings) | {"num_data": self.data.num_data}
        then = state["settings"] | {"num_data": state["num_data"]}
        then.setdefault("last_layer_optimizer", then["optimizer"])  # older files have none
        different = [f"{k}: {then.get(k)} then, {now[k]} now" for k in now if now[k] != then.get(k)]
        if different:
            raise ValueError(
                f"`resume_from` ({path}) was made with other settings ({'; '.join(different)}). "
                "Use the same ones, or load the weights and start anew."
            )

    def _check_description(self, path: Path, config: dict[str, Any]) -> None:
        """Raise if the checkpoint is of another model, also where weights of the same shapes fit.

        Not compared are models that cannot be described, parts of them that are only known by
        their weights, and a noise that is learned.
        """
        now = json.loads(json.dumps(self._description()))
        then, now = ({k: c.get(k) for k in ("model", "guide")} for c in (config, now))
        different = list(differences(then, now))
        if different:
            raise CheckpointError(
                f"{path}: is of another model or guide ({'; '.join(different)}). "
                "Build the same ones, or start anew."
            )


_SHOWN = ("loss", "val_nlpd", "val_rmse", "val_accuracy")


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


@contextmanager
def _catch_interrupt() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets, so that no step is cut in half; the second raises."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def handle(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)
