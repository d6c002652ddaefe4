"""The training loop: one loop over (learner, data, plan) for `fit`, ensembles and baselines.

`Learner` is all that the loop knows of what it trains. `DAKLoss` is the learner of `fit`.
"""

import json
import math
import signal
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyro
import torch
import torch.distributed
from pyro.infer import ELBO
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_dak.fast.compiling import Compiled
from pyro_dak.fast.optimizer import few_calls_class, total_norm
from pyro_dak.inference.objectives import AnalyticELBO
from pyro_dak.model.dak import DAK
from pyro_dak.model.likelihoods import CategoricalLikelihood
from pyro_dak.model.missing import is_observed
from pyro_dak.model.modes import evaluating
from pyro_dak.model.rows import Inputs, like_model, take
from pyro_dak.prediction import ClassPrediction, predict
from pyro_dak.training.checkpoint import (
    MAX_BYTES,
    CheckpointError,
    Checkpoints,
    Newest,
    blaming,
    is_finite,
    write_directory,
)
from pyro_dak.training.data import Batch, Data, data_differences, rewound
from pyro_dak.training.describe import describe, differences
from pyro_dak.training.held_out import HeldOut
from pyro_dak.training.optimizers import build_optimizers, load_optimizers, optimizer_state
from pyro_dak.training.plan import History, Plan, TrainingError

__all__ = ["Callback", "DAKLoss", "Learner", "Run", "ScoreFn", "frozen", "one_process", "seeded"]

