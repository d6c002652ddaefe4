"""The training loop: one loop over (learner, data, plan) for `fit`, ensembles and baselines.

`Learner` is all that the loop knows of what it trains. `DAKLoss` is the learner of `fit`.
"""

import json
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from pyro.infer import ELBO
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_dak.fast.compiling import Compiled
from pyro_dak.inference.objectives import AnalyticELBO
from pyro_dak.model.dak import DAK
from pyro_dak.prediction import ClassPrediction, predict
from pyro_dak.training.checkpoint import (
    CheckpointError,
    Checkpoints,
    read_directory,
    write_directory,
)
from pyro_dak.training.data import Batch, Data
from pyro_dak.training.describe import describe, differences
from pyro_dak.training.optimizers import build_optimizers, load_optimizers, optimizer_state
from pyro_dak.training.plan import History, Plan, TrainingError

__all__ = ["Callback", "DAKLoss", "Learner", "Run", "ScoreFn", "frozen", "seeded"]

# Called after each epoch with its number, from 1 on, and its row of the history.
Callback = Callable[[int, dict[str, float]], None]
# Scores of held-out rows, `(E, n)` for E members, where smaller is better; `(1, 1)` for one model
# with one number. With them come entries for the row of the history.
ScoreFn = Callable[[], tuple[Tensor, dict[str, float]]]

_SHOWN = ("loss", "val_nlpd", "val_rmse", "val_accuracy", "val_score")


