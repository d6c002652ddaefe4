"""`DAKHead`: the last layer of a network and its loss, for a training loop of one's own."""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
from pyro.infer import ELBO
from torch import Tensor, nn

from pyro_dak.additive.scaling import NoScaling, num_processes
from pyro_dak.inference.guides import (
    FullRankGuide,
    LowRankGuide,
    MeanFieldGuide,
    NaturalGuide,
    UnitBlockGuide,
)
from pyro_dak.inference.guides.base import check_guide
from pyro_dak.inference.guides.natural import RowSums
from pyro_dak.inference.natural import Gathering
from pyro_dak.inference.objectives import AnalyticELBO
from pyro_dak.model.dak import DAK
from pyro_dak.model.explaining import explaining
from pyro_dak.model.latent_sites import check_sites
from pyro_dak.model.likelihoods import CategoricalLikelihood, GaussianLikelihood, Likelihood
from pyro_dak.model.modes import evaluating, local_parameters, own_precision
from pyro_dak.prediction import ClassPrediction, Prediction, learn_novelty, predict
from pyro_dak.training.describe import set_up_guide
from pyro_dak.training.fit import build_objective
from pyro_dak.training.natural import NaturalLoss, are_finite, build_learner, over_processes
from pyro_dak.validation import (
    check_choice,
    check_has_values,
    check_integer,
    check_kind,
    check_tensor,
)

__all__ = ["DAKHead"]

_GUIDES: dict[str, Callable[[DAK], nn.Module]] = {
    "full_rank": FullRankGuide,
    "low_rank": LowRankGuide,
    "mean_field": MeanFieldGuide,
    "natural": NaturalGuide,
    "unit_block": UnitBlockGuide,
}
# What the head gives to DAK itself.
_OWN_OPTIONS = ("self", "feature_extractor", "feature_dim", "num_outputs", "likelihood")