# Called after each epoch with its number, from 1 on, and its row of the history.
Callback = Callable[[int, dict[str, float]], None]
# Scores of held-out rows, where smaller is better: `(E, n)` for E members, each of which stops at
# its own best, `(1, n)` if all stop together, and `(1, 1)` for one model with one number. With them
# come entries for the row of the history.
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

    def __call__(self, *batch: Any) -> tuple[Any, ...]:
        return self.forward(*batch)

    def forward(
        self, x: Inputs, y: Tensor, scale: float | Tensor, num_data: int | Tensor
    ) -> tuple[Any, ...]:
        """The loss of one batch per datum, a scalar, and its terms `(num_terms,)`, loss first.

        The terms have no gradient. Each row stands for `scale` rows of a data set of `num_data`;
        in a batch of average size these make up the whole data set, in a short one fewer. What
        comes after the terms goes to `after_step`.
        """
        raise NotImplementedError

    def after_step(self, seen: Any, num_rows: int, num_data: int, fabric: Any) -> None:
        """Learn what no optimiser learns, after the step of the optimisers.

        Args:
            seen: what `forward` returned after the terms.
            num_rows: rows of the batch in this process.
            num_data: rows of the data set.
            fabric: adds up over processes.
        """

    def after_epoch(self) -> None:
        """Finish what an epoch has left undone; called before held-out rows are scored."""

    def progress(self) -> dict[str, Any]:
        """What a checkpoint keeps besides tensors, as plain data."""
        return {}

    def progress_tensors(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint keeps for the run to go on, and that are no weights."""
        return {}

    def restore_progress(self, progress: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Go on from what `progress` and `progress_tensors` returned, read from a file."""

    def parameter_groups(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The parameters of the network, which have weight decay, and those of the last layer."""
        raise NotImplementedError

    def train(self) -> Any:
        """Go into training mode; called at the start of each epoch."""

    def history_row(self, means: list[float], num_rows: int) -> dict[str, float]:
        """The row of the history, from the terms averaged over the rows of an epoch."""
        return {"loss": means[0]}

    def description(self) -> dict[str, Any]:
        """What a checkpoint says about the model; a resumed run must have the same."""
        return {"model": None}

    def clip_gradients(self, parameters: Sequence[Tensor], clip_norm: float | None) -> Tensor:
        """Scale the gradient down to norm `clip_norm`, and return its norm before."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = total_norm(gradients)
        if clip_norm is None:
            return norm
        if not norm.is_cpu:  # a look at the norm would wait for the device
            nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
        elif not (total := float(norm) + 1e-6) <= clip_norm:
            torch._foreach_mul_(gradients, clip_norm / total)
        return norm


class DAKLoss(nn.Module, Learner):
    """Minus the ELBO per datum of a DAK with its guide: the learner of `fit`.

    With `from_features`, x are features, and the extractor stays as it is. With `compile`, the
    forward pass is compiled; where that fails, it warns and goes on without.
    """

    num_terms = 3
    compiled_method = "forward"

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
            setattr(self, self.compiled_method, Compiled(getattr(self, self.compiled_method)))

    def forward(  # type: ignore[override]
        self, x: Inputs, y: Tensor, scale: float, num_data: int
    ) -> tuple[Tensor, Tensor]:
        """The loss of one batch per datum, and loss, expected log-likelihood and KL, `(3,)`.

        All count by the size of the batch in average batches (see `pyro_dak.training.data`).
        """
        weight = scale * len(y) / num_data
        if isinstance(self.elbo, AnalyticELBO):
            h = self.unit_inputs(x)
            guide: Any = self.guide  # the objective checks that it is Gaussian
            terms = self.elbo.terms_from_units(self.model, guide, h, y, num_data)
            loss, parts = terms.kl - terms.expected_log_lik, [*terms]
        else:
            program = self._from_features if self.from_features else self.model
            loss = self.elbo.differentiable_loss(program, self.guide, x, y, num_data=num_data)
            parts = [torch.full_like(loss, math.nan)] * 2
        with torch.no_grad():
            means = torch.stack([loss, *parts]).mul_(weight / num_data)
        return loss * (weight / num_data), means

    def unit_inputs(self, x: Any) -> Tensor:
        """h of a batch, `(N, P)`."""
        return self.model.embed(x) if self.from_features else self.model.unit_inputs(x)

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

    def evaluate(self, data: Data, fabric: Any, seed: int) -> dict[str, float]:
        """The bound of the model as it is, by one pass over the data in eval mode.

        The entries are those of a row of the history. Objectives that draw do so from `seed` on.
        """
        # The class's own: a compiled one would be compiled once more, for eval mode.
        forward: Any = partial(DAKLoss.forward, self)
        like, device = self.model.layer.log_unit_scale, fabric.device
        totals = torch.zeros(self.num_terms, dtype=torch.float64, device=device)
        with evaluating(self), seeded(seed + fabric.global_rank, device), rewound(data.generators):
            for x, y, scale in data.epoch(torch.Generator().manual_seed(seed), 0):
                rows = like_model(x, like), like_model(y, like)
                totals += forward(*rows, scale, data.num_rows)[1]
        means = fabric.all_reduce(totals / data.epoch_weight, reduce_op="mean").tolist()
        return self.history_row(means, data.num_rows)

    def score(self, held_out: HeldOut) -> tuple[Tensor, dict[str, float]]:
        """Scores of held-out rows, of which each process takes its share; a `ScoreFn`."""
        like, fabric = self.model.layer.log_unit_scale, held_out.fabric
        has_classes = isinstance(self.model.likelihood, CategoricalLikelihood)
        totals = torch.zeros(4, dtype=torch.float64, device=fabric.device)
        for x, y in held_out.batches():
            x, y = self._scored(x, y)
            if len(y) == 0:  # a short batch has no row for some processes
                continue
            prediction = predict(
                self.model, self.guide, like_model(x, like), novelty=False, progress=False
            )
            if isinstance(prediction, ClassPrediction):
                fit = (prediction.label == y).double()
            else:
                fit = (prediction.mean - y).double().square()
                fit = fit[~fit.isnan()]  # without missing targets
            log_prob = prediction.log_prob(y).double()
            numbers = [log_prob.sum(), fit.sum(), len(y), fit.numel()]
            totals += torch.stack([torch.as_tensor(n, device=y.device) for n in numbers])
        log_prob, fit, num_rows, num_fits = fabric.all_reduce(totals, reduce_op="sum").tolist()
        if num_rows == 0:
            raise ValueError("`validation` must hold targets; all of them are missing.")
        nlpd, mean_fit = -log_prob / num_rows, fit / num_fits
        entry = {"val_accuracy": mean_fit} if has_classes else {"val_rmse": math.sqrt(mean_fit)}
        return torch.tensor([[nlpd]], dtype=torch.float64), {"val_nlpd": nlpd, **entry}

    def _scored(self, x: Any, y: Tensor) -> tuple[Any, Tensor]:
        """The rows that have a target."""
        observed = is_observed(self.model.likelihood, y)
        if observed is None:
            return x, y
        rows = observed.reshape(len(y), -1).any(-1).nonzero().squeeze(-1)
        return take(x, rows), y[rows]


def one_process(device: torch.device) -> Any:
    """What training asks of Lightning Fabric, for one process in the precision of its tensors."""
    return SimpleNamespace(
        device=device,
        strategy=SimpleNamespace(precision=None),
        world_size=1,
        global_rank=0,
        is_global_zero=True,
        setup=lambda *parts: parts,
        backward=lambda loss: loss.backward(),
        broadcast=lambda value: value,
        all_reduce=lambda value, reduce_op: value,
        all_gather=lambda value: value,
        barrier=lambda: None,
    )


class _Best:
    """The tensors of every member at its best scoring so far.

    `num_worse` counts the last scorings in which all members were clearly worse: their scores
    exceeded their best ones by two standard errors of the difference. A single score has no
    standard error, so that it is worse unless it is better. One row of scores, `(1, n)`, decides
    for all members at once.
    """

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}  # (E, ...) each
        self.scores = self.epochs = torch.empty(0)
        self.last_epoch = self.num_worse = 0

    def update(self, scores: Tensor, epoch: int, tensors: Mapping[str, Tensor]) -> None:
        """Take note of scores, and keep the tensors of the members that are better."""
        if not self.kept:
            self.kept = {name: tensor.clone() for name, tensor in tensors.items()}
            self.scores = torch.full_like(scores, math.inf)
            self.epochs = torch.zeros(len(scores), dtype=torch.long, device=scores.device)
        is_better = scores.mean(-1) < self.scores.mean(-1)
        self.scores = torch.where(is_better.unsqueeze(-1), scores, self.scores)
        self.epochs = torch.where(is_better, epoch, self.epochs)
        for name, tensor in tensors.items():
            mask = is_better.to(tensor.device).expand(len(tensor))
            self.kept[name][mask] = tensor[mask]
        n = scores.shape[-1]
        difference = scores - self.scores
        standard_error = difference.std(-1, correction=min(1, n - 1)) / math.sqrt(n)
        is_worse = ~is_better & ~(difference.mean(-1) < 2 * standard_error)
        self.last_epoch = epoch
        self.num_worse = self.num_worse + 1 if bool(is_worse.all()) else 0

    def restore(self, tensors: Mapping[str, Tensor]) -> int | None:
        """Put the kept tensors back where the last are not better; returns the median epoch."""
        for name, tensor in tensors.items():
            mask = (self.epochs > 0).to(tensor.device).expand(len(tensor))
            tensor[mask] = self.kept[name][mask]
        return int(torch.where(self.epochs > 0, self.epochs, self.last_epoch).median()) or None


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
        self.fabric = one_process(device) if fabric is None else fabric
        precision = self.fabric.strategy.precision
        self.scaler = getattr(precision, "scaler", None)
        is_half = "16" in getattr(precision, "precision", "")
        is_fused = device.type in ("cpu", "cuda") and not is_half
        self.raw_optimizers = build_optimizers(groups, is_fused, few_calls_class)
        self.loss, *self.optimizers = self.fabric.setup(learner, *self.raw_optimizers)
        self.history = History()
        self.step = self.epoch = self.batch = 0
        self.totals = torch.zeros(learner.num_terms, dtype=torch.float64, device=self.fabric.device)
        # The order of the rows comes from the first of these, and from those of a loader.
        self.generators = [torch.Generator().manual_seed(plan.seed), *data.generators]
        self.generator_states = self._generator_states()  # at the start of the epoch
        self.best = _Best()
        # Constants may be infinite, as bounds are; weights that training has made so are an error.
        self.finite = {name for name, tensor in self._real_tensors() if is_finite(tensor)}

    def _generator_states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self.generators]

    def run(
        self,
        callbacks: Sequence[Callback] = (),
        progress: bool = False,
        description: str = "fit",
        keep_bar: bool = False,
        on_interrupt: str | None = None,
    ) -> History:
        """Train to the end, until held-out scores get worse, or until Ctrl-C or SIGTERM.

        With `keep_bar` the bar shows at once and stays at the end. Otherwise it shows after two
        seconds and goes away. With `on_interrupt`, a signal ends the run after its step, with a
        checkpoint if there is a place for one, and the weights stay as they are. Then a
        KeyboardInterrupt is raised, with the `history`; with "return", Ctrl-C returns the history
        instead. Without `on_interrupt`, signals do what they do anyway.
        """
        total = self.plan.num_epochs * self.batches_per_epoch
        hidden = not (progress and self.fabric.is_global_zero)
        options = {"unit": "step", "delay": 0 if keep_bar else 2, "leave": keep_bar}
        steps = tqdm(desc=description, total=total, initial=self.step, disable=hidden, **options)
        with steps as bar, _stop_signals(on_interrupt is not None) as stop:
            while self._is_unfinished() and not self._is_stopped(stop):
                start = time.perf_counter()
                if not self._train_epoch(bar, stop):
                    break
                row = self._finish_epoch()
                self.history.seconds.append(time.perf_counter() - start)
                bar.set_postfix({k: f"{v:.4g}" for k, v in row.items() if k in _SHOWN})
                for callback in callbacks:
                    callback(self.epoch, row)
            if self._is_unfinished():
                self.history.status = "interrupted"
                if self.checkpoints:
                    self.save()
        if self.history.status == "running":
            self.history.status = "finished"
        if self.best.kept and self.history.status != "interrupted":
            self.history.best_epoch = self.best.restore(self._by_member())
        if self.history.status != "interrupted":
            self._check_weights()
        if stop.number:
            self._tell_interrupt(stop.number, on_interrupt)
        return self.history

    @contextmanager
    def naming_lost_processes(self, timeout: float) -> Iterator[None]:
        """Say in words that another process is gone, or has not answered in time, if it is so."""
        try:
            yield
        except RuntimeError as error:
            if self.fabric.world_size == 1 or not _is_of_a_connection(error):
                raise
            kept = self._newest_checkpoint()
            remedy = f"Go on with fit(..., resume_from={str(kept)!r})." if kept else ""
            reason = str(error).strip().splitlines()[0]
            raise TrainingError(
                f"Another process is gone, or has not answered for {timeout:g} s, in epoch "
                f"{self.epoch + 1} after step {self.step}: {reason} {remedy}",
                self.history,
            ) from error

    def _is_unfinished(self) -> bool:
        return self.epoch < self.plan.num_epochs and self.history.status == "running"

    def _train_epoch(self, bar: Any, stop: "_Stop") -> bool:
        """Train on the remaining batches of this epoch; returns False if a signal stopped it."""
        self.learner.train()
        self.generator_states = self._generator_states()
        batches = self.data.epoch(self.generators[0], self.batch)
        factors = self.plan.factors(self.step, self.batches_per_epoch)
        for batch, factor in zip(self._fetched(batches, stop), factors, strict=False):
            if batch is None:
                return False
            self.train_step(batch, factor)
            bar.update()
            if self._is_stopped(stop):
                return False
            steps = None if self.checkpoints is None else self.checkpoints.steps
            if steps and self.step % steps == 0 and self.batch < self.batches_per_epoch:
                self.save()
        return True

    def _fetched(self, batches: Iterator[Batch], stop: "_Stop") -> Iterator[Batch | None]:
        """The batches; None if a loader fails after a signal, which ends its workers as well."""
        try:
            yield from batches
        except RuntimeError:
            if not stop.number or self.fabric.world_size > 1:
                raise
            yield None

    def _is_stopped(self, stop: "_Stop") -> bool:
        """Whether a signal has come to any process, so that all of them stop at the same step."""
        if self.fabric.world_size > 1:
            number = torch.tensor(stop.number, device=self.fabric.device)
            stop.number = int(self.fabric.all_reduce(number, reduce_op="max"))
        return stop.number > 0

    def train_step(self, batch: Batch, factor: float) -> None:
        """One step of the optimisers, with their learning rates times `factor`."""
        for optimizer in self.raw_optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
        for parameter in self.parameters:
            parameter.grad = None
        try:
            loss, terms, *seen = self.loss(*batch, self.data.num_data)
        except ValueError:  # distributions refuse numbers that are not finite, before the loss is
            with torch.no_grad(), pyro.validation_enabled(False), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._check_finite(float(self.loss(*batch, self.data.num_data)[0]), "loss")
            raise
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
        if seen:
            self.learner.after_step(*seen, len(batch[1]), self.data.num_rows, self.fabric)
        self.totals += terms
        self.step += 1
        self.batch += 1

    def _check_finite(self, value: float, name: str) -> None:
        if not math.isfinite(value):
            kept = self._newest_checkpoint()
            where = f" The last good checkpoint is {kept}." if kept else ""
            raise TrainingError(
                f"The {name} is {value} in epoch {self.epoch + 1}, step {self.step + 1}. "
                f"{self.learner.advice}{where}",
                self.history,
            )

    def _check_weights(self) -> None:
        """Raise if a weight is not finite, as after a last step whose loss still was."""
        for name, tensor in self._real_tensors():
            if name in self.finite and not is_finite(tensor):
                self._check_finite(float(tensor.detach().abs().sum()), f"sum of |{name}|")

    def _real_tensors(self) -> Iterator[tuple[str, Tensor]]:
        tensors = self.learner.state_dict().items()
        return ((name, tensor) for name, tensor in tensors if tensor.is_floating_point())

    def _finish_epoch(self) -> dict[str, float]:
        """Close the epoch: its row of the history, early stopping, checkpoint."""
        means = self.fabric.all_reduce(
            self.totals / self.data.epoch_weight, reduce_op="mean"
        ).tolist()
        self._check_finite(means[0], "loss")
        self.learner.after_epoch()
        row = self.learner.history_row(means, self.data.num_rows)
        factor = next(self.plan.factors(self.step - 1, self.batches_per_epoch))
        row["learning_rate"] = self.raw_optimizers[0].param_groups[0]["initial_lr"] * factor
        self.epoch += 1
        self.batch = 0
        self.totals.zero_()
        self.generator_states = self._generator_states()
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

    def _tell_interrupt(self, number: int, on_interrupt: str | None) -> None:
        """Raise, or say in words, that a signal has stopped the run, and how to go on."""
        cause = "Interrupted" if number == signal.SIGINT else "Stopped by SIGTERM"
        remedy = "Give `checkpoint_dir` to be able to go on from here."
        if self.history.status != "interrupted":
            remedy = "That was the last step, and training is finished."
        elif kept := self._newest_checkpoint():
            remedy = f"Go on with fit(..., resume_from={str(kept)!r})."
        message = f"{cause} after step {self.step}. {remedy}"
        if on_interrupt != "return" or number != signal.SIGINT:
            error: Any = KeyboardInterrupt(message)
            error.history = self.history
            raise error
        if self.fabric.is_global_zero:
            print(message, file=sys.stderr)

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
        # A mean over processes stays what it is if all of them go on from the mean so far.
        totals = self.fabric.all_reduce(self.totals.clone(), reduce_op="mean")
        rng_states = self.fabric.all_gather(torch.get_rng_state().to(self.fabric.device))
        if self.fabric.is_global_zero:
            states = optimizer_state(self.raw_optimizers)
            trainer = {f"optimizer.{name}": tensor for name, tensor in states.items()}
            trainer |= {f"best.{name}": tensor[0] for name, tensor in self.best.kept.items()}
            own = self.learner.progress_tensors()
            trainer |= {f"learner.{name}": tensor for name, tensor in own.items()}
            trainer |= {"totals": totals, "generator": self.generator_states[0]}
            for number, state in enumerate(self.generator_states[1:]):
                trainer[f"loader_generator.{number}"] = state
            trainer["rng"] = rng_states.reshape(self.fabric.world_size, -1)
            if self.fabric.device.type == "cuda":
                trainer["cuda_rng"] = torch.cuda.get_rng_state(self.fabric.device)
            progress = {
                "step": self.step,
                "epoch": self.epoch,
                "batch": self.batch,
                "rows": self.history.rows,
                "status": self.history.status,
                "best_epoch": self.history.best_epoch,
                "best_score": float(self.best.scores) if self.best.kept else math.inf,
                "num_data": self.data.num_rows,
                "data": self.fingerprint,
                "settings": self._settings(),
                "learner": self.learner.progress(),
            }
            path = self.checkpoints.directory / f"step-{self.step:09d}"
            config = self.learner.description() | {"trainer": progress}
            write_directory(path, config, weights, trainer)
            self.checkpoints.prune()
        self.fabric.barrier()

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What tells the data from others; looked at only if there are checkpoints."""
        return self.data.fingerprint()

    def resume(self, path: Path, newest: Newest | None = None) -> None:
        """Go on from a checkpoint: weights, optimisers, random state and history.

        `path` is a checkpoint or a directory of them, and `newest` what was read there, if it was
        read. All is checked before anything is changed. Newer checkpoints that are damaged are
        renamed, if this run writes to the same directory, so that they are not in its way.
        """
        size = sum(tensor.nbytes for tensor in self.learner.state_dict().values())
        newest = newest or Checkpoints.read_newest(path, MAX_BYTES + 16 * size)
        path, (config, tensors, trainer), damaged = newest
        assert trainer is not None
        self._check_same(path, config)
        self._check_data(path, config["trainer"], trainer)
        with blaming(path):
            self._restore(path, config["trainer"], tensors, trainer)
        if self.checkpoints and self.fabric.is_global_zero:
            for other in damaged:
                if other.parent.samefile(self.checkpoints.directory):
                    other.rename(other.with_name(f"damaged-{other.name}-{uuid.uuid4().hex[:8]}"))

    def _restore(
        self,
        path: Path,
        state: dict[str, Any],
        tensors: dict[str, Tensor],
        trainer: dict[str, Tensor],
    ) -> None:
        """Take over what was read, after all that can be wrong with it was looked at."""
        rng, totals = trainer["rng"][self.fabric.global_rank].clone(), trainer["totals"]
        names = ["generator", *(f"loader_generator.{i}" for i in range(len(self.generators) - 1))]
        saved = [trainer[name] for name in names if name in trainer]
        for generator, value in zip(self.generators, saved, strict=False):
            torch.Generator(generator.device).set_state(value)  # raises if it is not such a state
        torch.Generator().set_state(rng)
        own = {name: tensor.clone() for name, tensor in self.learner.state_dict().items()}
        best = _with_prefix(trainer, "best.") if state["best_epoch"] is not None else own
        finite = {k: (t.shape, t.dtype) for k, t in best.items() if is_finite(t)}
        if best is not own and finite != {k: (t.shape, t.dtype) for k, t in own.items()}:
            raise ValueError("the weights of the best epoch are not finite, or of another model")
        if totals.shape != self.totals.shape:
            raise ValueError(f"`totals` has shape {tuple(totals.shape)}")
        learner = _with_prefix(trainer, "learner.")
        self.learner.restore_progress(state.get("learner", {}), learner)
        load_optimizers(self.raw_optimizers, _with_prefix(trainer, "optimizer."))
        try:
            self.learner.load_state_dict(tensors)
        except RuntimeError as error:
            self.learner.load_state_dict(own)
            raise CheckpointError(f"{path}: is of another model or guide: {error}") from error
        self.step, self.epoch, self.batch = state["step"], state["epoch"], state["batch"]
        self.history.rows, self.history.best_epoch = state["rows"], state["best_epoch"]
        if state["status"] == "stopped early":
            self.history.status = "stopped early"
        if self.history.best_epoch is not None:
            self._load_best(best, state["best_score"])
        self.totals.copy_(totals)
        for generator, value in zip(self.generators, saved, strict=False):
            generator.set_state(value)
        torch.set_rng_state(rng)
        if "cuda_rng" in trainer and self.fabric.device.type == "cuda":
            torch.cuda.set_rng_state(trainer["cuda_rng"], self.fabric.device)

    def _load_best(self, tensors: dict[str, Tensor], score: float) -> None:
        best, epoch = self.best, self.history.best_epoch
        assert epoch is not None
        best.kept = {k: t.unsqueeze(0).to(self.fabric.device) for k, t in tensors.items()}
        best.scores = torch.tensor([[score]], dtype=torch.float64)
        best.epochs, best.last_epoch = torch.tensor([epoch]), self.epoch
        best.num_worse = self.epoch - epoch

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

    def _check_data(self, path: Path, state: dict[str, Any], trainer: dict[str, Tensor]) -> None:
        """Raise if the data or the generators of the loader are others; older files say neither."""
        then, now = state.get("data"), self.fingerprint
        if then is not None and (different := "; ".join(data_differences(then, now))):
            raise ValueError(
                f"`resume_from` ({path}) was made with other data ({different}). Use the same rows "
                "in the same order, and for fixed features the same network, or load the weights "
                "and start anew."
            )
        num_saved, number = (
            len(_with_prefix(trainer, "loader_generator.")),
            len(self.generators) - 1,
        )
        if num_saved != number and then is not None:
            raise ValueError(
                f"`resume_from` ({path}) was made with a loader that had {num_saved} generators of "
                f"its own; this one has {number}. Use the same loader, or start anew."
            )
        if num_saved != number:
            warnings.warn(
                f"{path}: is of an earlier version, which did not keep the generators of loaders. "
                "The run goes on with other batches than it would have had.",
                stacklevel=3,
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


def _is_of_a_connection(error: RuntimeError) -> bool:
    """Whether processes could not reach each other; gloo raises no class of its own for it."""
    words = ("gloo", "NCCL", "Connection", "Timed out")
    is_own = isinstance(error, torch.distributed.DistError)
    return is_own or (type(error) is RuntimeError and any(word in str(error) for word in words))


@dataclass
class _Stop:
    """The number of the signal that asks a run to stop, 0 for none, and when it came."""

    number: int = 0
    time: float = 0.0


@contextmanager
def _stop_signals(are_caught: bool) -> Iterator[_Stop]:
    """Take note of Ctrl-C and SIGTERM inside, so that no step is cut in half.

    A second Ctrl-C raises at once, unless it comes within a second: launchers of several processes
    repeat to them what the terminal has sent already. Signals that somebody else handles or ignores
    are left alone, and so are all of them outside the main thread.
    """
    stop = _Stop()

    def handle(number: int, frame: Any) -> None:
        if number == signal.SIGINT and stop.number and time.monotonic() > stop.time + 1:
            raise KeyboardInterrupt
        stop.number, stop.time = stop.number or number, stop.time or time.monotonic()

    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    is_main = threading.current_thread() is threading.main_thread()
    caught = [n for n, known in usual.items() if are_caught and signal.getsignal(n) is known]
    previous = {number: signal.signal(number, handle) for number in caught if is_main}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