class Learner:
    """What the loop trains: a loss, its parameters and the tensors that are kept.

    A subclass gives `forward`, `parameter_groups`, and as `state_dict` all tensors that checkpoints
    and the best epoch keep, sharing their memory. It is usually an `nn.Module` too, named first
    among the bases, whose `state_dict` and `train` serve here; with Fabric it must be one.

    Attributes:
        num_members: E, if every tensor has E members along its first axis, which are clipped, kept
            and restored one by one; None for one model.
        num_terms: how many numbers `forward` gives the history.
        objective: a name of what is minimised, which a resumed run must have in common.
        advice: what to do when the loss is not finite, for the error message.
    """

    num_members: int | None = None
    num_terms: int = 1
    objective: str = "loss"
    advice = "Lower the learning rate, scale the inputs, or look for a layer that overflows."

    def __call__(self, *batch: Any) -> tuple[Tensor, Tensor]:
        return self.forward(*batch)

    def forward(
        self, x: Tensor, y: Tensor, scale: float | Tensor, num_data: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        """The loss of one batch per datum, a scalar, and its terms `(num_terms,)`, loss first.

        The terms have no gradient. Each row stands for `scale` rows of a data set of `num_data`.
        """
        raise NotImplementedError

    def parameter_groups(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The parameters of the network, which have weight decay, and those of the last layer."""
        raise NotImplementedError

    def train(self) -> Any:
        """Go into training mode; called at the start of each epoch."""

    def history_row(self, means: list[float], num_rows: int) -> dict[str, float]:
        """The row of the history, from the terms averaged over the batches of an epoch."""
        return {"loss": means[0]}

    def description(self) -> dict[str, Any]:
        """What a checkpoint says about the model; a resumed run must have the same."""
        return {"model": None}

    def clip_gradients(self, parameters: Sequence[Tensor], clip_norm: float | None) -> Tensor:
        """Scale the gradient down to norm `clip_norm`, and return its norm before."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        # Elsewhere than on the CPU a look at the norm would wait for the device.
        is_small = norm.is_cpu and float(norm) + 1e-6 <= (clip_norm or math.inf)
        if clip_norm is not None and not is_small:
            nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
        return norm


class DAKLoss(nn.Module, Learner):
    """Minus the ELBO per datum of a DAK with its guide: the learner of `fit`.

    With `from_features`, x are features, and the extractor stays as it is. With `compile`, the
    forward pass is compiled; where that fails, it warns and goes on without.
    """

    num_terms = 3

    def __init__(
        self,
        model: DAK,
        guide: nn.Module,
        objective: ELBO,
        from_features: bool = False,
        compile: bool = False,
    ):
        super().__init__()
        self.model, self.guide = model, guide
        self.elbo, self.from_features = objective, from_features
        self.objective = type(objective).__name__
        if compile:
            model.layer.activation.prepare(model.layer.log_unit_scale)
            self.forward = Compiled(self.forward)  # type: ignore[method-assign, assignment]

    def forward(  # type: ignore[override]
        self, x: Tensor, y: Tensor, scale: float, num_data: int
    ) -> tuple[Tensor, Tensor]:
        """The loss of one batch per datum, and loss, expected log-likelihood and KL, `(3,)`."""
        effective = scale * len(y)
        if isinstance(self.elbo, AnalyticELBO):
            h = self.model.embed(x) if self.from_features else self.model.unit_inputs(x)
            guide: Any = self.guide  # the objective checks that it is Gaussian
            terms = self.elbo.terms_from_units(self.model, guide, h, y, effective)
            loss, parts = terms.kl - terms.expected_log_lik, [*terms]
        else:
            program = self._from_features if self.from_features else self.model
            loss = self.elbo.differentiable_loss(program, self.guide, x, y, num_data=effective)
            parts = [torch.full_like(loss, math.nan)] * 2
        with torch.no_grad():
            means = torch.stack([loss, *parts]).div_(num_data)
        return loss / num_data, means

    def _from_features(self, x: Tensor, y: Tensor, num_data: float) -> Tensor:
        return self.model.observe(self.model.embed(x), y, num_data)

    def parameter_groups(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Extractor and embedding; scales of the units, noise and guide."""
        model, network = self.model, nn.ModuleList([self.model.feature_extractor])
        if model.embedding is not None:
            network.append(model.embedding)
        last_layer = nn.ModuleList([model.layer, model.likelihood, self.guide])
        return [*network.parameters()], [*last_layer.parameters()]

    def history_row(self, means: list[float], num_rows: int) -> dict[str, float]:
        loss, expected_log_lik, kl = means
        return {
            "loss": loss,
            "elbo": -loss * num_rows,
            "elbo_per_datum": -loss,
            "expected_log_lik": expected_log_lik * num_rows,
            "kl": kl * num_rows,
        }

    def description(self) -> dict[str, Any]:
        """What lets `load` read a checkpoint; nothing for parts that cannot be described."""
        try:
            return describe(self.model, self.guide)
        except ValueError:
            return {"model": None}

    def score(self, x: Tensor, y: Tensor, fabric: Any) -> tuple[Tensor, dict[str, float]]:
        """Scores of held-out rows, of which each process takes its share; a `ScoreFn`."""
        own = slice(fabric.global_rank, None, fabric.world_size)
        x, y = x[own].to(self.model.layer.log_unit_scale.dtype), y[own]
        prediction = predict(self.model, self.guide, x, progress=False)
        if isinstance(prediction, ClassPrediction):
            name, fit = "val_accuracy", (prediction.label == y).double()
        else:
            name, fit = "val_rmse", (prediction.mean - y).double().square().mean(-1)
        log_prob = prediction.log_prob(y).double()
        sums = torch.stack([log_prob.sum(), fit.sum(), torch.ones_like(fit).sum()])
        total_log_prob, total_fit, num_rows = fabric.all_reduce(sums, reduce_op="sum").tolist()
        nlpd, mean_fit = -total_log_prob / num_rows, total_fit / num_rows
        entries = {"val_nlpd": nlpd, name: math.sqrt(mean_fit) if name == "val_rmse" else mean_fit}
        return torch.tensor([[nlpd]], dtype=torch.float64), entries


def _one_process(device: torch.device) -> Any:
    """What the loop asks of Lightning Fabric, for one process in the precision of its tensors."""
    return SimpleNamespace(
        device=device,
        world_size=1,
        global_rank=0,
        is_global_zero=True,
        setup=lambda *parts: parts,
        backward=lambda loss: loss.backward(),
        all_reduce=lambda value, reduce_op: value,
        all_gather=lambda value: value,
        barrier=lambda: None,
    )


class _Best:
    """The tensors of every member at its best scoring so far, and whether its last is worse.

    A member is worse if its last scores exceed its best ones by two standard errors of the
    difference. A single score has no standard error, so that it is worse unless it is better.
    """

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}  # (E, ...) each
        self.scores = self.epochs = self.is_worse = torch.empty(0)
        self.last_epoch = self.num_worse = 0

    def update(self, scores: Tensor, epoch: int, tensors: Mapping[str, Tensor]) -> None:
        """Take note of scores `(E, n)`, and keep the tensors of the members that are better."""
        if not self.kept:
            self.kept = {name: tensor.clone() for name, tensor in tensors.items()}
            self.scores = torch.full_like(scores, math.inf)
            self.epochs = torch.zeros(len(scores), dtype=torch.long, device=scores.device)
        is_better = scores.mean(-1) < self.scores.mean(-1)
        self.scores = torch.where(is_better.unsqueeze(-1), scores, self.scores)
        self.epochs = torch.where(is_better, epoch, self.epochs)
        for name, tensor in tensors.items():
            mask = is_better.to(tensor.device)
            self.kept[name][mask] = tensor[mask]
        n = scores.shape[-1]
        difference = scores - self.scores
        standard_error = difference.std(-1, correction=min(1, n - 1)) / math.sqrt(n)
        self.is_worse = ~is_better & ~(difference.mean(-1) < 2 * standard_error)
        self.last_epoch = epoch
        self.num_worse = self.num_worse + 1 if bool(self.is_worse.all()) else 0

    def restore(self, tensors: Mapping[str, Tensor]) -> int | None:
        """Put the kept tensors back where the last are worse; returns the median of the epochs."""
        for name, tensor in tensors.items():
            mask = (self.is_worse & (self.epochs > 0)).to(tensor.device)
            tensor[mask] = self.kept[name][mask]
        return int(torch.where(self.is_worse, self.epochs, self.last_epoch).median()) or None


class Run:
    """A training run: all that changes from step to step, the loop, and its checkpoints.

    The learner is changed in place. Without a launched Fabric the run has one process, on the
    device of the learner.
    """

    def __init__(
        self,
        learner: Any,
        data: Data,
        plan: Plan,
        score_fn: ScoreFn | None = None,
        checkpoints: Checkpoints | None = None,
        fabric: Any = None,
    ):
        if checkpoints is not None and learner.num_members is not None:
            raise NotImplementedError("Checkpoints hold one model; train an ensemble without.")
        assert data.batches_per_epoch is not None
        self.learner, self.data, self.plan, self.score_fn = learner, data, plan, score_fn
        self.checkpoints, self.batches_per_epoch = checkpoints, data.batches_per_epoch
        groups = plan.groups(*learner.parameter_groups())
        self.parameters = [p for group in groups for p in group["params"]]
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self.fabric = _one_process(device) if fabric is None else fabric
        precision = None if fabric is None else fabric.strategy.precision
        self.scaler = getattr(precision, "scaler", None)
        is_half = "16" in getattr(precision, "precision", "")
        self.raw_optimizers = build_optimizers(
            groups, fused=device.type in ("cpu", "cuda") and not is_half
        )
        self.loss, *self.optimizers = self.fabric.setup(learner, *self.raw_optimizers)
        self.history = History()
        self.step = self.epoch = self.batch = 0
        self.totals = torch.zeros(learner.num_terms, dtype=torch.float64, device=self.fabric.device)
        self.generator = torch.Generator().manual_seed(plan.seed)
        self.generator_state = self.generator.get_state()  # at the start of the epoch
        self.best = _Best()

    def run(
        self,
        callbacks: Sequence[Callback] = (),
        progress: bool = False,
        description: str = "fit",
        keep_bar: bool = False,
        catch_interrupt: bool = False,
    ) -> History:
        """Train to the end, until held-out scores get worse, or until an interrupt.

        With `keep_bar` the bar shows at once and stays at the end. Otherwise it shows after two
        seconds and goes away. With `catch_interrupt` the first Ctrl-C ends the run after its step,
        with a checkpoint, instead of raising KeyboardInterrupt at once.
        """
        total = self.plan.num_epochs * self.batches_per_epoch
        hidden = not (progress and self.fabric.is_global_zero)
        options = {"unit": "step", "delay": 0 if keep_bar else 2, "leave": keep_bar}
        steps = tqdm(desc=description, total=total, initial=self.step, disable=hidden, **options)
        with steps as bar, _interrupts(catch_interrupt) as interrupt:
            while self.epoch < self.plan.num_epochs and self.history.status == "running":
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
        if self.best.kept:
            self.history.best_epoch = self.best.restore(self._by_member())
        return self.history

    def _train_epoch(self, bar: Any, interrupt: threading.Event) -> bool:
        """Train on the remaining batches of this epoch; returns False if interrupted."""
        self.learner.train()
        self.generator.set_state(self.generator_state)
        batches = self.data.epoch(self.generator, self.batch)
        factors = self.plan.factors(self.step, self.batches_per_epoch)
        for batch, factor in zip(batches, factors, strict=False):
            self.train_step(batch, factor)
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

    def train_step(self, batch: Batch, factor: float) -> None:
        """One step of the optimisers, with their learning rates times `factor`."""
        for optimizer in self.raw_optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
        for parameter in self.parameters:
            parameter.grad = None
        loss, terms = self.loss(*batch, self.data.num_data)
        self.fabric.backward(loss)
        if self.scaler is not None:
            for optimizer in self.raw_optimizers:
                self.scaler.unscale_(optimizer)
        norms = self.learner.clip_gradients(self.parameters, self.plan.clip_norm)
        # Elsewhere a look at the values would wait for the device; there `save` looks at them.
        if terms.is_cpu and not math.isfinite(float(terms[0]) + float(norms.sum())):
            self._check_finite(float(terms[0]), "loss")
            self._check_finite(float(norms.sum()), "gradient")
        if self.scaler is None:
            for optimizer in self.optimizers:
                optimizer.step()
        else:  # one update of the scale, however many optimisers there are
            for optimizer in self.raw_optimizers:
                self.scaler.step(optimizer)
            self.scaler.update()
        self.totals += terms
        self.step += 1
        self.batch += 1

    def _check_finite(self, value: float, name: str) -> None:
        if not math.isfinite(value):
            kept = self._newest_checkpoint()
            where = f" The last good checkpoint is {kept}." if kept else ""
            raise TrainingError(
                f"The {name} is {value} in epoch {self.epoch + 1}, step {self.step + 1}. "
                f"{self.learner.advice}{where}"
            )

    def _finish_epoch(self) -> dict[str, float]:
        """Close the epoch: its row of the history, early stopping, checkpoint."""
        means = self.fabric.all_reduce(self.totals / self.batch, reduce_op="mean").tolist()
        self._check_finite(means[0], "loss")
        row = self.learner.history_row(means, self.data.num_rows)
        row["learning_rate"] = self.raw_optimizers[0].param_groups[0]["lr"]
        self.epoch += 1
        self.batch = 0
        self.totals.zero_()
        self.generator_state = self.generator.get_state()
        if self.score_fn is not None and self.plan.is_scored(self.epoch):
            scores, entries = self.score_fn()
            row |= entries
            if self.plan.patience is not None:
                self.best.update(scores, self.epoch, self._by_member())
                self.history.best_epoch = int(self.best.epochs.median()) or None
                if self.best.num_worse >= max(1, self.plan.patience):
                    self.history.status = "stopped early"
        self.history.rows.append(row)
        is_last = self.epoch == self.plan.num_epochs or self.history.status != "running"
        if self.checkpoints and (is_last or self.epoch % self.checkpoints.every == 0):
            self.save()
        return row

    def _by_member(self) -> dict[str, Tensor]:
        """The tensors of the learner with an axis of members first, sharing their memory."""
        tensors = {name: t.detach() for name, t in self.learner.state_dict().items()}
        is_stacked = self.learner.num_members is not None
        return tensors if is_stacked else {name: t.unsqueeze(0) for name, t in tensors.items()}

    def _interrupted(self) -> History:
        self.history.status = "interrupted"
        if self.checkpoints:
            self.save()
        if self.fabric.is_global_zero:
            remedy = "Give `checkpoint_dir` to be able to go on from here."
            if kept := self._newest_checkpoint():
                remedy = f"Go on with fit(..., resume_from={str(kept)!r})."
            print(f"Interrupted after step {self.step}. {remedy}", file=sys.stderr)
        return self.history

    def _newest_checkpoint(self) -> Path | None:
        found = Checkpoints.found(self.checkpoints.directory) if self.checkpoints else []
        return found[-1] if found else None

    def _settings(self) -> dict[str, Any]:
        """What must be the same for a resumed run to equal an uninterrupted one."""
        return self.plan.settings() | {
            "objective": self.learner.objective,
            "has_validation": self.score_fn is not None,
            "world_size": self.fabric.world_size,
        }

    def save(self) -> None:
        """Write a checkpoint; all processes call it, the first writes. Never one with NaNs."""
        assert self.checkpoints is not None
        weights = self.learner.state_dict()
        for name, tensor in weights.items():
            self._check_finite(float(tensor.double().abs().sum()), f"sum of |{name}|")
        rng_states = self.fabric.all_gather(torch.get_rng_state().to(self.fabric.device))
        if self.fabric.is_global_zero:
            states = optimizer_state(self.raw_optimizers)
            trainer = {f"optimizer.{name}": tensor for name, tensor in states.items()}
            trainer |= {f"best.{name}": tensor[0] for name, tensor in self.best.kept.items()}
            trainer |= {"totals": self.totals, "generator": self.generator_state}
            trainer["rng"] = rng_states.reshape(self.fabric.world_size, -1)
            if self.fabric.device.type == "cuda":
                trainer["cuda_rng"] = torch.cuda.get_rng_state(self.fabric.device)
            state = {
                "step": self.step,
                "epoch": self.epoch,
                "batch": self.batch,
                "rows": self.history.rows,
                "status": self.history.status,
                "best_epoch": self.history.best_epoch,
                "best_score": float(self.best.scores) if self.best.kept else math.inf,
                "num_data": self.data.num_rows,
                "settings": self._settings(),
            }
            path = self.checkpoints.directory / f"step-{self.step:09d}"
            write_directory(path, self.learner.description() | {"trainer": state}, weights, trainer)
            self.checkpoints.prune()
        self.fabric.barrier()

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint: weights, optimisers, random state and history."""
        path = Checkpoints.newest(path)
        config, tensors, trainer = read_directory(path)
        state = config.get("trainer")
        if state is None or trainer is None:
            raise CheckpointError(f"{path}: is a saved model, not a checkpoint of a training run.")
        self._check_same(path, config)
        try:
            self.learner.load_state_dict(tensors)
        except RuntimeError as error:
            raise CheckpointError(f"{path}: is of another model or guide: {error}") from error
        self.step, self.epoch, self.batch = state["step"], state["epoch"], state["batch"]
        self.history.rows, self.history.best_epoch = state["rows"], state["best_epoch"]
        if state["status"] == "stopped early":
            self.history.status = "stopped early"
        if self.history.best_epoch is not None:
            self._load_best(state, _with_prefix(trainer, "best."))
        self.totals.copy_(trainer["totals"])
        self.generator_state = trainer["generator"]
        load_optimizers(self.raw_optimizers, _with_prefix(trainer, "optimizer."))
        if len(trainer["rng"]) == self.fabric.world_size:
            torch.set_rng_state(trainer["rng"][self.fabric.global_rank].clone())
        if "cuda_rng" in trainer and self.fabric.device.type == "cuda":
            torch.cuda.set_rng_state(trainer["cuda_rng"], self.fabric.device)

    def _load_best(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        best, epoch = self.best, state["best_epoch"]
        best.kept = {k: t.unsqueeze(0).to(self.fabric.device) for k, t in tensors.items()}
        best.scores = torch.tensor([[state["best_score"]]], dtype=torch.float64)
        best.epochs, best.last_epoch = torch.tensor([epoch]), self.epoch
        best.num_worse = self.epoch - epoch
        best.is_worse = torch.tensor([best.num_worse > 0])

    def _check_same(self, path: Path, config: dict[str, Any]) -> None:
        """Raise if the checkpoint has other settings or another model, even if its weights fit.

        Models that cannot be described are not compared, nor are parts of them that are only known
        by their weights, nor a noise that is learned.
        """
        state, now = config["trainer"], self._settings() | {"num_data": self.data.num_rows}
        then = dict.fromkeys(now) | state["settings"] | {"num_data": state["num_data"]}
        if then["last_layer_optimizer"] is None:  # older files have none
            then["last_layer_optimizer"] = then["optimizer"]
        if different := "; ".join(differences(then, now)):
            raise ValueError(
                f"`resume_from` ({path}) was made with other settings ({different}). "
                "Use the same ones, or load the weights and start anew."
            )
        now = json.loads(json.dumps(self.learner.description()))
        then, now = ({k: c.get(k) for k in ("model", "guide")} for c in (config, now))
        if different := "; ".join(differences(then, now)):
            raise CheckpointError(
                f"{path}: is of another model or guide ({different}). "
                "Build the same ones, or start anew."
            )


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers from `seed` on inside; the global random state comes back after."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextmanager
def frozen(module: nn.Module, is_frozen: bool) -> Iterator[None]:
    """The parameters of `module` have no gradient inside, if `is_frozen`."""
    parameters = [p for p in module.parameters() if p.requires_grad] if is_frozen else []
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


@contextmanager
def _interrupts(are_caught: bool) -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets, so that no step is cut in half; the second raises."""
    event = threading.Event()
    if not are_caught or threading.current_thread() is not threading.main_thread():
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