class DAKHead(nn.Module):
    """A last layer with a posterior over its weights, and the loss that trains it.

    It stands in the place of a linear layer and a cross entropy, in any training loop:

        head = DAKHead(feature_dim, num_classes, num_data=len(dataset))
        loss = head.loss(backbone(x), y)  # in training
        prediction = head(backbone(x))  # probs, label, entropy; mean, std, interval

    It is a `DAK` on features, a guide of it, and the bound that `fit` maximises, and with the same
    batches and optimiser it gets the same weights. Autocast does not reach into it: its numbers
    keep the dtype of its parameters.

    **q of a natural guide** has no parameters for an optimiser. It learns by itself, between the
    step of the optimiser and whatever the head is asked next: a loss, a prediction, its state, eval
    mode. The rows of all losses that were differentiated since the last step, in training mode,
    count once each, so that gradients may be accumulated. Losses that are only looked at teach it
    nothing. As in `fit`, rows of a few small batches are gathered for one step; eval mode and the
    state have all of them in q, in one process.

    **Scaling.** In training mode each batch is scaled by its own statistics, as in batch
    normalisation, over all processes of `torch.distributed`. A batch in parts is then not the whole
    batch; after `freeze_statistics` it is.

    Args:
        feature_dim: width of the features.
        num_outputs: the number of classes, or of outputs with another likelihood.
        num_data: rows of the training set, for each of which the KL counts 1 / num_data.
        likelihood: observation model; the default is `CategoricalLikelihood()`.
        guide: "natural", "mean_field", "unit_block", "low_rank" or "full_rank", or a function from
            the model to a guide, such as `lambda model: NaturalGuide(model, "shared")`, which is
            for many classes.
        objective: an ELBO, or a name (see `build_objective`).
        compile: whether to compile the loss; where that fails, it warns and goes on without.
        is_synchronized: whether processes of `torch.distributed` share the statistics of the
            scaling and the steps of q; None is for yes, if there are several. Then all of them must
            take each training step.
        **options: options of `DAK`, such as `num_units`, `level`, `prior_scale`, `linear_term`.

    Attributes:
        model: the `DAK`, whose inputs are features.
        guide: its guide. `predict`, `calibrate`, `components` and `save` take both.
    """

    rows_seen: Tensor

    def __init__(
        self,
        feature_dim: int,
        num_outputs: int,
        *,
        num_data: int | None = None,
        likelihood: Likelihood | None = None,
        guide: str | Callable[[DAK], nn.Module] = "natural",
        objective: str | ELBO = "auto",
        compile: bool = False,
        is_synchronized: bool | None = None,
        **options: Any,
    ):
        super().__init__()
        _check_options(num_data, options)
        check_integer("num_outputs", num_outputs, minimum=1)
        likelihood = CategoricalLikelihood() if likelihood is None else likelihood
        if isinstance(likelihood, CategoricalLikelihood) and num_outputs == 1:
            raise ValueError(
                "`num_outputs` must be at least 2 for classes; got 1. For numbers pass "
                "`likelihood=GaussianLikelihood()`, for two classes with one function "
                "`likelihood=BernoulliLikelihood()`."
            )
        self.num_data: Any = num_data
        self.model = DAK(
            nn.Identity(), feature_dim, num_outputs=num_outputs, likelihood=likelihood, **options
        )
        self.model.scaling.is_synchronized = is_synchronized
        self.guide = _build_guide(guide, self.model)
        self.objective = build_objective(objective, self.model, self.guide)
        self.is_compiled = bool(compile)
        if isinstance(self.guide, NaturalGuide):
            likelihood.keep_noise_from_optimizers()
            self.register_buffer("rows_seen", torch.zeros((), dtype=torch.long))
        self._reset()

    def _reset(self) -> None:
        """Start without rows that wait for a step, by the state as it is now."""
        parts = (self.model, self.guide, self.objective)
        # For evaluations, which are not compiled, and for training steps; in a tuple, so that their
        # modules do not count twice.
        plain = build_learner(*parts)
        self._learners = (plain, build_learner(*parts, compile=True) if self.is_compiled else plain)
        self._has_warned: set[str] = set()
        self._forget_waiting()

    def _forget_waiting(self) -> None:
        """Let no rows wait, and count passes by the state."""
        self._waiting: list[_Batch] = []
        self._gathering = Gathering()
        count = self._buffers.get("rows_seen")
        if count is not None and not count.is_meta:
            self._gathering.passes = int(count) / self.num_data

    @torch.compiler.disable
    def forward(self, features: Tensor, **options: Any) -> Prediction | ClassPrediction:
        """The prediction at features `(N, feature_dim)`, in training mode too, without gradients.

        The options are those of `predict`.
        """
        self._catch_up()
        features = self._checked(features)
        with own_precision(features):
            return predict(self.model, self.guide, features, **({"progress": False} | options))

    @torch.compiler.disable
    def loss(self, features: Tensor, y: Tensor) -> Tensor:
        """Minus the bound of the evidence per datum, a scalar, from one batch.

        -1/B sum_rows E_q log p(y | f) + KL(q || prior) / num_data, a mean over the rows of the
        batch as `cross_entropy` has it.

        Args:
            features: features of the batch, `(B, feature_dim)`, with their gradient.
            y: labels `(B,)`, or targets `(B, num_outputs)`.
        """
        features, y = self._before_loss(features, y)
        learner, modules = self._learners[self._is_step()], (self.model, self.guide)
        is_traced = not isinstance(self.objective, AnalyticELBO)
        with (
            own_precision(features),
            explaining(self.model, features, y, guide=self.guide),
            local_parameters(*modules) if is_traced else nullcontext(),
        ):
            loss, _, *seen = learner(features, y, self.num_data / len(y), self.num_data)
        return self._after_loss(loss, len(y), *seen)

    def _is_step(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def _before_loss(self, features: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Take a step that is due, and see to it that the batch can be learned from."""
        self._catch_up()
        features = self._checked(features)
        check_tensor("y", y)
        num_rows = len(y) if y.dim() > 0 else 0
        if not 0 < num_rows <= self.num_data:
            raise ValueError(
                f"`y` must have at least one row, and at most num_data={self.num_data}, the rows "
                f"of the training set; got {num_rows}."
            )
        if isinstance(self.objective, AnalyticELBO):
            check_sites(self.model, features)
        scaling = self.model.scaling
        is_fixed = scaling.is_frozen or isinstance(scaling, NoScaling)
        if self._is_step() and self._waiting and not is_fixed:
            self._warn_once(
                "Gradients are accumulated over several batches, and each is scaled by its own "
                "statistics, so that the result is not that of one large batch. That does little "
                "harm if each has some dozens of rows; for the very gradient of the large batch "
                "call `head.freeze_statistics(features)` before, with the features of many rows."
            )
        return features, y.to(features.dtype) if y.is_floating_point() else y

    def _after_loss(self, loss: Tensor, num_rows: int, seen: Any = None) -> Tensor:
        """Let the batch wait for the step of q from the moment that its loss is differentiated."""
        if self.training and loss.requires_grad:
            sums, total = None, float(num_rows)
            if seen is not None:
                sums, total = over_processes(seen.sums, num_rows, self._processes())
            loss.register_hook(partial(self._let_wait, _Batch(sums, total)))
        return loss

    def _let_wait(self, batch: "_Batch", gradient: Tensor) -> None:
        """Called when a loss is differentiated."""
        if batch.is_known:
            return
        batch.is_known = True
        if learned := self._learned():
            batch.versions = [parameter._version for parameter in learned]
            batch.values = learned[0].detach().clone()
        self._waiting.append(batch)
        if batch.sums is not None and self._num_waiting() > self.num_data:
            self._warn_once(
                "More rows than the training set has waited for a step of q, because no optimiser "
                "moves the parameters of the head. Give it `head.parameters()`, or call "
                "`head.step()` after each of its steps."
            )

    def _num_waiting(self) -> float:
        return sum(batch.num_rows for batch in self._waiting)

    def _warn_once(self, message: str) -> None:
        if message not in self._has_warned:
            self._has_warned.add(message)
            warnings.warn(message, stacklevel=5)  # beyond what keeps the compiler out

    def _learned(self) -> list[Tensor]:
        """Parameters whose changes tell that an optimiser has taken a step."""
        embedding = self.model.embedding
        parameters: list[Tensor] = [self.model.layer.log_unit_scale]
        parameters += [] if embedding is None else [embedding.weight]
        return [parameter for parameter in parameters if parameter.requires_grad]

    def _is_due(self) -> bool:
        """Whether an optimiser has taken its step, or gradients were cleared, since rows wait.

        Some optimisers change values without a new version, and a rate of zero changes no values.
        More rows than the training set has do not wait longer.
        """
        learned, then = self._learned(), self._waiting[0]
        if self._num_waiting() > self.num_data:
            return True
        is_cleared = all(parameter.grad is None for parameter in learned)
        if is_cleared or [parameter._version for parameter in learned] != then.versions:
            return True
        return not torch.equal(learned[0], then.values)

    def step(self) -> None:
        """Let q learn from all rows whose losses were differentiated. The head does so in time.

        Call it after each step of an optimiser that has none of the head's parameters.
        """
        self._learn()
        self._take_gathered()

    def _catch_up(self) -> None:
        """Learn from the rows that wait, if an optimiser has taken its step since."""
        if self._waiting and self._is_due():
            self._learn()

    def _bring_up_to_date(self) -> None:
        """Let q have all rows of steps that were taken.

        Where processes train together, q may lack those of the last few batches until a pass ends:
        if one process alone reads its state, it must not take steps that others do not take.
        """
        self._catch_up()
        if self._processes().world_size == 1:
            self._take_gathered()

    def _learn(self) -> None:
        """Learn from the rows that wait, as from one batch."""
        waiting, self._waiting = self._waiting, []
        batches = [b for b in waiting if b.sums is not None and are_finite(b.sums)]
        if not batches:  # another guide, or numbers that overflowed, where optimisers skip too
            return
        sums, num_rows = batches[0].sums, batches[0].num_rows
        for batch in batches[1:]:
            sums, num_rows = sums.plus(batch.sums), num_rows + batch.num_rows
        guide: Any = self.guide
        self._gathering.add(self.model, guide, sums, num_rows, self.num_data)
        self._count_rows()

    def _take_gathered(self) -> None:
        """Take a step on rows that were gathered for one on several batches."""
        if isinstance(self.guide, NaturalGuide):
            self._gathering.step(self.model, self.guide)
            self._count_rows()

    def _count_rows(self) -> None:
        """Keep the passes of q in the state, as rows, so that a loaded head goes on alike."""
        count = round((self._gathering.passes or 0.0) * self.num_data)
        self._gathering.passes = count / self.num_data
        self.rows_seen.fill_(count)

    def freeze_statistics(self, features: Tensor | None = None, is_frozen: bool = True) -> None:
        """Fix the statistics by which features are scaled, so that each row is scaled by itself.

        Gradients accumulated over parts of a batch are then exactly those of the whole batch.

        Args:
            features: features of many rows, `(N, feature_dim)`, whose statistics are taken; by
                default the running statistics stay.
            is_frozen: False goes back to statistics of batches.
        """
        scaling = self.model.scaling
        if features is None and is_frozen and not bool(scaling.num_batches > 0):
            raise ValueError(
                "`features` must be given before the first step: there are no statistics yet."
            )
        if features is not None:
            self._take_statistics(self._checked(features).detach())
        scaling.is_frozen = bool(is_frozen)

    def finish(
        self,
        batches: Iterable[Any],
        network: Callable[[Any], Tensor] | None = None,
        *,
        final_pass: bool | None = None,
        novelty: bool = True,
    ) -> None:
        """Do at the end of training what `fit` does at its end.

        A natural guide takes its posterior from one more pass over all rows, so that it belongs to
        the final features, and the scaling its statistics. Then the head learns how training rows
        look, so that predictions say how strange other rows are. It is left in eval mode.

        Args:
            batches: batches (features, y) of all training rows, such as a list or a `DataLoader`,
                which is gone through several times. Of several processes each has its own rows.
            network: maps the first part of a batch to features, where it is not features itself;
                a module is called in eval mode.
            final_pass: whether a natural guide makes that pass; by default for
                `GaussianLikelihood`. For classes the average over the last passes of training
                predicted held-out rows better.
            novelty: whether to learn how training rows look, if there is one process.
        """
        self.step()
        self.eval()
        rows = _Rows(self, batches, network)
        learner, processes = self._learners[0], self._processes()
        if final_pass is None:
            final_pass = isinstance(self.model.likelihood, GaussianLikelihood)
        if final_pass and isinstance(learner, NaturalLoss):
            with self._synchronized():
                learner.renew(rows, processes, seed=0)
        if novelty and processes.world_size == 1:
            features = torch.cat([features for features, _, _ in rows.epoch()])
            learn_novelty(self.model, self.guide, features, progress=False)

    def train(self, mode: bool = True) -> "DAKHead":
        """Go into training mode, or into eval mode, in which q is up to date."""
        self._bring_up_to_date()
        return super().train(mode)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """The state, in which q is up to date."""
        self._bring_up_to_date()
        return super().state_dict(*arguments, **options)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Load weights; rows that waited for a step belonged to others."""
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self._forget_waiting()

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies, which share no rows that wait and no compiled code."""
        self._bring_up_to_date()
        own = ("_learners", "_waiting", "_has_warned", "_gathering")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset()

    def extra_repr(self) -> str:
        return f"num_data={self.num_data}"

    def _checked(self, features: Tensor) -> Tensor:
        """Features in the dtype of the head, or an error."""
        check_tensor("features", features)
        width = self.model.feature_dim
        if features.dim() != 2 or features.shape[-1] != width or not features.is_floating_point():
            raise ValueError(
                f"`features` must be floating-point numbers of shape (N, feature_dim={width}); got "
                f"{features.dtype} of shape {tuple(features.shape)}. Flatten or pool what the "
                "network returns, or set `feature_dim`."
            )
        like = self.model.layer.log_unit_scale
        if not like.is_meta:
            check_has_values("features", features)
        return features.to(like.dtype)

    def _take_statistics(self, features: Tensor) -> None:
        """Set the statistics of the scaling to those of these rows, over all processes."""
        scaling, seen = self.model.scaling, list[Tensor]()
        if isinstance(scaling, NoScaling):
            return
        hook = scaling.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            with evaluating(self.model), own_precision(features):
                self.model.unit_inputs(features)
        finally:
            hook.remove()
        with self._synchronized():
            scaling.take_statistics([scaling.part_statistics(seen[0])])

    @contextmanager
    def _synchronized(self) -> Iterator[None]:
        """Processes that train together share statistics inside, in eval mode too."""
        scaling = self.model.scaling
        before, scaling.is_synchronized = scaling.is_synchronized, self._processes().world_size > 1
        try:
            yield
        finally:
            scaling.is_synchronized = before

    def _processes(self) -> Any:
        """What learners ask of Lightning Fabric, from `torch.distributed`."""
        is_alone = self.model.scaling.is_synchronized is False
        world_size = 1 if is_alone else num_processes()
        return SimpleNamespace(
            device=self.model.layer.log_unit_scale.device,
            world_size=world_size,
            global_rank=0 if world_size == 1 else torch.distributed.get_rank(),
            all_reduce=_summed,
        )


class _Batch:
    """What a batch says about q, over all processes, and how many rows say it.

    `is_known` once its loss was differentiated, at these `versions` of the parameters of the head
    and these `values` of the first of them.
    """

    values: Tensor

    def __init__(self, sums: RowSums | None, num_rows: float):
        self.sums: Any = sums
        self.num_rows = num_rows
        self.is_known, self.versions = False, list[int]()


class _Rows:
    """All rows as batches of features, in the form that the pass at the end of `fit` takes."""

    generators: Sequence[torch.Generator] = ()

    def __init__(self, head: DAKHead, batches: Any, network: Any):
        if isinstance(batches, Tensor):
            raise TypeError("`batches` must be batches (features, y); got a Tensor.")
        check_kind("batches", batches, Iterable, "batches (features, y)")
        self.batches = [*batches] if isinstance(batches, Iterator) else batches
        self.head, self.network, self.num_rows = head, network, head.num_data

    def epoch(
        self, generator: torch.Generator | None = None, start: int = 0
    ) -> Iterator[tuple[Tensor, Tensor, float]]:
        """The batches in the order in which they come."""
        modules = [self.network] if isinstance(self.network, nn.Module) else []
        device = self.head.model.layer.log_unit_scale.device
        is_empty = True
        for batch in self.batches:
            is_empty = False
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise TypeError(
                    "every batch of `batches` must be a pair (features, y); got "
                    f"{type(batch).__name__}."
                )
            x, y = batch
            check_tensor("y of a batch", y)
            with evaluating(*modules):
                x = x.to(device) if isinstance(x, Tensor) else x
                features = self.head._checked(x if self.network is None else self.network(x))
            yield features, y.to(device), 1.0
        if is_empty:
            raise ValueError("`batches` yields no batch; give all training rows as (features, y).")


def _summed(value: Tensor, reduce_op: str = "sum") -> Tensor:
    """The sum over all processes."""
    assert reduce_op == "sum"
    total = value.clone()
    torch.distributed.all_reduce(total)
    return total


def _build_guide(guide: str | Callable[[DAK], nn.Module], model: DAK) -> Any:
    """The guide of this name, or what this function makes of the model."""
    if isinstance(guide, str):
        check_choice("guide", guide, _GUIDES)
        guide = _GUIDES[guide]
    check_kind("guide", guide, Callable, "a name, or a function from the model to a guide")
    with local_parameters():
        made = guide(model)
    like = model.layer.log_unit_scale
    if not like.is_meta:
        check_guide(model, made)
        set_up_guide(made, model, like.new_zeros(2, model.feature_dim))
    return made


def _check_options(num_data: Any, options: Mapping[str, Any]) -> None:
    if num_data is None:
        raise TypeError(
            "`num_data` must be given, the number of rows of the training set, such as "
            "`len(loader.dataset)`. The KL counts once for all of them; without their number, the "
            "bound of one batch would be taken for that of the data set."
        )
    check_integer("num_data", num_data, minimum=1)
    known = [name for name in inspect.signature(DAK).parameters if name not in _OWN_OPTIONS]
    for name in options:
        if name not in known:
            raise TypeError(f"`{name}` is no option of DAK; those are {', '.join(known)}.")
